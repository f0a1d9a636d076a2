"""Build attention without a mask or causal: our stages and the library peers.

A builder of `implementations.REGISTRY` takes the shape and the device, and returns a `Built`, which
attends (batch, heads, seq, head_dim) tensors and names the kernel that runs. A block mask or a
compiled function that a call needs is made here, outside of the timing.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336_systems.attention import (
    BlockMask,
    FlashAttentionPyTorch,
    attention_reference,
    flash_attention,
)
from cs336_systems.attention.api import explain_backend
from cs336_systems.attention.choose import AttentionLayout
from cs336_systems.attention.compiled import compiled_reference
from cs336_systems.bench.spec import Unsupported
from cs336_systems.config import AttentionShape, FieldError

# (q, k, v) -> Tensor; Any, since some libraries declare a union
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Any]

FLEX_BLOCK = 128  # rows and columns of FlexAttention's tiles


@dataclass(frozen=True, kw_only=True)
class Built:
    """An implementation to be measured; only `attend` is timed, packing to its layout is not."""

    attend: AttentionFunction  # packed (q, k, v) -> packed output
    kernel: str = ""  # name of the kernel that runs
    pack: Callable[[Tensor], Tensor] = lambda x: x  # from (batch, heads, tokens, head_dim)
    unpack: Callable[[Tensor], Tensor] = lambda x: x  # to (batch, heads, tokens, head_dim)
    # builds the mask anew, as a call with a new mask must; timed separately
    build_mask: Callable[[], object] | None = None
    no_backward: str = ""  # why there is no backward; "" if there is
    # Context of the calls, entered outside of the timing: selecting SDPA's kernel takes the host
    # about 10 µs, which would slow a short call.
    context: Callable[[], AbstractContextManager[object]] = nullcontext


# Ours


def eager(shape: AttentionShape, device: str) -> Built:
    """Return plain PyTorch attention, which holds the whole matrix of scores."""
    return Built(attend=partial(attention_reference, is_causal=shape.is_causal))


def compiled(shape: AttentionShape, device: str) -> Built:
    """Return `eager` compiled, once for all lengths."""
    return Built(attend=partial(compiled_reference(dynamic=True), is_causal=shape.is_causal))


def tiled(shape: AttentionShape, device: str, compile_steps: bool = False) -> Built:
    """Return FlashAttention in PyTorch, tile by tile, with compiled steps if asked for."""
    is_causal = shape.is_causal
    return Built(
        attend=lambda q, k, v: FlashAttentionPyTorch.apply(q, k, v, is_causal, None, compile_steps)
    )


def triton_or_hopper(shape: AttentionShape, device: str, backend: str) -> Built:
    """Return `flash_attention` with `backend`: triton_first, triton or hopper."""
    q, k = query_and_key(shape, device)
    attend = partial(
        flash_attention, is_causal=shape.is_causal, enable_gqa=is_grouped(shape), backend=backend
    )
    return Built(attend=attend, kernel=_kernels(backend, q, k, shape))


def check_backend(
    backend: str,
    shape: AttentionShape,
    device: str,
    *,
    layout: AttentionLayout = "dense",
    block_size: tuple[int, int] | None = None,
) -> None:
    """Raise Unsupported with the reason if our `backend` does not take `shape` on `device`.

    `layout` and `block_size` are those of `explain_backend`.
    """
    q, k = query_and_key(shape, device)
    try:
        explain_backend(
            q,
            k,
            backend=backend,
            is_causal=shape.is_causal,
            layout=layout,
            block_size=block_size,
        )
        if backend == "triton_first":
            from cs336_systems.attention.triton.first import check_first

            check_first(q, k)
    except ValueError as error:
        raise Unsupported(str(error)) from None


def is_grouped(shape: AttentionShape) -> bool:
    """Return whether several query heads share a key head."""
    return shape.kv_heads not in (None, shape.heads)


# The libraries


def sdpa(shape: AttentionShape, device: str, backend: SDPBackend) -> Built:
    """Return PyTorch's scaled_dot_product_attention with the kernel `backend`."""
    attend = partial(
        F.scaled_dot_product_attention, is_causal=shape.is_causal, enable_gqa=is_grouped(shape)
    )
    return Built(attend=attend, context=partial(sdpa_kernel, backend))


def flex(shape: AttentionShape, device: str, **options: Any) -> Built:
    """Return compiled FlexAttention with its own `options`.

    A causal mask is lists of tiles: there is no S x S tensor.
    """
    # Shapes of one head belong to the grid of lengths, which would compile for minutes. Other
    # shapes get a kernel of their own.
    attend = partial(compiled_flex(dynamic=shape.batch * shape.heads == 1), **options)
    if not shape.is_causal:
        return Built(attend=attend)
    mask = BlockMask.causal(shape.seqlen_q, shape.seqlen_k, block_size=FLEX_BLOCK, device=device)
    tiles = mask.to_flex(lambda batch, head, query, key: query >= key)
    return Built(attend=partial(attend, block_mask=tiles))


