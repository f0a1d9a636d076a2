"""Build the attention implementations that benchmarks compare: our stages and the library peers.

`build(name, shape, device)` returns a `Built`, which attends (batch, heads, seq, head_dim) tensors
and names the kernel that runs, or raises `Unsupported` with the reason. A block mask or a compiled
function that a call needs is made here, outside of the timing.
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
from cs336_systems.attention.compiled import compiled_reference
from cs336_systems.attention.tiles import KernelConfig, select_config
from cs336_systems.attention.tiles.kernel_config import tma_reads_rows
from cs336_systems.bench.spec import Unsupported
from cs336_systems.config import BYTES_PER_ELEMENT, AttentionShape
from cs336_systems.device import has_cxx_compiler

# (q, k, v) -> Tensor; Any, since some libraries declare a union
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Any]

OURS = ("eager", "compiled", "tiled", "tiled_compiled", "triton_first", "triton", "hopper")
# our implementations in the order of development, each to be compared with the one before
STAGES = ("eager", "compiled", "tiled", "triton_first", "triton", "hopper")
PEERS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "flex_flash", "fa4")
IMPLEMENTATIONS = OURS + PEERS
# those that compile for less than seconds
TINY_IMPLEMENTATIONS = ("eager", "tiled", "triton_first", "triton", "sdpa_flash", "sdpa_cudnn")
FLEX_BLOCK = 128  # rows and columns of FlexAttention's tiles
SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}


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


def build(name: str, shape: AttentionShape, device: str) -> Built:
    """Return the implementation `name` for `shape` on `device`.

    `name` is one of IMPLEMENTATIONS or a user's own, `package.module:Name`. Raises ValueError for
    another name, and Unsupported if the implementation does not exist for the shape or device.
    """
    causal, grouped = shape.is_causal, shape.kv_heads not in (None, shape.heads)
    if ":" in name:
        return Built(attend=_own(name, causal))
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}"
        )
    if (
        device == "cpu"
        and name in ("compiled", "tiled_compiled", "flex")
        and not has_cxx_compiler()
    ):
        raise Unsupported("no C++ compiler")

    # Ours.
    if name == "eager":
        return Built(attend=partial(attention_reference, is_causal=causal))
    if name == "compiled":
        return Built(attend=partial(compiled_reference(dynamic=True), is_causal=causal))
    if name in ("tiled", "tiled_compiled"):
        compiled = name == "tiled_compiled"
        return Built(
            attend=lambda q, k, v: FlashAttentionPyTorch.apply(q, k, v, causal, None, compiled)
        )
    if name in ("triton_first", "triton", "hopper"):
        kernel = _kernels(name, *taken_by(name, shape, device), shape)
        ours = partial(flash_attention, is_causal=causal, enable_gqa=grouped, backend=name)
        return Built(attend=ours, kernel=kernel)

    # The libraries'.
    if name == "flex":
        no_backward = "FlexAttention has no backward on a CPU" if device == "cpu" else ""
        return Built(attend=_flex(shape, device), no_backward=no_backward)
    if name == "flex_flash":
        flash_attention_4(shape, device)  # raises Unsupported if it is not there, but needed
        flex: Any = _flex(shape, device)
        return Built(attend=partial(flex, kernel_options={"BACKEND": "FLASH"}))
    if name == "fa4":
        return Built(
            attend=flash_attention_4(shape, device),
            kernel=f"flash-attn-4 {version('flash-attn-4')}",
        )
    if device == "cpu" and name != "sdpa_flash":
        raise Unsupported(f"{name} needs CUDA")
    if device == "cuda" and name != "sdpa_efficient" and shape.dtype == "float32":
        raise Unsupported(f"{name} takes float16 and bfloat16 only")
    attend = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=grouped)
    return Built(attend=attend, context=partial(sdpa_kernel, SDPA_BACKENDS[name]))


def flash_attention_4(shape: AttentionShape, device: str, **options: Any) -> AttentionFunction:
    """Return FlashAttention-4 as a function of (batch, heads, tokens, head_dim) tensors.

    It has heads behind tokens, so it is called on transposed views and returns one. `options` are
    its own, such as `window_size`. Raises Unsupported on a CPU, in float32, or if the package
    flash-attn-4 is not installed.
    """
    if device == "cpu":
        raise Unsupported("FlashAttention-4 needs CUDA")
    if shape.dtype == "float32":
        raise Unsupported("FlashAttention-4 takes float16 and bfloat16 only")
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        raise Unsupported(
            "FlashAttention-4 is not installed: pip install 'cs336-systems[peers]'"
        ) from None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        results = flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)), **{"causal": shape.is_causal} | options
        )
        return first_of(results).transpose(1, 2)

    return attend


def first_of(results: Any) -> Tensor:
    """Return the output of a call that returns either the output or (output, log-sum-exp)."""
    return results[0] if isinstance(results, tuple) else results


def _own(name: str, causal: bool) -> AttentionFunction:
    """Return a user's attention, `package.module:Name`, as a function of (q, k, v).

    The name is of an autograd.Function or a function of (q, k, v, is_causal). As in the handout,
    its q, k, v are (batch, n, d), so that heads are folded into the batch. Raises Unsupported for
    another class and, when called, for grouped heads.
    """
    own = load_name(name)
    call: Any = own
    if isinstance(own, type):
        if not issubclass(own, torch.autograd.Function):
            raise Unsupported(
                f"{name} must be an autograd.Function or a function of (q, k, v, is_causal)"
            )
        call = own.apply

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[1] != q.shape[1]:
            raise Unsupported(f"{name} has no grouped heads")
        return call(*(x.flatten(0, 1) for x in (q, k, v)), causal).view(q.shape)

    return attend


def load_name(name: str) -> Any:
    """The object that `package.module:Name` names; ValueError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    # The import runs the user's code, which may raise anything.
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"implementation must be package.module:Name, {name!r} cannot be loaded: {why}"
        ) from error


