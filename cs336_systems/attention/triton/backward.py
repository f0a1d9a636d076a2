"""The FlashAttention-2 backward in Triton: a preprocess and two passes, none of which needs
atomics.

  preprocess   delta = rowsum(dO ∘ O), minus the gradient of L if one arrives, and 0 in a row without keys; L in base 2;
               one program a tile of queries
  dK, dV       one program a tile of keys, over the query tiles that see it
  dQ           one program a tile of queries, over the key tiles that it sees

Both passes recompute P = exp(S - L) from Q, K and L. That is seven matmuls instead of five, and in
return every output tile has one writer: gradients are bit-reproducible. Source: FlashAttention-2
(Dao 2023), algorithm 2, split in two.

In the kernels D is the head dim, and the paper's D is called delta.

From sm_90 on a kernel starts while the one before it ends: its first programs take the place that
the last ones leave. dK/dV waits for the preprocess before it reads L and delta (by TMA it loads K
and V first). dQ may start once every program of dK/dV is past that wait: L and delta are complete
then, and it reads nothing that dK/dV writes. It waits for dK/dV at its own end, so that whoever
waits for dQ has waited for both. The preprocess starts when all work before the call has ended.
Source: CUDA Programming Guide, Programmatic Dependent Launch and Synchronization.

With grouped-query attention a dK/dV program runs through all query heads of its group, so the sum
over the group stays in its float32 accumulators.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_systems.attention.call import Saved
from cs336_systems.attention.masks.tiles import TileLists
from cs336_systems.attention.tiles import KernelConfig, head_tile
from cs336_systems.attention.tiles.choice import Walks
from cs336_systems.attention.tiles.kernel_config import HALF_L2_SHARE_BYTES
from cs336_systems.attention.triton.launch import (
    Keys,
    Queries,
    Rows,
    described,
    empty,
    heads_together,
    launch,
    num_tiles,
    overlap_options,
    tile_options,
)
from cs336_systems.attention.triton.lists import (
    hide_keys,
    hide_queries,
    row_of_step,
    walked,
    walks_of,
)
from cs336_systems.attention.triton.steps import (
    LOG2_E,
    ROW_PADDING,
    Problem,
    Tiles,
    await_previous,
    fold_keys,
    fold_queries,
    head_from,
    head_of,
    key_bounds,
    load_lse_and_delta,
    load_rows,
    padded_rows,
    recompute_probabilities,
    start_next,
    store_rows,
    tile_of_program,
)
from cs336_systems.measure.stages import stage

PREPROCESS_ROWS = 64


@triton.jit
def flash_backward_preprocess_kernel(
    O_ptr, dO_ptr, L_ptr, dL_ptr, L_log2_ptr, delta_ptr,
    O_strides, dO_strides, dL_strides, N_HEADS, N_QUERIES,
    HAS_DL: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """L (batch, heads, queries) is contiguous, and so are the rows of O and the results, which
    PADDED lengthens.
    """
    start_next(OVERLAP)
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    num_rows = padded_rows(N_QUERIES) if PADDED else N_QUERIES
    num_query_tiles = tl.cdiv(num_rows, Q_TILE_SIZE)
    batch_head = (tl.program_id(0) // num_query_tiles).to(tl.int64)
    batch, head = batch_head // N_HEADS, batch_head % N_HEADS
    first_query = tl.program_id(0) % num_query_tiles * Q_TILE_SIZE
    query_rows = first_query + tl.arange(0, Q_TILE_SIZE)
    O_head = head_of(O_ptr, O_strides, batch, head)
    O = load_rows(O_head, first_query, N_QUERIES, Q_TILE_SIZE, TILES, True)
    dO_head = head_of(dO_ptr, dO_strides, batch, head)
    dO = load_rows(dO_head, first_query, N_QUERIES, Q_TILE_SIZE, TILES, True)
    delta = tl.sum(O.to(tl.float32) * dO.to(tl.float32), axis=1)
    if HAS_DL:
        dL_base = dL_ptr + batch * dL_strides[0] + head * dL_strides[1]
        delta -= tl.load(
            dL_base + query_rows.to(tl.int64) * dL_strides[2],
            mask=query_rows < N_QUERIES,
            other=0.0,
        )
    L = tl.load(
        L_ptr + batch_head * N_QUERIES + query_rows, mask=query_rows < N_QUERIES, other=float("inf")
    )
    # no key: P = 0, and 0 times a NaN gradient of L would be NaN
    delta = tl.where(float("-inf") < L, delta, 0.0)
    # In base 2 but for float32 inputs, of which `recompute_probabilities` wants it as it is.
    if O.dtype == tl.float32:
        tl.store(L_log2_ptr + batch_head * num_rows + query_rows, L, mask=query_rows < num_rows)
    else:
        tl.store(
            L_log2_ptr + batch_head * num_rows + query_rows, L * LOG2_E, mask=query_rows < num_rows
        )
    tl.store(delta_ptr + batch_head * num_rows + query_rows, delta, mask=query_rows < num_rows)


@triton.jit
def _visit_queries(
    dK, dV, K, V, first_key, Q_head, dO_head, L_head, delta_head, first_query, last_query, walk, problem,
    TILES: tl.constexpr, CUT: tl.constexpr, LATE_LOADS: tl.constexpr, BOUNDED: tl.constexpr,
    STAGES: tl.constexpr = None,
):  # fmt: skip
    """Fold the query tiles of [first_query, last_query) into dK (without its scale) and dV.

    Queries past the end have L = +inf, hence P = 0: only the diagonal needs mask arithmetic.
    BOUNDED: L and delta do not have the last tile's rows in memory. STAGES of tiles are loaded
    ahead, where it is None as many as configured. LATE_LOADS saves registers: L and delta are
    loaded behind two matmuls, and nothing is hoisted out of the loop.
    """
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    LISTED: tl.constexpr = TILES.Q_BLOCK > 0
    HOIST_NOTHING: tl.constexpr = LATE_LOADS or (LISTED and K.dtype != tl.float32)
    for start in tl.range(
        first_query, last_query, Q_TILE_SIZE, num_stages=STAGES, disable_licm=HOIST_NOTHING
    ):
        query = row_of_step(start, walk, TILES.Q_BLOCK, Q_TILE_SIZE)
        query_rows = query + tl.arange(0, Q_TILE_SIZE)
        Q = load_rows(Q_head, query, problem.N_QUERIES, Q_TILE_SIZE, TILES, CUT or not LISTED)
        dO = load_rows(dO_head, query, problem.N_QUERIES, Q_TILE_SIZE, TILES, CUT or not LISTED)
        if not LATE_LOADS:
            L_log2, delta = load_lse_and_delta(L_head, delta_head, query_rows, problem, BOUNDED)
        S_T = tl.dot(K, tl.trans(Q), input_precision=TILES.PRECISION)  # (K_TILE_SIZE, Q_TILE_SIZE)
        dP_T = tl.dot(V, tl.trans(dO), input_precision=TILES.PRECISION)
        if LATE_LOADS:
            L_log2, delta = load_lse_and_delta(L_head, delta_head, query_rows, problem, BOUNDED)
        P_T = recompute_probabilities(
            S_T, L_log2[None, :], problem.scale_log2, Q.dtype == tl.float32
        )
        if CUT:
            P_T = hide_queries(P_T, query_rows, first_key, start, walk, TILES)
        dK, dV = fold_queries(dK, dV, P_T, dP_T, Q, dO, delta, problem.ZERO, TILES)
    return dK, dV


@triton.jit
def differentiate_keys(
    K_head, V_head, Q_first, dO_first, Q_cut, dO_cut, L_base, delta_base, stride_lh, dK_base, dV_base, stride_dks,
    first_head, key_tile, scale, lists, batch, problem, GROUP: tl.constexpr, TILES: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile of one sequence, over the GROUP of query heads that begins with
    `first_head`.

    K_head and V_head come from `head_of`, and so do Q_first and dO_first for query head 0. Keys
    past the end are loaded as zeros, and their dK and dV not stored. The bases point at the
    sequence's row 0, those of L and delta in head 0. Without PADDED their rows end with the
    sequence's. Where TMA reads whole tiles alone, those that the sequence's end cuts are read from
    Q_cut and dO_cut, and K and V as these are. Only K and V may be read before the preprocess has
    ended.
    """
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    K_TILE_SIZE: tl.constexpr = TILES.K_TILE_SIZE
    D_TILE: tl.constexpr = TILES.D_TILE
    TMA: tl.constexpr = isinstance(Q_first.X, tl.tensor_descriptor)
    CUT_TMA: tl.constexpr = isinstance(K_head.X, tl.tensor_descriptor)
    if not CUT_TMA:  # behind the loads by pointers it would take four registers more
        await_previous(OVERLAP)
        start_next(OVERLAP)
    first_key = key_tile * K_TILE_SIZE
    key_rows = first_key + tl.arange(0, K_TILE_SIZE)
    # (K_TILE_SIZE, D_TILE)
    K = load_rows(K_head, first_key, problem.N_KEYS, K_TILE_SIZE, TILES, True)
    V = load_rows(V_head, first_key, problem.N_KEYS, K_TILE_SIZE, TILES, True)
    if CUT_TMA:
        await_previous(OVERLAP)
        start_next(OVERLAP)  # dQ, which reads L and delta without waiting for them
    dK = tl.zeros([K_TILE_SIZE, D_TILE], tl.float32)
    dV = tl.zeros([K_TILE_SIZE, D_TILE], tl.float32)

    # Query tiles before start_queries see none of these keys; [start_queries, full_queries) are cut
    # by the diagonal. All loops' registers are live at a time: where a wide head leaves none to
    # spare, one loop masks every tile.
    IS_16_BIT: tl.constexpr = K.dtype != tl.float32
    ONE_LOOP: tl.constexpr = D_TILE >= 128 and IS_16_BIT
    CUT_APART: tl.constexpr = TMA and not CUT_TMA
    BOUNDED: tl.constexpr = not PADDED and not CUT_APART
    # Addresses leave no register to spare. By TMA, causal tiles of 64 columns are 7 % faster so,
    # full ones 6 % slower.
    LATE_LOADS: tl.constexpr = IS_16_BIT and (not TMA or (IS_CAUSAL and D_TILE <= 64))
    start_queries = 0
    full_queries = 0
    if IS_CAUSAL:
        start_queries = first_key // Q_TILE_SIZE * Q_TILE_SIZE
        full_queries = tl.cdiv(first_key + K_TILE_SIZE - 1, Q_TILE_SIZE) * Q_TILE_SIZE
    end_queries = problem.N_QUERIES // Q_TILE_SIZE * Q_TILE_SIZE if CUT_APART else problem.N_QUERIES

    for member in range(GROUP):
        head = first_head + member
        Q_head = head_from(Q_first, head)
        dO_head = head_from(dO_first, head)
        L_head, delta_head = L_base + head * stride_lh, delta_base + head * stride_lh
        if TILES.Q_BLOCK:
            num_full, full, num_partial, partial = walks_of(
                lists,
                batch,
                head,
                first_key // TILES.K_BLOCK,
                tl.cdiv(problem.N_KEYS, TILES.K_BLOCK),
            )
            # the mask's last tile may end behind the padding
            BEHIND: tl.constexpr = TILES.Q_BLOCK > ROW_PADDING
            LATE: tl.constexpr = IS_16_BIT and not TMA
            dK, dV = _visit_queries(
                dK, dV, K, V, first_key, Q_head, dO_head, L_head, delta_head, 0, num_full * TILES.Q_BLOCK, full,
                problem, TILES, False, LATE, False,
            )  # fmt: skip
            dK, dV = _visit_queries(
                dK, dV, K, V, first_key, Q_head, dO_head, L_head, delta_head, 0, num_partial * TILES.Q_BLOCK, partial,
                problem, TILES, True, LATE, BEHIND,
            )  # fmt: skip
        elif IS_CAUSAL:
            dK, dV = _visit_queries(
                dK, dV, K, V, first_key, Q_head, dO_head, L_head, delta_head, start_queries,
                end_queries if ONE_LOOP else tl.minimum(full_queries, end_queries), None, problem,
                TILES, True, LATE_LOADS, BOUNDED,
            )  # fmt: skip
        if not TILES.Q_BLOCK and (not IS_CAUSAL or not ONE_LOOP):
            dK, dV = _visit_queries(
                dK, dV, K, V, first_key, Q_head, dO_head, L_head, delta_head, full_queries, end_queries, None,
                problem, TILES, False, LATE_LOADS, BOUNDED,
            )  # fmt: skip
        if CUT_APART:
            dK, dV = _visit_queries(
                dK, dV, K, V, first_key, head_from(Q_cut, head), head_from(dO_cut, head),
                L_head, delta_head, tl.maximum(start_queries, end_queries), problem.N_QUERIES, None, problem,
                TILES, IS_CAUSAL, IS_16_BIT, True, 1,
            )  # fmt: skip

    store_rows(dK_base, dK * scale, key_rows, problem.N_KEYS, stride_dks, TILES)
    store_rows(dV_base, dV, key_rows, problem.N_KEYS, stride_dks, TILES)


