"""Checkpoints of distributed training: atomic, and resumed on any number of ranks.

    save_checkpoint(folder, step, model, optimizer, position={"batch": 130})
    progress = load_checkpoint(folder, model, optimizer)     # the newest complete one; progress.step, .position

Each rank writes the rows that it keeps, torch.distributed.checkpoint puts them in an index, and a rank that loads reads
the rows that it needs, from whichever files hold them. Phases of saving: aside (all ranks write into a hidden folder),
complete (rank 0 adds `progress.json`, last of all), rename (the folder gets its name, in one step). A process that is
killed at any point leaves the checkpoints before untouched, and a hidden folder that the next save removes.

`model` is an FSDP, a plain module, or a wrapper with the plain one in `.module`; `optimizer` is any torch optimizer
over its parameters, a ShardedOptimizer or a Zero1Optimizer. Saved are parameters, buffers of the state dict, the
optimizer's state and settings, each rank's random generators, the step and the position in the data.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cs336_systems.distributed.checkpoint_storage import (
    CheckpointError,
    IndexedReader,
    IndexedWriter,
    read_json,
    write_json,
)
from cs336_systems.distributed.collectives import num_ranks, rank_in
from cs336_systems.distributed.fsdp.weights import ShardedWeight
from cs336_systems.distributed.fsdp.wrapper import FSDP
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer, hyperparameters
from cs336_systems.distributed.zero1 import Zero1Optimizer

PROGRESS = "progress.json"  # its presence says that the checkpoint is complete
STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where training stood."""

    step: int  # optimizer steps done
    position: dict[str, Any]  # in the data: the caller's, as JSON
    num_ranks: int  # that saved it


