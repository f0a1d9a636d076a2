"""Checkpoints: resumed on other numbers of ranks, atomic, and harmless where a file is hostile (D10, S1)."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cs336_systems.distributed import checkpoint
from cs336_systems.distributed.checkpoint import complete_checkpoints, load_checkpoint, passed_over, save_checkpoint
from cs336_systems.distributed.checkpoint_storage import CheckpointError
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.launch import RankError, run_ranks
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.model import AdamW
from tests.sharding_models import batch, part, seeded, token_loss, transformer

BOUND = 2e-5  # AdamW's first steps divide by the gradient's own size, so rounding of the mean shows


def build(wrapper: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(transformer, seed)
    if wrapper == "fsdp":
        model = FSDP(model)
        return model, AdamW(model.parameters(), lr=1e-3)
    if wrapper == "torch adamw":
        model = FSDP(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    if wrapper == "zero1":
        return model, Zero1Optimizer(model.parameters(), AdamW, lr=1e-3)
    return model, ShardedOptimizer(model.parameters(), AdamW, lr=1e-3)


def train(
    rank: int, num_ranks: int, wrapper: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> list[float]:
    """Losses of the whole batch, which every rank computes for a wrapper without averages."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        tokens, targets = batch(step)
        if wrapper != "sharded":
            tokens, targets = part(tokens, rank, num_ranks), part(targets, rank, num_ranks)
        loss = token_loss(model, tokens, targets)
        loss.backward()
        if isinstance(model, FSDP):
            model.finish_gradient_synchronization()
        optimizer.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / num_ranks)
    return losses


WRAPPERS = ("fsdp", "torch adamw", "zero1", "sharded")


def save_half_way(rank: int, num_ranks: int, folder: str) -> dict[str, list[float]]:
    """Train 3 steps, save, train 3 more; the losses of the latter. The learning rate has changed before."""
    found = {}
    for wrapper in WRAPPERS:
        model, optimizer = build(wrapper, 0)
        train(rank, num_ranks, wrapper, model, optimizer, range(2))
        optimizer.param_groups[0]["lr"] = 5e-3
        train(rank, num_ranks, wrapper, model, optimizer, range(2, 3))
        torch.manual_seed(100 + rank)
        save_checkpoint(Path(folder) / wrapper, 3, model, optimizer, position={"batch": 3})
        found[wrapper] = train(rank, num_ranks, wrapper, model, optimizer, range(3, 6))
    refuse_together(rank, Path(folder))
    return found


def refuse_together(rank: int, folder: Path) -> None:
    """What is wrong for one rank alone was refused by that one, and the others waited for it."""
    model, optimizer = build("sharded", 1)
    state = next(name for name, parameter in model.named_parameters() if optimizer.owners[parameter] == 1)

    def lose_state(index: dict[str, Any]) -> None:
        del index["tensors"][f"optimizer.{state}.exp_avg"]

    def shorten_generator(index: dict[str, Any]) -> None:
        entry = index["tensors"]["generator.cpu.1"]
        entry["size"] = entry["chunks"][0]["sizes"] = [8]

    for change, message in (
        (lose_state, f"it has no 'optimizer.{state}.exp_avg'"),
        (shorten_generator, "cpu.1' of shape"),
    ):
        damaged = folder / change.__name__
        if rank == 0:
            shutil.copytree(folder / "sharded" / "step-00000003", damaged)
            index = json.loads((damaged / "index.json").read_text())
            change(index)
            (damaged / "index.json").write_text(json.dumps(index))
        torch.distributed.barrier()
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(damaged, model, optimizer)


