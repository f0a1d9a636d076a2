"""The Triton stage as operators and as an autograd.Function: choose tiles, launch, save, restore.

`triton_attention` and, with a block mask, `block_sparse_attention` are what `flash_attention` calls;
`varlen_attention` is behind `flash_attention_varlen`; `FlashAttentionTriton` is the handout's interface.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache, lru_cache, wraps
from typing import Any, TypeVar

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from cs336_systems.attention.operator import VARLEN_ARGUMENTS, AttentionOperator
from cs336_systems.attention.tiles import (
    KernelConfig,
    parse_configs,
    part_size,
    seen_keys,
    select_config,
    smallest_tile,
    target_of,
)
from cs336_systems.attention.triton.backward import launch_backward
from cs336_systems.attention.triton.block_sparse import (
    TileLists,
    fit_to_blocks,
    launch_block_sparse_backward,
    launch_block_sparse_forward,
)
from cs336_systems.attention.triton.descriptors import describable, rows_are_aligned
from cs336_systems.attention.triton.forward import launch_forward
from cs336_systems.attention.triton.launcher import KEPT_SHAPES
from cs336_systems.attention.triton.launching import (
    launch_fitting,
    num_multiprocessors,
    num_tiles,
    on_device_of,
    rows_of_groups,
    within_reach,
)
from cs336_systems.attention.triton.split import launch_split_forward
from cs336_systems.attention.triton.steps import ROW_PADDING
from cs336_systems.attention.triton.varlen import launch_varlen_backward, launch_varlen_forward
from cs336_systems.attention.validation import check_attention_inputs, check_flags, resolve_scale

Results = TypeVar("Results")
_interpreting = threading.RLock()  # Triton's interpreter keeps the program that it is at in globals


def kernel_config(
    kernel: str,
    q: Tensor,
    k: Tensor,
    config: str = "",
    *,
    is_causal: bool = False,
    capability: tuple[int, int] | None = None,
    tma: bool | None = None,
) -> KernelConfig:
    """The configuration that `kernel` will use for these inputs: the one named in `config`, or the table's.

    `capability` defaults to that of q's device, and to none (the interpreter) on the CPU; `tma`, whether Hopper's copy
    engine can read all inputs, to what it can do with q and k.
    """
    batch, heads, seqlen_q, _ = q.shape
    tma = describable(q, k) if tma is None else tma
    return _choose(kernel, q, config, capability, batch, heads, seqlen_q, k.shape[2], is_causal, tma)


def _choose(
    kernel: str, q: Tensor, config: str, capability: tuple[int, int] | None, batch: int, heads: int, seqlen_q: int,
    seqlen_k: int, is_causal: bool, tma: bool = False,
) -> KernelConfig:  # fmt: skip
    if capability is None and q.is_cuda:
        capability = _capability(q.device)
    named = parse_configs(config)
    if kernel in named:
        _check_tiles(named[kernel], q, target_of(capability))
        return named[kernel]
    return select_config(
        kernel,
        capability=capability,
        head_dim=q.shape[-1],
        batch=batch,
        heads=heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        dtype=str(q.dtype).removeprefix("torch."),
        is_causal=is_causal,
        tma=tma,
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _check_tiles(config: KernelConfig, q: Tensor, target: str) -> None:
    """ValueError for tiles that a caller names and Triton is known to miscompile on this GPU, or that read too far."""
    if config.kernel != "forward" and config.query_tile > ROW_PADDING.value:
        raise ValueError(
            f"config must have query tiles of at most {ROW_PADDING.value} rows in the backward, got {config.name}"
        )
    smallest = smallest_tile(target, q.element_size())
    if min(config.query_tile, config.key_tile) < smallest:
        raise ValueError(
            f"config must have tiles of at least {smallest} rows for {q.dtype} on {target}, "
            f"where Triton can miscompile smaller ones, got {config.name}"
        )


def _reachable(run: Callable[..., Results]) -> Callable[..., Results]:
    """`run` on tensors as kernels can address them; see `within_reach`."""

    @wraps(run)
    def reach(*arguments: Any) -> Results:
        return run(*(within_reach(x) for x in arguments))

    return reach


@_reachable
def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, config: str) -> tuple[Tensor, Tensor]:
    rows = rows_of_groups(q, k, is_causal)
    tma = describable(rows, k, v)
    chosen = _choose_by_shapes(("forward",), rows.shape, k.shape, q.dtype, q.device, config, is_causal, tma)

    def launch_it(forward: KernelConfig) -> tuple[Tensor, Tensor]:
        size = keys_of_a_part(forward, rows, k, is_causal)
        if size:
            return launch_split_forward(q, k, v, is_causal=is_causal, scale=scale, config=forward, part_size=size)
        return launch_forward(q, k, v, is_causal=is_causal, scale=scale, config=forward)

    return _launch(
        launch_it, chosen, q, q.shape[2], k.shape[2], name=lambda forward: forward_name(forward, rows, k, is_causal)
    )


def forward_name(config: KernelConfig, q: Tensor, k: Tensor, is_causal: bool) -> str:
    """The configuration's name and, where keys are split, in how many parts: `sm90_forward_64x64_w4_s3_tma/4`."""
    size = keys_of_a_part(config, q, k, is_causal)
    return f"{config.name}/{num_tiles(seen_keys(q.shape[2], k.shape[2], is_causal), size)}" if size else config.name


