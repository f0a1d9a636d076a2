"""Which tile of keys a program of the Hopper backward has, and which tiles of queries it walks.

Arithmetic on integers, which producer, consumers and senders do alike. Four walks share the rest:

  dense    the query tiles that see the keys: without a mask from the program's own position around the end, so that
           programs that run at one time add to different rows of dQ; a causal one from the diagonal
           on
  parts    of dense walks, each a program's
  lists    of a `BlockMask`'s column of tiles: the partial ones, then the full ones; those of each query head of a group
  packed   the dense walk within the document that a program finds by its slot; dQ's accumulator has the rows of the
           slots that documents' queries would have

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
# that the diagonal of one key tile cuts: a causal program then has at least those steps, and runs
# them without a bound.
QUERY_PADDING = KEY_TILE


class BackwardPlan(NamedTuple):
    """What the main kernel is compiled for, beside the element type."""

    head_tile: int
    columns: int  # of it that are multiplied: all, or 96 of 128
    query_tile: int
    group: int  # query heads that share a key head
    is_causal: bool
    whole_key_tiles: bool  # no query sees keys that do not exist
    dq_way: int  # ALONE, BY_SENDERS or LATE
    ordered: bool  # dQ is added in one order
    # Rows and columns of a mask's tiles, whose lists are walked; 0 where the walk is dense.
    query_block: int = 0
    key_block: int = 0
    packed: bool = False
    split: bool = False  # walks are divided, as `Parts` says


class Problem(NamedTuple):
    """The numbers of a call."""

    N_KV_HEADS: gl.tensor
    HEADS_TOGETHER: gl.tensor  # see `tile_of_program`
    # row of dQ's accumulator where that of second laps begins, see `turn_of_tile`
    SECOND_SUMS: gl.tensor
    N_QUERIES: gl.tensor
    N_KEYS: gl.tensor
    scale_log2: gl.tensor


class Lists(NamedTuple):
    """The lists of a `BlockMask` that columns of its tiles walk, and the sizes by which a program
    finds its own.
    """

    num_partial: gl.tensor
    partial: gl.tensor  # (masks, columns of tiles, WIDTH): numbers of partial tiles
    patterns: gl.tensor  # the same: their numbers in `words`
    num_full: gl.tensor
    full: gl.tensor  # (masks, columns of tiles, FULL_WIDTH)
    # (patterns, query_block / query_tile, key_block, query_tile / 32): bits of a key's queries
    words: gl.tensor
    MASK_BATCHES: gl.tensor
    MASK_HEADS: gl.tensor
    WIDTH: gl.tensor
    FULL_WIDTH: gl.tensor


class Parts(NamedTuple):
    """Divided walks, a program for each part: see `part_of_program`."""

    # (programs, consumers, dK and dV, 64 * head tile), float32, in the order of threads
    sums: gl.tensor
    WHOLE: gl.tensor  # tiles of keys whose walks are not divided
    # parts of a walk; of a causal one the most blocks of KEY_TILE queries that a part has
    SHARE: gl.tensor


class Tile(NamedTuple):
    """A program's tile of keys."""

    number: gl.tensor  # of a head's or a document's tiles of keys
    batch_head: gl.tensor  # index into batch and key heads
    sequence: gl.tensor  # that it is of
    query_tiles: gl.tensor  # of the sequence, those of its padding included
    head_rows: gl.tensor  # of dQ's accumulator, a head
    first_row: gl.tensor  # of them the sequence's first
    # of all its walks; 0 where no query sees the keys, under a mask or of documents
    steps: gl.tensor
    masked: gl.tensor  # steps with the bits of a partial tile: the first so many
    exists: gl.tensor  # whether there are keys
    part: gl.tensor  # the program's of `parts` of each of the walks
    parts: gl.tensor


class Walk(NamedTuple):
    """The steps of a tile of keys over the queries of one head of the group, along lists half of
    them.
    """

    member: gl.tensor
    first_tile: gl.tensor
    steps: gl.tensor
    list_number: gl.tensor
    is_partial: gl.tensor  # whether that is a list of partial tiles


