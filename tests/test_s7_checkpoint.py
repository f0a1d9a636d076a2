"""Checkpoints: on other numbers of ranks, atomic, checked, harmless where a file is hostile (D10,
D15, D16, S1).
"""

from __future__ import annotations

import builtins
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)

from cs336_systems.distributed import FSDP, OverlapDDP, checkpoint
from cs336_systems.distributed.checkpoint import (
    CheckpointError,
    checkpoints,
    folder_lock,
    load_checkpoint,
    save_checkpoint,
    write_index,
)
from cs336_systems.distributed.fsdp.wrapper import gather_full_params, plain_name
from cs336_systems.distributed.spawn import RankError, run_ranks
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.model import AdamW
from tests.module_kinds import Net, tie
from tests.one_job import run_alone
from tests.sharding_models import finish, seeded, shard

COVERS = ("cs336_systems/distributed", "tests/one_job.py")

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"momentum": 0.9}),
    "adam": (Adam, {"amsgrad": True}),
    "adagrad": (Adagrad, {}),
    "adadelta": (Adadelta, {}),
    "adamax": (Adamax, {}),
    "nadam": (NAdam, {}),
    "radam": (RAdam, {}),
    "rmsprop": (RMSprop, {"centered": True}),
    "rprop": (Rprop, {}),
    "adafactor": (Adafactor, {}),
    "torch's adamw": (torch.optim.AdamW, {}),
    "our adamw": (AdamW, {}),
}
SCHEMES = ("fsdp", "zero1", "sharded")


def gated() -> nn.Module:
    """A 0-d parameter, a layer that steps may leave out, a tied weight, a buffer; five rows, which
    no ranks divide.
    """

    def run(model: Any, x: Tensor, all_of_it: bool) -> Tensor:
        x = model.tied(torch.tanh(model.used(x * model.scale))) + model.offset
        return model.sometimes(x) if all_of_it else x

    layers = {name: nn.Linear(5, 5) for name in ("used", "sometimes", "tied")}
    scale, offset = nn.Parameter(torch.tensor(1.5)), nn.Buffer(torch.arange(5.0))
    return tie(Net(run, scale=scale, offset=offset, **layers), to="tied", from_="used")


def build(scheme: str, name: str, seed: int) -> tuple[nn.Module, Any]:
    kind, options = OPTIMIZERS[name]
    return shard(scheme, seeded(gated, seed), kind, lr=0.01, **options)