def keys_of_a_part(config: KernelConfig, q: Tensor, k: Tensor, is_causal: bool) -> int:
    """How many keys a program of the forward walks on q's device, where it pays to split them; else 0."""
    batch, heads, seqlen_q, head_dim = q.shape
    return part_size(
        config,
        head_dim=head_dim,
        bytes_per_element=q.element_size(),
        batch_heads=batch * heads,
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[2],
        is_causal=is_causal,
        num_multiprocessors=num_multiprocessors(q.device),
    )


@lru_cache(maxsize=KEPT_SHAPES)
def _choose_by_shapes(
    kernels: tuple[str, ...], q_shape: torch.Size, k_shape: torch.Size, dtype: torch.dtype, device: torch.device,
    config: str, is_causal: bool, tma: bool,
) -> tuple[KernelConfig, ...]:  # fmt: skip
    """`kernel_config` of each of `kernels`, found again in one step: short calls wait for the host."""
    capability = _capability(device) if device.type == "cuda" else None
    batch, heads, seqlen_q, head_dim = q_shape
    row = torch.empty(head_dim, dtype=dtype, device="meta")
    return tuple(
        _choose(kernel, row, config, capability, batch, heads, seqlen_q, k_shape[2], is_causal, tma)
        for kernel in kernels
    )


@_reachable
def _backward(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None,
    is_causal: bool, scale: float, config: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tma = _can_be_described(q, k, v, grad_output)
    chosen = _choose_by_shapes(("dkdv", "dq"), q.shape, k.shape, q.dtype, q.device, config, is_causal, tma)
    saved = (q, k, v, output.contiguous(), lse.contiguous(), _readable(grad_output, chosen), grad_lse)
    return _launch(
        lambda dkdv, dq: launch_backward(*saved, is_causal=is_causal, scale=scale, dkdv_config=dkdv, dq_config=dq),
        chosen, q, q.shape[2], k.shape[2],
    )  # fmt: skip


def _can_be_described(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor) -> bool:
    """Whether TMA can read the inputs of a backward, the gradient as it is or copied."""
    return describable(q, k, v) and (describable(grad_output) or rows_are_aligned(grad_output))


def _readable(grad_output: Tensor, configs: Iterable[KernelConfig]) -> Tensor:
    """The gradient, copied where TMA shall read it and cannot: autograd expands sums, to strides of 0."""
    if any(config.tma for config in configs) and not describable(grad_output) and rows_are_aligned(grad_output):
        return grad_output.clone(memory_format=torch.contiguous_format)
    return grad_output


def _launch(
    launcher: Callable[..., Results], configs: tuple[KernelConfig, ...], q: Tensor, seqlen_q: int, seqlen_k: int,
    **naming: Callable[[KernelConfig], str],
) -> Results:  # fmt: skip
    """`launcher(*configs)`, or with smaller ones, on q's device; ValueError where Triton cannot run."""
    if q.dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        raise ValueError("Triton's interpreter computes wrong bfloat16 products; use float32 or float16 with it")
    if not q.is_cuda and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"q is on {q.device}, and Triton kernels run on CUDA devices; "
            "set TRITON_INTERPRET=1 before the kernels are imported to run them on the CPU interpreter"
        )
    with on_device_of(q), _interpreting if triton.knobs.runtime.interpret else nullcontext():
        return launch_fitting(launcher, configs, q, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **naming)


