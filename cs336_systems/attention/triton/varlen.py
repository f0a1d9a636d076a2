"""Attention over packed documents in Triton: the dense kernels' bodies, with each program's bounds read on the device.

Documents lie one behind the other, (total, heads, head_dim); `cu_seqlens` (documents + 1) holds their boundaries. Tiles
start where documents start, so that no tile holds tokens of two: no mask is read, and a document's results do not
depend on its neighbours, bit for bit.

The grid must be chosen without reading cu_seqlens, which would stall the host. Document d gets the slots from
cu[d] // TILE + d on, which leaves it at least the ⌈n / TILE⌉ that its n tokens from a = cu[d] on need:
⌊(a + n) / TILE⌋ + 1 - ⌊a / TILE⌋ is no less. A program finds its document by bisection, and a spare slot ends at once.
So total // TILE + documents + 1 slots serve any lengths, however unequal, zero included.

Rows behind the last document belong to a document of no keys (no queries): O = 0, L = -inf, zero gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from cs336_systems.attention.tiles import KernelConfig
from cs336_systems.attention.triton.backward import differentiate_keys, differentiate_queries, launch_preprocess
from cs336_systems.attention.triton.forward import attend_queries
from cs336_systems.attention.triton.launching import contiguous_like, head_options, launch, tile_options
from cs336_systems.attention.triton.steps import LOG2_E, heads_together, tile_of_program
from cs336_systems.profiling.stages import stage


@triton.jit
def _tile_of_slot(cu_seqlens_ptr, slot, N_DOCUMENTS, TILE: tl.constexpr):
    """(document, tile in it): the last document whose slots start at or before `slot`, N_DOCUMENTS for the rows behind.

    The tile may lie past the document's end.
    """
    document, high = 0, N_DOCUMENTS
    while document < high:
        middle = (document + high + 1) // 2
        if tl.load(cu_seqlens_ptr + middle) // TILE + middle <= slot:
            document = middle
        else:
            high = middle - 1
    return document, slot - (tl.load(cu_seqlens_ptr + document) // TILE + document)


@triton.jit
def _rows_of_document(cu_seqlens_ptr, document, N_DOCUMENTS, behind, TOTAL):
    """(first row, number of rows) of a document; the rows behind the last one end at `behind`.

    Rows exist whatever cu_seqlens holds: its values are not checked where that would stall the host.
    """
    start = tl.load(cu_seqlens_ptr + document)
    end = tl.load(cu_seqlens_ptr + document + 1, mask=document < N_DOCUMENTS, other=behind)
    start = tl.minimum(tl.maximum(start, 0), TOTAL)
    return start.to(tl.int64), tl.maximum(tl.minimum(end, TOTAL) - start, 0)


@triton.jit
def varlen_forward_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_qs, stride_qh, stride_qd,
    stride_ks, stride_kh, stride_kd,
    stride_vs, stride_vh, stride_vd,
    N_DOCUMENTS, N_HEADS, HEADS_TOGETHER, TOTAL_QUERIES, TOTAL_KEYS, scale_log2, ZERO,
    GROUP: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O (total_queries, heads, D) and L (heads, total_queries) are contiguous; q, k, v have any strides."""
    num_slots = TOTAL_QUERIES // Q_TILE_SIZE + N_DOCUMENTS + 1
    slot, _, head = tile_of_program(num_slots, N_HEADS, HEADS_TOGETHER, IS_CAUSAL)
    document, query_tile = _tile_of_slot(cu_seqlens_q_ptr, slot, N_DOCUMENTS, Q_TILE_SIZE)
    first_query, num_queries = _rows_of_document(cu_seqlens_q_ptr, document, N_DOCUMENTS, TOTAL_QUERIES, TOTAL_QUERIES)
    first_key, num_keys = _rows_of_document(cu_seqlens_k_ptr, document, N_DOCUMENTS, 0, TOTAL_KEYS)
    if (query_tile >= 0) & (query_tile * Q_TILE_SIZE < num_queries):
        kv_head = head // GROUP
        attend_queries(
            Q_ptr + first_query * stride_qs + head * stride_qh, K_ptr + first_key * stride_ks + kv_head * stride_kh,
            V_ptr + first_key * stride_vs + kv_head * stride_vh, O_ptr + (first_query * N_HEADS + head) * D,
            L_ptr + head * TOTAL_QUERIES + first_query, 0, 0, 0, query_tile, num_queries, num_keys, scale_log2, ZERO,
            stride_qs, stride_qd, stride_ks, stride_kd, stride_vs, stride_vd, N_HEADS * D,
            D, D_TILE, Q_TILE_SIZE, K_TILE_SIZE, IS_CAUSAL, True, PRECISION, False,
        )  # fmt: skip


