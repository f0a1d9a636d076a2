"""Model and optimizer as flat names and tensors, of which the sharded ones know their place in the
whole.

state = TrainingState(model, optimizer)
state.model_parts()           # {"model.head.weight": Part, ...}
state.optimizer_parts()       # {"optimizer.head.weight.exp_avg": Part, "optimizer.head.weight.step": Part, ...}
state.settings()              # of the optimizer, as JSON
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cs336_systems.distributed.fsdp.plan import ShardedWeight, whole_of
from cs336_systems.distributed.fsdp.wrapper import plain_name
from cs336_systems.distributed.optimizer_shares import OptimizerOfShares, hyperparameters
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.zero1 import Zero1Optimizer


@dataclass(frozen=True)
class Part:
    """What this rank has, or reads, of a tensor: its rows from `start` on."""

    tensor: Tensor
    shape: tuple[int, ...]  # of the whole
    start: int = 0
    # of a rank, as buffers are, which ranks may have unlike: rank 0's is saved
    is_own: bool = False


class TrainingState:
    """What `save_checkpoint` keeps of `model` and `optimizer`, and `load_checkpoint` gives back."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.names: dict[Tensor, str] = {
            parameter: plain_name(model, name) for name, parameter in model.named_parameters()
        }
        for parameter, name in self.names.items():
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter {name!r} has no shape yet: call the module once before"
                )
        wholes = {parameter: whole_of(parameter) for parameter in self.names}
        self.shards: dict[Tensor, ShardedWeight] = {
            one: weight for one, weight in wholes.items() if weight
        }
        groups = [] if optimizer is None else optimizer.param_groups
        # By the prefix of the names of its states, in the order in which state dicts number them.
        self.updated: dict[str, Tensor] = {
            self._prefix(one): one for group in groups for one in group["params"]
        }

    def _prefix(self, parameter: Tensor) -> str:
        return f"optimizer.{self._name(parameter)}"

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self.names:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's"
            )
        return self.names[parameter]

    def settings(self) -> dict[str, Any] | None:
        """Class, hyper-parameters and names of parameters of the optimizer, as JSON."""
        if self.optimizer is None:
            return None
        # The optimizer that makes the updates, behind one that only shares them out.
        makes = (
            self.optimizer.local
            if isinstance(self.optimizer, OptimizerOfShares)
            else self.optimizer
        )
        groups = self.optimizer.param_groups
        settings = [
            {key: _as_json(key, value) for key, value in hyperparameters(group).items()}
            for group in groups
        ]
        names = [[self._name(parameter) for parameter in group["params"]] for group in groups]
        return {"kind": type(makes).__name__, "groups": settings, "names": names}

    def model_parts(self) -> dict[str, Part]:
        """Parameters and buffers, a tied one once; ValueError naming what else the state dict has.

        That is what a module's `get_extra_state` or a hook adds. A copy which a hook has put in the
        place of a parameter or buffer stands for that one: values loaded into a copy would be lost.
        """
        members: dict[str, Tensor] = dict(self.model.named_buffers(remove_duplicate=False))
        members |= self.model.named_parameters(remove_duplicate=False)
        known = {id(member) for member in members.values()}
        updated = set(self.updated.values())
        parts: dict[str, Part] = {}
        names: dict[str, str] = {}  # in the state dict, by the plain one
        seen: set[int] = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            member = value if id(value) in known else members.get(name)
            if member is None:
                if value is None:
                    continue
                raise ValueError(
                    f"{name!r} cannot be kept: a checkpoint has parameters, buffers and optimizer states"
                )
            if id(member) in seen:
                continue
            seen.add(id(member))
            plain = plain_name(self.model, name)
            if plain in names:
                raise ValueError(
                    f"two tensors would be kept as {plain!r}: {names[plain]!r} and {name!r}"
                )
            names[plain] = name
            is_own = member not in self.shards and member not in updated
            parts[f"model.{plain}"] = replace(self._part(member, member.detach()), is_own=is_own)
        return parts

    def optimizer_parts(self) -> dict[str, Part]:
        """The states that this rank keeps; of a Zero1Optimizer, whose slices know no shapes, all;
        collective.

        ValueError naming a state that is no tensor or number, or that is not cut as its weight.
        """
        states: dict[Any, dict[str, Any]] = (
            {} if self.optimizer is None else dict(self.optimizer.state)
        )
        if isinstance(self.optimizer, Zero1Optimizer):
            states = self.optimizer.all_states()
        parts = {}
        for parameter, state in states.items():
            for key, value in state.items():
                name = f"{self._prefix(parameter)}.{key}"
                if isinstance(value, int | float):
                    dtype = torch.int64 if isinstance(value, int) else torch.float64
                    parts[f"{name}:number"] = Part(torch.tensor(value, dtype=dtype), ())
                elif isinstance(value, Tensor):
                    if parameter in self.shards and value.ndim and value.shape != parameter.shape:
                        raise ValueError(
                            f"{name!r}, of shape {tuple(value.shape)}, is not cut as FSDP cuts its weight"
                        )
                    parts[name] = self._part(parameter, value.detach())
                elif value is not None:
                    raise ValueError(
                        f"the state {name!r} must be a tensor or a number, got {type(value).__name__}"
                    )
        return parts

    def parts_to_load(
        self, saved: dict[str, Any] | None, entries: dict[str, Any]
    ) -> dict[str, Part]:
        """Where a checkpoint's `entries` go; ValueError naming what is not as the model and
        optimizer need it.
        """
        parts = self.model_parts()
        for name, part in parts.items():
            if name not in entries:
                raise ValueError(f"has no {name!r}, which the model needs")
            shape = tuple(entries[name]["size"])
            if shape != part.shape:
                raise ValueError(f"has {name!r} of shape {shape}, the model needs {part.shape}")
        for name in entries:
            if name.startswith("model.") and name not in parts:
                raise ValueError(f"has {name!r}, which the model is without")
        own = self.settings()
        if own is None:
            return parts
        kind = None if saved is None else saved["kind"]
        if saved is None or kind != own["kind"]:
            raise ValueError(f"is of the optimizer {kind}, not of {own['kind']}")
        if saved["names"] != own["names"]:
            raise ValueError("is of an optimizer with other parameter groups")
        owns = (
            self.optimizer.owns
            if isinstance(self.optimizer, ShardedOptimizer)
            else lambda parameter: True
        )
        for name, entry in entries.items():
            parameter = self.updated.get(name.rpartition(".")[0])
            if parameter is None or not owns(parameter):
                continue
            shape, dtype = tuple(entry["size"]), getattr(torch, entry["dtype"])
            if parameter in self.shards and shape == self.shards[parameter].shape:
                parts[name] = self._part(
                    parameter, torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                )
            else:  # on the CPU, from where the optimizer moves it to the parameter's device
                parts[name] = Part(torch.empty(shape, dtype=dtype), shape)
        return parts

    def take(self, parts: dict[str, Part], saved: dict[str, Any] | None) -> None:
        """Give the optimizer what was read; the parameters have it already."""
        if self.optimizer is None or saved is None:
            return
        places = {prefix: place for place, prefix in enumerate(self.updated)}
        states: dict[int, dict[str, Any]] = {}
        for name, part in parts.items():
            prefix, _, key = name.rpartition(".")
            if prefix in places:
                key, _, number = key.partition(":")  # that of a state which is no tensor
                states.setdefault(places[prefix], {})[key] = (
                    part.tensor.item() if number else part.tensor
                )
        groups, start = [], 0
        for group, names, now in zip(saved["groups"], saved["names"], self.optimizer.param_groups):
            settings = {key: _as_it_is_now(value, now.get(key)) for key, value in group.items()}
            groups.append(settings | {"params": [*range(start, start := start + len(names))]})
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def _part(self, parameter: Tensor, value: Tensor) -> Part:
        """`value`, of `parameter`, and its place in the whole if that is sharded."""
        weight = self.shards.get(parameter)
        if weight is None or value.shape != parameter.shape:
            return Part(value, tuple(value.shape))
        return Part(value, tuple(weight.shape), weight.rows.start)


def _as_json(name: str, value: Any) -> Any:
    """A hyper-parameter as JSON has it; ValueError naming one that JSON cannot hold."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(
            f"the optimizer's setting {name!r} must be JSON to be saved, got {value!r}"
        ) from None
    return value


def _as_it_is_now(value: Any, now: Any) -> Any:
    """A saved hyper-parameter in the type of the optimizer's own: a learning rate that is a tensor
    stays one.
    """
    if isinstance(now, Tensor) and isinstance(value, int | float):
        return torch.full_like(now, value)
    return tuple(value) if isinstance(value, list) else value
