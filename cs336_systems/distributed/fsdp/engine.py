"""What FSDP uses of autograd's engine that has no public name; the same in torch 2.11 to 2.15.

PyTorch's DDP and FSDP use these as well. A version of torch that renames one changes this file alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def current_backward() -> int:
    """Return the number of the backward that this code runs in, as a hook or a recomputation; -1 outside of any."""
    return torch._C._current_graph_task_id()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the backward that this code runs in has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def saving_hooks() -> Hooks | None:
    """Return the (pack, unpack) hooks that are asked for tensors which autograd saves now; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def push_saving_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Ask these hooks from now on, and no others, for what autograd saves."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saving_hooks() -> None:
    """Ask those again that were asked before the last push."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def storage_id(tensor: Tensor) -> int:
    """Return what is the same for two tensors that share their memory; 0 for one without memory of its own."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
