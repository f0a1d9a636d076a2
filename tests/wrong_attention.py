"""Attention with one classic bug planted at a time. The contract's checks must reject each and
accept `bug=None`.

That of block-sparse kernels, pointers advanced inside the branch that skips a tile, is planted in
the real ones by `test_block_sparse.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TILE = 32
BUGS = (
    "natural and base-2 logs mixed",
    "last tile dropped",
    "causal off by one",
    "dQ without the scale",
)


def wrong_attention(
    q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, *, is_causal: bool, bug: str | None
) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients of (batch, seq, d) tensors by tiles of 32."""
    scale = 1 / math.sqrt(q.shape[-1])
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    output, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    starts = list(range(0, num_keys, TILE))
    if bug == "last tile dropped" and len(starts) > 1:
        starts = starts[:-1]

    def scores(query_start: int, start: int) -> tuple[Tensor, slice]:
        keys = slice(start, min(start + TILE, num_keys))
        rows = torch.arange(query_start, min(query_start + TILE, num_queries))
        columns = torch.arange(keys.start, keys.stop)
        s = q[:, rows] @ k[:, keys].transpose(-2, -1) * scale
        if is_causal:
            shift = 1 if bug == "causal off by one" else 0
            s = s.masked_fill(rows[:, None] + shift < columns[None, :], -math.inf)
        return s, keys

    for query_start in range(0, num_queries, TILE):
        rows = slice(query_start, min(query_start + TILE, num_queries))
        parts = [scores(query_start, start) for start in starts]
        s = torch.cat([part for part, _ in parts], dim=-1)
        values = torch.cat([v[:, keys] for _, keys in parts], dim=1)
        row_max = s.amax(-1)
        p = torch.exp(s - row_max[..., None])
        output[:, rows] = p @ values / p.sum(-1, keepdim=True)
        log = torch.log2 if bug == "natural and base-2 logs mixed" else torch.log
        lse[:, rows] = row_max + log(p.sum(-1))

    delta = (output * grad_output).sum(-1)
    for query_start in range(0, num_queries, TILE):
        rows = slice(query_start, min(query_start + TILE, num_queries))
        for start in starts:
            s, keys = scores(query_start, start)
            p = torch.exp(s - lse[:, rows, None])
            ds = p * (grad_output[:, rows] @ v[:, keys].transpose(-2, -1) - delta[:, rows, None])
            grad_q[:, rows] += ds @ k[:, keys] * (1.0 if bug == "dQ without the scale" else scale)
            grad_k[:, keys] += ds.transpose(-2, -1) @ q[:, rows] * scale
            grad_v[:, keys] += p.transpose(-2, -1) @ grad_output[:, rows]
    return {"output": output, "lse": lse, "grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