def ran(kernel: str, device: str) -> str:
    """Return a kernel's name for the record, after "interpreter " if `device` is not "cuda"."""
    return kernel if device == "cuda" else f"interpreter {kernel}"


def taken_by(
    backend: str, shape: AttentionShape, device: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return uninitialised q and k of `shape`, after checking that our `backend` takes them.

    `options` are those of `explain_backend`. Raises Unsupported with the reason of a refusal.
    """
    q, k = query_and_key(shape, device)
    try:
        explain_backend(q, k, backend=backend, is_causal=shape.is_causal, **options)
        if backend == "triton_first":
            from cs336_systems.attention.triton.first import check_first

            check_first(q, k)
    except ValueError as error:
        raise Unsupported(str(error)) from None
    return q, k


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


def chosen_tiles(
    kernel: str, shape: AttentionShape, capability: tuple[int, int] | None, tma: bool | None = None
) -> KernelConfig:
    """Return the table's tiles of `kernel` for inputs of `shape`.

    `tma` says whether TMA can read the inputs; None means as for contiguous ones.
    """
    tma = tma_reads_rows(shape.head_dim, BYTES_PER_ELEMENT[shape.dtype]) if tma is None else tma
    return select_config(
        kernel,
        capability=capability,
        head_dim=shape.head_dim,
        batch=shape.batch,
        heads=shape.heads,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        dtype=shape.dtype,
        is_causal=shape.is_causal,
        tma=tma,
    )


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


def _flex(shape: AttentionShape, device: str) -> AttentionFunction:
    """Return compiled FlexAttention, with a causal mask as lists of tiles (no S x S tensor)."""
    # Shapes of one head belong to the grid of lengths, which would compile for minutes. Other
    # shapes get a kernel of their own.
    flex = compiled_flex(dynamic=shape.batch * shape.heads == 1)
    if not shape.is_causal:
        return flex
    mask = BlockMask.causal(shape.seqlen_q, shape.seqlen_k, block_size=FLEX_BLOCK, device=device)
    return partial(flex, block_mask=mask.to_flex(lambda batch, head, query, key: query >= key))
