"""Transformer blocks in three parts, each of which can be stored, computed again or compiled.

    run_in_parts(model, recompute="around_attention", compiled=True)     # in place; before FSDP

The parts: `project` (norm, q, k, v, rotation), attention, and `finish` (output projection, both
residual sums, feed-forward). Attention stays outside of the compiler and of the checkpoints: it is
one operator already, the most expensive to compute again at long context and the cheapest to keep.
What a block stores for backward, in tensors of its input's size, by what is computed again:

- "nothing": everything is stored, tens of tensors.
- "after_attention" computes `finish` again: x, its normalization (more if not compiled), q, k, v
  and attention's output are stored: 6.
- "around_attention" computes `project` again, too: x, q, k, v and attention's output: 5.
- "block" computes everything again, attention too: x alone.

Where memory is left, the last blocks may keep more of `finish` (`wide_blocks`): the outputs of w1
and w3, and their input. The three large products of `finish` are then not computed again.

This is selective checkpointing (Korthikanti et al. 2022, arXiv:2205.05198) with the line drawn by
hand. Selective `apply_checkpointing` draws it by operator and would have to look inside of compiled
code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.model.transformer import (
    CausalMultiHeadSelfAttention,
    TransformerBlock,
    TransformerLM,
    causal_attention,
)

Recompute = Literal["nothing", "after_attention", "around_attention", "block"]
RECOMPUTES: tuple[str, ...] = get_args(Recompute)
# Tensors of the block's input's size that stay until its backward, where the parts are compiled. A
# wide block keeps one more, and the outputs of w1 and w3.
KEPT_WIDTHS = {"after_attention": 6, "around_attention": 5, "block": 1}


def run_in_parts(
    model: nn.Module,
    *,
    recompute: Recompute = "nothing",
    compiled: bool = False,
    wide_blocks: int = 0,
) -> nn.Module:
    """Run every block of `model` in parts, in place, `recompute` again in backward; return `model`.

    Call it before FSDP, whose hooks must lie outside. Only `forward` of the blocks is replaced. If
    `compiled`, each part is compiled once for all blocks, and for each shape anew. With
    "after_attention" the last `wide_blocks` blocks keep the outputs of w1 and w3.

    Raises TypeError if `model` is not a TransformerLM. Raises ValueError if its layers are split by
    tensor parallelism, whose messages the parts do not send; for an unknown `recompute`; for more
    `wide_blocks` than the model has blocks, and for `wide_blocks` with any other `recompute` than
    "after_attention".
    """
    if not isinstance(model, TransformerLM):
        raise TypeError(
            f"model must be a TransformerLM, whose blocks have these parts, "
            f"got {type(model).__name__}"
        )
    if any(type(block.attn) is not CausalMultiHeadSelfAttention for block in model.layers):
        raise ValueError("model must run its own layers, and those of another class replace them")
    if recompute not in RECOMPUTES:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTES)}, got {recompute!r}")
    num_blocks = len(model.layers)
    if not 0 <= wide_blocks <= (num_blocks if recompute == "after_attention" else 0):
        raise ValueError(
            f"wide_blocks must be 0 or, with recompute='after_attention', "
            f"up to the model's {num_blocks} blocks, got {wide_blocks} with {recompute!r}"
        )

    # Compile the parts, then put checkpoints around them: the compiler must not trace into one.
    parts: tuple[Callable[..., Any], ...] = (project, finish, mix, gated)
    if compiled:
        parts = tuple(torch.compile(part, dynamic=False) for part in parts)
    first, last, mixing, gating = parts

    if recompute == "around_attention":
        first = _recomputed(first)
    if recompute in ("around_attention", "after_attention"):
        last = _recomputed(last)
    run: Callable[..., Any] = partial(_through_parts, first, last)
    if recompute == "block":
        run = _recomputed(run)

    wide: Callable[..., Any] = partial(_through_parts, first, partial(_finish_wide, mixing, gating))
    for index, block in enumerate(model.layers):
        block.forward = partial(run if index < num_blocks - wide_blocks else wide, block)
    return model


def project(block: TransformerBlock, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a block's input `x`, normalized; q and k are rotated.

    `x` is (batch, seq, d_model); q, k and v are (batch, heads, seq, head_dim).
    """
    attn, normalized = block.attn, block.ln1(x)
    q = attn.rope(attn._split_heads(attn.q_proj(normalized)))
    k = attn.rope(attn._split_heads(attn.k_proj(normalized)))
    return q, k, attn._split_heads(attn.v_proj(normalized))


def finish(block: TransformerBlock, x: Tensor, attended: Tensor) -> Tensor:
    """Return the block's output from its input `x` and from attention's output `attended`.

    `x` is (batch, seq, d_model), `attended` (batch, heads, seq, head_dim).
    """
    mixed, normalized = mix(block, x, attended)
    return mixed + block.ffn(normalized)


def mix(block: TransformerBlock, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual stream after attention, and its norm, which the feed-forward reads."""
    mixed = x + block.attn.output_proj(attended.transpose(1, 2).flatten(-2))
    return mixed, block.ln2(mixed)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return w2's input, silu(gate) · up, from the outputs of w1 (`gate`) and w3 (`up`)."""
    return F.silu(gate) * up


def _finish_wide(
    mixing: Callable[..., Any],
    gating: Callable[..., Any],
    block: TransformerBlock,
    x: Tensor,
    attended: Tensor,
) -> Tensor:
    """Return `finish`'s output, but keep `normalized`, `gate` and `up` for backward.

    `mix` and `gated` are computed again. w2 lies outside of the compiler, so that the checkpoint,
    which ends with the last tensor that backward needs, stops before w2's product.
    """
    mixed, normalized = _recomputed(mixing)(block, x, attended)
    gate, up = block.ffn.w1(normalized), block.ffn.w3(normalized)

    def narrow(gate: Tensor, up: Tensor) -> Tensor:
        return block.ffn.w2(gating(gate, up))

    finished: Tensor = mixed + _recomputed(narrow)(gate, up)
    return finished


def _through_parts(
    first: Callable[..., Any], last: Callable[..., Any], block: TransformerBlock, x: Tensor
) -> Tensor:
    """Return the output of `block` by its parts: `first` (project), attention, `last` (finish)."""
    q, k, v = first(block, x)
    attended = causal_attention(q, k, v, block.attn.attention)
    finished: Tensor = last(block, x, attended)
    return finished


def _recomputed(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return `part` under a checkpoint: backward computes it again in place of storing tensors."""
    return partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
