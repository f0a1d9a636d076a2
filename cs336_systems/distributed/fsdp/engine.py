"""Private functions of autograd's engine that FSDP needs; they are the same in torch 2.11 to 2.15.

PyTorch's DDP and FSDP use them as well. If a version of torch renames one, only this file changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import _pop_mode, _push_mode

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def current_backward() -> int:
    """Return the number of the backward that this code runs in; -1 outside of any.

    Code runs in a backward as a hook or as a checkpoint's recomputation.
    """
    return torch._C._current_graph_task_id()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that this code runs in has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def saving_hooks() -> Hooks | None:
    """Return the (pack, unpack) hooks in force for tensors that autograd saves, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def push_saving_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Put these saved-tensor hooks in force, in place of those before, until they are popped."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saving_hooks() -> None:
    """Remove the saved-tensor hooks of the last push; those before it are in force again."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def storage_id(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share their memory; 0 if not strided."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def unseen_by_checkpoints(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap `function` so that selective checkpoints around it do not see its operations.

    A selective checkpoint expects the operations of a forward, one by one, in its recomputation,
    where FSDP gathers at other places. Other dispatch modes, which count what a step computes,
    sends or allocates, do see FSDP's part.
    """

    @wraps(function)
    def hidden(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch._C._len_torch_dispatch_stack():  # nearly always
            return function(*args, **kwargs)

        # the lowest mode of a selective checkpoint
        modes = [
            torch._C._get_dispatch_stack_at(place)
            for place in range(torch._C._len_torch_dispatch_stack())
        ]
        lowest = next(
            (
                place
                for place, mode in enumerate(modes)
                if type(mode).__module__ == checkpoint.__name__
            ),
            None,
        )
        if lowest is None:
            return function(*args, **kwargs)

        # take off that mode and all above it, put the others back for the call, then restore all
        above = modes[lowest:]
        others = [mode for mode in above if type(mode).__module__ != checkpoint.__name__]
        for _ in above:
            _pop_mode()
        try:
            for mode in others:
                _push_mode(mode)
            return function(*args, **kwargs)
        finally:
            for _ in others:
                _pop_mode()
            for mode in above:
                _push_mode(mode)

    return hidden
