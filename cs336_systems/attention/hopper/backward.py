"""The backward on Hopper: one Gluon kernel of five matmuls between two light Triton kernels.

  preprocess   delta = rowsum(dO ∘ O), minus the gradient of L if one arrives; L in base 2; dQ's accumulator zeroed
  main         one program a tile of 128 keys: dK and dV stay in registers, dQ is added into memory, in float32
  convert      dQ = scale · accumulator, in the inputs' dtype

A program has three partitions. A producer warp copies tiles by TMA into a ring of two slots; two consumer warp groups
own 64 keys each and walk the query tiles that see them. S and dP are computed transposed, so that Pᵀ and dSᵀ are what
the tensor cores take from registers as left operands. One step of a consumer, time going down; `│` is what the tensor
cores do meanwhile:

    wait for the slot (Q, dO, L, delta)
    issue Sᵀ = K Qᵀ, dPᵀ = V dOᵀ       │ S
    wait for S
    Pᵀ = exp2(scale·log₂e·Sᵀ - L)      │ dP         L is read from shared memory only here: registers are scarce
    issue dV += Pᵀ dO                  │ dP, dV
    wait for dP
    dSᵀ = Pᵀ ∘ (dPᵀ - delta)           │ dV         delta likewise
    issue dK += dSᵀ Q                  │ dV, dK
    dSᵀ to shared memory, meet the other consumer   (named barrier: dQ sums over the keys of both)
    issue dQ = dS K                    │ dV, dK, dQ
    wait for them, release the slot, dQ to shared memory, TMA adds it to the accumulator in memory

The two consumers share the 128 keys' dQ tile: each forms half of it from all keys, so that it is added once, not twice.
Head dim 128 has tiles of 64 queries and halves of columns; head dim 64 has tiles of 128 queries and halves of rows
(15 to 20 % faster there than tiles of 64).

What is summed where: dK and dV over queries, and over the query heads of a group, in one program's registers in one
order: bit-reproducible. dQ over key tiles, by atomic adds in whatever order they arrive: not bit-reproducible.

Which tiles: causal programs start at the diagonal; others start at their own position and wrap around, so that programs
running at one time add to different rows of dQ. A tile is masked where the diagonal cuts it, and everywhere in the
program that holds the ragged end of the keys (there Pᵀ of a key that does not exist would be exp2(-L), which can be
inf). Rows of queries past the end have L = +inf, hence P = 0; TMA fills with zeros what it reads past an end and drops
what it would write there, per head, since its descriptors know all four dimensions.

Sources: FlashAttention-2 (Dao 2023), algorithm 2; FlashAttention-3 (Shah et al. 2024) for the partitions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.attention.triton.steps import LOG2_E, load_rows

KEY_TILE = gl.constexpr(128)  # keys of a program: the two consumers' 64 rows of a wgmma each
CONSUMER_KEYS = gl.constexpr(64)
SLOTS = gl.constexpr(2)  # what fits: 193 KiB at head dim 128, 194 KiB at 64, of 227


@triton.jit
def hopper_backward_preprocess_kernel(
    O_ptr, dO_ptr, L_ptr, dL_ptr, L_log2_ptr, D_ptr, dQ_ptr,
    stride_ob, stride_oh, stride_os, stride_dob, stride_doh, stride_dos, stride_dlb, stride_dlh, stride_dls,
    N_HEADS, N_QUERIES, N_ROWS,
    HAS_DL: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The three results have N_ROWS rows a head, whole tiles; L is contiguous, and so are the rows of O and dO."""
    tiles = N_ROWS // ROWS
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = batch_head // N_HEADS, batch_head % N_HEADS
    first_query = tl.program_id(0) % tiles * ROWS
    query_rows = first_query + tl.arange(0, ROWS)
    O_base = O_ptr + batch * stride_ob + head * stride_oh
    O = load_rows(O_base, 0, 0, first_query, N_QUERIES, stride_os, 1, D, D_TILE, ROWS, True, False)
    dO_base = dO_ptr + batch * stride_dob + head * stride_doh
    dO = load_rows(dO_base, 0, 0, first_query, N_QUERIES, stride_dos, 1, D, D_TILE, ROWS, True, False)
    delta = tl.sum(O.to(tl.float32) * dO.to(tl.float32), axis=1)
    if HAS_DL:
        dL_base = dL_ptr + batch * stride_dlb + head * stride_dlh
        delta -= tl.load(dL_base + query_rows.to(tl.int64) * stride_dls, mask=query_rows < N_QUERIES, other=0.0)
    L = tl.load(L_ptr + batch_head * N_QUERIES + query_rows, mask=query_rows < N_QUERIES, other=float("inf"))
    result_rows = batch_head * N_ROWS + query_rows
    tl.store(L_log2_ptr + result_rows, L * LOG2_E)
    tl.store(D_ptr + result_rows, delta)
    tl.store(dQ_ptr + result_rows[:, None] * D_TILE + tl.arange(0, D_TILE)[None, :], tl.zeros([ROWS, D_TILE], tl.float32))


