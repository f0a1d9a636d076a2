"""One check and one message for each way an attention call can be wrong, and whether anybody
watches it.

Nothing is launched before all checks pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any, NoReturn

import torch
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
from torch.utils._device import DeviceContext

from cs336_systems.measure.stages import stage

# torch computes with no others
FLOATING_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MOST = 2**31 - 1  # tokens, batch entries or heads: kernels number them in 32 bits


# One argument


def check_tensor(
    name: str,
    tensor: Tensor,
    shapes: dict[int, str] | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATING_DTYPES,
) -> Tensor:
    """`tensor` if it is dense, of one of `dtypes` and one of `shapes` (dimensions: how to write
    them).
    """
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be a tensor of {wanted}, got {kind_of(tensor)}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind_found = "a nested one" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} must be a dense strided tensor, got {kind_found}")
    if shapes is not None and tensor.ndim not in shapes:
        raise ValueError(
            f"{name} must have shape {' or '.join(shapes.values())}, got {tuple(tensor.shape)}"
        )
    return tensor


def check_count(name: str, value: int, least: int = 0, most: int | None = MOST) -> int:
    """`value` if it is an int from `least` to `most`; of what may be more than there are, `most` is
    None.
    """
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < least:
        raise ValueError(f"{name} must be an int from {least} on, got {brief(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {brief(value)}")
    return value


def check_flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return value


def has_values(tensor: Tensor) -> bool:
    """Whether the host can look at `tensor` for nothing: it is on the CPU, real, and nobody traces."""
    if (
        not tensor.is_cpu
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    return type(tensor) is Tensor and not torch._C._len_torch_dispatch_stack()


def brief(value: object) -> str:
    """`value` for a message; of a very large integer how large it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def kind_of(value: object) -> str:
    return (
        f"{value.dtype} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )


# Those of a call

# Keywords of SDPA, flash-attn and FlexAttention, and what is said to who uses them here.
KEYWORDS_ELSEWHERE = {
    "causal": "it is called is_causal here",
    "softmax_scale": "it is called scale here",
    "sm_scale": "it is called scale here",
    "attn_mask": "a mask is a BlockMask here, for flash_attention's block_mask",
    "mask": "a mask is flash_attention's block_mask, or attn_mask of bools",
    "block_mask": "only flash_attention takes masks",
    "dropout_p": "there is no dropout of attention weights",
    "dropout": "there is no dropout of attention weights",
    "window_size": "a window is a block_mask here: BlockMask.sliding_window",
    "softcap": "scores are not capped",
    "alibi_slopes": "there is no bias of scores",
    "score_mod": "scores are not modified; BlockMask.from_mask_mod takes a mask_mod",
    "return_attn_probs": "probabilities are never whole; return_lse=True returns the log-sum-exp",
    "return_softmax_lse": "it is called return_lse here",
}


def refuse_keywords(function: str, unknown: Mapping[str, object]) -> NoReturn:
    """Raise the TypeError of keywords that `function` does not have, with the name that they have
    here.
    """
    name = next(iter(unknown))
    hint = f"; {KEYWORDS_ELSEWHERE[name]}" if name in KEYWORDS_ELSEWHERE else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def check_flags(**flags: bool) -> None:
    """Raise TypeError unless each is a bool: "no" and None would quietly count as True and False."""
    for name, value in flags.items():
        if value is not True and value is not False:
            check_flag(name, value)


def check_attention_inputs(
    q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool = False, packed: bool = False
) -> None:
    """Raise TypeError or ValueError naming the argument unless q, k, v fit together.

    Expected: q (..., heads, queries, head_dim), k and v (..., kv_heads, keys, head_dim), one
    floating dtype, one device, equal leading dimensions; kv_heads equals heads, or divides it under
    `enable_gqa`. `packed`: q (total_queries, heads, head_dim), k and v (total_keys, kv_heads,
    head_dim).
    """
    heads_at, rows_at = (-2, -3) if packed else (-3, -2)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if (
            type(x) is not Tensor
            or x.dtype not in FLOATING_DTYPES
            or x.layout is not torch.strided
            or x.is_nested
        ):
            check_tensor(name, x)
        shape = x.shape
        if len(shape) < 3 or (packed and len(shape) > 3) or shape[-1] == 0:
            layout = "(total, heads, head_dim)" if packed else "(..., heads, seq, head_dim)"
            raise ValueError(
                f"{name} must have shape {layout}, head_dim at least 1, got {tuple(x.shape)}"
            )
    dtype, device, shape_q, shape_k = q.dtype, q.device, q.shape, k.shape
    for name, x in (("k", k), ("v", v)):
        if x.dtype is not dtype:
            raise TypeError(f"{name} must have q's dtype {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {x.device}")
    heads, kv_heads = shape_q[heads_at], shape_k[heads_at]
    if shape_q == shape_k == v.shape:
        return
    if heads != kv_heads:
        if not enable_gqa:
            raise ValueError(
                f"k must have q's {heads} heads (or pass enable_gqa=True), got {kv_heads}"
            )
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(
                f"k must have a number of heads that divides q's {heads}, got {kv_heads}"
            )
    expected_k = [*shape_q]
    expected_k[heads_at], expected_k[rows_at] = kv_heads, shape_k[rows_at]
    if [*shape_k] != expected_k:
        raise ValueError(
            f"k must have shape {tuple(expected_k)} to go with q {tuple(q.shape)}, got {tuple(k.shape)}"
        )
    if v.shape != shape_k:
        hint = (
            "; a value head dim other than the key's is not supported"
            if v.shape[:-1] == k.shape[:-1]
            else ""
        )
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}{hint}")


