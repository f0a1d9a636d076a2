"""The FlashAttention-2 backward in Triton: a preprocess and two passes, none of which needs atomics.

  preprocess   D = rowsum(dO ∘ O), minus the gradient of L if one arrives; one program a tile of queries
  dK, dV       one program a tile of keys, over the query tiles that see it
  dQ           one program a tile of queries, over the key tiles that it sees

Both passes recompute P = exp(S - L) from Q, K and L. That is seven matmuls instead of five, and in return every output
tile has one writer: gradients are bit-reproducible. Source: FlashAttention-2 (Dao 2023), algorithm 2, split in two.

With grouped-query attention a dK/dV program runs through all query heads of its group, so the sum over the group stays
in its float32 accumulators.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from cs336_systems.attention.tiles import KernelConfig, head_tile
from cs336_systems.attention.triton.forward import LOG2_E, _accumulate, _load_rows, _store_rows

PREPROCESS_ROWS = 64


@triton.jit
def flash_backward_preprocess_kernel(
    O_ptr, dO_ptr, dL_ptr, D_ptr,
    stride_dob, stride_doh, stride_dos, stride_dod, stride_dlb, stride_dlh, stride_dls,
    N_HEADS, N_QUERIES,
    HAS_DL: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, Q_TILE_SIZE: tl.constexpr,
):  # fmt: skip
    num_query_tiles = tl.cdiv(N_QUERIES, Q_TILE_SIZE)
    batch_head = (tl.program_id(0) // num_query_tiles).to(tl.int64)
    query_rows = tl.program_id(0) % num_query_tiles * Q_TILE_SIZE + tl.arange(0, Q_TILE_SIZE)
    batch, head = batch_head // N_HEADS, batch_head % N_HEADS
    row_base = batch_head * N_QUERIES
    O = _load_rows(O_ptr + row_base * D, query_rows, N_QUERIES, D, 1, D, D_TILE, True)
    dO_base = dO_ptr + batch * stride_dob + head * stride_doh
    dO = _load_rows(dO_base, query_rows, N_QUERIES, stride_dos, stride_dod, D, D_TILE, True)
    delta = tl.sum(O.to(tl.float32) * dO.to(tl.float32), axis=1)
    if HAS_DL:
        dL_base = dL_ptr + batch * stride_dlb + head * stride_dlh
        delta -= tl.load(dL_base + query_rows.to(tl.int64) * stride_dls, mask=query_rows < N_QUERIES, other=0.0)
    tl.store(D_ptr + row_base + query_rows, delta, mask=query_rows < N_QUERIES)


@triton.jit
def _visit_queries(
    dK, dV, K, V, key_rows, Q_base, dO_base, L_base, D_base, first_query, last_query, N_QUERIES, scale_log2, ZERO,
    stride_qs, stride_qd, stride_dos, stride_dod,
    D: tl.constexpr, D_TILE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the query tiles of [first_query, last_query) into dK (without its scale) and dV.

    Works on transposed scores, keys along rows, so that Pᵀ and dSᵀ are left operands as they come. Queries past the
    end load L = +inf, hence P = 0: only the diagonal needs mask arithmetic.
    """
    for start in tl.range(first_query, last_query, Q_TILE_SIZE):
        query_rows = start + tl.arange(0, Q_TILE_SIZE)
        Q = _load_rows(Q_base, query_rows, N_QUERIES, stride_qs, stride_qd, D, D_TILE, True)
        dO = _load_rows(dO_base, query_rows, N_QUERIES, stride_dos, stride_dod, D, D_TILE, True)
        L = tl.load(L_base + query_rows, mask=query_rows < N_QUERIES, other=float("inf"))
        delta = tl.load(D_base + query_rows, mask=query_rows < N_QUERIES, other=0.0)
        S_T = tl.dot(K, tl.trans(Q), input_precision=PRECISION)  # (K_TILE_SIZE, Q_TILE_SIZE)
        P_T = tl.math.exp2(S_T * scale_log2 - (L * LOG2_E)[None, :])
        if DIAGONAL:
            P_T = tl.where(query_rows[None, :] >= key_rows[:, None], P_T, 0.0)
        dV = _accumulate(dV, P_T.to(dO.dtype), dO, ZERO, PRECISION)
        dP_T = tl.dot(V, tl.trans(dO), input_precision=PRECISION)
        dS_T = P_T * (dP_T - delta[None, :])
        dK = _accumulate(dK, dS_T.to(Q.dtype), Q, ZERO, PRECISION)
    return dK, dV