def train(model: nn.Module, optimizer: Any, uses: tuple[bool, ...]) -> list[float]:
    losses = []
    for all_of_it in uses:
        optimizer.zero_grad()
        loss = model(torch.arange(10.0).view(2, 5) / 10, all_of_it).square().mean()
        loss.backward()
        finish(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_half_way(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Train 2 steps, save, train 2 more; the losses of the latter. The learning rate has changed
    before.
    """
    found: dict[str, Any] = {}
    for scheme in SCHEMES:
        for name in OPTIMIZERS:
            path = Path(folder) / f"{scheme}-{name}"
            try:
                model, optimizer = build(scheme, name, 0)
                train(model, optimizer, (False,))
                optimizer.param_groups[0]["lr"] = 5e-3
                train(model, optimizer, (False,))
                torch.manual_seed(100 + rank)
                save_checkpoint(
                    path, 2, model, optimizer, position={"batch": 3, "seen": {10: 1, 9: 2}}
                )
                found[path.name] = train(model, optimizer, (True, True))
            except ValueError as refused:
                found[path.name] = str(refused)
    low, optimizer = shard("zero1", nn.Linear(4, 4).bfloat16(), SGD, lr=1e-3)
    save_checkpoint(Path(folder) / "low", 0, low, move_down(low, optimizer, 3))
    found["low"] = [parameter.tolist() for parameter in move_down(low, optimizer, 5).parameters]
    refuse_together(rank, Path(folder))
    return found


def move_down(model: nn.Module, optimizer: Zero1Optimizer, steps: int) -> Zero1Optimizer:
    """Steps that are too small, one by one, for bfloat16."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    return optimizer


def refuse_together(rank: int, folder: Path) -> None:
    """What is wrong for one rank alone was refused by that one, and the others waited for it."""
    model, optimizer = build("sharded", "our adamw", 1)
    state = next(
        name
        for name, parameter in model.module.named_parameters()
        if optimizer.owners[parameter] == 1
    )
    damaged = folder / "one rank"
    if rank == 0:
        shutil.copytree(folder / "sharded-our adamw" / "step-00000002", damaged)
        chunk = content_of(damaged)["tensors"][f"optimizer.{state}.exp_avg"]["chunks"][0]
        flip(damaged / chunk["file"], 8 * chunk["start"])
    torch.distributed.barrier()
    with pytest.raises(
        CheckpointError, match=f"is damaged: 'optimizer.{state}.exp_avg' at .* has another checksum"
    ):
        load_checkpoint(damaged, model, optimizer)
    with pytest.raises(FileExistsError, match="step-00000002 exists"):
        save_checkpoint(folder / "sharded-our adamw", 2, model)


def resume(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(path for scheme in SCHEMES for path in Path(folder).glob(f"{scheme}-*")):
        model, optimizer = build(*path.name.split("-"), 1)
        progress = load_checkpoint(path, model, optimizer)
        # JSON's keys are strings; sorted as numbers when they were written, they had another
        # checksum.
        assert (progress.step, progress.position) == (2, {"batch": 3, "seen": {"10": 1, "9": 2}})
        assert optimizer.param_groups[0]["lr"] == 5e-3
        found["generator"] = torch.rand(1).item()
        found[path.name] = train(model, optimizer, (True, True))
    low, optimizer = shard("zero1", nn.Linear(4, 4).bfloat16(), SGD, lr=1e-3)
    load_checkpoint(Path(folder) / "low", low, optimizer)
    found["low"] = [parameter.tolist() for parameter in move_down(low, optimizer, 5).parameters]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(save_half_way, 2, str(folder))[0]


@pytest.mark.parametrize(
    "num_ranks", [1, 3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))]
)
def test_D10_a_checkpoint_of_two_ranks_resumes_the_same_trajectory(saved, num_ranks):
    folder, expected = saved
    results = (
        [run_alone(resume, str(folder))]
        if num_ranks == 1
        else run_ranks(resume, num_ranks, str(folder))
    )
    for rank, found in enumerate(results):
        torch.manual_seed(100 + rank % 2)
        assert found["generator"] == torch.rand(1).item()
        cells = [name for name in found if "-" in name]
        assert len(cells) == 3 * len(OPTIMIZERS) - 2  # two are refused
        for name in cells:
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name
        assert found["low"] == expected["low"]  # to the bit: the float32 masters are saved


def test_D16_an_optimizer_that_cannot_be_cut_is_refused_by_name(saved):
    """FSDP saved Adafactor's sums over rows as if they were whole: a resume went on wrongly, or
    died (D16).
    """
    refused = {name: text for name, text in saved[1].items() if isinstance(text, str)}
    assert refused.keys() == {"fsdp-adafactor", "zero1-adafactor"}
    for text in refused.values():
        assert text.startswith(
            "Adafactor does not update a weight element by element, so it and its state cannot be"
        )


# Killed, full, in use


def die_while_saving(rank: int, num_ranks: int, folder: str) -> None:
    model, optimizer = build("fsdp", "our adamw", 0)
    save_checkpoint(folder, 1, model, optimizer)
    if rank == 0:  # when all files are written, before the checkpoint has its name

        def die(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        checkpoint.write_index = die  # type: ignore[assignment]
    save_checkpoint(folder, 2, model, optimizer)


@pytest.mark.slow
def test_D10_a_rank_killed_while_saving_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises(RankError, match="rank 0 of 2 died .signal SIGKILL."):
        run_ranks(die_while_saving, 2, str(tmp_path), timeout_s=60)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]
    assert [path.name for path in tmp_path.glob(".step-*")] == [".step-00000002.partial"]
    model = nn.Linear(2, 2)
    for step in (2, 3, 4):
        save_checkpoint(tmp_path, step, model, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    assert not list(tmp_path.glob(".step-*"))


def test_D10_a_process_killed_while_it_removes_a_checkpoint_leaves_no_half_of_it(
    tmp_path, monkeypatch
):
    """It left a folder of its step: complete without its tensors."""

    class Killed(BaseException):
        pass

    def remove_a_part(path: Path, **_: Any) -> None:
        for file in Path(path).glob("*.bin"):
            file.unlink()
            raise Killed

    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, 1, model, keep=1)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpoint.shutil, "rmtree", remove_a_part)
        save_checkpoint(tmp_path, 2, model, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002"]
    save_checkpoint(tmp_path, 3, model, keep=2)
    assert sorted(path.name for path in tmp_path.glob("*step*")) == [
        "step-00000002",
        "step-00000003",
    ]


def full_for_data(path: Path, mode: str) -> Any:
    return builtins.open("/dev/full" if mode == "xb" else path, mode.replace("x", "w"))


def test_D15_a_full_disk_is_told_in_one_line_and_the_checkpoint_before_stays(tmp_path, monkeypatch):
    """D15: 88 lines did not say it."""
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, 1, model)
    before = model.weight.detach().clone()
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "open", full_for_data, raising=False)
        with pytest.raises(OSError) as told:
            save_checkpoint(tmp_path, 2, model)
    assert str(told.value) == f"[Errno 28] No space left on device: '{tmp_path}'"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001"]
    nn.init.zeros_(model.weight)
    assert load_checkpoint(tmp_path, model).step == 1 and torch.equal(model.weight, before)


