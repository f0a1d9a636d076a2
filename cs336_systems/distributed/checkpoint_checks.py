"""Whether the optimizer of a checkpoint is one that this run can go on with, asked before anything is overwritten.

    check_groups(path / "progress.json", settings["groups"], optimizer)
    state = StateOfAStep(path / "progress.json", settings["groups"], optimizer)
    state.kept(0, parameter, 2)                       # {"step": "number", "exp_avg": "like", "exp_avg_sq": "like"}

A checkpoint that lacks a moment or has one of another shape would fail in the middle of the first step, in words of
whichever kernel meets it. What an optimizer keeps is found by letting one of the same kind and settings take a step on
a parameter of a few elements, so that no optimizer need be known here.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cs336_systems.distributed.checkpoint_storage import CheckpointError
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.zero1 import Zero1Optimizer

Kind = Literal["like", "scalar", "number", "other"]  # a tensor of the parameter's shape, a 0-d one, a counter, ...
STEP = "step"  # torch's name of the counter, a number to some optimizers and a tensor to others


def check_groups(path: Path, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """CheckpointError naming a setting in `groups`, read from `path`, that is missing or unlike the optimizer's own."""
    needed = wrapped_optimizer(optimizer).defaults.keys()
    for number, (saved, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for name in sorted(needed & own.keys()):
            if name not in saved:
                raise CheckpointError(f"{path} is damaged: parameter group {number} has no {name!r}")
            if not _is_like(saved[name], own[name]):
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
        self._known: dict[tuple[Any, ...], dict[str, Kind] | None] = {}

    def kept(self, group: int, parameter: Tensor, num_dimensions: int) -> dict[str, Kind] | None:
        """Names and kinds of the state of a `parameter` of so many dimensions, of which this rank may keep a part.

        None where an optimizer cannot be built, or stepped, by its settings alone. CheckpointError where the settings
        are out of its range.
        """
        key = group, num_dimensions, parameter.dtype, parameter.device
        if key not in self._known:
            self._known[key] = self._after_a_step(self.groups[group], parameter, num_dimensions)
        return self._known[key]

    def _after_a_step(self, settings: dict[str, Any], parameter: Tensor, num_dimensions: int) -> dict[str, Kind] | None:
        small = nn.Parameter(torch.zeros((2,) * num_dimensions, dtype=parameter.dtype, device=parameter.device))
        small.grad = torch.zeros_like(small)
        kind = type(self.optimizer)
        group = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items() if name != "names"}
        try:
            accepted = inspect.signature(kind).parameters
            defaults = {name: value for name, value in self.optimizer.defaults.items() if name in accepted}
            optimizer = kind([group | {"params": [small]}], **defaults)
            optimizer.step()
        except TypeError:  # it needs other arguments than its settings, or a closure
            return None
        except (ValueError, AssertionError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(f"{self.path} is damaged: {kind.__name__} cannot go on: {error}") from error
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
