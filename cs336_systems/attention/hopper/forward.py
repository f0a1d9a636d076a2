"""The forward for Hopper: one warp copies, one to three warp groups compute.

A program computes a tile of queries of one head, 64 rows for each of its computing warp groups
(consumers), and may go on to further tiles. It walks key tiles from the last visible one to the
first, so only the first steps need a mask. A walk of n key tiles takes n + 1 steps, and a causal
consumer may skip the first scores (see below):

            step 0        step 1          step 2         ...   step n
  copier    Q, K(0)       K(1), V(0)      K(2), V(1)     ...   V(n-1)
  consumer  S = Q K(0)'   S = Q K(1)'     S = Q K(2)'    ...
                          O += P(0) V(0)  O += P(1) V(1) ...   O += P(n-1) V(n-1)
            P(0)          P(1)            P(2)           ...   O / l, L

One slot of the ring holds what one step multiplies, K(j) and V(j-1): one barrier to wait for and
one to release. Steps are counted over all tiles of a program, and step i uses slot i mod the number
of slots. Each slot has a barrier `full`, on which the copies' bytes arrive, and a barrier `empty`,
on which every consumer arrives. Each consumer's 64 rows of Q have such a pair too.
`tests/hopper_protocol.py` has the protocol as a model.

The schedules of large grids, by columns of a head tile:

  64   Three consumers, 192 x 128, 160 registers a thread. Without a mask a step waits for S alone,
       and P(j-1) V(j-1) runs under the softmax. O is rescaled only when a row's maximum has grown
       by more than 2^8, and only then do the four threads that share a row exchange numbers: each
       sums its own share until the tile ends.
         tensor cores   S(1)   P(0) V(0)         S(2)   P(1) V(1)
         consumer              softmax of S(1)          softmax of S(2)
       Under a mask a step waits for both products, then takes the softmax, while the other
       consumers' products run.
         consumer 0   products   softmax               products   softmax
         consumer 1              products   softmax               products
         consumer 2                         products   softmax
       Exponentials take as long as products here, and a third consumer hides more of them. Q stays
       in shared memory: in registers it would make the compiler spill. At head dims up to 32 both
       products have 32 columns (`columns.py`).
  128  Two consumers, 128 x 128, 240 registers a thread, which hold Q too, with the same steps.
       At head dims from 65 to 96 the scores leave out the last 32 columns, which are zeros
       (`columns.py`).
  256  Two consumers, 128 x 64, as at 128 columns, except that Q stays in shared memory, as O leaves
       no registers for it. Shared memory has no room for O beside Q, so O leaves from Q's memory,
       and the next tile's Q comes after it.

These tiles are long, and few calls of short sequences have as many tiles as the GPU has
multiprocessors. So there are also schedules of one consumer, 64 rows. At 128 columns and more
their steps are the same. At 64 columns two such programs share a multiprocessor, and each covers
the other: a step waits for both products, then takes the softmax.
`schedule.plan_forward` estimates which schedule ends first.

Under a causal mask, where a tile of queries has more rows than a key tile has keys, the last keys
of its walk come after all rows of some consumers: those of the first 64 rows or, at 192 rows in
every other tile, of the first 128. These consumers skip the first scores, which saves 3 to 4 % of
the time at 192 x 128 and 4096 tokens.

Where the softmax runs under a product, P of the largest score is 1 but for the rounding of the
scaled maximum, which is 2^-8 where scores are 1e5. Where a step waits for both products, the tiles
that the diagonal or the end cuts, in which rows may see few keys, take `_exact_softmax`: P of the
largest score is 1, and O of a row that sees one key is exactly that key's value.

Tiles of queries end where the queries end. Rows to spare are in the first tile, which is the
shortest causal one. `schedule.plan_forward` chooses the order of tiles: one program a tile, or
programs that stay and take tiles in pairs or from a counter, whose copier starts on the next tile
as soon as a slot is free.

Walks that would leave multiprocessors idle are divided: without a mask those of the last round of
tiles, which would take as long as any other round, or all walks of a small call; of causal calls
all walks, if they are few. Each part stores the state of its online softmax, and
`flash_merge_kernel` of the Triton forward that splits keys merges the parts.

Four kernels differ only in their walk (`walk.py`), which is chosen by the type of `walked`: dense
(None), `Parts` of dense walks, `Lists` of a `BlockMask`, `PackedDocuments`. For a mask's partial
tiles the copier brings the bits beside the keys, and `_hide_keys` applies them. A dead tile is
never read, and a tile without a key takes one step of zeros.

Sources: FlashAttention-3 (Shah et al. 2024) for warp specialisation and overlap, FlashAttention-4
for rescaling lazily.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
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

from cs336_systems.attention.call import Documents
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
from cs336_systems.attention.hopper.columns import (
    first_columns,
    in_parts,
    load_parts,
    over_columns,
)
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
    Lists,
    PackedDocuments,
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
    """Return the layout of a one-element tensor, a work item's number, over `num_warps` warps."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])


