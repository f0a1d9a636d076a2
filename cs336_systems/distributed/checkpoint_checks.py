"""Whether the optimizer of a checkpoint is one that this run can go on with, asked before anything is overwritten.

    check_groups(path / "progress.json", settings["groups"], optimizer)
    state = StateOfAStep(path / "progress.json", settings["groups"], optimizer)
    state.kept(0, parameter, 2)                       # {"step": "number", "exp_avg": "like", "exp_avg_sq": "like"}

A checkpoint that lacks a moment or has one of another shape would fail in the middle of the first step, in words of
whichever kernel meets it. What an optimizer keeps is found by letting one of the same kind and settings take a step on
a parameter of a few elements, so that no optimizer need be known here. One that takes no such step under its own
settings either (it wants a sparse gradient, say) is not asked.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cs336_systems.distributed.checkpoint_storage import CheckpointError
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer, hyperparameters
from cs336_systems.distributed.zero1 import Zero1Optimizer

Kind = Literal["like", "scalar", "number", "other"]  # a tensor of the parameter's shape, a 0-d one, a counter, ...
# To settings out of its range; also where it needs other arguments, a closure, a sparse gradient or a larger parameter.
REFUSALS = (ValueError, TypeError, AssertionError, ArithmeticError, RuntimeError, AttributeError, LookupError)
STEP = "step"  # torch's name of the counter, a number to some optimizers and a tensor to others


def check_groups(path: Path, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """CheckpointError naming a setting in `groups`, read from `path`, that is missing or unlike the optimizer's own."""
    wrapped = wrapped_optimizer(optimizer)
    needed = wrapped.defaults.keys()
    arguments = inspect.signature(type(wrapped)).parameters
    optional = {name for name, argument in arguments.items() if argument.default is None}  # as foreach and fused
    for number, (saved, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for name in sorted(needed & own.keys()):
            if name not in saved:
                raise CheckpointError(f"{path} is damaged: parameter group {number} has no {name!r}")
            is_unset = saved[name] is None and name in optional
            if not is_unset and not _is_like(saved[name], own[name]):
                raise CheckpointError(
                    f"{path} is damaged: {name!r} of parameter group {number} is {saved[name]!r}"[:500]
                )


def check_number(path: Path, name: str, value: Any) -> None:
    """CheckpointError unless `value` is what a counter may be."""
    if not _is_number(value):
        raise CheckpointError(f"{path} is damaged: {name!r} is {value!r}"[:500])


def wrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that makes the updates, behind one that only shares them out."""
    if isinstance(optimizer, Zero1Optimizer):
        return optimizer.local
    if isinstance(optimizer, ShardedOptimizer) and optimizer._local is not None:
        return optimizer._local
    return optimizer


class StateOfAStep:
    """What one step leaves in the state of a parameter, under the settings of a checkpoint."""

    def __init__(self, path: Path, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
        self.path, self.groups, self.optimizer = path, groups, wrapped_optimizer(optimizer)
        self.own_groups = optimizer.param_groups
        self._known: dict[tuple[Any, ...], dict[str, Kind] | None] = {}

    def kept(self, group: int, parameter: Tensor, num_dimensions: int) -> dict[str, Kind] | None:
        """Names and kinds of the state of a `parameter` of so many dimensions, of which this rank may keep a part.

        None where the parameter can have no gradient, or the optimizer takes no step under its own settings either.
        CheckpointError where only those of the checkpoint are out of its range.
        """
        if not parameter.is_floating_point() and not parameter.is_complex():
            return None
        key = group, num_dimensions, parameter.dtype, parameter.device
        if key not in self._known:
            try:
                self._known[key] = self._after_a_step(self.groups[group], parameter, num_dimensions)
            except REFUSALS as error:
                kind = type(self.optimizer).__name__
                if self.kept_by_own_settings(group, parameter, num_dimensions) is not None:
                    raise CheckpointError(f"{self.path} is damaged: {kind} cannot go on: {error}") from error
                self._known[key] = None
        return self._known[key]

    def kept_by_own_settings(self, group: int, parameter: Tensor, num_dimensions: int) -> dict[str, Kind] | None:
        """The same under the settings that the optimizer has now; None where it takes no step."""
        try:
            return self._after_a_step(self.own_groups[group], parameter, num_dimensions)
        except REFUSALS:
            return None

    def _after_a_step(self, settings: dict[str, Any], parameter: Tensor, num_dimensions: int) -> dict[str, Kind]:
        small = nn.Parameter(torch.zeros((2,) * num_dimensions, dtype=parameter.dtype, device=parameter.device))
        small.grad = torch.zeros_like(small)
        group = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items() if name != "names"}
        kind = type(self.optimizer)
        accepted = inspect.signature(kind).parameters
        defaults = {name: value for name, value in self.optimizer.defaults.items() if name in accepted}
        optimizer = kind([hyperparameters(group) | {"params": [small]}], **defaults)
        optimizer.step()
        state = optimizer.state.get(small, {})
        return {name: _kind(name, value, small.shape) for name, value in state.items() if value is not None}


def _kind(name: str, value: Any, shape: torch.Size) -> Kind:
    if isinstance(value, Tensor) and name != STEP:
        return "like" if value.shape == shape else "scalar" if value.ndim == 0 else "other"
    return "number" if name == STEP or _is_number(value) else "other"


def _is_like(saved: Any, own: Any) -> bool:
    """Whether `saved`, out of a JSON file, may stand where the optimizer has `own`."""
    own = own.item() if isinstance(own, Tensor) else own
    if isinstance(own, bool):
        return isinstance(saved, bool)
    if isinstance(own, int | float):  # below 0 is Adafactor's beta2_decay
        return _is_number(saved) or (own < 0 and _is_number(saved, least=-sys.float_info.max))
    if isinstance(own, tuple | list):
        return isinstance(saved, list) and len(saved) == len(own) and all(map(_is_like, saved, own))
    if isinstance(own, str):
        return isinstance(saved, str)
    return not isinstance(saved, dict | list)


def _is_number(value: Any, *, least: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= sys.float_info.max
