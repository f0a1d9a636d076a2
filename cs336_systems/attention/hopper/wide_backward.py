"""The Hopper backward above 128 columns a head: two Gluon kernels behind a light Triton one.

  preprocess   delta = rowsum(dO ∘ O), minus the gradient of L if one arrives; L in base 2
  dkdv         of 64 keys a program:      dV += Pᵀ dO and dK += dSᵀ Q over the queries that see them
  dq           of 128 queries a program:  dQ += dS K                  over the keys that they see

A float32 accumulator of 64 rows and 256 columns takes 128 registers a thread of a warp group: one
fits, two do not. So each consumer has one, and the scores are formed twice: 3 + 4 matmuls in place
of 5. But nothing is added in memory, and all gradients are bit-reproducible. With one kernel of
five matmuls shared memory would move 490 KiB a tile of 64 queries and 64 keys in 3,920 clocks, and
the L2 cache 128 KiB, half of it float32 sums. With two kernels it is 3,840 clocks, of which the
tensor cores have work in 3,584, and 96 KiB.

In `dkdv` one consumer makes P and dV, the other dP, dS and dK. K and V stay in shared memory, Q and
dO are streamed in tiles of 64 rows, two of each at a time, and P is handed over in float32 by a
ring of two:

    step j   P = exp2(scale · log₂e · S - L); hand P over      take P over; dS = P ∘ (dP - delta)
             issue dV += Pᵀ dO(j)                              issue dK += dSᵀ Q(j)
             issue S = K Q(j + 1)'                             issue dP = V dO(j + 1)'
             wait for dV; release dO(j)                        wait for dK; release Q(j)
             wait for S                                        wait for dP

In `dq` both consumers have 64 rows of queries. Q and dO stay; two tiles of K and one of V are
streamed. A step, and what is in flight meanwhile:

    step j   issue dP = dO V(j)'                               dP
             P = exp2(scale · log₂e · S - L)                   dP
             wait for dP; release V(j)
             issue dQ += dS K(j)                               dQ
             issue S = Q K(j + 1)'                             dQ, S
             wait for dQ; release K(j)                         S
             wait for S

In both kernels S comes with the step before. The last step computes its own product again, which is
not used: a branch around a matmul would make it synchronous.

`dq` walks as the forward does, from the diagonal back (`walk.py`). `dkdv` walks from the diagonal
on or, without a mask, from the program's own position around the end, as in `backward_walk.py`.
Rows past the end are read as zeros, and are not written. Queries past the end have L = +inf, hence
P = 0; keys past the end are masked in `dq`.
"""

from __future__ import annotations

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

from cs336_systems.attention.call import Saved
from cs336_systems.attention.hopper import backward_walk
from cs336_systems.attention.hopper.builtins import as_block, mma_layout
from cs336_systems.attention.hopper.descriptors import readable, tile_descriptor
from cs336_systems.attention.hopper.division import MULTIPROCESSORS, START_STEPS
from cs336_systems.attention.hopper.light import LIGHT_ROWS, preprocess
from cs336_systems.attention.hopper.schedule import CONSUMER_WARPS, plan_forward
from cs336_systems.attention.hopper.walk import (
    ROWS,
    Problem,
    key_place,
    open_item,
    query_place,
    ring_slot,
    rows_of_consumer,
    sees_tile,
    tile_of_work,
    work_of_call,
)
from cs336_systems.attention.tiles import head_tile
from cs336_systems.attention.tiles.choice import Walks, heads_at_a_time
from cs336_systems.attention.tiles.kernel_config import L2_SHARE_BYTES
from cs336_systems.attention.triton.launch import (
    empty,
    empty_like,
    launch,
    log_launch,
    num_multiprocessors,
    num_tiles,
)
from cs336_systems.attention.triton.steps import LOG2_E
from cs336_systems.measure.stages import stage

WIDE_BACKWARD = "hopper_wide_backward_128x64"
STREAMED = ROWS  # rows of a streamed tile, as many as a consumer has
SLOTS = gl.constexpr(2)
REGISTERS = gl.constexpr(240)  # of each thread of a consumer; a thread of the copier has 24
DQ_NUMBERS = ["N_QUERIES", "N_KEYS", "N_HEADS", "GROUP", "BATCH_HEADS", "HEADS_TOGETHER", "N_ROWS"]
DKDV_NUMBERS = ["N_KV_HEADS", "HEADS_TOGETHER", "N_QUERIES", "N_KEYS"]


