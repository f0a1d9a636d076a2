"""The forward for Hopper: one warp copies, one to three warp groups compute.

A program computes a tile of queries of one head, 64 rows for each of its computing warp groups (consumers), and may go
on to further tiles. Key tiles are walked from the last visible one to the first, so only the first ones need a mask.

                  step 0        step 1          step 2         ...   step n
  copier          Q, K(0)       K(1), V(0)      K(2), V(1)     ...   V(n-1)            n key tiles in n + 1 steps
  consumer        S = Q K(0)'   S = Q K(1)'     S = Q K(2)'    ...                      or skips K(0), see below
                                O += P(0) V(0)  O += P(1) V(1) ...   O += P(n-1) V(n-1)
                  P(0)          P(1)            P(2)           ...   O / l, L

One slot of the ring holds what one step multiplies, K(j) and V(j-1): one barrier to wait for and one to release. Steps
are counted over all tiles of a program, and step i uses slot i mod the number of slots.
Each slot has `full`, on which the copies' bytes arrive, and `empty`, on which every consumer arrives; each consumer's
64 rows of Q have such a pair too. `tests/hopper_protocol.py` has the protocol as a model.

The two schedules of large grids, by columns of a head tile:
  64   three consumers, 192 x 128. A step waits for both products, then takes the softmax, while the other consumers'
       products run. Exponentials take as long as products here, and a third consumer hides more of them. Nothing
       makes them take turns but that the tensor cores serve one at a time:
         consumer 0   products   softmax               products   softmax
         consumer 1              products   softmax               products
         consumer 2                         products   softmax
  128  two consumers, 128 x 128, 240 registers a thread, Q among them. A step waits for S alone, and P(j-1) V(j-1) runs
       under the softmax. O is rescaled only when a row's maximum has grown by more than 2^8, and only then do the four
       threads that share a row speak to each other: each sums its own share until the tile ends.
         tensor cores   S(1)   P(0) V(0)         S(2)   P(1) V(1)
         consumer              softmax of S(1)          softmax of S(2)
Their tiles are long ones, and few calls of short sequences have as many as the GPU has multiprocessors. So there are
schedules of one consumer, 64 x 128, with the same steps; at 64 columns two programs share a multiprocessor, and each
covers the other as consumers do. `schedule.plan_forward` estimates which ends first.

Under a causal mask a tile of 192 rows ends with keys that its first 64 rows, of every other tile its first 128, do not
see: those consumers skip the first scores, 3 to 4 % of the time at 4096 tokens.

At 64 columns O of a row that sees one key is that key's value, as P is 1 then: the tiles that the diagonal or the end
cuts, in which rows may see few keys, take `_exact_softmax`. At 128 columns P of the largest score is 1 but for the
rounding of the scaled maximum, which is 2^-8 where scores are 1e5.

Tiles of queries end where the queries end; rows to spare are in the first tile, which is the shortest causal one. The
order of tiles is `schedule.plan_forward`'s: one program a tile, or programs that stay and take tiles in pairs or in
rounds, whose copier starts on the next tile as soon as a slot is free.

Sources: FlashAttention-3 (Shah et al. 2024) for warp specialisation and overlap, FlashAttention-4 for rescaling lazily.
"""

from __future__ import annotations

from typing import NamedTuple

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

from cs336_systems.attention.hopper.builtins import (
    along_rows,
    by_threads,
    hide_columns,
    raise_maxima,
    rescale_rows,
    warp_fence,
)
from cs336_systems.attention.hopper.descriptors import readable, tile_descriptor
from cs336_systems.attention.hopper.schedule import CONSUMER_ROWS, plan_forward
from cs336_systems.attention.triton.launch import launch, log_launch
from cs336_systems.attention.triton.operands import empty_results, num_multiprocessors
from cs336_systems.attention.triton.steps import LN_2, LOG2_E, LOWEST
from cs336_systems.measure.stages import stage

ROWS = gl.constexpr(CONSUMER_ROWS)  # of a consumer: what one wgmma of a warp group computes
COPIER_REGISTERS = gl.constexpr(24)  # the least that a warp can have


class _Problem(NamedTuple):
    """The numbers of a call."""

    N_QUERIES: gl.tensor
    N_KEYS: gl.tensor
    N_HEADS: gl.tensor
    GROUP: gl.tensor  # query heads that share a key head
    BATCH_HEADS: gl.tensor
    HEADS_TOGETHER: gl.tensor  # heads whose keys and values the L2 cache should hold at one time
    scale_log2: gl.tensor