class _Shared(NamedTuple):
    """Tiles in shared memory that copier and consumers share, and the barriers that guard them."""

    Q_tiles: gl.shared_memory_descriptor  # (consumers, ROWS, D_TILE)
    O_tiles: gl.shared_memory_descriptor  # the same shape; for wide heads Q_tiles itself
    K_ring: gl.shared_memory_descriptor  # (slots, K_TILE_SIZE, D_TILE)
    V_ring: gl.shared_memory_descriptor  # the same
    q_full: gl.shared_memory_descriptor  # a barrier for each consumer
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # a barrier for each slot of the rings
    empty: gl.shared_memory_descriptor
    # (slots, consumers * ROWS, 4): bits of a partial tile of a mask
    words_ring: gl.shared_memory_descriptor
    # (ITEM_SLOTS, 1): the work items that the copier has fetched
    items: gl.shared_memory_descriptor
    item_full: gl.shared_memory_descriptor  # a barrier for each slot of `items`
    item_empty: gl.shared_memory_descriptor


@gluon.jit
def _copy_words(words, is_partial, OTHERS: gl.constexpr, shared, walked, slot):
    """Announce the bytes of a ring slot, and start the copy of a partial tile's mask bits into it.

    OTHERS is the number of bytes of the keys and values whose copies the caller starts. `words` are
    the coordinates of the bits in `walked.words`. Unless `is_partial`, no bits are copied.
    """
    WORDS: gl.constexpr = walked.words.block_type.nbytes
    mbarrier.expect(shared.full.index(slot), OTHERS + WORDS, pred=is_partial)
    mbarrier.expect(shared.full.index(slot), OTHERS, pred=is_partial == 0)
    tma.async_copy_global_to_shared(
        walked.words, words, shared.full.index(slot), shared.words_ring.index(slot), pred=is_partial
    )


