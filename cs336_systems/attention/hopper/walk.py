"""Which tiles of queries a program of the Hopper forward computes, and which key tiles each of them
walks.

Arithmetic on integers, which copier and consumers do alike. A work item is a tile of queries of one
head, or a pair of them; a program takes one or several. Four walks share the rest:

  dense    from the last visible key tile to the first
  parts    of dense walks, each an item
  lists    of a `BlockMask`'s row of tiles: the partial ones, then the full ones
  packed   the dense walk within the document that a program finds by its slot

`tests/hopper_protocol.py` has a model of a program, which runs the functions without an underscore
as Python.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cs336_systems.attention.hopper.descriptors import ROWS_OF_DOCUMENTS
from cs336_systems.attention.hopper.schedule import CONSUMER_ROWS
from cs336_systems.attention.masks.tiles import BITS

ROWS = gl.constexpr(CONSUMER_ROWS)  # of a consumer: what one wgmma of a warp group computes
KEYS_PER_WORD = gl.constexpr(BITS)
MOST_ROWS = gl.constexpr(ROWS_OF_DOCUMENTS)


class Problem(NamedTuple):
    """The numbers of a call."""

    N_QUERIES: gl.tensor
    N_KEYS: gl.tensor
    N_HEADS: gl.tensor
    GROUP: gl.tensor  # query heads that share a key head
    BATCH_HEADS: gl.tensor
    HEADS_TOGETHER: gl.tensor  # heads whose keys and values the L2 cache should hold at one time
    scale_log2: gl.tensor


class Tile(NamedTuple):
    """A tile of queries and its walk."""

    batch_head: gl.tensor  # index into batch and heads
    first_query: gl.tensor
    key_tiles: gl.tensor  # that are walked, one a step
    live: gl.tensor  # those that some query sees, or the entries of the lists
    masked: gl.tensor  # steps in which some query does not see some key: the first so many
    list_number: gl.tensor
    first_key: gl.tensor  # of its part of the keys
    part: gl.tensor  # its number, -1 if that is all


class Sequence(NamedTuple):
    """The queries and keys that a tile is of: all, or those of a packed document."""

    first_row: gl.tensor  # in the tensors of queries; 0 unless packed
    num_queries: gl.tensor
    first_key: gl.tensor
    num_keys: gl.tensor
    tile: gl.tensor  # the only one that a work item has of a document
    head: gl.tensor


class Documents(NamedTuple):
    """Boundaries of packed documents."""

    cu_seqlens_q: gl.tensor
    cu_seqlens_k: gl.tensor
    N_DOCUMENTS: gl.tensor


class Parts(NamedTuple):
    """Divided walks: WHOLE tiles of queries are items, and of the others each part of SHARE key
    tiles is one.
    """

    # O, m and l of NUM_PARTS parts of NUM_ROWS rows, as `split.parts_of` has them
    states: gl.tensor
    WHOLE: gl.tensor
    SHARE: gl.tensor
    NUM_PARTS: gl.tensor
    FIRST_ROW: gl.tensor  # of the rows of all heads
    NUM_ROWS: gl.tensor


class Lists(NamedTuple):
    """The lists of a `BlockMask` that rows of its tiles walk, and the sizes by which a tile finds
    its own.
    """

    num_partial: gl.tensor
    partial: gl.tensor  # (masks, rows of tiles, WIDTH): numbers of partial tiles
    patterns: gl.tensor  # the same: their numbers in `words`
    num_full: gl.tensor
    full: gl.tensor  # (masks, rows of tiles, FULL_WIDTH)
    words: gl.tensor  # descriptor of (patterns * query_block, words of a row)
    MASK_BATCHES: gl.tensor
    MASK_HEADS: gl.tensor
    WIDTH: gl.tensor
    FULL_WIDTH: gl.tensor
    WORD_ROWS: gl.tensor


@gluon.jit
def num_work_items(num_tiles, BATCH_HEADS, PAIRED: gl.constexpr):
    """Tiles of queries, or pairs of them, of all heads."""
    if PAIRED:
        return (num_tiles + 1) // 2 * BATCH_HEADS
    else:
        return num_tiles * BATCH_HEADS


@gluon.jit
def tiles_of_item(item, num_tiles, PAIRED: gl.constexpr):
    """How many tiles of queries a work item has."""
    if PAIRED:
        pairs = (num_tiles + 1) // 2
        return 1 + (item % pairs < num_tiles // 2)
    else:
        return 1


@gluon.jit
def tile_of_item(
    item,
    side,
    num_tiles,
    BATCH_HEADS,
    HEADS_TOGETHER,
    PAIRED: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """(tile, index into batch and heads) of the `side`-th tile of work item `item`.

    PAIRED: an item is the longest tile left of a head with the shortest, so that all items take
    equally long. Otherwise an item is one tile, HEADS_TOGETHER heads at a time, the longest causal
    tiles first.
    """
    if PAIRED:
        pairs = (num_tiles + 1) // 2
        batch_head = item // pairs
        position = item % pairs
        tile = position + (1 - side) * (num_tiles - 1 - 2 * position)
    else:
        first_head = item // (HEADS_TOGETHER * num_tiles) * HEADS_TOGETHER
        width = min(HEADS_TOGETHER, BATCH_HEADS - first_head)
        position = item - first_head * num_tiles
        batch_head = first_head + position % width
        tile = position // width
        if IS_CAUSAL:
            tile = num_tiles - 1 - tile
    return tile, batch_head


@gluon.jit
def first_query_of(tile, num_tiles, N_QUERIES, Q_TILE_SIZE: gl.constexpr, ALIGNMENT: gl.constexpr):
    """The first row of a tile of queries, below 0 where the first tile has rows to spare.

    The last tile ends with the queries, up to ALIGNMENT: rows to spare are in the first, the
    shortest causal one.
    """
    return (N_QUERIES + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT - (num_tiles - tile) * Q_TILE_SIZE


@gluon.jit
def live_key_tiles(
    first_query, N_QUERIES, N_KEYS, Q_TILE_SIZE: gl.constexpr, K_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr
):  # fmt: skip
    """Key tiles that some query of the tile sees: the first so many."""
    end = N_KEYS
    if IS_CAUSAL:
        end = min(end, min(first_query + Q_TILE_SIZE, N_QUERIES))
    return (end + K_TILE_SIZE - 1) // K_TILE_SIZE


@gluon.jit
def slots_of_documents(TOTAL, N_DOCUMENTS, TILE: gl.constexpr):
    """Slots for tiles of any documents of so many rows in all, and of the rows behind them."""
    return TOTAL // TILE + N_DOCUMENTS + 1


@gluon.jit
def work_of_call(problem, walked, PLAN: gl.constexpr):
    """(tiles of queries of a head, work items of all heads)."""
    Q_TILE_SIZE: gl.constexpr = PLAN.consumers * ROWS
    num_tiles = (problem.N_QUERIES + Q_TILE_SIZE - 1) // Q_TILE_SIZE
    if PLAN.packed:
        num_tiles = slots_of_documents(problem.N_QUERIES, walked.N_DOCUMENTS, Q_TILE_SIZE)
    num_items = num_work_items(num_tiles, problem.BATCH_HEADS, PLAN.paired)
    if PLAN.split:
        num_items = walked.WHOLE + (num_items - walked.WHOLE) * walked.NUM_PARTS
    return num_tiles, num_items


@gluon.jit
def part_of_item(item, num_tiles, BATCH_HEADS, WHOLE):
    """(item of a tile, number of its part or -1) of an item of a divided call: of all tiles the
    first parts first.
    """
    divided = max(num_tiles * BATCH_HEADS - WHOLE, 1)
    place = max(item - WHOLE, 0)
    is_part = item >= WHOLE
    return item - (item - WHOLE - place % divided) * is_part, (place // divided + 1) * is_part - 1


@gluon.jit
def range_of_part(part, live, SHARE):
    """(first key tile, number of them) of a part of a walk of `live` key tiles; none of a part that
    it has not.
    """
    first = max(part, 0) * SHARE
    return first, min(live - first, SHARE + live * (part < 0))


@gluon.jit
def list_of_tile(
    batch_head, first_query, N_QUERIES, N_HEADS, MASK_BATCHES, MASK_HEADS, Q_BLOCK: gl.constexpr
):
    """Number of the list that a tile of queries walks; a mask of one batch entry or head serves
    all.
    """
    batch, head = batch_head // N_HEADS % MASK_BATCHES, batch_head % N_HEADS % MASK_HEADS
    rows = (N_QUERIES + Q_BLOCK - 1) // Q_BLOCK
    return (batch * MASK_HEADS + head) * rows + first_query // Q_BLOCK


@gluon.jit
def steps_of_lists(num_partial, num_full, KEY_TILES: gl.constexpr):
    """(masked steps, all steps) of a tile with lists of these lengths, KEY_TILES key tiles to a
    tile of the mask.

    A tile that sees no key has one step, masked, whose keys and bits are read from behind the end,
    as zeros.
    """
    steps = (num_partial + num_full) * KEY_TILES
    is_empty = steps == 0
    return num_partial * KEY_TILES + is_empty, steps + is_empty


@gluon.jit
def place_in_lists(step, masked, KEY_TILES: gl.constexpr):
    """(entry, key tile in the mask's tile) of a step: the partial tiles' list first, then that of
    full ones.
    """
    place = step - masked * (step >= masked)
    return place // KEY_TILES, place % KEY_TILES


@gluon.jit
def _boundary(cu_seqlens, document, TOTAL):
    """cu_seqlens[document], or the nearest row: its values are not checked where that would stall
    the host.
    """
    return gl.minimum(gl.maximum(gl.load(cu_seqlens + document), 0), TOTAL)


@gluon.jit
def document_of_slot(slot, cu_seqlens, N_DOCUMENTS, TOTAL, TILE: gl.constexpr):
    """(document, its slot's tile) as in `triton.varlen`: document d has the slots from cu[d] //
    TILE + d on, and N_DOCUMENTS are the rows behind the last one. The tile may lie past the
    document's end.
    """
    document, high = 0, N_DOCUMENTS
    while document < high:
        middle = (document + high + 1) // 2
        if _boundary(cu_seqlens, middle, TOTAL) // TILE + middle <= slot:
            document = middle
        else:
            high = middle - 1
    return document, slot - (_boundary(cu_seqlens, document, TOTAL) // TILE + document)


@gluon.jit
def sequence_of(document, tile, head, problem, walked, BEHIND: gl.constexpr):
    """The rows of a document. Behind the last one there are queries without keys, or the other way
    round: BEHIND.
    """
    first_row = _boundary(walked.cu_seqlens_q, document, problem.N_QUERIES)
    first_key = _boundary(walked.cu_seqlens_k, document, problem.N_KEYS)
    if BEHIND == "queries":
        end, key_end = problem.N_QUERIES, 0
    else:
        end, key_end = 0, problem.N_KEYS
    if document < walked.N_DOCUMENTS:
        end = _boundary(walked.cu_seqlens_q, document + 1, problem.N_QUERIES)
        key_end = _boundary(walked.cu_seqlens_k, document + 1, problem.N_KEYS)
    return Sequence(
        first_row,
        gl.maximum(end - first_row, 0),
        first_key,
        gl.maximum(key_end - first_key, 0),
        tile,
        head,
    )


@gluon.jit
def open_item(item, num_tiles, problem, walked, PLAN: gl.constexpr):
    """(tiles of queries of a work item, the sequence that they are of)."""
    if PLAN.packed:
        Q_TILE_SIZE: gl.constexpr = PLAN.consumers * ROWS
        slot, head = tile_of_item(
            item, 0, num_tiles, problem.BATCH_HEADS, problem.HEADS_TOGETHER, False, PLAN.is_causal
        )
        document, tile = document_of_slot(
            slot, walked.cu_seqlens_q, walked.N_DOCUMENTS, problem.N_QUERIES, Q_TILE_SIZE
        )
        sequence = sequence_of(document, tile, head, problem, walked, "queries")
        exists = (tile >= 0) & (tile * Q_TILE_SIZE < sequence.num_queries)
        return exists.to(gl.int32), sequence
    else:
        sequence = Sequence(0, problem.N_QUERIES, 0, problem.N_KEYS, 0, 0)
        if PLAN.split:
            tile = tile_of_work(item, 0, num_tiles, sequence, problem, walked, PLAN)
            return (tile.key_tiles > 0).to(gl.int32), sequence
        else:
            return tiles_of_item(item, num_tiles, PLAN.paired), sequence


@gluon.jit
def tile_of_work(item, side, num_tiles, sequence, problem, walked, PLAN: gl.constexpr):
    """A tile of queries and its walk."""
    Q_TILE_SIZE: gl.constexpr = PLAN.consumers * ROWS
    IS_LISTED: gl.constexpr = PLAN.key_block > 0
    if PLAN.packed:
        tile, batch_head = sequence.tile, sequence.head
        num_tiles = (sequence.num_queries + Q_TILE_SIZE - 1) // Q_TILE_SIZE
    else:
        part = -1
        if PLAN.split:
            item, part = part_of_item(item, num_tiles, problem.BATCH_HEADS, walked.WHOLE)
        tile, batch_head = tile_of_item(
            item, side, num_tiles, problem.BATCH_HEADS, problem.HEADS_TOGETHER, PLAN.paired,
            PLAN.is_causal or IS_LISTED,
        )  # fmt: skip
    first_query = first_query_of(tile, num_tiles, sequence.num_queries, Q_TILE_SIZE, PLAN.alignment)
    if IS_LISTED:
        number = list_of_tile(
            batch_head, first_query, problem.N_QUERIES, problem.N_HEADS, walked.MASK_BATCHES, walked.MASK_HEADS,
            PLAN.query_block,
        )  # fmt: skip
        num_partial, num_full = (
            gl.load(walked.num_partial + number),
            gl.load(walked.num_full + number),
        )
        masked, steps = steps_of_lists(num_partial, num_full, PLAN.key_block // PLAN.key_tile)
        return Tile(
            batch_head,
            first_query,
            steps,
            num_partial + num_full,
            masked,
            number.to(gl.int64),
            0,
            -1,
        )
    else:
        live = live_key_tiles(
            first_query,
            sequence.num_queries,
            sequence.num_keys,
            Q_TILE_SIZE,
            PLAN.key_tile,
            PLAN.is_causal,
        )
        if PLAN.split:  # where a tile has no more rows than a key tile has keys, and so a live one
            first, steps = range_of_part(part, live, walked.SHARE)
            return Tile(
                batch_head,
                first_query,
                steps,
                steps,
                PLAN.masked_tiles,
                0,
                first * PLAN.key_tile,
                part,
            )
        else:
            return Tile(
                batch_head,
                first_query,
                max(live, PLAN.masked_tiles),
                live,
                PLAN.masked_tiles,
                0,
                0,
                -1,
            )


@gluon.jit
def query_place(head, row, batch, sequence, PLAN: gl.constexpr):
    """Where TMA finds a row of queries or of O; `document_descriptor` says how rows of a document
    are counted.
    """
    if PLAN.packed:
        end = sequence.first_row + sequence.num_queries
        return [MOST_ROWS, end, head, MOST_ROWS - sequence.num_queries + row, 0]
    else:
        return [batch, head, row, 0]


@gluon.jit
def key_place(head, key, batch, sequence, PLAN: gl.constexpr):
    """The same of keys and values."""
    if PLAN.packed:
        end = sequence.first_key + sequence.num_keys
        return [MOST_ROWS, end, head, MOST_ROWS - sequence.num_keys + key, 0]
    else:
        return [batch, head, key, 0]


@gluon.jit
def listed_tile(step, tile, problem, walked, PLAN: gl.constexpr, FIRST: gl.constexpr = False):
    """(first key, coordinates of its bits in `mask.words`) of a step of a tile's walk along its
    mask.

    FIRST: of step 0, whose loads do not wait to hear how long the lists are.
    """
    entry, part = place_in_lists(step, tile.masked, PLAN.key_block // PLAN.key_tile)
    is_partial = step < tile.masked
    has_partial, has_full = is_partial, step >= tile.masked
    if FIRST:
        entry, part, has_partial, has_full = 0, 0, walked.WIDTH > 0, walked.FULL_WIDTH > 0
    partial = tile.list_number * walked.WIDTH + entry
    block = gl.load(walked.partial + partial, mask=has_partial, other=0)
    full = gl.load(
        walked.full + tile.list_number * walked.FULL_WIDTH + entry, mask=has_full, other=0
    )
    pattern = gl.load(walked.patterns + partial, mask=has_partial, other=0)
    block = gl.where(is_partial, block, full)
    first_key = gl.where(
        tile.live == 0, problem.N_KEYS, block * PLAN.key_block + part * PLAN.key_tile
    )
    row = gl.where(
        tile.live == 0,
        walked.WORD_ROWS,
        pattern * PLAN.query_block + tile.first_query % PLAN.query_block,
    )
    return first_key, [row, part * (PLAN.key_tile // KEYS_PER_WORD)]


@gluon.jit
def rows_of_consumer(first_query, consumer: gl.constexpr, N_QUERIES):
    """The first of a consumer's rows in a tile; rows before the first query become rows behind the
    last, and TMA reads them as zeros and does not write them.
    """
    first_row = first_query + consumer * ROWS
    return gl.where(first_row < 0, N_QUERIES, first_row)


@gluon.jit
def sees_tile(first_row, first_key):
    """Whether, under a causal mask, the last of a consumer's rows sees a key tile's first key."""
    return first_key < first_row + ROWS


@gluon.jit
def ring_slot(step, SLOTS: gl.constexpr):
    """(slot, phase) of a program's `step`-th pass through the ring."""
    return step % SLOTS, (step // SLOTS) & 1
