"""Stage 1: plain attention, the oracle of all implementations and the "eager" of the benchmarks.

    S = scale · Q Kᵀ        P = softmax(S)        O = P V        L = log Σ exp(S)

Slow on purpose, any floating dtype, O(queries · keys) memory. Every operation runs in the inputs'
dtype. In float64 it is the oracle. In bfloat16 it shows the error of plain low precision, the
yardstick of the numerical contract (`contract.py`). Only the log-sum-exp, with `return_lse`, comes
from scores of its own in float32 or wider.

    output, lse = attention_reference(q, k, v, is_causal=True, return_lse=True)
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cs336_systems.attention.checks import without_autocast


def causal_mask(
    num_queries: int, num_keys: int, device: torch.device | str
) -> Bool[Tensor, "queries keys"]:
    """Return a bool matrix, True where query i may attend key j: j <= i, from the top left."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril()


def attention_reference(
    q: Float[Tensor, "... queries head_dim"],
    k: Float[Tensor, "... keys head_dim"],
    v: Float[Tensor, "... keys head_dim"],
    *,
    is_causal: bool = False,
    mask: Bool[Tensor, "... queries keys"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Float[Tensor, "... queries head_dim"] | tuple[Tensor, Tensor]:
    """Return scaled dot-product attention, with the log-sum-exp where `return_lse` is set.

    The backward is autograd's own.

    Args:
        mask: True where a query may attend a key; broadcasts over leading dimensions.
        is_causal: query i attends keys j <= i, from the top left. Both masks may be given.
        scale: factor of the scores; 1/sqrt(head_dim) by default.
        return_lse: also return the natural log of the summed exponentials of the scaled scores,
            (..., queries), float32 (float64 for float64 inputs).

    A query that may attend no key has O = 0, L = -inf and zero gradients.

    Source: Vaswani et al. 2017, equation 1.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    visible = mask
    if is_causal:
        causal = causal_mask(q.shape[-2], k.shape[-2], q.device)
        visible = causal if mask is None else mask & causal

    # The softmax of a row that is -inf everywhere is NaN, and so is its gradient: such rows get
    # finite scores and are zeroed at the end. The causal mask alone leaves every query at least
    # key 0.
    dead_rows = None if mask is None or visible is None else ~visible.any(dim=-1, keepdim=True)

    def masked_scores(dtype: torch.dtype) -> Tensor:
        """Return S in `dtype`: -inf where masked, 0 in rows without a key."""
        scores = q.to(dtype) @ k.to(dtype).transpose(-2, -1) * scale
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        return scores if dead_rows is None else scores.masked_fill(dead_rows, 0.0)

    scores = masked_scores(q.dtype)
    probabilities = torch.softmax(scores, dim=-1)
    if dead_rows is not None:
        probabilities = probabilities.masked_fill(dead_rows, 0.0)
    output = probabilities @ v
    if not return_lse:
        return output

    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        lse = torch.logsumexp(
            scores if scores.dtype == lse_dtype else masked_scores(lse_dtype), dim=-1
        )
    return output, lse if dead_rows is None else lse.masked_fill(dead_rows.squeeze(-1), -math.inf)
