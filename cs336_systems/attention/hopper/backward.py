"""The backward on Hopper: one Gluon kernel of five matmuls between two light Triton kernels.

  preprocess   delta = rowsum(dO ∘ O), minus the gradient of L if one arrives; L in base 2; dQ's accumulator zeroed
  main         one program a tile of 128 keys: dK and dV stay in registers, dQ is added into memory, in float32
  convert      dQ = scale · accumulator, in rows and in the inputs' dtype

A program of the main kernel has up to five partitions. A producer warp copies tiles by TMA into a ring of two slots.
Two consumer warp groups own 64 of the keys each and walk the query tiles that see them. Two sender warps add what each
consumer has made of dQ into memory. S and dP are computed transposed, so that Pᵀ and dSᵀ are left operands that the
tensor cores take from registers. One step of a consumer, and what its matmuls are meanwhile:

    issue dPᵀ = V dOᵀ                                  dP            Sᵀ is there: the last step has made it
    Pᵀ = exp2(scale · log₂e · Sᵀ - L)                  dP            L stays in shared memory up to here
    wait for dP
    dSᵀ = Pᵀ ∘ (dPᵀ - delta)                                         delta likewise: registers are full
    dSᵀ to shared memory; issue dV += Pᵀ dO            dV            the other consumer has the tensor cores till here
    meet the other consumer                            dV            dQ sums over the keys of both
    issue dQ = dS K, issue dK += dSᵀ Q                 dV, dQ, dK
    wait for dV and dQ; dQ to its sender               dK
    wait for the next slot: Q, dO, L, delta            dK
    issue the next step's Sᵀ = K Qᵀ                    dK, S
    wait for dK; release the slot                      S
    wait for S

The scores of the next step keep the tensor cores busy while dQ leaves. (In flight over the loop's end they would be as
good, but the compiler then waits for every matmul. So it does with dV, dQ, dK and S all in flight.)

A step's dQ tile is formed once by the two consumers, half and half, from the keys of both: halves by columns of a tile
of 64 queries at head dim 128, halves by rows of a tile of 128 queries at head dim 64. (At 64 the longer tile is 15 to
20 % faster; at 128 it has no room.) It leaves in the order in which threads hold it, and `convert` puts it right.

How dQ is formed and sent is the launcher's choice, `dq_way`, by what was measured:

  late     a step forms the dQ of the step before. The consumers then need not meet: each says that its dS is ready and
           goes on if the other's last one is. One may be a step ahead, which takes a third tile of dS.
  senders  in the same step, sent by the sender warps. Without a mask at head dim 128.
  alone    without sender warps; a consumer starts its copy and waits for it a step later. Causal at head dim 128, up
           to some thousand queries.

Which tiles: without a mask the walk starts at the program's own position and wraps around the end, so that programs
that run at one time add to different rows of dQ. A causal one starts at the diagonal; keys behind the last query's
have no program. Tiles that the diagonal cuts are masked, and where queries see keys that do not exist every tile is, in
a kernel of its own, because choosing at run time costs registers. (A key that does not exist scores 0, and its
P = exp2(-L) may be inf.) That is the case without a mask where the last key tile is ragged; a causal query comes
before such keys, unless there are fewer keys than queries. Queries past the end have L = +inf, hence P = 0. TMA reads
zeros past the end of a head and writes nothing there.

Sums: dK and dV over the queries, and over the query heads of a group, are one program's, in one order, and so
bit-reproducible. dQ's over the key tiles come in any order, and its last bits vary; unless ORDERED, where senders wait
until a counter says that it is their program's turn, see `turn_of_tile`. That takes 4 to 8 % more time.

Sources: FlashAttention-2 (Dao 2023), algorithm 2; FlashAttention-3 (Shah et al. 2024) for the partitions, the senders
and the turns.
"""

from __future__ import annotations

from typing import NamedTuple

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

from cs336_systems.attention.hopper.builtins import (
    arrive_at,
    meet_consumers,
    meet_warps,
    pass_turn,
    tma_add,
    wait_at,
    wait_for_turn,
)
from cs336_systems.attention.hopper.descriptors import readable, tile_descriptor
from cs336_systems.attention.hopper.schedule import CONSUMER_WARPS, LATE_FROM
from cs336_systems.attention.tiles import head_tile
from cs336_systems.attention.tiles.config import L2_SHARE_BYTES
from cs336_systems.attention.triton.launch import empty, empty_like, launch, log_launch
from cs336_systems.attention.triton.operands import num_multiprocessors, num_tiles
from cs336_systems.attention.triton.steps import LOG2_E
from cs336_systems.measure.stages import stage

