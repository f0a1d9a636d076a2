"""The Triton stage as operators and as an autograd.Function: choose a kernel and its tiles, launch.

`OPERATORS` has what `flash_attention` calls, without and with a block mask, and what
`flash_attention_varlen` does; `FlashAttentionTriton` is the handout's interface.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.attention.call import Call, Documents, Saved
from cs336_systems.attention.checks import check_attention_inputs, check_flags, resolve_scale
from cs336_systems.attention.replay import replayed
from cs336_systems.attention.rule import AttentionOperator
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
from cs336_systems.attention.triton.documents import launch_varlen_backward, launch_varlen_forward
from cs336_systems.attention.triton.forward import launch_forward
from cs336_systems.attention.triton.launch import (
    describable,
    launch_fitting,
    num_multiprocessors,
    num_tiles,
    rows_are_aligned,
    rows_of_groups,
    within_reach,
)
from cs336_systems.attention.triton.lists import fit_to_blocks
from cs336_systems.attention.triton.split import launch_split_forward
from cs336_systems.attention.triton.steps import ROW_PADDING

# Tiles


def kernel_config(
    kernel: str, q: Tensor, k: Tensor, names: str = "", *, is_causal: bool = False,
    capability: tuple[int, int] | None = None, tma: bool | None = None,
) -> KernelConfig:  # fmt: skip
    """The configuration that `kernel` will use for these inputs: that of `AttentionConfig.names`,
    or the table's.

    `capability` defaults to that of q's device, and to none (the interpreter) on the CPU; `tma`,
    whether Hopper's copy engine can read all inputs, to what it can do with q and k.
    """
    if capability is None and q.is_cuda:
        capability = torch.cuda.get_device_capability(q.device)
    if names and kernel in (named := parse_configs(names)):
        _check_tiles(named[kernel], q, target_of(capability))
        return named[kernel]
    batch, heads, seqlen_q, head_dim = q.shape
    return select_config(
        kernel, capability=capability, head_dim=head_dim, batch=batch, heads=heads, seqlen_q=seqlen_q,
        seqlen_k=k.shape[2], dtype=str(q.dtype).removeprefix("torch."), is_causal=is_causal,
        tma=describable(q, k) if tma is None else tma,
    )  # fmt: skip


def _check_tiles(config: KernelConfig, q: Tensor, target: str) -> None:
    """ValueError for tiles that a caller names and Triton is known to miscompile on this GPU, or
    that read too far.
    """
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
    """The configuration's name and, where keys are split, in how many parts:
    `sm90_forward_64x64_w4_s3_tma/4`.
    """
    size = keys_of_a_part(config, q, k, is_causal)
    return (
        f"{config.name}/{num_tiles(seen_keys(q.shape[2], k.shape[2], is_causal), size)}"
        if size
        else config.name
    )


def keys_of_a_part(config: KernelConfig, q: Tensor, k: Tensor, is_causal: bool) -> int:
    """How many keys a program of the forward walks on q's device, where it pays to split them; else
    0.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    return part_size(
        config, head_dim=head_dim, bytes_per_element=q.element_size(), batch_heads=batch * heads, seqlen_q=seqlen_q,
        seqlen_k=k.shape[2], is_causal=is_causal, num_multiprocessors=num_multiprocessors(q.device),
    )  # fmt: skip


# Both passes, of heads, of a block mask's lists of tiles and of packed documents


