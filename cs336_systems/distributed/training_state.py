"""Model and optimizer as named tensors for checkpoints; each knows its place in the whole tensor.

state = TrainingState(model, optimizer)
state.model_parts()       # {"model.head.weight": Part, ...}
state.optimizer_parts()   # {"optimizer.head.weight.exp_avg": Part,
                          #  "optimizer.head.weight.step": Part, ...}
state.settings()          # the optimizer's class, hyper-parameters and names, as JSON
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cs336_systems.distributed.fsdp.weight import ShardedWeight, whole_of
from cs336_systems.distributed.fsdp.wrapper import plain_name
from cs336_systems.distributed.optimizer_shares import OptimizerOfShares, hyperparameters
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.tensor_parallel import SplitLinear, splits
from cs336_systems.distributed.zero1 import Zero1Optimizer


@dataclass(frozen=True)
class Part:
    """The box of a tensor that this rank has, or is to read."""

    tensor: Tensor  # the box
    shape: tuple[int, ...]  # of the whole tensor
    starts: tuple[int, ...] = ()  # of the box in each dimension; empty: all are 0
    # whether ranks may have different values, as of buffers: then rank 0's are saved
    is_own: bool = False


class TrainingState:
    """The parts of `model` and `optimizer` that a checkpoint saves and loads.

    Raises ValueError for a lazy parameter, and for an optimizer's parameter that is not in `model`.
    """

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
        layers = splits(model)
        self.splits: dict[Tensor, SplitLinear] = {
            parameter: layers[name]
            for name, parameter in model.named_parameters()
            if name in layers
        }

        # the optimizer's parameters by the prefix of their states' names, in the order in which
        # state dicts number them
        groups = [] if optimizer is None else optimizer.param_groups
        self.updated: dict[str, Tensor] = {
            self._prefix(one): one for group in groups for one in group["params"]
        }

    def _prefix(self, parameter: Tensor) -> str:
        """Return how the names of this parameter's optimizer states begin."""
        return f"optimizer.{self._name(parameter)}"

    def _name(self, parameter: Tensor) -> str:
        """Return the parameter's name in the unwrapped model; raise ValueError if it has none."""
        if parameter not in self.names:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} "
                "that is not the model's"
            )
        return self.names[parameter]

    def settings(self) -> dict[str, Any] | None:
        """Return the optimizer's class, hyper-parameters and parameters' names, ready for JSON.

        None without an optimizer. Raises ValueError naming a hyper-parameter that JSON cannot hold.
        """
        if self.optimizer is None:
            return None
        # the optimizer that makes the updates: a sharded one wraps it
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
        kind = getattr(makes, "saved_as", type(makes).__name__)
        return {"kind": kind, "groups": settings, "names": names}

    def model_parts(self) -> dict[str, Part]:
        """Return this rank's parts of the state dict's parameters and buffers, a tied one once.

        Raises ValueError naming any other entry, such as one that a module's `get_extra_state` or a
        hook adds. If a hook has put a copy in the place of a parameter or buffer, the part is the
        original: values loaded into a copy would be lost.
        """
        members: dict[str, Tensor] = dict(self.model.named_buffers(remove_duplicate=False))
        members |= self.model.named_parameters(remove_duplicate=False)
        known = {id(member) for member in members.values()}
        updated = set(self.updated.values())
        parts: dict[str, Part] = {}
        names: dict[str, str] = {}  # names in the state dict, by plain name
        seen: set[int] = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            # the parameter or buffer that this entry is of
            member = value if id(value) in known else members.get(name)
            if member is None:
                if value is None:
                    continue
                raise ValueError(
                    f"{name!r} cannot be kept: "
                    "a checkpoint has parameters, buffers and optimizer states"
                )
            if id(member) in seen:
                continue
            seen.add(id(member))

            # its part, under its name in the unwrapped model
            plain = plain_name(self.model, name)
            if plain in names:
                raise ValueError(
                    f"two tensors would be kept as {plain!r}: {names[plain]!r} and {name!r}"
                )
            names[plain] = name
            is_cut = member in self.shards or member in self.splits
            is_own = not is_cut and member not in updated
            parts[f"model.{plain}"] = replace(self._part(member, member.detach()), is_own=is_own)
        return parts

    def optimizer_parts(self) -> dict[str, Part]:
        """Return this rank's parts of the optimizer's states; numbers become tensors.

        With a Zero1Optimizer, whose slices have no shapes, each rank returns all states, and the
        method is collective. Raises ValueError naming a state that is neither tensor nor number, or
        that is not cut as FSDP cuts its weight.
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
                # a number becomes a tensor whose name says so; None is left out
                if isinstance(value, int | float):
                    dtype = torch.int64 if isinstance(value, int) else torch.float64
                    parts[f"{name}:number"] = Part(torch.tensor(value, dtype=dtype), ())
                elif isinstance(value, Tensor):
                    if parameter in self.shards and value.ndim and value.shape != parameter.shape:
                        raise ValueError(
                            f"{name!r}, of shape {tuple(value.shape)}, "
                            "is not cut as FSDP cuts its weight"
                        )
                    parts[name] = self._part(parameter, value.detach())
                elif value is not None:
                    raise ValueError(
                        f"the state {name!r} must be a tensor or a number, "
                        f"got {type(value).__name__}"
                    )
        return parts

    def parts_to_load(
        self, saved: dict[str, Any] | None, entries: dict[str, Any]
    ) -> dict[str, Part]:
        """Return the parts of this rank that a checkpoint's `entries` are to be read into, by name.

        Parts of the model are its own tensors, those of the optimizer new ones for `take`. `saved`
        are the settings of the saved optimizer. Raises ValueError naming an entry that is missing,
        has another shape or is not the model's, or if the optimizer is another one.
        """
        # the model's, which must be exactly those saved
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

        # the optimizer must be of the same class and groups
        own = self.settings()
        if own is None:
            return parts
        kind = None if saved is None else saved["kind"]
        if saved is None or kind != own["kind"]:
            raise ValueError(f"is of the optimizer {kind}, not of {own['kind']}")
        if saved["names"] != own["names"]:
            raise ValueError("is of an optimizer with other parameter groups")

        # the states of the parameters that this rank updates
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
            own_part = self._part(
                parameter, torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            )
            is_cut = parameter in self.shards or parameter in self.splits
            if is_cut and shape == own_part.shape:
                parts[name] = own_part
            else:  # on the CPU; the optimizer moves it to the parameter's device
                parts[name] = Part(torch.empty(shape, dtype=dtype), shape)
        return parts

    def take(self, parts: dict[str, Part], saved: dict[str, Any] | None) -> None:
        """Load the states read into `parts`, and the `saved` settings, into the optimizer.

        Parameters and buffers need nothing: they were read in place.
        """
        if self.optimizer is None or saved is None:
            return
        places = {prefix: place for place, prefix in enumerate(self.updated)}
        states: dict[int, dict[str, Any]] = {}
        for name, part in parts.items():
            prefix, _, key = name.rpartition(".")
            if prefix in places:
                key, _, number = key.partition(":")  # "step:number" is a state that was a number
                states.setdefault(places[prefix], {})[key] = (
                    part.tensor.item() if number else part.tensor
                )

        groups, start = [], 0
        for group, names, now in zip(saved["groups"], saved["names"], self.optimizer.param_groups):
            settings = {key: _as_it_is_now(value, now.get(key)) for key, value in group.items()}
            groups.append(settings | {"params": [*range(start, start := start + len(names))]})
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def _part(self, parameter: Tensor, value: Tensor) -> Part:
        """Return `value` as a part: the box of `parameter` if it has its shape, else whole."""
        if value.shape != parameter.shape:
            return Part(value, tuple(value.shape))
        shape, starts = value.shape, [0] * value.ndim
        if (weight := self.shards.get(parameter)) is not None:
            shape, starts[0] = weight.shape, weight.rows.start
        if (layer := self.splits.get(parameter)) is not None:  # FSDP has cut this rank's part
            starts[layer.dim] += layer.group.rank() * shape[layer.dim]
            shape = layer.whole_shape(shape)
        return Part(value, tuple(shape), tuple(starts))


def _as_json(name: str, value: Any) -> Any:
    """Return a hyper-parameter as JSON can hold it, a tensor of one element as a number.

    Raises ValueError naming the hyper-parameter if JSON cannot hold it.
    """
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
    """Return a saved hyper-parameter in the type that the optimizer has `now`.

    A number becomes a tensor if the optimizer's own is one; a list becomes a tuple.
    """
    if isinstance(now, Tensor) and isinstance(value, int | float):
        return torch.full_like(now, value)
    return tuple(value) if isinstance(value, list) else value
