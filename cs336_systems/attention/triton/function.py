"""The Triton stage as operators and as an autograd.Function: choose a kernel and its tiles, launch.

`triton_attention` and, with a block mask, `block_sparse_attention` are what `flash_attention` calls;
`varlen_attention` is behind `flash_attention_varlen`; `FlashAttentionTriton` is the handout's interface.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.attention.masks.tiles import TileLists
from cs336_systems.attention.operator import AttentionOperator
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
from cs336_systems.attention.triton.forward import launch_forward
from cs336_systems.attention.triton.launch import Replays, launch_fitting
from cs336_systems.attention.triton.lists import fit_to_blocks
from cs336_systems.attention.triton.operands import (
    describable,
    num_multiprocessors,
    num_tiles,
    rows_are_aligned,
    rows_of_groups,
    within_reach,
)
from cs336_systems.attention.triton.split import launch_split_forward
from cs336_systems.attention.triton.steps import ROW_PADDING
from cs336_systems.attention.triton.varlen import launch_varlen_backward, launch_varlen_forward
from cs336_systems.attention.validation import check_attention_inputs, check_flags, resolve_scale

# Tiles


def kernel_config(
    kernel: str, q: Tensor, k: Tensor, names: str = "", *, is_causal: bool = False,
    capability: tuple[int, int] | None = None, tma: bool | None = None,
) -> KernelConfig:  # fmt: skip
    """The configuration that `kernel` will use for these inputs: that of `AttentionConfig.names`, or the table's.

    `capability` defaults to that of q's device, and to none (the interpreter) on the CPU; `tma`, whether Hopper's copy
    engine can read all inputs, to what it can do with q and k.
    """
    capability = _capability(q) if capability is None else capability
    named = parse_configs(names)
    if kernel in named:
        _check_tiles(named[kernel], q, target_of(capability))
        return named[kernel]
    batch, heads, seqlen_q, head_dim = q.shape
    return select_config(
        kernel, capability=capability, head_dim=head_dim, batch=batch, heads=heads, seqlen_q=seqlen_q,
        seqlen_k=k.shape[2], dtype=str(q.dtype).removeprefix("torch."), is_causal=is_causal,
        tma=describable(q, k) if tma is None else tma,
    )  # fmt: skip


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


def forward_name(config: KernelConfig, q: Tensor, k: Tensor, is_causal: bool) -> str:
    """The configuration's name and, where keys are split, in how many parts: `sm90_forward_64x64_w4_s3_tma/4`."""
    size = keys_of_a_part(config, q, k, is_causal)
    return f"{config.name}/{num_tiles(seen_keys(q.shape[2], k.shape[2], is_causal), size)}" if size else config.name


def keys_of_a_part(config: KernelConfig, q: Tensor, k: Tensor, is_causal: bool) -> int:
    """How many keys a program of the forward walks on q's device, where it pays to split them; else 0."""
    batch, heads, seqlen_q, head_dim = q.shape
    return part_size(
        config, head_dim=head_dim, bytes_per_element=q.element_size(), batch_heads=batch * heads, seqlen_q=seqlen_q,
        seqlen_k=k.shape[2], is_causal=is_causal, num_multiprocessors=num_multiprocessors(q.device),
    )  # fmt: skip


