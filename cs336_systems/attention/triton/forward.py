"""The FlashAttention-2 forward in Triton: one program computes one tile of queries of one head.

Phases of a program
  1. load its query tile, which stays on chip;
  2. unmasked loop: key tiles that every query of the tile sees whole, with no mask arithmetic;
  3. masked loop: key tiles that the causal diagonal or the end of the keys cuts;
  4. normalise once, store O and the log-sum-exp L.
Key tiles above the diagonal are never read. Exponentials are base 2 with scale · log₂e folded into one multiply-add,
and L goes back to the natural log at the end. Source: FlashAttention-2 (Dao 2023), algorithm 1.

Programs are numbered with the longest causal query tiles first, so that the short ones fill the tail of the grid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from cs336_systems.attention.tiles import KernelConfig, head_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_rows(
    base_ptr, rows, num_rows, stride_s, stride_d, D: tl.constexpr, D_TILE: tl.constexpr, MASKED: tl.constexpr
):
    """The (len(rows), D_TILE) tile at `rows`; columns past D, and with MASKED rows past num_rows, are zero."""
    columns = tl.arange(0, D_TILE)
    pointers = base_ptr + rows.to(tl.int64)[:, None] * stride_s + columns[None, :] * stride_d
    if MASKED and D != D_TILE:
        return tl.load(pointers, mask=(rows < num_rows)[:, None] & (columns < D)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)
    elif D != D_TILE:
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store_rows(base_ptr, tile, rows, num_rows, stride_s, stride_d, D: tl.constexpr, D_TILE: tl.constexpr):
    columns = tl.arange(0, D_TILE)
    pointers = base_ptr + rows.to(tl.int64)[:, None] * stride_s + columns[None, :] * stride_d
    tl.store(pointers, tile.to(base_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None] & (columns < D)[None, :])


@triton.jit
def _accumulate(accumulator, left, right, ZERO, PRECISION: tl.constexpr):
    """accumulator + left @ right.

    Tensor cores take the accumulator as an operand. A float32 dot on the FMA units would chain every product of the
    whole sequence onto it, whose rounding grows with the length; so there each tile's product is summed on its own.
    ZERO is a zero that the compiler cannot see: a literal one is fused back into that chain.
    """
    if left.dtype == tl.float32:
        product = tl.dot(left, right, tl.zeros_like(accumulator) + ZERO, input_precision=PRECISION)
        return accumulator + product
    else:
        return tl.dot(left, right, accumulator)


@triton.jit
def _visit_keys(
    accumulator, m, l, Q, K_base, V_base, query_rows, first_key, last_key, N_KEYS, scale_log2, ZERO,
    stride_ks, stride_kd, stride_vs, stride_vd,
    D: tl.constexpr, D_TILE: tl.constexpr, K_TILE_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the key tiles of [first_key, last_key) into the running (accumulator, m, l); m is in base 2."""
    for start in tl.range(first_key, last_key, K_TILE_SIZE):
        key_rows = start + tl.arange(0, K_TILE_SIZE)
        K = _load_rows(K_base, key_rows, N_KEYS, stride_ks, stride_kd, D, D_TILE, MASKED)
        S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)  # (Q_TILE_SIZE, K_TILE_SIZE), not yet scaled
        if MASKED:
            visible = (key_rows < N_KEYS)[None, :]
            if IS_CAUSAL:
                visible = visible & (query_rows[:, None] >= key_rows[None, :])
            S = tl.where(visible, S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, axis=1) * scale_log2)
        P = tl.math.exp2(S * scale_log2 - m_new[:, None])
        rescale = tl.math.exp2(m - m_new)
        l = l * rescale + tl.sum(P, axis=1)
        V = _load_rows(V_base, key_rows, N_KEYS, stride_vs, stride_vd, D, D_TILE, MASKED)
        accumulator = _accumulate(accumulator * rescale[:, None], P.to(V.dtype), V, ZERO, PRECISION)
        m = m_new
    return accumulator, m, l


