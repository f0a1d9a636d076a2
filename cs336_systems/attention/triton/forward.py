"""The FlashAttention-2 forward in Triton: one program computes one tile of queries of one head.

Phases of a program
  1. load its query tile, which stays on chip;
  2. unmasked loop: key tiles that every query of the tile sees whole, with no mask arithmetic;
  3. masked loop: key tiles that the causal diagonal or the end of the keys cuts;
  4. normalise once, store O and the log-sum-exp L.
Key tiles above the diagonal are never read. Source: FlashAttention-2 (Dao 2023), algorithm 1.

Programs are numbered with the longest causal query tiles first, so that the short ones fill the
tail of the grid.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cs336_systems.attention.masks.tiles import TileLists
from cs336_systems.attention.tiles import KernelConfig
from cs336_systems.attention.tiles.choice import Walks
from cs336_systems.attention.tiles.kernel_config import HALF_L2_SHARE_BYTES
from cs336_systems.attention.triton.launch import (
    Keys,
    Queries,
    Rows,
    described,
    empty_results,
    heads_together,
    launch,
    num_tiles,
    rows_of_groups,
    tile_options,
)
from cs336_systems.attention.triton.lists import hide_keys, row_of_step, walked, walks_of
from cs336_systems.attention.triton.steps import (
    LOG2_E,
    LOWEST,
    Problem,
    accumulate,
    head_of,
    key_bounds,
    load_rows,
    online_softmax,
    store_queries,
    tile_of_program,
)
from cs336_systems.measure.stages import stage


@triton.jit
def visit_keys(
    accumulator, m, l, Q, K_head, V_head, query_rows, first_key, last_key, walk, problem,
    TILES: tl.constexpr, IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Fold the key tiles of [first_key, last_key) into the running (accumulator, m, l); m is in
    base 2.

    STAGES of tiles are loaded ahead, where it is None as many as the configuration says.
    """
    K_TILE_SIZE: tl.constexpr = TILES.K_TILE_SIZE
    for start in tl.range(
        first_key, last_key, K_TILE_SIZE, num_stages=STAGES, disable_licm=Q.dtype != tl.float32
    ):
        key = row_of_step(start, walk, TILES.K_BLOCK, K_TILE_SIZE)
        key_rows = key + tl.arange(0, K_TILE_SIZE)
        # (K_TILE_SIZE, D_TILE)
        K = load_rows(K_head, key, problem.N_KEYS, K_TILE_SIZE, TILES, MASKED)
        # (Q_TILE_SIZE, K_TILE_SIZE), not yet scaled
        S = tl.dot(Q, tl.trans(K), input_precision=TILES.PRECISION)
        if MASKED:
            S = hide_keys(
                S, float("-inf"), query_rows, key_rows, start, walk, problem, TILES, IS_CAUSAL
            )
        P, rescale, m, l = online_softmax(S, m, l, problem.scale_log2)
        V = load_rows(V_head, key, problem.N_KEYS, K_TILE_SIZE, TILES, MASKED)
        accumulator = accumulate(
            accumulator * rescale[:, None], P.to(V.dtype), V, problem.ZERO, TILES
        )
    return accumulator, m, l