def _capability(x: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else None


def _gradients(
    launch: Callable[..., tuple[Tensor, Tensor, Tensor]], saved: tuple[Any, ...], *arguments: Any,
    names: str, is_causal: bool, like: tuple[Tensor, Tensor] | None = None, block_size: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v by `launch(*saved, *arguments, dkdv_config, dq_config)`, bit-reproducible.

    `saved` are an operator's; O and L may be of any back end's forward. Tiles are those for inputs of the shapes of
    `like`, q's and k's where it is None, that divide those of `block_size`.
    """
    q, k, v, output, lse, grad_output, grad_lse = map(within_reach, saved)
    # TMA reads the gradient as it is or copied: autograd expands sums, to strides of 0.
    copied = not describable(grad_output) and rows_are_aligned(grad_output)
    tma = describable(q, k, v) and (copied or describable(grad_output))
    like = (q, k) if like is None else like
    options: dict[str, Any] = {"is_causal": is_causal, "capability": _capability(q), "tma": tma}
    configs = {f"{kernel}_config": kernel_config(kernel, *like, names, **options) for kernel in ("dkdv", "dq")}
    if block_size is not None:
        configs = {name: fit_to_blocks(one, block_size) for name, one in configs.items()}
    if copied and any(one.tma for one in configs.values()):
        grad_output = grad_output.clone(memory_format=torch.contiguous_format)
    run = partial(launch, q, k, v, output.contiguous(), lse.contiguous(), grad_output, grad_lse, *arguments)
    return launch_fitting(run, configs, q, seqlen_q=like[0].shape[2], seqlen_k=like[1].shape[2])


# Dense and causal


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, names: str) -> tuple[Tensor, Tensor]:
    q, k, v = map(within_reach, (q, k, v))
    rows = rows_of_groups(q, k, is_causal)
    chosen = kernel_config("forward", rows, k, names, is_causal=is_causal, tma=describable(rows, k, v))

    def run(config: KernelConfig) -> tuple[Tensor, Tensor]:
        size = keys_of_a_part(config, rows, k, is_causal)
        if size:
            return launch_split_forward(q, k, v, is_causal=is_causal, scale=scale, config=config, part_size=size)
        return launch_forward(q, k, v, is_causal=is_causal, scale=scale, config=config)

    def name(config: KernelConfig) -> str:
        return forward_name(config, rows, k, is_causal)

    return launch_fitting(run, {"config": chosen}, q, seqlen_q=q.shape[2], seqlen_k=k.shape[2], name=name)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *saved, is_causal, scale, names = arguments
    launch = partial(launch_backward, is_causal=is_causal, scale=scale)
    return _gradients(launch, tuple(saved), names=names, is_causal=is_causal)


# With a block mask

LISTS = tuple(f"Tensor {name}" for name in TileLists._fields)  # what an operator takes of it


def _block_sparse_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, _, scale, names = arguments
    q, k, v, lists = *map(within_reach, (q, k, v)), TileLists(*tensors)
    chosen = fit_to_blocks(kernel_config("forward", q, k, names, tma=describable(q, k, v)), lists.block_size)
    run = partial(launch_forward, q, k, v, lists, is_causal=False, scale=scale)
    return launch_fitting(run, {"config": chosen}, q, seqlen_q=q.shape[2], seqlen_k=k.shape[2])


def block_sparse_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of a block mask's operators, as `AttentionOperator` calls it."""
    *given, _, scale, names = arguments
    lists = TileLists(*given[7:])
    return _gradients(
        partial(launch_backward, is_causal=False, scale=scale), tuple(given[:7]), lists, names=names, is_causal=False,
        block_size=lists.block_size,
    )  # fmt: skip


# Over packed documents

CU_SEQLENS = ("Tensor cu_seqlens_q", "Tensor cu_seqlens_k", "SymInt max_seqlen_q", "SymInt max_seqlen_k")


def _padded(q: Tensor, k: Tensor, cu_seqlens: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> tuple[Tensor, Tensor]:
    """q and k, without storage, as a batch of documents, all as long as the longest: by them tiles are chosen."""
    documents = len(cu_seqlens) - 1
    (total_q, heads, head_dim), (total_k, kv_heads, _) = q.shape, k.shape
    longest_q, longest_k = min(max_seqlen_q, total_q), min(max_seqlen_k, total_k)  # any number may be given
    return (
        torch.empty(documents, heads, longest_q, head_dim, dtype=q.dtype, device="meta"),
        torch.empty(documents, kv_heads, longest_k, head_dim, dtype=k.dtype, device="meta"),
    )


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    cu_seqlens_q, cu_seqlens_k, *longest, is_causal, scale, names = arguments
    q, k, v = map(within_reach, (q, k, v))
    like = _padded(q, k, cu_seqlens_q, *longest)
    chosen = kernel_config(
        "forward", *like, names, is_causal=is_causal, capability=_capability(q), tma=describable(k, v)
    )
    run = partial(launch_varlen_forward, q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal=is_causal, scale=scale)
    return launch_fitting(run, {"config": chosen}, q, seqlen_q=like[0].shape[2], seqlen_k=like[1].shape[2])


def varlen_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of packed documents' operators, as `AttentionOperator` calls it."""
    *given, is_causal, scale, names = arguments
    saved, (cu_seqlens_q, cu_seqlens_k, *longest) = tuple(given[:7]), given[7:]
    return _gradients(
        partial(launch_varlen_backward, is_causal=is_causal, scale=scale), saved, cu_seqlens_q, cu_seqlens_k,
        names=names, is_causal=is_causal, like=_padded(saved[0], saved[1], cu_seqlens_q, *longest),
    )  # fmt: skip


triton_attention = AttentionOperator("triton_attention", _forward, _backward, replays=Replays)
block_sparse_attention = AttentionOperator(
    "block_sparse_attention", _block_sparse_forward, block_sparse_backward, extras=LISTS, replays=Replays
)
varlen_attention = AttentionOperator(
    "varlen_attention", _varlen_forward, varlen_backward, extras=CU_SEQLENS, packed=True, replays=Replays
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
        *inputs, lse = ctx.saved_tensors
        q, k, v, output, grad_output = (x.unsqueeze(1) if x.ndim == 3 else x for x in (*inputs, grad_output))
        grads = triton_attention.gradients(
            (q, k, v, output, lse.view(q.shape[:-1])), grad_output, None, ctx.is_causal, ctx.scale, ""
        )
        return *(grad.view(x.shape) for grad, x in zip(grads, inputs)), None, None
