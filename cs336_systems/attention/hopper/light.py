"""The light kernels of the Hopper backward, in Triton: what comes before and after the main one.

preprocess       delta = rowsum(dO ∘ O), minus the gradient of L if one arrives; L in base 2; dQ's
                 accumulator zeroed, unless the first part in order is stored in it (`wide_backward`
                 has no accumulator)
transpose bits   a block mask's bits ordered by keys, as the main kernel has its scores
convert          dQ = scale · accumulator, in rows and in the inputs' dtype
join             dK and dV from the sums of parts of walks
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.attention.hopper.backward_walk import QUERY_PADDING
from cs336_systems.attention.hopper.division import Division
from cs336_systems.attention.masks.tiles import BITS
from cs336_systems.attention.tiles import head_tile
from cs336_systems.attention.triton.documents import rows_of_document, tile_of_slot
from cs336_systems.attention.triton.launch import empty, launch, overlap_options
from cs336_systems.attention.triton.steps import LOG2_E, await_previous, start_next

LIGHT_ROWS = 64  # rows of a program, those of a block of dQ's accumulator
CHUNK = tl.constexpr(8)  # elements in 16 bytes, of which TMA wants strides to be multiples
PREPROCESS_NUMBERS = (
    "chunks_ob", "chunks_oh", "chunks_os", "chunks_dob", "chunks_doh", "chunks_dos",
    "N_HEADS", "N_QUERIES", "N_ROWS",
)  # fmt: skip


@triton.jit(do_not_specialize=PREPROCESS_NUMBERS)
def hopper_backward_preprocess_kernel(
    O_ptr, dO_ptr, L_ptr, dL_ptr, rows_ptr, dQ_ptr, turns_ptr,
    chunks_ob, chunks_oh, chunks_os, chunks_dob, chunks_doh, chunks_dos, N_HEADS, N_QUERIES, N_ROWS,
    HAS_DL: tl.constexpr, HAS_SUMS: tl.constexpr, LAPS: tl.constexpr,
    D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store L in base 2 and delta in `rows`, and zero dQ's accumulator and the turns.

    L and its gradient are contiguous. The results have N_ROWS rows a head: L and delta in `rows`
    (batch · heads, 2, N_ROWS); if HAS_SUMS, dQ's accumulator of zeros; and for each of LAPS two
    turns of zero for every ROWS rows. Rows past the queries have L = +inf and delta = 0.

    O and dO are as TMA reads them, with strides counted in chunks of 16 bytes: so the strides fit
    32 bits, and the compiler knows that a thread may read a chunk at a time.
    """
    start_next(OVERLAP)
    tiles = N_ROWS // ROWS
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = batch_head // N_HEADS, batch_head % N_HEADS
    query_rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D_TILE)
    inside = (query_rows < N_QUERIES)[:, None] & (columns < D)[None, :]

    # delta (ROWS,) from O and dO (ROWS, D_TILE)
    chunks = batch * chunks_ob + head * chunks_oh + query_rows.to(tl.int64) * chunks_os
    O = tl.load(O_ptr + chunks[:, None] * CHUNK + columns[None, :], mask=inside, other=0.0)
    chunks = batch * chunks_dob + head * chunks_doh + query_rows.to(tl.int64) * chunks_dos
    dO = tl.load(dO_ptr + chunks[:, None] * CHUNK + columns[None, :], mask=inside, other=0.0)
    delta = tl.sum(O.to(tl.float32) * dO.to(tl.float32), axis=1)

    # L (ROWS,), whose gradient is taken from delta
    L_rows = batch_head * N_QUERIES + query_rows
    L = tl.load(L_ptr + L_rows, mask=query_rows < N_QUERIES, other=float("inf"))
    if HAS_DL:
        delta -= tl.load(dL_ptr + L_rows, mask=query_rows < N_QUERIES, other=0.0)
    # Of a row that sees no key P is 0, and 0 times a NaN gradient of L would be NaN.
    delta = tl.where(float("-inf") < L, delta, 0.0)

    rows_of_head = rows_ptr + batch_head * 2 * N_ROWS
    tl.store(rows_of_head + query_rows, L * LOG2_E)
    tl.store(rows_of_head + N_ROWS + query_rows, delta)
    if HAS_SUMS:
        dQ_rows = (batch_head * N_ROWS + query_rows)[:, None]
        tl.store(dQ_ptr + dQ_rows * D_TILE + columns[None, :], tl.zeros([ROWS, D_TILE], tl.float32))
    for lap in tl.static_range(LAPS):
        place = lap * tl.num_programs(0) + tl.program_id(0)
        tl.store(turns_ptr + place * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit
def hopper_transpose_bits_kernel(
    bits_ptr, words_ptr, WORDS: tl.constexpr, Q_TILE_SIZE: tl.constexpr
):
    """Turn words of 32 keys of a query, (patterns, rows, WORDS), into words of 32 queries of a key.

    The result is laid out as `backward_walk.Lists.words`. A program has 32 queries.
    """
    bit = tl.arange(0, 32)
    strip = tl.program_id(0).to(tl.int64)  # number of the 32 queries
    word = tl.arange(0, WORDS)
    bits = tl.load(bits_ptr + (strip * 32 + bit)[:, None] * WORDS + word[None, :])
    bits = (bits[:, :, None] >> bit[None, None, :]) & 1
    words = tl.sum(bits << bit[:, None, None], axis=0)
    STRIPS: tl.constexpr = Q_TILE_SIZE // 32  # strips of a tile
    keys = word[:, None] * 32 + bit[None, :]
    rows = strip // STRIPS * (WORDS * 32) + keys
    tl.store(words_ptr + rows * STRIPS + strip % STRIPS, words)


@triton.jit(do_not_specialize=["N_QUERIES", "N_ROWS"])
def hopper_backward_convert_kernel(
    accumulator_ptr, dQ_ptr, cu_seqlens_ptr, N_QUERIES, N_ROWS, N_DOCUMENTS, scale, SECOND_ROWS,
    PACKED: tl.constexpr,
    D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store dQ (batch, heads, queries, D), contiguous: scale times sums of N_ROWS rows a head.

    If PACKED, dQ is (queries, heads, D), and the rows of a head are those of N_DOCUMENTS documents'
    slots. If SECOND_ROWS is not None, the accumulator of second laps lies behind the first, and the
    first SECOND_ROWS rows of each head have sums there too.
    """
    tiles = N_ROWS // ROWS if PACKED else (N_QUERIES + ROWS - 1) // ROWS
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    first_row = tl.program_id(0) % tiles * ROWS
    query_rows = first_row + tl.arange(0, ROWS)

    # where the rows go
    if PACKED:
        slot = first_row // QUERY_PADDING
        document, tile = tile_of_slot(cu_seqlens_ptr, slot, N_DOCUMENTS, N_QUERIES, QUERY_PADDING)
        first, num_rows = rows_of_document(
            cu_seqlens_ptr, document, N_DOCUMENTS, N_QUERIES, N_QUERIES
        )
        query_rows += (tile - slot) * QUERY_PADDING
        exists = (query_rows >= 0) & (query_rows < num_rows)
        dQ_rows = (first + query_rows) * (tl.num_programs(0) // tiles) + batch_head
    else:
        exists = query_rows < N_QUERIES
        dQ_rows = batch_head * N_QUERIES + query_rows

    # the sums, of both laps
    columns = tl.arange(0, D_TILE)
    await_previous(OVERLAP)
    sums = tl.load(
        accumulator_ptr + (batch_head * N_ROWS + first_row) * D_TILE + tl.arange(0, ROWS * D_TILE)
    )
    if SECOND_ROWS is not None:
        head = tl.num_programs(0) // tiles + batch_head
        places = (head * N_ROWS + first_row) * D_TILE + tl.arange(0, ROWS * D_TILE)
        sums += tl.load(accumulator_ptr + places, mask=first_row < SECOND_ROWS, other=0.0)

    # From the order of threads that `_in_thread_order` leaves, (64 columns, 8 of them, warp, row,
    # pair, half of the warp's rows, of the pair), to (ROWS, D_TILE).
    sums = tl.permute(tl.reshape(sums, [D_TILE // 64, 8, 4, 8, 4, 2, 2]), [2, 5, 3, 0, 1, 4, 6])
    sums = tl.reshape(sums, [ROWS, D_TILE])
    inside = exists[:, None] & (columns < D)[None, :]
    tl.store(
        dQ_ptr + dQ_rows[:, None] * D + columns[None, :],
        (sums * scale).to(dQ_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def parts_before(length, SHARE):
    """Return what `division.parts_before` does.

    It is a copy, as Triton's interpreter looks for its language in a function's own module.
    """
    parts = (length + SHARE - 1) // SHARE
    return SHARE * (parts * (parts - 1) // 2) + (length - 1 - (parts - 1) * SHARE) * parts


@triton.jit(do_not_specialize=["WHOLE", "SHARE", "N_KEYS", "N_TILES"])
def hopper_backward_join_kernel(
    parts_ptr, dK_ptr, dV_ptr, WHOLE, SHARE, N_KEYS, N_TILES, scale,
    IS_CAUSAL: tl.constexpr,
    D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store dK and dV (batch, kv_heads, keys, D), contiguous, as the sums of their walks' parts.

    Only tiles of keys behind the WHOLE first ones are stored; a head has N_TILES. A program adds up
    the parts of 16 columns of 64 keys, in a fixed order. `_in_thread_order` has the order of
    numbers in a part, and `backward_walk.part_of_program` the numbers of the parts.
    """
    CHUNKS: tl.constexpr = D_TILE // 16
    chunk, place = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    is_dV, consumer, tile = place % 2, place // 2 % 2, WHOLE + place // 4
    head, number = (tile // N_TILES).to(tl.int64), tile % N_TILES

    # the tile's parts
    if IS_CAUSAL:
        num_parts = (N_TILES - number + SHARE - 1) // SHARE
        first_part = (head + 1) * parts_before(N_TILES + 1, SHARE) - parts_before(
            N_TILES - number + 1, SHARE
        )
    else:
        num_parts = SHARE
        first_part = (tile - WHOLE).to(tl.int64) * SHARE

    # their sums (16 * ROWS,), 8 parts at a time
    index = tl.arange(0, 16 * ROWS)
    part = tl.arange(0, 8)
    first = parts_ptr + first_part * (4 * ROWS * D_TILE)
    first += (consumer * 2 + is_dV) * (ROWS * D_TILE) + chunk * (16 * ROWS)
    await_previous(OVERLAP)
    sums = tl.zeros([16 * ROWS], tl.float32)
    for done in range(0, num_parts, 8):
        places = (done + part)[:, None] * (4 * ROWS * D_TILE) + index[None, :]
        sums += tl.sum(
            tl.load(first + places, mask=(done + part < num_parts)[:, None], other=0.0), axis=0
        )

    # Where the numbers go: their order is (8 columns of the 16, warp, row, pair, half of the warp's
    # rows, of the pair).
    row = (
        number * (2 * ROWS)
        + consumer * ROWS
        + index // 128 % 4 * 16
        + index // 2 % 2 * 8
        + index // 16 % 8
    )
    column = chunk * 16 + index // 512 * 8 + index // 4 % 4 * 2 + index % 2
    dX_ptr, factor = dK_ptr, scale
    if is_dV:
        dX_ptr, factor = dV_ptr, 1.0
    inside = (row < N_KEYS) & (column < D)
    tl.store(
        dX_ptr + (head * N_KEYS + row) * D + column,
        (sums * factor).to(dX_ptr.dtype.element_ty),
        mask=inside,
    )


def preprocess(
    output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None, rows: Tensor,
    sums: Tensor | None, turns: Tensor | None,
) -> None:  # fmt: skip
    """Fill `rows` with L in base 2 and delta, and `sums` and `turns` with zeros.

    `rows` is (batch · heads, 2, rows). `sums` and `turns` may be None. output and grad_output
    (batch, heads, queries, head_dim) are as TMA reads them; lse (batch, heads, queries) is
    contiguous.
    """
    batch, heads, num_queries, width = output.shape
    num_rows = rows.shape[2]
    launch(
        hopper_backward_preprocess_kernel, (num_rows // LIGHT_ROWS * batch * heads,),
        (
            output, grad_output, lse, lse if grad_lse is None else grad_lse.contiguous(), rows,
            rows if sums is None else sums, rows if turns is None else turns,
        ),
        (*_in_chunks(output), *_in_chunks(grad_output), heads, num_queries, num_rows),
        {
            "HAS_DL": grad_lse is not None, "HAS_SUMS": sums is not None,
            "LAPS": 0 if turns is None else len(turns),
            **_options(width), **overlap_options(output.device),
        },
    )  # fmt: skip


def convert(
    sums: Tensor, grad_q: Tensor, num_rows: int, scale: float, cu_seqlens: Tensor | None = None, *,
    second_rows: int | None = None,
) -> None:  # fmt: skip
    """Fill grad_q with scale · `sums`, of `num_rows` rows a head, put back in rows and columns.

    grad_q is (batch, heads, queries, head_dim), or with cu_seqlens (queries, heads, head_dim). The
    first `second_rows` rows of a head, unless None, have sums of second laps too.
    """
    if cu_seqlens is None:
        batch, heads, num_queries, width = grad_q.shape
        programs, documents = -(-num_queries // LIGHT_ROWS) * batch * heads, 0
    else:
        num_queries, heads, width = grad_q.shape
        programs, documents = num_rows // LIGHT_ROWS * heads, len(cu_seqlens) - 1
    launch(
        hopper_backward_convert_kernel, (programs,),
        (sums, grad_q, sums if cu_seqlens is None else cu_seqlens),
        (num_queries, num_rows, documents, scale, second_rows),
        {
            "PACKED": cu_seqlens is not None,
            **_options(width), **overlap_options(grad_q.device, follows=True),
        },
    )  # fmt: skip


def join(
    parts: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    key_tiles: int,
    division: Division,
    is_causal: bool,
    scale: float,
) -> None:
    """Fill the tiles of grad_k and grad_v whose walks are divided with the sums of their parts.

    grad_k and grad_v are (batch, kv_heads, keys, head_dim), `parts` (programs, 4, 64 · head tile);
    a head has `key_tiles` tiles of keys.
    """
    batch, kv_heads, num_keys, width = grad_k.shape
    tiles = batch * kv_heads * key_tiles - division.whole
    launch(
        hopper_backward_join_kernel, (tiles * 4 * (head_tile(width) // 16),),
        (parts, grad_k, grad_v),
        (division.whole, division.share, num_keys, key_tiles, scale),
        {"IS_CAUSAL": is_causal, **_options(width), **overlap_options(grad_k.device, follows=True)},
    )  # fmt: skip


def transposed_words(token_bits: Tensor, query_tile: int) -> Tensor:
    """Return a mask's `token_bits` ordered by keys, as `backward_walk.Lists.words` has them.

    `token_bits` is (patterns, query_block, key_block / 32).
    """
    patterns, query_block, words = token_bits.shape
    shape = (patterns, query_block // query_tile, words * BITS, query_tile // BITS)
    transposed = empty(shape, torch.int32, token_bits.device)
    if patterns:
        launch(
            hopper_transpose_bits_kernel, (patterns * query_block // BITS,),
            (token_bits, transposed), (),
            {"WORDS": words, "Q_TILE_SIZE": query_tile},
        )  # fmt: skip
    return transposed


def _options(width: int) -> dict[str, int]:
    """Return the constants that kernels of a row of `width` columns are compiled for."""
    return {"D": width, "D_TILE": head_tile(width), "ROWS": LIGHT_ROWS}


def _in_chunks(x: Tensor) -> tuple[int, ...]:
    """Return x's strides of batch, heads and rows in chunks of 16 bytes; 0 for a size of 1."""
    return tuple(
        stride // CHUNK.value if size > 1 else 0 for stride, size in zip(x.stride()[:3], x.shape)
    )
