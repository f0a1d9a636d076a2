"""Checkpoints of distributed training: atomic, and resumed on any number of ranks.

    save_checkpoint(folder, step, model, optimizer, position={"batch": 130})
    progress = load_checkpoint(folder, model, optimizer)     # the newest complete one; progress.step, .position

Each rank writes the rows that it keeps, torch.distributed.checkpoint puts them in an index, and a rank that loads reads
the rows that it needs, from whichever files hold them. Phases of saving: aside (all ranks write into a hidden folder),
complete (rank 0 adds `progress.json`, last of all), rename (the folder gets its name, in one step), remove (old ones
are hidden first). A process that is killed at any point leaves the checkpoints before untouched, and a hidden folder
that the next save removes. A folder that lost its `progress.json` is incomplete: loading passes over it, and saving its
step again renames it.

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
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cs336_systems.distributed.checkpoint_checks import StateOfAStep, check_groups, check_number
from cs336_systems.distributed.checkpoint_storage import (
    INDEX,
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

Entry = TypeVar("Entry")


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

    What is there of that step and is incomplete is renamed to step-<step>.incomplete. Raises ValueError for a negative
    step, keep below 1 or a position that is no JSON; FileExistsError if a complete one exists.
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
    if _is_complete(final):
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
        if os.path.lexists(final):
            os.rename(final, _name_of_incomplete(final))
        os.rename(aside, final)
        _sync_folder(folder)
        # remove
        for old in complete_checkpoints(folder)[:-keep]:
            shutil.rmtree(old.rename(folder / f".{old.name}.partial"))
    dist.barrier(process_group)
    return final


def complete_checkpoints(folder: Path | str) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return [path for path in _checkpoints(folder) if _is_complete(path)]


def passed_over(folder: Path | str) -> list[Path]:
    """The incomplete checkpoints in `folder` that are newer than every complete one, oldest first."""
    newest = [*complete_checkpoints(folder)[-1:]]
    return [path for path in _checkpoints(folder) if not newest or _step_of(path) > _step_of(newest[0])]


def _checkpoints(folder: Path | str) -> list[Path]:
    """Complete or not, oldest first."""
    return sorted((path for path in Path(folder).glob("step-*") if STEP_FOLDER.fullmatch(path.name)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _is_complete(path: Path) -> bool:
    return (path / PROGRESS).is_file()


def _name_of_incomplete(path: Path) -> Path:
    """Where `path` goes to make room: nobody can load it, but somebody may want to look at it."""
    names = (path.with_name(f"{path.name}.incomplete{number}") for number in chain([""], (f"-{n}" for n in count(2))))
    return next(name for name in names if not os.path.lexists(name))


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
    checkpoints = [folder] if _is_complete(folder) else complete_checkpoints(folder)
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
    described.check_settings(settings, path / PROGRESS)
    described.check_states(settings, index, path)
    source_rank = rank_in(process_group) % progress.num_ranks
    generators = _generator_states(source_rank)
    generators = {name: tensor for name, tensor in generators.items() if name in index}
    _check_generators(index, path)
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
    try:
        _restore_generators(generators)
    except RuntimeError as error:  # the right number of bytes, but no state
        raise CheckpointError(f"{path} has {', '.join(generators)} that cannot be taken up: {error}") from error
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

    def check_settings(self, settings: dict[str, Any] | None, path: Path) -> None:
        """CheckpointError naming what `settings`, read from `path`, lack that the optimizer needs."""
        if self.optimizer is None:
            return
        if settings is None:
            raise CheckpointError(f"{path}: the checkpoint was saved without an optimizer")
        if [group["names"] for group in settings["groups"]] != self._group_names():
            raise CheckpointError(f"{path}: the checkpoint's optimizer has other parameter groups")
        check_groups(path, settings["groups"], self.optimizer)

    def check_states(
        self, settings: dict[str, Any] | None, index: dict[str, TensorStorageMetadata], path: Path
    ) -> None:
        """CheckpointError naming a state that is missing, of another shape, or not the optimizer's.

        A parameter without any has had no gradient yet. Each rank looks at the states of all, so that none of them goes
        on to load, and waits, where another has refused.
        """
        if self.optimizer is None:
            return
        assert settings is not None
        of_a_step = StateOfAStep(path / PROGRESS, settings["groups"], self.optimizer)
        groups = {name: number for number, names in enumerate(self._group_names()) for name in names}
        for name in groups:
            parameter, shape = self.parameters[name], self._whole_shape(name)
            expected = of_a_step.kept(groups[name], parameter, len(shape))
            scalars, found = settings["scalars"].get(name, {}), self._saved_state(name, index)
            if expected is None or (name not in settings["scalars"] and not found):
                continue
            for key, kind in expected.items():
                full_name = f"optimizer.{name}.{key}"
                if key in found:
                    size, wanted = found[key].size, shape if kind == "like" else torch.Size()
                    if kind != "other" and size != wanted:
                        raise CheckpointError(
                            f"{path / INDEX} has {full_name!r} of shape {tuple(size)}, "
                            f"the optimizer needs {tuple(wanted)}"
                        )
                elif key in scalars and kind == "number":
                    check_number(path / PROGRESS, full_name, scalars[key])
                elif key not in scalars or kind != "other":
                    file = path / (PROGRESS if kind in ("number", "other") else INDEX)
                    raise CheckpointError(f"{file} is damaged: it has no {full_name!r}")
            for key in sorted(found.keys() - expected.keys()):  # of a setting that has been changed since, or wrong
                if key not in (of_a_step.kept_by_own_settings(groups[name], parameter, len(shape)) or {}):
                    raise CheckpointError(f"{path / INDEX} has 'optimizer.{name}.{key}', which the optimizer has not")

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
            for key, entry in self._saved_state(name, index).items():
                tensors[f"optimizer.{name}.{key}"] = self._empty(name, entry)
        return tensors

    def take(self, tensors: dict[str, Tensor], settings: dict[str, Any] | None) -> None:
        """Give the optimizer what was read; the parameters have it already."""
        if self.optimizer is None:
            return
        assert settings is not None
        states: dict[str, dict[str, Any]] = {}
        for name in self._stateful_names():
            state = dict(settings["scalars"].get(name, {}))
            for key, tensor in self._saved_state(name, tensors).items():
                state[key] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if state:
                states[name] = state
        groups, names = settings["groups"], self._group_names()
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

    @staticmethod
    def _saved_state(name: str, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Those of `entries` that are states of the parameter `name`, by the state's own name."""
        prefix = f"optimizer.{name}."
        own = {full_name[len(prefix) :]: entry for full_name, entry in entries.items() if full_name.startswith(prefix)}
        return {key: entry for key, entry in own.items() if "." not in key}

    def _group_names(self) -> list[list[str]]:
        assert self.optimizer is not None
        return [[self.names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]

    def _whole_shape(self, name: str) -> torch.Size:
        """Of the parameter `name`, of which this rank may keep some rows only."""
        weight = self.weights.get(name)
        return self.parameters[name].shape if weight is None else torch.Size(weight.shape)

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


def _check_generators(index: dict[str, TensorStorageMetadata], path: Path) -> None:
    """CheckpointError for a state of any rank's generator that none of the kind could have."""
    own = {name.rpartition(".")[0]: state for name, state in _generator_states(0).items()}
    for name, found in index.items():
        state = own.get(name.rpartition(".")[0])
        if state is not None and (found.size, found.properties.dtype) != (state.shape, state.dtype):
            raise CheckpointError(
                f"{path / INDEX} has {name!r} of shape {tuple(found.size)} in {found.properties.dtype}, "
                f"a generator's state is {tuple(state.shape)} in {state.dtype}"
            )


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
