"""A call of a unit: what autograd saves in its forward, and asks for in its backward.

The wholes of a unit are freed after its forward, and what autograd saved of them has no memory
then. So a call puts hooks of its own around the forward: `pack` is asked for each tensor that is
saved, `unpack` when a node of the backward needs it back, and gathers the unit first. That holds
for whatever the module does with its outputs: the backward may come in by a returned tensor, an
attribute, a global list or a closure.

Two kinds of node are not asked: an `autograd.Function` that keeps a weight itself
(`ctx.weight = weight`), and those under hooks that a module puts around its own code
(`save_on_cpu`). Hooks on the tensors that a call returns serve them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.distributed.fsdp import engine
from cs336_systems.distributed.fsdp.unit import State, Unit


@dataclass(eq=False)
class Call:
    """A forward of a unit's entry, which began and ended at these times of the wrapper's clock.

    A user's own hooks (save_on_cpu, a checkpoint around the unit) keep their part: autograd asks
    the top ones only, so that `pack` and `unpack` hand on to those below.
    """

    unit: Unit
    need: Callable[[Call], None]  # gathers for the backward
    state_before: State
    began: int
    ended: float = math.inf
    casts: list[Tensor] = field(default_factory=list)
    # ids of arguments: what is handed through is no output
    given: set[int] = field(default_factory=set)
    has_saved: bool = False
    versions: list[int] = field(default_factory=list)  # of the shards
    below: engine.Hooks | None = None

    @property
    def gives_back_the_same(self) -> bool:
        """Whether `unpack` returns the memory that `pack` was given: what replays attention's
        launches asks this.
        """
        return self.below is None

    # Forward

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ask this call for what autograd saves from now on."""
        self.given = {id(one) for one in (*tensors_in(args), *tensors_in(kwargs))}
        self.versions = self.unit.versions()
        self.below = engine.saving_hooks()
        if self.below is not None and isinstance(
            outer := getattr(self.below[0], "__self__", None), Call
        ):
            self.below = outer.below
        engine.push_saving_hooks(self.pack, self.unpack)

    def stop_saving(self) -> None:
        """Ask those again that were asked before."""
        engine.pop_saving_hooks()

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd is to keep in place of `tensor`: called some forty times a block, so
        kept short.
        """
        self.has_saved = True
        if self.below is not None:
            return self.below[0](tensor)
        # Detached, as a node must not hold its own output; that has the same version counter.
        return tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def end(self, output: Any) -> Any:
        """Gather as well when gradients come to what is returned; returns `output`, with copies of
        weights in it.
        """
        self.casts.clear()  # what is saved holds the call
        outputs = tensors_in(output)
        # whose memory is freed
        if any(engine.storage_id(one) == self.unit.storage_id for one in outputs):
            output = self._with_copies(output)
            outputs = tensors_in(output)
        for one in outputs:
            if one.requires_grad and id(one) not in self.given:
                # made anew where a view was written through: a hook on the old one crashes
                _ = one.grad_fn
                one.register_hook(self.gradient_comes)
        return output

    def _with_copies(self, value: Any) -> Any:
        """`value` with copies of the unit's weights and views of them; RuntimeError where nobody
        can put one in.
        """
        if isinstance(value, Tensor):
            return value.clone() if engine.storage_id(value) == self.unit.storage_id else value
        if isinstance(value, tuple):
            return _rebuilt(value, [self._with_copies(item) for item in value])
        if type(value) is list:
            return [self._with_copies(item) for item in value]
        if type(value) is dict:
            return {key: self._with_copies(item) for key, item in value.items()}
        if any(engine.storage_id(one) == self.unit.storage_id for one in tensors_in(value)):
            kind = type(value).__name__
            raise RuntimeError(
                f"{self.unit.name!r} must not return its weights, which are freed, in a {kind}"
            )
        return value

    # Backward

    def unpack(self, packed: Any) -> Tensor:
        """Gather the unit, and return the tensor that was packed; RuntimeError if it was changed in
        between.
        """
        unit = self.unit
        if unit.state is not State.BACKWARD or unit.began != self.began:
            self.gradient_comes()
        if self.below is not None:
            return self.below[1](packed)
        tensor, before = packed
        if engine.storage_id(tensor) == unit.storage_id:
            self._check_weight(tensor)
        if tensor._version != before:  # autograd leaves this to hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{unit.name!r} saved a tensor of shape {tuple(tensor.shape)} at version {before}, "
                f"which is at version {tensor._version}"
            )
        return tensor

    def _check_weight(self, saved: Tensor) -> None:
        """RuntimeError if `saved` is of a weight whose shard has changed: one process raises as
        well.
        """
        place = self.unit.place_of(saved)
        weight = self.unit.weights[place]
        if weight.shard._version != self.versions[place]:
            raise RuntimeError(
                f"parameter {weight.name!r} was changed between a forward and its backward, as by a step()"
            )

    def gradient_comes(self, _: Tensor | None = None) -> None:
        """Gather for the backward, once."""
        unit = self.unit
        if unit.state is State.BACKWARD and unit.began == self.began:
            return
        if unit.window.in_backward and unit.state is not State.FORWARD:
            self.need(self)

    # Arguments

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """`value` in `dtype` if it is a floating-point tensor, or a tuple with such tensors so."""
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
            value = value.to(dtype)
            self.casts.append(value)
        elif isinstance(value, tuple):
            value = _rebuilt(value, [self.cast(item, dtype) for item in value])
        return value


def _rebuilt(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def version(tensor: Tensor) -> int:
    """Return how often `tensor` was changed in place; 0 where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        value = [getattr(value, name) for name in getattr(value, "__dataclass_fields__", ())]
    return [tensor for item in value for tensor in tensors_in(item)]


# Errors of others that say too little


def explain(error: BaseException | None, unit: Unit) -> None:
    """Add the unit's name to PyTorch's refusal of torch.func's gradients where saved-tensor hooks
    are.
    """
    if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
        error.add_note(
            f"FSDP has such hooks while {unit.name!r} runs, as activation checkpoints have: take torch.autograd.grad "
            "there, or torch.func outside of modules with sharded weights."
        )


def explain_dtypes(
    error: BaseException, module: nn.Module, compute_dtype: torch.dtype | None
) -> None:
    """Name the buffers that keep their dtype, where the units' arguments and weights get another
    one.
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
            f"FSDP computes in {compute_dtype} and casts no buffers: cast {names} in the forward, or before wrapping."
        )