KEY_TILE = gl.constexpr(128)  # the two consumers' 64 rows of a wgmma each
CONSUMER_KEYS = gl.constexpr(64)  # half of them
HALF = gl.constexpr(64)  # rows and columns of a consumer's part of a dQ tile
# Such a part leaves as rows of 32 numbers, in the order in which threads hold them: see `_in_thread_order`.
SENT_ROWS, SENT_COLUMNS = gl.constexpr(128), gl.constexpr(32)
SLOTS = gl.constexpr(2)  # as many as fit: 194 KiB of the 227 that a program can have
QUERY_TILES = {64: 128, 128: 64}  # by head tile: S and dP of a step take 128 or 64 registers of a thread
# Rows of L, delta and dQ's accumulator are padded to a multiple of this, the number of query rows that the diagonal
# of one key tile cuts: a causal program then has at least those steps, and runs them without a bound.
ROW_PADDING = KEY_TILE
LIGHT_ROWS = 64  # of a program of the preprocess and of the conversion: HALF, and ROW_PADDING is a multiple
CHUNK = gl.constexpr(8)  # elements in 16 bytes, of which TMA wants strides to be multiples
# The ways of dQ: without sender warps, with them, and a step late with them.
ALONE, BY_SENDERS, LATE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# The hardware's named barriers, 16 of them; Triton takes the first ones. Of some a consumer has its own: two in a row,
# and of DS_IS_READY four, one for even steps and one for odd ones.
DS_IS_READY, DS_IS_WRITTEN, TILES_ARE_READ = gl.constexpr(6), gl.constexpr(10), gl.constexpr(11)
DQ_IS_WRITTEN, DQ_IS_SENT = gl.constexpr(12), gl.constexpr(14)
CONSUMERS = gl.constexpr(256)  # threads of both
SENDER = gl.constexpr(160)  # of a consumer and the warp that sends its part of dQ


@gluon.constexpr_function
def _has_thread_rows(D_TILE, IS_CAUSAL):
    """Whether L and delta lie in shared memory so that a thread's four numbers of 16 columns are neighbours."""
    return D_TILE == 128 and IS_CAUSAL


PREPROCESS_NUMBERS = (
    "chunks_ob", "chunks_oh", "chunks_os", "chunks_dob", "chunks_doh", "chunks_dos", "N_HEADS", "N_QUERIES", "N_ROWS",
)  # fmt: skip


@triton.jit(do_not_specialize=PREPROCESS_NUMBERS)
def hopper_backward_preprocess_kernel(
    O_ptr, dO_ptr, L_ptr, dL_ptr, rows_ptr, dQ_ptr, turns_ptr,
    chunks_ob, chunks_oh, chunks_os, chunks_dob, chunks_doh, chunks_dos, N_HEADS, N_QUERIES, N_ROWS,
    HAS_DL: tl.constexpr, ORDERED: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """L and its gradient are contiguous. The results have N_ROWS rows a head: L and delta in `rows`, and dQ of zeros;
    if ORDERED two turns of zero for each ROWS of them.

    O and dO are as TMA reads them, with strides that are counted in chunks of 16 bytes: so they fit 32 bits, and the
    compiler knows that a thread may read a chunk at a time.
    """
    tiles = N_ROWS // ROWS
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = batch_head // N_HEADS, batch_head % N_HEADS
    query_rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D_TILE)
    inside = (query_rows < N_QUERIES)[:, None] & (columns < D)[None, :]
    chunks = batch * chunks_ob + head * chunks_oh + query_rows.to(tl.int64) * chunks_os
    O = tl.load(O_ptr + chunks[:, None] * CHUNK + columns[None, :], mask=inside, other=0.0)
    chunks = batch * chunks_dob + head * chunks_doh + query_rows.to(tl.int64) * chunks_dos
    dO = tl.load(dO_ptr + chunks[:, None] * CHUNK + columns[None, :], mask=inside, other=0.0)
    delta = tl.sum(O.to(tl.float32) * dO.to(tl.float32), axis=1)
    L_rows = batch_head * N_QUERIES + query_rows
    L = tl.load(L_ptr + L_rows, mask=query_rows < N_QUERIES, other=float("inf"))
    if HAS_DL:
        delta -= tl.load(dL_ptr + L_rows, mask=query_rows < N_QUERIES, other=0.0)
    rows_of_head = rows_ptr + batch_head * 2 * N_ROWS
    tl.store(rows_of_head + query_rows, L * LOG2_E)
    tl.store(rows_of_head + N_ROWS + query_rows, delta)
    dQ_rows = (batch_head * N_ROWS + query_rows)[:, None]
    tl.store(dQ_ptr + dQ_rows * D_TILE + columns[None, :], tl.zeros([ROWS, D_TILE], tl.float32))
    if ORDERED:
        tl.store(turns_ptr + tl.program_id(0) * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))


