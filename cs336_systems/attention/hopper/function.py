"""The Hopper stage as an operator: refuse what the kernels cannot do, launch, save, restore.

`hopper_attention(q, k, v, deterministic, is_causal, scale, config)` is what `flash_attention(backend="hopper")` calls.
Deterministic gradients come from Triton's two passes, which need no more of the forward than its output and LSE: the
Hopper backward adds dQ up in memory, in whatever order its programs arrive there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention.hopper.backward import hopper_backward
from cs336_systems.attention.hopper.forward import hopper_forward
from cs336_systems.attention.hopper.support import hopper_refusal
from cs336_systems.attention.operator import AttentionOperator
from cs336_systems.attention.triton.function import triton_attention


def _forward(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool, is_causal: bool, scale: float, config: str
) -> tuple[Tensor, Tensor]:
    with _launch_device(q):
        return hopper_forward(q, k, v, is_causal, scale, config)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None,
    deterministic: bool, is_causal: bool, scale: float, config: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if deterministic:
        return triton_attention.backward(q, k, v, output, lse, grad_output, grad_lse, is_causal, scale, "")
    with _launch_device(q):
        return hopper_backward(q, k, v, output, lse.contiguous(), grad_output, grad_lse, is_causal, scale, config)


def _launch_device(q: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current CUDA device, which need not be q's; ValueError where the kernels cannot run."""
    if (why := hopper_refusal(q)) is not None:
        raise ValueError(f"q cannot be attended by the Hopper kernels: {why}")
    return nullcontext() if q.device.index == torch.cuda.current_device() else torch.cuda.device(q.device)


hopper_attention = AttentionOperator("hopper_attention", _forward, _backward, extras={"deterministic": "bool"})
