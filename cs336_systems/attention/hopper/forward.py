"""The forward for Hopper: one warp copies, one to three warp groups compute.

A program computes a tile of queries of one head, 64 rows for each of its computing warp groups
(consumers), and may go on to further tiles. Key tiles are walked from the last visible one to the
first, so only the first ones need a mask.

                  step 0        step 1          step 2         ...   step n
  copier          Q, K(0)       K(1), V(0)      K(2), V(1)     ...   V(n-1)            n key tiles in n + 1 steps
  consumer        S = Q K(0)'   S = Q K(1)'     S = Q K(2)'    ...                      or skips K(0), see below
                                O += P(0) V(0)  O += P(1) V(1) ...   O += P(n-1) V(n-1)
                  P(0)          P(1)            P(2)           ...   O / l, L

One slot of the ring holds what one step multiplies, K(j) and V(j-1): one barrier to wait for and
one to release. Steps are counted over all tiles of a program, and step i uses slot i mod the number
of slots.
Each slot has `full`, on which the copies' bytes arrive, and `empty`, on which every consumer
arrives; each consumer's 64 rows of Q have such a pair too. `tests/hopper_protocol.py` has the
protocol as a model.

The schedules of large grids, by columns of a head tile:
  64   three consumers, 192 x 128. A step waits for both products, then takes the softmax, while the other consumers'
       products run. Exponentials take as long as products here, and a third consumer hides more of
       them. Nothing makes them take turns but that the tensor cores serve one at a time:
         consumer 0   products   softmax               products   softmax
         consumer 1              products   softmax               products
         consumer 2                         products   softmax
  128  two consumers, 128 x 128, 240 registers a thread, Q among them. A step waits for S alone, and
  P(j-1) V(j-1) runs
       under the softmax. O is rescaled only when a row's maximum has grown by more than 2^8, and
       only then do the four threads that share a row speak to each other: each sums its own share
       until the tile ends.
         tensor cores   S(1)   P(0) V(0)         S(2)   P(1) V(1)
         consumer              softmax of S(1)          softmax of S(2)
       At head dims from 65 to 96 the scores leave out the last 32 columns, which are zeros
       (`columns.py`).
  256  the same, 128 x 64, but for Q, for which O leaves no registers: it stays in shared memory,
  which has no room for
       O beside it. So O leaves from Q's, and the next tile's Q comes after it.
Their tiles are long ones, and few calls of short sequences have as many as the GPU has
multiprocessors. So there are schedules of one consumer, 64 rows, with the same steps; at 64 columns
two programs share a multiprocessor, and each covers the other as consumers do.
`schedule.plan_forward` estimates which ends first.

Under a causal mask a tile of more rows than a key tile has keys ends with keys that its first 64
rows, at 192 rows of every other tile its first 128, do not see: those consumers skip the first
scores, at 192 x 128 3 to 4 % of the time at 4096 tokens.

At 64 columns O of a row that sees one key is that key's value, as P is 1 then: the tiles that the
diagonal or the end cuts, in which rows may see few keys, take `_exact_softmax`. At 128 and more P
of the largest score is 1 but for the rounding of the scaled maximum, which is 2^-8 where scores are
1e5.

Tiles of queries end where the queries end; rows to spare are in the first tile, which is the
shortest causal one. The order of tiles is `schedule.plan_forward`'s: one program a tile, or
programs that stay and take tiles in pairs or from a counter, whose copier starts on the next tile
as soon as a slot is free.

Walks that would leave multiprocessors idle are divided: without a mask those of the last round of
tiles, as it would take as long as any, or all of a small call, causal ones too. Each part leaves
the state of its online softmax, and `flash_merge_kernel` of the Triton forward that splits keys
ends what they began.

Four kernels differ in their walk alone (`walk.py`), by what is `walked`: dense (None), `Parts` of
dense walks, `Lists` of a `BlockMask`, packed `Documents`. Of a mask's partial tiles the copier
brings the bits beside the keys, and `_hide_keys` applies them; a dead tile is never read, and a
tile without a key takes one step of zeros.

Sources: FlashAttention-3 (Shah et al. 2024) for warp specialisation and overlap, FlashAttention-4
for rescaling lazily.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.attention.hopper.builtins import (
    along_rows,
    by_threads,
    hide_columns,
    keep_attended,
    load_words,
    mma_layout,
    raise_maxima,
    rescale_rows,
    warp_fence,
)
from cs336_systems.attention.hopper.columns import in_parts, load_parts, over_columns
from cs336_systems.attention.hopper.descriptors import (
    document_descriptor,
    readable,
    tile_descriptor,
    words_descriptor,
)
from cs336_systems.attention.hopper.schedule import (
    CONSUMER_ROWS,
    ForwardPlan,
    plan_forward,
    plan_packed_forward,
)
from cs336_systems.attention.hopper.walk import (
    KEYS_PER_WORD,
    ROWS,
    Documents,
    Lists,
    Parts,
    Problem,
    key_place,
    listed_tile,
    open_item,
    query_place,
    ring_slot,
    rows_of_consumer,
    sees_tile,
    tile_of_work,
    work_of_call,
)
from cs336_systems.attention.masks.tiles import BITS, TileLists
from cs336_systems.attention.tiles import seen_keys
from cs336_systems.attention.triton.launch import (
    empty,
    empty_like,
    empty_results,
    launch,
    log_launch,
    num_multiprocessors,
)
from cs336_systems.attention.triton.split import merge
from cs336_systems.attention.triton.steps import LN_2, LOG2_E, LOWEST
from cs336_systems.measure.stages import stage

COPIER_REGISTERS = gl.constexpr(24)  # the least that a warp can have
ITEM_SLOTS = gl.constexpr(2)
NUMBERS = ["N_QUERIES", "N_KEYS", "N_HEADS", "GROUP", "BATCH_HEADS", "HEADS_TOGETHER"]


@gluon.constexpr_function
def _item_layout(num_warps):
    return gl.BlockedLayout([1], [32], [num_warps], [0])


class _Shared(NamedTuple):
    """What copier and consumers share: tiles in shared memory and the barriers that guard them."""

    Q_tiles: gl.shared_memory_descriptor  # (consumers, ROWS, D_TILE)
    O_tiles: gl.shared_memory_descriptor  # the same; of wide heads the same memory
    K_ring: gl.shared_memory_descriptor  # (slots, K_TILE_SIZE, D_TILE)
    V_ring: gl.shared_memory_descriptor  # the same
    q_full: gl.shared_memory_descriptor  # a barrier a consumer
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # a barrier a slot
    empty: gl.shared_memory_descriptor
    # (slots, consumers * ROWS, 4): bits of a partial tile of a mask
    words_ring: gl.shared_memory_descriptor
    # (ITEM_SLOTS, 1): the work items that the copier has fetched
    items: gl.shared_memory_descriptor
    item_full: gl.shared_memory_descriptor  # a barrier a slot of them
    item_empty: gl.shared_memory_descriptor


@gluon.jit
def _copy_words(words, is_partial, OTHERS: gl.constexpr, shared, walked, slot):
    """Announce a slot's bytes, OTHERS of keys and values; the bits of a partial tile are copied
    with them.
    """
    WORDS: gl.constexpr = walked.words.block_type.nbytes
    mbarrier.expect(shared.full.index(slot), OTHERS + WORDS, pred=is_partial)
    mbarrier.expect(shared.full.index(slot), OTHERS, pred=is_partial == 0)
    tma.async_copy_global_to_shared(
        walked.words, words, shared.full.index(slot), shared.words_ring.index(slot), pred=is_partial
    )


@gluon.jit
def _copy_tiles(Q_desc, K_desc, V_desc, counter_ptr, shared, problem, walked, PLAN: gl.constexpr):
    """The copier: fill the ring as the consumers empty it, and if PLAN.dynamic fetch the program's
    next work item.
    """
    CONSUMERS: gl.constexpr = PLAN.consumers
    K_TILE_SIZE: gl.constexpr = PLAN.key_tile
    SLOTS: gl.constexpr = PLAN.slots
    IS_LISTED: gl.constexpr = PLAN.key_block > 0
    num_tiles, num_items = work_of_call(problem, walked, PLAN)
    step = 0
    tiles_done = 0
    items_done = 0
    item = gl.program_id(0)
    while item < num_items:
        next_item = item + gl.num_programs(0)
        if PLAN.dynamic:  # asked for early, as the answer takes its time
            next_item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
        num_sides, sequence = open_item(item, num_tiles, problem, walked, PLAN)
        for side in range(num_sides):
            tile = tile_of_work(item, side, num_tiles, sequence, problem, walked, PLAN)
            batch = tile.batch_head // problem.N_HEADS
            head = tile.batch_head % problem.N_HEADS
            kv_head = head // problem.GROUP

            # step 0: K(0), and Q while it is on its way
            if IS_LISTED:
                first_key, words = listed_tile(0, tile, problem, walked, PLAN, True)
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.empty.index(slot), phase ^ 1)
            if IS_LISTED:
                _copy_words(words, tile.masked > 0, K_desc.block_type.nbytes, shared, walked, slot)
            else:  # a tile that nobody sees is read from behind the end, as zeros
                mbarrier.expect(shared.full.index(slot), K_desc.block_type.nbytes)
                first_key = tile.first_key + (tile.live - 1) * K_TILE_SIZE
                first_key = gl.where(tile.key_tiles > tile.live, sequence.num_keys, first_key)
            tma.async_copy_global_to_shared(
                K_desc, key_place(kv_head, first_key, batch, sequence, PLAN),
                shared.full.index(slot), shared.K_ring.index(slot),
            )  # fmt: skip
            for consumer in gl.static_range(CONSUMERS):
                first_row = rows_of_consumer(tile.first_query, consumer, sequence.num_queries)
                mbarrier.wait(shared.q_empty.index(consumer), (tiles_done & 1) ^ 1)
                mbarrier.expect(shared.q_full.index(consumer), Q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    Q_desc, query_place(head, first_row, batch, sequence, PLAN),
                    shared.q_full.index(consumer), shared.Q_tiles.index(consumer),
                )  # fmt: skip
            step += 1

            # steps 1 to n - 1: K(j) and V(j - 1)
            for j in range(1, tile.key_tiles):
                previous_key = first_key
                if IS_LISTED:  # loaded while the slot is in use
                    first_key, words = listed_tile(j, tile, problem, walked, PLAN)
                slot, phase = ring_slot(step, SLOTS)
                mbarrier.wait(shared.empty.index(slot), phase ^ 1)
                if IS_LISTED:
                    both: gl.constexpr = K_desc.block_type.nbytes + V_desc.block_type.nbytes
                    _copy_words(words, j < tile.masked, both, shared, walked, slot)
                else:
                    mbarrier.expect(
                        shared.full.index(slot), K_desc.block_type.nbytes + V_desc.block_type.nbytes
                    )
                    first_key = tile.first_key + (tile.key_tiles - 1 - j) * K_TILE_SIZE
                tma.async_copy_global_to_shared(
                    K_desc, key_place(kv_head, first_key, batch, sequence, PLAN),
                    shared.full.index(slot), shared.K_ring.index(slot),
                )  # fmt: skip
                tma.async_copy_global_to_shared(
                    V_desc, key_place(kv_head, previous_key, batch, sequence, PLAN),
                    shared.full.index(slot), shared.V_ring.index(slot),
                )  # fmt: skip
                step += 1

            # step n: V(n - 1), the sequence's first
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.empty.index(slot), phase ^ 1)
            mbarrier.expect(shared.full.index(slot), V_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                V_desc, key_place(kv_head, first_key, batch, sequence, PLAN),
                shared.full.index(slot), shared.V_ring.index(slot),
            )  # fmt: skip
            step += 1
            tiles_done += 1
        if PLAN.dynamic:
            slot, phase = ring_slot(items_done, ITEM_SLOTS)
            mbarrier.wait(shared.item_empty.index(slot), phase ^ 1)
            shared.items.index(slot).store(gl.full([1], next_item, gl.int32, _item_layout(1)))
            mbarrier.arrive(shared.item_full.index(slot), count=1)
            items_done += 1
        item = next_item


@gluon.jit
def _words_of(consumer: gl.constexpr, shared, slot, zero, PLAN: gl.constexpr):
    """The bits of a consumer's rows of a partial tile; without lists nothing."""
    if PLAN.key_block:
        own = shared.words_ring.index(slot).slice(consumer * ROWS, ROWS, dim=0)
        return load_words(own, zero)
    else:
        return 0


