"""Stage 4: a first Triton kernel, FlashAttention-2's forward as the handout asks for it. The
backward is PyTorch's.

One program computes one tile of queries of one sequence; the grid is (query tiles, batch). The
loops are those of `attention/tiled.py`: the one over query tiles has become the grid, and a tile of
Q, the running maximum m, the sum l and the accumulator O stay on chip while the program walks over
tiles of K and V (algorithm 1 of FlashAttention-2).

    flash_attention(q, k, v, is_causal=True, backend="triton_first")
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.attention.call import Call
from cs336_systems.attention.rule import AttentionOperator
from cs336_systems.attention.tiled import tiled_attention_backward

TILE = 64  # rows of a tile of queries and of one of keys: lengths are whole tiles
# tl.arange wants powers of two, and tiles of more columns do not fit every GPU
HEAD_DIMS = (16, 32, 64, 128)
MAX_SEQUENCES = 65535  # the second dimension of a CUDA grid
# Where m starts. Finite: a tile whose scores are all -inf then gives exp(-inf - m) = 0, and not
# exp(-inf + inf) = NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def flash_fwd_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    stride_qb, stride_qq, stride_qd,
    stride_kb, stride_kk, stride_kd,
    stride_vb, stride_vk, stride_vd,
    stride_ob, stride_oq, stride_od,
    stride_lb, stride_lq,
    N_KEYS, scale,
    D: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    # Point at the query tile and at the first tiles of keys and values, in 64 bits: tensors may
    # pass 2³¹ elements.
    batch_index = tl.program_id(1).to(tl.int64)
    first_query = tl.program_id(0) * Q_TILE_SIZE
    queries = (first_query + tl.arange(0, Q_TILE_SIZE)).to(tl.int64)
    keys = tl.arange(0, K_TILE_SIZE).to(tl.int64)
    columns = tl.arange(0, D).to(tl.int64)
    Q_ptrs = (
        Q_ptr
        + batch_index * stride_qb
        + queries[:, None] * stride_qq
        + columns[None, :] * stride_qd
    )
    K_ptrs = (
        K_ptr + batch_index * stride_kb + keys[:, None] * stride_kk + columns[None, :] * stride_kd
    )
    V_ptrs = (
        V_ptr + batch_index * stride_vb + keys[:, None] * stride_vk + columns[None, :] * stride_vd
    )
    Q = tl.load(Q_ptrs)  # (Q_TILE_SIZE, D)

    m = tl.full([Q_TILE_SIZE], LOWEST, tl.float32)  # running row maxima of S
    l = tl.zeros([Q_TILE_SIZE], tl.float32)  # running row sums of exp(S - m)
    O = tl.zeros([Q_TILE_SIZE, D], tl.float32)  # running exp(S - m) V

    # Fold the key tiles in; under the causal mask those that begin behind the last query are never
    # read.
    end_keys = tl.minimum(N_KEYS, first_query + Q_TILE_SIZE) if IS_CAUSAL else N_KEYS
    for first_key in range(0, end_keys, K_TILE_SIZE):
        K = tl.load(K_ptrs)  # (K_TILE_SIZE, D)
        V = tl.load(V_ptrs)  # (K_TILE_SIZE, D)
        # (Q_TILE_SIZE, K_TILE_SIZE), float32
        S = tl.dot(Q, tl.trans(K), input_precision="ieee") * scale
        if IS_CAUSAL:
            S = tl.where(queries[:, None] >= first_key + keys[None, :], S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, axis=1))
        P = tl.exp(S - m_new[:, None])
        rescale = tl.exp(m - m_new)
        l = rescale * l + tl.sum(P, axis=1)
        O = tl.dot(P.to(V.dtype), V, acc=rescale[:, None] * O, input_precision="ieee")
        m = m_new
        K_ptrs += K_TILE_SIZE * stride_kk
        V_ptrs += K_TILE_SIZE * stride_vk

    # Normalise once, and store.
    O_ptrs = (
        O_ptr
        + batch_index * stride_ob
        + queries[:, None] * stride_oq
        + columns[None, :] * stride_od
    )
    tl.store(O_ptrs, (O / l[:, None]).to(O_ptr.dtype.element_ty))
    tl.store(L_ptr + batch_index * stride_lb + queries * stride_lq, m + tl.log(l))


def check_first(q: Tensor, k: Tensor) -> None:
    """ValueError for validated q and k (..., seq, head_dim) that this kernel does not take."""
    whole_tiles = q.shape[-2] % TILE == k.shape[-2] % TILE == 0
    few_sequences = k.shape[:-2] == q.shape[:-2] and q.shape[:-2].numel() <= MAX_SEQUENCES
    if not whole_tiles or not few_sequences or q.shape[-1] not in HEAD_DIMS:
        raise ValueError(
            f"backend 'triton_first' takes queries and keys in whole tiles of {TILE}, head dims of {HEAD_DIMS} and as "
            f"many key heads as query heads, {MAX_SEQUENCES:,} in the batch at most, got q {tuple(q.shape)} and k "
            f"{tuple(k.shape)}; backend 'triton' has fewer limits"
        )


def flash_forward_first(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output in q's dtype and log-sum-exp (..., queries) in float32 of q, k, v (..., seq,
    head_dim), any strides.
    """
    check_first(q, k)
    output, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
    # (batch, rows, D): heads are batch elements here
    Q, K, V = (x.flatten(0, -3) for x in (q, k, v))
    O, L = output.view(Q.shape), lse.view(Q.shape[:-1])
    with torch.cuda.device_of(q):
        flash_fwd_kernel[Q.shape[1] // TILE, Q.shape[0]](
            Q, K, V, O, L,
            *Q.stride(), *K.stride(), *V.stride(), *O.stride(), *L.stride(),
            K.shape[1], scale,
            D=q.shape[-1], Q_TILE_SIZE=TILE, K_TILE_SIZE=TILE, IS_CAUSAL=is_causal,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return output, lse


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    return flash_forward_first(q, k, v, call.is_causal, call.scale)


triton_first_attention = AttentionOperator(
    "triton_first_attention", _forward, tiled_attention_backward
)