@gluon.jit
def _copy_tiles(Q_desc, K_desc, V_desc, counter_ptr, shared, problem, walked, PLAN: gl.constexpr):
    """Run the copier warp: bring Q, K and V of the program's tiles as consumers empty the slots.

    If PLAN.dynamic, the copier also takes the program's next work item from the counter, and hands
    it to the consumers.
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
        if PLAN.dynamic:  # early, to hide the latency of the atomic
            next_item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)

        num_sides, sequence = open_item(item, num_tiles, problem, walked, PLAN)
        for side in range(num_sides):
            tile = tile_of_work(item, side, num_tiles, sequence, problem, walked, PLAN)
            batch = tile.batch_head // problem.N_HEADS
            head = tile.batch_head % problem.N_HEADS
            kv_head = head // problem.GROUP

            # step 0: K(0), and Q while K(0) is on its way
            if IS_LISTED:
                first_key, words = listed_tile(0, tile, problem, walked, PLAN, True)
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.empty.index(slot), phase ^ 1)
            if IS_LISTED:
                _copy_words(words, tile.masked > 0, K_desc.block_type.nbytes, shared, walked, slot)
            else:
                mbarrier.expect(shared.full.index(slot), K_desc.block_type.nbytes)
                first_key = tile.first_key + (tile.live - 1) * K_TILE_SIZE
                # a tile that no query sees is read from behind the end, as zeros
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

            # step n: V(n - 1), the sequence's first values
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.empty.index(slot), phase ^ 1)
            mbarrier.expect(shared.full.index(slot), V_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                V_desc, key_place(kv_head, first_key, batch, sequence, PLAN),
                shared.full.index(slot), shared.V_ring.index(slot),
            )  # fmt: skip
            step += 1
            tiles_done += 1

        if PLAN.dynamic:  # hand the next item to the consumers
            slot, phase = ring_slot(items_done, ITEM_SLOTS)
            mbarrier.wait(shared.item_empty.index(slot), phase ^ 1)
            shared.items.index(slot).store(gl.full([1], next_item, gl.int32, _item_layout(1)))
            mbarrier.arrive(shared.item_full.index(slot), count=1)
            items_done += 1
        item = next_item


@gluon.jit
def _words_of(consumer: gl.constexpr, shared, slot, zero, PLAN: gl.constexpr):
    """Return the mask bits of a consumer's 64 rows in a ring slot; 0 where the walk has no lists.

    `zero` (ROWS, K_TILE_SIZE) gives the layout of the scores that the bits are for.
    """
    if PLAN.key_block:
        own = shared.words_ring.index(slot).slice(consumer * ROWS, ROWS, dim=0)
        return load_words(own, zero)
    else:
        return 0


@gluon.jit
def _hide_keys(S, last_key, first_key, words, PLAN: gl.constexpr):
    """Return the scores S with -inf where the mask hides the key.

    S is (ROWS, K_TILE_SIZE), for the keys from `first_key` on. Along lists, a score is hidden where
    its bit in `words` is 0. Otherwise it is hidden where its key comes after `last_key`: a number
    for each row under a causal mask or in divided walks, one number for all rows else.
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
    """Return (P, factor, m, l) after a step of the online softmax whose running maxima are raw.

    S (ROWS, K_TILE_SIZE) are raw scores, m (ROWS,) their running maxima, raw too, and l (ROWS,) the
    running sums of P. What earlier steps have summed is to be multiplied by `factor` (ROWS,).

    P of a row's largest score is 1, and that of another score as exact as the difference of the two
    scores.
    """
    m_new = gl.maximum(m, gl.max(S, axis=1))
    P = gl.exp2((S - m_new[:, None]) * scale_log2)
    factor = gl.exp2((m - m_new) * scale_log2)
    return P, factor, m_new, l * factor + gl.sum(P, axis=1)


@gluon.jit
def _in_base_2(m, scale_log2):
    """Return raw maxima m in base 2, m · scale_log2 rounded, and what the rounding has left out.

    `_softmax` takes both. Of a row that has seen no key, whose m is LOWEST, the rest is 0.
    """
    scaled = m * scale_log2
    rest = gl.fma(m, gl.full(m.shape, scale_log2, gl.float32, m.type.layout), -scaled)
    return scaled, gl.where(m == LOWEST, 0.0, rest)


@gluon.jit
def _softmax(S, m, rest, l, scale_log2):
    """Return (P, factor, m, l) as `_exact_softmax` does, with one instruction less for each score.

    m is in base 2, and what came before is relative to m + rest.

    A scaled score minus the scaled maximum is one multiply-add, whose product is not rounded though
    the maximum's was: P of the largest score is near 1 and not 1, by 2^-8 where scores are 1e5, and
    bfloat16 rounds it to something that l has not summed. Among many keys that is one rounding of
    many. Rows with few keys have them in the tiles that the diagonal or the end cuts, and those
    take the exact form.
    """
    m_new = gl.maximum(m, gl.max(S, axis=1) * scale_log2)
    P = gl.exp2(S * scale_log2 - m_new[:, None])
    factor = gl.exp2(m - m_new + rest)
    return P, factor, m_new, l * factor + gl.sum(P, axis=1)