def test_D15_a_folder_that_somebody_saves_into_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, 1, model)
    (tmp_path / ".step-00000002.partial").mkdir()
    with folder_lock(tmp_path), pytest.raises(CheckpointError, match="is in use by another run"):
        save_checkpoint(tmp_path, 2, model)
    assert (tmp_path / ".step-00000002.partial").exists()  # the other one's
    save_checkpoint(tmp_path, 2, model)
    assert not (tmp_path / ".step-00000002.partial").exists()


# Damaged and hostile


def content_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "index.json").read_text())["content"]


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_D15_every_flipped_bit_is_refused_by_the_name_of_its_file(tmp_path):
    """D15: of 150, 110 loaded and gave wrong values in silence."""
    model = seeded(gated)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, (True,))
    path = save_checkpoint(tmp_path / "good", 1, model, optimizer)
    generator = random.Random(0)
    for number in range(60):
        damaged = tmp_path / str(number)
        shutil.copytree(path, damaged)
        file = generator.choice(sorted(damaged.iterdir()))
        flip(file, generator.randrange(8 * file.stat().st_size))
        with pytest.raises(CheckpointError, match=f"{file} is damaged: "):
            load_checkpoint(damaged, model, optimizer)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


# of the content, and of the entry of one weight
Edit = Callable[[dict[str, Any], dict[str, Any]], object]

# A hostile index has the right checksum. None of these may leave the folder, take memory or wait
# for ever.
HOSTILE: list[tuple[Edit, str]] = [
    (
        lambda content, weight: weight.update(chunks=[]),
        "its chunks of 'model.used.weight' have 0 elements, and its",
    ),
    (
        lambda content, weight: weight["chunks"][0].update(file="../../secret"),
        r"matching regex .* - at .*file",
    ),
    (
        lambda content, weight: weight["chunks"][0].update(file="rank-7.bin"),
        "rank-7.bin is missing or no regular file",
    ),
    (
        lambda content, weight: weight["chunks"][0].update(start=2**40),
        "rank-0.bin has not the bytes of 'model.used.we",
    ),
    (
        lambda content, weight: weight["chunks"][0].update(sizes=[2**40, 5], length=20 * 2**40),
        r"a chunk of 'model.used.weight' lies outside of its shape \(5, 5\)",
    ),
    (
        lambda content, weight: weight["chunks"][0].update(sizes=[25], starts=[0]),
        "lies outside of its shape",
    ),
    (
        lambda content, weight: weight["chunks"].append(weight["chunks"][0]),
        "two chunks of 'model.used.weight' overlap",
    ),
    (lambda content, weight: weight.update(dtype="float64"), "has not the bytes of"),
    (lambda content, weight: weight.update(size=[-1, 5]), r"Expected `int` >= 0 - at .*size"),
    (lambda content, weight: weight.update(size="x"), "is damaged: "),
    (
        lambda content, weight: weight["chunks"][0].update(sizes=[4.0, 5]),
        "is damaged: Expected `int`, got `float`",
    ),
    (
        lambda content, weight: weight["chunks"][0].update(start=-8),
        "is damaged: Expected `int` >= 0",
    ),
    (
        lambda content, weight: content.update(num_ranks=0),
        "is damaged: Expected `int` >= 1 - at .*num_ranks",
    ),
    (
        lambda content, weight: content.update(optimizer={"kind": "SGD"}),
        "missing required field `groups`",
    ),
    *(
        (
            lambda content, weight, name=name: content.pop(name),
            f"is damaged: Object missing required field `{name}`",
        )
        for name in ("tensors", "step", "position", "num_ranks", "optimizer")
    ),
]