@gluon.constexpr_function
def _operand_layout(columns):
    """Return the layout of a wgmma's left operand (64, rows of the right one) in registers.

    `columns` are those of the product.
    """
    return gl.DotOperandLayout(operand_index=0, parent=mma_layout(columns), k_width=2)


@gluon.jit
def _allocate_tiles(count: gl.constexpr, dtype: gl.constexpr, D_TILE: gl.constexpr):
    """Allocate `count` tiles (ROWS, D_TILE) of shared memory."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D_TILE], dtype)
    return gl.allocate_shared_memory(dtype, [count, ROWS, D_TILE], layout)


@gluon.jit
def _allocate_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Allocate and initialise `count` barriers that expect `arrivals` arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def _copy(desc, place, full, tile):
    """Start a TMA copy from `place` of a tensor to `tile`; its bytes arrive on `full`."""
    tma.async_copy_global_to_shared(desc, place, full, as_block(tile, desc))


@gluon.jit
def _store(desc, place, sums, factor, tile):
    """Store a consumer's rows of a gradient, factor · sums, through a tile of shared memory."""
    tile.store((sums * factor).to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, place, as_block(tile, desc))
    tma.store_wait(0)


@gluon.jit
def _opaque_zero(problem, step):
    """Return 0 in a form that the assembler does not know to be the same in each step.

    As the index of a tile that stays in shared memory it saves registers: with a known index the
    assembler would keep all matmuls' descriptors in registers, and spill 200 to 300 bytes for them.
    """
    return min(problem.N_KEYS + step, 0)


@gluon.jit
def _start_product(own, streamed):
    """Return `own` times `streamed` transposed, (ROWS, STREAMED), in flight."""
    zeros = gl.zeros([ROWS, STREAMED], gl.float32, mma_layout(STREAMED))
    return warpgroup_mma(own, streamed.permute((1, 0)), zeros, use_acc=False, is_async=True)


# dK and dV


class _OfKeys(NamedTuple):
    """Shared memory of the partitions of `dkdv`: tiles, rows of L and delta, and barriers."""

    K_tile: gl.shared_memory_descriptor  # (1, ROWS, D_TILE)
    V_tile: gl.shared_memory_descriptor  # the same
    Q_ring: gl.shared_memory_descriptor  # (SLOTS, STREAMED, D_TILE)
    dO_ring: gl.shared_memory_descriptor  # the same
    L_slots: gl.shared_memory_descriptor  # (SLOTS, STREAMED)
    delta_slots: gl.shared_memory_descriptor  # the same
    P_slots: gl.shared_memory_descriptor  # (SLOTS, 128, 32), float32: Pᵀ in the order of threads
    own_full: gl.shared_memory_descriptor  # one barrier
    q_full: gl.shared_memory_descriptor  # a barrier a slot, for Q, L and delta
    q_empty: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    do_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor


class KeyProblem(NamedTuple):
    """The numbers of a call of `dkdv`."""

    N_KV_HEADS: gl.tensor
    HEADS_TOGETHER: gl.tensor  # see `backward_walk.tile_of_program`
    N_QUERIES: gl.tensor
    N_KEYS: gl.tensor
    scale_log2: gl.tensor


class KeyTile(NamedTuple):
    """A program's tile of keys, and its walk over the queries of each head of a group."""

    number: gl.tensor
    batch_head: gl.tensor  # index into batch and key heads
    query_tiles: gl.tensor  # of a head
    first_tile: gl.tensor  # of the walk
    steps: gl.tensor  # of the walk


@gluon.jit
def key_tile_of(program, num_programs, problem, IS_CAUSAL: gl.constexpr):
    """Return a program's tile of keys and its walk.

    Causal walks begin at the diagonal, which cuts their first step alone.
    """
    rows = problem.N_KEYS
    if IS_CAUSAL:
        rows = min(rows, problem.N_QUERIES)
    key_tile, batch_head = backward_walk.tile_of_program(
        program, num_programs, (rows + ROWS - 1) // ROWS, problem.HEADS_TOGETHER
    )
    tiles = (problem.N_QUERIES + STREAMED - 1) // STREAMED
    if IS_CAUSAL:
        return KeyTile(key_tile, batch_head, tiles, key_tile, tiles - key_tile)
    else:
        return KeyTile(key_tile, batch_head, tiles, key_tile % tiles, tiles)


