"""Stage 3: FlashAttention-2 in plain PyTorch, tile by tile, with a recomputing backward.

    output = FlashAttentionPyTorch.apply(q, k, v, is_causal)

Forward (FlashAttention-2, algorithm 1): for each tile of queries, over the tiles of keys that it
may see,

    S = scale · Qᵢ Kⱼᵀ
    m' = max(m, rowmax S)
    P = exp(S - m')
    l = e^(m-m') l + rowsum P
    O = e^(m-m') O + P Vⱼ

and at the end Oᵢ = O / l, Lᵢ = m + log l. Only Q, K, V, O and L are saved.

Backward (algorithm 2, with D = rowsum(dO ∘ O)): for each tile of keys, over the tiles of queries
that may see it,

    P = exp(S - Lᵢ)
    dVⱼ += Pᵀ dOᵢ
    dS = P ∘ (dOᵢ Vⱼᵀ - Dᵢ)
    dKⱼ += scale · dSᵀ Qᵢ
    dQᵢ += scale · dS Kⱼ

A tile is upcast to float32 when it is loaded (float64 stays float64), as a kernel accumulates in
float32. With `compiled=True` the two tile steps run under torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cs336_systems.attention.call import Call, Saved
from cs336_systems.attention.checks import (
    check_attention_inputs,
    check_flags,
    resolve_scale,
    without_autocast,
)
from cs336_systems.attention.rule import AttentionOperator

# Shapes of tensors; values have the shape of keys.
Queries = Float[Tensor, "... queries head_dim"]
Keys = Float[Tensor, "... keys head_dim"]
Rows = Float[Tensor, "... queries"]  # one number for each query, such as L
Mask = Bool[Tensor, "... queries keys"]

# Tiles have at least 64 rows. They grow with the sequence so that each side has at most 16 of them:
# a tile step costs a dozen kernel launches, and an eager loop over small tiles would spend its time
# on launches, not on arithmetic.
MIN_TILE = 64
MAX_TILES = 16
COMPILED = "compiled"  # value of `Call.config`: run the tile steps under torch.compile


def tile_size(seqlen: int) -> int:
    """Return the rows of a tile for `seqlen` tokens: a power of two, at least MIN_TILE."""
    tile = MIN_TILE
    while tile * MAX_TILES < seqlen:
        tile *= 2
    return tile


def tiled_forward(
    q: Queries,
    k: Keys,
    v: Keys,
    is_causal: bool,
    scale: float,
    compiled: bool = False,
    mask: Mask | None = None,
) -> tuple[Queries, Rows]:
    """Return the output in q's dtype and the log-sum-exp in float32 (float64 for float64 inputs).

    `mask` is True where a query may attend a key, and broadcasts over leading dimensions. With a
    mask `is_causal` must be False. A query without a key has O = 0 and L = -inf.
    """
    step = _compiled_steps()[0] if compiled else _forward_step
    accumulate = torch.promote_types(q.dtype, torch.float32)
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    query_tile, key_tile = tile_size(num_queries), tile_size(num_keys)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=accumulate, device=q.device)

    for q_start in range(0, num_queries, query_tile):
        queries = slice(q_start, min(q_start + query_tile, num_queries))
        q_tile = q[..., queries, :].to(accumulate)
        # Finite, so that a key tile whose scores are all -inf does not subtract -inf from -inf.
        row_max = q_tile.new_full(q_tile.shape[:-1], torch.finfo(accumulate).min)
        row_sum = torch.zeros_like(row_max)
        accumulator = torch.zeros_like(q_tile)

        # a causal query tile ends at the diagonal
        for k_start in range(0, queries.stop if is_causal else num_keys, key_tile):
            keys = slice(k_start, min(k_start + key_tile, num_keys))
            if keys.start >= num_keys:
                break
            visible = _visible(queries, keys, q.device, is_causal, mask)
            accumulator, row_max, row_sum = step(
                q_tile,
                k[..., keys, :].to(accumulate),
                v[..., keys, :].to(accumulate),
                accumulator,
                row_max,
                row_sum,
                visible,
                scale,
            )

        # A row without keys keeps a row sum of 0: O = 0 and L = -inf.
        output[..., queries, :] = (
            accumulator / row_sum.clamp_min(torch.finfo(accumulate).tiny)[..., None]
        ).to(q.dtype)
        lse[..., queries] = row_max + row_sum.log()
    return output, lse


def tiled_backward(
    saved: Saved,
    *,
    is_causal: bool,
    scale: float,
    compiled: bool = False,
    mask: Mask | None = None,
) -> tuple[Queries, Keys, Keys]:
    """Return the gradients of q, k and v in their dtypes, recomputing P = exp(S - L) by tiles.

    `saved` holds the forward's inputs and results and the gradients that reach these. `mask` is as
    in `tiled_forward`; a query without a key has no gradient.
    """
    q, k, v, output, lse, grad_output, grad_lse = saved
    step = _compiled_steps()[1] if compiled else _backward_step
    accumulate = torch.promote_types(q.dtype, torch.float32)
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    query_tile, key_tile = tile_size(num_queries), tile_size(num_keys)

    # dL/dS = P, so a gradient of L enters dS = P ∘ (dP - D) as if D were smaller by it.
    delta = (grad_output.to(accumulate) * output.to(accumulate)).sum(dim=-1)
    if grad_lse is not None:
        delta = delta - grad_lse.to(accumulate)
    # a row without keys has P = 0, and 0 times a NaN gradient would be NaN
    if mask is not None:
        dead_rows = lse == -math.inf
        delta = delta.masked_fill(dead_rows, 0.0)
        grad_output = grad_output.masked_fill(dead_rows[..., None], 0.0)
    grad_q = torch.zeros(q.shape, dtype=accumulate, device=q.device)
    grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))

    for k_start in range(0, num_keys, key_tile):
        keys = slice(k_start, min(k_start + key_tile, num_keys))
        k_tile, v_tile = k[..., keys, :].to(accumulate), v[..., keys, :].to(accumulate)
        grad_k_tile, grad_v_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)

        # causal: query tiles before `first` see none of these keys
        first = keys.start // query_tile * query_tile if is_causal else 0
        for q_start in range(first, num_queries, query_tile):
            queries = slice(q_start, min(q_start + query_tile, num_queries))
            visible = _visible(queries, keys, q.device, is_causal, mask)
            grad_q_step, grad_k_tile, grad_v_tile = step(
                q[..., queries, :].to(accumulate),
                k_tile,
                v_tile,
                grad_output[..., queries, :].to(accumulate),
                lse[..., queries],
                delta[..., queries],
                grad_k=grad_k_tile,
                grad_v=grad_v_tile,
                visible=visible,
                scale=scale,
            )
            grad_q[..., queries, :] += grad_q_step

        grad_k[..., keys, :], grad_v[..., keys, :] = (
            grad_k_tile.to(k.dtype),
            grad_v_tile.to(v.dtype),
        )
    return grad_q.to(q.dtype), grad_k, grad_v


def _visible(
    queries: slice, keys: slice, device: torch.device, is_causal: bool, mask: Tensor | None
) -> Tensor | None:
    """Return the tile's part of `mask` or of the causal mask; None if the tile needs no mask."""
    if mask is not None:
        return mask[..., queries, keys]
    if not is_causal or keys.stop - 1 <= queries.start:
        return None
    rows = torch.arange(queries.start, queries.stop, device=device)
    columns = torch.arange(keys.start, keys.stop, device=device)
    return rows[:, None] >= columns[None, :]