def _like_documents(q: Tensor, k: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """Return packed q and k as a batch of documents as long as the longest: tiles are chosen by it.

    Each is a view of one element, of which shape, dtype and device are read.
    """
    batch = len(documents.cu_seqlens_q) - 1
    (total_q, heads, head_dim), (total_k, kv_heads, _) = q.shape, k.shape
    longest_q = min(documents.max_seqlen_q, total_q)  # any number may be given
    longest_k = min(documents.max_seqlen_k, total_k)
    return (
        q.as_strided((batch, heads, longest_q, head_dim), (0, 0, 0, 0)),
        k.as_strided((batch, kv_heads, longest_k, head_dim), (0, 0, 0, 0)),
    )


def triton_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """O and L, as `AttentionOperator` has them."""
    q, k, v = within_reach(q), within_reach(k), within_reach(v)
    is_dense = call.lists is None and call.documents is None
    rows = rows_of_groups(q, k, call.is_causal) if is_dense else q
    if call.documents is None:
        like_q, like_k = rows, k
        tma = describable(rows, k, v)
    else:
        like_q, like_k = _like_documents(q, k, call.documents)
        tma = describable(k, v)
    chosen = kernel_config(
        "forward", like_q, like_k, call.config, is_causal=call.is_causal, tma=tma
    )
    if call.lists is not None:
        chosen = fit_to_blocks(chosen, call.lists.block_size)

    def run(config: KernelConfig) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {
            "is_causal": call.is_causal,
            "scale": call.scale,
            "config": config,
        }
        if call.documents is not None:
            return launch_varlen_forward(q, k, v, *call.documents[:2], **options)
        if is_dense and (size := keys_of_a_part(config, rows, k, call.is_causal)):
            return launch_split_forward(q, k, v, **options, part_size=size)
        return launch_forward(q, k, v, call.lists, **options)

    def name(config: KernelConfig) -> str:
        return forward_name(config, rows, k, call.is_causal) if is_dense else config.name

    seqlen_q = q.shape[2] if call.documents is None else like_q.shape[2]
    return launch_fitting(
        run, {"config": chosen}, q, seqlen_q=seqlen_q, seqlen_k=like_k.shape[2], name=name
    )


def triton_backward(saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, bit-reproducible; O and L may be of any back end's forward."""
    saved = Saved(*map(within_reach, saved))
    q, k, v, output, lse, grad_output, grad_lse = saved
    # TMA reads the gradient as it is or copied: autograd expands sums, to strides of 0.
    as_it_is = describable(grad_output)
    copied = not as_it_is and rows_are_aligned(grad_output)
    tma = describable(q, k, v) and (as_it_is or copied)
    like_q, like_k = q, k
    if call.documents is not None:
        like_q, like_k = _like_documents(q, k, call.documents)
    configs = {
        f"{kernel}_config": kernel_config(
            kernel, like_q, like_k, call.config, is_causal=call.is_causal, tma=tma
        )
        for kernel in ("dkdv", "dq")
    }
    if call.lists is not None:
        configs = {name: fit_to_blocks(one, call.lists.block_size) for name, one in configs.items()}
    if copied and any(one.tma for one in configs.values()):
        grad_output = grad_output.clone(memory_format=torch.contiguous_format)
    saved = Saved(q, k, v, output.contiguous(), lse.contiguous(), grad_output, grad_lse)

    def run(**configs: KernelConfig) -> tuple[Tensor, Tensor, Tensor]:
        options: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale, **configs}
        if call.documents is not None:
            return launch_varlen_backward(saved, *call.documents[:2], **options)
        return launch_backward(saved, call.lists, **options)

    return launch_fitting(run, configs, q, seqlen_q=like_q.shape[2], seqlen_k=like_k.shape[2])


triton_attention = AttentionOperator(
    "triton_attention", triton_forward, triton_backward, replayed=replayed
)
OPERATORS = {  # by what attention runs over
    "dense": triton_attention,
    "block_mask": AttentionOperator(
        "block_sparse_attention", triton_forward, triton_backward, takes="lists", replayed=replayed
    ),
    "packed": AttentionOperator(
        "varlen_attention", triton_forward, triton_backward, takes="documents", replayed=replayed
    ),
}


class FlashAttentionTriton(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False, scale=None)` on (batch, seq, head_dim) or (batch, heads,
    seq, head_dim) tensors.

    Saves one tensor of shape (batch, queries), the log-sum-exp, beside q, k, v and the output.
    `torch.vmap` goes over `flash_attention`; PyTorch lets no transform of torch.func through this
    Function.
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
        q4, k4, v4 = (
            x.unsqueeze(1) if isinstance(x, Tensor) and x.ndim == 3 else x for x in (q, k, v)
        )
        check_flags(is_causal=is_causal)
        check_attention_inputs(q4, k4, v4, enable_gqa=True)
        scale = resolve_scale(scale, q.shape[-1])
        output, lse = triton_attention(q4, k4, v4, Call(is_causal, scale))
        output, lse = output.view(q.shape), lse.view(q.shape[:-1])
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, lse = ctx.saved_tensors
        q, k, v, output, grad_output = (
            x.unsqueeze(1) if x.ndim == 3 else x for x in (*inputs, grad_output)
        )
        saved = Saved(q, k, v, output, lse.view(q.shape[:-1]), grad_output)
        grads = triton_attention.gradients(saved, Call(ctx.is_causal, ctx.scale))
        return *(grad.view(x.shape) for grad, x in zip(grads, inputs)), None, None