class _Shared(NamedTuple):
    """What copier and consumers share: tiles in shared memory and the barriers that guard them."""

    Q_tiles: gl.shared_memory_descriptor  # (consumers, ROWS, D_TILE)
    O_tiles: gl.shared_memory_descriptor  # the same
    K_ring: gl.shared_memory_descriptor  # (slots, K_TILE_SIZE, D_TILE)
    V_ring: gl.shared_memory_descriptor  # the same
    q_full: gl.shared_memory_descriptor  # a barrier a consumer
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # a barrier a slot
    empty: gl.shared_memory_descriptor


# Which tiles a program computes, and which keys a tile sees. Arithmetic on integers, mirrored by the model; the
# tests run the functions below as Python and compare.


@gluon.jit
def num_work_items(num_tiles, BATCH_HEADS, PAIRED: gl.constexpr):
    """Tiles of queries, or pairs of them, of all heads."""
    if PAIRED:
        return (num_tiles + 1) // 2 * BATCH_HEADS
    else:
        return num_tiles * BATCH_HEADS


@gluon.jit
def end_of_turns(num_items, program, num_programs, IN_ROUNDS: gl.constexpr):
    """Where a program's turns end: they are the numbers from its own on, num_programs apart."""
    if IN_ROUNDS:
        rounds = num_items // num_programs
        position = program + rounds % 2 * (num_programs - 1 - 2 * program)
        return (rounds + (position < num_items % num_programs)) * num_programs
    else:
        return num_items


@gluon.jit
def item_of_turn(turn, program, num_programs, IN_ROUNDS: gl.constexpr):
    """The work item of a turn. IN_ROUNDS: every other round hands items out from the last program to the first."""
    if IN_ROUNDS:
        return turn + turn // num_programs % 2 * (num_programs - 1 - 2 * program)
    else:
        return turn


