"""What FSDP uses of autograd's engine that has no public name; the same in torch 2.11 to 2.15.

PyTorch's DDP and FSDP use these as well. A version of torch that renames one changes this file
alone.
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
    """Return the number of the backward that this code runs in, as a hook or a recomputation; -1
    outside of any.
    """
    return torch._C._current_graph_task_id()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the backward that this code runs in has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def saving_hooks() -> Hooks | None:
    """Return the (pack, unpack) hooks that are asked for tensors which autograd saves now; None if
    there are none.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def push_saving_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Ask these hooks from now on, and no others, for what autograd saves."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saving_hooks() -> None:
    """Ask those again that were asked before the last push."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def storage_id(tensor: Tensor) -> int:
    """Return what is the same for two tensors that share their memory; 0 for one without memory of
    its own.
    """
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def unseen_by_checkpoints(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Hide the operations of `function` from selective checkpoints around it, and from no other
    dispatch mode.

    Those look for the operations of a forward, one by one, in its recomputation, where FSDP gathers
    at other places. Modes that count what a step computes, sends or allocates do see FSDP's part.
    """

    @wraps(function)
    def hidden(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch._C._len_torch_dispatch_stack():  # nearly always
            return function(*args, **kwargs)
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
