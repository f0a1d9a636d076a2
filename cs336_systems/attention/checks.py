"""Checks of an attention call: its arguments, the transforms it runs under, and autocast.

Each way in which a call can be wrong has one check and one message. Nothing is launched before all
checks pass.
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

# The dtypes that attention takes: torch multiplies matrices in no other floating ones.
FLOATING_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MOST = 2**31 - 1  # tokens, batch entries or heads: kernels number them in 32 bits


# One argument


def check_tensor(
    name: str,
    tensor: Tensor,
    shapes: dict[int, str] | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATING_DTYPES,
) -> Tensor:
    """Return `tensor`, or raise unless it is dense, of one of `dtypes` and of one of `shapes`.

    `shapes` maps allowed numbers of dimensions to their spelling in the message; None allows any.
    TypeError for a dtype or layout, ValueError for a number of dimensions.
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
    """Return `value`, or raise ValueError unless it is an int from `least` to `most`.

    `most` is None for counts that may be larger than what is counted, such as a window.
    """
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < least:
        raise ValueError(f"{name} must be an int from {least} on, got {brief(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {brief(value)}")
    return value


def check_flag(name: str, value: bool) -> bool:
    """Return `value`, or raise TypeError unless it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return value


def has_values(tensor: Tensor) -> bool:
    """Return whether the host can read `tensor` without a wait: a plain CPU tensor, not traced."""
    if (
        not tensor.is_cpu
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    return type(tensor) is Tensor and not torch._C._len_torch_dispatch_stack()


def brief(value: object) -> str:
    """Return `repr(value)` for a message, or the number of bits of an integer of more than 128."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def kind_of(value: object) -> str:
    """Return a tensor's dtype and shape, or another object's type, for a message."""
    return (
        f"{value.dtype} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )


# The arguments of a call

# Keywords of SDPA, flash-attn and FlexAttention, with the hint that a message gives for each.
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
    """Raise TypeError for the first of the `unknown` keywords of `function`, with a hint.

    The hint names this library's keyword for it, or says that there is none (KEYWORDS_ELSEWHERE).
    """
    name = next(iter(unknown))
    hint = f"; {KEYWORDS_ELSEWHERE[name]}" if name in KEYWORDS_ELSEWHERE else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def check_flags(**flags: bool) -> None:
    """Raise TypeError unless each flag is a bool: "no" would silently count as True."""
    for name, value in flags.items():
        if value is not True and value is not False:
            check_flag(name, value)


def check_attention_inputs(
    q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool = False, packed: bool = False
) -> None:
    """Raise TypeError or ValueError naming the argument unless q, k, v fit together.

    Expected: q (..., heads, queries, head_dim), k and v (..., kv_heads, keys, head_dim), one
    floating dtype, one device, equal leading dimensions; kv_heads equals heads, or divides it under
    `enable_gqa`. With `packed`: q (total_queries, heads, head_dim), k and v (total_keys, kv_heads,
    head_dim).
    """
    heads_at, rows_at = (-2, -3) if packed else (-3, -2)

    # each tensor alone
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

    # k and v beside q: dtype and device, heads, shape
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
            f"k must have shape {tuple(expected_k)} to go with q {tuple(q.shape)}, "
            f"got {tuple(k.shape)}"
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
    """Raise TypeError or ValueError unless the boundaries cut q and k into equally many documents.

    q and k are (total, heads, head_dim). The boundaries' values are checked on the CPU only: on a
    GPU, reading them would stall the host.
    """
    for side, packed, cu_seqlens, longest in (
        ("q", q, cu_seqlens_q, max_seqlen_q),
        ("k", k, cu_seqlens_k, max_seqlen_k),
    ):
        name = f"cu_seqlens_{side}"
        check_tensor(name, cu_seqlens, {1: "(documents + 1,)"}, (torch.int32,))
        if not len(cu_seqlens) or cu_seqlens.device != q.device or not cu_seqlens.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous on q's device {q.device} and not empty, "
                f"got {tuple(cu_seqlens.shape)} "
                f"with stride {cu_seqlens.stride()} on {cu_seqlens.device}"
            )
        check_count(f"max_seqlen_{side}", longest, most=2**63 - 1)
        if not has_values(cu_seqlens):
            continue

        # in 32 bits a fall from 2³¹ - 1 would wrap around to a rise
        lengths = cu_seqlens.long().diff()
        if cu_seqlens[0] != 0 or (lengths < 0).any() or cu_seqlens[-1] > len(packed):
            raise ValueError(
                f"{name} must rise from 0 to at most the {len(packed)} rows of {side}, "
                f"got {cu_seqlens.tolist()}"
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
    """Return `scale`, or 1/sqrt(head_dim) when it is None; raise unless it is a usable number.

    It must be positive, since kernels take row maxima before they multiply by it. They multiply it
    by log₂e in float32: neither may overflow, and a subnormal scale loses its digits. TypeError
    for another type, ValueError for another value.
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
    """Return whether all tensors among `arguments` are plain and no compiler or mode is active.

    Modes are dispatch modes, function modes, the transforms of torch.func and the dual levels of
    forward-mode AD. A plain tensor is a `Tensor` or `Parameter`, no subclass, whose memory holds
    its values.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    # tangents exist within a dual level only
    if torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_function_stack() and not _functions_are_plain():
        return False
    for x in arguments:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            # is_neg: negated lazily (the imaginary part of a conjugate), with the other sign in
            # memory. Legacy batched: `torch.autograd.grad(is_grads_batched=True)` maps a backward
            # without a transform. Wrapped: a result of a transform of torch.func that has ended.
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
    """Return whether no function mode is active but that of `torch.set_default_device`.

    That mode gives a device to tensors made without one; calls in this package name theirs.
    """
    return all(
        type(torch._C._get_function_stack_at(place)) is DeviceContext
        for place in range(torch._C._len_torch_function_stack())
    )


def has_hooks() -> bool:
    """Return whether `torch.autograd.graph.saved_tensors_hooks` may give back other tensors.

    Hooks that are methods of an object with `gives_back_the_same` set, as FSDP's are, give back
    the memory that they were given: for them the answer is False.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not getattr(
        getattr(hooks[0], "__self__", None), "gives_back_the_same", False
    )


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise NotImplementedError if a tensor has a forward-mode tangent, which would be dropped."""
    # tangents exist within a dual level only
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return

    # vmap may have wrapped a tensor with a tangent; a batched tensor itself cannot be unpacked
    plain = (layer for x in tensors for layer in layers(x) if not is_batchedtensor(layer))
    if any(forward_ad.unpack_dual(layer, level=0).tangent is not None for layer in plain):
        raise NotImplementedError(
            "forward-mode AD is not supported here; backend='reference' has it"
        )


def refuse_differentiating_transforms(*tensors: Tensor) -> None:
    """Raise NotImplementedError if torch.func would differentiate: the operators have no rule."""
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
            "torch.func's grad, vjp, jacrev and hessian are not supported here; "
            "backend='reference' has them, "
            "and tensor.backward() and torch.autograd.grad work"
        )


