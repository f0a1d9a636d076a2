"""Attention over packed documents in Triton: the dense kernels' bodies, with each program's bounds
read on the device.

Documents lie one behind the other, (total, heads, head_dim); `cu_seqlens` (documents + 1) holds
their boundaries. Tiles start where documents start, so that no tile holds tokens of two: no mask is
read, and a document's results do not depend on its neighbours, bit for bit.

The grid must be chosen without reading cu_seqlens, which would stall the host. Document d gets the
slots from
cu[d] // TILE + d on, which leaves it at least the ⌈n / TILE⌉ that its n tokens from a = cu[d] on
need:
⌊(a + n) / TILE⌋ + 1 - ⌊a / TILE⌋ is no less. A program finds its document by bisection, and a spare
slot ends at once. So total // TILE + documents + 1 slots serve any lengths, however unequal, zero
included.

The copy engine (TMA) reads whole tiles of a document. Those that its end cuts, whose other rows are
the neighbour's, are read by pointers, which stop there.

The backward's kernels overlap as the dense ones do (`backward`), in spare slots too.

Rows behind the last document belong to a document of no keys (no queries): O = 0, L = -inf, zero
gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.attention.call import Saved
from cs336_systems.attention.tiles import KernelConfig
from cs336_systems.attention.triton.backward import (
    differentiate_keys,
    differentiate_queries,
    launch_preprocess,
)
from cs336_systems.attention.triton.forward import attend_queries
from cs336_systems.attention.triton.launch import (
    Boundaries,
    PackedKeys,
    PackedQueries,
    PackedRows,
    described,
    empty,
    empty_like,
    heads_together,
    launch,
    overlap_options,
    tile_options,
)
from cs336_systems.attention.triton.steps import (
    LOG2_E,
    Problem,
    await_previous,
    head_of,
    start_next,
    tile_of_program,
)
from cs336_systems.measure.stages import stage


@triton.jit
def _boundary(cu_seqlens_ptr, document, TOTAL):
    """cu_seqlens[document], or the nearest row: its values are not checked where that would stall
    the host.
    """
    return tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + document), 0), TOTAL)


@triton.jit
def tile_of_slot(cu_seqlens_ptr, slot, N_DOCUMENTS, TOTAL, TILE: tl.constexpr):
    """(document, tile in it): the last document whose slots start at or before `slot`, N_DOCUMENTS
    for the rows behind.

    The tile may lie past the document's end.
    """
    document, high = 0, N_DOCUMENTS
    while document < high:
        middle = (document + high + 1) // 2
        if _boundary(cu_seqlens_ptr, middle, TOTAL) // TILE + middle <= slot:
            document = middle
        else:
            high = middle - 1
    return document, slot - (_boundary(cu_seqlens_ptr, document, TOTAL) // TILE + document)


@triton.jit
def rows_of_document(cu_seqlens_ptr, document, N_DOCUMENTS, behind, TOTAL):
    """(first row, number of rows) of a document; the rows behind the last one end at `behind`.

    They exist, whatever cu_seqlens holds.
    """
    start = _boundary(cu_seqlens_ptr, document, TOTAL)
    end = behind
    if document < N_DOCUMENTS:
        end = _boundary(cu_seqlens_ptr, document + 1, TOTAL)
    return start.to(tl.int64), tl.maximum(end - start, 0)


@triton.jit
def head_in(X, strides, first_row, head):
    """The rows of one head of packed documents from `first_row` on; strides are to the next row,
    head and column.
    """
    return head_of(X, (strides[0], strides[1], strides[0], strides[2]), first_row, head)


@triton.jit
def varlen_forward_kernel(
    Q_ptr, K_ptr, V_ptr, K_documents, V_documents, O_ptr, L_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    Q_strides, K_strides, V_strides,
    N_DOCUMENTS, N_HEADS, HEADS_TOGETHER, TOTAL_QUERIES, TOTAL_KEYS, scale_log2, ZERO,
    GROUP: tl.constexpr, TILES: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """O (total_queries, heads, D) and L (heads, total_queries) are contiguous; q, k, v have any
    strides.

    K_documents and V_documents are K and V, or their descriptors.
    """
    D: tl.constexpr = TILES.D
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    num_slots = TOTAL_QUERIES // Q_TILE_SIZE + N_DOCUMENTS + 1
    slot, _, _, head = tile_of_program(num_slots, N_HEADS, HEADS_TOGETHER, IS_CAUSAL)
    document, query_tile = tile_of_slot(
        cu_seqlens_q_ptr, slot, N_DOCUMENTS, TOTAL_QUERIES, Q_TILE_SIZE
    )
    first_query, num_queries = rows_of_document(
        cu_seqlens_q_ptr, document, N_DOCUMENTS, TOTAL_QUERIES, TOTAL_QUERIES
    )
    first_key, num_keys = rows_of_document(cu_seqlens_k_ptr, document, N_DOCUMENTS, 0, TOTAL_KEYS)
    if (query_tile >= 0) & (query_tile * Q_TILE_SIZE < num_queries):
        kv_head = head // GROUP
        attend_queries(
            head_in(Q_ptr, Q_strides, first_query, head),
            head_in(K_documents, K_strides, first_key, kv_head),
            head_in(V_documents, V_strides, first_key, kv_head),
            head_in(K_ptr, K_strides, first_key, kv_head),
            head_in(V_ptr, V_strides, first_key, kv_head),
            O_ptr + (first_query * N_HEADS + head) * D, L_ptr + head * TOTAL_QUERIES + first_query, N_HEADS * D,
            query_tile, None, 0, head, Problem(num_queries, num_keys, scale_log2, ZERO), TILES, IS_CAUSAL, True,
        )  # fmt: skip


@triton.jit
def varlen_dkdv_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, Q_documents, dO_documents, L_ptr, delta_ptr, dK_ptr, dV_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    Q_strides, K_strides, V_strides, dO_strides,
    N_DOCUMENTS, N_KV_HEADS, HEADS_TOGETHER, TOTAL_QUERIES, TOTAL_KEYS, scale, scale_log2, ZERO,
    GROUP: tl.constexpr, TILES: tl.constexpr, IS_CAUSAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dK, dV (total_keys, kv_heads, D), L and delta (heads, total_queries) are contiguous."""
    D: tl.constexpr = TILES.D
    K_TILE_SIZE: tl.constexpr = TILES.K_TILE_SIZE
    num_slots = TOTAL_KEYS // K_TILE_SIZE + N_DOCUMENTS + 1
    slot, _, _, kv_head = tile_of_program(num_slots, N_KV_HEADS, HEADS_TOGETHER, False)
    document, key_tile = tile_of_slot(cu_seqlens_k_ptr, slot, N_DOCUMENTS, TOTAL_KEYS, K_TILE_SIZE)
    first_query, num_queries = rows_of_document(
        cu_seqlens_q_ptr, document, N_DOCUMENTS, 0, TOTAL_QUERIES
    )
    first_key, num_keys = rows_of_document(
        cu_seqlens_k_ptr, document, N_DOCUMENTS, TOTAL_KEYS, TOTAL_KEYS
    )
    if (key_tile >= 0) & (key_tile * K_TILE_SIZE < num_keys):
        output_base = (first_key * N_KV_HEADS + kv_head) * D
        differentiate_keys(
            head_in(K_ptr, K_strides, first_key, kv_head),
            head_in(V_ptr, V_strides, first_key, kv_head),
            head_in(Q_documents, Q_strides, first_query, 0),
            head_in(dO_documents, dO_strides, first_query, 0),
            head_in(Q_ptr, Q_strides, first_query, 0),
            head_in(dO_ptr, dO_strides, first_query, 0),
            L_ptr + first_query, delta_ptr + first_query, TOTAL_QUERIES,
            dK_ptr + output_base, dV_ptr + output_base, N_KV_HEADS * D, kv_head * GROUP, key_tile, scale,
            None, 0, Problem(num_queries, num_keys, scale_log2, ZERO), GROUP, TILES, IS_CAUSAL, False, OVERLAP,
        )  # fmt: skip
    else:  # a spare slot: dQ may not start before the preprocess has ended
        await_previous(OVERLAP)
        start_next(OVERLAP)


