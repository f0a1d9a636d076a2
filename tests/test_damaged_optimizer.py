"""`train --resume` from checkpoints whose optimizer is damaged: one line with file and field, and nothing is harmed.

Each of them once was a traceback out of the middle of the first step, or a line that named neither.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from cs336_systems.cli import app
from cs336_systems.distributed.checkpoint import load_checkpoint, save_checkpoint
from cs336_systems.distributed.checkpoint_storage import CheckpointError
from cs336_systems.distributed.launch import run_ranks

COVERS = ("cs336_systems/distributed", "cs336_systems/training")

OPTIONS = ["--context-length", "16", "--batch", "2", "--checkpoint-every", "2", "--device", "cpu"]
NEWEST = Path("checkpoints") / "step-00000004"
NEW_SCHEDULE = "note: steps was 4 and is 6: the learning rate follows the new schedule\n"
WEIGHT = "lm_head.weight"
Edit = Callable[[dict[str, Any], dict[str, Any]], Any]  # of the index and of progress.json


def resume(out: Path, *options: str):
    return CliRunner().invoke(app, ["train", *OPTIONS, "--steps", "6", "--out", str(out), "--resume", *options])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    result = CliRunner().invoke(app, ["train", *OPTIONS, "--steps", "4", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out


def copy(run: Path, to: Path, edit: Edit | None = None) -> Path:
    shutil.copytree(run, to)
    files = [to / NEWEST / name for name in ("index.json", "progress.json")]
    contents = [json.loads(file.read_text()) for file in files]
    if edit is not None:
        edit(*contents)
    for file, content in zip(files, contents):
        file.write_text(json.dumps(content))
    return to


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def states(index: dict[str, Any], ending: str) -> list[str]:
    return [name for name in index["tensors"] if name.startswith("optimizer.") and name.endswith(ending)]


def remove(ending: str) -> Edit:
    return lambda index, _: [index["tensors"].pop(name) for name in states(index, ending)]


def group(**changes: Any) -> Edit:
    return lambda _, progress: progress["optimizer"]["groups"][0].update(changes)


def scalars(of: dict[str, Any]) -> Edit:
    return lambda _, progress: progress["optimizer"].update(scalars={name: of for name in progress_names(progress)})


def progress_names(progress: dict[str, Any]) -> list[str]:
    return progress["optimizer"]["groups"][0]["names"]


def other_shape(index: dict[str, Any], _: dict[str, Any]) -> None:
    entry = index["tensors"][f"optimizer.{WEIGHT}.exp_avg"]
    entry |= {"size": [1, 1], "chunks": [entry["chunks"][0] | {"sizes": [1, 1], "offsets": [0, 0]}]}


def huge(index: dict[str, Any], _: dict[str, Any]) -> None:
    entry = index["tensors"][f"optimizer.{WEIGHT}.exp_avg"]
    chunk = entry["chunks"][0] | {"sizes": [2**40], "offsets": [0], "start": 0, "length": 2**62}
    entry |= {"size": [2**40], "chunks": [chunk]}


def short_generator(index: dict[str, Any], _: dict[str, Any]) -> None:
    entry = index["tensors"]["generator.cpu.0"]
    entry["size"] = entry["chunks"][0]["sizes"] = [8]


def unknown_state(index: dict[str, Any], _: dict[str, Any]) -> None:
    index["tensors"][f"optimizer.{WEIGHT}.more"] = index["tensors"][f"optimizer.{WEIGHT}.exp_avg"]


DAMAGES: list[tuple[str, Edit, str]] = [
    ("all states", remove(""), "index.json is damaged: it has no 'optimizer."),
    ("a moment", remove(".exp_avg_sq"), "exp_avg_sq'"),
    ("shape", other_shape, f"index.json has 'optimizer.{WEIGHT}.exp_avg' of shape (1, 1), the optimizer needs (256, "),
    ("size", huge, f"index.json: the index has {2**62} bytes from 0 on in "),
    ("unknown", unknown_state, f"index.json has 'optimizer.{WEIGHT}.more', which the optimizer has not"),
    ("generator", short_generator, "index.json has 'generator.cpu.0' of shape (8,) in torch.uint8, a generator's"),
    ("no scalars", lambda _, p: p["optimizer"].update(scalars={}), "progress.json is damaged: it has no 'optimizer."),
    ("empty scalars", scalars({}), ".step'"),
    ("text as step", scalars({"step": "x"}), ".step' is 'x'"),
    ("negative step", scalars({"step": -1}), ".step' is -1"),
    ("endless step", scalars({"step": 10**400}), ".step' is 1000"),
    ("no keys", lambda _, p: [p["optimizer"]["groups"][0].pop(k) for k in ("weight_decay", "eps")], "has no 'eps'"),
    ("betas", group(betas=5), "progress.json is damaged: 'betas' of parameter group 0 is 5"),
    ("one beta", group(betas=[0.9]), "'betas' of parameter group 0 is [0.9]"),
    ("wide betas", group(betas=[5, 2]), "AdamW cannot go on: betas must be two numbers in [0, 1), got (5, 2)"),
    ("eps", group(eps="x"), "progress.json is damaged: 'eps' of parameter group 0 is 'x'"),
    ("no eps", group(eps=0), "AdamW cannot go on: eps must be finite and positive, got 0"),
    ("weight decay", group(weight_decay=None), "'weight_decay' of parameter group 0 is None"),
    ("nan", group(weight_decay=float("nan")), "'weight_decay' of parameter group 0 is nan"),
    ("names", group(names=["a"]), "progress.json: the checkpoint's optimizer has other parameter groups"),
    ("no optimizer", lambda _, p: p.update(optimizer=None), "json: the checkpoint was saved without an optimizer"),
]


@pytest.mark.parametrize(("edit", "message"), [damage[1:] for damage in DAMAGES], ids=[name for name, *_ in DAMAGES])
def test_a_damaged_optimizer_is_refused_in_one_line(run: Path, tmp_path: Path, edit: Edit, message: str) -> None:
    out = copy(run, tmp_path / "run", edit)
    before = contents(out)
    result = resume(out)
    (line,) = result.stderr.strip().splitlines()
    assert result.exit_code == 2 and result.exception.__class__ is SystemExit
    assert line.startswith(f"error: {out / NEWEST}/") and message in line, line
    assert contents(out) == before


def test_a_whole_checkpoint_and_one_whose_parameters_had_no_gradients_resume(run: Path, tmp_path: Path) -> None:
    def never_stepped(index: dict[str, Any], progress: dict[str, Any]) -> None:
        remove("")(index, progress)
        progress["optimizer"]["scalars"] = {}

    for name, edit in (("whole", None), ("never stepped", never_stepped)):
        result = resume(copy(run, tmp_path / name, edit))
        assert result.exit_code == 0 and result.stderr == NEW_SCHEDULE, result.output


def test_a_damaged_loss_scale_is_refused_in_one_line(tmp_path: Path) -> None:
    out, half = tmp_path / "run", ["--autocast", "float16", "--steps", "2"]
    result = CliRunner().invoke(app, ["train", *OPTIONS, *half, "--out", str(out)])
    assert result.exit_code == 0, result.output
    file = out / "checkpoints" / "step-00000002" / "progress.json"
    written = json.loads(file.read_text())
    for damage in ({"value": "x", "good_steps": 0}, {"value": 8.0}, {"value": 8.0, "good_steps": -1}, [8.0], None):
        file.write_text(json.dumps(written | {"position": written["position"] | {"loss_scale": damage}}))
        result = resume(out, *half)
        (line,) = result.stderr.strip().splitlines()
        assert result.exit_code == 2 and line == f"error: {file} is damaged: loss_scale is {damage!r}"


@pytest.mark.parametrize("pipe", [False, True])
def test_an_incomplete_newest_checkpoint_is_told_and_renamed(run: Path, tmp_path: Path, pipe: bool) -> None:
    """It was passed over in silence, and the run died where it came to the same step."""
    out = copy(run, tmp_path / "run")
    (out / NEWEST / "progress.json").unlink()
    if pipe:
        os.mkfifo(out / NEWEST / "progress.json")
    result = resume(out)
    assert result.exit_code == 0, result.output
    line, note = result.stderr.splitlines(keepends=True)
    assert note == NEW_SCHEDULE
    assert line.startswith(f"note: {out / NEWEST} is incomplete (no file progress.json) and passed over")
    assert "the run goes on from step-00000002" in line and "renamed to step-00000004.incomplete" in line
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000004.incomplete", "step-00000006"]
    shutil.rmtree(out / "checkpoints")
    (out / NEWEST).mkdir(parents=True)
    assert "the run begins at step 0" in resume(out).stderr


def other_optimizers(rank: int, num_ranks: int, folder: str) -> None:
    """Of torch, and one that cannot be built from its settings: whole checkpoints load, others are refused."""
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
        "own": lambda p: Own("needed", p),
    }
    for name, make in makers.items():
        model = nn.Linear(3, 2)
        optimizer = make(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        path = save_checkpoint(Path(folder) / name, 2, model, optimizer)
        again = nn.Linear(3, 2)
        optimizer = make(again.parameters())
        load_checkpoint(path, again, optimizer)
        again(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        index = json.loads((path / "index.json").read_text())
        lost = [key for key in index["tensors"] if key.startswith("optimizer.weight.")][:1]
        if not lost or name == "own":
            continue
        del index["tensors"][lost[0]]
        (path / "index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=f"it has no '{lost[0]}'"):
            load_checkpoint(path, again, optimizer)


class Own(torch.optim.SGD):
    """Takes an argument that no setting has."""

    def __init__(self, needed: str, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.5)


def test_any_torch_optimizer_is_judged_by_what_it_keeps(tmp_path: Path) -> None:
    run_ranks(other_optimizers, 1, str(tmp_path))


class Picky(torch.optim.SGD):
    """Takes parameters of whole rows of three only, which have a mark."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel() % 3:
                raise RuntimeError(f"rows of three, got {tuple(parameter.shape)}")
            assert parameter.mark
        return super().step(closure)