@triton.jit
def flash_backward_dkdv_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, delta_ptr, dK_ptr, dV_ptr,
    Q_strides, K_strides, V_strides, dO_strides,
    N_KV_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale, scale_log2, ZERO, lists,
    GROUP: tl.constexpr, TILES: tl.constexpr, IS_CAUSAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dK, dV (batch, kv_heads, keys, D), L and delta (batch, heads, padded queries) are contiguous."""
    D: tl.constexpr = TILES.D
    K_TILE_SIZE: tl.constexpr = TILES.K_TILE_SIZE
    # Causal: the first keys are seen by most queries, and they come first as they are.
    key_tile, _, batch, kv_head = tile_of_program(
        tl.cdiv(N_KEYS, K_TILE_SIZE), N_KV_HEADS, HEADS_TOGETHER, False
    )
    num_rows = padded_rows(N_QUERIES)
    row_base = batch * (N_KV_HEADS * GROUP * num_rows)
    output_base = (batch * N_KV_HEADS + kv_head) * N_KEYS * D
    Q_first = head_of(Q_ptr, Q_strides, batch, 0)
    dO_first = head_of(dO_ptr, dO_strides, batch, 0)
    differentiate_keys(
        head_of(K_ptr, K_strides, batch, kv_head),
        head_of(V_ptr, V_strides, batch, kv_head),
        Q_first, dO_first, Q_first, dO_first, L_ptr + row_base, delta_ptr + row_base, num_rows,
        dK_ptr + output_base, dV_ptr + output_base, D, kv_head * GROUP, key_tile, scale,
        lists, batch, Problem(N_QUERIES, N_KEYS, scale_log2, ZERO), GROUP, TILES, IS_CAUSAL, True, OVERLAP,
    )  # fmt: skip


@triton.jit
def _visit_keys(
    dQ, Q, dO, L_log2, delta, query_rows, K_head, V_head, first_key, last_key, walk, problem,
    TILES: tl.constexpr, IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the key tiles of [first_key, last_key) into dQ (without its scale). Keys past the end
    are loaded as zeros and masked: their scores would be 0, not -inf.
    """
    K_TILE_SIZE: tl.constexpr = TILES.K_TILE_SIZE
    HOIST_NOTHING: tl.constexpr = TILES.K_BLOCK > 0 and Q.dtype != tl.float32
    for start in tl.range(first_key, last_key, K_TILE_SIZE, disable_licm=HOIST_NOTHING):
        key = row_of_step(start, walk, TILES.K_BLOCK, K_TILE_SIZE)
        key_rows = key + tl.arange(0, K_TILE_SIZE)
        # (K_TILE_SIZE, D_TILE)
        K = load_rows(K_head, key, problem.N_KEYS, K_TILE_SIZE, TILES, MASKED)
        V = load_rows(V_head, key, problem.N_KEYS, K_TILE_SIZE, TILES, MASKED)
        S = tl.dot(Q, tl.trans(K), input_precision=TILES.PRECISION)  # (Q_TILE_SIZE, K_TILE_SIZE)
        dP = tl.dot(dO, tl.trans(V), input_precision=TILES.PRECISION)
        P = recompute_probabilities(S, L_log2[:, None], problem.scale_log2, K.dtype == tl.float32)
        if MASKED:
            P = hide_keys(P, 0.0, query_rows, key_rows, start, walk, problem, TILES, IS_CAUSAL)
        dQ = fold_keys(dQ, P, dP, K, delta, problem.ZERO, TILES)
    return dQ


