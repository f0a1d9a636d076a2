"""The backward on Hopper: one Gluon kernel of five matmuls between light Triton kernels.

  preprocess   delta = rowsum(dO ∘ O), minus the gradient of L if one arrives; L in base 2; dQ's
               accumulator zeroed
  main         one program a tile of 128 keys: dK and dV stay in registers, dQ is added into memory,
               in float32
  parts        the main kernel once more, for walks that are divided among programs: see below
  convert      dQ = scale · accumulator, in rows and in the inputs' dtype
  join         dK and dV of divided walks: the sums of their parts

Each kernel but the first starts while the one before it ends, and waits for it only where it needs
its results.

A program of the main kernel has up to five partitions. A producer warp copies tiles by TMA into a
ring of two slots. Two consumer warp groups own 64 of the keys each and walk the query tiles that
see them. Two sender warps add what each consumer has made of dQ into memory. S and dP are computed
transposed, so that Pᵀ and dSᵀ are left operands that the tensor cores take from registers. One step
of a consumer, where dQ leaves `by senders`, and the matmuls that are in flight meanwhile:

                                                         in flight
    issue dPᵀ = V dOᵀ                                    dP          (1)
    Pᵀ = exp2(scale · log₂e · Sᵀ - L)                    dP          (2)
    wait for dP
    dSᵀ = Pᵀ ∘ (dPᵀ - delta)                                         (2)
    dSᵀ to shared memory; issue dV += Pᵀ dO              dV          (3)
    meet the other consumer                              dV          (4)
    issue dQ = dS K, issue dK += dSᵀ Q                   dV, dQ, dK
    wait for dV and dQ; dQ to its sender                 dK
    wait for the next slot: Q, dO, L, delta              dK
    issue the next step's Sᵀ = K Qᵀ                      dK, S       (5)
    wait for dK; release the slot                        S
    wait for S

  (1) Sᵀ is there: the step before has computed it.
  (2) L and delta stay in shared memory up to here, as registers are full.
  (3) The other consumer has the tensor cores up to here.
  (4) dQ sums over the keys of both consumers.
  (5) These scores keep the tensor cores busy while dQ leaves. In flight over the loop's end they
      would be as good, but the compiler then waits for every matmul. So it does with dV, dQ, dK and
      S all in flight.

The two consumers form a step's dQ tile once, half each, from the keys of both: halves by columns of
a tile of 64 queries at head dim 128, halves by rows of a tile of 128 queries at head dim 64. (At 64
the longer tile is 15 to 20 % faster; at 128 it has no room.) dQ leaves in the order in which
threads hold it, and `convert` restores the order of rows and columns.

Tiles have 64 or 128 columns. At head dims from 65 to 96 the matmuls leave out the last 32 of 128
(`columns.py`), and consumer 1 adds zeros to 32 columns of dQ.

The launcher chooses how dQ is formed and sent, by measurements (`dq_way`):

  by senders  as above. At head dim 128 without a mask, and of causal packed documents below 8,192
              queries.
  late        A step forms the dQ of the step before. The consumers then need not meet: each
              announces that its dS is ready, and goes on if the other's last one is. One may be a
              step ahead, which takes a third tile of dS. At head dim 64, along lists, and at 128
              causal from 8,192 queries on or in a fixed order of additions.
  alone       without sender warps: a consumer starts its copy and waits for it a step later. At
              head dim 128 causal below 8,192 queries.

`backward_walk.py` decides which tiles a program visits. Without a mask the walk starts at the
program's own position and wraps around the end, so that programs that run at one time add to
different rows of dQ. A causal walk starts at the diagonal. Four kernels differ only in their walk,
which is chosen by the type of `walked`: dense (None), `Parts` of dense walks, `Lists` of a
`BlockMask`, `PackedDocuments`. For a list's partial tiles the producer hands over the number of a
tile of bits. A consumer reads the bits from memory, ordered by keys like its scores: `light.py` has
transposed them.

Walks that would leave multiprocessors idle are divided (`division.py`): those of a last round of
tiles without a mask, or all of a small call. Not divided are walks along lists, of documents, in a
fixed order of additions, at head dims from 65 to 96, whose sums are in two pieces, and where causal
queries see keys that do not exist. The parts have a kernel of their own, because steps that a
program counts itself are 2 to 4 % slower. Its programs start as those of the main kernel end, and
each leaves dK and dV of its part to `join`, in float32.

Tiles that the diagonal cuts are masked. Where queries see keys that do not exist every tile is
masked, in a kernel of its own, because a choice at run time costs registers. (A key that does not
exist scores 0, and its P = exp2(-L) may be inf.) That is the case without a mask where the last key
tile is ragged; a causal query comes before such keys, unless there are fewer keys than queries.
Queries past the end have L = +inf, hence P = 0. TMA reads zeros past the end of a head and writes
nothing there.

One program sums dK and dV over the queries and over the query heads of a group, or its parts do and
are added in a fixed order. So dK and dV are bit-reproducible; the parts depend on how many heads a
call has, and on the GPU. dQ is summed over the key tiles in any order, and its last bits vary. If
PLAN.ordered, senders wait until a counter says that it is their program's turn (`turn_of_tile`).
The first in order stores its part, so that nothing need be zeroed. Without a mask dQ then has two
accumulators, for what comes before walks wrap around the end and after. Measured before both
changes, in turns with additions in any order, that takes up to 8 % more time, 16 % at 2,048 causal
tokens, and more where walks would be divided.

Sources: FlashAttention-2 (Dao 2023), algorithm 2; FlashAttention-3 (Shah et al. 2024) for the
partitions, the senders and the turns.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cs336_systems.attention.call import Documents, Saved
from cs336_systems.attention.hopper.backward_walk import (
    KEY_TILE,
    QUERY_PADDING,
    BackwardPlan,
    Lists,
    Parts,
    Problem,
    key_tiles,
    least_steps,
    num_walks,
    own_tile,
    place_of_step,
    query_padding,
    row_of_member,
    turn_of_tile,
    walk_of,
)
from cs336_systems.attention.hopper.builtins import (
    arrive_at,
    as_block,
    by_words,
    meet_consumers,
    meet_warps,
    mma_layout,
    pass_turn,
    tma_add,
    wait_at,
    wait_for_turn,
    zero_unattended,
)
from cs336_systems.attention.hopper.columns import (
    add_product,
    await_sums,
    in_parts,
    over_columns,
    store_sums,
    zero_sums,
)
from cs336_systems.attention.hopper.descriptors import (
    document_descriptor,
    readable,
    tile_descriptor,
)
from cs336_systems.attention.hopper.division import (
    MULTIPROCESSORS,
    START_STEPS,
    Division,
    divide_walks,
)
from cs336_systems.attention.hopper.light import convert, join, preprocess, transposed_words
from cs336_systems.attention.hopper.schedule import CONSUMER_WARPS, LATE_FROM, columns_of
from cs336_systems.attention.hopper.walk import PackedDocuments, key_place, query_place
from cs336_systems.attention.hopper.wide_backward import gradients_of_keys, hopper_wide_backward
from cs336_systems.attention.masks.tiles import TileLists
from cs336_systems.attention.tiles import head_tile
from cs336_systems.attention.tiles.choice import Walks, heads_at_a_time
from cs336_systems.attention.tiles.kernel_config import HALF_L2_SHARE_BYTES, L2_SHARE_BYTES
from cs336_systems.attention.triton.launch import (
    empty,
    empty_like,
    launch,
    log_launch,
    num_multiprocessors,
    num_tiles,
    overlap_options,
)
from cs336_systems.attention.triton.steps import LOG2_E
from cs336_systems.measure.stages import stage

CONSUMER_KEYS = gl.constexpr(64)  # keys of a tile that a consumer owns, half of it
HALF = gl.constexpr(64)  # rows and columns of a consumer's part of a dQ tile
WORDS_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
# A consumer's part of a dQ tile leaves as rows of 32 numbers, in the order in which threads hold
# them (`_in_thread_order`).
SENT_ROWS, SENT_COLUMNS = gl.constexpr(128), gl.constexpr(32)
SLOTS = gl.constexpr(2)  # as many as fit: 194 to 227 KiB of the 227 that a program can have
# Queries of a tile, by head tile: S and dP of a step take 128 or 64 registers of a thread.
QUERY_TILES = {64: 128, 128: 64}
# The ways of dQ: without sender warps, with them, and a step late with them.
ALONE, BY_SENDERS, LATE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# Numbers of the hardware's 16 named barriers, of which Triton takes the first ones. DQ_IS_WRITTEN
# and DQ_IS_SENT are two in a row, one for each consumer; DS_IS_READY is four, one for each consumer
# and parity of the step.
DS_IS_READY, DS_IS_WRITTEN, TILES_ARE_READ = gl.constexpr(6), gl.constexpr(10), gl.constexpr(11)
DQ_IS_WRITTEN, DQ_IS_SENT = gl.constexpr(12), gl.constexpr(14)
CONSUMERS = gl.constexpr(256)  # threads of both consumers
SENDER = gl.constexpr(160)  # threads of a consumer and of the warp that sends its part of dQ


NUMBERS = ["N_KV_HEADS", "HEADS_TOGETHER", "SECOND_SUMS", "N_QUERIES", "N_KEYS"]


@gluon.constexpr_function
def _has_thread_rows(D_TILE, IS_CAUSAL):
    """Return whether shared memory holds L and delta in the order in which threads need them.

    A thread's four numbers of 16 columns are then neighbours.
    """
    return D_TILE == 128 and IS_CAUSAL


class _Shared(NamedTuple):
    """Shared memory of producer, consumers and senders: tiles, rows, and the rings' barriers."""

    Q_slots: gl.shared_memory_descriptor  # (SLOTS, Q_TILE_SIZE, D_TILE)
    dO_slots: gl.shared_memory_descriptor  # the same
    KV_tiles: gl.shared_memory_descriptor  # (2, KEY_TILE, D_TILE)
    # (2 or 3, KEY_TILE, Q_TILE_SIZE): dSᵀ of both consumers, for as many steps
    dS_tiles: gl.shared_memory_descriptor
    # (2, SENT_ROWS, SENT_COLUMNS): each consumer's part of dQ on its way to memory
    dQ_tiles: gl.shared_memory_descriptor
    L_slots: gl.shared_memory_descriptor  # (SLOTS, Q_TILE_SIZE)
    delta_slots: gl.shared_memory_descriptor  # the same
    kv_full: gl.shared_memory_descriptor  # one barrier
    full: gl.shared_memory_descriptor  # a barrier a slot
    empty: gl.shared_memory_descriptor  # a barrier a slot
    words_slots: gl.shared_memory_descriptor  # (SLOTS, 1): number of the tile of a mask's bits