@triton.jit
def varlen_dq_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, K_documents, V_documents, L_ptr, delta_ptr, dQ_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    Q_strides, K_strides, V_strides, dO_strides,
    N_DOCUMENTS, N_HEADS, HEADS_TOGETHER, TOTAL_QUERIES, TOTAL_KEYS, scale, scale_log2, ZERO,
    GROUP: tl.constexpr, TILES: tl.constexpr, IS_CAUSAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dQ (total_queries, heads, D), L and delta (heads, total_queries) are contiguous."""
    D: tl.constexpr = TILES.D
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    num_slots = TOTAL_QUERIES // Q_TILE_SIZE + N_DOCUMENTS + 1
    slot, _, _, head = tile_of_program(num_slots, N_HEADS, HEADS_TOGETHER, IS_CAUSAL)
    document, query_tile = tile_of_slot(
        cu_seqlens_q_ptr, slot, N_DOCUMENTS, TOTAL_QUERIES, Q_TILE_SIZE
    )
    first_query, num_queries = rows_of_document(
        cu_seqlens_q_ptr, document, N_DOCUMENTS, TOTAL_QUERIES, TOTAL_QUERIES
    )
    first_key, num_keys = rows_of_document(cu_seqlens_k_ptr, document, N_DOCUMENTS, 0, TOTAL_KEYS)
    if (query_tile >= 0) & (query_tile * Q_TILE_SIZE < num_queries):
        kv_head = head // GROUP
        row_base = head * TOTAL_QUERIES + first_query
        differentiate_queries(
            head_in(Q_ptr, Q_strides, first_query, head),
            head_in(dO_ptr, dO_strides, first_query, head),
            head_in(K_documents, K_strides, first_key, kv_head),
            head_in(V_documents, V_strides, first_key, kv_head),
            head_in(K_ptr, K_strides, first_key, kv_head),
            head_in(V_ptr, V_strides, first_key, kv_head),
            L_ptr + row_base, delta_ptr + row_base, dQ_ptr + (first_query * N_HEADS + head) * D, N_HEADS * D,
            query_tile, scale, None, 0, head, Problem(num_queries, num_keys, scale_log2, ZERO), TILES, IS_CAUSAL,
        )  # fmt: skip
        await_previous(OVERLAP)
    else:  # behind both branches it would take registers from the loops
        await_previous(OVERLAP)


def launch_varlen_forward(
    q: PackedQueries, k: PackedKeys, v: PackedKeys, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, *,
    is_causal: bool, scale: float, config: KernelConfig,
) -> tuple[PackedQueries, PackedRows]:  # fmt: skip
    """Contiguous O in q's dtype and L in float32. Inputs are validated, non-empty and on one
    device.
    """
    output = empty_like(q)
    lse = empty((q.shape[1], q.shape[0]), torch.float32, q.device)
    with stage("forward"):
        launch(
            varlen_forward_kernel, _grid(q, cu_seqlens_q, config.query_tile),
            (q, k, v, *described(config, packed=True, k=k, v=v), output, lse, cu_seqlens_q, cu_seqlens_k),
            (q.stride(), k.stride(), v.stride(), len(cu_seqlens_q) - 1, q.shape[1],
             heads_together(q.shape[1], k.transpose(0, 1)), q.shape[0], k.shape[0], scale * LOG2_E.value, 0.0),
            _options(q, k, is_causal, config),
        )  # fmt: skip
    return output, lse


def launch_varlen_backward(
    saved: Saved, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, *,
    is_causal: bool, scale: float, dkdv_config: KernelConfig, dq_config: KernelConfig,
) -> tuple[PackedQueries, PackedKeys, PackedKeys]:  # fmt: skip
    """Contiguous gradients of q, k, v in their dtypes; what `launch_backward` says of its arguments
    holds here.
    """
    q, k, v, output, lse, grad_output, grad_lse = saved
    grad_q, grad_k, grad_v = empty_like(q), empty_like(k), empty_like(v)
    rows = launch_preprocess(  # of which none needs its document: one sequence of all rows
        output.transpose(0, 1)[None], lse[None], grad_output.transpose(0, 1)[None],
        None if grad_lse is None else grad_lse[None], padded=False,
    )  # fmt: skip
    inputs, cu_seqlens = (q, k, v, grad_output), (cu_seqlens_q, cu_seqlens_k)
    strides = (q.stride(), k.stride(), v.stride(), grad_output.stride())
    totals_and_scales = (q.shape[0], k.shape[0], scale, scale * LOG2_E.value, 0.0)
    documents, heads, kv_heads = len(cu_seqlens_q) - 1, q.shape[1], k.shape[1]
    overlap = overlap_options(q.device, follows=True)
    with stage("dkv"):
        launch(
            varlen_dkdv_kernel, _grid(k, cu_seqlens_k, dkdv_config.key_tile),
            (*inputs, *described(dkdv_config, packed=True, q=q, grad_output=grad_output), *rows, grad_k, grad_v,
             *cu_seqlens),
            (*strides, documents, kv_heads, heads_together(kv_heads, q.transpose(0, 1), heads // kv_heads),
             *totals_and_scales),
            _options(q, k, is_causal, dkdv_config) | overlap,
        )  # fmt: skip
    with stage("dq"):
        launch(
            varlen_dq_kernel, _grid(q, cu_seqlens_q, dq_config.query_tile),
            (*inputs, *described(dq_config, packed=True, k=k, v=v), *rows, grad_q, *cu_seqlens),
            (*strides, documents, heads, heads_together(heads, k.transpose(0, 1)), *totals_and_scales),
            _options(q, k, is_causal, dq_config) | overlap,
        )  # fmt: skip
    return grad_q, grad_k, grad_v


def _grid(packed: Tensor, cu_seqlens: Tensor, tile: int) -> tuple[int]:
    """A program for each slot of each head: see the module's docstring."""
    return ((packed.shape[0] // tile + len(cu_seqlens)) * packed.shape[1],)


def _options(q: Tensor, k: Tensor, is_causal: bool, config: KernelConfig) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "IS_CAUSAL": is_causal,
        **tile_options(config, q.shape[2]),
    }