@triton.jit
def attend_queries(
    Q_head, K_head, V_head, K_cut, V_cut, O_base, L_base, stride_os, query_tile, lists, batch, head, problem,
    TILES: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS_WITHOUT_KEYS: tl.constexpr,
):  # fmt: skip
    """One query tile of one sequence: Q, K and V come from `head_of`, O_base and L_base point at
    the sequence's row 0 in the program's head. Tiles of keys that every query sees are read from
    K_head and V_head, those that are cut from K_cut and V_cut, and Q as these are: packed documents
    have their neighbours' rows where a sequence's end is.
    """
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    D_TILE: tl.constexpr = TILES.D_TILE
    # 1. load the query tile
    first_query = query_tile * Q_TILE_SIZE
    query_rows = first_query + tl.arange(0, Q_TILE_SIZE)
    # (Q_TILE_SIZE, D_TILE)
    Q = load_rows(Q_head, first_query, problem.N_QUERIES, Q_TILE_SIZE, TILES, True)
    m = tl.full([Q_TILE_SIZE], LOWEST, tl.float32)
    l = tl.zeros([Q_TILE_SIZE], tl.float32)
    accumulator = tl.zeros([Q_TILE_SIZE, D_TILE], tl.float32)

    TMA: tl.constexpr = isinstance(K_head.X, tl.tensor_descriptor)
    # A third stage of pointers beside TMA's leaves a streaming multiprocessor no room for two
    # programs.
    CUT_STAGES: tl.constexpr = 2 if TMA and not isinstance(K_cut.X, tl.tensor_descriptor) else None
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

    # 2. unmasked loop
    accumulator, m, l = visit_keys(
        accumulator, m, l, Q, K_head, V_head, query_rows, 0, full_keys, full, problem, TILES,
        IS_CAUSAL, False,
    )  # fmt: skip
    # 3. masked loop
    accumulator, m, l = visit_keys(
        accumulator, m, l, Q, K_cut, V_cut, query_rows, first_cut, end_keys, partial, problem, TILES, IS_CAUSAL, True,
        CUT_STAGES,
    )  # fmt: skip

    # 4. normalise and store
    store_queries(
        accumulator, m, l, O_base, L_base, query_rows, problem.N_QUERIES, stride_os, TILES,
        ROWS_WITHOUT_KEYS,
    )  # fmt: skip


@triton.jit
def flash_forward_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    Q_strides, K_strides, V_strides,
    N_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale_log2, ZERO, lists,
    GROUP: tl.constexpr, TILES: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """O (batch, heads, queries, D) and L (batch, heads, queries) are contiguous; q, k, v have any
    strides, or are descriptors.
    """
    D: tl.constexpr = TILES.D
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    query_tile, batch_head, batch, head = tile_of_program(
        tl.cdiv(N_QUERIES, Q_TILE_SIZE), N_HEADS, HEADS_TOGETHER, IS_CAUSAL or TILES.K_BLOCK > 0
    )
    kv_head = head // GROUP
    row_base = batch_head * N_QUERIES
    Q_head = head_of(Q_ptr, Q_strides, batch, head)
    K_head = head_of(K_ptr, K_strides, batch, kv_head)
    V_head = head_of(V_ptr, V_strides, batch, kv_head)
    attend_queries(
        Q_head, K_head, V_head, K_head, V_head, O_ptr + row_base * D, L_ptr + row_base, D, query_tile,
        lists, batch, head, Problem(N_QUERIES, N_KEYS, scale_log2, ZERO), TILES, IS_CAUSAL, TILES.K_BLOCK > 0,
    )  # fmt: skip


def launch_forward(
    q: Queries, k: Keys, v: Keys, lists: TileLists | None = None, *,
    is_causal: bool, scale: float, config: KernelConfig,
) -> tuple[Queries, Rows]:  # fmt: skip
    """Contiguous O in q's dtype and L in float32. Inputs are validated, non-empty and on one
    device.

    Along `lists` of a block mask `config`'s tiles divide the mask's: see `fit_to_blocks`.
    """
    output, lse = empty_results(q)
    rows = rows_of_groups(q, k, is_causal) if lists is None else q
    batch, heads, num_queries, head_dim = rows.shape
    tiles = num_tiles(num_queries, config.query_tile)
    together = 1
    if is_causal:
        block_steps = config.query_tile / config.key_tile
        together = heads_together(
            batch * heads, k, walks=Walks(tiles, tiles), block_steps=block_steps
        )
    elif lists is not None:
        together = heads_together(batch * heads, k, share=HALF_L2_SHARE_BYTES)

    # a program for each tile of queries of each head
    grid = (tiles * batch * heads,)
    tensors = (*described(config, q=rows, k=k, v=v), output, lse)
    strides = (rows.stride(), k.stride(), v.stride())
    sizes = (heads, together, num_queries, k.shape[2])
    walk = None if lists is None else walked(lists, "kv")
    tiling = tile_options(config, head_dim, lists)
    options = {"GROUP": heads // k.shape[1], **tiling, "IS_CAUSAL": is_causal}
    with stage("forward"):
        launch(
            flash_forward_kernel,
            grid,
            tensors,
            (*strides, *sizes, scale * LOG2_E.value, 0.0, walk),
            options,
        )
    return output, lse
