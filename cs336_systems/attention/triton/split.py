"""The forward of few queries in Triton: the keys of a query tile are split into parts, one program
each.

A grid of query tiles is too small for the GPU where there are few queries or heads: one head of
2,048 tokens makes 32 programs for 132 multiprocessors, and the last causal tile walks all keys
alone; one generated token makes a single program a head. So programs write the online softmax's
state as it stands at the end of their part, the unnormalised output O, the maximum m (base 2) and
the sum l, and a second kernel ends what they began:

    m = max m_part     l = Σ 2^(m_part - m) · l_part     O = Σ 2^(m_part - m) · O_part / l     L = (m + log₂ l) / log₂ e

That is what the plain forward does from one key tile to the next, in float32 as there; but a part
knows no maximum but its own, so values within its number of keys of float32's end may overflow
where the whole would hide them. How many parts there are depends on shapes alone
(`tiles/choice.py`), so results repeat bit for bit. Source: Flash-Decoding (Dao, Haziza, Massa,
Sizov 2023), whose parts are normalised: log-sum-exps of scores in the thousands then round by more
than the output may.

From sm_90 on the second kernel starts when all programs of the first have come to their end, and
awaits their results before it reads anything. Source: CUDA Programming Guide, Programmatic
Dependent Launch and Synchronization.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.attention.tiles import KernelConfig, head_tile, seen_keys
from cs336_systems.attention.triton.forward import visit_keys
from cs336_systems.attention.triton.launch import (
    Keys,
    Queries,
    Rows,
    described,
    empty,
    empty_results,
    heads_together,
    launch,
    num_tiles,
    overlap_options,
    rows_of_groups,
    tile_options,
)
from cs336_systems.attention.triton.steps import (
    LOG2_E,
    LOWEST,
    Problem,
    Tiles,
    await_previous,
    head_of,
    key_bounds,
    load_rows,
    natural_lse,
    start_next,
    store_rows,
    tile_of_program,
)
from cs336_systems.measure.stages import stage

# A program that merges has one row, whose parts are all loaded together; or, where rows are more
# than a GPU is full of, a few rows of one head, part by part in one warp, whose threads pass each
# other numbers by shuffles: with more warps, or more rows and parts, Triton goes through shared
# memory and a barrier for every part. Measured on an NVIDIA H200, triton 3.6.0: one row is faster
# up to 256 rows, by up to 25 %, and slower from 1,024 on; more warps are slower where fewer can
# hold the parts.
SINGLE_ROWS = 512
MERGED_ROWS = 2  # queries of one head
MERGED_AT_A_TIME = 8  # parts whose loads are under way together
# for which a merging kernel is compiled: lengths change with every generated token
MIN_MERGED_PARTS = 16
NUMBERS_OF_A_WARP = 4096  # of a row's parts: 128 registers a thread


@triton.jit
def parts_of(Parts_ptr, num_parts, num_heads, N_QUERIES, D: tl.constexpr):
    """Where O (parts, heads, queries, D), m and l (parts, heads, queries) of all parts begin, one
    behind the other: one tensor, as every allocation keeps a short call's host.
    """
    num_rows = num_parts.to(tl.int64) * num_heads * N_QUERIES
    return Parts_ptr, Parts_ptr + num_rows * D, Parts_ptr + num_rows * (D + 1)


@triton.jit
def flash_split_forward_kernel(
    Q_ptr, K_ptr, V_ptr, Parts_ptr,
    Q_strides, K_strides, V_strides,
    N_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS, PART_SIZE, scale_log2, ZERO,
    GROUP: tl.constexpr, TILES: tl.constexpr, IS_CAUSAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Writes float32 to Parts_ptr, where `parts_of` says; nothing of a part that no query of a tile
    sees. A part has PART_SIZE keys, a multiple of K_TILE_SIZE.
    """
    D: tl.constexpr = TILES.D
    D_TILE: tl.constexpr = TILES.D_TILE
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    num_query_tiles, num_parts = tl.cdiv(N_QUERIES, Q_TILE_SIZE), tl.cdiv(N_KEYS, PART_SIZE)
    tile, batch_head, batch, head = tile_of_program(
        num_query_tiles * num_parts, N_HEADS, HEADS_TOGETHER, IS_CAUSAL
    )
    part = tile % num_parts
    first_query = tile // num_parts * Q_TILE_SIZE
    full_keys, end_keys = key_bounds(first_query, N_KEYS, TILES, IS_CAUSAL)
    first_key = part * PART_SIZE
    if first_key < end_keys:
        end_keys = tl.minimum(end_keys, first_key + PART_SIZE)
        full_keys = tl.minimum(tl.maximum(full_keys, first_key), end_keys)
        kv_head = head // GROUP
        K_head = head_of(K_ptr, K_strides, batch, kv_head)
        V_head = head_of(V_ptr, V_strides, batch, kv_head)
        query_rows = first_query + tl.arange(0, Q_TILE_SIZE)
        Q_head = head_of(Q_ptr, Q_strides, batch, head)
        # (Q_TILE_SIZE, D_TILE)
        Q = load_rows(Q_head, first_query, N_QUERIES, Q_TILE_SIZE, TILES, True)
        m = tl.full([Q_TILE_SIZE], LOWEST, tl.float32)
        l = tl.zeros([Q_TILE_SIZE], tl.float32)
        accumulator = tl.zeros([Q_TILE_SIZE, D_TILE], tl.float32)
        problem = Problem(N_QUERIES, N_KEYS, scale_log2, ZERO)
        accumulator, m, l = visit_keys(
            accumulator, m, l, Q, K_head, V_head, query_rows, first_key, full_keys, None, problem, TILES, IS_CAUSAL,
            False,
        )  # fmt: skip
        accumulator, m, l = visit_keys(
            accumulator, m, l, Q, K_head, V_head, query_rows, full_keys, end_keys, None, problem, TILES, IS_CAUSAL,
            True,
        )  # fmt: skip
        # no sooner: programs that merge would wait in the place of those that have work
        start_next(OVERLAP)
        num_heads = tl.num_programs(0) // (num_query_tiles * num_parts)  # of the batch
        O_parts, m_parts, l_parts = parts_of(Parts_ptr, num_parts, num_heads, N_QUERIES, D)
        row_base = (part.to(tl.int64) * num_heads + batch_head) * N_QUERIES
        # counted anew: `query_rows`, kept through the loops, would spill
        rows = tl.arange(0, Q_TILE_SIZE)
        store_rows(
            O_parts + (row_base + first_query) * D, accumulator, rows, N_QUERIES - first_query, D,
            TILES,
        )  # fmt: skip
        tl.store(m_parts + row_base + query_rows, m, mask=query_rows < N_QUERIES)
        tl.store(l_parts + row_base + query_rows, l, mask=query_rows < N_QUERIES)


