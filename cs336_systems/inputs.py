"""Seeded inputs: every implementation of a case sees the same numbers on one device.

Attention inputs are drawn on the device that will use them (drawing gigabytes on the host would
dominate a sweep), so two devices see different numbers, and two implementations on one device see
the same.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cs336_systems.config import AttentionShape, ModelConfig


class AttentionInputs(NamedTuple):
    """Standard normal q, k, v and the gradient of the output, all leaves without gradients."""

    q: Float[Tensor, "batch heads queries head_dim"]
    k: Float[Tensor, "batch kv_heads keys head_dim"]
    v: Float[Tensor, "batch kv_heads keys head_dim"]
    grad_output: Float[Tensor, "batch heads queries head_dim"]


def attention_inputs(shape: AttentionShape, *, device: str, seed: int = 0) -> AttentionInputs:
    """Return random inputs of `shape` on `device`, drawn in float32 and rounded to its dtype."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    kv_heads = shape.kv_heads or shape.heads

    def draw(heads: int, seqlen: int) -> Tensor:
        size = (shape.batch, heads, seqlen, shape.head_dim)
        return torch.randn(size, device=device, dtype=torch.float32, generator=generator).to(dtype)

    return AttentionInputs(
        q=draw(shape.heads, shape.seqlen_q),
        k=draw(kv_heads, shape.seqlen_k),
        v=draw(kv_heads, shape.seqlen_k),
        grad_output=draw(shape.heads, shape.seqlen_q),
    )


def token_batch(
    model: ModelConfig, batch: int, *, device: str, seed: int = 0
) -> tuple[Int[Tensor, "batch sequence"], Int[Tensor, "batch sequence"]]:
    """Return random tokens and next-token targets, both (batch, model.context_length).

    Tokens are uniform over the model's vocabulary.
    """
    generator = torch.Generator(device).manual_seed(seed)
    size = (batch, model.context_length + 1)
    tokens = torch.randint(model.vocab_size, size, device=device, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