@gluon.jit
def _hide_keys(S, last_key, first_key, words, PLAN: gl.constexpr):
    """Scores of the keys from `first_key` on, -inf where the bit is 0, or past the last visible
    key: one for each row, or one for all.
    """
    if PLAN.key_block:
        return keep_attended(S, words)
    elif PLAN.is_causal or PLAN.split:
        return hide_columns(S, last_key - first_key)
    else:
        columns = gl.arange(0, S.shape[1], gl.SliceLayout(0, S.type.layout))[None, :]
        return gl.where(columns <= last_key - first_key, S, float("-inf"))


@gluon.jit
def _exact_softmax(S, m, l, scale_log2):
    """Take raw scores into the running maximum m, raw too, and sum l; also the factor for what came
    before.

    P of a row's largest score is 1, and that of another as exact as the difference of the two
    scores.
    """
    m_new = gl.maximum(m, gl.max(S, axis=1))
    P = gl.exp2((S - m_new[:, None]) * scale_log2)
    factor = gl.exp2((m - m_new) * scale_log2)
    return P, factor, m_new, l * factor + gl.sum(P, axis=1)


@gluon.jit
def _in_base_2(m, scale_log2):
    """A raw maximum as `_softmax` takes it: scaled, and what the rounding of that has left out."""
    scaled = m * scale_log2
    rest = gl.fma(m, gl.full(m.shape, scale_log2, gl.float32, m.type.layout), -scaled)
    return scaled, gl.where(m == LOWEST, 0.0, rest)