@gluon.jit
def tiles_of_item(item, num_tiles, PAIRED: gl.constexpr):
    """How many tiles of queries a work item has."""
    if PAIRED:
        pairs = (num_tiles + 1) // 2
        return 1 + (item % pairs < num_tiles // 2)
    else:
        return 1


@gluon.jit
def tile_of_item(item, side, num_tiles, BATCH_HEADS, HEADS_TOGETHER, PAIRED: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """(tile, index into batch and heads) of the `side`-th tile of work item `item`.

    PAIRED: an item is the longest tile left of a head with the shortest, so that all items take equally long.
    Otherwise an item is one tile, HEADS_TOGETHER heads at a time, the longest causal tiles first.
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

    The last tile ends with the queries, up to ALIGNMENT: rows to spare are in the first, the shortest causal one.
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
def _work(problem, PLAN: gl.constexpr):
    """(tiles of queries of a head, work items of all heads)."""
    Q_TILE_SIZE: gl.constexpr = PLAN.consumers * ROWS
    num_tiles = (problem.N_QUERIES + Q_TILE_SIZE - 1) // Q_TILE_SIZE
    return num_tiles, num_work_items(num_tiles, problem.BATCH_HEADS, PLAN.paired)


@gluon.jit
def _tile_of_work(item, side, num_tiles, problem, PLAN: gl.constexpr):
    """(index into batch and heads, first query, key tiles that are seen, key tiles that are walked) of a tile."""
    Q_TILE_SIZE: gl.constexpr = PLAN.consumers * ROWS
    tile, batch_head = tile_of_item(
        item, side, num_tiles, problem.BATCH_HEADS, problem.HEADS_TOGETHER, PLAN.paired, PLAN.is_causal
    )
    first_query = first_query_of(tile, num_tiles, problem.N_QUERIES, Q_TILE_SIZE, PLAN.alignment)
    live = live_key_tiles(first_query, problem.N_QUERIES, problem.N_KEYS, Q_TILE_SIZE, PLAN.key_tile, PLAN.is_causal)
    return batch_head, first_query, live, max(live, PLAN.masked_tiles)


@gluon.jit
def rows_of_consumer(first_query, consumer: gl.constexpr, N_QUERIES):
    """The first of a consumer's rows in a tile; rows before the first query become rows behind the last, and TMA reads
    them as zeros and does not write them."""
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


@gluon.jit
def _copy_tiles(Q_desc, K_desc, V_desc, shared, problem, PLAN: gl.constexpr):
    """The copier: fill the ring as the consumers empty it."""
    CONSUMERS: gl.constexpr = PLAN.consumers
    K_TILE_SIZE: gl.constexpr = PLAN.key_tile
    SLOTS: gl.constexpr = PLAN.slots
    num_tiles, num_items = _work(problem, PLAN)
    step = 0
    tiles_done = 0
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    for turn in range(program, end_of_turns(num_items, program, num_programs, PLAN.in_rounds), num_programs):
        item = item_of_turn(turn, program, num_programs, PLAN.in_rounds)
        for side in range(tiles_of_item(item, num_tiles, PLAN.paired)):
            batch_head, first_query, live, num_key_tiles = _tile_of_work(item, side, num_tiles, problem, PLAN)
            batch = batch_head // problem.N_HEADS
            head = batch_head % problem.N_HEADS
            kv_head = head // problem.GROUP

            # step 0: K(0), and Q while it is on its way
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.empty.index(slot), phase ^ 1)
            mbarrier.expect(shared.full.index(slot), K_desc.block_type.nbytes)
            # A tile that nobody sees is read from behind the end, as zeros.
            first_key = gl.where(num_key_tiles > live, problem.N_KEYS, (live - 1) * K_TILE_SIZE)
            tma.async_copy_global_to_shared(
                K_desc, [batch, kv_head, first_key, 0], shared.full.index(slot), shared.K_ring.index(slot)
            )
            for consumer in gl.static_range(CONSUMERS):
                first_row = rows_of_consumer(first_query, consumer, problem.N_QUERIES)
                mbarrier.wait(shared.q_empty.index(consumer), (tiles_done & 1) ^ 1)
                mbarrier.expect(shared.q_full.index(consumer), Q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    Q_desc, [batch, head, first_row, 0],
                    shared.q_full.index(consumer), shared.Q_tiles.index(consumer),
                )  # fmt: skip
            step += 1

            # steps 1 to n - 1: K(j) and V(j - 1)
            for j in range(1, num_key_tiles):
                slot, phase = ring_slot(step, SLOTS)
                mbarrier.wait(shared.empty.index(slot), phase ^ 1)
                mbarrier.expect(shared.full.index(slot), K_desc.block_type.nbytes + V_desc.block_type.nbytes)
                previous_key = first_key
                first_key = (num_key_tiles - 1 - j) * K_TILE_SIZE
                tma.async_copy_global_to_shared(
                    K_desc, [batch, kv_head, first_key, 0], shared.full.index(slot), shared.K_ring.index(slot)
                )
                tma.async_copy_global_to_shared(
                    V_desc, [batch, kv_head, previous_key, 0], shared.full.index(slot), shared.V_ring.index(slot)
                )
                step += 1

            # step n: V(n - 1), the sequence's first
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.empty.index(slot), phase ^ 1)
            mbarrier.expect(shared.full.index(slot), V_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                V_desc, [batch, kv_head, first_key, 0], shared.full.index(slot), shared.V_ring.index(slot)
            )
            step += 1
            tiles_done += 1


@gluon.jit
def _hide_keys(S, last_key, first_key, IS_CAUSAL: gl.constexpr):
    """Scores of the keys from `first_key` on, -inf past the last visible key: one for each row, or one for all."""
    if IS_CAUSAL:
        return hide_columns(S, last_key - first_key)
    else:
        columns = gl.arange(0, S.shape[1], gl.SliceLayout(0, S.type.layout))[None, :]
        return gl.where(columns <= last_key - first_key, S, float("-inf"))


@gluon.jit
def _exact_softmax(S, m, l, scale_log2):
    """Take raw scores into the running maximum m, raw too, and sum l; also the factor for what came before.

    P of a row's largest score is 1, and that of another as exact as the difference of the two scores.
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
    """As `_exact_softmax` at one instruction less a score; m is in base 2, and what came before relative to m + rest.

    A scaled score minus the scaled maximum is one multiply-add, whose product is not rounded though the maximum's was:
    P of the largest score is near 1 and not 1, by 2^-8 where scores are 1e5, and bfloat16 rounds it to something that l
    has not summed. Among many keys that is one rounding of many; rows with few keys have them in the tiles that the
    diagonal or the end cuts, and those take the exact form.
    """
    m_new = gl.maximum(m, gl.max(S, axis=1) * scale_log2)
    P = gl.exp2(S * scale_log2 - m_new[:, None])
    factor = gl.exp2(m - m_new + rest)
    return P, factor, m_new, l * factor + gl.sum(P, axis=1)


@gluon.jit
def _lazy_softmax(S, m, l, scale_log2):
    """As `_softmax` without its `rest`, and m stays where it is until a score exceeds it by more than LAG.

    The factor is then 1 in almost every step. m, l and the factor are (ROWS, 4), a number for each of the four threads
    that share a row: l is what a thread has summed itself, so that nothing is passed between threads while no maximum
    rises.
    """
    scores = by_threads(S)
    m_new = raise_maxima(gl.max(gl.max(scores, axis=3), axis=1) * scale_log2, m)
    P = gl.exp2(scores * scale_log2 - along_rows(m_new, scores))
    factor = gl.exp2(m - m_new)
    l = l * factor + gl.sum(gl.sum(P, axis=3), axis=1)
    return gl.convert_layout(gl.reshape(P, S.shape), S.type.layout), factor, m_new, l


@gluon.jit
def _issue(Q, P, O, zero, shared, slot, phase):
    """Start both products of a step as soon as its slot is full: the scores, and O with the last step's P."""
    mbarrier.wait(shared.full.index(slot), phase)
    S = warpgroup_mma(Q, shared.K_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    O = warpgroup_mma(P, shared.V_ring.index(slot), O, is_async=True)
    return S, O


@gluon.jit
def _first_step(
    Q, m, l, last_key, first_key, scale_log2, zero, shared, slot, P_LAYOUT: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """P of a tile's first scores, for the next step to multiply by the values; m (raw, or lazy in base 2) and l."""
    S_pending = warpgroup_mma(Q, shared.K_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    S = warpgroup_mma_wait(0, [S_pending])
    mbarrier.arrive(shared.empty.index(slot), count=1)
    S = _hide_keys(S, last_key, first_key, PLAN.is_causal)
    if PLAN.overlapped:
        scores, factor, m, l = _lazy_softmax(S, m, l, scale_log2)
    else:
        scores, factor, m, l = _exact_softmax(S, m, l, scale_log2)
    return gl.convert_layout(scores.to(Q.dtype), P_LAYOUT), m, l


@gluon.jit
def _step(
    Q, P, O, m, rest, l, last_key, first_key, scale_log2, zero, shared, step, PLAN: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Not overlapped: both products, then the softmax while another consumer's or program's run. MASKED: m is raw."""
    slot, phase = ring_slot(step, PLAN.slots)
    S, O = _issue(Q, P, O, zero, shared, slot, phase)
    S, O = warpgroup_mma_wait(0, [S, O])
    mbarrier.arrive(shared.empty.index(slot), count=1)
    if MASKED:
        S = _hide_keys(S, last_key, first_key, PLAN.is_causal)
        scores, factor, m, l = _exact_softmax(S, m, l, scale_log2)
    else:
        scores, factor, m, l = _softmax(S, m, rest, l, scale_log2)
    O = O * gl.convert_layout(factor, gl.SliceLayout(1, O.type.layout))[:, None]
    return gl.convert_layout(scores.to(P.dtype), P.type.layout), O, m, l


@gluon.jit
def _overlapped_step(Q, P, O, m, l, scale_log2, zero, shared, step, PLAN: gl.constexpr):
    """Overlapped: the softmax of this step's scores while the product with the last step's P runs."""
    slot, phase = ring_slot(step, PLAN.slots)
    S, O = _issue(Q, P, O, zero, shared, slot, phase)
    S = warpgroup_mma_wait(1, [S])
    scores, factor, m, l = _lazy_softmax(S, m, l, scale_log2)
    l = warp_fence(l)
    O = warpgroup_mma_wait(0, [O])
    mbarrier.arrive(shared.empty.index(slot), count=1)
    O = rescale_rows(O, factor)
    return gl.convert_layout(scores.to(P.dtype), P.type.layout), O, m, l


@gluon.jit
def _attend(consumer: gl.constexpr, O_desc, L_ptr, shared, problem, PLAN: gl.constexpr):
    """A consumer: rows [consumer * ROWS, (consumer + 1) * ROWS) of each tile of queries."""
    D_TILE: gl.constexpr = PLAN.head_tile
    K_TILE_SIZE: gl.constexpr = PLAN.key_tile
    MASKED_TILES: gl.constexpr = PLAN.masked_tiles
    SLOTS: gl.constexpr = PLAN.slots
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K_TILE_SIZE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_TILE, 16])
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    num_tiles, num_items = _work(problem, PLAN)
    zero = gl.zeros([ROWS, K_TILE_SIZE], gl.float32, S_LAYOUT)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    THREAD_LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_threads(zero).type.layout))
    Q_tile = shared.Q_tiles.index(consumer)
    O_tile = shared.O_tiles.index(consumer)
    step = 0
    tiles_done = 0
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    for turn in range(program, end_of_turns(num_items, program, num_programs, PLAN.in_rounds), num_programs):
        item = item_of_turn(turn, program, num_programs, PLAN.in_rounds)
        for side in range(tiles_of_item(item, num_tiles, PLAN.paired)):
            batch_head, first_query, _, num_key_tiles = _tile_of_work(item, side, num_tiles, problem, PLAN)
            first_row = rows_of_consumer(first_query, consumer, problem.N_QUERIES)
            rows = first_row + gl.arange(0, ROWS, ROW_LAYOUT)
            last_key = problem.N_KEYS - 1
            if PLAN.is_causal:
                last_key = gl.minimum(rows, last_key)
            if PLAN.overlapped:
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
            if PLAN.overlapped:
                Q = Q_tile.load(Q_LAYOUT)
            else:
                Q = Q_tile
            first_key = (num_key_tiles - 1) * K_TILE_SIZE
            if MASKED_TILES == 1:
                P, m, l = _first_step(
                    Q, m, l, last_key, first_key, problem.scale_log2, zero, shared, slot, P_LAYOUT, PLAN
                )
            else:  # more rows than a key tile has keys: the first consumers' may see none of these
                P = gl.zeros([ROWS, K_TILE_SIZE], O_desc.dtype, P_LAYOUT)
                if sees_tile(first_row, first_key):
                    P, m, l = _first_step(
                        Q, m, l, last_key, first_key, problem.scale_log2, zero, shared, slot, P_LAYOUT, PLAN
                    )
                else:
                    mbarrier.arrive(shared.empty.index(slot), count=1)
            step += 1

            # steps 1 to n - 1, first those with hidden keys
            for j in gl.static_range(1, MASKED_TILES):
                first_key = (num_key_tiles - 1 - j) * K_TILE_SIZE
                P, O, m, l = _step(
                    Q, P, O, m, rest, l, last_key, first_key, problem.scale_log2, zero, shared, step, PLAN, True
                )
                step += 1
            if not PLAN.overlapped:
                m, rest = _in_base_2(m, problem.scale_log2)
            for _ in range(MASKED_TILES, num_key_tiles):
                if PLAN.overlapped:
                    P, O, m, l = _overlapped_step(Q, P, O, m, l, problem.scale_log2, zero, shared, step, PLAN)
                else:
                    P, O, m, l = _step(
                        Q, P, O, m, rest, l, last_key, 0, problem.scale_log2, zero, shared, step, PLAN, False
                    )
                    rest = gl.zeros_like(rest)
                step += 1
            mbarrier.arrive(shared.q_empty.index(consumer), count=1)
            tiles_done += 1

            # step n: the last product, under which the row sums are inverted
            slot, phase = ring_slot(step, SLOTS)
            mbarrier.wait(shared.full.index(slot), phase)
            O_pending = warpgroup_mma(P, shared.V_ring.index(slot), O, is_async=True)
            if PLAN.overlapped:
                m = gl.convert_layout(gl.max(m, axis=1), ROW_LAYOUT)
                l = gl.convert_layout(gl.sum(l, axis=1), ROW_LAYOUT)
            L = (m + (rest + gl.log2(l))) * LN_2
            inverse = 1.0 / l
            O = warpgroup_mma_wait(0, [O_pending])
            mbarrier.arrive(shared.empty.index(slot), count=1)
            step += 1
            O = O * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]

            # store; rows past the last query are cut off
            tma.store_wait(0)  # the last tile's O has left shared memory
            O_tile.store(gl.reshape(O.to(O_desc.dtype), [ROWS, D_TILE]))
            fence_async_shared()
            batch = batch_head // problem.N_HEADS
            tma.async_copy_shared_to_global(O_desc, [batch, batch_head % problem.N_HEADS, first_row, 0], O_tile)
            gl.store(L_ptr + batch_head.to(gl.int64) * problem.N_QUERIES + rows, L, mask=rows < problem.N_QUERIES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N_QUERIES", "N_KEYS", "N_HEADS", "GROUP", "BATCH_HEADS", "HEADS_TOGETHER"])
def hopper_forward_kernel(
    Q_desc, K_desc, V_desc, O_desc, L_ptr,
    N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2,
    PLAN: gl.constexpr,
):  # fmt: skip
    """O (batch, heads, queries, D) and L (batch, heads, queries), both contiguous; PLAN: `schedule.KernelPlan`."""
    CONSUMERS: gl.constexpr = PLAN.consumers
    SLOTS: gl.constexpr = PLAN.slots
    K_TILE_SIZE: gl.constexpr = PLAN.key_tile
    D_TILE: gl.constexpr = PLAN.head_tile
    dtype: gl.constexpr = Q_desc.dtype
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D_TILE], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    problem = _Problem(N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2)
    shared = _Shared(
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(dtype, [SLOTS, K_TILE_SIZE, D_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(dtype, [SLOTS, K_TILE_SIZE, D_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
    )
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(shared.q_full.index(consumer), count=1)
        mbarrier.init(shared.q_empty.index(consumer), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(shared.full.index(slot), count=1)
        mbarrier.init(shared.empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_attend, (0, O_desc, L_ptr, shared, problem, PLAN)),
                (_copy_tiles, (Q_desc, K_desc, V_desc, shared, problem, PLAN)),
            ],
            [1],
            [COPIER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (0, O_desc, L_ptr, shared, problem, PLAN)),
                (_attend, (1, O_desc, L_ptr, shared, problem, PLAN)),
                (_copy_tiles, (Q_desc, K_desc, V_desc, shared, problem, PLAN)),
            ],
            [4, 1],
            [PLAN.registers, COPIER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (0, O_desc, L_ptr, shared, problem, PLAN)),
                (_attend, (1, O_desc, L_ptr, shared, problem, PLAN)),
                (_attend, (2, O_desc, L_ptr, shared, problem, PLAN)),
                (_copy_tiles, (Q_desc, K_desc, V_desc, shared, problem, PLAN)),
            ],
            [4, 4, 1],
            [PLAN.registers, PLAN.registers, COPIER_REGISTERS],
        )


def hopper_forward(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys head_dim"],
    is_causal: bool,
    scale: float,
    config: str = "",
) -> tuple[Float[Tensor, "batch heads queries head_dim"], Float[Tensor, "batch heads queries"]]:
    """Contiguous O in q's dtype and the log-sum-exp in float32, natural log.

    Inputs are validated, non-empty, of 16 bits, with a head_dim up to 128, and on the current device, of sm_90.
    `config` may name a schedule and an order of tiles (`schedule.plan_forward`); other kernels' configurations in it
    are left alone. A causal row's last bits may depend on the schedule, and so on how many heads a call has.
    """
    head_dim = q.shape[-1]
    q, k, v = readable(q), readable(k), readable(v)
    batch, heads, num_queries, width = q.shape
    num_keys, group = k.shape[2], heads // k.shape[1]
    planned = plan_forward(
        head_dim=width, is_causal=is_causal, num_queries=num_queries, num_keys=num_keys, batch_heads=batch * heads,
        group=group, num_multiprocessors=num_multiprocessors(q.device) or 1, config=config,
    )  # fmt: skip
    schedule = planned.schedule
    output, lse = empty_results(q)
    operands = ((q, CONSUMER_ROWS), (k, schedule.key_tile), (v, schedule.key_tile), (output, CONSUMER_ROWS))
    tiles = [tile_descriptor(x, rows) for x, rows in operands]
    numbers = (
        num_queries, num_keys, heads, group, batch * heads, planned.heads_together, scale * LOG2_E.value
    )  # fmt: skip
    log_launch("forward", schedule.name(planned.order), q, num_queries, num_keys)
    with stage("forward"):
        launch(
            hopper_forward_kernel, (planned.num_programs,), (*tiles, lse), numbers,
            {"PLAN": planned.kernel_plan, **schedule.launch_options},
        )  # fmt: skip
    return (output if width == head_dim else output[..., :head_dim].contiguous()), lse
