"""Checks of FSDP's weights, arguments and calls: what FSDP cannot serve raises by name.

The files that tell a weight's life call these, and can be read without this one. What concerns all
wrappers is in `distributed/guards.py`; that ranks do the same in the same order, in `agreement.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from cs336_systems.distributed.fsdp.weight import ShardedWeight

# The wrapper


class NeverCopied:
    """Base of a wrapper that can be neither copied nor pickled."""

    def __getstate__(self) -> NoReturn:
        """Raise TypeError when the wrapper is copied or pickled, as by deepcopy or AveragedModel.

        Shards belong to their process group and units, which cannot be copied.
        """
        raise TypeError(
            "FSDP cannot be copied or pickled: "
            "keep copies of its parameters() for their average, and load "
            "gather_full_params() into another FSDP, or save_checkpoint, for a second model"
        )


def check_dtypes(**dtypes: torch.dtype | None) -> None:
    """Raise ValueError naming an argument that is neither a floating-point dtype nor None."""
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name} must be a floating-point dtype, got {dtype!r}")


def check_output(output: Any) -> None:
    """Raise TypeError if a forward's `output` is an iterator or awaitable, which computes later."""
    if isinstance(output, Iterator | Awaitable):
        kind = type(output).__name__
        raise TypeError(
            f"forward must return what it has computed, got a {kind}, which computes later"
        )


def check_none_aside(weights: Iterable[ShardedWeight]) -> None:
    """Raise RuntimeError if gradients of `weights` wait that `no_sync` put aside."""
    if any(weight.accumulated is not None for weight in weights):
        raise RuntimeError(
            "gradients wait that no_sync put aside: call finish_gradient_synchronization() first"
        )


# Weights


def check_shard(weight: ShardedWeight) -> None:
    """Raise RuntimeError if the shard's dtype, device or shape has changed since it was cut."""
    now = (weight.shard.dtype, weight.shard.device, weight.shard.shape)
    if now != weight.as_kept:
        before, after = (
            f"{dtype} {tuple(shape)} on {device}" for dtype, device, shape in (weight.as_kept, now)
        )
        raise RuntimeError(
            f"parameter {weight.name!r} must not be cast, moved or reshaped "
            "once FSDP has wrapped it: its rows were "
            f"{before} and are {after}; do that before, or choose compute_dtype"
        )


def check_wholes(
    weights: Iterable[ShardedWeight], shown: Iterable[tuple[dict[str, Any], str, ShardedWeight]]
) -> None:
    """Raise RuntimeError naming a whole weight that a forward has changed or replaced.

    `shown` holds modules' parameters, an attribute, and the weight that was shown there.
    """
    for weight in weights:
        if weight.whole._version:
            raise RuntimeError(
                f"parameter {weight.name!r} must not be changed in a forward, as max_norm does"
            )
    for in_use, attribute, weight in shown:
        if in_use.get(attribute) is not weight.whole:
            raise RuntimeError(f"parameter {weight.name!r} must not be replaced in a forward")


def check_no_hooks(weights: Iterable[ShardedWeight]) -> None:
    """Raise RuntimeError naming a weight whose shard has gradient hooks, never called."""
    for weight in weights:
        if weight.shard._backward_hooks or weight.shard._post_accumulate_grad_hooks:
            raise RuntimeError(
                f"parameter {weight.name!r} must have no gradient hooks: FSDP never calls them"
            )


class FixedParameters(dict[str, Any]):
    """The `_parameters` of the module at `path`: no parameter may be added, replaced or removed."""

    def __init__(self, path: str, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.path = path

    def __setitem__(self, name: str, value: Any) -> None:
        """Raise RuntimeError for another value: `module.weight = ...`, tying, functional_call."""
        if value is not self.get(name):
            self._refuse(name, "replaced" if name in self else "added")

    def __delitem__(self, name: str) -> None:
        """Raise RuntimeError: parametrizations and weight norms remove parameters so."""
        self._refuse(name, "removed")

    def pop(self, name: str, default: Any = None) -> Any:
        """Raise RuntimeError, as `__delitem__` does."""
        self._refuse(name, "removed")

    def _refuse(self, name: str, change: str) -> NoReturn:
        """Raise RuntimeError saying that parameter `name` cannot be added, replaced or removed."""
        path = f"{self.path}.{name}" if self.path else name
        raise RuntimeError(
            f"parameter {path!r} cannot be {change} once FSDP has wrapped its module: "
            "do that before, or give it other "
            "values by load_full_params"
        )


# Calls and their backwards


def check_casts(casts: Iterable[Tensor], unit: str, dtype: torch.dtype | None) -> None:
    """Raise RuntimeError if the forward of `unit` wrote into `casts`, arguments cast to `dtype`."""
    # inference tensors do not count their changes
    if any(not one.is_inference() and one._version for one in casts):
        raise RuntimeError(f"{unit!r} must not write into its arguments unless they are {dtype}")


def check_no_second_backward(unit: str) -> None:
    """Raise RuntimeError within a backward under `create_graph=True`, which needs `unit` again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"create_graph=True is not supported: {unit!r} is freed before a second backward"
        )


def check_unchanged(weight: ShardedWeight, version: int) -> None:
    """Raise RuntimeError if the shard of `weight` changed since the forward, at `version`.

    In one process autograd raises as well.
    """
    if weight.shard._version != version:
        raise RuntimeError(
            f"parameter {weight.name!r} was changed between a forward and its backward, "
            "as by a step()"
        )


def refuse_changed(tensor: Tensor, before: int, unit: str) -> NoReturn:
    """Raise RuntimeError: `tensor`, saved by `unit` at version `before`, was written to since."""
    raise RuntimeError(
        "one of the variables needed for gradient computation "
        "has been modified by an inplace operation: "
        f"{unit!r} saved a tensor of shape {tuple(tensor.shape)} at version {before}, "
        f"which is at version {tensor._version}"
    )


def refuse_output(value: Any, unit: str) -> NoReturn:
    """Raise RuntimeError: `unit` returned `value`, an object that holds one of its weights."""
    kind = type(value).__name__
    raise RuntimeError(f"{unit!r} must not return its weights, which are freed, in a {kind}")


# Notes on errors that PyTorch raises and that say too little


def explain(error: BaseException | None, unit: str) -> None:
    """Add a note naming `unit` if `error` says that torch.func does not work with such hooks.

    PyTorch refuses torch.func's gradients under saved-tensor hooks. Any other error stays as it is.
    """
    if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
        error.add_note(
            f"FSDP has such hooks while {unit!r} runs, as activation checkpoints have: "
            "take torch.autograd.grad "
            "there, or torch.func outside of modules with sharded weights."
        )


def explain_dtypes(
    error: BaseException, module: nn.Module, compute_dtype: torch.dtype | None
) -> None:
    """Add a note naming buffers in another dtype than `compute_dtype`, if `error` is on types.

    FSDP casts the units' arguments and weights to `compute_dtype`, but no buffers.
    """
    if compute_dtype is None or not isinstance(error, RuntimeError) or "type" not in str(error):
        return
    others = [
        name
        for name, one in module.named_buffers()
        if one.is_floating_point() and one.dtype != compute_dtype
    ]
    if others:
        names = ", ".join(map(repr, others))
        error.add_note(
            f"FSDP computes in {compute_dtype} and casts no buffers: "
            f"cast {names} in the forward, or before wrapping."
        )