def check_documents(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """Raise TypeError or ValueError unless the boundaries cut q and k, (total, heads, head_dim),
    into documents.

    The boundaries' values are looked at on the CPU only: on a GPU that would stall the host.
    """
    for side, packed, cu_seqlens, longest in (
        ("q", q, cu_seqlens_q, max_seqlen_q),
        ("k", k, cu_seqlens_k, max_seqlen_k),
    ):
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
        # in 32 bits a fall from 2³¹ - 1 would wrap around to a rise
        lengths = cu_seqlens.long().diff()
        if cu_seqlens[0] != 0 or (lengths < 0).any() or cu_seqlens[-1] > len(packed):
            raise ValueError(
                f"{name} must rise from 0 to at most the {len(packed)} rows of {side}, got {cu_seqlens.tolist()}"
            )
        if len(lengths) and longest < (needed := int(lengths.max())):
            raise ValueError(
                f"max_seqlen_{side} must be at least the longest length, {needed}, got {longest}"
            )
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_k must have as many documents as cu_seqlens_q, {len(cu_seqlens_q) - 1}, "
            f"got {len(cu_seqlens_k) - 1}"
        )


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """`scale`, or 1/sqrt(head_dim) when it is None.

    Must be positive: kernels take row maxima before it. They multiply it by log₂e, in float32,
    where neither may overflow, and a scale that is subnormal loses its digits.
    """
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale must be a float or None, got {type(scale).__name__}")
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= scale <= limits.max / math.log2(math.e):
        raise ValueError(
            f"scale must be positive and a normal float32, times log2(e) too, got {brief(scale)}"
        )
    return float(scale)


def are_plain(*arguments: Any) -> bool:
    """Whether these are plain tensors and nobody watches: no compiler, no mode, no transform of
    torch.func.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._len_torch_function_stack() and not _functions_are_plain():
        return False
    for x in arguments:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            # Negated lazily (the imaginary part of a conjugate): in memory the sign is the other
            # one. Batched the old way: `torch.autograd.grad(is_grads_batched=True)` maps a backward
            # without a transform. Wrapped: what has left a transform of torch.func, which has
            # ended.
            if (
                x.is_meta
                or x.is_neg()
                or is_legacy_batchedtensor(x)
                or is_functorch_wrapped_tensor(x)
            ):
                return False
        elif isinstance(x, Tensor):
            return False
    return True


def _functions_are_plain() -> bool:
    """Whether no mode sees calls of torch's functions but that of `torch.set_default_device`, which
    alters none here.

    It gives a device to what is made without one, and our calls name theirs.
    """
    return all(
        type(torch._C._get_function_stack_at(place)) is DeviceContext
        for place in range(torch._C._len_torch_function_stack())
    )


def has_hooks() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` is active with hooks that may give back
    other tensors.

    Those of an object that says `gives_back_the_same`, as FSDP's do, give back the memory that they
    were given.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not getattr(
        getattr(hooks[0], "__self__", None), "gives_back_the_same", False
    )


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise NotImplementedError if a tensor carries a forward-mode tangent, which a custom backward
    would drop.
    """
    # tangents live within a level
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    # vmap may have wrapped what carries one; a batched tensor itself cannot be unpacked.
    plain = (layer for x in tensors for layer in layers(x) if not is_batchedtensor(layer))
    if any(forward_ad.unpack_dual(layer, level=0).tangent is not None for layer in plain):
        raise NotImplementedError(
            "forward-mode AD is not supported here; backend='reference' has it"
        )


def refuse_differentiating_transforms(*tensors: Tensor) -> None:
    """Raise NotImplementedError where torch.func would differentiate: the operators have no rule
    for it.
    """
    if (
        torch.compiler.is_compiling()
        or not torch._C._are_functorch_transforms_active()
        or not torch.is_grad_enabled()
    ):
        return
    if any(
        is_gradtrackingtensor(layer) and layer.requires_grad for x in tensors for layer in layers(x)
    ):
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


def autocast_kind(x: Tensor) -> str | None:
    """x's device type if autocast exists there, else None.

    A list and not `torch.amp.is_autocast_available`, which torch 2.11's compiler cannot trace.
    """
    return "cuda" if x.is_cuda else "cpu" if x.is_cpu else None


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off on x's device: what accumulates in float32 must not be cast back to 16 bits."""
    kind = autocast_kind(x)
    return nullcontext() if kind is None else torch.autocast(kind, enabled=False)


def to_autocast_dtypes(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`to_autocast_dtype` of each; where autocast is on nowhere, these as they are."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors
    return tuple(to_autocast_dtype(x) for x in tensors)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x in autocast's dtype where autocast is on and x has 16 or 32 bits; anything else is for the
    checks to judge.
    """
    if not isinstance(x, Tensor) or not autocast_casts(x):
        return x
    with nullcontext() if torch.compiler.is_compiling() else stage("cast"):
        return x.to(torch.get_autocast_dtype(x.device.type))


def autocast_casts(x: Tensor) -> bool:
    """Whether autocast is on where x is, and x has 16 or 32 bits of another dtype than autocast's."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    kind = autocast_kind(x)
    return (
        kind is not None
        and torch.is_autocast_enabled(kind)
        and x.dtype != torch.get_autocast_dtype(kind)
    )
