"""One check and one message for each way an attention call can be wrong, and whether anybody watches it.

Nothing is launched before all checks pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
)
from torch.autograd import forward_ad
from torch.nn import Parameter

from cs336_systems.attention.masks import BlockMask
from cs336_systems.attention.masks.checks import (
    brief,
    check_count,
    check_flag,
    check_tensor,
    has_values,
    kind_of,
)
from cs336_systems.measure.stages import stage


def check_flags(**flags: bool) -> None:
    """Raise TypeError unless each is a bool: "no" and None would quietly count as True and False."""
    for name, value in flags.items():
        check_flag(name, value)


def check_attention_inputs(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool = False, packed: bool = False) -> None:
    """Raise TypeError or ValueError naming the argument unless q, k, v fit together.

    Expected: q (..., heads, queries, head_dim), k and v (..., kv_heads, keys, head_dim), one floating dtype, one
    device, equal leading dimensions; kv_heads equals heads, or divides it under `enable_gqa`. `packed`: q
    (total_queries, heads, head_dim), k and v (total_keys, kv_heads, head_dim).
    """
    layout = "(total, heads, head_dim)" if packed else "(..., heads, seq, head_dim)"
    heads_at, rows_at = (-2, -3) if packed else (-3, -2)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.ndim < 3 or (packed and tensor.ndim > 3) or tensor.shape[-1] == 0:
            raise ValueError(f"{name} must have shape {layout}, head_dim at least 1, got {tuple(tensor.shape)}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
    heads, kv_heads = q.shape[heads_at], k.shape[heads_at]
    if heads != kv_heads:
        if not enable_gqa:
            raise ValueError(f"k must have q's {heads} heads (or pass enable_gqa=True), got {kv_heads}")
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"k must have a number of heads that divides q's {heads}, got {kv_heads}")
    expected_k = [*q.shape]
    expected_k[heads_at], expected_k[rows_at] = kv_heads, k.shape[rows_at]
    if tuple(k.shape) != tuple(expected_k):
        raise ValueError(f"k must have shape {tuple(expected_k)} to go with q {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape != k.shape:
        hint = "; a value head dim other than the key's is not supported" if v.shape[:-1] == k.shape[:-1] else ""
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}{hint}")


def check_block_mask(block_mask: BlockMask, q: Tensor, k: Tensor, *, is_causal: bool) -> None:
    """Raise TypeError or ValueError unless `block_mask` is one for q and k, (..., heads, seq, head_dim) each."""
    if not isinstance(block_mask, BlockMask):
        kind = type(block_mask).__name__
        raise TypeError(f"block_mask must be a BlockMask or None, got {kind}; BlockMask.from_dense takes a bool tensor")
    if is_causal:
        raise ValueError(
            "is_causal must be False with a mask, got True: put it into the mask, as in attn_mask.tril() or "
            "block_mask & BlockMask.causal(seqlen_q, seqlen_k, block_size=block_mask.block_size)"
        )
    if block_mask.device != q.device:
        raise ValueError(f"block_mask must be on q's device {q.device}, got {block_mask.device}")
    if block_mask.seq_lengths != (q.shape[-2], k.shape[-2]):
        raise ValueError(
            f"block_mask must be made for {q.shape[-2]} queries and {k.shape[-2]} keys, "
            "got one for {} and {}".format(*block_mask.seq_lengths)
        )
    for name, size, expected in zip(("batch", "heads"), block_mask.shape, (math.prod(q.shape[:-3]), q.shape[-3])):
        if size not in (1, expected):
            raise ValueError(f"block_mask must have {name} 1 or q's {expected}, got {size}")


def from_attn_mask(attn_mask: Bool[Tensor, "... queries keys"], q: Tensor, k: Tensor) -> BlockMask:
    """The tiles of `attn_mask`, True where attended, which broadcasts to (..., heads, queries, keys) of q and k.

    Its leading dimensions are all 1 or all q's. TypeError for an additive mask of floats; ValueError for other shapes.
    """
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask must be a bool tensor, True where attended, got {kind_of(attn_mask)}; "
            "additive masks are not supported"
        )
    wanted = (*q.shape[:-1], k.shape[-2])
    shape = (1,) * (len(wanted) - attn_mask.ndim) + tuple(attn_mask.shape)
    leading, heads = shape[:-3], shape[-3] if len(shape) > 2 else 1
    fits = attn_mask.ndim >= 2 and len(shape) == len(wanted)
    fits = fits and all(size in (1, most) for size, most in zip(shape, wanted))
    if not fits or leading not in ((1,) * len(leading), wanted[:-3]):
        raise ValueError(
            f"attn_mask must broadcast to (..., heads, queries, keys) = {wanted}, "
            f"its batch dimensions all 1 or all q's, got {tuple(attn_mask.shape)}"
        )
    mask = attn_mask.expand(*attn_mask.shape[:-2], *wanted[-2:])
    return BlockMask.from_dense(mask.reshape(math.prod(leading), heads, *wanted[-2:]))


def check_documents(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    """Raise TypeError or ValueError unless the boundaries cut q and k, (total, heads, head_dim), into documents.

    The boundaries' values are looked at on the CPU only: on a GPU that would stall the host.
    """
    for side, packed, cu_seqlens, longest in (
        ("q", q, cu_seqlens_q, max_seqlen_q), ("k", k, cu_seqlens_k, max_seqlen_k)
    ):  # fmt: skip
        name = f"cu_seqlens_{side}"
        check_tensor(name, cu_seqlens, {1: "(documents + 1,)"}, (torch.int32,))
        if not len(cu_seqlens) or cu_seqlens.device != q.device or not cu_seqlens.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous on q's device {q.device} and not empty, got {tuple(cu_seqlens.shape)} "
                f"with stride {cu_seqlens.stride()} on {cu_seqlens.device}"
            )
        check_count(f"max_seqlen_{side}", longest, most=2**63 - 1)
        if not has_values(cu_seqlens):
            continue
        lengths = cu_seqlens.long().diff()  # in 32 bits a fall from 2³¹ - 1 would wrap around to a rise
        if cu_seqlens[0] != 0 or (lengths < 0).any() or cu_seqlens[-1] > len(packed):
            raise ValueError(
                f"{name} must rise from 0 to at most the {len(packed)} rows of {side}, got {cu_seqlens.tolist()}"
            )
        if len(lengths) and longest < (needed := int(lengths.max())):
            raise ValueError(f"max_seqlen_{side} must be at least the longest length, {needed}, got {longest}")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_k must have as many documents as cu_seqlens_q, {len(cu_seqlens_q) - 1}, "
            f"got {len(cu_seqlens_k) - 1}"
        )


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """`scale`, or 1/sqrt(head_dim) when it is None.

    Must be positive: kernels take row maxima before it. They multiply it by log₂e, in float32, where neither may
    overflow, and a scale that is subnormal loses its digits.
    """
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale must be a float or None, got {type(scale).__name__}")
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= scale <= limits.max / math.log2(math.e):
        raise ValueError(f"scale must be positive and a normal float32, times log2(e) too, got {brief(scale)}")
    return float(scale)


def are_plain(*arguments: Any) -> bool:
    """Whether these are plain tensors and nobody watches: no compiler, no mode, no transform of torch.func."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    for x in arguments:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            # Negated lazily (the imaginary part of a conjugate): in memory the sign is the other one. Batched the old
            # way: `torch.autograd.grad(is_grads_batched=True)` maps a backward without a transform. Wrapped: what has
            # left a transform of torch.func, which has ended.
            if x.is_meta or x.is_neg() or is_legacy_batchedtensor(x) or is_functorch_wrapped_tensor(x):
                return False
        elif isinstance(x, Tensor):
            return False
    return True