@_reachable
def _block_sparse_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, _, scale, config = arguments
    lists = TileLists(*tensors)

    chosen = fit_to_blocks(kernel_config("forward", q, k, config, tma=describable(q, k, v)), lists.block_size)
    return _launch(
        lambda forward: launch_block_sparse_forward(q, k, v, lists, scale=scale, config=forward),
        (chosen,), q, q.shape[2], k.shape[2],
    )  # fmt: skip


@_reachable
def _block_sparse_backward(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *tensors, _, scale, config = arguments
    lists = TileLists(*tensors)
    tma = _can_be_described(q, k, v, grad_output)
    chosen = tuple(
        fit_to_blocks(kernel_config(kernel, q, k, config, tma=tma), lists.block_size) for kernel in ("dkdv", "dq")
    )
    saved = (q, k, v, output.contiguous(), lse.contiguous(), _readable(grad_output, chosen), grad_lse)
    return _launch(
        lambda dkdv, dq: launch_block_sparse_backward(*saved, lists, scale=scale, dkdv_config=dkdv, dq_config=dq),
        chosen, q, q.shape[2], k.shape[2],
    )  # fmt: skip


def _padded_shapes(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[torch.Size, torch.Size]:
    """Shapes of q and k as a batch of documents, all as long as the longest: by them tiles are chosen."""
    documents = len(cu_seqlens) - 1
    (total_q, heads, head_dim), (total_k, kv_heads, _) = q.shape, k.shape
    longest_q, longest_k = min(max_seqlen_q, total_q), min(max_seqlen_k, total_k)  # any number may be given
    return torch.Size((documents, heads, longest_q, head_dim)), torch.Size((documents, kv_heads, longest_k, head_dim))


@_reachable
def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool, scale: float, config: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shapes = _padded_shapes(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    chosen = _choose_by_shapes(("forward",), *shapes, q.dtype, q.device, config, is_causal, describable(k, v))
    return _launch(
        lambda forward: launch_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal=is_causal, scale=scale, config=forward
        ),
        chosen, q, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


@_reachable
def _varlen_backward(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool, scale: float, config: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shapes = _padded_shapes(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    tma = _can_be_described(q, k, v, grad_output)
    chosen = _choose_by_shapes(("dkdv", "dq"), *shapes, q.dtype, q.device, config, is_causal, tma)
    saved = (q, k, v, output.contiguous(), lse.contiguous(), _readable(grad_output, chosen), grad_lse)
    return _launch(
        lambda dkdv, dq: launch_varlen_backward(
            *saved, cu_seqlens_q, cu_seqlens_k, is_causal=is_causal, scale=scale, dkdv_config=dkdv, dq_config=dq
        ),
        chosen, q, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


triton_attention = AttentionOperator("triton_attention", _forward, _backward, launches=True)
block_sparse_attention = AttentionOperator(
    "block_sparse_attention",
    _block_sparse_forward,
    _block_sparse_backward,
    extras={name: "Tensor" for name in TileLists._fields},
)
varlen_attention = AttentionOperator(
    "varlen_attention", _varlen_forward, _varlen_backward, extras=VARLEN_ARGUMENTS, packed=True
)


class FlashAttentionTriton(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False, scale=None)` on (batch, seq, head_dim) or (batch, heads, seq, head_dim) tensors.

    Saves one tensor of shape (batch, queries), the log-sum-exp, beside q, k, v and the output. `torch.vmap` goes over
    `flash_attention`; PyTorch lets no transform of torch.func through this Function.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "... queries head_dim"],
        k: Float[Tensor, "... keys head_dim"],
        v: Float[Tensor, "... keys head_dim"],
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Float[Tensor, "... queries head_dim"]:
        q4, k4, v4 = (x.unsqueeze(1) if isinstance(x, Tensor) and x.ndim == 3 else x for x in (q, k, v))
        check_flags(is_causal=is_causal)
        check_attention_inputs(q4, k4, v4, enable_gqa=True)
        scale = resolve_scale(scale, q.shape[-1])
        output, lse = triton_attention(q4, k4, v4, is_causal, scale, "")
        output, lse = output.view(q.shape), lse.view(q.shape[:-1])
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = (*ctx.saved_tensors, grad_output)
        q, k, v, output, grad_output = (x.unsqueeze(1) if x.ndim == 3 else x for x in (*saved[:4], grad_output))
        lse = saved[4].view(q.shape[:-1])
        grads = triton_attention.backward(q, k, v, output, lse, grad_output, None, ctx.is_causal, ctx.scale, "")
        return *(grad.view(x.shape) for grad, x in zip(grads, saved)), None, None
