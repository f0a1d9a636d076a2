"""Which tile of keys a program of the Hopper backward has, and which tiles of queries it walks.

Arithmetic on integers, which producer, consumers and senders do alike. Four walks share the rest:

  dense    the query tiles that see the keys. Without a mask the walk starts at the program's own
           position and wraps around the end, so that programs that run at one time add to different
           rows of dQ; a causal one goes from the diagonal on.
  parts    of dense walks, each a program's
  lists    of a `BlockMask`'s column of tiles: the partial ones of each query head of a group, then
           the full ones of each
  packed   the dense walk within the document that a program finds by its slot. dQ's accumulator has
           the rows of the slots that documents' queries would have.

The tests run the functions without an underscore as Python.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cs336_systems.attention.hopper import division
from cs336_systems.attention.hopper.walk import (
    Sequence,
    document_of_slot,
    sequence_of,
    slots_of_documents,
)

KEY_TILE = gl.constexpr(128)  # the two consumers' 64 rows of a wgmma each
# Rows of L, delta and dQ's accumulator are padded to a multiple of this, the number of query rows
# that the diagonal cuts in one key tile. A causal program then has at least the steps of these
# rows, and runs them without a check.
QUERY_PADDING = KEY_TILE


class BackwardPlan(NamedTuple):
    """What the main kernel is compiled for, beside the element type."""

    head_tile: int
    columns: int  # of a head tile's, those that are multiplied: all, or 96 of 128
    query_tile: int
    group: int  # query heads that share a key head
    is_causal: bool
    whole_key_tiles: bool  # no query sees keys that do not exist
    dq_way: int  # ALONE, BY_SENDERS or LATE
    ordered: bool  # dQ is added in one order
    # rows and columns of a block mask's tiles; 0 where no lists are walked
    query_block: int = 0
    key_block: int = 0
    packed: bool = False
    split: bool = False  # walks are divided (`Parts`)


class Problem(NamedTuple):
    """The numbers of a call."""

    N_KV_HEADS: gl.tensor
    HEADS_TOGETHER: gl.tensor  # see `tile_of_program`
    # row of dQ's accumulator where second laps have theirs, see `turn_of_tile`
    SECOND_SUMS: gl.tensor
    N_QUERIES: gl.tensor
    N_KEYS: gl.tensor
    scale_log2: gl.tensor


class Lists(NamedTuple):
    """The lists of a `BlockMask` that columns of its tiles walk, and the sizes that find a list."""

    num_partial: gl.tensor  # (masks, columns of tiles): lengths of the lists `partial`
    partial: gl.tensor  # (masks, columns of tiles, WIDTH): rows of partial tiles
    patterns: gl.tensor  # the same shape: numbers of the partial tiles' bits in `words`
    num_full: gl.tensor  # (masks, columns of tiles): lengths of the lists `full`
    full: gl.tensor  # (masks, columns of tiles, FULL_WIDTH): rows of full tiles
    # (patterns, query_block / query_tile, key_block, query_tile / 32): bits of a key's queries
    words: gl.tensor
    MASK_BATCHES: gl.tensor
    MASK_HEADS: gl.tensor
    WIDTH: gl.tensor
    FULL_WIDTH: gl.tensor


class Parts(NamedTuple):
    """Divided walks, with a program for each part (`part_of_program`)."""

    # (programs, consumers, dK and dV, 64 * head tile), float32, in the order of threads
    sums: gl.tensor
    WHOLE: gl.tensor  # number of tiles of keys, the first ones, whose walks are not divided
    # parts of a walk; if causal, the most blocks of KEY_TILE queries that a part has
    SHARE: gl.tensor


class Tile(NamedTuple):
    """A program's tile of keys, with the sizes of its walks."""

    number: gl.tensor  # of the tile, in its head or its document
    batch_head: gl.tensor  # index into batch and key heads
    sequence: gl.tensor  # the `Sequence` that the tile belongs to
    query_tiles: gl.tensor  # tiles of the sequence's queries and of their padding
    head_rows: gl.tensor  # rows of a head in dQ's accumulator
    first_row: gl.tensor  # the sequence's first row among `head_rows`
    # steps of all walks; 0 where no query sees the keys, along lists or of documents
    steps: gl.tensor
    masked: gl.tensor  # number of steps, the first ones, with the bits of a partial tile
    exists: gl.tensor  # whether the tile has keys
    part: gl.tensor  # number of the program's part of each walk
    parts: gl.tensor  # number of parts of each walk; 1 where walks are whole