def test_a_checkpoint_of_the_format_before_is_read(tmp_path):
    """Its chunks are rows, by "first" and "rows"."""
    saved = seeded(gated, 0)
    path = save_checkpoint(tmp_path, 1, saved)
    content = content_of(path)
    for entry in content["tensors"].values():
        for chunk in entry["chunks"]:
            starts, sizes = chunk.pop("starts"), chunk.pop("sizes")
            chunk |= {"first": starts[0] if starts else 0, "rows": sizes[0] if sizes else 1}
    index = json.loads((path / "index.json").read_text())
    write_index(path / "index.json", content)
    sealed = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps({**sealed, "format": 3}))
    assert index["format"] == 4

    model = seeded(gated, 1)
    load_checkpoint(path, model)
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_damaged_and_hostile_checkpoints_are_refused_and_nothing_of_them_runs(tmp_path):
    model = seeded(gated)
    good = save_checkpoint(tmp_path / "good", 1, model)
    trap = tmp_path / "trap"

    def refused(path: Path, message: str, *objects: Any) -> None:
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, *(objects or (model,)))

    def copy(name: str) -> Path:
        shutil.copytree(good, tmp_path / name)
        return tmp_path / name

    for number, (edit, message) in enumerate(HOSTILE):
        path, content = copy(f"hostile-{number}"), content_of(good)
        edit(content, content["tensors"]["model.used.weight"])
        write_index(path / "index.json", content)
        refused(path, message)
    pickled = copy("pickle")
    for file in pickled.iterdir():
        torch.save(Payload(str(trap)), file)
    refused(pickled, "index.json is damaged: ")
    for number, name in enumerate(("index.json", "rank-0.bin")):
        piped = copy(f"pipe-{number}")
        (piped / name).unlink()
        os.mkfifo(piped / name)
        refused(piped, f"{name} is missing or no regular file")
    cut = copy("cut")
    os.truncate(cut / "rank-0.bin", 100)
    refused(cut, "index.json is damaged: rank-0.bin has not the bytes of .*: it is cut off")
    old = copy("old")
    (old / "index.json").write_text('{"format": 1, "tensors": {}}')
    refused(old, "it has format 1, this code reads 3 and 4")
    for number, text in enumerate(("[]", '{"format": 3, "crc', "[" * 100_000)):
        path = copy(f"text-{number}")
        (path / "index.json").write_text(text)
        refused(path, "index.json is damaged: ")
    refused(tmp_path / "nothing", "holds no complete checkpoint")
    assert not trap.exists()

    # Sound ones of others
    refused(good, "has no 'model.weight', which the model needs", nn.Linear(3, 3))
    wider = seeded(gated)
    wider.used = nn.Linear(5, 6)
    refused(good, r"has 'model.used.weight' of shape \(5, 5\), the model needs \(6, 5\)", wider)
    optimizer = AdamW(model.parameters())
    refused(good, "is of the optimizer None, not of AdamW", model, optimizer)
    path = save_checkpoint(tmp_path / "adamw", 1, model, optimizer)
    refused(path, "is of the optimizer AdamW, not of SGD", model, SGD(model.parameters()))
    refused(
        path,
        "with other parameter groups",
        model,
        AdamW([{"params": [p]} for p in model.parameters()]),
    )
    for options, message in (
        ({"step": -1}, "step must not be negative, and keep at least 1, got -1 and 2"),
        ({"step": 1, "keep": 0}, "step must not be negative, and keep at least 1, got 1 and 0"),
        ({"step": 1, "position": {"at": {1}}}, "set is not JSON serializable"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            save_checkpoint(tmp_path / "bad", model=model, **options)  # type: ignore[arg-type]
    counting = type("Counting", (nn.Linear,), {"get_extra_state": lambda self: {"calls": 7}})(2, 2)
    with pytest.raises(
        ValueError,
        match="'_extra_state' cannot be kept: a checkpoint has parameters, buffers and opt",
    ):
        save_checkpoint(tmp_path / "bad", 1, counting)
    named_alike = nn.Module()
    named_alike.register_buffer("cell_extra_state", torch.ones(1))
    save_checkpoint(tmp_path / "named alike", 1, named_alike)
    optimizer.state[model.scale]["history"] = [1]
    with pytest.raises(
        ValueError,
        match="the state 'optimizer.scale.history' must be a tensor or a number, got list",
    ):
        save_checkpoint(tmp_path / "bad", 1, model, optimizer)


@pytest.mark.parametrize(
    "first, then", [({}, {"foreach": True}), ({}, {"fused": True}), (None, None)]
)
def test_a_checkpoint_loads_under_other_settings_and_with_numbers_as_states(tmp_path, first, then):
    """The run now asks for foreach or fused; SparseAdam counts its steps in an int."""
    models = [nn.Embedding(4, 3, sparse=first is None) for _ in range(2)]
    kind = torch.optim.SparseAdam if first is None else torch.optim.AdamW
    optimizers = [
        kind(model.parameters(), **(options or {})) for model, options in zip(models, (first, then))
    ]

    def step(place: int) -> None:
        optimizers[place].zero_grad()
        models[place](torch.tensor([1, 2])).sum().backward()
        optimizers[place].step()

    step(0)
    load_checkpoint(
        save_checkpoint(tmp_path, 1, models[0], optimizers[0]), models[1], optimizers[1]
    )
    for place in range(2):
        step(place)
    torch.testing.assert_close(models[0].weight, models[1].weight)


# Any handle of the model


class Holder(nn.Module):
    """A model with an attribute of the name that wrappers use, and a wrapped part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.module(x))


def layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def with_copies(model: nn.Module) -> nn.Module:
    """`model`, with a state dict of copies, as a hook may make it."""

    def copy(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state.update({name: value.clone() for name, value in state.items()})

    model.register_state_dict_post_hook(copy)
    return model


def average_of(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


HANDLES: dict[str, Callable[[int], nn.Module]] = {  # of a seed
    "plain": layers,
    "ddp": lambda seed: OverlapDDP(layers(seed)),
    "ddp's module": lambda seed: OverlapDDP(layers(seed)).module,
    "fsdp": lambda seed: FSDP(layers(seed)),
    "fsdp's module": lambda seed: FSDP(layers(seed)).module,
    "compiled": lambda seed: torch.compile(layers(seed), backend="eager"),
    "compiled fsdp": lambda seed: torch.compile(FSDP(layers(seed)), backend="eager"),
    "compiled ddp": lambda seed: torch.compile(OverlapDDP(layers(seed)), backend="eager"),
    "fsdp inside": lambda seed: Holder(FSDP(layers(seed))),
    "two fsdps": lambda seed: nn.ModuleDict({"a": FSDP(layers(seed)), "b": FSDP(layers(seed + 1))}),
    "average": lambda seed: average_of(layers(seed)),
    "own module": lambda seed: Holder(layers(seed)),
    "copies": lambda seed: with_copies(layers(seed)),
    "fsdp of copies": lambda seed: FSDP(with_copies(layers(seed))),
}


def contents(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers by their names in the unwrapped model."""
    buffers = {plain_name(model, name): buffer.clone() for name, buffer in model.named_buffers()}
    return gather_full_params(model) | buffers


def save_handles(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, build_handle in HANDLES.items():
        model = build_handle(0)
        for buffer in model.buffers():
            buffer += 1
        save_checkpoint(Path(folder) / name, 1, model)
        found[name] = contents(model)
    return found


def load_handles(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, build_handle in HANDLES.items():
        model = build_handle(7)
        load_checkpoint(Path(folder) / name, model)
        found[name] = contents(model)
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_D17_a_checkpoint_of_any_handle_of_the_model_is_exact(saved_handles, num_ranks):
    """Of `fsdp.module`, a compiled FSDP or one inside another module it held rank 0's rows as if
    they were all of them; a model's own `.module`, and an average's, counted as a wrapper's, and
    the rest of the model was lost.
    Where a hook puts copies into the state dict, the values were loaded into those, and the model
    kept its own.
    """
    folder, expected = saved_handles
    results = (
        [run_alone(load_handles, str(folder))]
        if num_ranks == 1
        else run_ranks(load_handles, 3, str(folder))
    )
    for found in results:
        for name in HANDLES:
            assert found[name].keys() == expected[name].keys(), name
            for path, value in found[name].items():
                assert torch.equal(value, expected[name][path]), (name, path)


@pytest.fixture(scope="module")
def saved_handles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("handles")
    return folder, run_ranks(save_handles, 2, str(folder))[0]


def test_D17_a_checkpoint_of_one_handle_loads_into_another(tmp_path, alone):
    save_checkpoint(tmp_path, 1, HANDLES["compiled fsdp"](0))
    for name in ("plain", "ddp", "fsdp's module", "compiled"):
        model = HANDLES[name](7)
        load_checkpoint(tmp_path, model)
        for path, value in contents(model).items():
            assert torch.equal(value, contents(layers(0))[path]), (name, path)


@pytest.fixture
def alone():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


# Ranks that differ


def differ(rank: int, num_ranks: int, folder: str) -> list[list[float]]:
    """The buffers of a model that ranks had unlike, saved and loaded; then what goes wrong on one
    rank alone.
    """
    found = []
    for name in ("plain", "ddp", "fsdp"):
        model = HANDLES[name](0)
        for buffer in model.buffers():
            buffer.fill_(rank + 1)
        save_checkpoint(Path(folder) / name, 1, model)
        load_checkpoint(Path(folder) / name, model)
        found.append([float(buffer.float().mean()) for buffer in model.buffers()])
    teacher = layers(0)  # which no wrapper makes equal, and no optimizer updates
    for parameter in teacher.parameters():
        parameter.detach().fill_(rank + 1)
    pair = nn.ModuleDict({"student": FSDP(layers(0)), "teacher": teacher})
    student_optimizer = torch.optim.SGD(pair["student"].parameters(), lr=0.1)
    save_checkpoint(Path(folder) / "pair", 1, pair, student_optimizer)
    load_checkpoint(Path(folder) / "pair", pair, student_optimizer)
    found.append([float(parameter.detach().mean()) for parameter in teacher.parameters()])
    with pytest.raises(
        ValueError, match="ranks must save one step, rank 0 saves 2, rank 1 saves 3"
    ):
        save_checkpoint(Path(folder) / "plain", 2 + rank, layers(0))
    with pytest.raises(ValueError, match="step must not be negative, .* got -1") as negative:
        save_checkpoint(Path(folder) / "plain", -1 if rank else 2, layers(0))
    assert negative.value.__notes__ == ["on rank 1"]
    model, optimizer = layers(0), None
    position = {"seen": {1, 2}} if rank else {}
    with pytest.raises(
        TypeError if rank else RuntimeError, match="Object of type set is not JSON"
    ) as told:
        save_checkpoint(Path(folder) / "plain", 2, model, position=position)
    assert rank or str(told.value).startswith("rank 1: TypeError: ")
    stranger = torch.optim.SGD(
        [nn.Parameter(torch.ones(2, 7))] if rank else model.parameters(), lr=0.1
    )
    with pytest.raises(
        ValueError, match=r"the optimizer has a parameter of shape \(2, 7\) that is not the model's"
    ):
        save_checkpoint(Path(folder) / "plain", 2, model, stranger)
    here = Path(folder) / ("absent" if rank else "plain")
    with pytest.raises(CheckpointError, match="absent holds no complete checkpoint"):
        load_checkpoint(here, model, optimizer)
    with pytest.raises(
        CheckpointError,
        match="must be one folder .* rank 0 finds step-00000001, rank 1 step-00000001",
    ):
        load_checkpoint(Path(folder) / ("fsdp" if rank else "plain"), model)
    assert [path.name for path in checkpoints(Path(folder) / "plain")] == ["step-00000001"]
    return found


def test_D17_ranks_that_differ_save_rank_0s_buffers_and_fail_together(tmp_path):
    """One rank wrote the mean, the other the variance, each its own, and so it went with the
    weights of a part that is neither wrapped nor trained; what failed on one rank left the others
    waiting until their time-out.
    """
    for found in run_ranks(differ, 2, str(tmp_path), timeout_s=30):
        assert found == [[1.0, 1.0, 1.0]] * 3 + [[1.0] * 6]


# What is told


def test_D17_a_step_of_nine_digits_is_newer_than_one_of_eight(tmp_path):
    """Sorted as text it was the oldest, and saving it removed it."""
    model = nn.Linear(2, 2)
    for step in (99_999_999, 100_000_000):
        save_checkpoint(tmp_path, step, model, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-100000000"]
    assert load_checkpoint(tmp_path, model).step == 100_000_000


@pytest.mark.parametrize(
    ("step", "position", "message"),
    [
        (1, [130], r"position must be a dictionary, got \[130\]"),
        ("1", None, "step must be an int, got '1'"),
        (1.0, None, "step must be an int, got 1.0"),
    ],
)
def test_a_step_or_position_that_would_not_load_is_refused(tmp_path, step, position, message):
    """A list was saved, and the checkpoint was damaged when it was to be loaded."""
    with pytest.raises(TypeError, match=message):
        save_checkpoint(tmp_path, step, nn.Linear(2, 2), position=position)
    assert not checkpoints(tmp_path)


class WithWeight(OverlapDDP):
    """A wrapper with a parameter of its own, of the name of one in its module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.weight = nn.Parameter(torch.ones(2))


def test_two_parameters_of_one_plain_name_are_refused(tmp_path, alone):
    """The later one took the place of the other."""
    with pytest.raises(
        ValueError, match="two tensors would be kept as 'weight': 'weight' and 'module.weight'"
    ):
        save_checkpoint(tmp_path, 1, WithWeight(nn.Linear(2, 2)))


def test_a_model_that_is_without_a_saved_parameter_is_refused(tmp_path):
    """A larger model's checkpoint was loaded into a smaller one without a word."""
    large, small = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    save_checkpoint(tmp_path / "large", 1, large)
    with pytest.raises(CheckpointError, match="has 'model.1.weight', which the model is without"):
        load_checkpoint(tmp_path / "large", small)
    save_checkpoint(tmp_path / "small", 1, small)
    with pytest.raises(CheckpointError, match="has no 'model.1.weight', which the model needs"):
        load_checkpoint(tmp_path / "small", large)


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path):
    """It came back as a float, and a captured step went on with the old one."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(0.5), capturable=False, foreach=False
    )
    save_checkpoint(tmp_path, 1, model, optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    load_checkpoint(tmp_path, model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, Tensor) and float(rate) == 0.5


@pytest.mark.parametrize("value", [{1, 2}, torch.ones(2), float("nan"), object()])
def test_a_setting_that_is_no_json_is_refused_by_name(tmp_path, value):
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["schedule"] = value
    with pytest.raises(
        ValueError, match="the optimizer's setting 'schedule' must be JSON to be saved, got "
    ):
        save_checkpoint(tmp_path, 1, model, optimizer)


def test_a_lazy_model_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(
        ValueError, match="parameter 'weight' has no shape yet: call the module once before"
    ):
        save_checkpoint(tmp_path, 1, nn.LazyLinear(2))