def has_hooks() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` is active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise NotImplementedError if a tensor carries a forward-mode tangent, which a custom backward would drop."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # tangents live within a level
        return
    # vmap may have wrapped what carries one; a batched tensor itself cannot be unpacked.
    plain = (layer for x in tensors for layer in layers(x) if not is_batchedtensor(layer))
    if any(forward_ad.unpack_dual(layer, level=0).tangent is not None for layer in plain):
        raise NotImplementedError("forward-mode AD is not supported here; backend='reference' has it")


def refuse_differentiating_transforms(*tensors: Tensor) -> None:
    """Raise NotImplementedError where torch.func would differentiate: the operators have no rule for it."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active() or not torch.is_grad_enabled():
        return
    if any(is_gradtrackingtensor(layer) and layer.requires_grad for x in tensors for layer in layers(x)):
        raise NotImplementedError(
            "torch.func's grad, vjp, jacrev and hessian are not supported here; backend='reference' has them, "
            "and tensor.backward() and torch.autograd.grad work"
        )


def layers(x: Tensor) -> Iterator[Tensor]:
    """x, and what transforms of torch.func have wrapped in it, from the outermost in."""
    while is_functorch_wrapped_tensor(x):
        yield x
        x = get_unwrapped(x)
    yield x


DOUBLE_BACKWARD = "double backward is not supported here; backend='reference' has it"


class _FirstOrderOnly(torch.autograd.Function):
    """apply(grad_q, grad_k, grad_v, *inputs): the gradients, as functions of the inputs without a derivative."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(DOUBLE_BACKWARD)


def refuse_double_backward(grads: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    """`grads` of a backward; under `create_graph` such that differentiating them again raises NotImplementedError.

    Without that they would be constants, and a penalty on a gradient would train nothing, without a word.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return grads
    return _FirstOrderOnly.apply(*grads, *inputs)


def autocast_kind(x: Tensor) -> str | None:
    """x's device type if autocast exists there, else None.

    A list and not `torch.amp.is_autocast_available`, which torch 2.11's compiler cannot trace.
    """
    return "cuda" if x.is_cuda else "cpu" if x.is_cpu else None


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off on x's device: what accumulates in float32 must not be cast back to 16 bits."""
    kind = autocast_kind(x)
    return nullcontext() if kind is None else torch.autocast(kind, enabled=False)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x in autocast's dtype where autocast is on and x has 16 or 32 bits; anything else is for the checks to judge."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return x
    kind = autocast_kind(x)
    if kind is None or not torch.is_autocast_enabled(kind) or x.dtype == torch.get_autocast_dtype(kind):
        return x
    with nullcontext() if torch.compiler.is_compiling() else stage("cast"):
        return x.to(torch.get_autocast_dtype(kind))