@triton.jit
def varlen_dkdv_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, D_ptr, dK_ptr, dV_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_qs, stride_qh, stride_qd,
    stride_ks, stride_kh, stride_kd,
    stride_vs, stride_vh, stride_vd,
    stride_dos, stride_doh, stride_dod,
    N_DOCUMENTS, N_KV_HEADS, HEADS_TOGETHER, TOTAL_QUERIES, TOTAL_KEYS, scale, scale_log2, ZERO,
    GROUP: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK, dV (total_keys, kv_heads, D), L and delta (heads, total_queries) are contiguous."""
    num_slots = TOTAL_KEYS // K_TILE_SIZE + N_DOCUMENTS + 1
    slot, _, kv_head = tile_of_program(num_slots, N_KV_HEADS, HEADS_TOGETHER, False)
    document, key_tile = _tile_of_slot(cu_seqlens_k_ptr, slot, N_DOCUMENTS, K_TILE_SIZE)
    first_query, num_queries = _rows_of_document(cu_seqlens_q_ptr, document, N_DOCUMENTS, 0, TOTAL_QUERIES)
    first_key, num_keys = _rows_of_document(cu_seqlens_k_ptr, document, N_DOCUMENTS, TOTAL_KEYS, TOTAL_KEYS)
    if (key_tile >= 0) & (key_tile * K_TILE_SIZE < num_keys):
        output_base = (first_key * N_KV_HEADS + kv_head) * D
        differentiate_keys(
            Q_ptr + first_query * stride_qs, K_ptr + first_key * stride_ks + kv_head * stride_kh,
            V_ptr + first_key * stride_vs + kv_head * stride_vh, dO_ptr + first_query * stride_dos,
            L_ptr + first_query, D_ptr + first_query, dK_ptr + output_base, dV_ptr + output_base, 0, 0, key_tile,
            kv_head * GROUP, num_queries, num_keys, scale, scale_log2, ZERO,
            stride_qh, stride_qs, stride_qd, stride_ks, stride_kd, stride_vs, stride_vd,
            stride_doh, stride_dos, stride_dod, TOTAL_QUERIES, N_KV_HEADS * D,
            GROUP, D, D_TILE, Q_TILE_SIZE, K_TILE_SIZE, IS_CAUSAL, False, PRECISION, False,
        )  # fmt: skip


@triton.jit
def varlen_dq_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, D_ptr, dQ_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_qs, stride_qh, stride_qd,
    stride_ks, stride_kh, stride_kd,
    stride_vs, stride_vh, stride_vd,
    stride_dos, stride_doh, stride_dod,
    N_DOCUMENTS, N_HEADS, HEADS_TOGETHER, TOTAL_QUERIES, TOTAL_KEYS, scale, scale_log2, ZERO,
    GROUP: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ (total_queries, heads, D), L and delta (heads, total_queries) are contiguous."""
    num_slots = TOTAL_QUERIES // Q_TILE_SIZE + N_DOCUMENTS + 1
    slot, _, head = tile_of_program(num_slots, N_HEADS, HEADS_TOGETHER, IS_CAUSAL)
    document, query_tile = _tile_of_slot(cu_seqlens_q_ptr, slot, N_DOCUMENTS, Q_TILE_SIZE)
    first_query, num_queries = _rows_of_document(cu_seqlens_q_ptr, document, N_DOCUMENTS, TOTAL_QUERIES, TOTAL_QUERIES)
    first_key, num_keys = _rows_of_document(cu_seqlens_k_ptr, document, N_DOCUMENTS, 0, TOTAL_KEYS)
    if (query_tile >= 0) & (query_tile * Q_TILE_SIZE < num_queries):
        kv_head = head // GROUP
        row_base = head * TOTAL_QUERIES + first_query
        differentiate_queries(
            Q_ptr + first_query * stride_qs + head * stride_qh, K_ptr + first_key * stride_ks + kv_head * stride_kh,
            V_ptr + first_key * stride_vs + kv_head * stride_vh,
            dO_ptr + first_query * stride_dos + head * stride_doh, L_ptr + row_base, D_ptr + row_base,
            dQ_ptr + (first_query * N_HEADS + head) * D, 0, 0, 0, query_tile, num_queries, num_keys,
            scale, scale_log2, ZERO,
            stride_qs, stride_qd, stride_ks, stride_kd, stride_vs, stride_vd, stride_dos, stride_dod, N_HEADS * D,
            D, D_TILE, Q_TILE_SIZE, K_TILE_SIZE, IS_CAUSAL, PRECISION, False,
        )  # fmt: skip


