"""A Transformer block in three parts, so that what is stored, computed again and compiled can be chosen for each.

    run_in_parts(model, recompute="around_attention", compiled=True)     # in place; before FSDP

The parts: `project` (norm, q, k, v, rotation), attention, and `finish` (output projection, both residual sums,
feed-forward). Attention stays outside of the compiler and of the checkpoints: it is one operator already, the dearest
to compute again at long context and the cheapest to keep. What a block stores for backward, in tensors of its input's
size:

- "nothing" is computed again: everything, tens of them.
- "after_attention" computes `finish` again: x, its normalization (more if not compiled), q, k, v and the output: 6.
- "around_attention" computes `project` too: x, q, k, v and attention's output: 5.
- "block" computes everything again, attention too: x alone.

This is selective checkpointing (Korthikanti et al. 2022, arXiv:2205.05198) with the line drawn by hand: by operator, as
`checkpoint_selectively` draws it, it would have to look inside of compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.model.transformer import TransformerBlock, TransformerLM, causal_attention

Recompute = Literal["nothing", "after_attention", "around_attention", "block"]
RECOMPUTES: tuple[str, ...] = get_args(Recompute)
# Tensors of the block's input's size that stay until its backward, where the parts are compiled.
KEPT_WIDTHS = {"after_attention": 6, "around_attention": 5, "block": 1}


def run_in_parts(model: nn.Module, *, recompute: Recompute = "nothing", compiled: bool = False) -> nn.Module:
    """Run every block of `model` in parts, in place, and compute `recompute` again in backward. Returns `model`.

    Call it before FSDP, whose hooks must lie outside. Only `forward` of the blocks is replaced. Each part is compiled
    once for all blocks, and for each shape anew. Raises TypeError if `model` is no TransformerLM, ValueError naming a
    `recompute` that there is not.
    """
    if not isinstance(model, TransformerLM):
        raise TypeError(f"model must be a TransformerLM, whose blocks have these parts, got {type(model).__name__}")
    if recompute not in RECOMPUTES:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTES)}, got {recompute!r}")
    first: Callable[..., Any] = project
    last: Callable[..., Any] = finish
    if compiled:
        first, last = torch.compile(project, dynamic=False), torch.compile(finish, dynamic=False)
    if recompute == "around_attention":
        first = partial(_recomputed, first)
    if recompute in ("around_attention", "after_attention"):
        last = partial(_recomputed, last)
    run: Callable[..., Any] = partial(_through_parts, first, last)
    if recompute == "block":
        run = partial(_recomputed, run)
    for block in model.layers:
        block.forward = partial(run, block)
    return model


def project(block: TransformerBlock, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of (batch, seq, d_model) `x`, each (batch, heads, seq, head_dim)."""
    attn, normalized = block.attn, block.ln1(x)
    q = attn.rope(attn._split_heads(attn.q_proj(normalized)))
    k = attn.rope(attn._split_heads(attn.k_proj(normalized)))
    return q, k, attn._split_heads(attn.v_proj(normalized))


def finish(block: TransformerBlock, x: Tensor, attended: Tensor) -> Tensor:
    """The block's output, from its input and from what attention gave."""
    x = x + block.attn.output_proj(attended.transpose(1, 2).flatten(-2))
    return x + block.ffn(block.ln2(x))


def _through_parts(first: Callable[..., Any], last: Callable[..., Any], block: TransformerBlock, x: Tensor) -> Tensor:
    q, k, v = first(block, x)
    attended = causal_attention(q, k, v, block.attn.attention)
    finished: Tensor = last(block, x, attended)
    return finished


def _recomputed(part: Callable[..., Any], block: TransformerBlock, *inputs: Tensor) -> Any:
    return checkpoint(partial(part, block), *inputs, use_reentrant=False, preserve_rng_state=False)