@triton.jit
def flash_backward_dkdv_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, D_ptr, dK_ptr, dV_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_dob, stride_doh, stride_dos, stride_dod,
    N_KV_HEADS, N_QUERIES, N_KEYS, scale, scale_log2, ZERO,
    GROUP: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK, dV (batch, kv_heads, keys, D), L and delta (batch, heads, queries) are contiguous."""
    num_key_tiles = tl.cdiv(N_KEYS, K_TILE_SIZE)
    num_batch_heads = tl.num_programs(0) // num_key_tiles
    batch_head = tl.program_id(0) % num_batch_heads
    first_key = tl.program_id(0) // num_batch_heads * K_TILE_SIZE  # causal: the first keys are seen by most queries
    batch = (batch_head // N_KV_HEADS).to(tl.int64)
    kv_head = (batch_head % N_KV_HEADS).to(tl.int64)

    key_rows = first_key + tl.arange(0, K_TILE_SIZE)
    K_base = K_ptr + batch * stride_kb + kv_head * stride_kh
    V_base = V_ptr + batch * stride_vb + kv_head * stride_vh
    K = _load_rows(K_base, key_rows, N_KEYS, stride_ks, stride_kd, D, D_TILE, True)  # (K_TILE_SIZE, D_TILE)
    V = _load_rows(V_base, key_rows, N_KEYS, stride_vs, stride_vd, D, D_TILE, True)
    dK = tl.zeros([K_TILE_SIZE, D_TILE], tl.float32)
    dV = tl.zeros([K_TILE_SIZE, D_TILE], tl.float32)

    # Query tiles before start_queries see none of these keys; [start_queries, full_queries) are cut by the diagonal.
    start_queries = 0
    full_queries = 0
    if IS_CAUSAL:
        start_queries = first_key // Q_TILE_SIZE * Q_TILE_SIZE
        full_queries = tl.cdiv(first_key + K_TILE_SIZE - 1, Q_TILE_SIZE) * Q_TILE_SIZE

    for member in range(GROUP):
        head = kv_head * GROUP + member
        Q_base = Q_ptr + batch * stride_qb + head * stride_qh
        dO_base = dO_ptr + batch * stride_dob + head * stride_doh
        row_base = (batch * N_KV_HEADS * GROUP + head) * N_QUERIES
        if IS_CAUSAL:
            dK, dV = _visit_queries(
                dK, dV, K, V, key_rows, Q_base, dO_base, L_ptr + row_base, D_ptr + row_base, start_queries,
                tl.minimum(full_queries, N_QUERIES), N_QUERIES, scale_log2, ZERO, stride_qs, stride_qd, stride_dos,
                stride_dod, D, D_TILE, Q_TILE_SIZE, True, PRECISION,
            )  # fmt: skip
        dK, dV = _visit_queries(
            dK, dV, K, V, key_rows, Q_base, dO_base, L_ptr + row_base, D_ptr + row_base, full_queries,
            N_QUERIES, N_QUERIES, scale_log2, ZERO, stride_qs, stride_qd, stride_dos, stride_dod,
            D, D_TILE, Q_TILE_SIZE, False, PRECISION,
        )  # fmt: skip

    output_base = batch_head.to(tl.int64) * N_KEYS * D
    _store_rows(dK_ptr + output_base, dK * scale, key_rows, N_KEYS, D, 1, D, D_TILE)
    _store_rows(dV_ptr + output_base, dV, key_rows, N_KEYS, D, 1, D, D_TILE)


@triton.jit
def _visit_keys(
    dQ, Q, dO, L_log2, delta, query_rows, K_base, V_base, first_key, last_key, N_KEYS, scale_log2, ZERO,
    stride_ks, stride_kd, stride_vs, stride_vd,
    D: tl.constexpr, D_TILE: tl.constexpr, K_TILE_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the key tiles of [first_key, last_key) into dQ (without its scale). Keys past the end are loaded as zeros
    and masked: their scores would be 0, not -inf."""
    for start in tl.range(first_key, last_key, K_TILE_SIZE):
        key_rows = start + tl.arange(0, K_TILE_SIZE)
        K = _load_rows(K_base, key_rows, N_KEYS, stride_ks, stride_kd, D, D_TILE, MASKED)
        V = _load_rows(V_base, key_rows, N_KEYS, stride_vs, stride_vd, D, D_TILE, MASKED)
        S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)  # (Q_TILE_SIZE, K_TILE_SIZE)
        P = tl.math.exp2(S * scale_log2 - L_log2[:, None])
        if MASKED:
            visible = (key_rows < N_KEYS)[None, :]
            if IS_CAUSAL:
                visible = visible & (query_rows[:, None] >= key_rows[None, :])
            P = tl.where(visible, P, 0.0)
        dP = tl.dot(dO, tl.trans(V), input_precision=PRECISION)
        dS = P * (dP - delta[:, None])
        dQ = _accumulate(dQ, dS.to(K.dtype), K, ZERO, PRECISION)
    return dQ