@gluon.jit
def _await_preprocess(walked, PLAN: gl.constexpr):
    """Wait for what earlier kernels write: L, delta, a mask's words, dQ's zeros and turns.

    Parts behind whole walks need not wait: the main kernel lets them start, in `_produce`, only
    after it has waited itself.
    """
    if PLAN.split:
        if walked.WHOLE == 0:
            gdc_wait()
    else:
        gdc_wait()


@gluon.jit
def _produce(
    shared, problem, walked, Q_desc, K_desc, V_desc, dO_desc, rows_ptr, PLAN: gl.constexpr
):  # fmt: skip
    """Run the producer warp: copy K and V once, and Q, dO, L and delta of each step."""
    Q_TILE_SIZE: gl.constexpr = PLAN.query_tile
    IS_LISTED: gl.constexpr = PLAN.query_block > 0
    ROWS_LAYOUT: gl.constexpr = gl.BlockedLayout([Q_TILE_SIZE // 32], [32], [1], [0])
    tile = own_tile(problem, walked, PLAN)
    batch, kv_head = tile.batch_head // problem.N_KV_HEADS, tile.batch_head % problem.N_KV_HEADS

    # K and V (KEY_TILE, D_TILE)
    mbarrier.expect(shared.kv_full.index(0), K_desc.block_type.nbytes + V_desc.block_type.nbytes)
    first_key = tile.number * KEY_TILE
    if IS_LISTED or PLAN.packed:
        first_key = gl.where(tile.steps == 0, tile.sequence.num_keys, first_key)
    place = key_place(kv_head, first_key, batch, tile.sequence, PLAN)
    K_tile, V_tile = shared.KV_tiles.index(0), shared.KV_tiles.index(1)
    tma.async_copy_global_to_shared(
        K_desc, place, shared.kv_full.index(0), as_block(K_tile, K_desc)
    )
    tma.async_copy_global_to_shared(
        V_desc, place, shared.kv_full.index(0), as_block(V_tile, V_desc)
    )

    # Consumers wait for this warp, so a mask's words and the zeros of dQ are there for them too.
    _await_preprocess(walked, PLAN)
    gdc_launch_dependents()

    # Q and dO (Q_TILE_SIZE, D_TILE), L and delta (Q_TILE_SIZE,) of each step
    done = 0
    for number in range(num_walks(PLAN)):
        walk = walk_of(number, tile, problem, walked, PLAN)
        head = kv_head * PLAN.group + walk.member
        rows_of_head = rows_ptr + (tile.batch_head * PLAN.group + walk.member).to(gl.int64) * (
            2 * tile.head_rows
        )
        for j in range(walk.steps):
            first_query, words = place_of_step(j, walk, tile, problem, walked, PLAN)

            # L and delta to registers, while the slot is in use
            rows = first_query + gl.arange(0, Q_TILE_SIZE, ROWS_LAYOUT)
            if _has_thread_rows(PLAN.head_tile, PLAN.is_causal):
                rows = rows // 16 * 16 + rows // 2 % 2 * 8 + rows // 4 % 4 * 2 + rows % 2
            if IS_LISTED or PLAN.packed:
                inside = rows < tile.sequence.num_queries
                rows += tile.sequence.first_row
                L = gl.load(rows_of_head + rows, mask=inside, other=float("inf"))
                delta = gl.load(rows_of_head + tile.head_rows + rows, mask=inside, other=0.0)
            else:
                L = gl.load(rows_of_head + rows)
                delta = gl.load(rows_of_head + tile.head_rows + rows)

            # all four to the slot, once it is empty
            step = done + j
            slot = step % SLOTS
            mbarrier.wait(shared.empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            mbarrier.expect(
                shared.full.index(slot), Q_desc.block_type.nbytes + dO_desc.block_type.nbytes
            )
            place = query_place(head, first_query, batch, tile.sequence, PLAN)
            tma.async_copy_global_to_shared(
                Q_desc, place, shared.full.index(slot), as_block(shared.Q_slots.index(slot), Q_desc)
            )  # fmt: skip
            tma.async_copy_global_to_shared(
                dO_desc, place, shared.full.index(slot),
                as_block(shared.dO_slots.index(slot), dO_desc),
            )  # fmt: skip
            shared.L_slots.index(slot).store(L)
            shared.delta_slots.index(slot).store(delta)
            if IS_LISTED:
                shared.words_slots.index(slot).store(gl.full([1], words, gl.int32, WORDS_LAYOUT))
            mbarrier.arrive(shared.full.index(slot), count=1)
        done += walk.steps
    if PLAN.split:  # what waits for this kernel reads the results of the one of whole walks too
        gdc_wait()


@gluon.jit
def _send(
    shared, problem, walked, dQ_desc, turns_ptr, CONSUMER: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Run a sender warp: add a consumer's part of dQ into memory, step after step.

    If PLAN.ordered, each part waits for its turn, and the first in order is stored, as the memory
    that it would be added to was never written.
    """
    D_TILE: gl.constexpr = PLAN.head_tile
    tile = own_tile(problem, walked, PLAN)
    dQ_tile = shared.dQ_tiles.index(CONSUMER)
    _await_preprocess(walked, PLAN)
    arrive_at(DQ_IS_SENT + CONSUMER, SENDER)
    if PLAN.dq_way == LATE:  # what the first step hands over is the dQ of no step
        wait_at(DQ_IS_WRITTEN + CONSUMER, SENDER)
        arrive_at(DQ_IS_SENT + CONSUMER, SENDER)
    for number in range(num_walks(PLAN)):
        walk = walk_of(number, tile, problem, walked, PLAN)
        head_row = row_of_member(walk.member, tile, PLAN)
        for j in range(walk.steps):
            first_query, _ = place_of_step(j, walk, tile, problem, walked, PLAN)

            # where the part goes
            row = head_row + first_query
            if PLAN.ordered:
                is_second, turn = turn_of_tile(
                    first_query // KEY_TILE, tile.head_rows // KEY_TILE, tile.number,
                    key_tiles(problem.N_QUERIES, problem.N_KEYS, PLAN.is_causal), PLAN.is_causal,
                )  # fmt: skip
                row += problem.SECOND_SUMS * is_second
            dQ_block = [0, 0, row * (D_TILE // SENT_COLUMNS) + CONSUMER * SENT_ROWS, 0]
            turns = turns_ptr + row // HALF * 2 + CONSUMER

            # the part, once it is written and may go
            if PLAN.ordered:
                wait_for_turn(turns, turn)
            wait_at(DQ_IS_WRITTEN + CONSUMER, SENDER)
            if PLAN.ordered:
                if turn == 0:
                    tma.async_copy_shared_to_global(dQ_desc, dQ_block, as_block(dQ_tile, dQ_desc))
                else:
                    tma_add(dQ_desc, dQ_block, as_block(dQ_tile, dQ_desc))
            else:
                tma_add(dQ_desc, dQ_block, as_block(dQ_tile, dQ_desc))
            tma.store_wait(0)
            arrive_at(DQ_IS_SENT + CONSUMER, SENDER)
            if PLAN.ordered:
                pass_turn(turns)


@gluon.jit
def _to_thread_rows(x, THREAD_ROWS: gl.constexpr):
    """Return x, L or delta with a number a column, in the order in which shared memory holds it.

    If THREAD_ROWS (`_has_thread_rows`), four numbers of a thread are neighbours there, and one load
    in place of two.
    """
    if THREAD_ROWS:
        parts = gl.permute(gl.reshape(x, [x.shape[0] // 16, 2, 4, 2]), (0, 2, 1, 3))
        return gl.reshape(parts, [x.shape[0]])
    else:
        return x


@gluon.jit
def _to_columns(x, LAYOUT: gl.constexpr, THREAD_ROWS: gl.constexpr):
    """Return x from the order of shared memory in LAYOUT, that of an accumulator's columns.

    The inverse of `_to_thread_rows`.
    """
    if THREAD_ROWS:
        parts = gl.permute(gl.reshape(x, [x.shape[0] // 16, 4, 2, 2]), (0, 2, 1, 3))
        return gl.convert_layout(gl.reshape(parts, [x.shape[0]]), LAYOUT, assert_trivial=True)
    else:
        return x


@gluon.jit
def _start_dQ(shared, dS_slot, CONSUMER: gl.constexpr, COLUMNS: gl.constexpr):
    """Return a consumer's part of dQ = dS K, in flight: half of the columns, or of the rows.

    It is (HALF, HALF), or (HALF, 32) for consumer 1 of 96 columns.
    """
    both_dS_T = shared.dS_tiles.index(dS_slot)  # (KEY_TILE, Q_TILE_SIZE)
    if COLUMNS > 64:
        WIDTH: gl.constexpr = min(COLUMNS - CONSUMER * HALF, HALF)
        zeros = gl.zeros([HALF, WIDTH], gl.float32, mma_layout(WIDTH))
        K_half = shared.KV_tiles.index(0).slice(CONSUMER * HALF, WIDTH, dim=1)
        return warpgroup_mma(both_dS_T.permute((1, 0)), K_half, zeros, use_acc=False, is_async=True)
    else:
        zeros = gl.zeros([HALF, HALF], gl.float32, mma_layout(HALF))
        dS_T_half = both_dS_T.slice(CONSUMER * HALF, HALF, dim=1)
        return warpgroup_mma(
            dS_T_half.permute((1, 0)), shared.KV_tiles.index(0), zeros, use_acc=False, is_async=True
        )


@gluon.jit
def _in_thread_order(dQ):
    """Return a consumer's (64, columns) sums as rows of 32 numbers, in the order of threads.

    Each thread then stores 16 bytes beside the next thread's. The axes go from (warp, half of its
    rows, row, 8 columns, pair of them, of the pair) to (8 columns, warp, row, pair, half, of the
    pair). No number moves between registers, and the 128-bit stores meet no bank conflict.
    """
    parts = gl.permute(gl.reshape(dQ, [4, 2, 8, dQ.shape[1] // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    return gl.reshape(parts, [2 * dQ.shape[1], SENT_COLUMNS])


@gluon.jit
def _store_dQ(shared, dQ, CONSUMER: gl.constexpr):
    """Store a consumer's part of dQ in its tile of shared memory.

    A part of 32 columns takes the first half of the tile, before the zeros that lie in the second.
    """
    dQ_tile = shared.dQ_tiles.index(CONSUMER)
    if dQ.shape[1] < HALF:
        dQ_tile = dQ_tile.slice(0, 2 * dQ.shape[1], dim=0)
    dQ_tile.store(_in_thread_order(dQ))
    fence_async_shared()


@gluon.jit
def _hand_over_dQ(shared, dQ, CONSUMER: gl.constexpr):
    """Store a consumer's part of dQ in shared memory, and tell its sender warp."""
    wait_at(DQ_IS_SENT + CONSUMER, SENDER)
    _store_dQ(shared, dQ, CONSUMER)
    arrive_at(DQ_IS_WRITTEN + CONSUMER, SENDER)


@gluon.jit
def _hide(P_T, first_query, first_key, N_KEYS, DIAGONAL: gl.constexpr):
    """Return Pᵀ with zeros where the key does not exist or, if DIAGONAL, comes after the query."""
    key_rows = first_key + gl.arange(0, P_T.shape[0], gl.SliceLayout(1, P_T.type.layout))
    if DIAGONAL:
        query_rows = first_query + gl.arange(0, P_T.shape[1], gl.SliceLayout(0, P_T.type.layout))
        first_seen_by = gl.where(key_rows < N_KEYS, key_rows, 2**31 - 1)
        return gl.where(query_rows[None, :] >= first_seen_by[:, None], P_T, 0.0)
    else:
        return gl.where((key_rows < N_KEYS)[:, None], P_T, 0.0)


@gluon.jit
def _load_words(S_T, shared, slot, first_key, walked, PLAN: gl.constexpr):
    """Return the mask bits of a consumer's keys in a partial tile, laid out as Sᵀ is.

    Returns (CONSUMER_KEYS, Q_TILE_SIZE / 32) words of 32 queries each.
    """
    WORDS: gl.constexpr = PLAN.query_tile // 32
    LAYOUT: gl.constexpr = gl.SliceLayout(2, by_words(S_T).type.layout)
    keys = first_key % PLAN.key_block + gl.arange(0, CONSUMER_KEYS, gl.SliceLayout(1, LAYOUT))
    tile = shared.words_slots.index(slot).load(gl.SliceLayout(1, LAYOUT)).to(gl.int64)
    row = (tile * PLAN.key_block + keys)[:, None] * WORDS
    word = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(walked.words + (row + word))


@gluon.jit
def _start_scores(shared, step, zero, CONSUMER: gl.constexpr, COLUMNS: gl.constexpr):
    """Return a step's Sᵀ = K Qᵀ in flight, after the step's slot is full.

    It is (CONSUMER_KEYS, Q_TILE_SIZE). `zero` is 0, and `_consume` says why it is an argument.
    """
    K = shared.KV_tiles.index(zero).slice(CONSUMER * CONSUMER_KEYS, CONSUMER_KEYS, dim=0)
    slot = step % SLOTS
    mbarrier.wait(shared.full.index(slot), (step // SLOTS) & 1)
    return over_columns(in_parts(K, COLUMNS), shared.Q_slots.index(slot), COLUMNS)


@gluon.jit
def _step(
    shared, problem, walked, dQ_desc, dK, dV, S_T,
    step, last_step, head_row, first_query, first_key, num_keys,
    CONSUMER: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """Return (dK, dV, the next step's Sᵀ) after one query tile, and pass on the tile's dQ.

    The module's docstring has the order. The last step computes its own Sᵀ again, which is not
    used: a branch around a matmul in flight would make it synchronous. dK and dV are tuples of
    their parts by columns.
    """
    dtype: gl.constexpr = shared.Q_slots.dtype
    Q_TILE_SIZE: gl.constexpr = shared.Q_slots.shape[1]
    D_TILE: gl.constexpr = PLAN.head_tile
    COLUMNS: gl.constexpr = PLAN.columns
    PARTS: gl.constexpr = 2 if COLUMNS == 96 else 1  # matmuls of S, dP, dK and dV each
    S_LAYOUT: gl.constexpr = mma_layout(Q_TILE_SIZE)
    FIRST_ROW: gl.constexpr = CONSUMER * CONSUMER_KEYS
    V = shared.KV_tiles.index(1).slice(FIRST_ROW, CONSUMER_KEYS, dim=0)
    slot = step % SLOTS
    Q, dO = shared.Q_slots.index(slot), shared.dO_slots.index(slot)  # (Q_TILE_SIZE, D_TILE)

    # Pᵀ, under dPᵀ = V dOᵀ; both are (CONSUMER_KEYS, Q_TILE_SIZE)
    dP_T = over_columns(in_parts(V, COLUMNS), dO, COLUMNS)
    THREAD_ROWS: gl.constexpr = _has_thread_rows(D_TILE, PLAN.is_causal)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    # only its layout is used
    stored = _to_thread_rows(gl.zeros([Q_TILE_SIZE], gl.float32, QUERIES), THREAD_ROWS)
    L = _to_columns(shared.L_slots.index(slot).load(stored.type.layout), QUERIES, THREAD_ROWS)
    P_T = gl.exp2(S_T * problem.scale_log2 - L[None, :])
    if MASKED and PLAN.query_block:
        words = _load_words(S_T, shared, slot, first_key + FIRST_ROW, walked, PLAN)
        P_T = zero_unattended(P_T, words)
    elif MASKED:
        P_T = _hide(P_T, first_query, first_key + FIRST_ROW, num_keys, DIAGONAL)

    # dSᵀ
    dP_T, P_T = warpgroup_mma_wait(0, [dP_T, P_T])
    delta = _to_columns(
        shared.delta_slots.index(slot).load(stored.type.layout), QUERIES, THREAD_ROWS
    )
    dS_T = (P_T * (dP_T - delta[None, :])).to(dtype)

    # dSᵀ to shared memory, and dV. Steps take turns with the tiles: the other consumer may still
    # multiply the tile of the step before, or if dQ is late that of two steps before.
    dS_slot = step % shared.dS_tiles.shape[0]
    if PLAN.dq_way == LATE:
        wait_at(DS_IS_READY + (1 - CONSUMER) * 2 + ((step + 1) & 1), CONSUMERS)
    shared.dS_tiles.index(dS_slot).slice(FIRST_ROW, CONSUMER_KEYS, dim=0).store(dS_T)
    dV = add_product(dV, P_T.to(dtype), dO, COLUMNS)
    fence_async_shared()

    # dQ, of this step or if late of the one before, and dK
    if PLAN.dq_way == LATE:
        arrive_at(DS_IS_READY + CONSUMER * 2 + (step & 1), CONSUMERS)
        dQ = _start_dQ(shared, (step + 2) % 3, CONSUMER, COLUMNS)
    else:
        if PLAN.dq_way == ALONE:
            tma.store_wait(0)
        meet_consumers(DS_IS_WRITTEN)
        dQ = _start_dQ(shared, dS_slot, CONSUMER, COLUMNS)
    dK = add_product(dK, dS_T, Q, COLUMNS)
    dV = await_sums(dV, PARTS)
    dQ = warpgroup_mma_wait(PARTS, [dQ])

    # dQ to memory, the next scores under it
    if PLAN.dq_way == ALONE:
        _store_dQ(shared, dQ, CONSUMER)
        dQ_block = [
            0,
            0,
            (head_row + first_query) * (D_TILE // SENT_COLUMNS) + CONSUMER * SENT_ROWS,
            0,
        ]
        tma_add(dQ_desc, dQ_block, as_block(shared.dQ_tiles.index(CONSUMER), dQ_desc))
    else:
        _hand_over_dQ(shared, dQ, CONSUMER)
    S_T = _start_scores(shared, min(step + 1, last_step), 0, CONSUMER, COLUMNS)
    dK = await_sums(dK, PARTS)
    mbarrier.arrive(shared.empty.index(slot), count=1)
    S_T = warpgroup_mma_wait(0, [S_T])
    return dK, dV, S_T


@gluon.jit
def _consume(
    shared, problem, walked, dQ_desc, dK_desc, dV_desc, CONSUMER: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Run a consumer warp group: sum dK and dV of its 64 keys, and form its half of dQ."""
    MASKED_STEPS: gl.constexpr = least_steps(PLAN) if PLAN.is_causal else 0
    tile = own_tile(problem, walked, PLAN)
    first_key = tile.number * KEY_TILE
    dK, dV = zero_sums(PLAN.columns), zero_sums(PLAN.columns)
    if PLAN.columns - CONSUMER * HALF == 32:  # zeros for the columns of dQ that are left out
        rest = shared.dQ_tiles.index(CONSUMER).slice(64, 64, dim=0)
        rest.store(_in_thread_order(gl.zeros([HALF, 32], gl.float32, mma_layout(32))))

    mbarrier.wait(shared.kv_full.index(0), 0)
    meet_warps()  # without it the compiler puts one where each step begins
    last_step = tile.steps - 1
    if PLAN.query_block:
        last_step = max(last_step, 0)
    elif PLAN.packed:
        last_step = max(last_step, PLAN.group * least_steps(PLAN) - 1)
    if PLAN.dq_way == LATE:
        arrive_at(DS_IS_READY + CONSUMER * 2 + 1, CONSUMERS)  # of the step before the first

    # The compiler would keep the addresses of K's parts in registers through the loops, were they
    # the same here: so this K is at an index that the compiler does not know to be 0.
    S_T = warpgroup_mma_wait(
        0, [_start_scores(shared, 0, min(last_step, 0), CONSUMER, PLAN.columns)]
    )

    # the steps: masked ones, then the rest
    if PLAN.query_block:
        for step in range(tile.masked):
            dK, dV, S_T = _step(
                shared, problem, walked, dQ_desc, dK, dV, S_T, step, last_step, 0, 0, first_key, 0,
                CONSUMER, PLAN, True, False,
            )  # fmt: skip
        for step in range(tile.masked, last_step + 1):
            dK, dV, S_T = _step(
                shared, problem, walked, dQ_desc, dK, dV, S_T, step, last_step, 0, 0, first_key, 0,
                CONSUMER, PLAN, False, False,
            )  # fmt: skip
    else:
        for member in range(PLAN.group):
            head_row = row_of_member(member, tile, PLAN)
            walk = walk_of(member, tile, problem, walked, PLAN)
            for j in range(MASKED_STEPS):  # in a walk's later parts the mask hides nothing
                first_query, _ = place_of_step(j, walk, tile, problem, walked, PLAN)
                dK, dV, S_T = _step(
                    shared, problem, walked, dQ_desc, dK, dV, S_T,
                    member * walk.steps + j, last_step, head_row,
                    first_query, first_key, tile.sequence.num_keys, CONSUMER, PLAN, True, True,
                )  # fmt: skip
            for j in range(MASKED_STEPS, walk.steps):
                first_query, _ = place_of_step(j, walk, tile, problem, walked, PLAN)
                dK, dV, S_T = _step(
                    shared, problem, walked, dQ_desc, dK, dV, S_T,
                    member * walk.steps + j, last_step, head_row,
                    first_query, first_key, tile.sequence.num_keys, CONSUMER, PLAN,
                    not PLAN.whole_key_tiles, False,
                )  # fmt: skip

    # the last step's dQ, if late
    if PLAN.dq_way == LATE:
        wait_at(DS_IS_READY + (1 - CONSUMER) * 2 + (last_step & 1), CONSUMERS)
        dQ = _start_dQ(shared, last_step % shared.dS_tiles.shape[0], CONSUMER, PLAN.columns)
        _hand_over_dQ(shared, warpgroup_mma_wait(0, [dQ]), CONSUMER)
    if PLAN.dq_way != ALONE:
        wait_at(DQ_IS_SENT + CONSUMER, SENDER)

    # dK and dV
    if PLAN.split:
        _store_part(dK, dV, walked, CONSUMER, PLAN)
    else:
        _store_gradients(shared, problem, dK_desc, dV_desc, dK, dV, tile, CONSUMER, PLAN)
    tma.store_wait(0)  # copies end before the program does, and with it its shared memory


@gluon.jit
def _store_part(dK, dV, walked, CONSUMER: gl.constexpr, PLAN: gl.constexpr):
    """Store dK and dV of a part of the walks in float32, for `light.join` to add up."""
    dK, dV = _in_thread_order(dK[0]), _in_thread_order(dV[0])
    rows = gl.arange(0, dK.shape[0], gl.SliceLayout(1, dK.type.layout))
    columns = gl.arange(0, SENT_COLUMNS, gl.SliceLayout(0, dK.type.layout))
    place = rows[:, None] * SENT_COLUMNS + columns[None, :]
    SIZE: gl.constexpr = CONSUMER_KEYS * PLAN.head_tile
    sums = walked.sums + (gl.program_id(0).to(gl.int64) * 2 + CONSUMER) * (2 * SIZE)
    gl.store(sums + place, dK)
    gl.store(sums + SIZE + place, dV)


@gluon.jit
def _store_gradients(
    shared, problem, dK_desc, dV_desc, dK, dV, tile, CONSUMER: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Scale dK and store dK and dV of a consumer's keys, in the inputs' dtype."""
    dtype: gl.constexpr = shared.Q_slots.dtype
    # Once both consumers have read K and V, their memory takes dK and dV on the way out.
    meet_consumers(TILES_ARE_READ)
    own_tiles = shared.KV_tiles._reinterpret(
        dtype, [4, CONSUMER_KEYS, PLAN.head_tile], shared.KV_tiles.layout
    )
    dK_tile, dV_tile = own_tiles.index(CONSUMER), own_tiles.index(2 + CONSUMER)
    scale = problem.scale_log2 / LOG2_E
    store_sums(dK_tile, dK, scale)
    store_sums(dV_tile, dV, 1.0)
    fence_async_shared()
    own_key = tile.number * KEY_TILE + CONSUMER * CONSUMER_KEYS
    if PLAN.packed:  # a tile without keys goes behind the end, where nothing is written
        own_key = gl.where(tile.exists, own_key, tile.sequence.num_keys)
    own_block = key_place(tile.batch_head, own_key, 0, tile.sequence, PLAN)
    tma.async_copy_shared_to_global(dK_desc, own_block, as_block(dK_tile, dK_desc))
    tma.async_copy_shared_to_global(dV_desc, own_block, as_block(dV_tile, dV_desc))


@gluon.jit
def _run(
    Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, rows_ptr, turns_ptr,
    problem, walked, PLAN: gl.constexpr
):  # fmt: skip
    """Allocate shared memory and barriers, and start producer, consumers and senders."""
    dtype: gl.constexpr = Q_desc.dtype
    Q_TILE_SIZE: gl.constexpr = PLAN.query_tile
    D_TILE: gl.constexpr = PLAN.head_tile
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_TILE_SIZE, D_TILE], dtype)
    DS_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEY_TILE, Q_TILE_SIZE], dtype)
    DQ_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [SENT_ROWS, SENT_COLUMNS], gl.float32
    )
    DS_SLOTS: gl.constexpr = 3 if PLAN.dq_way == LATE else 2
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()

    if PLAN.query_block:
        words_slots = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], ROWS)
    else:
        words_slots = None
    shared = _Shared(
        gl.allocate_shared_memory(dtype, [SLOTS, Q_TILE_SIZE, D_TILE], TILE),
        gl.allocate_shared_memory(dtype, [SLOTS, Q_TILE_SIZE, D_TILE], TILE),
        gl.allocate_shared_memory(dtype, [2, KEY_TILE, D_TILE], TILE),
        gl.allocate_shared_memory(dtype, [DS_SLOTS, KEY_TILE, Q_TILE_SIZE], DS_TILE),
        gl.allocate_shared_memory(gl.float32, [2, SENT_ROWS, SENT_COLUMNS], DQ_TILE),
        gl.allocate_shared_memory(gl.float32, [SLOTS, Q_TILE_SIZE], ROWS),
        gl.allocate_shared_memory(gl.float32, [SLOTS, Q_TILE_SIZE], ROWS),
        gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        words_slots,
    )

    mbarrier.init(shared.kv_full.index(0), count=1)
    for slot in gl.static_range(SLOTS):
        # the bytes of Q and dO; the producer's stores of L and delta
        mbarrier.init(shared.full.index(slot), count=2)
        mbarrier.init(shared.empty.index(slot), count=2)  # the two consumers
    fence_async_shared()

    # After the partitions: warps of the second consumer, of the producer and of the senders, and
    # their registers a thread. The first consumer has what is left, 240.
    if PLAN.dq_way == ALONE:
        gl.warp_specialize([
            (_consume, (shared, problem, walked, dQ_desc, dK_desc, dV_desc, 0, PLAN)),
            (_consume, (shared, problem, walked, dQ_desc, dK_desc, dV_desc, 1, PLAN)),
            (_produce, (shared, problem, walked, Q_desc, K_desc, V_desc, dO_desc, rows_ptr, PLAN)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (shared, problem, walked, dQ_desc, dK_desc, dV_desc, 0, PLAN)),
            (_consume, (shared, problem, walked, dQ_desc, dK_desc, dV_desc, 1, PLAN)),
            (_produce, (shared, problem, walked, Q_desc, K_desc, V_desc, dO_desc, rows_ptr, PLAN)),
            (_send, (shared, problem, walked, dQ_desc, turns_ptr, 0, PLAN)),
            (_send, (shared, problem, walked, dQ_desc, turns_ptr, 1, PLAN)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def hopper_backward_kernel(
    Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, rows_ptr, turns_ptr,
    N_KV_HEADS, HEADS_TOGETHER, SECOND_SUMS, N_QUERIES, N_KEYS, scale_log2,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Compute dK, dV (1, batch · kv_heads, keys, D) and the unscaled sums of dQ of dense attention.

    dQ's sums are in blocks of 64 rows and columns, in the order of threads. Keys that no query sees
    are neither read nor written. `rows` (batch · heads, 2, rows) holds L in base 2, and delta.
    `turns`, if PLAN.ordered, holds a zero for each consumer's part of 64 rows of dQ's accumulator;
    the accumulator's rows from SECOND_SUMS on are those of second laps.
    """
    problem = Problem(N_KV_HEADS, HEADS_TOGETHER, SECOND_SUMS, N_QUERIES, N_KEYS, scale_log2)
    _run(
        Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, rows_ptr, turns_ptr, problem,
        None, PLAN,
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*NUMBERS, "WHOLE", "SHARE"])
def hopper_split_backward_kernel(
    Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, rows_ptr, sums_ptr,
    N_KV_HEADS, HEADS_TOGETHER, SECOND_SUMS, N_QUERIES, N_KEYS, scale_log2, WHOLE, SHARE,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Compute the parts of dK and dV of divided walks, which `join` adds up, and add to dQ's sums.

    As `hopper_backward_kernel`, except that dK and dV go to `sums_ptr` (`backward_walk.Parts`). If
    WHOLE > 0, the kernel of the WHOLE tiles comes before this one.
    """
    problem = Problem(N_KV_HEADS, HEADS_TOGETHER, SECOND_SUMS, N_QUERIES, N_KEYS, scale_log2)
    parts = Parts(sums_ptr, WHOLE, SHARE)
    _run(
        Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, rows_ptr, rows_ptr, problem,
        parts, PLAN,
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*NUMBERS, "MASK_BATCHES", "MASK_HEADS", "WIDTH", "FULL_WIDTH"])
def hopper_listed_backward_kernel(
    Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, rows_ptr,
    num_partial_ptr, partial_ptr, patterns_ptr, num_full_ptr, full_ptr, words_ptr,
    N_KV_HEADS, HEADS_TOGETHER, SECOND_SUMS, N_QUERIES, N_KEYS, scale_log2,
    MASK_BATCHES, MASK_HEADS, WIDTH, FULL_WIDTH,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Compute what `hopper_backward_kernel` does, walking the lists of a `BlockMask`.

    A tile of keys visits the query tiles that its lists name (`backward_walk.Lists`).
    """
    problem = Problem(N_KV_HEADS, HEADS_TOGETHER, SECOND_SUMS, N_QUERIES, N_KEYS, scale_log2)
    walked = Lists(
        num_partial_ptr, partial_ptr, patterns_ptr, num_full_ptr, full_ptr, words_ptr,
        MASK_BATCHES, MASK_HEADS, WIDTH, FULL_WIDTH,
    )  # fmt: skip
    _run(
        Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, rows_ptr, rows_ptr, problem,
        walked, PLAN,
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*NUMBERS, "N_DOCUMENTS"])
def hopper_packed_backward_kernel(
    Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, rows_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    N_KV_HEADS, HEADS_TOGETHER, SECOND_SUMS, N_QUERIES, N_KEYS, scale_log2, N_DOCUMENTS,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Compute dK, dV (keys, kv_heads, D) and the unscaled sums of dQ of packed documents.

    Of `rows` (heads, 2, rows) the first N_QUERIES rows of a head are used.
    """
    problem = Problem(N_KV_HEADS, HEADS_TOGETHER, SECOND_SUMS, N_QUERIES, N_KEYS, scale_log2)
    documents = PackedDocuments(cu_seqlens_q_ptr, cu_seqlens_k_ptr, N_DOCUMENTS)
    _run(
        Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, rows_ptr, rows_ptr, problem,
        documents, PLAN,
    )  # fmt: skip


def hopper_backward(
    saved: Saved,
    *,
    is_causal: bool,
    scale: float,
    deterministic: bool = False,
    lists: TileLists | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous gradients of q, k and v in their dtype, bfloat16 or float16.

    q is (batch, heads, queries, head_dim), k and v are (batch, kv_heads, keys, head_dim). head_dim
    is at most 256, and no dimension is empty. `lse` is contiguous; the other tensors may
    have any strides, and what TMA cannot read is copied first. dK and dV are bit-reproducible, and
    dQ too if `deterministic`, which takes longer. `lists`, with neither `deterministic` nor
    `is_causal`, are those of a `BlockMask` whose tiles are whole multiples of the kernel's.
    """
    q, k, v, output, lse, grad_output, grad_lse = saved
    head_dim = q.shape[-1]
    if head_tile(head_dim) not in QUERY_TILES:  # always deterministic
        return hopper_wide_backward(saved, is_causal=is_causal, scale=scale)
    q, k, v, output, grad_output = (readable(x) for x in (q, k, v, output, grad_output))

    # sizes, in rows and in tiles
    batch, heads, num_queries, width = q.shape
    kv_heads, num_keys = k.shape[1:3]
    group, query_tile, key_tile = heads // kv_heads, QUERY_TILES[head_tile(width)], KEY_TILE.value
    block_size = (0, 0) if lists is None else lists.block_size
    padding = query_padding(block_size[0])
    num_rows = num_tiles(num_queries, padding) * padding
    num_key_tiles = num_tiles(min(num_keys, num_queries) if is_causal else num_keys, key_tile)
    whole_key_tiles = num_key_tiles * key_tile <= num_keys or (
        is_causal and num_queries <= num_keys
    )
    heads_together, places = 1, num_multiprocessors(q.device) or MULTIPROCESSORS
    if is_causal:
        heads_together = heads_at_a_time(
            Walks(num_key_tiles, num_rows // key_tile),
            heads=batch * kv_heads,
            fitting=_heads_that_fit(q, group, num_rows, L2_SHARE_BYTES),
            block_steps=group * key_tile // query_tile,
            start_steps=START_STEPS,
            places=places,
        )
    elif lists is not None:  # the host does not know their lengths
        fitting = _heads_that_fit(q, group, num_rows, HALF_L2_SHARE_BYTES)
        heads_together = min(batch * kv_heads, fitting)

    # the plan; laps have sums of dQ of their own (`turn_of_tile`)
    laps = 2 if deterministic and not is_causal else 1
    way = dq_way(head_tile(width), is_causal, num_queries, deterministic, listed=lists is not None)
    plan = BackwardPlan(
        head_tile(width), columns_of(width), query_tile, group, is_causal, whole_key_tiles, way,
        deterministic, *block_size,
    )  # fmt: skip

    # which walks are divided: none, unless the call allows it
    division = Division(num_key_tiles * batch * kv_heads, 1, 0)
    in_one_piece = columns_of(width) == head_tile(width)  # the sums of a consumer
    if (
        lists is None
        and not deterministic
        and in_one_piece
        and (not is_causal or num_queries <= num_keys)
    ):
        division = divide_walks(
            key_tiles=num_key_tiles, batch_heads=batch * kv_heads,
            steps=num_rows // query_tile, group=group, head_tile=head_tile(width),
            is_causal=is_causal, num_multiprocessors=places,
        )  # fmt: skip

    # results and scratch memory
    grad_q = empty_like(q)
    grad_k, grad_v = gradients_of_keys(k, num_key_tiles * key_tile)
    rows, sums = _scratch(batch * heads, num_rows, q, laps)
    part_sums = empty(
        (division.programs, 4, HALF.value * head_tile(width)), torch.float32, q.device
    )
    turns = (
        empty((laps, batch * heads, num_rows // HALF.value, 2), torch.int32, q.device)
        if deterministic
        else None
    )

    log_launch("backward", f"hopper_backward_{query_tile}x{key_tile}", q, num_queries, num_keys)
    with stage("preprocess"):
        preprocess(output, lse, grad_output, grad_lse, rows, None if deterministic else sums, turns)
        words = None if lists is None else transposed_words(lists.token_bits, query_tile)

    with stage("dkv"):  # and dQ's sums
        # programs count batch and heads of dK and dV as one
        one_batch = (1, batch * kv_heads, num_keys, width)
        tiles = (
            tile_descriptor(q, query_tile),
            tile_descriptor(k, key_tile), tile_descriptor(v, key_tile),
            tile_descriptor(grad_output, query_tile),
            tile_descriptor(sums, SENT_ROWS.value, SENT_COLUMNS.value),
            *(
                tile_descriptor(x.view(one_batch), CONSUMER_KEYS.value)
                for x in (grad_k, grad_v)
            ),
            rows,
        )  # fmt: skip
        second_sums = batch * heads * num_rows
        numbers = (
            kv_heads,
            heads_together,
            second_sums,
            num_queries,
            num_keys,
            scale * LOG2_E.value,
        )
        grid, options = (division.whole,), _options(plan, q)
        if lists is None:
            if division.whole:
                launch(
                    hopper_backward_kernel,
                    grid,
                    (*tiles, rows if turns is None else turns),
                    numbers,
                    options,
                )
            if division.programs:
                launch(
                    hopper_split_backward_kernel, (division.programs,), (*tiles, part_sums),
                    (*numbers, division.whole, division.share),
                    _options(plan._replace(split=True), q),
                )  # fmt: skip
        else:
            walked = (
                lists.q_num_blocks, lists.q_indices, lists.q_tokens,
                lists.full_q_num_blocks, lists.full_q_indices,
            )  # fmt: skip
            sizes = (
                *lists.q_num_blocks.shape[:2],
                lists.q_indices.shape[3],
                lists.full_q_indices.shape[3],
            )
            launch(
                hopper_listed_backward_kernel,
                grid,
                (*tiles, *walked, words),
                (*numbers, *sizes),
                options,
            )

    with stage("dq"):
        # A second lap ends before the first block of its walk, so it never reaches the block of the
        # last key tile.
        second_rows = (
            (min(num_key_tiles, num_rows // key_tile) - 1) * key_tile if laps == 2 else None
        )
        convert(sums, grad_q, num_rows, scale, second_rows=second_rows)
        if division.programs:
            join(part_sums, grad_k, grad_v, num_key_tiles, division, is_causal, scale)
    return _cut((grad_q, grad_k, grad_v), head_dim)


def hopper_packed_backward(
    saved: Saved, documents: Documents, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous gradients of packed q, k and v; each document attends to itself alone.

    As `hopper_backward` for each document's queries and keys. q is (total_queries, heads,
    head_dim), k and v are (total_keys, kv_heads, head_dim), and `lse` is (heads, total_queries).
    The largest number of queries of a document decides how dQ is formed (`dq_way`).
    """
    q, k, v, output, lse, grad_output, grad_lse = saved
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = documents
    head_dim = q.shape[-1]
    q, k, v, output, grad_output = (readable(x) for x in (q, k, v, output, grad_output))

    # sizes, in rows and in tiles
    (num_queries, heads, width), (num_keys, kv_heads, _) = q.shape, k.shape
    group, query_tile, key_tile = heads // kv_heads, QUERY_TILES[head_tile(width)], KEY_TILE.value
    num_documents = len(cu_seqlens_q) - 1
    num_rows = (num_queries // QUERY_PADDING.value + num_documents + 1) * QUERY_PADDING.value
    longest_rows = num_tiles(max(1, min(max_seqlen_q, num_queries)), key_tile) * key_tile
    fitting = _heads_that_fit(q, group, longest_rows, L2_SHARE_BYTES)
    heads_together = min(fitting, kv_heads)
    if is_causal:
        blocks = longest_rows // key_tile
        seen = min(blocks, num_tiles(max(1, min(max_seqlen_k, num_keys)), key_tile))
        heads_together = heads_at_a_time(
            Walks(seen, blocks, num_documents, num_tiles(num_keys, key_tile)),
            heads=kv_heads,
            fitting=fitting,
            block_steps=group * key_tile // query_tile,
            start_steps=START_STEPS,
            places=num_multiprocessors(q.device) or MULTIPROCESSORS,
        )
    whole_key_tiles = is_causal and cu_seqlens_q is cu_seqlens_k
    way = dq_way(head_tile(width), is_causal, max_seqlen_q, False, packed=True)
    plan = BackwardPlan(
        head_tile(width),
        columns_of(width),
        query_tile,
        group,
        is_causal,
        whole_key_tiles,
        way,
        False,
        packed=True,
    )

    grad_q, grad_k, grad_v = empty_like(q), empty_like(k), empty_like(v)
    rows, sums = _scratch(heads, num_rows, q)
    log_launch(
        "packed_backward", f"hopper_backward_{query_tile}x{key_tile}", q, max_seqlen_q, num_keys
    )
    with stage("preprocess"):  # rows do not depend on their document: all are one sequence
        as_one, grad_as_one = (x.transpose(0, 1)[None] for x in (output, grad_output))
        preprocess(as_one, lse, grad_as_one, grad_lse, rows, sums, None)
    with stage("dkv"):  # and dQ's sums
        inputs = ((q, query_tile), (k, key_tile), (v, key_tile), (grad_output, query_tile))
        tensors = (
            *(document_descriptor(x, rows_of_tile) for x, rows_of_tile in inputs),
            tile_descriptor(sums, SENT_ROWS.value, SENT_COLUMNS.value),
            *(document_descriptor(x, CONSUMER_KEYS.value) for x in (grad_k, grad_v)),
            rows, cu_seqlens_q, cu_seqlens_k,
        )  # fmt: skip
        launch(
            hopper_packed_backward_kernel,
            ((num_keys // key_tile + num_documents + 1) * kv_heads,),
            tensors,
            (
                kv_heads, heads_together, heads * num_rows, num_queries, num_keys,
                scale * LOG2_E.value, num_documents,
            ),
            _options(plan, q),
        )  # fmt: skip
    with stage("dq"):
        convert(sums, grad_q, num_rows, scale, cu_seqlens_q)
    return _cut((grad_q, grad_k, grad_v), head_dim)


def dq_way(
    head_tile: int,
    is_causal: bool,
    num_queries: int,
    deterministic: bool,
    *,
    listed: bool = False,
    packed: bool = False,
) -> int:
    """Return how dQ is formed and sent: ALONE, BY_SENDERS or LATE, the fastest way as measured.

    If `deterministic`, the way has sender warps, which keep the order of additions. `num_queries`
    of packed documents are those of the longest.
    """
    if head_tile == 64 or listed:
        return LATE.value
    if not is_causal:
        return BY_SENDERS.value
    if deterministic or num_queries >= LATE_FROM:
        return LATE.value
    return BY_SENDERS.value if packed else ALONE.value


def _options(plan: BackwardPlan, q: Tensor) -> dict[str, Hashable]:
    """Return the main kernel's launch options; it starts while the kernel before it ends."""
    return {
        "PLAN": plan,
        "num_warps": CONSUMER_WARPS,
        "launch_pdl": overlap_options(q.device)["OVERLAP"],
    }


def _heads_that_fit(q: Tensor, group: int, num_rows: int, share: int) -> int:
    """Return how many key heads fill `share` bytes of L2 with Q, dO and float32 dQ, at least 1."""
    return max(1, share // (group * num_rows * head_tile(q.shape[-1]) * (2 * q.element_size() + 4)))


def _scratch(heads: int, num_rows: int, q: Tensor, laps: int = 1) -> tuple[Tensor, Tensor]:
    """Return uninitialised (rows, sums): memory for L and delta, and for dQ's sums as sent.

    `rows` is (heads, 2, num_rows), `sums` (1, 1, sent rows, SENT_COLUMNS) with room for each lap;
    both are float32.
    """
    sent_rows = laps * heads * num_rows * head_tile(q.shape[-1]) // SENT_COLUMNS.value
    rows = empty((heads, 2, num_rows), torch.float32, q.device)
    return rows, empty((1, 1, sent_rows, SENT_COLUMNS.value), torch.float32, q.device)


def _cut(grads: tuple[Tensor, Tensor, Tensor], head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients without the columns by which inputs were padded."""
    grad_q, grad_k, grad_v = (
        x if x.shape[-1] == head_dim else x[..., :head_dim].contiguous() for x in grads
    )
    return grad_q, grad_k, grad_v