@gluon.jit
def tile_of_program(program, num_programs, num_tiles, HEADS_TOGETHER):
    """(key tile, index into batch and key heads) of a program.

    HEADS_TOGETHER heads at a time, whose rows the L2 cache holds; among them one tile index after
    the other, so that the longest causal tiles, those of the first keys, start first and the short
    ones fill the tail.
    """
    first_head = program // (HEADS_TOGETHER * num_tiles) * HEADS_TOGETHER
    width = min(HEADS_TOGETHER, num_programs // num_tiles - first_head)
    position = program - first_head * num_tiles
    return position // width, first_head + position % width


parts_before = gluon.jit(division.parts_before)


@gluon.jit
def part_of_program(program, num_tiles, WHOLE, SHARE, IS_CAUSAL: gl.constexpr):
    """(key tile, index into batch and key heads, part, parts of each walk) of a program, of
    `num_tiles` tiles a head.

    Without a mask walks are equally long: the tiles behind the WHOLE first ones have SHARE programs
    each. Causal ones of 1, 2, ... blocks of KEY_TILE queries have as many programs as it takes for
    parts of at most SHARE blocks.
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
    """(steps of a walk before a part, its own), which are at least one, as there are not more parts
    than steps.
    """
    done = steps * part // parts
    return done, steps * (part + 1) // parts - done


@gluon.jit
def key_tiles(N_QUERIES, N_KEYS, IS_CAUSAL: gl.constexpr):
    """Key tiles of a head that some query sees: the first so many."""
    rows = N_KEYS
    if IS_CAUSAL:
        rows = min(N_KEYS, N_QUERIES)
    return (rows + KEY_TILE - 1) // KEY_TILE


@gluon.constexpr_function
def query_padding(query_block):
    """What a head's rows are padded to a multiple of: along lists the last tile of a mask has all
    its rows.
    """
    return max(QUERY_PADDING.value, query_block)


@gluon.jit
def query_tiles(N_QUERIES, Q_TILE_SIZE: gl.constexpr, PADDING: gl.constexpr):
    """Query tiles of a head, those of its padding included."""
    return (N_QUERIES + PADDING - 1) // PADDING * (PADDING // Q_TILE_SIZE)


@gluon.jit
def walk_of_tile(tile_number, tiles, Q_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """(first query tile, steps) of a key tile's walk over the `tiles` query tiles of a head."""
    first_tile = tile_number * (KEY_TILE // Q_TILE_SIZE)
    if IS_CAUSAL:
        return first_tile, tiles - first_tile
    else:
        return first_tile % tiles, tiles


@gluon.jit
def query_of_step(step, first_tile, tiles, Q_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """The first query of a step of the walk."""
    tile = first_tile + step
    if not IS_CAUSAL:
        tile -= tiles * (tile >= tiles)
    return tile * Q_TILE_SIZE


@gluon.jit
def tiles_in_first_lap(number, query_block, query_blocks):
    """Of the first `number` key tiles, those that come to a block of queries before their walk
    wraps around the end.
    """
    return number // query_blocks * (query_block + 1) + min(number % query_blocks, query_block + 1)


@gluon.jit
def turn_of_tile(query_block, query_blocks, tile_number, num_tiles, IS_CAUSAL: gl.constexpr):
    """(whether a key tile comes to a block of KEY_TILE queries in its second lap, how many add to
    that lap's sums before it), where the order of additions is fixed.

    The second lap is what a walk without a mask does once it has wrapped around the end; it has
    sums of its own, and `convert` adds up both. Within a lap the order is that of programs, whose
    tiles are numbered from the last one down. So a program waits for programs with a lower index
    alone. These have started, as a GPU starts programs in the order of their indices: however few
    multiprocessors are free, the lowest program that has not ended can go on.

    Nor does a program wait where all start at once and keep pace. Its walk starts a block before
    that of the program ahead of it: so it comes to each block a step later in the first lap, and
    likewise in the second. Were both laps one sum, the first programs of a head would have to wait
    in their second lap for the last ones in their first.
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
    """Walks of a program: one a head of the group; along lists the partial tiles of all, then the
    full ones of all.
    """
    return PLAN.group * (2 if PLAN.query_block else 1)


@gluon.jit
def list_of_keys(
    tile_number, batch_head, member, N_KEYS, N_KV_HEADS, MASK_BATCHES, MASK_HEADS, GROUP, K_BLOCK
):
    """Number of the list that a tile of keys walks for a head of its group; a mask of one batch or
    head serves all.
    """
    batch, head = batch_head // N_KV_HEADS, batch_head % N_KV_HEADS * GROUP + member
    columns = (N_KEYS + K_BLOCK - 1) // K_BLOCK
    return (
        batch % MASK_BATCHES * MASK_HEADS + head % MASK_HEADS
    ) * columns + tile_number * KEY_TILE // K_BLOCK


@gluon.jit
def _walk_of_list(number, tile_number, batch_head, problem, walked, PLAN: gl.constexpr):
    member, is_partial = number % PLAN.group, number < PLAN.group
    column = list_of_keys(
        tile_number, batch_head, member, problem.N_KEYS, problem.N_KV_HEADS, walked.MASK_BATCHES, walked.MASK_HEADS,
        PLAN.group, PLAN.key_block,
    )  # fmt: skip
    tiles = gl.load(walked.num_partial + column, mask=is_partial, other=0)
    tiles += gl.load(walked.num_full + column, mask=is_partial == 0, other=0)
    return Walk(
        member, 0, tiles * (PLAN.query_block // PLAN.query_tile), column.to(gl.int64), is_partial
    )


@gluon.jit
def own_tile(problem, walked, PLAN: gl.constexpr):
    """The tile of this program; if ordered from the last one down, see `turn_of_tile`."""
    if PLAN.packed:
        slots = slots_of_documents(problem.N_KEYS, walked.N_DOCUMENTS, KEY_TILE)
        slot, batch_head = tile_of_program(
            gl.program_id(0), gl.num_programs(0), slots, problem.HEADS_TOGETHER
        )
        document, tile_number = document_of_slot(
            slot, walked.cu_seqlens_k, walked.N_DOCUMENTS, problem.N_KEYS, KEY_TILE
        )
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
        else:  # one head after the other, and of some heads programs for some of the tiles
            tile_number, batch_head = program % num_tiles, program // num_tiles
        if PLAN.ordered:
            tile_number = num_tiles - 1 - tile_number
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
    """The `number`-th walk of a tile. Where no query sees its keys, the last one has the steps that
    a program at least runs, whose queries, keys and values are read from behind the end, as zeros.
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
    """The first row of dQ's accumulator for the queries that a head of the group has in the tile's
    sequence.
    """
    head = tile.batch_head * PLAN.group + member
    if PLAN.packed:
        return head * tile.head_rows + tile.first_row
    else:  # in two products, or the causal kernels at head dim 128 spill in their loops
        return head * tile.query_tiles * PLAN.query_tile


@gluon.constexpr_function
def least_steps(PLAN):
    """Steps of a walk without which no program runs: the masked ones of a causal tile."""
    return KEY_TILE.value // PLAN.query_tile if PLAN.is_causal else 1


@gluon.jit
def place_of_step(step, walk, tile, problem, walked, PLAN: gl.constexpr):
    """(first query of a step of a walk, number of its tile of bits if that is partial)."""
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