# every generated token changes them
@triton.jit(do_not_specialize=["FIRST_ROW", "N_QUERIES", "N_KEYS", "PART_SIZE"])
def flash_merge_kernel(
    Parts_ptr, O_ptr, L_ptr, FIRST_ROW, N_QUERIES, N_KEYS, PART_SIZE,
    TILES: tl.constexpr, ROWS: tl.constexpr, MAX_PARTS: tl.constexpr, AT_A_TIME: tl.constexpr,
    IS_CAUSAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """O and L of ROWS queries of one head, out of at most MAX_PARTS parts; all are contiguous.

    The heads begin at FIRST_ROW of the rows of O and L.
    """
    O_ptr += FIRST_ROW.to(tl.int64) * TILES.D
    L_ptr += FIRST_ROW
    D: tl.constexpr = TILES.D
    D_TILE: tl.constexpr = TILES.D_TILE
    await_previous(OVERLAP)
    num_blocks = tl.cdiv(N_QUERIES, ROWS)
    head, block = (tl.program_id(0) // num_blocks).to(tl.int64), tl.program_id(0) % num_blocks
    num_heads = tl.num_programs(0) // num_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    end_keys = N_KEYS
    if IS_CAUSAL:
        end_keys = tl.minimum(N_KEYS, (block + 1) * ROWS)
    # that the last of the rows sees: the forward has written these
    num_parts = tl.cdiv(end_keys, PART_SIZE)
    O_parts, all_m, all_l = parts_of(Parts_ptr, tl.cdiv(N_KEYS, PART_SIZE), num_heads, N_QUERIES, D)

    read = tl.minimum(rows, N_QUERIES - 1)  # rows past the end repeat the last one
    parts = tl.arange(0, MAX_PARTS)
    places = (parts * num_heads + head)[:, None] * N_QUERIES + read[None, :]  # (MAX_PARTS, ROWS)
    there = (parts < num_parts)[:, None]
    m_parts = tl.load(all_m + places, mask=there, other=LOWEST)
    m = tl.max(m_parts, axis=0)
    weights = tl.math.exp2(m_parts - m[None, :])
    l = tl.sum(weights * tl.load(all_l + places, mask=there, other=0.0), axis=0)
    SINGLE: tl.constexpr = O_ptr.dtype.element_ty == tl.float32
    tl.store(L_ptr + head * N_QUERIES + rows, natural_lse(m, l, SINGLE), mask=rows < N_QUERIES)

    columns = tl.arange(0, D_TILE)
    if ROWS == 1:
        O_all = tl.load(
            O_parts + places * D + columns[None, :], mask=there & (columns < D)[None, :], other=0.0
        )
        O = tl.sum(weights * O_all, axis=0)[None, :]
    else:
        O = tl.zeros([ROWS, D_TILE], tl.float32)
        for first in tl.range(0, num_parts, AT_A_TIME):
            # unrolled, so that loads need not wait for each other
            for offset in tl.static_range(AT_A_TIME):
                inside = first + offset < num_parts
                row_base = ((first + offset) * num_heads + head) * N_QUERIES
                O_part = tl.load(
                    O_parts + (row_base + read)[:, None] * D + columns[None, :],
                    mask=inside & (columns < D)[None, :], other=0.0,
                )  # fmt: skip
                m_part = tl.load(all_m + row_base + read, mask=inside, other=LOWEST)
                O += tl.math.exp2(m_part - m)[:, None] * O_part
    O /= l[:, None]
    store_rows(O_ptr + head * N_QUERIES * D, O, rows, N_QUERIES, D, TILES)


def merge_options(num_rows: int, num_parts: int, head_dim: int) -> dict[str, int]:
    """What a kernel that merges `num_parts` parts is told, where there are so many rows in all."""
    most_parts = max(MIN_MERGED_PARTS, triton.next_power_of_2(num_parts))
    single = num_rows <= SINGLE_ROWS
    return {
        "ROWS": 1 if single else MERGED_ROWS, "MAX_PARTS": most_parts, "AT_A_TIME": MERGED_AT_A_TIME,
        "num_warps": max(1, most_parts * head_tile(head_dim) // NUMBERS_OF_A_WARP) if single else 1,
    }  # fmt: skip


def launch_split_forward(
    q: Queries,
    k: Keys,
    v: Keys,
    *,
    is_causal: bool,
    scale: float,
    config: KernelConfig,
    part_size: int,
) -> tuple[Queries, Rows]:
    """What `launch_forward` returns, by programs of `part_size` keys, a multiple of the key tile.

    Meanwhile the parts take memory: for each of them O and two numbers a row in float32.
    """
    output, lse = empty_results(q)
    num_keys = seen_keys(q.shape[2], k.shape[2], is_causal)
    num_parts = num_tiles(num_keys, part_size)
    parts = empty((num_parts * lse.numel() * (q.shape[-1] + 2),), torch.float32, q.device)
    rows = rows_of_groups(q, k, is_causal)
    batch, heads, num_queries, head_dim = rows.shape
    num_programs = num_tiles(num_queries, config.query_tile) * batch * heads
    tiling = tile_options(config, head_dim)
    with stage("forward"):
        launch(
            flash_split_forward_kernel, (num_programs * num_parts,),
            (*described(config, q=rows, k=k, v=v), parts),
            (rows.stride(), k.stride(), v.stride(), heads, heads_together(batch * heads, k), num_queries,
             num_keys, part_size, scale * LOG2_E.value, 0.0),
            {"GROUP": heads // k.shape[1], **tiling, "IS_CAUSAL": is_causal, **overlap_options(q.device)},
        )  # fmt: skip
        merge(parts, output, lse, (batch * heads, num_queries), num_keys, part_size, is_causal)
    return output, lse


def merge(
    parts: Tensor, output: Queries, lse: Rows, last_rows: tuple[int, int], num_keys: int, part_size: int,
    is_causal: bool,
) -> None:  # fmt: skip
    """End in `output` and `lse`, contiguous, what `parts` of `part_size` keys have begun of their
    last rows, of so many heads and queries.
    """
    (heads, num_queries), head_dim = last_rows, output.shape[-1]
    merging = merge_options(heads * num_queries, num_tiles(num_keys, part_size), head_dim)
    launch(
        flash_merge_kernel, (num_tiles(num_queries, merging["ROWS"]) * heads,), (parts, output, lse),
        (lse.numel() - heads * num_queries, num_queries, num_keys, part_size),
        {"TILES": Tiles(head_dim, head_tile(head_dim), 0, 0, ""), **merging, "IS_CAUSAL": is_causal,
         **overlap_options(output.device, follows=True)},
    )  # fmt: skip