@triton.jit
def flash_forward_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    N_HEADS, N_QUERIES, N_KEYS, scale_log2, ZERO,
    GROUP: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O (batch, heads, queries, D) and L (batch, heads, queries) are contiguous; q, k, v have any strides."""
    num_query_tiles = tl.cdiv(N_QUERIES, Q_TILE_SIZE)
    num_batch_heads = tl.num_programs(0) // num_query_tiles
    batch_head = tl.program_id(0) % num_batch_heads
    query_tile = tl.program_id(0) // num_batch_heads
    if IS_CAUSAL:
        query_tile = num_query_tiles - 1 - query_tile
    batch = (batch_head // N_HEADS).to(tl.int64)
    head = (batch_head % N_HEADS).to(tl.int64)
    kv_head = head // GROUP
    K_base = K_ptr + batch * stride_kb + kv_head * stride_kh
    V_base = V_ptr + batch * stride_vb + kv_head * stride_vh

    # 1. load the query tile
    first_query = query_tile * Q_TILE_SIZE
    query_rows = first_query + tl.arange(0, Q_TILE_SIZE)
    Q_base = Q_ptr + batch * stride_qb + head * stride_qh
    Q = _load_rows(Q_base, query_rows, N_QUERIES, stride_qs, stride_qd, D, D_TILE, True)  # (Q_TILE_SIZE, D_TILE)
    m = tl.full([Q_TILE_SIZE], float("-inf"), tl.float32)
    l = tl.zeros([Q_TILE_SIZE], tl.float32)
    accumulator = tl.zeros([Q_TILE_SIZE, D_TILE], tl.float32)

    # Keys before full_keys are seen by the whole tile; those from end_keys on by none of it.
    full_keys = N_KEYS // K_TILE_SIZE * K_TILE_SIZE
    end_keys = N_KEYS
    if IS_CAUSAL:
        full_keys = tl.minimum(full_keys, (first_query + 1) // K_TILE_SIZE * K_TILE_SIZE)
        end_keys = tl.minimum(N_KEYS, first_query + Q_TILE_SIZE)

    # 2. unmasked loop
    accumulator, m, l = _visit_keys(
        accumulator, m, l, Q, K_base, V_base, query_rows, 0, full_keys, N_KEYS, scale_log2, ZERO,
        stride_ks, stride_kd, stride_vs, stride_vd, D, D_TILE, K_TILE_SIZE, IS_CAUSAL, False, PRECISION,
    )  # fmt: skip
    # 3. masked loop
    accumulator, m, l = _visit_keys(
        accumulator, m, l, Q, K_base, V_base, query_rows, full_keys, end_keys, N_KEYS, scale_log2, ZERO,
        stride_ks, stride_kd, stride_vs, stride_vd, D, D_TILE, K_TILE_SIZE, IS_CAUSAL, True, PRECISION,
    )  # fmt: skip

    # 4. normalise and store
    row_base = batch_head.to(tl.int64) * N_QUERIES
    _store_rows(O_ptr + row_base * D, accumulator / l[:, None], query_rows, N_QUERIES, D, 1, D, D_TILE)
    tl.store(L_ptr + row_base + query_rows, (m + tl.math.log2(l)) * LN_2, mask=query_rows < N_QUERIES)


def launch_forward(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys head_dim"],
    *,
    is_causal: bool,
    scale: float,
    config: KernelConfig,
) -> tuple[Float[Tensor, "batch heads queries head_dim"], Float[Tensor, "batch heads queries"]]:
    """Contiguous O in q's dtype and L in float32. Inputs are validated, non-empty and on one device."""
    batch, heads, num_queries, head_dim = q.shape
    output = q.new_empty(q.shape)
    lse = q.new_empty((batch, heads, num_queries), dtype=torch.float32)
    grid = (triton.cdiv(num_queries, config.query_tile) * batch * heads,)
    flash_forward_kernel[grid](
        q, k, v, output, lse,
        *q.stride(), *k.stride(), *v.stride(),
        heads, num_queries, k.shape[2], scale * LOG2_E.value, 0.0,
        GROUP=heads // k.shape[1], D=head_dim, D_TILE=head_tile(head_dim),
        Q_TILE_SIZE=config.query_tile, K_TILE_SIZE=config.key_tile,
        IS_CAUSAL=is_causal, PRECISION=config.precision,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return output, lse