@triton.jit
def flash_backward_dq_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, D_ptr, dQ_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_dob, stride_doh, stride_dos, stride_dod,
    N_HEADS, N_QUERIES, N_KEYS, scale, scale_log2, ZERO,
    GROUP: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ (batch, heads, queries, D), L and delta (batch, heads, queries) are contiguous."""
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

    first_query = query_tile * Q_TILE_SIZE
    query_rows = first_query + tl.arange(0, Q_TILE_SIZE)
    Q_base = Q_ptr + batch * stride_qb + head * stride_qh
    dO_base = dO_ptr + batch * stride_dob + head * stride_doh
    row_base = batch_head.to(tl.int64) * N_QUERIES
    Q = _load_rows(Q_base, query_rows, N_QUERIES, stride_qs, stride_qd, D, D_TILE, True)  # (Q_TILE_SIZE, D_TILE)
    dO = _load_rows(dO_base, query_rows, N_QUERIES, stride_dos, stride_dod, D, D_TILE, True)
    L_log2 = tl.load(L_ptr + row_base + query_rows, mask=query_rows < N_QUERIES, other=float("inf")) * LOG2_E
    delta = tl.load(D_ptr + row_base + query_rows, mask=query_rows < N_QUERIES, other=0.0)
    dQ = tl.zeros([Q_TILE_SIZE, D_TILE], tl.float32)

    full_keys = N_KEYS // K_TILE_SIZE * K_TILE_SIZE
    end_keys = N_KEYS
    if IS_CAUSAL:
        full_keys = tl.minimum(full_keys, (first_query + 1) // K_TILE_SIZE * K_TILE_SIZE)
        end_keys = tl.minimum(N_KEYS, first_query + Q_TILE_SIZE)
    dQ = _visit_keys(
        dQ, Q, dO, L_log2, delta, query_rows, K_base, V_base, 0, full_keys, N_KEYS, scale_log2, ZERO,
        stride_ks, stride_kd, stride_vs, stride_vd, D, D_TILE, K_TILE_SIZE, IS_CAUSAL, False, PRECISION,
    )  # fmt: skip
    dQ = _visit_keys(
        dQ, Q, dO, L_log2, delta, query_rows, K_base, V_base, full_keys, end_keys, N_KEYS, scale_log2, ZERO,
        stride_ks, stride_kd, stride_vs, stride_vd, D, D_TILE, K_TILE_SIZE, IS_CAUSAL, True, PRECISION,
    )  # fmt: skip
    _store_rows(dQ_ptr + row_base * D, dQ * scale, query_rows, N_QUERIES, D, 1, D, D_TILE)


def launch_backward(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys head_dim"],
    output: Float[Tensor, "batch heads queries head_dim"],
    lse: Float[Tensor, "batch heads queries"],
    grad_output: Float[Tensor, "batch heads queries head_dim"],
    grad_lse: Float[Tensor, "batch heads queries"] | None,
    *,
    is_causal: bool,
    scale: float,
    dkdv_config: KernelConfig,
    dq_config: KernelConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous gradients of q, k, v in their dtypes.

    `output` and `lse` are contiguous, as the forward wrote them; the others have any strides, a stride-0 `grad_output`
    (from `o.sum().backward()`) included.
    """
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    delta = torch.empty_like(lse)
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    tile = head_tile(head_dim)

    grid = (triton.cdiv(num_queries, PREPROCESS_ROWS) * batch * heads,)
    flash_backward_preprocess_kernel[grid](
        output, grad_output, lse if grad_lse is None else grad_lse, delta,
        *grad_output.stride(), *(lse if grad_lse is None else grad_lse).stride(),
        heads, num_queries,
        HAS_DL=grad_lse is not None, D=head_dim, D_TILE=tile, Q_TILE_SIZE=PREPROCESS_ROWS,
    )  # fmt: skip
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad_output.stride())
    scale_log2 = scale * LOG2_E.value
    common = {"GROUP": heads // kv_heads, "D": head_dim, "D_TILE": tile, "IS_CAUSAL": is_causal}

    grid = (triton.cdiv(num_keys, dkdv_config.key_tile) * batch * kv_heads,)
    flash_backward_dkdv_kernel[grid](
        q, k, v, grad_output, lse, delta, grad_k, grad_v, *strides,
        kv_heads, num_queries, num_keys, scale, scale_log2, 0.0, **common,
        Q_TILE_SIZE=dkdv_config.query_tile, K_TILE_SIZE=dkdv_config.key_tile,
        PRECISION=dkdv_config.precision,
        num_warps=dkdv_config.num_warps, num_stages=dkdv_config.num_stages,
    )  # fmt: skip
    grid = (triton.cdiv(num_queries, dq_config.query_tile) * batch * heads,)
    flash_backward_dq_kernel[grid](
        q, k, v, grad_output, lse, delta, grad_q, *strides,
        heads, num_queries, num_keys, scale, scale_log2, 0.0, **common,
        Q_TILE_SIZE=dq_config.query_tile, K_TILE_SIZE=dq_config.key_tile,
        PRECISION=dq_config.precision,
        num_warps=dq_config.num_warps, num_stages=dq_config.num_stages,
    )  # fmt: skip
    return grad_q, grad_k, grad_v