@gluon.constexpr_function
def _mma_layout(columns):
    """Where a warp group's wgmma leaves in registers: a (64, columns) tile."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@builtin
def _tma_add(desc, coordinates, tile, _semantic=None):
    """Start adding a tile of shared memory into memory, element by element and atomically."""
    handles = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, handles, tile.handle)


@gluon.jit
def _meet_consumers(BARRIER: gl.constexpr):
    """Both consumers, 256 threads, wait for each other at the hardware's named barrier; Triton uses the first few."""
    gl.inline_asm_elementwise(
        "bar.sync " + BARRIER + ", 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _tile_of_program(num_tiles, HEADS_TOGETHER):
    """(key tile, batch and key head in one) of this program.

    HEADS_TOGETHER heads at a time, whose rows the L2 cache holds; among them one tile index after the other, so that
    the longest causal tiles, those of the first keys, start first and the short ones fill the tail.
    """
    num_batch_heads = gl.num_programs(0) // num_tiles
    first_head = gl.program_id(0) // (HEADS_TOGETHER * num_tiles) * HEADS_TOGETHER
    width = gl.minimum(HEADS_TOGETHER, num_batch_heads - first_head)
    position = gl.program_id(0) - first_head * num_tiles
    return position // width, first_head + position % width


@gluon.jit
def _walk(N_QUERIES, N_KEYS, HEADS_TOGETHER, IS_CAUSAL: gl.constexpr, Q_TILE_SIZE: gl.constexpr):
    """What the partitions of a program agree on: (batch, key head, first key, first tile, number of tiles, of steps).

    A head's steps visit `steps` of its query tiles from the first one on, around the end.
    """
    key_tile, batch_head = _tile_of_program(gl.cdiv(N_KEYS, KEY_TILE), HEADS_TOGETHER)
    tiles = gl.cdiv(N_QUERIES, KEY_TILE) * (KEY_TILE // Q_TILE_SIZE)
    first_key = key_tile * KEY_TILE
    if IS_CAUSAL:
        # Where there are more keys than queries, no query sees the last ones: their programs add zeros.
        first_tile = gl.minimum(first_key // Q_TILE_SIZE, tiles - KEY_TILE // Q_TILE_SIZE)
        steps = tiles - first_tile
    else:
        first_tile = first_key // Q_TILE_SIZE % tiles
        steps = tiles
    return batch_head, first_key, first_tile, tiles, steps


@gluon.jit
def _tile_of_step(step, first_tile, tiles, IS_CAUSAL: gl.constexpr):
    tile = first_tile + step
    if not IS_CAUSAL:
        tile = gl.where(tile >= tiles, tile - tiles, tile)
    return tile


@gluon.jit
def _produce(
    shared, Q_desc, K_desc, V_desc, dO_desc, L_ptr, D_ptr, N_KV_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """The producer warp: K and V once, then Q, dO, L and delta of each step, two slots ahead of the consumers."""
    Q_slots, dO_slots, K_all, V_all, dS_tiles, dQ_tiles, L_slots, D_slots, kv_full, full, empty = shared
    Q_TILE_SIZE: gl.constexpr = Q_slots.shape[1]
    ROWS_LAYOUT: gl.constexpr = gl.BlockedLayout([Q_TILE_SIZE // 32], [32], [1], [0])
    batch_head, first_key, first_tile, tiles, steps = _walk(
        N_QUERIES, N_KEYS, HEADS_TOGETHER, IS_CAUSAL, Q_TILE_SIZE
    )
    batch, kv_head = batch_head // N_KV_HEADS, batch_head % N_KV_HEADS
    mbarrier.expect(kv_full, K_desc.block_type.nbytes + V_desc.block_type.nbytes)
    _load(K_desc, batch, kv_head, first_key, kv_full, K_all)
    _load(V_desc, batch, kv_head, first_key, kv_full, V_all)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        head_row = (batch_head * GROUP + member) * tiles * Q_TILE_SIZE
        for j in range(steps):
            step = member * steps + j
            slot = step % SLOTS
            first_query = _tile_of_step(j, first_tile, tiles, IS_CAUSAL) * Q_TILE_SIZE
            rows = head_row + first_query + gl.arange(0, Q_TILE_SIZE, ROWS_LAYOUT)
            L = gl.load(L_ptr + rows)
            delta = gl.load(D_ptr + rows)
            mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), Q_desc.block_type.nbytes + dO_desc.block_type.nbytes)
            _load(Q_desc, batch, head, first_query, full.index(slot), Q_slots.index(slot))
            _load(dO_desc, batch, head, first_query, full.index(slot), dO_slots.index(slot))
            L_slots.index(slot).store(L)
            D_slots.index(slot).store(delta)
            mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _load(desc, batch, head, row, barrier, tile):
    """TMA from a (batch, heads, rows, dim) tensor into a (rows, dim) tile."""
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], barrier, _as_block(tile, desc))


@gluon.jit
def _as_block(tile, desc):
    return tile._reinterpret(desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def _step(
    shared, dQ_desc, dK, dV, step, dQ_row, first_query, first_key, N_KEYS, scale_log2,
    CONSUMER: gl.constexpr, MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr, D_TILE: gl.constexpr,
    Q_TILE_SIZE: gl.constexpr,
):  # fmt: skip
    """Fold one query tile into dK and dV, and add this consumer's half of its dQ; see the schedule above."""
    Q_slots, dO_slots, K_all, V_all, dS_tiles, dQ_tiles, L_slots, D_slots, kv_full, full, empty = shared
    dtype: gl.constexpr = Q_slots.dtype
    S_LAYOUT: gl.constexpr = _mma_layout(Q_TILE_SIZE)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=_mma_layout(D_TILE), k_width=2)
    K = K_all.slice(CONSUMER * CONSUMER_KEYS, CONSUMER_KEYS, dim=0)
    V = V_all.slice(CONSUMER * CONSUMER_KEYS, CONSUMER_KEYS, dim=0)
    slot = step % SLOTS
    Q, dO = Q_slots.index(slot), dO_slots.index(slot)
    nothing = gl.zeros([CONSUMER_KEYS, Q_TILE_SIZE], gl.float32, S_LAYOUT)

    mbarrier.wait(full.index(slot), (step // SLOTS) & 1)
    S_T = warpgroup_mma(K, Q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dP_T = warpgroup_mma(V, dO.permute((1, 0)), nothing, use_acc=False, is_async=True)
    S_T = warpgroup_mma_wait(1, [S_T])
    L = L_slots.index(slot).load(gl.SliceLayout(0, S_LAYOUT))
    P_T = gl.exp2(S_T * scale_log2 - L[None, :])
    if MASKED:
        P_T = _mask(P_T, first_query, first_key + CONSUMER * CONSUMER_KEYS, N_KEYS, IS_CAUSAL, S_LAYOUT)
    dV = warpgroup_mma(gl.convert_layout(P_T.to(dtype), OPERAND), dO, dV, is_async=True)
    dP_T = warpgroup_mma_wait(1, [dP_T])
    delta = D_slots.index(slot).load(gl.SliceLayout(0, S_LAYOUT))
    dS_T = (P_T * (dP_T - delta[None, :])).to(dtype)
    dK = warpgroup_mma(gl.convert_layout(dS_T, OPERAND), Q, dK, is_async=True)

    # The other consumer may still read the dS of the step before: two tiles take turns.
    dS = dS_tiles.index(step & 1)
    dS.slice(CONSUMER * CONSUMER_KEYS, CONSUMER_KEYS, dim=0).store(dS_T)
    fence_async_shared()
    dQ_tile = dQ_tiles.index(CONSUMER)
    half = gl.zeros([64, 64], gl.float32, _mma_layout(64))
    if D_TILE == 128:
        # Waiting for the last add and for all matmuls at once saves barriers, which bound this head dim.
        tma.store_wait(0)
        _meet_consumers("9")
        dQ = warpgroup_mma(
            dS.permute((1, 0)), K_all.slice(CONSUMER * 64, 64, dim=1), half, use_acc=False, is_async=True
        )  # fmt: skip
        dV, dK, dQ = warpgroup_mma_wait(0, [dV, dK, dQ])
        dQ_tile.store(dQ)
        fence_async_shared()
        _tma_add(dQ_desc, [dQ_row, CONSUMER * 64], dQ_tile)
        mbarrier.arrive(empty.index(slot), count=1)
    else:
        _meet_consumers("9")
        dS_rows = dS.slice(CONSUMER * 64, 64, dim=1)
        dQ = warpgroup_mma(dS_rows.permute((1, 0)), K_all, half, use_acc=False, is_async=True)
        dV, dK = warpgroup_mma_wait(1, [dV, dK])
        mbarrier.arrive(empty.index(slot), count=1)
        tma.store_wait(0)
        dQ = warpgroup_mma_wait(0, [dQ])
        dQ_tile.store(dQ)
        fence_async_shared()
        _tma_add(dQ_desc, [dQ_row + CONSUMER * 64, 0], dQ_tile)
    return dK, dV


@gluon.jit
def _mask(P_T, first_query, first_key, N_KEYS, IS_CAUSAL: gl.constexpr, S_LAYOUT: gl.constexpr):
    """P, transposed, with zeros where the key does not exist or, if causal, comes after the query."""
    key_rows = first_key + gl.arange(0, P_T.shape[0], gl.SliceLayout(1, S_LAYOUT))
    if IS_CAUSAL:
        query_rows = first_query + gl.arange(0, P_T.shape[1], gl.SliceLayout(0, S_LAYOUT))
        first_seen_by = gl.where(key_rows < N_KEYS, key_rows, 2**31 - 1)
        return gl.where(query_rows[None, :] >= first_seen_by[:, None], P_T, 0.0)
    else:
        return gl.where((key_rows < N_KEYS)[:, None], P_T, 0.0)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, shared, dQ_desc, dK_desc, dV_desc, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale_log2,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr, WHOLE_KEY_TILES: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: dK and dV of 64 keys."""
    Q_slots, dO_slots, K_all, V_all, dS_tiles, dQ_tiles, L_slots, D_slots, kv_full, full, empty = shared
    Q_TILE_SIZE: gl.constexpr = Q_slots.shape[1]
    D_TILE: gl.constexpr = Q_slots.shape[2]
    batch_head, first_key, first_tile, tiles, steps = _walk(
        N_QUERIES, N_KEYS, HEADS_TOGETHER, IS_CAUSAL, Q_TILE_SIZE
    )
    dK = gl.zeros([CONSUMER_KEYS, D_TILE], gl.float32, _mma_layout(D_TILE))
    dV = gl.zeros([CONSUMER_KEYS, D_TILE], gl.float32, _mma_layout(D_TILE))

    # The query tiles that the diagonal cuts; a program has at least as many steps.
    DIAGONAL_STEPS: gl.constexpr = KEY_TILE // Q_TILE_SIZE if IS_CAUSAL else 0
    mbarrier.wait(kv_full, 0)
    for member in range(GROUP):
        head_row = (batch_head * GROUP + member) * tiles * Q_TILE_SIZE
        for j in range(DIAGONAL_STEPS if WHOLE_KEY_TILES else steps):
            first_query = _tile_of_step(j, first_tile, tiles, IS_CAUSAL) * Q_TILE_SIZE
            dK, dV = _step(
                shared, dQ_desc, dK, dV, member * steps + j, head_row + first_query, first_query, first_key, N_KEYS,
                scale_log2, CONSUMER, True, IS_CAUSAL, D_TILE, Q_TILE_SIZE,
            )  # fmt: skip
        if WHOLE_KEY_TILES:
            for j in range(DIAGONAL_STEPS, steps):
                first_query = _tile_of_step(j, first_tile, tiles, IS_CAUSAL) * Q_TILE_SIZE
                dK, dV = _step(
                    shared, dQ_desc, dK, dV, member * steps + j, head_row + first_query, first_query, first_key, N_KEYS,
                    scale_log2, CONSUMER, False, IS_CAUSAL, D_TILE, Q_TILE_SIZE,
                )  # fmt: skip

    # K and V have been read by both consumers: their memory takes dK and dV on the way out.
    _meet_consumers("10")
    dK_tile = K_all._reinterpret(K_all.dtype, [2, CONSUMER_KEYS, D_TILE], K_all.layout).index(CONSUMER)
    dV_tile = V_all._reinterpret(V_all.dtype, [2, CONSUMER_KEYS, D_TILE], V_all.layout).index(CONSUMER)
    dK_tile.store((dK * (scale_log2 / LOG2_E)).to(K_all.dtype))
    dV_tile.store(dV.to(V_all.dtype))
    fence_async_shared()
    first_own_key = first_key + CONSUMER * CONSUMER_KEYS
    tma.async_copy_shared_to_global(dK_desc, [batch_head, first_own_key, 0], _as_block(dK_tile, dK_desc))
    tma.async_copy_shared_to_global(dV_desc, [batch_head, first_own_key, 0], _as_block(dV_tile, dV_desc))
    tma.store_wait(0)


@gluon.jit
def _consume_first(
    shared, dQ_desc, dK_desc, dV_desc, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale_log2,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr, WHOLE_KEY_TILES: gl.constexpr,
):  # fmt: skip
    _consume(
        0, shared, dQ_desc, dK_desc, dV_desc, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale_log2,
        GROUP, IS_CAUSAL, WHOLE_KEY_TILES,
    )  # fmt: skip


@gluon.jit
def _consume_second(
    shared, dQ_desc, dK_desc, dV_desc, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale_log2,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr, WHOLE_KEY_TILES: gl.constexpr,
):  # fmt: skip
    _consume(
        1, shared, dQ_desc, dK_desc, dV_desc, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale_log2,
        GROUP, IS_CAUSAL, WHOLE_KEY_TILES,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["N_KV_HEADS", "HEADS_TOGETHER", "N_QUERIES", "N_KEYS"])
def hopper_backward_kernel(
    Q_desc, K_desc, V_desc, dO_desc, dQ_desc, dK_desc, dV_desc, L_ptr, D_ptr,
    N_KV_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale_log2, GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr, WHOLE_KEY_TILES: gl.constexpr,
):  # fmt: skip
    """dK and dV, and into dQ's zeroed accumulator what lacks only its scale."""
    dtype: gl.constexpr = Q_desc.dtype
    Q_TILE_SIZE: gl.constexpr = Q_desc.block_shape[2]
    D_TILE: gl.constexpr = Q_desc.block_shape[3]
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_TILE_SIZE, D_TILE], dtype)
    DS_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEY_TILE, Q_TILE_SIZE], dtype)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    Q_slots = gl.allocate_shared_memory(dtype, [SLOTS, Q_TILE_SIZE, D_TILE], TILE)
    dO_slots = gl.allocate_shared_memory(dtype, [SLOTS, Q_TILE_SIZE, D_TILE], TILE)
    K_all = gl.allocate_shared_memory(dtype, [KEY_TILE, D_TILE], TILE)
    V_all = gl.allocate_shared_memory(dtype, [KEY_TILE, D_TILE], TILE)
    dS_tiles = gl.allocate_shared_memory(dtype, [2, KEY_TILE, Q_TILE_SIZE], DS_TILE)
    dQ_tiles = gl.allocate_shared_memory(gl.float32, [2, 64, 64], dQ_desc.layout)
    L_slots = gl.allocate_shared_memory(gl.float32, [SLOTS, Q_TILE_SIZE], ROWS)
    D_slots = gl.allocate_shared_memory(gl.float32, [SLOTS, Q_TILE_SIZE], ROWS)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=2)  # the bytes of Q and dO, and the producer's stores of L and delta
        mbarrier.init(empty.index(slot), count=2)  # the two consumers
    fence_async_shared()
    shared = (Q_slots, dO_slots, K_all, V_all, dS_tiles, dQ_tiles, L_slots, D_slots, kv_full, full, empty)
    consumer_arguments = (
        shared, dQ_desc, dK_desc, dV_desc, HEADS_TOGETHER, N_QUERIES, N_KEYS, scale_log2,
        GROUP, IS_CAUSAL, WHOLE_KEY_TILES,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume_first, consumer_arguments),
            (_consume_second, consumer_arguments),
            (
                _produce,
                (
                    shared, Q_desc, K_desc, V_desc, dO_desc, L_ptr, D_ptr, N_KV_HEADS, HEADS_TOGETHER, N_QUERIES,
                    N_KEYS, GROUP, IS_CAUSAL,
                ),
            ),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # their registers a thread; the first consumer has what is left, 240 too
    )  # fmt: skip


