"""Dynamic masks: each call chooses keys by a bias and attends those alone.

There are two forms. In this module all queries share one set of keys: the keys are gathered, and
attention over them is dense. In the other form each query keeps the best of the keys that it sees.
One gather does not serve all queries then, so the choice becomes a `BlockMask`. It can only skip
tiles that no query of 128 wants.

    out = shared_keys_attention(q, k, v, bias, num_keys=1024, is_causal=True)
    out = flash_attention(q, k, v, block_mask=BlockMask.dynamic_topk(bias, 1024))

The bias chooses keys; it is not added to the scores. After flash dynamic-mask attention (SmallDoge,
2025).
"""

from __future__ import annotations

from typing import Never

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cs336_systems.attention.api import flash_attention
from cs336_systems.attention.checks import (
    check_attention_inputs,
    check_count,
    check_flags,
    check_tensor,
    has_values,
    refuse_keywords,
)
from cs336_systems.attention.choose import available_here
from cs336_systems.attention.masks import BlockMask
from cs336_systems.attention.masks.block_mask import DEFAULT_BLOCK

Positions = Int[Tensor, "batch heads chosen"]  # positions of the keys, ascending
# False for places without a key, where fewer than the wanted number had a bias above -inf
Chosen = Bool[Tensor, "batch heads chosen"]


def shared_keys_attention(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys head_dim"],
    bias: Float[Tensor, "batch kv_heads_or_1 keys"],
    num_keys: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str = "auto",
    **unknown: Never,
) -> Float[Tensor, "batch heads queries head_dim"]:
    """Return attention of every query over the `num_keys` keys of highest bias, which it gathers.

    It computes queries · num_keys scores for each head.

    Args:
        bias: chooses the keys of each batch entry and key head. Keys of -inf are never chosen,
            those of NaN first.
        num_keys: how many keys to choose; more than there are chooses all. Of equal biases the
            earlier key is chosen.
        is_causal: query i attends the chosen keys j <= i, by their original positions; it may see
            none (output 0). The choice itself reads the whole bias. If the bias comes from the
            tokens, only a choice for each query (`BlockMask.dynamic_topk`) stays causal.
        scale, enable_gqa, backend: as in `flash_attention`.

    Raises TypeError or ValueError naming the argument.
    """
    if unknown:
        refuse_keywords("shared_keys_attention", unknown)
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    check_attention_inputs(q, k, v, enable_gqa=enable_gqa)
    check_tensor("bias", bias, {3: "(batch, kv_heads or 1, keys)"})
    if k.ndim != 4:
        raise ValueError(
            f"k must have shape (batch, kv_heads, keys, head_dim), got {tuple(k.shape)}"
        )
    batch, kv_heads, keys, _ = k.shape
    if tuple(bias.shape) not in [(batch, heads, keys) for heads in (1, kv_heads)]:
        raise ValueError(
            f"bias must have shape ({batch}, {kv_heads} or 1, {keys}) to go with "
            f"k {tuple(k.shape)}, "
            f"got {tuple(bias.shape)}"
        )
    if bias.device != k.device:
        raise ValueError(f"bias must be on k's device {k.device}, got {bias.device}")
    check_count("num_keys", num_keys, most=None)

    positions, chosen = choose_keys(bias, num_keys)  # (batch, kv_heads or 1, num_keys) each
    block_mask = None
    # No mask is needed if all places have a key. That is cheap to see on the CPU alone: on a GPU
    # the host would wait, and a compiler would break the graph.
    if is_causal or not (has_values(chosen) and bool(chosen.all())):
        group = q.shape[1] // kv_heads
        block_mask = mask_chosen(
            positions, chosen, q.shape[2], k.shape[2], is_causal=is_causal, group=group
        )

    index = positions[..., None].expand(*k.shape[:2], -1, k.shape[3])
    output = flash_attention(
        q,
        k.gather(2, index),
        v.gather(2, index),
        scale=scale,
        enable_gqa=enable_gqa,
        backend=backend,
        block_mask=block_mask,
    )
    assert isinstance(output, Tensor)
    return output


def choose_keys(bias: Float[Tensor, "batch heads keys"], num_keys: int) -> tuple[Positions, Chosen]:
    """Return the ascending positions of the `num_keys` highest biases, and which of them count.

    Keys of bias -inf do not count: they stand behind the others and are False in the second
    result. With fewer keys than `num_keys` both have one entry a key.
    """
    keys = bias.shape[-1]
    num_keys = min(num_keys, keys)
    biases, best = (
        ranked[..., :num_keys] for ranked in bias.sort(dim=-1, descending=True, stable=True)
    )
    # keys that do not count are moved behind all others
    ascending = torch.where(biases != -torch.inf, best, best + keys).sort(dim=-1).values
    return ascending % max(1, keys), ascending < keys


def mask_chosen(
    positions: Positions,
    chosen: Chosen,
    seqlen_q: int,
    seqlen_k: int,
    *,
    is_causal: bool,
    group: int = 1,
) -> BlockMask:
    """Return the mask of seqlen_q queries over the gathered keys of `choose_keys`.

    A query attends all keys that count or, if `is_causal`, those at its own position and before.
    `seqlen_k` is the number of keys before the choice. `group` query heads share a key head.
    """
    # Since the chosen keys ascend, each query sees a prefix of them, of `seen` keys.
    if is_causal:
        last_seen = torch.arange(seqlen_q, device=positions.device)
        if seqlen_q > seqlen_k:
            last_seen = last_seen.clamp(max=seqlen_k - 1)
        ordered = torch.where(chosen, positions, seqlen_k)
        last_seen = last_seen.expand(*positions.shape[:2], -1).contiguous()
        seen = torch.searchsorted(ordered, last_seen, right=True, out_int32=True)
    else:
        seen = chosen.sum(-1, keepdim=True).expand(-1, -1, seqlen_q)
    if seen.shape[1] > 1:
        seen = seen.repeat_interleave(group, dim=1)

    # Under torch.compile Triton is there, and the graph must not look for it.
    has_kernels = seen.is_cuda and (
        torch.compiler.is_compiling() or available_here(seen.device)["triton"] == "ok"
    )
    if has_kernels and seen.numel() and positions.shape[2]:
        from cs336_systems.attention.triton.staircase import launch_staircase

        return launch_staircase(seen.int().contiguous(), positions.shape[2], DEFAULT_BLOCK)
    return BlockMask.prefix(seen, positions.shape[2], block_size=DEFAULT_BLOCK)