def resume(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for wrapper in WRAPPERS:
        model, optimizer = build(wrapper, 1)
        progress = load_checkpoint(Path(folder) / wrapper, model, optimizer)
        assert (progress.step, progress.position, progress.num_ranks) == (3, {"batch": 3}, 2)
        assert optimizer.param_groups[0]["lr"] == 5e-3 and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        found["generator"] = torch.initial_seed(), torch.rand(1).item()
        found[wrapper] = train(rank, num_ranks, wrapper, model, optimizer, range(3, 6))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(save_half_way, 2, str(folder))[0]


@pytest.mark.parametrize("num_ranks", [1, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))])
def test_a_checkpoint_of_two_ranks_resumes_the_same_trajectory(saved, num_ranks):
    folder, expected = saved
    for rank, found in enumerate(run_ranks(resume, num_ranks, str(folder))):
        torch.manual_seed(100 + rank % 2)
        assert found["generator"][1] == torch.rand(1).item()
        for wrapper in WRAPPERS:
            differences = [abs(a - b) for a, b in zip(found[wrapper], expected[wrapper])]
            assert len(differences) == 3 and max(differences) <= BOUND, wrapper


def die_while_saving(rank: int, num_ranks: int, folder: str) -> None:
    model, optimizer = build("fsdp", 0)
    save_checkpoint(folder, 1, model, optimizer)
    if rank == 1:  # after its files are written, before the checkpoint is complete

        def die(*args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        checkpoint.dcp.save = die  # type: ignore[assignment]
    save_checkpoint(folder, 2, model, optimizer)


def save_again(rank: int, num_ranks: int, folder: str) -> int:
    model, optimizer = build("fsdp", 5)
    step = load_checkpoint(folder, model, optimizer).step
    for step_to_save in (2, 3, 4):
        save_checkpoint(folder, step_to_save, model, optimizer, keep=2)
    with pytest.raises(FileExistsError, match="step-00000004 exists"):
        save_checkpoint(folder, 4, model)
    return step


@pytest.mark.slow
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises(RankError, match="rank 1 of 2 died .signal SIGKILL."):
        run_ranks(die_while_saving, 2, str(tmp_path), timeout_s=60)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000001"]
    assert [path.name for path in tmp_path.glob(".step-*")] == [".step-00000002.partial"]
    assert run_ranks(save_again, 1, str(tmp_path)) == [1]
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    assert not list(tmp_path.glob(".step-*"))


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def weight_in(index: dict[str, Any]) -> dict[str, Any]:
    return index["tensors"]["model.lm_head.weight"]


# What loaded in part, or not at all, without a word: the weights stayed as they were.
WRONG_IN_INDEX = [
    (lambda entry: entry.update(chunks=[]), r"has 0 elements of 'model.lm_head.weight', whose shape is \(23, 16\)"),
    (lambda entry: entry["chunks"].pop(), "elements of 'model.lm_head.weight', whose shape is"),
    (lambda entry: entry["chunks"][1].update(offsets=[0, 0]), "elements of 'model.lm_head.weight', whose shape is"),
    (lambda entry: entry["chunks"][0].update(sizes=[1, 1]), "elements of 'model.lm_head.weight', whose shape is"),
    (lambda entry: entry["chunks"][0].update(offsets=[23, 0]), r"at \(23, 0\) of 'model.lm_head.weight', whose shape"),
    (lambda entry: entry["chunks"][0].update(offsets=[0]), r"at \(0,\) of 'model.lm_head.weight', whose shape"),
    (lambda entry: entry["chunks"][0].update(length=8), r"has 8 bytes for \(.*, 16\) of 'model.lm_head.weight'"),
    (lambda entry: entry["chunks"][0].update(length=2**70), "where sizes must be"),
    (lambda entry: entry["chunks"][0].update(length=2**62), "json: the index has 46.* bytes from .* the file has"),
    (lambda entry: entry["chunks"][0].update(start=2**40), "bytes from 1099511627776 on in .*distcp of 'model.lm_head"),
    (lambda entry: entry["chunks"][0].update(file="a\0b"), "is no file of the checkpoint's own folder"),
    (lambda entry: entry["chunks"][0].update(file="\ud800"), "is no file of the checkpoint's own folder"),
]
# What ended in a traceback of another error, or in a step that no run can be at.
WRONG_IN_PROGRESS = [
    ({"step": -5}, "step"), ({"step": 1.5}, "step"), ({"step": float("inf")}, "step"), ({"step": True}, "step"),
    ({"num_ranks": 0}, "num_ranks"), ({"num_ranks": float("inf")}, "num_ranks"), ({"position": [1]}, "position"),
    ({"optimizer": 5}, "optimizer"), ({"optimizer": {}}, "optimizer"),
    ({"optimizer": {"groups": [], "scalars": [1]}}, "optimizer"),
    ({"optimizer": {"groups": [], "scalars": {"weight": 5}}}, "optimizer"),
    ({"optimizer": {"groups": 5, "scalars": {}}}, "optimizer"),
    ({"optimizer": {"groups": [{"lr": 1}], "scalars": {}}}, "optimizer"),
]  # fmt: skip


def read_damaged(rank: int, num_ranks: int, folder: str, trap: str) -> None:
    good = Path(folder) / "fsdp" / "step-00000003"

    def damaged(name: str) -> Path:
        path = Path(folder) / name
        shutil.copytree(good, path)
        return path

    def refused(path: Path, message: str, model: nn.Module | None = None) -> None:
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, model or FSDP(seeded(transformer)))

    def edited(name: str, file: str, edit: Any) -> Path:
        path = damaged(name)
        content = json.loads((path / file).read_text())
        edit(content)
        (path / file).write_text(json.dumps(content))
        return path

    refused(Path(folder) / "nothing", "holds no complete checkpoint")
    hostile = damaged("hostile")
    torch.save(Payload(trap), hostile / "hostile.distcp")
    index = json.loads((hostile / "index.json").read_text())
    for chunk in index["tensors"]["model.lm_head.weight"]["chunks"]:
        size = (hostile / "hostile.distcp").stat().st_size
        chunk |= {"file": "hostile.distcp", "start": 0, "length": size}
    (hostile / "index.json").write_text(json.dumps(index))
    refused(hostile, "cannot be read: rank 0: UnpicklingError: Weights only load failed")
    cut = damaged("cut")
    for file in cut.glob("*.distcp"):
        os.truncate(file, 1000)
    refused(cut, "index.json: the index has .* bytes from .* on in .*distcp of .*, the file has 1000")
    for number, file in enumerate(("index.json", Path(next(good.glob("*.distcp"))).name)):
        piped = damaged(f"pipe-{number}")
        (piped / file).unlink()
        os.mkfifo(piped / file)
        refused(piped, f"{file} is no regular file")
    gone = damaged("gone")
    for path in gone.glob("*.distcp"):
        path.unlink()
    refused(gone, "distcp is missing: the checkpoint is not complete")
    refused(edited("outside", "index.json", _point_outside), "is no file of the checkpoint's own folder")
    refused(edited("format", "index.json", lambda index: index.update(format=9)), "has format 9, this code reads 1")
    refused(edited("sizes", "index.json", _negative_size), "where sizes must be")
    refused(edited("keys", "index.json", lambda index: index.pop("tensors")), "is no index of a checkpoint")
    refused(edited("progress", "progress.json", lambda content: content.pop("step")), "progress.json is damaged")
    for number, (edit, message) in enumerate(WRONG_IN_INDEX):
        refused(edited(f"index-{number}", "index.json", lambda index, edit=edit: edit(weight_in(index))), message)
    for number, (change, name) in enumerate(WRONG_IN_PROGRESS):
        changed = edited(f"progress-{number}", "progress.json", lambda content, change=change: content.update(change))
        refused(changed, f"progress.json is damaged: {name} is ")
    truncated = damaged("truncated")
    (truncated / "index.json").write_text('{"format": 1, "tens')
    refused(truncated, "index.json is damaged")
    listed = damaged("list")
    (listed / "index.json").write_text("[]")
    refused(listed, "must hold a JSON object, got list")
    incomplete = damaged("incomplete")
    (incomplete / "index.json").unlink()
    refused(incomplete, "index.json is missing: the checkpoint is not complete")
    refused(good, "has no 'model.weight': it is of another model", FSDP(nn.Linear(3, 3)))
    fewer = edited("shape", "index.json", _other_shape)
    refused(fewer, r"has 'model.lm_head.weight' of shape \(9, 16\), the model needs \(23, 16\)")
    model, optimizer = build("fsdp", 0)
    split = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    with pytest.raises(CheckpointError, match="the checkpoint's optimizer has other parameter groups"):
        load_checkpoint(good, model, split)
    save_checkpoint(Path(folder) / "bare", 0, model)
    with pytest.raises(CheckpointError, match="the checkpoint was saved without an optimizer"):
        load_checkpoint(Path(folder) / "bare", model, optimizer)
    for options, message in (
        ({"step": -1}, "step must not be negative, got -1"),
        ({"step": 1, "keep": 0}, "keep must be at least 1, got 0"),
        ({"step": 1, "position": {"at": {1}}}, "position must be JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            save_checkpoint(Path(folder) / "bad", model=model, **options)  # type: ignore[arg-type]


def _point_outside(index: dict[str, Any]) -> None:
    index["tensors"]["model.lm_head.weight"]["chunks"][0]["file"] = "../../secret"


def _negative_size(index: dict[str, Any]) -> None:
    index["tensors"]["model.lm_head.weight"]["size"] = [-1, 2]


def _other_shape(index: dict[str, Any]) -> None:
    entry = weight_in(index)
    entry |= {"size": [9, 16], "chunks": [entry["chunks"][0] | {"sizes": [9, 16]}]}


def test_an_incomplete_checkpoint_is_renamed_when_its_step_is_saved_again(tmp_path):
    run_ranks(save_over_incomplete, 1, str(tmp_path))


def save_over_incomplete(rank: int, num_ranks: int, folder: str) -> None:
    model, newest = nn.Linear(2, 2), Path(folder) / "step-00000002"
    save_checkpoint(folder, 1, model)
    for name in ("step-00000002.incomplete", "step-00000002.incomplete-2"):
        save_checkpoint(folder, 2, model)
        (newest / "progress.json").unlink()
        if name.endswith("-2"):
            os.mkfifo(newest / "progress.json")
        assert [path.name for path in complete_checkpoints(folder)] == ["step-00000001"]
        assert passed_over(folder) == [newest]
        save_checkpoint(folder, 2, model)
        assert (newest / "progress.json").is_file() and passed_over(folder) == []
        assert (Path(folder) / name / "index.json").is_file()
        assert not (Path(folder) / name / "progress.json").is_file()
        shutil.rmtree(newest)


def test_a_process_killed_while_it_removes_an_old_checkpoint_leaves_no_half_of_it(tmp_path):
    """It left a folder of its step: complete without its tensors, or incomplete and there for good."""
    run_ranks(stop_while_removing, 1, str(tmp_path))


def stop_while_removing(rank: int, num_ranks: int, folder: str) -> None:
    class Killed(BaseException):
        pass

    def remove_a_part(path: Path) -> None:
        next(Path(path).glob("*.distcp")).unlink()
        raise Killed

    model = nn.Linear(2, 2)
    save_checkpoint(folder, 1, model, keep=1)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpoint.shutil, "rmtree", remove_a_part)
        save_checkpoint(folder, 2, model, keep=1)
    assert [path.name for path in complete_checkpoints(folder)] == ["step-00000002"]
    save_checkpoint(folder, 3, model, keep=2)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["step-00000002", "step-00000003"]


def test_damaged_and_hostile_checkpoints_are_refused_and_nothing_of_them_runs(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    run_ranks(read_damaged, 1, str(folder), str(tmp_path / "trap"))
    assert not (tmp_path / "trap").exists()