@gluon.jit
def _copy_queries(
    Q_desc, dO_desc, K_desc, V_desc, rows_ptr, shared, problem,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr
):  # fmt: skip
    """Run the copier of `dkdv`: copy K and V once, then Q, L, delta and dO of each step."""
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout([STREAMED // 32], [32], [1], [0])
    tile = key_tile_of(gl.program_id(0), gl.num_programs(0), problem, IS_CAUSAL)
    batch, kv_head = tile.batch_head // problem.N_KV_HEADS, tile.batch_head % problem.N_KV_HEADS

    # K and V (ROWS, D_TILE)
    own_full = shared.own_full.index(0)
    mbarrier.expect(own_full, K_desc.block_type.nbytes + V_desc.block_type.nbytes)
    _copy(K_desc, [batch, kv_head, tile.number * ROWS, 0], own_full, shared.K_tile.index(0))
    _copy(V_desc, [batch, kv_head, tile.number * ROWS, 0], own_full, shared.V_tile.index(0))

    # Q and dO (STREAMED, D_TILE), L and delta (STREAMED,) of each step
    head_rows = tile.query_tiles * STREAMED
    for member in range(GROUP):
        head = kv_head * GROUP + member
        rows_of_head = rows_ptr + (tile.batch_head * GROUP + member).to(gl.int64) * (2 * head_rows)
        for j in range(tile.steps):
            first_query = backward_walk.query_of_step(
                j, tile.first_tile, tile.query_tiles, STREAMED, IS_CAUSAL
            )
            rows = first_query + gl.arange(0, STREAMED, ROW_LAYOUT)
            L = gl.load(rows_of_head + rows)
            delta = gl.load(rows_of_head + head_rows + rows)

            slot, phase = ring_slot(member * tile.steps + j, SLOTS)
            q_full, do_full = shared.q_full.index(slot), shared.do_full.index(slot)
            mbarrier.wait(shared.q_empty.index(slot), phase ^ 1)
            mbarrier.expect(q_full, Q_desc.block_type.nbytes)
            _copy(Q_desc, [batch, head, first_query, 0], q_full, shared.Q_ring.index(slot))
            shared.L_slots.index(slot).store(L)
            shared.delta_slots.index(slot).store(delta)
            mbarrier.arrive(q_full, count=1)

            mbarrier.wait(shared.do_empty.index(slot), phase ^ 1)
            mbarrier.expect(do_full, dO_desc.block_type.nbytes)
            _copy(dO_desc, [batch, head, first_query, 0], do_full, shared.dO_ring.index(slot))


@gluon.jit
def _scores_in_thread_order(P):
    """Return scores (64, 64), as wgmma leaves them, as (128 threads, 32 scores of each).

    No number moves between registers.
    """
    parts = gl.permute(gl.reshape(P, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    return gl.reshape(parts, [128, 32])


@gluon.jit
def _as_scores(P, LAYOUT: gl.constexpr):
    """Return P (128, 32) as scores (64, 64) in LAYOUT, undoing `_scores_in_thread_order`."""
    parts = gl.permute(gl.reshape(P, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(parts, [64, 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def _start_scores_of_keys(shared, step, zero):
    """Return a step's S = K Qᵀ (keys, queries) in flight, after its tile of Q has arrived.

    `zero` is 0: the index of the only tile of K.
    """
    slot, phase = ring_slot(step, SLOTS)
    mbarrier.wait(shared.q_full.index(slot), phase)
    return _start_product(shared.K_tile.index(zero), shared.Q_ring.index(slot))


@gluon.jit
def _dv_step(shared, problem, dV, S, step, last_step, is_diagonal, IS_CAUSAL: gl.constexpr):
    """Return (dV, the next step's S) after a tile of queries, and pass P to the other consumer."""
    # P (keys, queries)
    slot, phase = ring_slot(step, SLOTS)
    L = shared.L_slots.index(slot).load(gl.SliceLayout(0, mma_layout(STREAMED)))
    mbarrier.arrive(shared.q_empty.index(slot), count=1)
    P = gl.exp2(S * problem.scale_log2 - L[None, :])
    if IS_CAUSAL and is_diagonal:  # a branch, since no matmul of this consumer is in flight
        keys = gl.arange(0, ROWS, gl.SliceLayout(1, P.type.layout))
        queries = gl.arange(0, STREAMED, gl.SliceLayout(0, P.type.layout))
        P = gl.where(queries[None, :] >= keys[:, None], P, 0.0)

    # P to the consumer of dK
    mbarrier.wait(shared.p_empty.index(slot), phase ^ 1)
    shared.P_slots.index(slot).store(_scores_in_thread_order(P))
    mbarrier.arrive(shared.p_full.index(slot), count=1)

    # dV += P dO, and the next scores
    P = gl.convert_layout(P.to(shared.dO_ring.dtype), _operand_layout(dV.shape[1]))
    mbarrier.wait(shared.do_full.index(slot), phase)
    dV = warpgroup_mma(P, shared.dO_ring.index(slot), dV, is_async=True)
    S = _start_scores_of_keys(shared, min(step + 1, last_step), _opaque_zero(problem, step))
    dV = warpgroup_mma_wait(1, [dV])
    mbarrier.arrive(shared.do_empty.index(slot), count=1)
    S = warpgroup_mma_wait(0, [S])
    return dV, S


@gluon.jit
def _sum_dv(dV_desc, shared, problem, GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Run the consumer of `dkdv` that makes P, and sums and stores dV."""
    D_TILE: gl.constexpr = shared.K_tile.shape[2]
    tile = key_tile_of(gl.program_id(0), gl.num_programs(0), problem, IS_CAUSAL)
    dV = gl.zeros([ROWS, D_TILE], gl.float32, mma_layout(D_TILE))
    last_step = GROUP * tile.steps - 1
    mbarrier.wait(shared.own_full.index(0), 0)
    S = warpgroup_mma_wait(0, [_start_scores_of_keys(shared, 0, 0)])
    for member in range(GROUP):
        for j in range(tile.steps):
            dV, S = _dv_step(
                shared, problem, dV, S, member * tile.steps + j, last_step, j == 0, IS_CAUSAL
            )
    _store(dV_desc, [0, tile.batch_head, tile.number * ROWS, 0], dV, 1.0, shared.K_tile.index(0))


@gluon.jit
def _start_dP_of_keys(shared, step, zero):
    """Return a step's dP = V dOᵀ (keys, queries) in flight, after its tile of dO has arrived.

    `zero` is 0: the index of the only tile of V.
    """
    slot, phase = ring_slot(step, SLOTS)
    mbarrier.wait(shared.do_full.index(slot), phase)
    return _start_product(shared.V_tile.index(zero), shared.dO_ring.index(slot))


@gluon.jit
def _dk_step(shared, problem, dK, dP, step, last_step):
    """Return (dK, the next step's dP) after one tile of queries, with P from the other consumer."""
    S_LAYOUT: gl.constexpr = mma_layout(STREAMED)
    slot, phase = ring_slot(step, SLOTS)
    mbarrier.arrive(shared.do_empty.index(slot), count=1)

    # dS (keys, queries)
    delta = shared.delta_slots.index(slot).load(gl.SliceLayout(0, S_LAYOUT))
    mbarrier.wait(shared.p_full.index(slot), phase)
    of_threads: gl.constexpr = _scores_in_thread_order(dP).type.layout
    P = _as_scores(shared.P_slots.index(slot).load(of_threads), S_LAYOUT)
    mbarrier.arrive(shared.p_empty.index(slot), count=1)
    dS = gl.convert_layout(
        (P * (dP - delta[None, :])).to(shared.Q_ring.dtype), _operand_layout(dK.shape[1])
    )

    # dK += dS Q, and the next dP
    dK = warpgroup_mma(dS, shared.Q_ring.index(slot), dK, is_async=True)
    dP = _start_dP_of_keys(shared, min(step + 1, last_step), _opaque_zero(problem, step))
    dK = warpgroup_mma_wait(1, [dK])
    mbarrier.arrive(shared.q_empty.index(slot), count=1)
    dP = warpgroup_mma_wait(0, [dP])
    return dK, dP


@gluon.jit
def _sum_dk(dK_desc, shared, problem, GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Run the consumer of `dkdv` that makes dP and dS, and sums and stores dK."""
    D_TILE: gl.constexpr = shared.V_tile.shape[2]
    tile = key_tile_of(gl.program_id(0), gl.num_programs(0), problem, IS_CAUSAL)
    dK = gl.zeros([ROWS, D_TILE], gl.float32, mma_layout(D_TILE))
    last_step = GROUP * tile.steps - 1
    mbarrier.wait(shared.own_full.index(0), 0)
    dP = warpgroup_mma_wait(0, [_start_dP_of_keys(shared, 0, 0)])
    for step in range(GROUP * tile.steps):
        dK, dP = _dk_step(shared, problem, dK, dP, step, last_step)
    place = [0, tile.batch_head, tile.number * ROWS, 0]
    _store(dK_desc, place, dK, problem.scale_log2 / LOG2_E, shared.V_tile.index(0))


@gluon.jit(do_not_specialize=DKDV_NUMBERS)
def hopper_wide_dkdv_kernel(
    Q_desc, K_desc, V_desc, dO_desc, dK_desc, dV_desc, rows_ptr,
    N_KV_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale_log2,
    D_TILE: gl.constexpr, GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV (1, batch · kv_heads, keys, D); D_TILE is above 128.

    Keys that no query sees are neither read nor written. `rows` (batch · heads, 2, queries in whole
    tiles) holds L in base 2, and delta.
    """
    problem = KeyProblem(N_KV_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale_log2)
    dtype: gl.constexpr = Q_desc.dtype
    ROW_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 32], gl.float32)
    shared = _OfKeys(
        _allocate_tiles(1, dtype, D_TILE),
        _allocate_tiles(1, dtype, D_TILE),
        _allocate_tiles(SLOTS, dtype, D_TILE),
        _allocate_tiles(SLOTS, dtype, D_TILE),
        gl.allocate_shared_memory(gl.float32, [SLOTS, STREAMED], ROW_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [SLOTS, STREAMED], ROW_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [SLOTS, 128, 32], P_LAYOUT),
        _allocate_barriers(1, 1),
        _allocate_barriers(SLOTS, 2),  # q_full: the bytes of Q; the stores of L and delta
        _allocate_barriers(SLOTS, 2),  # q_empty: the consumers
        _allocate_barriers(SLOTS, 1),  # do_full
        _allocate_barriers(SLOTS, 2),  # do_empty: the consumers
        _allocate_barriers(SLOTS, 1),  # p_full
        _allocate_barriers(SLOTS, 1),  # p_empty
    )
    fence_async_shared()
    gl.warp_specialize([
        (_sum_dv, (dV_desc, shared, problem, GROUP, IS_CAUSAL)),
        (_sum_dk, (dK_desc, shared, problem, GROUP, IS_CAUSAL)),
        (_copy_queries, (
            Q_desc, dO_desc, K_desc, V_desc, rows_ptr, shared, problem, GROUP, IS_CAUSAL,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


# dQ


class _OfQueries(NamedTuple):
    """Shared memory of the partitions of `dq`: tiles and barriers."""

    Q_tiles: gl.shared_memory_descriptor  # (2 consumers, ROWS, D_TILE)
    dO_tiles: gl.shared_memory_descriptor  # the same
    K_ring: gl.shared_memory_descriptor  # (SLOTS, STREAMED, D_TILE)
    V_tile: gl.shared_memory_descriptor  # (1, STREAMED, D_TILE)
    own_full: gl.shared_memory_descriptor  # one barrier
    k_full: gl.shared_memory_descriptor  # a barrier a slot
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor


@gluon.jit
def _own_tile(problem, PLAN: gl.constexpr):
    """Return (the program's query tile, its batch entry, its head, the `Sequence` of all rows)."""
    num_tiles, _ = work_of_call(problem, None, PLAN)
    _, sequence = open_item(gl.program_id(0), num_tiles, problem, None, PLAN)
    tile = tile_of_work(gl.program_id(0), 0, num_tiles, sequence, problem, None, PLAN)
    return tile, tile.batch_head // problem.N_HEADS, tile.batch_head % problem.N_HEADS, sequence


@gluon.jit
def _copy_keys(Q_desc, dO_desc, K_desc, V_desc, shared, problem, PLAN: gl.constexpr):
    """Run the copier of `dq`: copy Q and dO of both consumers once, then K and V of each step."""
    tile, batch, head, sequence = _own_tile(problem, PLAN)
    kv_head = head // problem.GROUP

    # Q and dO (ROWS, D_TILE) of both consumers
    own_full, v_full = shared.own_full.index(0), shared.v_full.index(0)
    mbarrier.expect(own_full, 2 * (Q_desc.block_type.nbytes + dO_desc.block_type.nbytes))
    for consumer in gl.static_range(2):
        first_row = rows_of_consumer(tile.first_query, consumer, sequence.num_queries)
        place = query_place(head, first_row, batch, sequence, PLAN)
        _copy(Q_desc, place, own_full, shared.Q_tiles.index(consumer))
        _copy(dO_desc, place, own_full, shared.dO_tiles.index(consumer))

    # K and V (STREAMED, D_TILE) of each step, from the last visible key tile back
    for step in range(tile.key_tiles):
        slot, phase = ring_slot(step, SLOTS)
        k_full = shared.k_full.index(slot)
        first_key = (tile.key_tiles - 1 - step) * STREAMED
        if step == 0:  # a tile that no query sees is read from behind the end, as zeros
            first_key = gl.where(tile.key_tiles > tile.live, sequence.num_keys, first_key)
        place = key_place(kv_head, first_key, batch, sequence, PLAN)

        mbarrier.wait(shared.k_empty.index(slot), phase ^ 1)
        mbarrier.expect(k_full, K_desc.block_type.nbytes)
        _copy(K_desc, place, k_full, shared.K_ring.index(slot))

        mbarrier.wait(shared.v_empty.index(0), (step & 1) ^ 1)
        mbarrier.expect(v_full, V_desc.block_type.nbytes)
        _copy(V_desc, place, v_full, shared.V_tile.index(0))


@gluon.jit
def _start_scores_of_queries(shared, step, consumer):
    """Return a step's S = Q Kᵀ (queries, keys) in flight, after its tile of K has arrived."""
    slot, phase = ring_slot(step, SLOTS)
    mbarrier.wait(shared.k_full.index(slot), phase)
    return _start_product(shared.Q_tiles.index(consumer), shared.K_ring.index(slot))


@gluon.jit
def _dq_step(
    shared, problem, dQ, S, L, delta, step, last_step, last_key,
    consumer: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Return (dQ, the next step's S) after one tile of keys.

    If MASKED, P is 0 for keys after `last_key` (ROWS,).
    """
    # P and dP (queries, keys)
    zero = _opaque_zero(problem, step)
    mbarrier.wait(shared.v_full.index(0), step & 1)
    dP = _start_product(shared.dO_tiles.index(consumer + zero), shared.V_tile.index(zero))
    P = gl.exp2(S * problem.scale_log2 - L[:, None])
    if MASKED:
        keys = (last_step - step) * STREAMED + gl.arange(
            0, STREAMED, gl.SliceLayout(0, P.type.layout)
        )
        P = gl.where(keys[None, :] <= last_key[:, None], P, 0.0)
    dP, P = warpgroup_mma_wait(0, [dP, P])
    mbarrier.arrive(shared.v_empty.index(0), count=1)

    # dQ += dS K, and the next scores
    dS = gl.convert_layout(
        (P * (dP - delta[:, None])).to(shared.K_ring.dtype), _operand_layout(dQ.shape[1])
    )
    slot = step % SLOTS
    dQ = warpgroup_mma(dS, shared.K_ring.index(slot), dQ, is_async=True)
    S = _start_scores_of_queries(shared, min(step + 1, last_step), consumer + zero)
    dQ = warpgroup_mma_wait(1, [dQ])
    mbarrier.arrive(shared.k_empty.index(slot), count=1)
    S = warpgroup_mma_wait(0, [S])
    return dQ, S


@gluon.jit
def _sum_dq(consumer: gl.constexpr, dQ_desc, rows_ptr, N_ROWS, shared, problem, PLAN: gl.constexpr):
    """Run a consumer of `dq`: sum and store dQ of its 64 rows of the program's query tile."""
    D_TILE: gl.constexpr = PLAN.head_tile
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, mma_layout(STREAMED))

    # the consumer's rows, and the last key that each sees
    tile, batch, head, sequence = _own_tile(problem, PLAN)
    first_row = rows_of_consumer(tile.first_query, consumer, sequence.num_queries)
    rows = first_row + gl.arange(0, ROWS, ROW_LAYOUT)
    last_key = sequence.num_keys - 1 + gl.zeros([ROWS], gl.int32, ROW_LAYOUT)
    if PLAN.is_causal:
        last_key = gl.minimum(rows, last_key)

    # L and delta (ROWS,)
    rows_of_head = rows_ptr + tile.batch_head.to(gl.int64) * (2 * N_ROWS)
    L = gl.load(rows_of_head + rows, mask=rows < sequence.num_queries, other=float("inf"))
    delta = gl.load(rows_of_head + N_ROWS + rows, mask=rows < sequence.num_queries, other=0.0)
    dQ = gl.zeros([ROWS, D_TILE], gl.float32, mma_layout(D_TILE))
    last_step = tile.key_tiles - 1
    first_step = 0

    # the first step is skipped if its keys come after all of these rows
    if PLAN.is_causal and not sees_tile(first_row, last_step * STREAMED):
        mbarrier.wait(shared.k_full.index(0), 0)
        mbarrier.arrive(shared.k_empty.index(0), count=1)
        mbarrier.wait(shared.v_full.index(0), 0)
        mbarrier.arrive(shared.v_empty.index(0), count=1)
        first_step = 1

    # the steps: masked ones, then the rest
    mbarrier.wait(shared.own_full.index(0), 0)
    S = warpgroup_mma_wait(0, [_start_scores_of_queries(shared, first_step, consumer)])
    for step in range(first_step, PLAN.masked_tiles):
        dQ, S = _dq_step(
            shared, problem, dQ, S, L, delta, step, last_step, last_key, consumer, True
        )
    for step in range(PLAN.masked_tiles, tile.key_tiles):
        dQ, S = _dq_step(
            shared, problem, dQ, S, L, delta, step, last_step, last_key, consumer, False
        )

    place = query_place(head, first_row, batch, sequence, PLAN)
    _store(dQ_desc, place, dQ, problem.scale_log2 / LOG2_E, shared.Q_tiles.index(consumer))


@gluon.jit(do_not_specialize=DQ_NUMBERS)
def hopper_wide_dq_kernel(
    Q_desc, K_desc, V_desc, dO_desc, dQ_desc, rows_ptr,
    N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, N_ROWS, scale_log2,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Compute dQ (batch, heads, queries, D), contiguous; PLAN.head_tile is above 128.

    PLAN is a `schedule.KernelPlan`, as the walk is the forward's. `rows` (batch · heads, 2, N_ROWS)
    holds L in base 2, and delta.
    """
    problem = Problem(N_QUERIES, N_KEYS, N_HEADS, GROUP, BATCH_HEADS, HEADS_TOGETHER, scale_log2)
    dtype: gl.constexpr = Q_desc.dtype
    shared = _OfQueries(
        _allocate_tiles(2, dtype, PLAN.head_tile),
        _allocate_tiles(2, dtype, PLAN.head_tile),
        _allocate_tiles(SLOTS, dtype, PLAN.head_tile),
        _allocate_tiles(1, dtype, PLAN.head_tile),
        _allocate_barriers(1, 1),  # own_full
        _allocate_barriers(SLOTS, 1),  # k_full
        _allocate_barriers(SLOTS, 2),  # k_empty: the consumers
        _allocate_barriers(1, 1),  # v_full
        _allocate_barriers(1, 2),  # v_empty: the consumers
    )
    fence_async_shared()
    gl.warp_specialize([
        (_sum_dq, (0, dQ_desc, rows_ptr, N_ROWS, shared, problem, PLAN)),
        (_sum_dq, (1, dQ_desc, rows_ptr, N_ROWS, shared, problem, PLAN)),
        (_copy_keys, (Q_desc, dO_desc, K_desc, V_desc, shared, problem, PLAN)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


def hopper_wide_backward(
    saved: Saved, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients that `hopper_backward` does, for heads of 129 to 256 columns.

    All gradients are bit-reproducible.
    """
    q, k, v, output, lse, grad_output, grad_lse = saved
    head_dim = q.shape[-1]
    q, k, v, output, grad_output = (readable(x) for x in (q, k, v, output, grad_output))
    batch, heads, num_queries, width = q.shape
    kv_heads, num_keys = k.shape[1:3]
    group = heads // kv_heads
    num_rows = num_tiles(num_queries, LIGHT_ROWS) * LIGHT_ROWS
    scale_log2 = scale * LOG2_E.value

    # results and scratch memory
    grad_q = empty_like(q)
    num_key_tiles = num_tiles(min(num_keys, num_queries) if is_causal else num_keys, ROWS.value)
    grad_k, grad_v = gradients_of_keys(k, num_key_tiles * ROWS.value)
    rows = empty((batch * heads, 2, num_rows), torch.float32, q.device)
    tiles = tuple(tile_descriptor(x, ROWS.value) for x in (q, k, v, grad_output))

    log_launch("backward", WIDE_BACKWARD, q, num_queries, num_keys)
    with stage("preprocess"):
        preprocess(output, lse, grad_output, grad_lse, rows, None, None)

    # heads whose Q and dO the L2 cache should hold at one time
    streamed_bytes = group * num_rows * head_tile(width) * 2 * q.element_size()
    heads_together = 1
    if is_causal:
        heads_together = heads_at_a_time(
            Walks(num_key_tiles, num_tiles(num_queries, ROWS.value)),
            heads=batch * kv_heads,
            fitting=L2_SHARE_BYTES // streamed_bytes,
            block_steps=group,
            start_steps=START_STEPS,
            places=num_multiprocessors(q.device) or MULTIPROCESSORS,
        )
    # programs count batch and heads of dK and dV as one
    one_batch = (1, batch * kv_heads, num_keys, width)
    of_keys = tuple(tile_descriptor(x.view(one_batch), ROWS.value) for x in (grad_k, grad_v))
    with stage("dkv"):
        launch(
            hopper_wide_dkdv_kernel, (num_key_tiles * batch * kv_heads,), (*tiles, *of_keys, rows),
            (kv_heads, heads_together, num_queries, num_keys, scale_log2),
            {
                "D_TILE": head_tile(width), "GROUP": group, "IS_CAUSAL": is_causal,
                "num_warps": CONSUMER_WARPS,
            },
        )  # fmt: skip

    # dQ walks as the forward of this plan does
    plan = plan_forward(
        head_dim=width, is_causal=is_causal,
        num_queries=num_queries, num_keys=num_keys, batch_heads=batch * heads, group=group,
        num_multiprocessors=num_multiprocessors(q.device), config="hopper_forward_128x64_tiles",
    )  # fmt: skip
    with stage("dq"):
        launch(
            hopper_wide_dq_kernel, (plan.num_programs,),
            (*tiles, tile_descriptor(grad_q, ROWS.value), rows),
            (
                num_queries, num_keys, heads, group, batch * heads, plan.heads_together, num_rows,
                scale_log2,
            ),
            {"PLAN": plan.kernel_plan, "num_warps": CONSUMER_WARPS},
        )  # fmt: skip
    if width != head_dim:
        grad_q, grad_k, grad_v = (x[..., :head_dim].contiguous() for x in (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v


def gradients_of_keys(k: Tensor, num_seen: int) -> tuple[Tensor, Tensor]:
    """Return memory for dK and dV like k, with zeros for the keys from `num_seen` on.

    No query sees those keys, and no kernel writes their gradients.
    """
    if num_seen >= k.shape[2]:
        return empty_like(k), empty_like(k)
    grad_k, grad_v = k.new_empty(k.shape), k.new_empty(k.shape)
    for x in (grad_k, grad_v):
        x[:, :, num_seen:] = 0
    return grad_k, grad_v
