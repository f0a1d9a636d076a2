"""Which query tiles a program of the Hopper forward computes, and which key tiles each one walks.

Arithmetic on integers, which copier and consumers do alike. A work item is a tile of queries of one
head, or a pair of them; a program takes one or several. Four walks share the rest:

  dense    from the last visible key tile to the first
  parts    of dense walks, each a work item
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

ROWS = gl.constexpr(CONSUMER_ROWS)  # rows of a consumer: those of one wgmma of a warp group
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
    """A tile of queries of one head, and its walk."""

    batch_head: gl.tensor  # index into batch and heads
    first_query: gl.tensor
    key_tiles: gl.tensor  # number of key tiles that are walked, one a step
    live: gl.tensor  # number of key tiles that some query sees; along lists, their entries
    masked: gl.tensor  # number of steps, the first ones, in which some query does not see some key
    list_number: gl.tensor  # 0 where no lists are walked
    first_key: gl.tensor  # first key of the part of the walk
    part: gl.tensor  # number of the part of the walk; -1 where the walk is whole


class Sequence(NamedTuple):
    """The queries and keys that a tile belongs to: those of a call, or of a packed document."""

    first_row: gl.tensor  # in the tensor of queries; 0 unless packed
    num_queries: gl.tensor
    first_key: gl.tensor  # in the tensors of keys; 0 unless packed
    num_keys: gl.tensor
    tile: gl.tensor  # number of the work item's only tile in the document; 0 unless packed
    head: gl.tensor  # of the work item; 0 unless packed


class PackedDocuments(NamedTuple):
    """Boundaries of packed documents in the queries and in the keys."""

    cu_seqlens_q: gl.tensor
    cu_seqlens_k: gl.tensor
    N_DOCUMENTS: gl.tensor


class Parts(NamedTuple):
    """Divided walks, whose parts are work items.

    WHOLE tiles of queries are work items themselves; of the other tiles each part of SHARE key
    tiles is one.
    """

    # O, m and l of NUM_PARTS parts of NUM_ROWS rows, laid out as in `split.parts_of`
    states: gl.tensor
    WHOLE: gl.tensor
    SHARE: gl.tensor
    NUM_PARTS: gl.tensor
    FIRST_ROW: gl.tensor  # first row of the divided tiles, counted over all heads
    NUM_ROWS: gl.tensor  # number of rows from FIRST_ROW on


class Lists(NamedTuple):
    """The lists of a `BlockMask` that rows of its tiles walk, and the sizes that find a list."""

    num_partial: gl.tensor  # (masks, rows of tiles): lengths of the lists `partial`
    partial: gl.tensor  # (masks, rows of tiles, WIDTH): columns of partial tiles
    patterns: gl.tensor  # the same shape: numbers of the partial tiles' bits in `words`
    num_full: gl.tensor  # (masks, rows of tiles): lengths of the lists `full`
    full: gl.tensor  # (masks, rows of tiles, FULL_WIDTH): columns of full tiles
    words: gl.tensor  # descriptor of the bits (patterns * query_block, words of a row)
    MASK_BATCHES: gl.tensor
    MASK_HEADS: gl.tensor
    WIDTH: gl.tensor
    FULL_WIDTH: gl.tensor
    WORD_ROWS: gl.tensor  # rows of `words`


@gluon.jit
def num_work_items(num_tiles, BATCH_HEADS, PAIRED: gl.constexpr):
    """Return the number of query tiles of all heads or, if PAIRED, of pairs of them."""
    if PAIRED:
        return (num_tiles + 1) // 2 * BATCH_HEADS
    else:
        return num_tiles * BATCH_HEADS


@gluon.jit
def tiles_of_item(item, num_tiles, PAIRED: gl.constexpr):
    """Return how many query tiles a work item has: 1 or, if PAIRED, 2 but for a head's odd one."""
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
    """Return (tile, index into batch and heads) of the `side`-th tile of work item `item`.

    If PAIRED, an item is the longest tile left of a head with the shortest, so that all items take
    equally long. Otherwise an item is one tile: HEADS_TOGETHER heads at a time, the longest causal
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
    """Return the first row of a query tile, below 0 if the first tile has rows to spare.

    The last tile ends with the queries, rounded up to ALIGNMENT, so that rows to spare are in the
    first tile, the shortest causal one.
    """
    return (N_QUERIES + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT - (num_tiles - tile) * Q_TILE_SIZE


@gluon.jit
def live_key_tiles(
    first_query, N_QUERIES, N_KEYS,
    Q_TILE_SIZE: gl.constexpr, K_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr
):  # fmt: skip
    """Return how many key tiles some query of the tile sees; they are the first ones."""
    end = N_KEYS
    if IS_CAUSAL:
        end = min(end, min(first_query + Q_TILE_SIZE, N_QUERIES))
    return (end + K_TILE_SIZE - 1) // K_TILE_SIZE


@gluon.jit
def slots_of_documents(TOTAL, N_DOCUMENTS, TILE: gl.constexpr):
    """Return how many slots hold the tiles of any N_DOCUMENTS documents of TOTAL rows.

    The slots cover the rows behind the last document too.
    """
    return TOTAL // TILE + N_DOCUMENTS + 1


@gluon.jit
def work_of_call(problem, walked, PLAN: gl.constexpr):
    """Return (query tiles, or packed documents' slots, of a head; work items of all heads)."""
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
    """Return (whole item, part) of work item `item` of a divided call; a whole walk is part -1.

    The WHOLE first items are whole walks. Then come the first parts of all divided tiles, then the
    second parts, and so on.
    """
    divided = max(num_tiles * BATCH_HEADS - WHOLE, 1)
    place = max(item - WHOLE, 0)
    is_part = item >= WHOLE
    return item - (item - WHOLE - place % divided) * is_part, (place // divided + 1) * is_part - 1


@gluon.jit
def range_of_part(part, live, SHARE):
    """Return (first key tile, number of key tiles) of a part of a walk of `live` key tiles.

    Part -1 has all of them. The number is at most 0 for a part that the walk does not have.
    """
    first = max(part, 0) * SHARE
    return first, min(live - first, SHARE + live * (part < 0))


@gluon.jit
def list_of_tile(
    batch_head, first_query, N_QUERIES, N_HEADS, MASK_BATCHES, MASK_HEADS, Q_BLOCK: gl.constexpr
):
    """Return the number of the list that a query tile walks.

    A mask of one batch entry or one head serves all.
    """
    batch, head = batch_head // N_HEADS % MASK_BATCHES, batch_head % N_HEADS % MASK_HEADS
    rows = (N_QUERIES + Q_BLOCK - 1) // Q_BLOCK
    return (batch * MASK_HEADS + head) * rows + first_query // Q_BLOCK


@gluon.jit
def steps_of_lists(num_partial, num_full, KEY_TILES: gl.constexpr):
    """Return (masked steps, all steps) of a query tile whose lists have these lengths.

    A tile of the mask has KEY_TILES key tiles. A query tile that sees no key has one step, masked,
    whose keys and bits are read from behind the end, as zeros.
    """
    steps = (num_partial + num_full) * KEY_TILES
    is_empty = steps == 0
    return num_partial * KEY_TILES + is_empty, steps + is_empty


@gluon.jit
def place_in_lists(step, masked, KEY_TILES: gl.constexpr):
    """Return (list entry, key tile within the mask's tile) of a step.

    The first `masked` steps follow the list of partial tiles, the others that of full ones.
    """
    place = step - masked * (step >= masked)
    return place // KEY_TILES, place % KEY_TILES


@gluon.jit
def _boundary(cu_seqlens, document, TOTAL):
    """Return cu_seqlens[document], clamped to 0 to TOTAL.

    The values are not validated where that would stall the host.
    """
    return gl.minimum(gl.maximum(gl.load(cu_seqlens + document), 0), TOTAL)


@gluon.jit
def document_of_slot(slot, cu_seqlens, N_DOCUMENTS, TOTAL, TILE: gl.constexpr):
    """Return (document, tile within the document) of a slot, as in `triton.documents`.

    Document d has the slots from cu[d] // TILE + d on. Document N_DOCUMENTS stands for the rows
    behind the last one. The tile may lie past the document's end.
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
    """Return the `Sequence` of a document, given the number of the program's tile in it.

    Document N_DOCUMENTS has the rows behind the last document: if BEHIND is "queries" the queries
    there and no keys, else the keys and no queries.
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
    """Return (number of query tiles, `Sequence`) of a work item; the number may be 0."""
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
    """Return the `side`-th query tile of a work item, with its walk."""
    Q_TILE_SIZE: gl.constexpr = PLAN.consumers * ROWS
    IS_LISTED: gl.constexpr = PLAN.key_block > 0

    # the tile
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

    # its walk
    if IS_LISTED:
        number = list_of_tile(
            batch_head, first_query, problem.N_QUERIES, problem.N_HEADS,
            walked.MASK_BATCHES, walked.MASK_HEADS, PLAN.query_block,
        )  # fmt: skip
        num_partial, num_full = (
            gl.load(walked.num_partial + number),
            gl.load(walked.num_full + number),
        )
        masked, steps = steps_of_lists(num_partial, num_full, PLAN.key_block // PLAN.key_tile)
        return Tile(
            batch_head, first_query, steps, num_partial + num_full, masked, number.to(gl.int64), 0,
            -1,
        )  # fmt: skip
    else:
        live = live_key_tiles(
            first_query, sequence.num_queries, sequence.num_keys, Q_TILE_SIZE, PLAN.key_tile,
            PLAN.is_causal,
        )  # fmt: skip
        if PLAN.split:
            # A tile then has no more rows than a key tile has keys, so `live` is above 0.
            first, steps = range_of_part(part, live, walked.SHARE)
            return Tile(
                batch_head, first_query, steps, steps, PLAN.masked_tiles, 0, first * PLAN.key_tile,
                part,
            )  # fmt: skip
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
    """Return the TMA coordinates of a row of queries or of O.

    `document_descriptor` has those of packed documents.
    """
    if PLAN.packed:
        end = sequence.first_row + sequence.num_queries
        return [MOST_ROWS, end, head, MOST_ROWS - sequence.num_queries + row, 0]
    else:
        return [batch, head, row, 0]


@gluon.jit
def key_place(head, key, batch, sequence, PLAN: gl.constexpr):
    """Return the TMA coordinates of a row of keys or values, as `query_place` does for queries."""
    if PLAN.packed:
        end = sequence.first_key + sequence.num_keys
        return [MOST_ROWS, end, head, MOST_ROWS - sequence.num_keys + key, 0]
    else:
        return [batch, head, key, 0]


@gluon.jit
def listed_tile(step, tile, problem, walked, PLAN: gl.constexpr, FIRST: gl.constexpr = False):
    """Return (first key, coordinates of its mask bits in `walked.words`) of a step along lists.

    FIRST, for step 0, starts the loads without waiting for the lengths of the lists.
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
    """Return the first of a consumer's rows in a query tile.

    Rows before the first query become rows behind the last one, which TMA reads as zeros and does
    not write.
    """
    first_row = first_query + consumer * ROWS
    return gl.where(first_row < 0, N_QUERIES, first_row)


@gluon.jit
def sees_tile(first_row, first_key):
    """Return whether, under a causal mask, a consumer's last row sees a key tile's first key."""
    return first_key < first_row + ROWS


@gluon.jit
def ring_slot(step, SLOTS: gl.constexpr):
    """Return (slot, phase) of a program's `step`-th pass through a ring of SLOTS."""
    return step % SLOTS, (step // SLOTS) & 1