@gluon.jit
def _softmax(S, m, rest, l, scale_log2):
    """As `_exact_softmax` at one instruction less a score; m is in base 2, and what came before
    relative to m + rest.

    A scaled score minus the scaled maximum is one multiply-add, whose product is not rounded though
    the maximum's was: P of the largest score is near 1 and not 1, by 2^-8 where scores are 1e5, and
    bfloat16 rounds it to something that l has not summed. Among many keys that is one rounding of
    many; rows with few keys have them in the tiles that the diagonal or the end cuts, and those
    take the exact form.
    """
    m_new = gl.maximum(m, gl.max(S, axis=1) * scale_log2)
    P = gl.exp2(S * scale_log2 - m_new[:, None])
    factor = gl.exp2(m - m_new + rest)
    return P, factor, m_new, l * factor + gl.sum(P, axis=1)


@gluon.jit
def _lazy_softmax(S, m, l, scale_log2):
    """As `_softmax` without its `rest`, and m stays where it is until a score exceeds it by more
    than LAG.

    The factor is then 1 in almost every step. m, l and the factor are (ROWS, 4), a number for each
    of the four threads that share a row: l is what a thread has summed itself, so that nothing is
    passed between threads while no maximum rises.
    """
    scores = by_threads(S)
    m_new = raise_maxima(gl.max(gl.max(scores, axis=3), axis=1) * scale_log2, m)
    P = gl.exp2(scores * scale_log2 - along_rows(m_new, scores))
    factor = gl.exp2(m - m_new)
    l = l * factor + gl.sum(gl.sum(P, axis=3), axis=1)
    return gl.convert_layout(gl.reshape(P, S.shape), S.type.layout), factor, m_new, l