def save_checkpoint(
    folder: Path | str,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    position: dict[str, Any] | None = None,
    keep: int = 2,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `folder`/step-<step> and remove all but the newest `keep` checkpoints; collective.

    Raises ValueError for a negative step, keep below 1 or a position that is no JSON; FileExistsError if it exists.
    """
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    try:
        json.dumps(position, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"position must be JSON, got {position!r} ({error})") from error
    folder = Path(folder)
    rank, size = rank_in(process_group), num_ranks(process_group)
    final, aside = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"
    if final.exists():
        raise FileExistsError(f"{final} exists")
    if rank == 0:
        for left_over in folder.glob(".step-*.partial"):  # of a process that was killed
            shutil.rmtree(left_over)
        aside.mkdir(parents=True)
    dist.barrier(process_group)
    # aside
    described = _Described(model, optimizer)
    tensors = described.tensors() | _generator_states(rank)
    settings = described.settings()
    dcp.save(tensors, storage_writer=IndexedWriter(aside), process_group=process_group)
    # complete
    if rank == 0:
        write_json(
            aside / PROGRESS,
            {"step": step, "position": position or {}, "num_ranks": size, "optimizer": settings},
        )
        _sync_folder(aside)
        # rename
        os.rename(aside, final)
        _sync_folder(folder)
        for old in complete_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier(process_group)
    return final


def complete_checkpoints(folder: Path | str) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    found = [path for path in Path(folder).glob("step-*") if STEP_FOLDER.fullmatch(path.name)]
    return sorted((path for path in found if (path / PROGRESS).is_file()), key=lambda path: int(path.name[5:]))


def load_checkpoint(
    folder: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Progress:
    """Load the newest complete checkpoint of `folder` (or `folder` itself, if it is one) in place; collective.

    A rank takes up the random generators of the rank of the same number, modulo the ranks that saved. Raises
    CheckpointError where there is none, or where it is damaged, not ours or of another model or optimizer.
    """
    folder = Path(folder)
    checkpoints = [folder] if (folder / PROGRESS).is_file() else complete_checkpoints(folder)
    if not checkpoints:
        raise CheckpointError(f"{folder} holds no complete checkpoint")
    path = checkpoints[-1]
    progress, settings = _read_progress(path / PROGRESS)
    index = {
        name: entry
        for name, entry in IndexedReader(path).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    described = _Described(model, optimizer)
    source_rank = rank_in(process_group) % progress.num_ranks
    generators = _generator_states(source_rank)
    generators = {name: tensor for name, tensor in generators.items() if name in index}
    tensors = described.tensors_to_load(index, path)
    try:
        # No planner data of torch's own is trusted or needed: the names are flat.
        dcp.load(tensors | generators, storage_reader=IndexedReader(path), process_group=process_group)
    except dcp.CheckpointException as error:
        reasons = "; ".join(
            f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}" for rank, failure in error.failures.items()
        )
        raise CheckpointError(f"{path} cannot be read: {reasons}") from error
    described.take(tensors, settings)
    _restore_generators(generators)
    return progress


def _read_progress(path: Path) -> tuple[Progress, dict[str, Any] | None]:
    """Where training stood, and the optimizer's settings; CheckpointError naming what is not as it was written."""
    saved = read_json(path)

    def check(sound: bool, name: str) -> None:
        if not sound:
            raise CheckpointError(f"{path} is damaged: {name} is {saved.get(name)!r}"[:500])

    for name, least in (("step", 0), ("num_ranks", 1)):
        value = saved.get(name)
        check(type(value) is int and value >= least, name)
    check(isinstance(saved.get("position"), dict), "position")
    settings = saved.get("optimizer", ())  # None is for a save without one
    if settings is not None:
        check(isinstance(settings, dict), "optimizer")
        scalars, groups = settings.get("scalars"), settings.get("groups")
        check(isinstance(scalars, dict) and all(isinstance(state, dict) for state in scalars.values()), "optimizer")
        check(isinstance(groups, list) and all(isinstance(group, dict) for group in groups), "optimizer")
        check(all(isinstance(group.get("names"), list) for group in groups), "optimizer")
    return Progress(step=saved["step"], position=saved["position"], num_ranks=saved["num_ranks"]), settings


class _Described:
    """Model and optimizer as flat names and tensors, of which the sharded ones know their place in the whole."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.fsdp = model if isinstance(model, FSDP) else None
        inner = getattr(model, "module", model)
        self.module: nn.Module = inner if isinstance(inner, nn.Module) else model
        self.optimizer = optimizer
        self.parameters = dict(self.module.named_parameters())
        self.names = {parameter: name for name, parameter in self.parameters.items()}
        self._kept: dict[str, dict[str, Any]] | None = None  # what `_states` found
        self.weights: dict[str, ShardedWeight] = {}
        if self.fsdp is not None:
            self.weights = {weight.name: weight for unit in self.fsdp.units for weight in unit.weights}
            device = self.fsdp.device.type
            self.mesh = DeviceMesh.from_group(self.fsdp.group, device)

    def tensors(self) -> dict[str, Tensor]:
        """What this rank saves."""
        return self._model_tensors() | {
            f"optimizer.{name}.{key}": self._placed(name, value)
            for name, state in self._states().items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def settings(self) -> dict[str, Any] | None:
        """The optimizer's hyper-parameters and the states that are no tensors, as JSON."""
        if self.optimizer is None:
            return None
        scalars = self._all_scalars()
        groups = [
            {**hyperparameters(group), "names": [self.names[parameter] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return {"groups": _jsonable(groups), "scalars": scalars}

    def tensors_to_load(self, index: dict[str, TensorStorageMetadata], path: Path) -> dict[str, Tensor]:
        """Where the checkpoint's tensors go; CheckpointError naming one that is missing or of another shape."""
        tensors = self._model_tensors()
        for name, tensor in tensors.items():
            if name not in index:
                raise CheckpointError(f"{path} has no {name!r}: it is of another model")
            if index[name].size != tensor.shape:
                raise CheckpointError(
                    f"{path} has {name!r} of shape {tuple(index[name].size)}, the model needs {tuple(tensor.shape)}"
                )
        if self.optimizer is None:
            return tensors
        for name in self._stateful_names():
            prefix = f"optimizer.{name}."
            for full_name, entry in index.items():
                if full_name.startswith(prefix) and "." not in full_name[len(prefix) :]:
                    tensors[full_name] = self._empty(name, entry)
        return tensors

    def take(self, tensors: dict[str, Tensor], settings: dict[str, Any] | None) -> None:
        """Give the optimizer what was read; the parameters have it already."""
        if self.optimizer is None:
            return
        if settings is None:
            raise CheckpointError("the checkpoint was saved without an optimizer")
        states: dict[str, dict[str, Any]] = {}
        for name in self._stateful_names():
            prefix = f"optimizer.{name}."
            state = dict(settings["scalars"].get(name, {}))
            for full_name, tensor in tensors.items():
                if full_name.startswith(prefix) and "." not in full_name[len(prefix) :]:
                    state[full_name[len(prefix) :]] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if state:
                states[name] = state
        groups = settings["groups"]
        names = [[self.names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]
        if [group["names"] for group in groups] != names:
            raise CheckpointError("the checkpoint's optimizer has other parameter groups")
        places = {name: place for place, name in enumerate(name for group in names for name in group)}
        first = 0
        loaded = []
        for group in groups:
            settings_of = {key: tuple(v) if isinstance(v, list) else v for key, v in group.items() if key != "names"}
            loaded.append({**settings_of, "params": list(range(first, first + len(group["names"])))})
            first += len(group["names"])
        self.optimizer.load_state_dict(
            {"state": {places[name]: state for name, state in states.items()}, "param_groups": loaded}
        )

    def _model_tensors(self) -> dict[str, Tensor]:
        buffers = {name: value for name, value in self.module.state_dict().items() if name not in self.parameters}
        tensors = {f"model.{name}": self._placed(name, value.detach()) for name, value in self.parameters.items()}
        aliases = {id(parameter) for parameter in self.parameters.values()}
        for name, value in buffers.items():
            if isinstance(value, Tensor) and not self._is_tied(name, aliases):
                tensors[f"model.{name}"] = value.detach()
        return tensors

    def _is_tied(self, name: str, known: set[int]) -> bool:
        """Whether the state dict's `name` is another name of a parameter."""
        owner, _, attribute = name.rpartition(".")
        value = getattr(self.module.get_submodule(owner), attribute, None)
        return id(value) in known

    def _placed(self, name: str, value: Tensor) -> Tensor:
        """`value`, of the parameter `name`, with its place in the whole if it is sharded like it."""
        weight = self.weights.get(name)
        if weight is None or value.shape != weight.shard.shape:
            return value
        stride = torch.empty(weight.shape, device="meta").stride()
        return DTensor.from_local(value.detach(), self.mesh, [Shard(0)], shape=weight.shape, stride=stride)

    def _empty(self, name: str, entry: TensorStorageMetadata) -> Tensor:
        parameter = self.parameters[name]
        weight = self.weights.get(name)
        dtype = entry.properties.dtype
        if weight is not None and entry.size == weight.shape:
            return self._placed(name, torch.empty(weight.shard.shape, dtype=dtype, device=parameter.device))
        device = parameter.device if entry.size == parameter.shape else torch.device("cpu")
        return torch.empty(entry.size, dtype=dtype, device=device)

    def _states(self) -> dict[str, dict[str, Any]]:
        """State by parameter name, of the parameters whose state this rank keeps; the first call is collective."""
        if self._kept is None:
            state: dict[Any, dict[str, Any]] = {} if self.optimizer is None else dict(self.optimizer.state)
            if isinstance(self.optimizer, Zero1Optimizer):  # slices know no shapes: the whole is put together
                everything = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
                full = self.optimizer.full_state_dict()["state"]
                state = {everything[place]: values for place, values in full.items()}
            self._kept = {self.names[parameter]: values for parameter, values in state.items()}
        return self._kept

    def _all_scalars(self) -> dict[str, dict[str, Any]]:
        """The states that are no tensors, by parameter name; under a ShardedOptimizer each owner tells its own."""
        scalars = {
            name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            for name, state in self._states().items()
        }
        if not isinstance(self.optimizer, ShardedOptimizer) or self.optimizer.num_ranks == 1:
            return scalars
        by_rank: list[Any] = [None] * self.optimizer.num_ranks
        dist.all_gather_object(by_rank, scalars, group=self.optimizer.process_group)
        return {name: state for own in by_rank for name, state in own.items()}

    def _stateful_names(self) -> list[str]:
        """Parameters whose state this rank loads."""
        assert self.optimizer is not None
        mine: Callable[[Tensor], bool] = lambda parameter: True  # noqa: E731
        if isinstance(self.optimizer, ShardedOptimizer):
            owners, rank = self.optimizer.owners, self.optimizer.rank
            mine = lambda parameter: owners[parameter] == rank  # noqa: E731
        everything = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [self.names[parameter] for parameter in everything if mine(parameter)]


def _generator_states(rank: int) -> dict[str, Tensor]:
    """The random generators of this process, under the names of `rank`."""
    states = {f"generator.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"generator.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def _restore_generators(states: dict[str, Tensor]) -> None:
    for name, state in states.items():
        if name.startswith("generator.cuda"):
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)


def _jsonable(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hyper-parameters as JSON knows them: tensors become numbers, tuples lists."""
    return [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()} for group in groups
    ]


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