@triton.jit
def differentiate_queries(
    Q_head, dO_head, K_head, V_head, K_cut, V_cut, L_base, delta_base, dQ_base, stride_dqs, query_tile, scale,
    lists, batch, head, problem, TILES: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile of one sequence: the inputs come from `head_of`, the other bases point
    at its row 0.

    Tiles of keys that every query sees are read from K_head and V_head, those that are cut from
    K_cut and V_cut, and Q and dO as these are.
    """
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    D_TILE: tl.constexpr = TILES.D_TILE
    first_query = query_tile * Q_TILE_SIZE
    query_rows = first_query + tl.arange(0, Q_TILE_SIZE)
    # (Q_TILE_SIZE, D_TILE)
    Q = load_rows(Q_head, first_query, problem.N_QUERIES, Q_TILE_SIZE, TILES, True)
    dO = load_rows(dO_head, first_query, problem.N_QUERIES, Q_TILE_SIZE, TILES, True)
    L_log2 = tl.load(L_base + query_rows, mask=query_rows < problem.N_QUERIES, other=float("inf"))
    delta = tl.load(delta_base + query_rows, mask=query_rows < problem.N_QUERIES, other=0.0)
    dQ = tl.zeros([Q_TILE_SIZE, D_TILE], tl.float32)

    if TILES.K_BLOCK:
        num_full, full, num_partial, partial = walks_of(
            lists,
            batch,
            head,
            first_query // TILES.Q_BLOCK,
            tl.cdiv(problem.N_QUERIES, TILES.Q_BLOCK),
        )
        first_cut, full_keys, end_keys = 0, num_full * TILES.K_BLOCK, num_partial * TILES.K_BLOCK
    else:
        full, partial = None, None
        full_keys, end_keys = key_bounds(first_query, problem.N_KEYS, TILES, IS_CAUSAL)
        first_cut = full_keys
    dQ = _visit_keys(
        dQ, Q, dO, L_log2, delta, query_rows, K_head, V_head, 0, full_keys, full, problem, TILES,
        IS_CAUSAL, False,
    )  # fmt: skip
    dQ = _visit_keys(
        dQ, Q, dO, L_log2, delta, query_rows, K_cut, V_cut, first_cut, end_keys, partial, problem, TILES, IS_CAUSAL,
        True,
    )  # fmt: skip
    store_rows(dQ_base, dQ * scale, query_rows, problem.N_QUERIES, stride_dqs, TILES)


@triton.jit
def flash_backward_dq_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, delta_ptr, dQ_ptr,
    Q_strides, K_strides, V_strides, dO_strides,
    N_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale, scale_log2, ZERO, lists,
    GROUP: tl.constexpr, TILES: tl.constexpr, IS_CAUSAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dQ (batch, heads, queries, D), L and delta (batch, heads, padded queries) are contiguous."""
    D: tl.constexpr = TILES.D
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    query_tile, batch_head, batch, head = tile_of_program(
        tl.cdiv(N_QUERIES, Q_TILE_SIZE), N_HEADS, HEADS_TOGETHER, IS_CAUSAL or TILES.K_BLOCK > 0
    )
    kv_head = head // GROUP
    row_base = batch_head * padded_rows(N_QUERIES)
    output_base = batch_head * N_QUERIES * D
    K_head = head_of(K_ptr, K_strides, batch, kv_head)
    V_head = head_of(V_ptr, V_strides, batch, kv_head)
    differentiate_queries(
        head_of(Q_ptr, Q_strides, batch, head),
        head_of(dO_ptr, dO_strides, batch, head),
        K_head, V_head, K_head, V_head, L_ptr + row_base, delta_ptr + row_base, dQ_ptr + output_base, D, query_tile,
        scale, lists, batch, head, Problem(N_QUERIES, N_KEYS, scale_log2, ZERO), TILES, IS_CAUSAL,
    )  # fmt: skip
    await_previous(OVERLAP)


def launch_preprocess(
    output: Queries, lse: Rows, grad_output: Queries, grad_lse: Rows | None, *, padded: bool = True
) -> tuple[Rows, Rows]:
    """(L in base 2, delta = rowsum(dO ∘ O) - dL), in float32 and contiguous, their rows padded to
    whole tiles if asked.

    In a row without keys, L = -inf, delta is 0 whatever dO and dL hold there.
    `lse` and the rows of `output` are contiguous.
    """
    batch, heads, num_queries, head_dim = output.shape
    num_rows = (
        num_tiles(num_queries, ROW_PADDING.value) * ROW_PADDING.value if padded else num_queries
    )
    lse_log2, delta = (
        empty((batch, heads, num_rows), torch.float32, output.device) for _ in range(2)
    )
    grad_lse_or_any = lse if grad_lse is None else grad_lse
    overlap = overlap_options(output.device)
    tiles = Tiles(
        D=head_dim,
        D_TILE=head_tile(head_dim),
        Q_TILE_SIZE=PREPROCESS_ROWS,
        K_TILE_SIZE=0,
        PRECISION="ieee",
    )  # of which it multiplies none
    with stage("preprocess"):
        launch(
            flash_backward_preprocess_kernel,
            (num_tiles(num_rows, PREPROCESS_ROWS) * batch * heads,),
            (output, grad_output, lse, grad_lse_or_any, lse_log2, delta),
            (output.stride(), grad_output.stride(), grad_lse_or_any.stride(), heads, num_queries),
            {"HAS_DL": grad_lse is not None, "TILES": tiles, "PADDED": padded, **overlap},
        )
    return lse_log2, delta


def launch_backward(
    saved: Saved, lists: TileLists | None = None, *,
    is_causal: bool, scale: float, dkdv_config: KernelConfig, dq_config: KernelConfig,
) -> tuple[Queries, Keys, Keys]:  # fmt: skip
    """Contiguous gradients of q, k, v in their dtypes.

    `output` and `lse` are contiguous, as the forward wrote them; the others have any strides, a
    stride-0 `grad_output` (from `o.sum().backward()`) included, unless a configuration reads by
    TMA.
    """
    q, k, v, output, lse, grad_output, grad_lse = saved
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    rows = launch_preprocess(output, lse, grad_output, grad_lse)
    grad_q, grad_k, grad_v = (empty(x.shape, x.dtype, x.device) for x in (q, k, v))
    strides = (q.stride(), k.stride(), v.stride(), grad_output.stride())
    sizes_and_scales = (num_queries, num_keys, scale, scale * LOG2_E.value, 0.0)
    group, share = heads // kv_heads, HALF_L2_SHARE_BYTES if is_causal or lists is not None else 0
    common = {"GROUP": group, "IS_CAUSAL": is_causal, **overlap_options(q.device, follows=True)}
    dkdv_options = common | tile_options(dkdv_config, head_dim, lists)
    dq_options = common | tile_options(dq_config, head_dim, lists)

    # dK, dV: a program for each tile of keys of each key head
    tile, step = dkdv_config.key_tile, dkdv_config.query_tile
    seen = num_tiles(min(num_keys, num_queries), tile)  # the others' walks are empty
    walks = Walks(seen, num_tiles(num_queries, tile)) if is_causal else None
    together = heads_together(
        batch * kv_heads, q, group, share, walks=walks, block_steps=group * tile / step
    )
    walk = None if lists is None else walked(lists, "q")
    operands = described(dkdv_config, q=q, k=k, v=v, grad_output=grad_output)
    with stage("dkv"):
        launch(
            flash_backward_dkdv_kernel,
            (num_tiles(num_keys, dkdv_config.key_tile) * batch * kv_heads,),
            (*operands, *rows, grad_k, grad_v),
            (*strides, kv_heads, together, *sizes_and_scales, walk),
            dkdv_options,
        )

    # dQ: a program for each tile of queries of each head
    tile, step = dq_config.query_tile, dq_config.key_tile
    tiles = num_tiles(num_queries, tile)
    together = heads_together(
        batch * heads, k, share=share, walks=Walks(tiles, tiles) if is_causal else None,
        block_steps=tile / step,
    )  # fmt: skip
    walk = None if lists is None else walked(lists, "kv")
    operands = described(dq_config, q=q, k=k, v=v, grad_output=grad_output)
    with stage("dq"):
        launch(
            flash_backward_dq_kernel,
            (num_tiles(num_queries, dq_config.query_tile) * batch * heads,),
            (*operands, *rows, grad_q),
            (*strides, heads, together, *sizes_and_scales, walk),
            dq_options,
        )
    return grad_q, grad_k, grad_v