def launch_varlen_forward(
    q: Float[Tensor, "total_queries heads head_dim"],
    k: Float[Tensor, "total_keys kv_heads head_dim"],
    v: Float[Tensor, "total_keys kv_heads head_dim"],
    cu_seqlens_q: Int[Tensor, " documents_plus_1"],
    cu_seqlens_k: Int[Tensor, " documents_plus_1"],
    *,
    is_causal: bool,
    scale: float,
    config: KernelConfig,
) -> tuple[Float[Tensor, "total_queries heads head_dim"], Float[Tensor, "heads total_queries"]]:
    """Contiguous O in q's dtype and L in float32. Inputs are validated, non-empty and on one device."""
    output = contiguous_like(q)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    with stage("forward"):
        launch(
            varlen_forward_kernel, _grid(q, cu_seqlens_q, config.query_tile),
            (q, k, v, output, lse, cu_seqlens_q, cu_seqlens_k),
            (*q.stride(), *k.stride(), *v.stride(), len(cu_seqlens_q) - 1, q.shape[1],
             heads_together(q.shape[1], k.transpose(0, 1)), q.shape[0], k.shape[0], scale * LOG2_E.value, 0.0),
            _options(q, k, is_causal, config),
        )  # fmt: skip
    return output, lse


def launch_varlen_backward(
    q: Float[Tensor, "total_queries heads head_dim"],
    k: Float[Tensor, "total_keys kv_heads head_dim"],
    v: Float[Tensor, "total_keys kv_heads head_dim"],
    output: Float[Tensor, "total_queries heads head_dim"],
    lse: Float[Tensor, "heads total_queries"],
    grad_output: Float[Tensor, "total_queries heads head_dim"],
    grad_lse: Float[Tensor, "heads total_queries"] | None,
    cu_seqlens_q: Int[Tensor, " documents_plus_1"],
    cu_seqlens_k: Int[Tensor, " documents_plus_1"],
    *,
    is_causal: bool,
    scale: float,
    dkdv_config: KernelConfig,
    dq_config: KernelConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous gradients of q, k, v in their dtypes; what `launch_backward` says of its arguments holds here."""
    grad_q, grad_k, grad_v = contiguous_like(q), contiguous_like(k), contiguous_like(v)
    # A row's D needs no document: one sequence of all rows.
    rows = launch_preprocess(
        output.transpose(0, 1)[None], lse[None], grad_output.transpose(0, 1)[None],
        None if grad_lse is None else grad_lse[None], padded=False,
    )  # fmt: skip
    inputs, cu_seqlens = (q, k, v, grad_output, *rows), (cu_seqlens_q, cu_seqlens_k)
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad_output.stride())
    totals_and_scales = (q.shape[0], k.shape[0], scale, scale * LOG2_E.value, 0.0)
    documents, heads, kv_heads = len(cu_seqlens_q) - 1, q.shape[1], k.shape[1]

    with stage("dkv"):
        launch(
            varlen_dkdv_kernel, _grid(k, cu_seqlens_k, dkdv_config.key_tile), (*inputs, grad_k, grad_v, *cu_seqlens),
            (*strides, documents, kv_heads, heads_together(kv_heads, q.transpose(0, 1), heads // kv_heads),
             *totals_and_scales),
            _options(q, k, is_causal, dkdv_config),
        )  # fmt: skip
    with stage("dq"):
        launch(
            varlen_dq_kernel, _grid(q, cu_seqlens_q, dq_config.query_tile), (*inputs, grad_q, *cu_seqlens),
            (*strides, documents, heads, heads_together(heads, k.transpose(0, 1)), *totals_and_scales),
            _options(q, k, is_causal, dq_config),
        )  # fmt: skip
    return grad_q, grad_k, grad_v


def _grid(packed: Tensor, cu_seqlens: Tensor, tile: int) -> tuple[int]:
    """A program for each slot of each head: see the module's docstring."""
    return ((packed.shape[0] // tile + len(cu_seqlens)) * packed.shape[1],)


def _options(q: Tensor, k: Tensor, is_causal: bool, config: KernelConfig) -> dict[str, int | str]:
    return {**head_options(q.shape[1], k.shape[1], q.shape[2]), **tile_options(config), "IS_CAUSAL": is_causal}