def fa4(shape: AttentionShape, device: str) -> Built:
    """Return FlashAttention-4, with the package's version as the kernel's name."""
    return Built(
        attend=flash_attention_4(causal=shape.is_causal),
        kernel=f"flash-attn-4 {version('flash-attn-4')}",
    )


def flash_attention_4(**options: Any) -> AttentionFunction:
    """Return FlashAttention-4 as a function of (batch, heads, tokens, head_dim) tensors.

    It has heads behind tokens, so it is called on transposed views and returns one. `options` are
    its own, such as `window_size`.
    """
    from flash_attn.cute import flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        results = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return first_of(results).transpose(1, 2)

    return attend


def first_of(results: Any) -> Tensor:
    """Return the output of a call that returns either the output or (output, log-sum-exp)."""
    return results[0] if isinstance(results, tuple) else results


# A user's


def own(name: str, is_causal: bool) -> AttentionFunction:
    """Return a user's attention, `package.module:Name`, as a function of (q, k, v).

    The name is of an autograd.Function or a function of (q, k, v, is_causal). As in the handout,
    its q, k, v are (batch, n, d), so that heads are folded into the batch. Raises Unsupported for
    another class and, when called, for grouped heads.
    """
    named = load_name(name)
    call: Any = named
    if isinstance(named, type):
        if not issubclass(named, torch.autograd.Function):
            raise Unsupported(
                f"{name} must be an autograd.Function or a function of (q, k, v, is_causal)"
            )
        call = named.apply

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[1] != q.shape[1]:
            raise Unsupported(f"{name} has no grouped heads")
        return call(*(x.flatten(0, 1) for x in (q, k, v)), is_causal).view(q.shape)

    return attend


def load_name(name: str) -> Any:
    """The object that `package.module:Name` names; ValueError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    # The import runs the user's code, which may raise anything.
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"
        raise FieldError(
            "implementation", f"must be package.module:Name, {name!r} cannot be loaded: {why}"
        ) from error


# Kernels and inputs


def ran(kernel: str, device: str) -> str:
    """Return a kernel's name for the record, after "interpreter " if `device` is not "cuda"."""
    return kernel if device == "cuda" else f"interpreter {kernel}"


def _kernels(backend: str, q: Tensor, k: Tensor, shape: AttentionShape) -> str:
    """Return the names of our back end's kernels for q and k with their tiles, as records hold it.

    The text begins with "interpreter" if Triton's interpreter runs them.
    """
    if backend == "hopper":
        from cs336_systems.attention.hopper.entry import kernel_names

        return kernel_names(q, k, is_causal=shape.is_causal)
    if backend == "triton_first":
        return ran("flash_fwd_kernel tiled_backward", q.device.type)

    from cs336_systems.attention.triton.launch import rows_of_groups
    from cs336_systems.attention.triton.passes import forward_name, kernel_config

    rows = rows_of_groups(q, k, shape.is_causal)
    forward = forward_name(
        kernel_config("forward", rows, k, is_causal=shape.is_causal), rows, k, shape.is_causal
    )
    others = (
        kernel_config(kernel, q, k, is_causal=shape.is_causal).name for kernel in ("dkdv", "dq")
    )
    return ran(" ".join([forward, *others]), q.device.type)


def whole_keys(shape: AttentionShape) -> AttentionFunction:
    """Return the Triton forward without splitting keys among programs, even for few queries."""
    from cs336_systems.attention.triton.forward import launch_forward
    from cs336_systems.attention.triton.launch import rows_of_groups
    from cs336_systems.attention.triton.passes import kernel_config

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = kernel_config(
            "forward", rows_of_groups(q, k, shape.is_causal), k, is_causal=shape.is_causal
        )
        scale = shape.head_dim**-0.5
        return launch_forward(q, k, v, is_causal=shape.is_causal, scale=scale, config=config)[0]

    return attend


def query_and_key(shape: AttentionShape, device: str) -> tuple[Tensor, Tensor]:
    """Return uninitialised q (batch, heads, seqlen_q, head_dim) and k of `shape` on `device`."""
    dtype, kv_heads = getattr(torch, shape.dtype), shape.kv_heads or shape.heads
    q = torch.empty(
        (shape.batch, shape.heads, shape.seqlen_q, shape.head_dim), dtype=dtype, device=device
    )
    k = torch.empty(
        (shape.batch, kv_heads, shape.seqlen_k, shape.head_dim), dtype=dtype, device=device
    )
    return q, k


@cache
def compiled_flex(dynamic: bool) -> Any:
    """Return compiled FlexAttention: once for all lengths if `dynamic`, else anew for each shape.

    The latter is faster to run.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=dynamic)
