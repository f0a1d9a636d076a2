"""A call of a unit: saved-tensor hooks around its forward that gather the unit for its backward.

The wholes of a unit are freed after its forward, so tensors that autograd saved of them have no
memory then. A call therefore puts saved-tensor hooks around the forward: autograd calls `pack` for
each tensor that it saves, and `unpack` when a node of the backward needs the tensor back; `unpack`
gathers the unit first. That works whatever the module does with its outputs: the backward may enter
by a returned tensor, an attribute, a global list or a closure.

Two kinds of node do not call these hooks: an `autograd.Function` that keeps a weight itself
(`ctx.weight = weight`), and nodes under hooks that a module puts around its own code
(`save_on_cpu`). For them, hooks on the tensors that a call returns gather the unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cs336_systems.distributed.fsdp import engine, unit_guards
from cs336_systems.distributed.fsdp.unit import State, Unit


@dataclass(eq=False)
class Call:
    """One forward of a unit's entry, with the hooks that autograd calls for tensors it saves.

    A user's own saved-tensor hooks (save_on_cpu, a checkpoint around the unit) still work: autograd
    calls the top hooks only, so `pack` and `unpack` call those below.
    """

    unit: Unit
    need: Callable[[Call], None]  # gathers the unit for the backward of this call
    state_before: State  # of the unit
    began: int  # times of the wrapper's clock
    ended: float = math.inf
    casts: list[Tensor] = field(default_factory=list)  # the arguments that were cast
    # ids of argument tensors: one that is handed through is not an output
    given: set[int] = field(default_factory=set)
    has_saved: bool = False  # whether autograd has saved a tensor
    versions: list[int] = field(default_factory=list)  # of the shards, when the call began
    below: engine.Hooks | None = None  # the user's hooks

    @property
    def gives_back_the_same(self) -> bool:
        """Whether `unpack` returns the memory that `pack` was given: true without a user's hooks.

        The code that replays attention's launches reads this.
        """
        return self.below is None

    # Forward

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the call: autograd calls `pack` for every tensor that it saves from now on.

        `args` and `kwargs` are the forward's arguments, after the cast.
        """
        self.given = {id(one) for one in (*tensors_in(args), *tensors_in(kwargs))}
        self.versions = self.unit.versions()

        # The hooks below may be those of an outer call: then the user's are the ones below that.
        self.below = engine.saving_hooks()
        if self.below is not None and isinstance(
            outer := getattr(self.below[0], "__self__", None), Call
        ):
            self.below = outer.below

        engine.push_saving_hooks(self.pack, self.unpack)

    def stop_saving(self) -> None:
        """Restore the saved-tensor hooks that were in force before `start`."""
        engine.pop_saving_hooks()

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps in place of `tensor`: the tensor and its version counter.

        With a user's hooks below, return what they return. Called some forty times a block, so kept
        short.
        """
        self.has_saved = True
        if self.below is not None:
            return self.below[0](tensor)
        # Detached, since a node must not hold its own output; the version counter is the same.
        return tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def end(self, output: Any) -> Any:
        """End the call: register hooks on the output's tensors that gather the unit for a backward.

        Returns `output`, with copies in place of the unit's weights, whose memory is freed.
        """
        self.casts.clear()  # tensors that autograd saved keep the call alive
        outputs = tensors_in(output)
        if any(engine.storage_id(one) == self.unit.storage_id for one in outputs):
            output = self._with_copies(output)
            outputs = tensors_in(output)
        for one in outputs:
            if one.requires_grad and id(one) not in self.given:
                # Reading grad_fn makes it anew after a write through a view; a hook on the old one
                # crashes.
                _ = one.grad_fn
                one.register_hook(self.gradient_comes)
        return output

    def _with_copies(self, value: Any) -> Any:
        """Return `value` with the unit's weights, and views of them, replaced by copies.

        Looks into tuples, lists and dictionaries. Raises RuntimeError for a weight in an object of
        another kind, where it cannot be replaced.
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
            unit_guards.refuse_output(value, self.unit.name)
        return value

    # Backward

    def unpack(self, packed: Any) -> Tensor:
        """Gather the unit, and return the tensor that `pack` was given.

        Raises RuntimeError if the tensor, or the shard of a weight, was changed in between.
        """
        unit = self.unit
        if unit.state is not State.BACKWARD or unit.began != self.began:
            self.gradient_comes()
        if self.below is not None:
            return self.below[1](packed)
        tensor, before = packed
        if engine.storage_id(tensor) == unit.storage_id:
            place = unit.place_of(tensor)
            unit_guards.check_unchanged(unit.weights[place], self.versions[place])
        if tensor._version != before:  # autograd does not check tensors that hooks return
            unit_guards.refuse_changed(tensor, before, unit.name)
        return tensor

    def gradient_comes(self, _: Tensor | None = None) -> None:
        """Gather the unit for this call's backward, unless that is done; a hook on the outputs."""
        unit = self.unit
        if unit.state is State.BACKWARD and unit.began == self.began:
            return
        if unit.window.in_backward and unit.state is not State.FORWARD:
            self.need(self)

    # Arguments

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return `value` with floating-point tensors cast to `dtype`, also those in tuples.

        Remembers the copies that the cast makes in `casts`. Any other value is returned as it is.
        """
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
            value = value.to(dtype)
            self.casts.append(value)
        elif isinstance(value, tuple):
            value = _rebuilt(value, [self.cast(item, dtype) for item in value])
        return value


def _rebuilt(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of `items` of the same type as `like`, which may be a named tuple."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in `value`: nested lists, tuples, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        value = [getattr(value, name) for name in getattr(value, "__dataclass_fields__", ())]
    return [tensor for item in value for tensor in tensors_in(item)]