@gluon.jit
def _issue(Q, P, O, shared, slot, phase, COLUMNS: gl.constexpr):
    """Start both products of a step as soon as its slot is full: the scores, and O with the last
    step's P.
    """
    mbarrier.wait(shared.full.index(slot), phase)
    S = over_columns(Q, shared.K_ring.index(slot), COLUMNS)
    O = warpgroup_mma(P, shared.V_ring.index(slot), O, is_async=True)
    return S, O


@gluon.jit
def _first_step(
    Q, m, l, tile, last_key, first_key, zero, shared, problem, slot,
    consumer: gl.constexpr, P_LAYOUT: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """P of a tile's first scores, for the next step to multiply by the values; m (raw, or lazy in
    base 2) and l.
    """
    words = _words_of(consumer, shared, slot, zero, PLAN)
    S = warpgroup_mma_wait(0, [over_columns(Q, shared.K_ring.index(slot), PLAN.columns)])
    mbarrier.arrive(shared.empty.index(slot), count=1)
    if tile.masked > 0:
        S = _hide_keys(S, last_key, first_key, words, PLAN)
    if PLAN.softmax_overlaps:
        scores, factor, m, l = _lazy_softmax(S, m, l, problem.scale_log2)
    else:
        scores, factor, m, l = _exact_softmax(S, m, l, problem.scale_log2)
    return gl.convert_layout(scores.to(shared.K_ring.dtype), P_LAYOUT), m, l


@gluon.jit
def _step(
    Q, P, O, m, rest, l, last_key, first_key, zero, shared, problem, step,
    consumer: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Both products of a step and the softmax of its scores.

    Overlapped: the softmax while the product with the last step's P runs. Otherwise behind both,
    while another consumer's or program's run; m is then raw if MASKED, else in base 2.
    """
    slot, phase = ring_slot(step, PLAN.slots)
    S, O = _issue(Q, P, O, shared, slot, phase, PLAN.columns)
    if MASKED:
        words = _words_of(consumer, shared, slot, zero, PLAN)
    if PLAN.softmax_overlaps:
        S = warpgroup_mma_wait(1, [S])
        if MASKED:
            S = _hide_keys(S, last_key, first_key, words, PLAN)
        scores, factor, m, l = _lazy_softmax(S, m, l, problem.scale_log2)
        l = warp_fence(l)
        O = warpgroup_mma_wait(0, [O])
        mbarrier.arrive(shared.empty.index(slot), count=1)
        O = rescale_rows(O, factor)
    else:
        S, O = warpgroup_mma_wait(0, [S, O])
        mbarrier.arrive(shared.empty.index(slot), count=1)
        if MASKED:
            S = _hide_keys(S, last_key, first_key, words, PLAN)
            scores, factor, m, l = _exact_softmax(S, m, l, problem.scale_log2)
        else:
            scores, factor, m, l = _softmax(S, m, rest, l, problem.scale_log2)
        O = O * gl.convert_layout(factor, gl.SliceLayout(1, O.type.layout))[:, None]
    return gl.convert_layout(scores.to(P.dtype), P.type.layout), O, m, l


@gluon.jit
def _store_part(O, m, rest, l, first_row, tile, problem, walked, D_TILE: gl.constexpr):
    """Leave the online softmax's state at a part's end for `flash_merge_kernel`, where
    `split.parts_of` says.
    """
    factor = gl.exp2(rest)
    first = (tile.part * walked.NUM_ROWS).to(gl.int64) - walked.FIRST_ROW
    first += tile.batch_head.to(gl.int64) * problem.N_QUERIES + first_row
    m_states = walked.states + walked.NUM_PARTS.to(gl.int64) * walked.NUM_ROWS * D_TILE
    l_states = m_states + walked.NUM_PARTS.to(gl.int64) * walked.NUM_ROWS
    row = gl.arange(0, ROWS, m.type.layout)
    gl.store(m_states + first + row, m, mask=row < problem.N_QUERIES - first_row)
    gl.store(l_states + first + row, l * factor, mask=row < problem.N_QUERIES - first_row)
    LAYOUT: gl.constexpr = O.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, D_TILE, gl.SliceLayout(0, LAYOUT))[None, :]
    O = O * gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT))[:, None]
    gl.store(
        walked.states + first * D_TILE + (row * D_TILE + column),
        O,
        mask=row < problem.N_QUERIES - first_row,
    )


@gluon.jit
def _store_tile(
    O, L, inverse, first_row, rows, tile, sequence, O_desc, O_tile, L_ptr, problem, D_TILE: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Rows past the last query are cut off."""
    O = O * gl.convert_layout(inverse, gl.SliceLayout(1, O.type.layout))[:, None]
    tma.store_wait(0)  # the last tile's O has left shared memory
    O_tile.store(gl.reshape(O.to(O_desc.dtype), [ROWS, D_TILE]))
    fence_async_shared()
    batch, head = tile.batch_head // problem.N_HEADS, tile.batch_head % problem.N_HEADS
    tma.async_copy_shared_to_global(
        O_desc, query_place(head, first_row, batch, sequence, PLAN), O_tile
    )
    L_rows = L_ptr + tile.batch_head.to(gl.int64) * problem.N_QUERIES + sequence.first_row
    gl.store(L_rows + rows, L, mask=rows < sequence.num_queries)


@gluon.jit
def _attend(consumer: gl.constexpr, O_desc, L_ptr, shared, problem, walked, PLAN: gl.constexpr):
    """A consumer: rows [consumer * ROWS, (consumer + 1) * ROWS) of each tile of queries."""
    D_TILE: gl.constexpr = PLAN.head_tile
    IS_WIDE: gl.constexpr = D_TILE > 128  # Q is read from shared memory, and O leaves from there
    K_TILE_SIZE: gl.constexpr = PLAN.key_tile
    MASKED_TILES: gl.constexpr = PLAN.masked_tiles
    SLOTS: gl.constexpr = PLAN.slots
    IS_LISTED: gl.constexpr = PLAN.key_block > 0
    S_LAYOUT: gl.constexpr = mma_layout(K_TILE_SIZE)
    O_LAYOUT: gl.constexpr = mma_layout(D_TILE)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    num_tiles, num_items = work_of_call(problem, walked, PLAN)
    zero = gl.zeros([ROWS, K_TILE_SIZE], gl.float32, S_LAYOUT)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    THREAD_LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_threads(zero).type.layout))
    Q_tile = shared.Q_tiles.index(consumer)
    O_tile = shared.O_tiles.index(consumer)
    step = 0
    tiles_done = 0
    items_done = 0
    item = gl.program_id(0)
    while item < num_items:
        num_sides, sequence = open_item(item, num_tiles, problem, walked, PLAN)
        for side in range(num_sides):
            tile = tile_of_work(item, side, num_tiles, sequence, problem, walked, PLAN)
            first_row = rows_of_consumer(tile.first_query, consumer, sequence.num_queries)
            rows = first_row + gl.arange(0, ROWS, ROW_LAYOUT)
            last_key = sequence.num_keys - 1
            if PLAN.is_causal:
                last_key = gl.minimum(rows, last_key)
            elif PLAN.split:
                last_key = gl.full([ROWS], last_key, gl.int32, ROW_LAYOUT)
            if PLAN.softmax_overlaps:
                m = gl.full([ROWS, 4], LOWEST, gl.float32, THREAD_LAYOUT)
                l = gl.full([ROWS, 4], 0.0, gl.float32, THREAD_LAYOUT)
            else:
                m = gl.full([ROWS], LOWEST, gl.float32, ROW_LAYOUT)
                l = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
            rest = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
            O = gl.zeros([ROWS, D_TILE], gl.float32, O_LAYOUT)

            # step 0: the first scores
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.full.index(slot), phase)
            mbarrier.wait(shared.q_full.index(consumer), tiles_done & 1)
            Q = in_parts(Q_tile, PLAN.columns)
            if PLAN.softmax_overlaps and not IS_WIDE:
                Q = load_parts(Q, Q_LAYOUT)
            first_key = tile.first_key + (tile.key_tiles - 1) * K_TILE_SIZE
            if MASKED_TILES == 1:
                P, m, l = _first_step(
                    Q,
                    m,
                    l,
                    tile,
                    last_key,
                    first_key,
                    zero,
                    shared,
                    problem,
                    slot,
                    consumer,
                    P_LAYOUT,
                    PLAN,
                )
            else:  # more rows than a key tile has keys: the first consumers' may see none of these
                P = gl.zeros([ROWS, K_TILE_SIZE], O_desc.dtype, P_LAYOUT)
                if sees_tile(first_row, first_key):
                    P, m, l = _first_step(
                        Q,
                        m,
                        l,
                        tile,
                        last_key,
                        first_key,
                        zero,
                        shared,
                        problem,
                        slot,
                        consumer,
                        P_LAYOUT,
                        PLAN,
                    )
                else:
                    mbarrier.arrive(shared.empty.index(slot), count=1)
            step += 1

            # steps 1 to n - 1, first those with hidden keys
            if IS_LISTED:
                for _ in range(1, tile.masked):
                    P, O, m, l = _step(
                        Q, P, O, m, rest, l, 0, 0, zero, shared, problem, step, consumer, PLAN, True
                    )
                    step += 1
            else:
                for j in gl.static_range(1, MASKED_TILES):
                    first_key = (tile.key_tiles - 1 - j) * K_TILE_SIZE
                    P, O, m, l = _step(
                        Q,
                        P,
                        O,
                        m,
                        rest,
                        l,
                        last_key,
                        first_key,
                        zero,
                        shared,
                        problem,
                        step,
                        consumer,
                        PLAN,
                        True,
                    )
                    step += 1
            if not PLAN.softmax_overlaps:
                m, rest = _in_base_2(m, problem.scale_log2)
            for _ in range(max(tile.masked, 1), tile.key_tiles):
                P, O, m, l = _step(
                    Q, P, O, m, rest, l, 0, 0, zero, shared, problem, step, consumer, PLAN, False
                )
                rest = gl.zeros_like(rest)
                step += 1
            if not IS_WIDE:
                mbarrier.arrive(shared.q_empty.index(consumer), count=1)
            tiles_done += 1

            # step n: the last product, under which the row sums are inverted
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.full.index(slot), phase)
            O_pending = warpgroup_mma(P, shared.V_ring.index(slot), O, is_async=True)
            if PLAN.softmax_overlaps:
                m = gl.convert_layout(gl.max(m, axis=1), ROW_LAYOUT)
                l = gl.convert_layout(gl.sum(l, axis=1), ROW_LAYOUT)
            L = (m + (rest + gl.log2(l))) * LN_2
            inverse = 1.0 / l
            if IS_LISTED or PLAN.packed:  # a row without a key
                inverse = gl.where(l > 0, inverse, 0.0)
            O = warpgroup_mma_wait(0, [O_pending])
            mbarrier.arrive(shared.empty.index(slot), count=1)
            step += 1
            stored = (first_row, rows, tile, sequence, O_desc, O_tile, L_ptr, problem)
            if PLAN.split:
                if tile.part >= 0:
                    _store_part(O, m, rest, l, first_row, tile, problem, walked, D_TILE)
                else:
                    _store_tile(O, L, inverse, *stored, D_TILE, PLAN)
            else:
                _store_tile(O, L, inverse, *stored, D_TILE, PLAN)
            if IS_WIDE:
                tma.store_wait(0)
                mbarrier.arrive(shared.q_empty.index(consumer), count=1)
        if PLAN.dynamic:
            slot, phase = ring_slot(items_done, ITEM_SLOTS)
            mbarrier.wait(shared.item_full.index(slot), phase)
            item = gl.sum(shared.items.index(slot).load(_item_layout(4)), axis=0)
            mbarrier.arrive(shared.item_empty.index(slot), count=1)
            items_done += 1
        else:
            item += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit
def _run(Q_desc, K_desc, V_desc, O_desc, L_ptr, counter_ptr, problem, walked, PLAN: gl.constexpr):
    """Share out shared memory and registers, and start the copier and the consumers."""
    CONSUMERS: gl.constexpr = PLAN.consumers
    SLOTS: gl.constexpr = PLAN.slots
    K_TILE_SIZE: gl.constexpr = PLAN.key_tile
    D_TILE: gl.constexpr = PLAN.head_tile
    IS_WIDE: gl.constexpr = D_TILE > 128
    dtype: gl.constexpr = Q_desc.dtype
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D_TILE], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    if PLAN.key_block:
        words_ring = gl.allocate_shared_memory(
            gl.int32, [SLOTS, CONSUMERS * ROWS, K_TILE_SIZE // KEYS_PER_WORD], walked.words.layout
        )
    else:
        words_ring = None
    items, item_full, item_empty = None, None, None
    if PLAN.dynamic:
        items = gl.allocate_shared_memory(
            gl.int32, [ITEM_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        item_full = gl.allocate_shared_memory(gl.int64, [ITEM_SLOTS, 1], BARRIER)
        item_empty = gl.allocate_shared_memory(gl.int64, [ITEM_SLOTS, 1], BARRIER)
        for slot in gl.static_range(ITEM_SLOTS):
            mbarrier.init(item_full.index(slot), count=1)
            mbarrier.init(item_empty.index(slot), count=CONSUMERS)
    Q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D_TILE], TILE_LAYOUT)
    if not IS_WIDE:
        O_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D_TILE], TILE_LAYOUT)
    else:
        O_tiles = Q_tiles
    shared = _Shared(
        Q_tiles,
        O_tiles,
        gl.allocate_shared_memory(dtype, [SLOTS, K_TILE_SIZE, D_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(dtype, [SLOTS, K_TILE_SIZE, D_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        words_ring,
        items,
        item_full,
        item_empty,
    )
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(shared.q_full.index(consumer), count=1)
        mbarrier.init(shared.q_empty.index(consumer), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(shared.full.index(slot), count=1)
        mbarrier.init(shared.empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_attend, (0, O_desc, L_ptr, shared, problem, walked, PLAN)),
            (_copy_tiles, (Q_desc, K_desc, V_desc, counter_ptr, shared, problem, walked, PLAN)),
        ], [1], [COPIER_REGISTERS])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_attend, (0, O_desc, L_ptr, shared, problem, walked, PLAN)),
            (_attend, (1, O_desc, L_ptr, shared, problem, walked, PLAN)),
            (_copy_tiles, (Q_desc, K_desc, V_desc, counter_ptr, shared, problem, walked, PLAN)),
        ], [4, 1], [PLAN.registers, COPIER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (0, O_desc, L_ptr, shared, problem, walked, PLAN)),
            (_attend, (1, O_desc, L_ptr, shared, problem, walked, PLAN)),
            (_attend, (2, O_desc, L_ptr, shared, problem, walked, PLAN)),
            (_copy_tiles, (Q_desc, K_desc, V_desc, counter_ptr, shared, problem, walked, PLAN)),
        ], [4, 4, 1], [PLAN.registers, PLAN.registers, COPIER_REGISTERS])  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def hopper_forward_kernel(
    Q_desc, K_desc, V_desc, O_desc, L_ptr, counter_ptr,
    N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2,
    PLAN: gl.constexpr,
):  # fmt: skip
    """O (batch, heads, queries, D) and L (batch, heads, queries), both contiguous; PLAN:
    `schedule.KernelPlan`.
    """
    problem = Problem(N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2)
    _run(Q_desc, K_desc, V_desc, O_desc, L_ptr, counter_ptr, problem, None, PLAN)