class WithBytes(nn.Module):
    """A linear layer beside a frozen parameter that is no floating-point number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bytes = nn.Linear(3, 3), nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
        for parameter in self.parameters():
            parameter.mark = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def sound_checkpoints(rank: int, num_ranks: int, folder: str) -> None:
    ones, rows = torch.ones(1, 3), torch.tensor([1, 2])
    optim = torch.optim
    cases: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, list[Callable[[Any], optim.Optimizer]]]] = {
        "sparse": (lambda: nn.Embedding(4, 3, sparse=True), rows, [optim.SparseAdam] * 2),
        "bytes": (WithBytes, ones, [optim.AdamW] * 2),
        "picky": (WithBytes, ones, [lambda p: Picky(p, lr=0.1, momentum=0.9)] * 2),
        "foreach": (WithBytes, ones, [optim.AdamW, lambda p: optim.AdamW(p, foreach=True)]),
        "fused": (WithBytes, ones, [optim.AdamW, lambda p: optim.AdamW(p, fused=True)]),
        "momentum": (WithBytes, ones, [lambda p: optim.SGD(p, lr=0.1, momentum=0.9)] * 2),
    }
    for name, (make_model, inputs, makers) in cases.items():
        models = [make_model() for _ in makers]
        optimizers = [make(model.parameters()) for make, model in zip(makers, models)]
        models[0](inputs).sum().backward()
        optimizers[0].step()
        if name == "momentum":
            optimizers[0].param_groups[0]["momentum"] = 0.0
        path = save_checkpoint(Path(folder) / name, 1, models[0], optimizers[0])
        load_checkpoint(path, models[1], optimizers[1])
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
        for one, other in zip(*(model.parameters() for model in models)):
            torch.testing.assert_close(one, other, msg=name)


def test_no_sound_checkpoint_is_called_damaged(tmp_path: Path) -> None:
    """SparseAdam was, which takes no dense gradient, AdamW whose run now sets foreach or fused, a momentum ended."""
    run_ranks(sound_checkpoints, 1, str(tmp_path))