class Walk(NamedTuple):
    """The steps of a tile of keys over the queries of one head of the group.

    Along lists a walk has the steps of one list, so a head has two walks.
    """

    member: gl.tensor  # number of the query head in the group
    first_tile: gl.tensor  # of queries; 0 along lists
    steps: gl.tensor
    list_number: gl.tensor
    is_partial: gl.tensor  # whether the list is of partial tiles


@gluon.jit
def tile_of_program(program, num_programs, num_tiles, HEADS_TOGETHER):
    """Return (key tile, index into batch and key heads) of a program.

    HEADS_TOGETHER heads at a time, whose rows the L2 cache holds. Among these heads one tile index
    comes after the other, so that the longest causal tiles, those of the first keys, start first
    and the short ones fill the tail.
    """
    first_head = program // (HEADS_TOGETHER * num_tiles) * HEADS_TOGETHER
    width = min(HEADS_TOGETHER, num_programs // num_tiles - first_head)
    position = program - first_head * num_tiles
    return position // width, first_head + position % width


parts_before = gluon.jit(division.parts_before)


@gluon.jit
def part_of_program(program, num_tiles, WHOLE, SHARE, IS_CAUSAL: gl.constexpr):
    """Return (key tile, index into batch and key heads, part, parts of each walk) of a program.

    A head has `num_tiles` tiles. Without a mask walks are equally long: the tiles behind the WHOLE
    first ones have SHARE programs each. Causal walks of 1, 2, ... blocks of KEY_TILE queries have
    as many programs as it takes for parts of at most SHARE blocks.
    """
    if IS_CAUSAL:
        programs = parts_before(num_tiles + 1, SHARE)
        batch_head = program // programs
        rest = programs - 1 - program % programs  # the longest walks of a head start first
        parts = 1
        while rest >= SHARE * parts:
            rest -= SHARE * parts
            parts += 1
        return num_tiles - 1 - (parts - 1) * SHARE - rest // parts, batch_head, rest % parts, parts
    else:
        tile = WHOLE + program // SHARE
        return tile % num_tiles, tile // num_tiles, program % SHARE, SHARE


@gluon.jit
def part_of_walk(steps, part, parts):
    """Return (steps of a walk before a part, steps of the part).

    A part has at least one step, as there are not more parts than steps.
    """
    done = steps * part // parts
    return done, steps * (part + 1) // parts - done


@gluon.jit
def key_tiles(N_QUERIES, N_KEYS, IS_CAUSAL: gl.constexpr):
    """Return how many key tiles of a head some query sees; they are the first ones."""
    rows = N_KEYS
    if IS_CAUSAL:
        rows = min(N_KEYS, N_QUERIES)
    return (rows + KEY_TILE - 1) // KEY_TILE


@gluon.constexpr_function
def query_padding(query_block):
    """Return the multiple to which a head's rows are padded.

    Along lists, the last tile of a mask has all its rows.
    """
    return max(QUERY_PADDING.value, query_block)


@gluon.jit
def query_tiles(N_QUERIES, Q_TILE_SIZE: gl.constexpr, PADDING: gl.constexpr):
    """Return how many query tiles a head has, those of its padding included."""
    return (N_QUERIES + PADDING - 1) // PADDING * (PADDING // Q_TILE_SIZE)


@gluon.jit
def walk_of_tile(tile_number, tiles, Q_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Return (first query tile, steps) of a key tile's walk over a head's `tiles` query tiles."""
    first_tile = tile_number * (KEY_TILE // Q_TILE_SIZE)
    if IS_CAUSAL:
        return first_tile, tiles - first_tile
    else:
        return first_tile % tiles, tiles


@gluon.jit
def query_of_step(step, first_tile, tiles, Q_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Return the first query of a walk's step; without a mask the walk wraps around the end."""
    tile = first_tile + step
    if not IS_CAUSAL:
        tile -= tiles * (tile >= tiles)
    return tile * Q_TILE_SIZE


@gluon.jit
def tiles_in_first_lap(number, query_block, query_blocks):
    """Return how many of the first `number` key tiles visit a block of queries in their first lap.

    A walk's first lap ends where it wraps around the end.
    """
    return number // query_blocks * (query_block + 1) + min(number % query_blocks, query_block + 1)


@gluon.jit
def turn_of_tile(query_block, query_blocks, tile_number, num_tiles, IS_CAUSAL: gl.constexpr):
    """Return (whether a key tile visits a block in its second lap, how many tiles add before it).

    For a fixed order of additions to dQ; blocks have KEY_TILE queries. The second lap is the part
    of a walk without a mask after it has wrapped around the end. It has sums of its own, and
    `convert` adds up both.

    Within a lap the order is that of programs, whose tiles are numbered from the last one down. So
    a program waits only for programs with a lower index. These have started, as a GPU starts
    programs in the order of their indices: however few multiprocessors are free, the lowest program
    that has not ended can go on.

    A program does not wait either where all start at once and keep pace. Its walk starts a block
    before that of the program ahead of it. So it comes to each block a step later in the first lap,
    and likewise in the second. Were both laps one sum, the first programs of a head would have to
    wait in their second lap for the last ones in their first.
    """
    if IS_CAUSAL:
        return False, min(query_block, num_tiles - 1) - tile_number
    else:
        first = tiles_in_first_lap(num_tiles, query_block, query_blocks)
        first -= tiles_in_first_lap(tile_number + 1, query_block, query_blocks)
        second = num_tiles - 1 - tile_number - first
        is_second = query_block < tile_number % query_blocks
        return is_second, first + (second - first) * is_second


@gluon.constexpr_function
def num_walks(PLAN):
    """Return how many walks a program has: one for each head of the group, two along lists.

    Along lists, the partial tiles of all heads come first, then the full ones of all.
    """
    return PLAN.group * (2 if PLAN.query_block else 1)


@gluon.jit
def list_of_keys(
    tile_number, batch_head, member, N_KEYS, N_KV_HEADS, MASK_BATCHES, MASK_HEADS, GROUP, K_BLOCK
):
    """Return the number of the list that a tile of keys walks for one head of its group.

    A mask of one batch entry or one head serves all.
    """
    batch, head = batch_head // N_KV_HEADS, batch_head % N_KV_HEADS * GROUP + member
    columns = (N_KEYS + K_BLOCK - 1) // K_BLOCK
    return (
        batch % MASK_BATCHES * MASK_HEADS + head % MASK_HEADS
    ) * columns + tile_number * KEY_TILE // K_BLOCK


@gluon.jit
def _walk_of_list(number, tile_number, batch_head, problem, walked, PLAN: gl.constexpr):
    """Return the `number`-th walk of a tile of keys along a mask's lists; it may have no steps."""
    member, is_partial = number % PLAN.group, number < PLAN.group
    column = list_of_keys(
        tile_number, batch_head, member, problem.N_KEYS, problem.N_KV_HEADS,
        walked.MASK_BATCHES, walked.MASK_HEADS, PLAN.group, PLAN.key_block,
    )  # fmt: skip
    tiles = gl.load(walked.num_partial + column, mask=is_partial, other=0)
    tiles += gl.load(walked.num_full + column, mask=is_partial == 0, other=0)
    return Walk(
        member, 0, tiles * (PLAN.query_block // PLAN.query_tile), column.to(gl.int64), is_partial
    )


@gluon.jit
def own_tile(problem, walked, PLAN: gl.constexpr):
    """Return the tile of keys of this program.

    If PLAN.ordered, programs have tiles from the last one down (`turn_of_tile`).
    """
    if PLAN.packed:
        slots = slots_of_documents(problem.N_KEYS, walked.N_DOCUMENTS, KEY_TILE)
        slot, batch_head = tile_of_program(
            gl.program_id(0), gl.num_programs(0), slots, problem.HEADS_TOGETHER
        )
        document, tile_number = document_of_slot(
            slot, walked.cu_seqlens_k, walked.N_DOCUMENTS, problem.N_KEYS, KEY_TILE
        )

        # the document, and the steps over its queries
        sequence = sequence_of(document, tile_number, batch_head, problem, walked, "keys")
        exists = (tile_number >= 0) & (tile_number * KEY_TILE < sequence.num_keys)
        tiles = query_tiles(sequence.num_queries, PLAN.query_tile, QUERY_PADDING)
        steps = PLAN.group * walk_of_tile(tile_number, tiles, PLAN.query_tile, PLAN.is_causal)[1]
        steps = gl.where(exists, max(steps, 0), 0)
        head_rows = (
            slots_of_documents(problem.N_QUERIES, walked.N_DOCUMENTS, QUERY_PADDING) * QUERY_PADDING
        )
        first_row = (sequence.first_row // QUERY_PADDING + document) * QUERY_PADDING
        return Tile(
            tile_number, batch_head, sequence, tiles, head_rows, first_row, steps, 0, exists, 0, 1
        )
    else:
        # which tile
        num_tiles = key_tiles(problem.N_QUERIES, problem.N_KEYS, PLAN.is_causal)
        program, part, parts = gl.program_id(0), 0, 1
        if PLAN.split:
            tile_number, batch_head, part, parts = part_of_program(
                program, num_tiles, walked.WHOLE, walked.SHARE, PLAN.is_causal
            )
        elif PLAN.is_causal or PLAN.query_block:
            tile_number, batch_head = tile_of_program(
                program, gl.num_programs(0), num_tiles, problem.HEADS_TOGETHER
            )
        else:  # one head after the other; the last tiles may be those of divided walks
            tile_number, batch_head = program % num_tiles, program // num_tiles
        if PLAN.ordered:
            tile_number = num_tiles - 1 - tile_number

        # how many steps
        tiles = query_tiles(problem.N_QUERIES, PLAN.query_tile, query_padding(PLAN.query_block))
        masked = 0
        if PLAN.query_block:
            steps = 0
            for number in range(num_walks(PLAN)):
                walk = _walk_of_list(number, tile_number, batch_head, problem, walked, PLAN)
                steps += walk.steps
                masked += walk.steps * walk.is_partial
        else:
            steps = walk_of_tile(tile_number, tiles, PLAN.query_tile, PLAN.is_causal)[1]
            if PLAN.split:
                steps = part_of_walk(steps, part, parts)[1]
            steps *= PLAN.group
        sequence = Sequence(0, problem.N_QUERIES, 0, problem.N_KEYS, 0, 0)
        head_rows = tiles * PLAN.query_tile
        return Tile(
            tile_number, batch_head, sequence, tiles, head_rows, 0, steps, masked, True, part, parts
        )


@gluon.jit
def walk_of(number, tile, problem, walked, PLAN: gl.constexpr):
    """Return the `number`-th walk of a tile of keys.

    Where no query sees the keys, the last walk has the least steps that a program runs. Their
    queries, keys and values are read from behind the end, as zeros.
    """
    if PLAN.query_block:
        walk = _walk_of_list(number, tile.number, tile.batch_head, problem, walked, PLAN)
        is_empty = (tile.steps == 0) & (number == num_walks(PLAN) - 1)
        return Walk(walk.member, 0, walk.steps + is_empty, walk.list_number, walk.is_partial)
    else:
        first_tile, steps = walk_of_tile(
            tile.number, tile.query_tiles, PLAN.query_tile, PLAN.is_causal
        )
        if PLAN.split:
            done, steps = part_of_walk(steps, tile.part, tile.parts)
            first_tile += done
        if PLAN.packed:
            steps = gl.where(tile.steps > 0, steps, least_steps(PLAN))
        return Walk(number, first_tile, steps, 0, 0)


@gluon.jit
def row_of_member(member, tile, PLAN: gl.constexpr):
    """Return the first row of dQ's accumulator for a head of the group, in the tile's sequence."""
    head = tile.batch_head * PLAN.group + member
    if PLAN.packed:
        return head * tile.head_rows + tile.first_row
    else:  # with `head_rows` in place of two factors, causal kernels of head dim 128 spill in loops
        return head * tile.query_tiles * PLAN.query_tile


@gluon.constexpr_function
def least_steps(PLAN):
    """Return the least steps of a program's walk: a causal tile's masked ones, else 1."""
    return KEY_TILE.value // PLAN.query_tile if PLAN.is_causal else 1


@gluon.jit
def place_of_step(step, walk, tile, problem, walked, PLAN: gl.constexpr):
    """Return (first query of a step of a walk, number of its tile of bits, if that is partial)."""
    if PLAN.query_block:
        PARTS: gl.constexpr = PLAN.query_block // PLAN.query_tile
        entry, part = step // PARTS, step % PARTS
        partial, full = (
            walk.list_number * walked.WIDTH + entry,
            walk.list_number * walked.FULL_WIDTH + entry,
        )
        is_full = (walk.is_partial == 0) & (tile.steps > 0)
        block = gl.load(walked.partial + partial, mask=walk.is_partial, other=0)
        block += gl.load(walked.full + full, mask=is_full, other=0)
        pattern = gl.load(walked.patterns + partial, mask=walk.is_partial, other=0)
        first_query = gl.where(
            tile.steps == 0, problem.N_QUERIES, block * PLAN.query_block + part * PLAN.query_tile
        )
        return first_query, pattern * PARTS + part
    else:
        first_query = query_of_step(
            step, walk.first_tile, tile.query_tiles, PLAN.query_tile, PLAN.is_causal
        )
        if PLAN.packed:
            first_query = gl.where(tile.steps == 0, tile.sequence.num_queries, first_query)
        return first_query, 0