def _forward_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    accumulator: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    visible: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (accumulator, row_max, row_sum) of a query tile after one more tile of keys."""
    scores = q @ k.transpose(-2, -1) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    new_max = torch.maximum(row_max, scores.amax(dim=-1))
    probabilities = torch.exp(scores - new_max[..., None])
    rescale = torch.exp(row_max - new_max)
    row_sum = rescale * row_sum + probabilities.sum(dim=-1)
    return rescale[..., None] * accumulator + probabilities @ v, new_max, row_sum


def _backward_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_output: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    grad_k: Tensor,
    grad_v: Tensor,
    visible: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this pair of tiles' share of grad_q, and grad_k and grad_v with theirs added."""
    probabilities = torch.exp(q @ k.transpose(-2, -1) * scale - lse[..., None])
    if visible is not None:
        # also clears a row without keys, where L is -inf and P would be inf
        probabilities = probabilities.masked_fill(~visible, 0.0)
    grad_scores = probabilities * (grad_output @ v.transpose(-2, -1) - delta[..., None]) * scale
    grad_k = grad_k + grad_scores.transpose(-2, -1) @ q
    grad_v = grad_v + probabilities.transpose(-2, -1) @ grad_output
    return grad_scores @ k, grad_k, grad_v


@cache
def _compiled_steps() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and the backward tile step under torch.compile.

    They are dynamic: one compilation serves every tile size and length.
    """
    return torch.compile(_forward_step, dynamic=True), torch.compile(_backward_step, dynamic=True)


class FlashAttentionPyTorch(torch.autograd.Function):
    """FlashAttention-2 as an autograd.Function; `apply` returns the output.

    `apply(q, k, v, is_causal=False, scale=None, compiled=False)` takes (..., seq, head_dim)
    tensors. It saves one tensor of shape (..., queries), the log-sum-exp, beside q, k, v and the
    output.

    torch.compile traces the forward's loop over tiles, once for every length. It leaves
    `flash_attention(backend="tiled")` whole, which compiles once. That call also serves
    `torch.vmap`: PyTorch lets no transform of torch.func through this Function. Under a dispatch
    mode, such as FlopCounterMode, the backward is one operator.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Queries,
        k: Keys,
        v: Keys,
        is_causal: bool = False,
        scale: float | None = None,
        compiled: bool = False,
    ) -> Queries:
        """Return the output; TypeError or ValueError unless q, k and v fit together."""
        check_flags(is_causal=is_causal, compiled=compiled)
        # the check wants a dimension of heads; it refuses what is no tensor or has one dimension
        check_attention_inputs(
            *(x.unsqueeze(-3) if isinstance(x, Tensor) and x.ndim > 1 else x for x in (q, k, v))
        )
        scale = resolve_scale(scale, q.shape[-1])
        with without_autocast(q):
            output, lse = tiled_forward(q, k, v, is_causal, scale, compiled)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.is_causal, ctx.scale, ctx.compiled = is_causal, scale, compiled
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v; the other arguments have none."""
        q, k, v, output, lse = ctx.saved_tensors
        shapes = q.shape, k.shape, v.shape
        if q.ndim != 4:  # the operator takes 4 dimensions: all leading ones as a batch of one head
            q, k, v, output, grad_output = (
                x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v, output, grad_output)
            )
            lse = lse.reshape(-1, 1, lse.shape[-1])
        call = Call(ctx.is_causal, ctx.scale, config=COMPILED if ctx.compiled else "")
        grads = tiled_attention.gradients(Saved(q, k, v, output, lse, grad_output), call)
        return *(grad.reshape(shape) for grad, shape in zip(grads, shapes)), None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return `tiled_forward` of a call, never with compiled steps."""
    with without_autocast(q):
        return tiled_forward(q, k, v, call.is_causal, call.scale, mask=call.mask)


def tiled_attention_backward(saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return `tiled_backward` of a call, with compiled steps where `call.config` is COMPILED.

    Operators whose own forward takes no mask use it too.
    """
    compiled = call.config == COMPILED
    with torch.no_grad(), without_autocast(saved.q):
        return tiled_backward(
            saved, is_causal=call.is_causal, scale=call.scale, compiled=compiled, mask=call.mask
        )


# The operator that `flash_attention(backend="tiled")` calls.
tiled_attention = AttentionOperator(
    "tiled_attention", _forward, tiled_attention_backward, takes="mask"
)