def layers(x: Tensor) -> Iterator[Tensor]:
    """Yield x, then each tensor that transforms of torch.func have wrapped in it, inwards."""
    while is_functorch_wrapped_tensor(x):
        yield x
        x = get_unwrapped(x)
    yield x


DOUBLE_BACKWARD = "double backward is not supported here; backend='reference' has it"


def autocast_kind(x: Tensor) -> str | None:
    """Return "cuda" or "cpu" if x is there, else None: the device types with autocast.

    Not by `torch.amp.is_autocast_available`, which torch 2.11's compiler cannot trace.
    """
    return "cuda" if x.is_cuda else "cpu" if x.is_cpu else None


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context that turns autocast off on x's device.

    Operations that accumulate in float32 must not be cast back to 16 bits.
    """
    kind = autocast_kind(x)
    return nullcontext() if kind is None else torch.autocast(kind, enabled=False)


def to_autocast_dtypes(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `to_autocast_dtype` of each tensor; the same tuple if no autocast is on."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors
    return tuple(to_autocast_dtype(x) for x in tensors)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Return x in autocast's dtype if autocast is on and x has 16 or 32 bits, else x itself.

    Anything else, also what is no tensor, passes unchanged: the checks that follow judge it.
    """
    if not isinstance(x, Tensor) or not autocast_casts(x):
        return x
    with nullcontext() if torch.compiler.is_compiling() else stage("cast"):
        return x.to(torch.get_autocast_dtype(x.device.type))


def autocast_casts(x: Tensor) -> bool:
    """Return whether autocast would cast x: on, x of 16 or 32 bits, dtype other than autocast's."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    kind = autocast_kind(x)
    return (
        kind is not None
        and torch.is_autocast_enabled(kind)
        and x.dtype != torch.get_autocast_dtype(kind)
    )