@triton.jit
def hopper_backward_convert_kernel(
    accumulator_ptr, dQ_ptr, N_QUERIES, N_ROWS, scale, D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr
):
    """dQ (batch, heads, queries, D), contiguous, from float32 sums of N_ROWS rows a head, D_TILE columns wide."""
    tiles = tl.cdiv(N_QUERIES, ROWS)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    query_rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D_TILE)
    inside = (query_rows < N_QUERIES)[:, None] & (columns < D)[None, :]
    sums = tl.load(accumulator_ptr + (batch_head * N_ROWS + query_rows)[:, None] * D_TILE + columns[None, :])
    dQ_rows = (batch_head * N_QUERIES + query_rows)[:, None]
    tl.store(dQ_ptr + dQ_rows * D + columns[None, :], (sums * scale).to(dQ_ptr.dtype.element_ty), mask=inside)


def hopper_backward(q, k, v, output, lse, grad_output, grad_lse, is_causal, scale, config=""):
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    width = 64 if head_dim <= 64 else 128
    query_tile = 128 if width == 64 else 64
    num_rows = triton.cdiv(num_queries, 128) * 128
    lse_log2, delta = (lse.new_empty((batch, heads, num_rows)) for _ in range(2))
    sums = lse.new_empty((batch * heads * num_rows, width))
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    any_lse = lse if grad_lse is None else grad_lse
    hopper_backward_preprocess_kernel[(num_rows // 64 * batch * heads,)](
        output, grad_output, lse, any_lse, lse_log2, delta, sums,
        *output.stride()[:3], *grad_output.stride()[:3], *any_lse.stride(), heads, num_queries, num_rows,
        HAS_DL=grad_lse is not None, D=head_dim, D_TILE=width, ROWS=64,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    import triton.experimental.gluon.language as G
    dt = {torch.bfloat16: G.bfloat16, torch.float16: G.float16, torch.float32: G.float32}
    def describe(x, block):
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block, G.NVMMASharedLayout.get_default_for(block, dt[x.dtype]))
    qb, kb, ob = [1, 1, query_tile, width], [1, 1, 128, width], [1, 64, width]
    hopper_backward_kernel[(triton.cdiv(num_keys, 128) * batch * kv_heads,)](
        describe(q, qb), describe(k, kb), describe(v, kb), describe(grad_output, qb), describe(sums, [64, 64]),
        describe(grad_k.flatten(0, 1), ob), describe(grad_v.flatten(0, 1), ob), lse_log2, delta,
        kv_heads, 4, num_queries, num_keys, scale * LOG2_E.value,
        GROUP=heads // kv_heads, IS_CAUSAL=is_causal, WHOLE_KEY_TILES=num_keys % 128 == 0, num_warps=4,
    )
    hopper_backward_convert_kernel[(triton.cdiv(num_queries, 64) * batch * heads,)](
        sums, grad_q, num_queries, num_rows, scale, D=head_dim, D_TILE=width, ROWS=64,
    )
    return grad_q, grad_k, grad_v
