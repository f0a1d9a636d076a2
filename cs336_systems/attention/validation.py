"""One check and one message for each way an attention call can be wrong; nothing is launched before all pass."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATING_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_attention_inputs(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool = False) -> None:
    """Raise TypeError or ValueError naming the argument unless q, k, v fit together.

    Expected: q (..., heads, queries, head_dim), k and v (..., kv_heads, keys, head_dim), one floating dtype, one
    device, equal leading dimensions; kv_heads equals heads, or divides it under `enable_gqa`.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in FLOATING_DTYPES:
            raise TypeError(f"{name} must have a floating dtype of 16, 32 or 64 bits, got {tensor.dtype}")
        if tensor.ndim < 3:
            raise ValueError(f"{name} must have shape (..., heads, seq, head_dim), got {tuple(tensor.shape)}")
        if tensor.shape[-1] == 0:
            raise ValueError(f"{name} must have a head_dim of at least 1, got {tuple(tensor.shape)}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if heads != kv_heads:
        if not enable_gqa:
            raise ValueError(f"k must have q's {heads} heads (or pass enable_gqa=True), got {kv_heads}")
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"k must have a number of heads that divides q's {heads}, got {kv_heads}")
    expected_k = (*q.shape[:-3], kv_heads, k.shape[-2], q.shape[-1])
    if tuple(k.shape) != expected_k:
        raise ValueError(f"k must have shape {expected_k} to go with q {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape != k.shape:
        hint = "; a value head dim other than the key's is not supported" if v.shape[:-1] == k.shape[:-1] else ""
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}{hint}")


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """`scale`, or 1/sqrt(head_dim) when it is None. Must be positive and finite: kernels take row maxima before it."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale must be a float or None, got {type(scale).__name__}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise NotImplementedError if a tensor carries a forward-mode tangent, which a custom backward would drop."""
    if torch.compiler.is_compiling():
        return
    plain = [x for x in tensors if not torch._C._functorch.is_batchedtensor(x)]  # vmap cannot unpack, and has none
    if any(forward_ad.unpack_dual(x, level=0).tangent is not None for x in plain):
        raise NotImplementedError("forward-mode AD is not supported here; backend='reference' has it")


def autocast_kind(x: Tensor) -> str | None:
    """x's device type if autocast exists there, else None.

    A list and not `torch.amp.is_autocast_available`, which torch 2.11's compiler cannot trace.
    """
    return x.device.type if x.device.type in ("cpu", "cuda") else None


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off on x's device: what accumulates in float32 must not be cast back to 16 bits."""
    kind = autocast_kind(x)
    return nullcontext() if kind is None else torch.autocast(kind, enabled=False)