@gluon.constexpr_function
def _mma_layout(columns):
    """Where a warp group's wgmma leaves a (64, columns) tile in registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


class _Problem(NamedTuple):
    """The numbers of a call."""

    N_KV_HEADS: gl.tensor
    HEADS_TOGETHER: gl.tensor  # see `tile_of_program`
    TILES_TOGETHER: gl.tensor  # see `turn_of_tile`
    N_QUERIES: gl.tensor
    N_KEYS: gl.tensor
    scale_log2: gl.tensor


class _Shared(NamedTuple):
    """What producer and consumers share: tiles and rows in shared memory, and the barriers that guard them."""

    Q_slots: gl.shared_memory_descriptor  # (SLOTS, Q_TILE_SIZE, D_TILE)
    dO_slots: gl.shared_memory_descriptor  # the same
    KV_tiles: gl.shared_memory_descriptor  # (2, KEY_TILE, D_TILE)
    dS_tiles: gl.shared_memory_descriptor  # (2 or 3, KEY_TILE, Q_TILE_SIZE), transposed, of so many steps in turn
    dQ_tiles: gl.shared_memory_descriptor  # (2, SENT_ROWS, SENT_COLUMNS), each consumer's on its way to memory
    L_slots: gl.shared_memory_descriptor  # (SLOTS, Q_TILE_SIZE)
    delta_slots: gl.shared_memory_descriptor  # the same
    kv_full: gl.shared_memory_descriptor  # one barrier
    full: gl.shared_memory_descriptor  # a barrier a slot
    empty: gl.shared_memory_descriptor  # a barrier a slot


# Which tiles a program visits. Arithmetic on integers: the tests run these functions as Python.


@gluon.jit
def tile_of_program(program, num_programs, num_tiles, HEADS_TOGETHER):
    """(key tile, index into batch and key heads) of a program.

    HEADS_TOGETHER heads at a time, whose rows the L2 cache holds; among them one tile index after the other, so that
    the longest causal tiles, those of the first keys, start first and the short ones fill the tail.
    """
    first_head = program // (HEADS_TOGETHER * num_tiles) * HEADS_TOGETHER
    width = min(HEADS_TOGETHER, num_programs // num_tiles - first_head)
    position = program - first_head * num_tiles
    return position // width, first_head + position % width


@gluon.jit
def key_tiles(N_QUERIES, N_KEYS, IS_CAUSAL: gl.constexpr):
    """Key tiles of a head that some query sees: the first so many."""
    rows = N_KEYS
    if IS_CAUSAL:
        rows = min(N_KEYS, N_QUERIES)
    return (rows + KEY_TILE - 1) // KEY_TILE


@gluon.jit
def query_tiles(N_QUERIES, Q_TILE_SIZE: gl.constexpr):
    """Query tiles of a head, those of its padding included."""
    return (N_QUERIES + ROW_PADDING - 1) // ROW_PADDING * (ROW_PADDING // Q_TILE_SIZE)


@gluon.jit
def walk_of_tile(key_tile, tiles, Q_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """(first query tile, steps) of a key tile's walk over the `tiles` query tiles of a head."""
    first_tile = key_tile * (KEY_TILE // Q_TILE_SIZE)
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
def turn_of_tile(query_block, query_blocks, key_tile, num_tiles, TILES_TOGETHER, IS_CAUSAL: gl.constexpr):
    """How many key tiles add to a block of KEY_TILE queries before this one, where their order is fixed.

    The order in which they come there if all start at once, the last key tile's first step being on the diagonal. A
    program only waits for programs with a lower index, which have started, or for those of its own TILES_TOGETHER,
    which fit on the GPU together and have no more tiles than a head has blocks.
    """
    if IS_CAUSAL:
        return min(query_block, num_tiles - 1) - key_tile
    else:
        own = key_tile % TILES_TOGETHER
        first = key_tile - own
        width = min(TILES_TOGETHER, num_tiles - first)
        last = min((query_block + query_blocks - first % query_blocks) % query_blocks, width - 1)
        return first + last - own + width * (own > last)


@gluon.jit
def _own_tile(problem, IS_CAUSAL: gl.constexpr, ORDERED: gl.constexpr):
    """`tile_of_program` of this program; causal tiles from the last one on if ORDERED, see `turn_of_tile`."""
    num_tiles = key_tiles(problem.N_QUERIES, problem.N_KEYS, IS_CAUSAL)
    key_tile, batch_head = tile_of_program(gl.program_id(0), gl.num_programs(0), num_tiles, problem.HEADS_TOGETHER)
    if IS_CAUSAL and ORDERED:
        key_tile = num_tiles - 1 - key_tile
    return key_tile, batch_head


@gluon.jit
def _as_block(tile, desc):
    """A (rows, columns) tile of shared memory as TMA sees it, a tile of (batch, heads, rows, columns)."""
    return tile._reinterpret(desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def _produce(
    shared, problem, Q_desc, K_desc, V_desc, dO_desc, rows_ptr,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """The producer warp: K and V once, then each step's Q, dO, L and delta, as slots become free."""
    Q_TILE_SIZE: gl.constexpr = shared.Q_slots.shape[1]
    ROWS_LAYOUT: gl.constexpr = gl.BlockedLayout([Q_TILE_SIZE // 32], [32], [1], [0])
    key_tile, batch_head = _own_tile(problem, IS_CAUSAL, ORDERED)
    batch, kv_head = batch_head // problem.N_KV_HEADS, batch_head % problem.N_KV_HEADS
    tiles = query_tiles(problem.N_QUERIES, Q_TILE_SIZE)
    first_tile, steps = walk_of_tile(key_tile, tiles, Q_TILE_SIZE, IS_CAUSAL)

    mbarrier.expect(shared.kv_full.index(0), K_desc.block_type.nbytes + V_desc.block_type.nbytes)
    key_block = [batch, kv_head, key_tile * KEY_TILE, 0]
    K_tile, V_tile = shared.KV_tiles.index(0), shared.KV_tiles.index(1)
    tma.async_copy_global_to_shared(K_desc, key_block, shared.kv_full.index(0), _as_block(K_tile, K_desc))
    tma.async_copy_global_to_shared(V_desc, key_block, shared.kv_full.index(0), _as_block(V_tile, V_desc))
    for member in range(GROUP):
        head = kv_head * GROUP + member
        rows_of_head = rows_ptr + (batch_head * GROUP + member).to(gl.int64) * (2 * tiles * Q_TILE_SIZE)
        for j in range(steps):
            first_query = query_of_step(j, first_tile, tiles, Q_TILE_SIZE, IS_CAUSAL)
            rows = first_query + gl.arange(0, Q_TILE_SIZE, ROWS_LAYOUT)
            if _has_thread_rows(shared.Q_slots.shape[2], IS_CAUSAL):
                rows = rows // 16 * 16 + rows // 2 % 2 * 8 + rows // 4 % 4 * 2 + rows % 2
            L = gl.load(rows_of_head + rows)
            delta = gl.load(rows_of_head + tiles * Q_TILE_SIZE + rows)
            step = member * steps + j
            slot = step % SLOTS
            mbarrier.wait(shared.empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            mbarrier.expect(shared.full.index(slot), Q_desc.block_type.nbytes + dO_desc.block_type.nbytes)
            query_block = [batch, head, first_query, 0]
            tma.async_copy_global_to_shared(
                Q_desc, query_block, shared.full.index(slot), _as_block(shared.Q_slots.index(slot), Q_desc)
            )  # fmt: skip
            tma.async_copy_global_to_shared(
                dO_desc, query_block, shared.full.index(slot), _as_block(shared.dO_slots.index(slot), dO_desc)
            )  # fmt: skip
            shared.L_slots.index(slot).store(L)
            shared.delta_slots.index(slot).store(delta)
            mbarrier.arrive(shared.full.index(slot), count=1)


@gluon.jit
def _send(
    shared, problem, dQ_desc, turns_ptr,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr, DQ_WAY: gl.constexpr, ORDERED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """The warp that adds a consumer's parts of dQ into memory, if ORDERED each when its turn has come."""
    Q_TILE_SIZE: gl.constexpr = shared.Q_slots.shape[1]
    D_TILE: gl.constexpr = shared.Q_slots.shape[2]
    key_tile, batch_head = _own_tile(problem, IS_CAUSAL, ORDERED)
    num_tiles = key_tiles(problem.N_QUERIES, problem.N_KEYS, IS_CAUSAL)
    tiles = query_tiles(problem.N_QUERIES, Q_TILE_SIZE)
    first_tile, steps = walk_of_tile(key_tile, tiles, Q_TILE_SIZE, IS_CAUSAL)
    dQ_tile = shared.dQ_tiles.index(CONSUMER)
    arrive_at(DQ_IS_SENT + CONSUMER, SENDER)
    if DQ_WAY == LATE:  # the first step forms the dQ of no step
        wait_at(DQ_IS_WRITTEN + CONSUMER, SENDER)
        arrive_at(DQ_IS_SENT + CONSUMER, SENDER)
    for member in range(GROUP):
        head_row = (batch_head * GROUP + member) * tiles * Q_TILE_SIZE
        for j in range(steps):
            first_query = query_of_step(j, first_tile, tiles, Q_TILE_SIZE, IS_CAUSAL)
            row = head_row + first_query
            dQ_block = [0, 0, row * (D_TILE // SENT_COLUMNS) + CONSUMER * SENT_ROWS, 0]
            turns = turns_ptr + row // HALF * 2 + CONSUMER
            if ORDERED:
                turn = turn_of_tile(
                    first_query // KEY_TILE, tiles * Q_TILE_SIZE // KEY_TILE, key_tile, num_tiles,
                    problem.TILES_TOGETHER, IS_CAUSAL,
                )  # fmt: skip
                wait_for_turn(turns, turn)
            wait_at(DQ_IS_WRITTEN + CONSUMER, SENDER)
            tma_add(dQ_desc, dQ_block, _as_block(dQ_tile, dQ_desc))
            tma.store_wait(0)
            arrive_at(DQ_IS_SENT + CONSUMER, SENDER)
            if ORDERED:
                pass_turn(turns)


@gluon.jit
def _to_thread_rows(x, THREAD_ROWS: gl.constexpr):
    """L or delta, one number a column, in the order of shared memory; `_has_thread_rows` says whether that is another.

    Four of a thread's numbers are then one load, in place of two.
    """
    if THREAD_ROWS:
        parts = gl.permute(gl.reshape(x, [x.shape[0] // 16, 2, 4, 2]), (0, 2, 1, 3))
        return gl.reshape(parts, [x.shape[0]])
    else:
        return x


@gluon.jit
def _to_columns(x, LAYOUT: gl.constexpr, THREAD_ROWS: gl.constexpr):
    """Back from the order of shared memory, in the layout of an accumulator's columns."""
    if THREAD_ROWS:
        parts = gl.permute(gl.reshape(x, [x.shape[0] // 16, 4, 2, 2]), (0, 2, 1, 3))
        return gl.convert_layout(gl.reshape(parts, [x.shape[0]]), LAYOUT, assert_trivial=True)
    else:
        return x


@gluon.jit
def _start_dQ(shared, dS_slot, CONSUMER: gl.constexpr):
    """A consumer's part of dQ = dS K, in flight."""
    both_dS_T = shared.dS_tiles.index(dS_slot)
    zeros = gl.zeros([HALF, HALF], gl.float32, _mma_layout(HALF))
    if shared.Q_slots.shape[2] == 128:
        K_half = shared.KV_tiles.index(0).slice(CONSUMER * HALF, HALF, dim=1)
        return warpgroup_mma(both_dS_T.permute((1, 0)), K_half, zeros, use_acc=False, is_async=True)
    else:
        dS_T_half = both_dS_T.slice(CONSUMER * HALF, HALF, dim=1)
        return warpgroup_mma(dS_T_half.permute((1, 0)), shared.KV_tiles.index(0), zeros, use_acc=False, is_async=True)


@gluon.jit
def _in_thread_order(dQ):
    """A consumer's (64, 64) part of dQ with its numbers in the order of threads: each stores 16 bytes beside the next.

    From (warp, half of its rows, row, 8 columns, pair of them, of the pair) to (8 columns, warp, row, pair, half, of
    the pair). No number moves between registers, and the 128-bit stores meet no bank conflict.
    """
    parts = gl.permute(gl.reshape(dQ, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    return gl.reshape(parts, [SENT_ROWS, SENT_COLUMNS])


@gluon.jit
def _hand_over_dQ(shared, dQ, CONSUMER: gl.constexpr):
    """dQ to shared memory, and word of it to the warp that sends it."""
    wait_at(DQ_IS_SENT + CONSUMER, SENDER)
    shared.dQ_tiles.index(CONSUMER).store(_in_thread_order(dQ))
    fence_async_shared()
    arrive_at(DQ_IS_WRITTEN + CONSUMER, SENDER)


@gluon.jit
def _hide(P_T, first_query, first_key, N_KEYS, DIAGONAL: gl.constexpr):
    """Pᵀ with zeros where the key does not exist or, if DIAGONAL, comes after the query."""
    key_rows = first_key + gl.arange(0, P_T.shape[0], gl.SliceLayout(1, P_T.type.layout))
    if DIAGONAL:
        query_rows = first_query + gl.arange(0, P_T.shape[1], gl.SliceLayout(0, P_T.type.layout))
        first_seen_by = gl.where(key_rows < N_KEYS, key_rows, 2**31 - 1)
        return gl.where(query_rows[None, :] >= first_seen_by[:, None], P_T, 0.0)
    else:
        return gl.where((key_rows < N_KEYS)[:, None], P_T, 0.0)


@gluon.jit
def _start_scores(shared, step, zero, CONSUMER: gl.constexpr):
    """Sᵀ = K Qᵀ of a step, in flight, once the step's slot is full. `zero` is 0, see `_consume`."""
    Q_TILE_SIZE: gl.constexpr = shared.Q_slots.shape[1]
    K = shared.KV_tiles.index(zero).slice(CONSUMER * CONSUMER_KEYS, CONSUMER_KEYS, dim=0)
    slot = step % SLOTS
    zeros = gl.zeros([CONSUMER_KEYS, Q_TILE_SIZE], gl.float32, _mma_layout(Q_TILE_SIZE))
    mbarrier.wait(shared.full.index(slot), (step // SLOTS) & 1)
    return warpgroup_mma(K, shared.Q_slots.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _step(
    shared, problem, dQ_desc, dK, dV, S_T, step, last_step, head_row, first_query, first_key,
    IS_CAUSAL: gl.constexpr, DQ_WAY: gl.constexpr, CONSUMER: gl.constexpr, MASKED: gl.constexpr,
    DIAGONAL: gl.constexpr,
):  # fmt: skip
    """Fold one query tile into this consumer's dK and dV, and add its half of the tile's dQ.

    Sᵀ has come with the step before, and this step makes the next one's, under dQ and its way out. The last step makes
    its own again, which nobody uses: a branch around a matmul in flight would cost its asynchrony.
    """
    dtype: gl.constexpr = shared.Q_slots.dtype
    Q_TILE_SIZE: gl.constexpr = shared.Q_slots.shape[1]
    D_TILE: gl.constexpr = shared.Q_slots.shape[2]
    S_LAYOUT: gl.constexpr = _mma_layout(Q_TILE_SIZE)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=_mma_layout(D_TILE), k_width=2)
    FIRST_ROW: gl.constexpr = CONSUMER * CONSUMER_KEYS
    V = shared.KV_tiles.index(1).slice(FIRST_ROW, CONSUMER_KEYS, dim=0)
    slot = step % SLOTS
    Q, dO = shared.Q_slots.index(slot), shared.dO_slots.index(slot)
    zeros = gl.zeros([CONSUMER_KEYS, Q_TILE_SIZE], gl.float32, S_LAYOUT)

    dP_T = warpgroup_mma(V, dO.permute((1, 0)), zeros, use_acc=False, is_async=True)
    THREAD_ROWS: gl.constexpr = _has_thread_rows(D_TILE, IS_CAUSAL)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    stored = _to_thread_rows(gl.zeros([Q_TILE_SIZE], gl.float32, COLUMNS), THREAD_ROWS)  # only its layout is used
    L = _to_columns(shared.L_slots.index(slot).load(stored.type.layout), COLUMNS, THREAD_ROWS)
    P_T = gl.exp2(S_T * problem.scale_log2 - L[None, :])
    if MASKED:
        P_T = _hide(P_T, first_query, first_key + FIRST_ROW, problem.N_KEYS, DIAGONAL)
    dP_T, P_T = warpgroup_mma_wait(0, [dP_T, P_T])
    delta = _to_columns(shared.delta_slots.index(slot).load(stored.type.layout), COLUMNS, THREAD_ROWS)
    dS_T = (P_T * (dP_T - delta[None, :])).to(dtype)

    # Tiles take turns: the other consumer may still multiply the last step's, or if dQ is late the one's before.
    dS_slot = step % shared.dS_tiles.shape[0]
    if DQ_WAY == LATE:
        wait_at(DS_IS_READY + (1 - CONSUMER) * 2 + ((step + 1) & 1), CONSUMERS)
    shared.dS_tiles.index(dS_slot).slice(FIRST_ROW, CONSUMER_KEYS, dim=0).store(dS_T)
    dV = warpgroup_mma(gl.convert_layout(P_T.to(dtype), OPERAND), dO, dV, is_async=True)
    fence_async_shared()
    if DQ_WAY == LATE:
        arrive_at(DS_IS_READY + CONSUMER * 2 + (step & 1), CONSUMERS)
        dQ = _start_dQ(shared, (step + 2) % 3, CONSUMER)
    else:
        if DQ_WAY == ALONE:
            tma.store_wait(0)
        meet_consumers(DS_IS_WRITTEN)
        dQ = _start_dQ(shared, dS_slot, CONSUMER)
    dK = warpgroup_mma(gl.convert_layout(dS_T, OPERAND), Q, dK, is_async=True)
    dV, dQ = warpgroup_mma_wait(1, [dV, dQ])
    if DQ_WAY == ALONE:
        dQ_tile = shared.dQ_tiles.index(CONSUMER)
        dQ_tile.store(_in_thread_order(dQ))
        fence_async_shared()
        dQ_block = [0, 0, (head_row + first_query) * (D_TILE // SENT_COLUMNS) + CONSUMER * SENT_ROWS, 0]
        tma_add(dQ_desc, dQ_block, _as_block(dQ_tile, dQ_desc))
    else:
        _hand_over_dQ(shared, dQ, CONSUMER)
    S_T = _start_scores(shared, min(step + 1, last_step), 0, CONSUMER)
    dK = warpgroup_mma_wait(1, [dK])
    mbarrier.arrive(shared.empty.index(slot), count=1)
    S_T = warpgroup_mma_wait(0, [S_T])
    return dK, dV, S_T


@gluon.jit
def _consume(
    shared, problem, dQ_desc, dK_desc, dV_desc,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr, WHOLE_KEY_TILES: gl.constexpr, DQ_WAY: gl.constexpr,
    ORDERED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: dK and dV of 64 keys, and its half of dQ."""
    dtype: gl.constexpr = shared.Q_slots.dtype
    Q_TILE_SIZE: gl.constexpr = shared.Q_slots.shape[1]
    D_TILE: gl.constexpr = shared.Q_slots.shape[2]
    MASKED_STEPS: gl.constexpr = KEY_TILE // Q_TILE_SIZE if IS_CAUSAL else 0
    key_tile, batch_head = _own_tile(problem, IS_CAUSAL, ORDERED)
    first_key = key_tile * KEY_TILE
    tiles = query_tiles(problem.N_QUERIES, Q_TILE_SIZE)
    first_tile, steps = walk_of_tile(key_tile, tiles, Q_TILE_SIZE, IS_CAUSAL)
    dK = gl.zeros([CONSUMER_KEYS, D_TILE], gl.float32, _mma_layout(D_TILE))
    dV = gl.zeros([CONSUMER_KEYS, D_TILE], gl.float32, _mma_layout(D_TILE))

    mbarrier.wait(shared.kv_full.index(0), 0)
    meet_warps()  # without it the compiler puts one where each step begins
    last_step = GROUP * steps - 1
    if DQ_WAY == LATE:
        arrive_at(DS_IS_READY + CONSUMER * 2 + 1, CONSUMERS)  # of the step before the first
    # The compiler would keep the addresses of K's parts in registers through the loops, were they the same here: so
    # this K is at an index that it does not know to be 0.
    S_T = warpgroup_mma_wait(0, [_start_scores(shared, 0, min(last_step, 0), CONSUMER)])
    for member in range(GROUP):
        head_row = (batch_head * GROUP + member) * tiles * Q_TILE_SIZE
        for j in range(MASKED_STEPS):
            first_query = query_of_step(j, first_tile, tiles, Q_TILE_SIZE, IS_CAUSAL)
            dK, dV, S_T = _step(
                shared, problem, dQ_desc, dK, dV, S_T, member * steps + j, last_step, head_row, first_query, first_key,
                IS_CAUSAL, DQ_WAY, CONSUMER, True, True,
            )  # fmt: skip
        for j in range(MASKED_STEPS, steps):
            first_query = query_of_step(j, first_tile, tiles, Q_TILE_SIZE, IS_CAUSAL)
            dK, dV, S_T = _step(
                shared, problem, dQ_desc, dK, dV, S_T, member * steps + j, last_step, head_row, first_query, first_key,
                IS_CAUSAL, DQ_WAY, CONSUMER, not WHOLE_KEY_TILES, False,
            )  # fmt: skip

    if DQ_WAY == LATE:
        wait_at(DS_IS_READY + (1 - CONSUMER) * 2 + (last_step & 1), CONSUMERS)
        dQ = _start_dQ(shared, last_step % shared.dS_tiles.shape[0], CONSUMER)
        _hand_over_dQ(shared, warpgroup_mma_wait(0, [dQ]), CONSUMER)
    if DQ_WAY != ALONE:
        wait_at(DQ_IS_SENT + CONSUMER, SENDER)
    # Nobody reads K and V any more: their memory takes dK and dV on the way out.
    meet_consumers(TILES_ARE_READ)
    own_tiles = shared.KV_tiles._reinterpret(dtype, [4, CONSUMER_KEYS, D_TILE], shared.KV_tiles.layout)
    dK_tile, dV_tile = own_tiles.index(CONSUMER), own_tiles.index(2 + CONSUMER)
    dK_tile.store((dK * (problem.scale_log2 / LOG2_E)).to(dtype))
    dV_tile.store(dV.to(dtype))
    fence_async_shared()
    own_block = [0, batch_head, first_key + CONSUMER * CONSUMER_KEYS, 0]
    tma.async_copy_shared_to_global(dK_desc, own_block, _as_block(dK_tile, dK_desc))
    tma.async_copy_shared_to_global(dV_desc, own_block, _as_block(dV_tile, dV_desc))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N_KV_HEADS", "HEADS_TOGETHER", "TILES_TOGETHER", "N_QUERIES", "N_KEYS"])
def hopper_backward_kernel(
    Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, rows_ptr, turns_ptr,
    N_KV_HEADS, HEADS_TOGETHER, TILES_TOGETHER, N_QUERIES, N_KEYS, scale_log2,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr, WHOLE_KEY_TILES: gl.constexpr, DQ_WAY: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """dK and dV (1, batch · kv_heads, keys, D), and all but the scale of dQ, in blocks of 64 rows and columns.

    Keys that no query sees are neither read nor written. WHOLE_KEY_TILES: no query sees keys that do not exist. `rows`
    (batch · heads, 2, rows) holds L in base 2, and delta; `turns`, if ORDERED, a zero for each consumer's part of a
    tile of dQ.
    """
    dtype: gl.constexpr = Q_desc.dtype
    Q_TILE_SIZE: gl.constexpr = Q_desc.block_shape[2]
    D_TILE: gl.constexpr = Q_desc.block_shape[3]
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_TILE_SIZE, D_TILE], dtype)
    DS_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEY_TILE, Q_TILE_SIZE], dtype)
    DQ_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SENT_ROWS, SENT_COLUMNS], gl.float32)
    DS_SLOTS: gl.constexpr = 3 if DQ_WAY == LATE else 2
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    problem = _Problem(N_KV_HEADS, HEADS_TOGETHER, TILES_TOGETHER, N_QUERIES, N_KEYS, scale_log2)
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
    )
    mbarrier.init(shared.kv_full.index(0), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(shared.full.index(slot), count=2)  # the bytes of Q and dO; the producer's stores of L and delta
        mbarrier.init(shared.empty.index(slot), count=2)  # the two consumers
    fence_async_shared()
    # Warps of the second consumer, of the producer and of the senders, and their registers a thread; the first consumer
    # has what is left, 240.
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    if DQ_WAY == ALONE:
        gl.warp_specialize([
            (_consume, (
                shared, problem, dQ_desc, dK_desc, dV_desc, GROUP, IS_CAUSAL, WHOLE_KEY_TILES, DQ_WAY, ORDERED, FIRST
            )),
            (_consume, (
                shared, problem, dQ_desc, dK_desc, dV_desc, GROUP, IS_CAUSAL, WHOLE_KEY_TILES, DQ_WAY, ORDERED, SECOND
            )),
            (_produce, (shared, problem, Q_desc, K_desc, V_desc, dO_desc, rows_ptr, GROUP, IS_CAUSAL, ORDERED)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                shared, problem, dQ_desc, dK_desc, dV_desc, GROUP, IS_CAUSAL, WHOLE_KEY_TILES, DQ_WAY, ORDERED, FIRST
            )),
            (_consume, (
                shared, problem, dQ_desc, dK_desc, dV_desc, GROUP, IS_CAUSAL, WHOLE_KEY_TILES, DQ_WAY, ORDERED, SECOND
            )),
            (_produce, (shared, problem, Q_desc, K_desc, V_desc, dO_desc, rows_ptr, GROUP, IS_CAUSAL, ORDERED)),
            (_send, (shared, problem, dQ_desc, turns_ptr, GROUP, IS_CAUSAL, DQ_WAY, ORDERED, FIRST)),
            (_send, (shared, problem, dQ_desc, turns_ptr, GROUP, IS_CAUSAL, DQ_WAY, ORDERED, SECOND)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip


@triton.jit(do_not_specialize=["N_QUERIES", "N_ROWS"])
def hopper_backward_convert_kernel(
    accumulator_ptr, dQ_ptr, N_QUERIES, N_ROWS, scale, D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr
):
    """dQ (batch, heads, queries, D), contiguous, from sums of N_ROWS rows a head that lack their scale."""
    tiles = (N_QUERIES + ROWS - 1) // ROWS
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    first_row = tl.program_id(0) % tiles * ROWS
    query_rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, D_TILE)
    sums = tl.load(accumulator_ptr + (batch_head * N_ROWS + first_row) * D_TILE + tl.arange(0, ROWS * D_TILE))
    # (64 columns, 8 of them, warp, row, pair, half of the warp's rows, of the pair), as `_in_thread_order` leaves them
    sums = tl.permute(tl.reshape(sums, [D_TILE // 64, 8, 4, 8, 4, 2, 2]), [2, 5, 3, 0, 1, 4, 6])
    sums = tl.reshape(sums, [ROWS, D_TILE])
    inside = (query_rows < N_QUERIES)[:, None] & (columns < D)[None, :]
    dQ_rows = (batch_head * N_QUERIES + query_rows)[:, None]
    tl.store(dQ_ptr + dQ_rows * D + columns[None, :], (sums * scale).to(dQ_ptr.dtype.element_ty), mask=inside)


def hopper_backward(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys head_dim"],
    output: Float[Tensor, "batch heads queries head_dim"],
    lse: Float[Tensor, "batch heads queries"],
    grad_output: Float[Tensor, "batch heads queries head_dim"],
    grad_lse: Float[Tensor, "batch heads queries"] | None,
    deterministic: bool,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous gradients of q, k, v in their dtype, bfloat16 or float16; head_dim at most 128, nothing empty.

    `lse` is contiguous, the others have any strides, and what TMA cannot read is copied first. dK and dV are
    bit-reproducible; dQ too if `deterministic`, for some per cent of time.
    """
    head_dim = q.shape[-1]
    q, k, v, output, grad_output = (readable(x) for x in (q, k, v, output, grad_output))
    batch, heads, num_queries, width = q.shape
    kv_heads, num_keys = k.shape[1:3]
    group, query_tile, key_tile = heads // kv_heads, QUERY_TILES[head_tile(width)], KEY_TILE.value
    num_rows = num_tiles(num_queries, ROW_PADDING.value) * ROW_PADDING.value
    num_key_tiles = num_tiles(min(num_keys, num_queries) if is_causal else num_keys, key_tile)
    no_missing_keys = num_key_tiles * key_tile <= num_keys or (is_causal and num_queries <= num_keys)
    streamed_bytes = group * num_rows * head_tile(width) * (2 * q.element_size() + 4)  # Q, dO, and dQ in float32
    heads_together = max(1, min(batch * kv_heads, L2_SHARE_BYTES // streamed_bytes))
    tiles_together = 1
    if deterministic and not is_causal:
        heads_together, tiles_together = 1, min(num_rows // key_tile, num_multiprocessors(q.device) or 1)
    way = dq_way(head_tile(width), is_causal, num_queries, deterministic)

    grad_q = empty_like(q)
    if num_key_tiles * key_tile >= num_keys:
        grad_k, grad_v = empty_like(k), empty_like(k)
    else:  # the kernel does not write keys that no query sees
        grad_k, grad_v = k.new_empty(k.shape), k.new_empty(k.shape)
        for x in (grad_k, grad_v):
            x[:, :, num_key_tiles * key_tile :] = 0
    rows = empty((batch * heads, 2, num_rows), torch.float32, q.device)
    sent_rows = batch * heads * num_rows * head_tile(width) // SENT_COLUMNS.value
    sums = empty((1, 1, sent_rows, SENT_COLUMNS.value), torch.float32, q.device)
    turns = empty((batch * heads, num_rows // HALF.value, 2), torch.int32, q.device) if deterministic else rows
    light_options = {"D": width, "D_TILE": head_tile(width), "ROWS": LIGHT_ROWS}
    log_launch("backward", f"hopper_backward_{query_tile}x{key_tile}", q, num_queries, num_keys)
    with stage("preprocess"):
        launch(
            hopper_backward_preprocess_kernel, (num_rows // LIGHT_ROWS * batch * heads,),
            (output, grad_output, lse, lse if grad_lse is None else grad_lse.contiguous(), rows, sums, turns),
            (*_in_chunks(output), *_in_chunks(grad_output), heads, num_queries, num_rows),
            {"HAS_DL": grad_lse is not None, "ORDERED": deterministic, **light_options},
        )  # fmt: skip
    with stage("dkv"):  # and dQ's sums
        one_batch = (1, batch * kv_heads, num_keys, width)  # programs count batch and heads of dK and dV as one
        tiles = [
            tile_descriptor(q, query_tile), tile_descriptor(k, key_tile), tile_descriptor(v, key_tile),
            tile_descriptor(grad_output, query_tile), tile_descriptor(sums, SENT_ROWS.value, SENT_COLUMNS.value),
            *(tile_descriptor(x.view(one_batch), CONSUMER_KEYS.value) for x in (grad_k, grad_v)),
        ]  # fmt: skip
        launch(
            hopper_backward_kernel, (num_key_tiles * batch * kv_heads,), (*tiles, rows, turns),
            (kv_heads, heads_together, tiles_together, num_queries, num_keys, scale * LOG2_E.value),
            {
                "GROUP": group, "IS_CAUSAL": is_causal, "WHOLE_KEY_TILES": no_missing_keys, "DQ_WAY": way,
                "ORDERED": deterministic, "num_warps": CONSUMER_WARPS,
            },
        )  # fmt: skip
    with stage("dq"):
        launch(
            hopper_backward_convert_kernel, (num_tiles(num_queries, LIGHT_ROWS) * batch * heads,), (sums, grad_q),
            (num_queries, num_rows, scale), light_options,
        )  # fmt: skip
    if width != head_dim:
        grad_q, grad_k, grad_v = (x[..., :head_dim].contiguous() for x in (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v


def dq_way(head_tile: int, is_causal: bool, num_queries: int, deterministic: bool) -> int:
    """The fastest way of dQ to memory, as measured; where additions come in order, of those by senders."""
    if head_tile == 64:
        return LATE.value
    if not is_causal:
        return BY_SENDERS.value
    return LATE.value if deterministic or num_queries >= LATE_FROM else ALONE.value


def _in_chunks(x: Tensor) -> tuple[int, ...]:
    """The strides of batch, heads and rows; a dimension of one element is not strided over."""
    return tuple(stride // CHUNK.value if size > 1 else 0 for stride, size in zip(x.stride()[:3], x.shape))
