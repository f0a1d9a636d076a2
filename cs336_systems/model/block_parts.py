"""A Transformer block in three parts, so that what is stored, computed again and compiled can be
chosen for each.

    run_in_parts(model, recompute="around_attention", compiled=True)     # in place; before FSDP

The parts: `project` (norm, q, k, v, rotation), attention, and `finish` (output projection, both
residual sums, feed-forward). Attention stays outside of the compiler and of the checkpoints: it is
one operator already, the dearest to compute again at long context and the cheapest to keep. What a
block stores for backward, in tensors of its input's size:

- "nothing" is computed again: everything, tens of them.
- "after_attention" computes `finish` again: x, its normalization (more if not compiled), q, k, v
  and the output: 6.
- "around_attention" computes `project` too: x, q, k, v and attention's output: 5.
- "block" computes everything again, attention too: x alone.

Where memory is left, the last blocks may keep more of `finish` (`wide_blocks`): what w1 and w3
give, and their input. The three large products of `finish` are then not computed again.

This is selective checkpointing (Korthikanti et al. 2022, arXiv:2205.05198) with the line drawn by
hand: by operator, as selective `apply_checkpointing` draws it, it would have to look inside of
compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.model.transformer import TransformerBlock, TransformerLM, causal_attention

Recompute = Literal["nothing", "after_attention", "around_attention", "block"]
RECOMPUTES: tuple[str, ...] = get_args(Recompute)
# Tensors of the block's input's size that stay until its backward, where the parts are compiled.
# a wide block: 1, w1's and w3's more
KEPT_WIDTHS = {"after_attention": 6, "around_attention": 5, "block": 1}


def run_in_parts(
    model: nn.Module,
    *,
    recompute: Recompute = "nothing",
    compiled: bool = False,
    wide_blocks: int = 0,
) -> nn.Module:
    """Run every block of `model` in parts, in place, and compute `recompute` again in backward.
    Returns `model`.

    Call it before FSDP, whose hooks must lie outside. Only `forward` of the blocks is replaced.
    Each part is compiled once for all blocks, and for each shape anew. With "after_attention" the
    last `wide_blocks` blocks keep what w1 and w3 give. Raises TypeError if `model` is no
    TransformerLM, ValueError naming a `recompute` that there is not, or `wide_blocks` that the
    model does not have or that compute something else again.
    """
    if not isinstance(model, TransformerLM):
        raise TypeError(
            f"model must be a TransformerLM, whose blocks have these parts, got {type(model).__name__}"
        )
    if recompute not in RECOMPUTES:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTES)}, got {recompute!r}")
    num_blocks = len(model.layers)
    if not 0 <= wide_blocks <= (num_blocks if recompute == "after_attention" else 0):
        raise ValueError(
            f"wide_blocks must be 0 or, with recompute='after_attention', up to the model's {num_blocks} blocks, "
            f"got {wide_blocks} with {recompute!r}"
        )
    parts: tuple[Callable[..., Any], ...] = (project, finish, mix, gated)
    if compiled:
        parts = tuple(torch.compile(part, dynamic=False) for part in parts)
    first, last, mixing, gating = parts
    if recompute == "around_attention":
        first = partial(_recomputed, first)
    if recompute in ("around_attention", "after_attention"):
        last = partial(_recomputed, last)
    run: Callable[..., Any] = partial(_through_parts, first, last)
    if recompute == "block":
        run = partial(_recomputed, run)
    wide: Callable[..., Any] = partial(_through_parts, first, partial(_finish_wide, mixing, gating))
    for index, block in enumerate(model.layers):
        block.forward = partial(run if index < num_blocks - wide_blocks else wide, block)
    return model


def project(block: TransformerBlock, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of (batch, seq, d_model) `x`, each (batch, heads, seq, head_dim)."""
    attn, normalized = block.attn, block.ln1(x)
    q = attn.rope(attn._split_heads(attn.q_proj(normalized)))
    k = attn.rope(attn._split_heads(attn.k_proj(normalized)))
    return q, k, attn._split_heads(attn.v_proj(normalized))


def finish(block: TransformerBlock, x: Tensor, attended: Tensor) -> Tensor:
    """The block's output, from its input and from what attention gave."""
    mixed, normalized = mix(block, x, attended)
    return mixed + block.ffn(normalized)


def mix(block: TransformerBlock, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream after attention, and normalized for the feed-forward layer."""
    mixed = x + block.attn.output_proj(attended.transpose(1, 2).flatten(-2))
    return mixed, block.ln2(mixed)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """What w2 reads, from what w1 and w3 give."""
    return F.silu(gate) * up


def _finish_wide(
    mixing: Callable[..., Any],
    gating: Callable[..., Any],
    block: TransformerBlock,
    x: Tensor,
    attended: Tensor,
) -> Tensor:
    """`finish` that keeps `normalized`, `gate` and `up` for backward, and computes `mix` and
    `gated` again.

    w2 lies outside of the compiler, so that the checkpoint, which ends with the last tensor that
    backward needs, stops before its product.
    """
    mixed, normalized = _recomputed(mixing, block, x, attended)
    gate, up = block.ffn.w1(normalized), block.ffn.w3(normalized)

    def narrow(_: TransformerBlock, gate: Tensor, up: Tensor) -> Tensor:
        return block.ffn.w2(gating(gate, up))

    finished: Tensor = mixed + _recomputed(narrow, block, gate, up)
    return finished


def _through_parts(
    first: Callable[..., Any], last: Callable[..., Any], block: TransformerBlock, x: Tensor
) -> Tensor:
    q, k, v = first(block, x)
    attended = causal_attention(q, k, v, block.attn.attention)
    finished: Tensor = last(block, x, attended)
    return finished


def _recomputed(part: Callable[..., Any], block: TransformerBlock, *inputs: Tensor) -> Any:
    return checkpoint(partial(part, block), *inputs, use_reentrant=False, preserve_rng_state=False)