@gluon.jit(do_not_specialize=[*NUMBERS, "WHOLE", "SHARE", "NUM_PARTS", "FIRST_ROW", "NUM_ROWS"])
def hopper_split_forward_kernel(
    Q_desc, K_desc, V_desc, O_desc, L_ptr, counter_ptr, states_ptr,
    N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2,
    WHOLE, SHARE, NUM_PARTS, FIRST_ROW, NUM_ROWS,
    PLAN: gl.constexpr,
):  # fmt: skip
    """The same, where walks are divided among programs; what parts have come to is in `states_ptr`
    (`walk.Parts`).
    """
    problem = Problem(N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2)
    walked = Parts(states_ptr, WHOLE, SHARE, NUM_PARTS, FIRST_ROW, NUM_ROWS)
    _run(Q_desc, K_desc, V_desc, O_desc, L_ptr, counter_ptr, problem, walked, PLAN)


@gluon.jit(
    do_not_specialize=[*NUMBERS, "MASK_BATCHES", "MASK_HEADS", "WIDTH", "FULL_WIDTH", "WORD_ROWS"]
)
def hopper_listed_forward_kernel(
    Q_desc, K_desc, V_desc, O_desc, L_ptr, counter_ptr,
    num_partial_ptr, partial_ptr, patterns_ptr, num_full_ptr, full_ptr, words_desc,
    N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2,
    MASK_BATCHES, MASK_HEADS, WIDTH, FULL_WIDTH, WORD_ROWS,
    PLAN: gl.constexpr,
):  # fmt: skip
    """The same, where the key tiles of a tile of queries stand in the lists of a `BlockMask`."""
    problem = Problem(N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2)
    walked = Lists(
        num_partial_ptr, partial_ptr, patterns_ptr, num_full_ptr, full_ptr, words_desc,
        MASK_BATCHES, MASK_HEADS, WIDTH, FULL_WIDTH, WORD_ROWS,
    )  # fmt: skip
    _run(Q_desc, K_desc, V_desc, O_desc, L_ptr, counter_ptr, problem, walked, PLAN)