@gluon.jit
def _lazy_softmax(S, m, l, scale_log2):
    """Return (P, factor, m, l) as `_softmax` does, raising m only where a score exceeds it by LAG.

    The factor is then 1 in almost every step. m (in base 2), l and the factor are (ROWS, 4), a
    number for each of the four threads that share a row: l is what a thread has summed itself, so
    threads exchange nothing while no maximum rises. m is in base 2 from the first step on, so
    there is no `rest`.
    """
    scores = by_threads(S)  # (ROWS, K_TILE_SIZE / 8, 4, 2)
    m_new = raise_maxima(gl.max(gl.max(scores, axis=3), axis=1) * scale_log2, m)
    P = gl.exp2(scores * scale_log2 - along_rows(m_new, scores))
    factor = gl.exp2(m - m_new)
    l = l * factor + gl.sum(gl.sum(P, axis=3), axis=1)
    return gl.convert_layout(gl.reshape(P, S.shape), S.type.layout), factor, m_new, l


@gluon.jit
def _issue(Q, P, O, shared, slot, phase, COLUMNS: gl.constexpr):
    """Wait until a step's slot is full, then return S = Q Kᵀ and O + P V, both in flight.

    P is that of the step before, as the slot holds the values of the key tile before.
    """
    mbarrier.wait(shared.full.index(slot), phase)
    S = over_columns(Q, shared.K_ring.index(slot), COLUMNS)
    V = first_columns(shared.V_ring.index(slot), O.shape[1])
    O = warpgroup_mma(P, V, O, is_async=True)
    return S, O