@gluon.jit(do_not_specialize=[*NUMBERS, "N_DOCUMENTS"])
def hopper_packed_forward_kernel(
    Q_desc, K_desc, V_desc, O_desc, L_ptr, counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2, N_DOCUMENTS,
    PLAN: gl.constexpr,
):  # fmt: skip
    """O (queries, heads, D) and L (heads, queries) of packed documents."""
    problem = Problem(N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2)
    documents = Documents(cu_seqlens_q_ptr, cu_seqlens_k_ptr, N_DOCUMENTS)
    _run(Q_desc, K_desc, V_desc, O_desc, L_ptr, counter_ptr, problem, documents, PLAN)


@triton.jit
def hopper_counter_kernel(counter_ptr):
    tl.store(counter_ptr, 0)


def _counter(plan: ForwardPlan, otherwise: Tensor) -> Tensor:
    """A zero, from which a dynamic order counts; others read none, and anything will do."""
    if plan.order != "dynamic":
        return otherwise
    counter = empty((1,), torch.int32, otherwise.device)
    launch(hopper_counter_kernel, (1,), (counter,), (), {"num_warps": 1})
    return counter


def hopper_forward(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys head_dim"],
    is_causal: bool,
    scale: float,
    config: str = "",
    lists: TileLists | None = None,
) -> tuple[Float[Tensor, "batch heads queries head_dim"], Float[Tensor, "batch heads queries"]]:
    """Contiguous O in q's dtype and the log-sum-exp in float32, natural log.

    Inputs are validated, non-empty, of 16 bits, with a head_dim up to 256, and on the current
    device, of sm_90. `config` may name a schedule and an order of tiles (`schedule.plan_forward`);
    other kernels' configurations in it are left alone. A row's last bits may depend on the schedule
    and on the parts of its walk, and so on how many heads a call has and on the GPU. Parts take up
    to 34 MiB meanwhile.
    `lists`, without `is_causal`, are those of a `BlockMask` whose tiles hold whole tiles of the
    kernel's.
    """
    head_dim = q.shape[-1]
    q, k, v = readable(q), readable(k), readable(v)
    batch, heads, num_queries, width = q.shape
    num_keys, group = k.shape[2], heads // k.shape[1]
    plan = plan_forward(
        head_dim=width, is_causal=is_causal, num_queries=num_queries, num_keys=num_keys, batch_heads=batch * heads,
        group=group, num_multiprocessors=num_multiprocessors(q.device), config=config,
        block_size=None if lists is None else lists.block_size,
    )  # fmt: skip
    schedule = plan.schedule
    output, lse = empty_results(q)
    operands = (
        (q, CONSUMER_ROWS),
        (k, schedule.key_tile),
        (v, schedule.key_tile),
        (output, CONSUMER_ROWS),
    )
    tensors: tuple[Any, ...] = (
        *(tile_descriptor(x, rows) for x, rows in operands),
        lse,
        _counter(plan, lse),
    )
    numbers: tuple[float, ...] = (
        num_queries, num_keys, heads, group, batch * heads, plan.heads_together, scale * LOG2_E.value
    )  # fmt: skip
    kernel = hopper_forward_kernel
    first_row = plan.first_divided_row
    num_rows = batch * heads * num_queries - first_row
    if plan.part_tiles:
        kernel = hopper_split_forward_kernel
        states = empty((plan.num_parts * num_rows * (width + 2),), torch.float32, q.device)
        tensors += (states,)
        numbers += (plan.whole, plan.part_tiles, plan.num_parts, first_row, num_rows)
    if lists is not None:
        kernel = hopper_listed_forward_kernel
        words = lists.token_bits.flatten(0, 1)
        tensors += (
            lists.kv_num_blocks, lists.kv_indices, lists.kv_tokens, lists.full_kv_num_blocks, lists.full_kv_indices,
            words_descriptor(words, schedule.query_tile, schedule.key_tile // BITS),
        )  # fmt: skip
        numbers += (
            *lists.kv_num_blocks.shape[:2], lists.kv_indices.shape[3], lists.full_kv_indices.shape[3], len(words)
        )  # fmt: skip
    log_launch(
        "forward" if lists is None else "listed_forward",
        schedule.name(plan.order),
        q,
        num_queries,
        num_keys,
    )
    with stage("forward"):
        launch(
            kernel, (plan.num_programs,), tensors, numbers,
            {"PLAN": plan.kernel_plan, **schedule.launch_options},
        )  # fmt: skip
        if plan.part_tiles:
            # of which a head makes no matter
            last_rows = (batch * heads, num_queries) if is_causal else (1, num_rows)
            num_keys = seen_keys(num_queries, num_keys, is_causal)
            merge(
                states,
                output,
                lse,
                last_rows,
                num_keys,
                plan.part_tiles * schedule.key_tile,
                is_causal,
            )
    return (output if width == head_dim else output[..., :head_dim].contiguous()), lse


def hopper_packed_forward(
    q: Float[Tensor, "total_queries heads head_dim"],
    k: Float[Tensor, "total_keys kv_heads head_dim"],
    v: Float[Tensor, "total_keys kv_heads head_dim"],
    cu_seqlens_q: Int[Tensor, " documents_plus_1"],
    cu_seqlens_k: Int[Tensor, " documents_plus_1"],
    max_seqlens: tuple[int, int],
    is_causal: bool,
    scale: float,
    config: str = "",
) -> tuple[Float[Tensor, "total_queries heads head_dim"], Float[Tensor, "heads total_queries"]]:
    """`hopper_forward` of each document's queries to its keys; by the longest lengths tiles are
    chosen.
    """
    head_dim = q.shape[-1]
    q, k, v = readable(q), readable(k), readable(v)
    (num_queries, heads, width), num_keys, group = q.shape, k.shape[0], q.shape[1] // k.shape[1]
    documents = len(cu_seqlens_q) - 1
    plan = plan_packed_forward(
        head_dim=width, is_causal=is_causal, num_queries=num_queries, num_keys=num_keys, heads=heads, group=group,
        documents=documents, max_seqlens=max_seqlens, num_multiprocessors=num_multiprocessors(q.device),
        config=config,
    )  # fmt: skip
    schedule = plan.schedule
    output, lse = empty_like(q), empty((heads, num_queries), torch.float32, q.device)
    operands = (
        (q, CONSUMER_ROWS),
        (k, schedule.key_tile),
        (v, schedule.key_tile),
        (output, CONSUMER_ROWS),
    )
    log_launch("packed_forward", schedule.name(plan.order), q, *max_seqlens)
    with stage("forward"):
        launch(
            hopper_packed_forward_kernel, (plan.num_programs,),
            (
                *(document_descriptor(x, rows) for x, rows in operands), lse, _counter(plan, lse), cu_seqlens_q,
                cu_seqlens_k,
            ),
            (num_queries, num_keys, heads, group, heads, plan.heads_together, scale * LOG2_E.value, documents),
            {"PLAN": plan.kernel_plan, **schedule.launch_options},
        )  # fmt: skip
    return (output if width == head_dim else output[..., :head_dim].contiguous()), lse