@gluon.jit
def _first_step(
    Q, m, l, tile, last_key, first_key, zero, shared, problem, slot,
    consumer: gl.constexpr, P_LAYOUT: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Return (P, m, l) of step 0, which has scores but no product with values.

    The next step multiplies P by the values. m is raw, or in base 2 if PLAN.softmax_overlaps.
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
    """Return (P, O, m, l) after one step: both products, and the softmax of the step's scores.

    If PLAN.softmax_overlaps, the softmax runs while the product with the last step's P does.
    Otherwise it comes after both products, while those of another consumer or program run; m is
    then raw if MASKED, else in base 2.
    """
    slot, phase = ring_slot(step, PLAN.slots)
    S, O = _issue(Q, P, O, shared, slot, phase, PLAN.columns)  # (ROWS, K_TILE_SIZE), (ROWS, D_TILE)
    if MASKED:
        words = _words_of(consumer, shared, slot, zero, PLAN)
    if PLAN.softmax_overlaps:
        S = warpgroup_mma_wait(1, [S])  # O is still in flight
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
    """Store O, m and l of a part of a walk, in float32, for `flash_merge_kernel` to merge.

    `split.parts_of` describes the memory: O of all parts, then m, then l. O and l are relative to m
    + rest on entry, and are stored relative to m.
    """
    factor = gl.exp2(rest)

    # the row of `states` where this consumer's rows of the part begin
    first = (tile.part * walked.NUM_ROWS).to(gl.int64) - walked.FIRST_ROW
    first += tile.batch_head.to(gl.int64) * problem.N_QUERIES + first_row

    # m and l (ROWS,)
    m_states = walked.states + walked.NUM_PARTS.to(gl.int64) * walked.NUM_ROWS * D_TILE
    l_states = m_states + walked.NUM_PARTS.to(gl.int64) * walked.NUM_ROWS
    row = gl.arange(0, ROWS, m.type.layout)
    gl.store(m_states + first + row, m, mask=row < problem.N_QUERIES - first_row)
    gl.store(l_states + first + row, l * factor, mask=row < problem.N_QUERIES - first_row)

    # O (ROWS, D_TILE)
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
    O, L, inverse, first_row, rows, tile, sequence, O_desc, O_tile, L_ptr, problem,
    D_TILE: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Store a consumer's rows of a finished tile: O times `inverse`, through shared memory, and L.

    Rows past the last query are not written.
    """
    O = O * gl.convert_layout(inverse, gl.SliceLayout(1, O.type.layout))[:, None]
    tma.store_wait(0)  # the last tile's O has left shared memory
    O = gl.reshape(O.to(O_desc.dtype), [ROWS, O.shape[1]])
    first_columns(O_tile, O.shape[1]).store(O)
    fence_async_shared()
    batch, head = tile.batch_head // problem.N_HEADS, tile.batch_head % problem.N_HEADS
    tma.async_copy_shared_to_global(
        O_desc, query_place(head, first_row, batch, sequence, PLAN), O_tile
    )
    L_rows = L_ptr + tile.batch_head.to(gl.int64) * problem.N_QUERIES + sequence.first_row
    gl.store(L_rows + rows, L, mask=rows < sequence.num_queries)


@gluon.jit
def _attend(consumer: gl.constexpr, O_desc, L_ptr, shared, problem, walked, PLAN: gl.constexpr):
    """Run a consumer: compute rows [consumer * ROWS, (consumer + 1) * ROWS) of each query tile."""
    D_TILE: gl.constexpr = PLAN.head_tile
    IS_WIDE: gl.constexpr = D_TILE > 128  # Q is read from shared memory, and O leaves from there
    K_TILE_SIZE: gl.constexpr = PLAN.key_tile
    MASKED_TILES: gl.constexpr = PLAN.masked_tiles
    SLOTS: gl.constexpr = PLAN.slots
    IS_LISTED: gl.constexpr = PLAN.key_block > 0
    S_LAYOUT: gl.constexpr = mma_layout(K_TILE_SIZE)
    O_COLUMNS: gl.constexpr = 32 if PLAN.columns == 32 else D_TILE  # that P V has
    O_LAYOUT: gl.constexpr = mma_layout(O_COLUMNS)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    num_tiles, num_items = work_of_call(problem, walked, PLAN)
    zero = gl.zeros([ROWS, K_TILE_SIZE], gl.float32, S_LAYOUT)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    THREAD_LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_threads(zero).type.layout))
    Q_tile = shared.Q_tiles.index(consumer)  # (ROWS, D_TILE)
    O_tile = shared.O_tiles.index(consumer)  # (ROWS, D_TILE)

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

            # the state of the online softmax
            if PLAN.softmax_overlaps:
                m = gl.full([ROWS, 4], LOWEST, gl.float32, THREAD_LAYOUT)
                l = gl.full([ROWS, 4], 0.0, gl.float32, THREAD_LAYOUT)
            else:
                m = gl.full([ROWS], LOWEST, gl.float32, ROW_LAYOUT)
                l = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
            rest = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
            O = gl.zeros([ROWS, O_COLUMNS], gl.float32, O_LAYOUT)

            # step 0: the first scores
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.full.index(slot), phase)
            mbarrier.wait(shared.q_full.index(consumer), tiles_done & 1)
            Q = in_parts(Q_tile, PLAN.columns)
            if PLAN.query_in_registers:
                Q = load_parts(Q, Q_LAYOUT)
            first_key = tile.first_key + (tile.key_tiles - 1) * K_TILE_SIZE
            if MASKED_TILES == 1:
                P, m, l = _first_step(
                    Q, m, l, tile, last_key, first_key, zero, shared, problem, slot, consumer,
                    P_LAYOUT, PLAN,
                )  # fmt: skip
            else:  # the tile has more rows than a key tile has keys: some consumers see no key here
                P = gl.zeros([ROWS, K_TILE_SIZE], O_desc.dtype, P_LAYOUT)
                if sees_tile(first_row, first_key):
                    P, m, l = _first_step(
                        Q, m, l, tile, last_key, first_key, zero, shared, problem, slot, consumer,
                        P_LAYOUT, PLAN,
                    )  # fmt: skip
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
                        Q, P, O, m, rest, l, last_key, first_key, zero, shared, problem, step,
                        consumer, PLAN, True,
                    )  # fmt: skip
                    step += 1

            # the other steps, whose keys all rows see
            if not PLAN.softmax_overlaps:
                m, rest = _in_base_2(m, problem.scale_log2)
            for _ in range(max(tile.masked, 1), tile.key_tiles):
                P, O, m, l = _step(
                    Q, P, O, m, rest, l, 0, 0, zero, shared, problem, step, consumer, PLAN, False
                )
                rest = gl.zeros_like(rest)
                step += 1

            if not IS_WIDE:  # the copier may bring the next tile's Q
                mbarrier.arrive(shared.q_empty.index(consumer), count=1)
            tiles_done += 1

            # step n: the last product, under which the row sums are inverted
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.full.index(slot), phase)
            V = first_columns(shared.V_ring.index(slot), O_COLUMNS)
            O_pending = warpgroup_mma(P, V, O, is_async=True)
            if PLAN.softmax_overlaps:
                m = gl.convert_layout(gl.max(m, axis=1), ROW_LAYOUT)
                l = gl.convert_layout(gl.sum(l, axis=1), ROW_LAYOUT)
            L = (m + (rest + gl.log2(l))) * LN_2
            inverse = 1.0 / l
            if IS_LISTED or PLAN.packed:  # a row may see no key
                inverse = gl.where(l > 0, inverse, 0.0)
            O = warpgroup_mma_wait(0, [O_pending])
            mbarrier.arrive(shared.empty.index(slot), count=1)
            step += 1

            # O and L, or the state of a part
            stored = (first_row, rows, tile, sequence, O_desc, O_tile, L_ptr, problem)
            if PLAN.split:
                if tile.part >= 0:
                    _store_part(O, m, rest, l, first_row, tile, problem, walked, D_TILE)
                else:
                    _store_tile(O, L, inverse, *stored, D_TILE, PLAN)
            else:
                _store_tile(O, L, inverse, *stored, D_TILE, PLAN)
            if IS_WIDE:  # O leaves from Q's memory, so the next tile's Q waits for it
                tma.store_wait(0)
                mbarrier.arrive(shared.q_empty.index(consumer), count=1)

        # the next work item, from the copier or by counting
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
    """Allocate shared memory and barriers, and start the copier and the consumers."""
    CONSUMERS: gl.constexpr = PLAN.consumers
    SLOTS: gl.constexpr = PLAN.slots
    K_TILE_SIZE: gl.constexpr = PLAN.key_tile
    D_TILE: gl.constexpr = PLAN.head_tile
    IS_WIDE: gl.constexpr = D_TILE > 128
    dtype: gl.constexpr = Q_desc.dtype
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D_TILE], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()

    # memory that only some walks and orders need
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

    # tiles and barriers of every call
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

    # partitions, then for all but the first their warps and registers a thread
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
    """Compute O (batch, heads, queries, D) and L (batch, heads, queries) of dense attention.

    O and L are contiguous, L in float32 and natural log. PLAN is a `schedule.KernelPlan`.
    `counter_ptr` points to an int32 zero if PLAN.dynamic, and is not read otherwise.
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
    """Compute O and L as `hopper_forward_kernel` does, with walks divided among programs.

    Of divided walks the states of the parts go to `states_ptr` (`walk.Parts`), and not O and L.
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
    """Compute O and L as `hopper_forward_kernel` does, walking the lists of a `BlockMask`.

    A tile of queries visits the key tiles that its list names (`walk.Lists`).
    """
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
    """Compute O (queries, heads, D) and L (heads, queries) of packed documents."""
    problem = Problem(N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2)
    documents = PackedDocuments(cu_seqlens_q_ptr, cu_seqlens_k_ptr, N_DOCUMENTS)
    _run(Q_desc, K_desc, V_desc, O_desc, L_ptr, counter_ptr, problem, documents, PLAN)


@triton.jit
def hopper_counter_kernel(counter_ptr):
    """Store 0 in the counter from which programs of a dynamic order take work items."""
    tl.store(counter_ptr, 0)


def _counter(plan: ForwardPlan, otherwise: Tensor) -> Tensor:
    """Return an int32 zero if `plan` has a dynamic order, else `otherwise`, which is not read."""
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
    """Return contiguous O in q's dtype and the log-sum-exp of each row (float32, natural log).

    Inputs are validated, non-empty, of 16 bits, with a head_dim up to 256, and on the current
    device, of sm_90. `config` may name a schedule and an order of tiles (`schedule.plan_forward`);
    other kernels' configurations in it are ignored. `lists`, without `is_causal`, are those of a
    `BlockMask` whose tiles are whole multiples of the kernel's.

    A row's last bits may depend on the schedule and on the parts of its walk, and so on how many
    heads a call has and on the GPU. While the kernels run, parts take up to 34 MiB.
    """
    head_dim = q.shape[-1]
    q, k, v = readable(q), readable(k), readable(v)
    batch, heads, num_queries, width = q.shape
    num_keys, group = k.shape[2], heads // k.shape[1]
    plan = plan_forward(
        head_dim=width, is_causal=is_causal,
        num_queries=num_queries, num_keys=num_keys, batch_heads=batch * heads, group=group,
        num_multiprocessors=num_multiprocessors(q.device), config=config,
        block_size=None if lists is None else lists.block_size,
    )  # fmt: skip
    schedule = plan.schedule

    # what every kernel takes
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
        num_queries, num_keys, heads, group, batch * heads, plan.heads_together,
        scale * LOG2_E.value,
    )  # fmt: skip

    # the kernel, and what it takes besides
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
            lists.kv_num_blocks, lists.kv_indices, lists.kv_tokens,
            lists.full_kv_num_blocks, lists.full_kv_indices,
            words_descriptor(words, schedule.query_tile, schedule.key_tile // BITS),
        )  # fmt: skip
        numbers += (
            *lists.kv_num_blocks.shape[:2],
            lists.kv_indices.shape[3], lists.full_kv_indices.shape[3], len(words),
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
            # without a mask the last rows are merged alike, of whichever heads they are
            last_rows = (batch * heads, num_queries) if is_causal else (1, num_rows)
            num_keys = seen_keys(num_queries, num_keys, is_causal)
            merge(
                states, output, lse, last_rows, num_keys, plan.part_tiles * schedule.key_tile,
                is_causal,
            )  # fmt: skip
    return (output if width == head_dim else output[..., :head_dim].contiguous()), lse


def hopper_packed_forward(
    q: Float[Tensor, "total_queries heads head_dim"],
    k: Float[Tensor, "total_keys kv_heads head_dim"],
    v: Float[Tensor, "total_keys kv_heads head_dim"],
    documents: Documents,
    *,
    is_causal: bool,
    scale: float,
    config: str = "",
) -> tuple[Float[Tensor, "total_queries heads head_dim"], Float[Tensor, "heads total_queries"]]:
    """Return O and the log-sum-exp of packed documents, each of which attends to itself alone.

    As `hopper_forward` for each document's queries and keys. The largest numbers of queries and of
    keys of a document decide which schedule is taken.
    """
    cu_seqlens_q, cu_seqlens_k = documents[:2]
    max_seqlens = (documents.max_seqlen_q, documents.max_seqlen_k)
    head_dim = q.shape[-1]
    q, k, v = readable(q), readable(k), readable(v)
    (num_queries, heads, width), num_keys, group = q.shape, k.shape[0], q.shape[1] // k.shape[1]
    num_documents = len(cu_seqlens_q) - 1
    plan = plan_packed_forward(
        head_dim=width, is_causal=is_causal,
        num_queries=num_queries, num_keys=num_keys, heads=heads, group=group,
        documents=num_documents, max_seqlens=max_seqlens,
        num_multiprocessors=num_multiprocessors(q.device), config=config,
    )  # fmt: skip
    schedule = plan.schedule

    # O, L and the tiles that TMA moves
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
                *(document_descriptor(x, rows) for x, rows in operands),
                lse, _counter(plan, lse), cu_seqlens_q, cu_seqlens_k,
            ),
            (
                num_queries, num_keys, heads, group, heads, plan.heads_together,
                scale * LOG2_E.value, num_documents,
            ),
            {"PLAN": plan.kernel_plan, **schedule.launch_options},
        )  # fmt: skip
    return (output if width == head_dim else output[..., :head_dim].contiguous()), lse
