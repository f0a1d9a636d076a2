"""Block-sparse attention in Triton: the same steps as the dense kernels, over lists of tiles.

A `BlockMask` lists, for each row of its tiles, the full ones and the partial ones; dead ones are in no list. A program
  1. loads its tile of queries (for dK and dV, of keys), which lies in one row (column) of the mask's tiles;
  2. walks the list of full tiles: no mask is read;
  3. walks the list of partial tiles: scores whose token bit is 0 become -inf, probabilities 0;
  4. stores what the dense kernel stores.
Dead tiles are never read, and no loop has a branch. Every pointer is computed from a tile's index: the classic bug
advances pointers inside the branch that a skipped tile does not take, and then reads the wrong tile ever after.

A tile of the mask may be several of the kernel's: a 128 x 128 mask walked by 64-key tiles takes two steps a list entry.
Tiles that the end of the sequence cuts are partial, so only the partial loops need bounds. Rows without a key give
O = 0, L = -inf and no gradient. The backward's kernels overlap as the dense ones do (`backward`). Layout of the lists:
`cs336_systems.attention.masks.block_mask`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.attention.masks.tiles import TileLists
from cs336_systems.attention.tiles import KernelConfig
from cs336_systems.attention.tiles.config import HALF_L2_SHARE_BYTES
from cs336_systems.attention.triton.backward import launch_preprocess
from cs336_systems.attention.triton.launch import empty_like, launch, overlap_options
from cs336_systems.attention.triton.operands import (
    Keys,
    Queries,
    Rows,
    described,
    empty_results,
    grid_of,
    tile_options,
)
from cs336_systems.attention.triton.steps import (
    LOG2_E,
    LOWEST,
    ROW_PADDING,
    Problem,
    accumulate,
    await_previous,
    fold_keys,
    fold_queries,
    head_of,
    heads_together,
    load_lse_and_delta,
    load_rows,
    online_softmax,
    padded_rows,
    recompute_probabilities,
    start_next,
    store_queries,
    store_rows,
    tile_of_program,
)
from cs336_systems.device import interpreter_is_on
from cs336_systems.measure.stages import stage

_heads_together = partial(heads_together, share=HALF_L2_SHARE_BYTES)
KEYS_PER_WORD = tl.constexpr(32)
INTERPRETED = tl.constexpr(interpreter_is_on())  # decided when kernels are loaded
# $0 = $1 & $2 ? $3 : $4, two instructions. From `tl.where`, LLVM makes one comparison of 64 lanes, packs its result
# into integers bit by bit and takes it apart again: four more instructions a score.
SELECT_BY_BIT = tl.constexpr("""{
.reg .pred attended;
.reg .b32 tested;
and.b32 tested, $1, $2;
setp.ne.b32 attended, tested, 0;
selp.f32 $0, $3, $4, attended;
}""")


def fit_to_blocks(config: KernelConfig, block_size: tuple[int, int]) -> KernelConfig:
    """`config` with tiles that divide the mask's; both are powers of two. Fewer rows take fewer warps.

    The rows that warps share are those of the tile that a program holds: of queries, of keys for dkdv.
    """
    query_tile, key_tile = (min(tile, block) for tile, block in zip((config.query_tile, config.key_tile), block_size))
    held, fitted = (config.key_tile, key_tile) if config.kernel == "dkdv" else (config.query_tile, query_tile)
    num_warps = max(min(4, config.num_warps), config.num_warps * fitted // held)
    return replace(config, query_tile=query_tile, key_tile=key_tile, num_warps=num_warps)


@triton.jit
def _list_of_tile(batch, head, block, num_blocks, MASK_BATCHES, MASK_HEADS):
    """Number of the list that (batch, head, row or column of tiles) walks; a mask of one batch or head serves all."""
    return ((batch % MASK_BATCHES) * MASK_HEADS + head % MASK_HEADS) * num_blocks + block


@triton.jit
def _load_words(token_bits, pattern, rows, first_column, TILES: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Words of the mask's tile number `pattern` at `rows` and K_TILE_SIZE columns, 32 keys each, as one load.

    (rows, words, 1), or TRANSPOSED (words, 1, rows). In a tile of keys that begins inside a word, shifted to it.
    """
    K_TILE_SIZE: tl.constexpr = TILES.K_TILE_SIZE
    WORDS: tl.constexpr = TILES.K_BLOCK // KEYS_PER_WORD
    LOADED: tl.constexpr = (K_TILE_SIZE + KEYS_PER_WORD - 1) // KEYS_PER_WORD
    first_word = token_bits + pattern.to(tl.int64) * (TILES.Q_BLOCK * WORDS) + first_column // KEYS_PER_WORD
    word = tl.arange(0, LOADED)
    if TRANSPOSED:
        words = tl.load(first_word + rows[None, :] * WORDS + word[:, None])[:, None, :]
    else:
        words = tl.load(first_word + rows[:, None] * WORDS + word[None, :])[:, :, None]
    if K_TILE_SIZE < KEYS_PER_WORD:
        words = words >> first_column % KEYS_PER_WORD
    return words


@triton.jit
def _keep_attended(values, otherwise, words, TRANSPOSED: tl.constexpr):
    """`values` (rows, columns), or TRANSPOSED, where their bit in `words` of `_load_words` is 1; else `otherwise`.

    A word is spread over its keys by shape alone, so that a thread holds the words of its own scores, and which word a
    score belongs to is known when the kernel is compiled.
    """
    LOADED: tl.constexpr = words.shape[0 if TRANSPOSED else 1]
    KEYS: tl.constexpr = values.shape[0 if TRANSPOSED else 1] // LOADED
    ROWS: tl.constexpr = words.shape[2 if TRANSPOSED else 0]
    key = tl.arange(0, KEYS)
    if TRANSPOSED:
        keys = tl.broadcast_to(key[None, :, None], (LOADED, KEYS, ROWS))
    else:
        keys = tl.broadcast_to(key[None, None, :], (ROWS, LOADED, KEYS))
    words = tl.broadcast_to(words, keys.shape)
    if INTERPRETED:
        attended = ((words >> keys) & 1) != 0
        return tl.where(attended.reshape(values.shape), values, otherwise)
    else:
        bits = 1 << keys
        if not TRANSPOSED:
            # A thread's keys differ from lane to lane in bits 1 and 2 alone: shifted by those, a word's bits are the
            # same numbers in every lane, and several go to predicates in one instruction (R2P).
            words = words >> (keys & 6)
            bits = 1 << (keys & 25)
        return tl.inline_asm_elementwise(
            SELECT_BY_BIT, "=f,r,r,f,f", [words.reshape(values.shape), bits.reshape(values.shape), values, otherwise],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _visit_listed_keys(
    accumulator, m, l, Q, K_head, V_head, block_rows, num_listed, indices, patterns, token_bits, problem,
    TILES: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Fold the listed key tiles into the running (accumulator, m, l); `block_rows` are Q's rows in the mask's tile."""
    K_TILE_SIZE: tl.constexpr = TILES.K_TILE_SIZE
    STEPS: tl.constexpr = TILES.K_BLOCK // K_TILE_SIZE
    for step in tl.range(0, num_listed * STEPS, disable_licm=Q.dtype != tl.float32):
        first_column = step % STEPS * K_TILE_SIZE  # of the kernel's tile in the mask's
        first_key = tl.load(indices + step // STEPS) * TILES.K_BLOCK + first_column
        K = load_rows(K_head, first_key, problem.N_KEYS, K_TILE_SIZE, TILES, PARTIAL)
        S = tl.dot(Q, tl.trans(K), input_precision=TILES.PRECISION)  # (Q_TILE_SIZE, K_TILE_SIZE), not yet scaled
        if PARTIAL:
            pattern = tl.load(patterns + step // STEPS)
            words = _load_words(token_bits, pattern, block_rows, first_column, TILES, False)
            S = _keep_attended(S, float("-inf"), words, False)
        P, rescale, m, l = online_softmax(S, m, l, problem.scale_log2)
        V = load_rows(V_head, first_key, problem.N_KEYS, K_TILE_SIZE, TILES, PARTIAL)
        accumulator = accumulate(accumulator * rescale[:, None], P.to(V.dtype), V, problem.ZERO, TILES)
    return accumulator, m, l


@triton.jit
def block_sparse_forward_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    kv_num_blocks_ptr, kv_indices_ptr, kv_tokens_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr, token_bits_ptr,
    Q_strides, K_strides, V_strides,
    N_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS, MASK_BATCHES, MASK_HEADS, WIDTH, FULL_WIDTH, scale_log2, ZERO,
    GROUP: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """O (batch, heads, queries, D) and L (batch, heads, queries) are contiguous; q, k, v have any strides."""
    D: tl.constexpr = TILES.D
    D_TILE: tl.constexpr = TILES.D_TILE
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    problem = Problem(N_QUERIES, N_KEYS, scale_log2, ZERO)
    # Last tile first: the lists of a causal mask grow towards the end.
    query_tile, batch_head, batch, head = tile_of_program(
        tl.cdiv(N_QUERIES, Q_TILE_SIZE), N_HEADS, HEADS_TOGETHER, True
    )
    first_query = query_tile * Q_TILE_SIZE
    list_number = _list_of_tile(
        batch, head, first_query // TILES.Q_BLOCK, tl.cdiv(N_QUERIES, TILES.Q_BLOCK), MASK_BATCHES, MASK_HEADS
    )
    kv_head = head // GROUP
    K_head = head_of(K_ptr, K_strides, batch, kv_head)
    V_head = head_of(V_ptr, V_strides, batch, kv_head)

    # 1. load the query tile
    query_rows = first_query + tl.arange(0, Q_TILE_SIZE)
    Q_head = head_of(Q_ptr, Q_strides, batch, head)
    Q = load_rows(Q_head, first_query, N_QUERIES, Q_TILE_SIZE, TILES, True)  # (Q_TILE_SIZE, D_TILE)
    m = tl.full([Q_TILE_SIZE], LOWEST, tl.float32)
    l = tl.zeros([Q_TILE_SIZE], tl.float32)
    accumulator = tl.zeros([Q_TILE_SIZE, D_TILE], tl.float32)

    # 2. full tiles
    accumulator, m, l = _visit_listed_keys(
        accumulator, m, l, Q, K_head, V_head, query_rows % TILES.Q_BLOCK, tl.load(full_kv_num_blocks_ptr + list_number),
        full_kv_indices_ptr + list_number * FULL_WIDTH, kv_tokens_ptr, token_bits_ptr, problem, TILES, False,
    )  # fmt: skip
    # 3. partial tiles
    accumulator, m, l = _visit_listed_keys(
        accumulator, m, l, Q, K_head, V_head, query_rows % TILES.Q_BLOCK, tl.load(kv_num_blocks_ptr + list_number),
        kv_indices_ptr + list_number * WIDTH, kv_tokens_ptr + list_number * WIDTH, token_bits_ptr, problem, TILES, True,
    )  # fmt: skip

    # 4. normalise and store
    row_base = batch_head * N_QUERIES
    store_queries(accumulator, m, l, O_ptr + row_base * D, L_ptr + row_base, query_rows, N_QUERIES, D, TILES, True)


@triton.jit
def _visit_listed_queries(
    dK, dV, K, V, first_column, Q_head, dO_head, L_head, delta_head, num_listed, indices, patterns, token_bits, problem,
    TILES: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Fold the listed query tiles into dK (without its scale) and dV; `first_column` is K's place in the mask's tile.

    A row without keys has L = -inf, hence P = inf or, in float32, 1: it is in partial tiles only, where its bits are 0.
    """
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    STEPS: tl.constexpr = TILES.Q_BLOCK // Q_TILE_SIZE
    LATE_LOADS: tl.constexpr = not isinstance(Q_head.X, tl.tensor_descriptor) and K.dtype != tl.float32
    BOUNDED: tl.constexpr = PARTIAL and TILES.Q_BLOCK > ROW_PADDING  # the mask's last tile may end behind the padding
    for step in tl.range(0, num_listed * STEPS, disable_licm=K.dtype != tl.float32):
        first_row = step % STEPS * Q_TILE_SIZE  # of the kernel's tile in the mask's
        first_query = tl.load(indices + step // STEPS) * TILES.Q_BLOCK + first_row
        block_rows = first_row + tl.arange(0, Q_TILE_SIZE)
        query_rows = first_query + tl.arange(0, Q_TILE_SIZE)
        Q = load_rows(Q_head, first_query, problem.N_QUERIES, Q_TILE_SIZE, TILES, PARTIAL)
        dO = load_rows(dO_head, first_query, problem.N_QUERIES, Q_TILE_SIZE, TILES, PARTIAL)
        if not LATE_LOADS:
            L_log2, delta = load_lse_and_delta(L_head, delta_head, query_rows, problem, BOUNDED)
        S_T = tl.dot(K, tl.trans(Q), input_precision=TILES.PRECISION)  # (K_TILE_SIZE, Q_TILE_SIZE)
        dP_T = tl.dot(V, tl.trans(dO), input_precision=TILES.PRECISION)
        if LATE_LOADS:
            L_log2, delta = load_lse_and_delta(L_head, delta_head, query_rows, problem, BOUNDED)
        P_T = recompute_probabilities(S_T, L_log2[None, :], problem.scale_log2, Q.dtype == tl.float32)
        if PARTIAL:
            pattern = tl.load(patterns + step // STEPS)
            words = _load_words(token_bits, pattern, block_rows, first_column, TILES, True)
            P_T = _keep_attended(P_T, 0.0, words, True)
        dK, dV = fold_queries(dK, dV, P_T, dP_T, Q, dO, delta, problem.ZERO, TILES)
    return dK, dV


@triton.jit
def block_sparse_dkdv_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, delta_ptr, dK_ptr, dV_ptr,
    q_num_blocks_ptr, q_indices_ptr, q_tokens_ptr, full_q_num_blocks_ptr, full_q_indices_ptr, token_bits_ptr,
    Q_strides, K_strides, V_strides, dO_strides,
    N_KV_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS, MASK_BATCHES, MASK_HEADS, WIDTH, FULL_WIDTH, scale, scale_log2, ZERO,
    GROUP: tl.constexpr, TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """dK, dV (batch, kv_heads, keys, D), L and delta (batch, heads, padded queries) are contiguous.

    Each query head of the group walks the lists of its own mask.
    """
    D: tl.constexpr = TILES.D
    D_TILE: tl.constexpr = TILES.D_TILE
    K_TILE_SIZE: tl.constexpr = TILES.K_TILE_SIZE
    problem = Problem(N_QUERIES, N_KEYS, scale_log2, ZERO)
    key_tile, _, batch, kv_head = tile_of_program(tl.cdiv(N_KEYS, K_TILE_SIZE), N_KV_HEADS, HEADS_TOGETHER, False)
    first_key = key_tile * K_TILE_SIZE
    key_rows = first_key + tl.arange(0, K_TILE_SIZE)
    K_head = head_of(K_ptr, K_strides, batch, kv_head)
    V_head = head_of(V_ptr, V_strides, batch, kv_head)
    K = load_rows(K_head, first_key, N_KEYS, K_TILE_SIZE, TILES, True)  # (K_TILE_SIZE, D_TILE)
    V = load_rows(V_head, first_key, N_KEYS, K_TILE_SIZE, TILES, True)
    await_previous(OVERLAP)
    start_next(OVERLAP)  # dQ, as in the dense backward
    dK = tl.zeros([K_TILE_SIZE, D_TILE], tl.float32)
    dV = tl.zeros([K_TILE_SIZE, D_TILE], tl.float32)

    for member in range(GROUP):
        head = kv_head * GROUP + member
        list_number = _list_of_tile(
            batch, head, first_key // TILES.K_BLOCK, tl.cdiv(N_KEYS, TILES.K_BLOCK), MASK_BATCHES, MASK_HEADS
        )
        Q_head = head_of(Q_ptr, Q_strides, batch, head)
        dO_head = head_of(dO_ptr, dO_strides, batch, head)
        row_base = (batch * N_KV_HEADS * GROUP + head) * padded_rows(N_QUERIES)
        dK, dV = _visit_listed_queries(
            dK, dV, K, V, first_key % TILES.K_BLOCK, Q_head, dO_head, L_ptr + row_base, delta_ptr + row_base,
            tl.load(full_q_num_blocks_ptr + list_number), full_q_indices_ptr + list_number * FULL_WIDTH, q_tokens_ptr,
            token_bits_ptr, problem, TILES, False,
        )  # fmt: skip
        dK, dV = _visit_listed_queries(
            dK, dV, K, V, first_key % TILES.K_BLOCK, Q_head, dO_head, L_ptr + row_base, delta_ptr + row_base,
            tl.load(q_num_blocks_ptr + list_number), q_indices_ptr + list_number * WIDTH,
            q_tokens_ptr + list_number * WIDTH, token_bits_ptr, problem, TILES, True,
        )  # fmt: skip

    output_base = (batch * N_KV_HEADS + kv_head) * N_KEYS * D
    store_rows(dK_ptr + output_base, dK * scale, key_rows, N_KEYS, D, TILES)
    store_rows(dV_ptr + output_base, dV, key_rows, N_KEYS, D, TILES)


@triton.jit
def _visit_listed_keys_for_dq(
    dQ, Q, dO, L_log2, delta, K_head, V_head, block_rows, num_listed, indices, patterns, token_bits, problem,
    TILES: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Fold the listed key tiles into dQ (without its scale)."""
    K_TILE_SIZE: tl.constexpr = TILES.K_TILE_SIZE
    STEPS: tl.constexpr = TILES.K_BLOCK // K_TILE_SIZE
    for step in tl.range(0, num_listed * STEPS, disable_licm=Q.dtype != tl.float32):
        first_column = step % STEPS * K_TILE_SIZE  # of the kernel's tile in the mask's
        first_key = tl.load(indices + step // STEPS) * TILES.K_BLOCK + first_column
        K = load_rows(K_head, first_key, problem.N_KEYS, K_TILE_SIZE, TILES, PARTIAL)
        V = load_rows(V_head, first_key, problem.N_KEYS, K_TILE_SIZE, TILES, PARTIAL)
        S = tl.dot(Q, tl.trans(K), input_precision=TILES.PRECISION)  # (Q_TILE_SIZE, K_TILE_SIZE)
        dP = tl.dot(dO, tl.trans(V), input_precision=TILES.PRECISION)
        P = recompute_probabilities(S, L_log2[:, None], problem.scale_log2, K.dtype == tl.float32)
        if PARTIAL:
            pattern = tl.load(patterns + step // STEPS)
            words = _load_words(token_bits, pattern, block_rows, first_column, TILES, False)
            P = _keep_attended(P, 0.0, words, False)
        dQ = fold_keys(dQ, P, dP, K, delta, problem.ZERO, TILES)
    return dQ


@triton.jit
def block_sparse_dq_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, delta_ptr, dQ_ptr,
    kv_num_blocks_ptr, kv_indices_ptr, kv_tokens_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr, token_bits_ptr,
    Q_strides, K_strides, V_strides, dO_strides,
    N_HEADS, HEADS_TOGETHER, N_QUERIES, N_KEYS, MASK_BATCHES, MASK_HEADS, WIDTH, FULL_WIDTH, scale, scale_log2, ZERO,
    GROUP: tl.constexpr, TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """dQ (batch, heads, queries, D), L and delta (batch, heads, padded queries) are contiguous."""
    D: tl.constexpr = TILES.D
    D_TILE: tl.constexpr = TILES.D_TILE
    Q_TILE_SIZE: tl.constexpr = TILES.Q_TILE_SIZE
    problem = Problem(N_QUERIES, N_KEYS, scale_log2, ZERO)
    query_tile, batch_head, batch, head = tile_of_program(
        tl.cdiv(N_QUERIES, Q_TILE_SIZE), N_HEADS, HEADS_TOGETHER, True
    )
    first_query = query_tile * Q_TILE_SIZE
    list_number = _list_of_tile(
        batch, head, first_query // TILES.Q_BLOCK, tl.cdiv(N_QUERIES, TILES.Q_BLOCK), MASK_BATCHES, MASK_HEADS
    )
    kv_head = head // GROUP
    K_head = head_of(K_ptr, K_strides, batch, kv_head)
    V_head = head_of(V_ptr, V_strides, batch, kv_head)

    query_rows = first_query + tl.arange(0, Q_TILE_SIZE)
    Q_head = head_of(Q_ptr, Q_strides, batch, head)
    dO_head = head_of(dO_ptr, dO_strides, batch, head)
    row_base = batch_head * padded_rows(N_QUERIES)
    output_base = batch_head * N_QUERIES * D
    Q = load_rows(Q_head, first_query, N_QUERIES, Q_TILE_SIZE, TILES, True)  # (Q_TILE_SIZE, D_TILE)
    dO = load_rows(dO_head, first_query, N_QUERIES, Q_TILE_SIZE, TILES, True)
    L_log2 = tl.load(L_ptr + row_base + query_rows, mask=query_rows < N_QUERIES, other=float("inf"))
    delta = tl.load(delta_ptr + row_base + query_rows, mask=query_rows < N_QUERIES, other=0.0)
    dQ = tl.zeros([Q_TILE_SIZE, D_TILE], tl.float32)

    dQ = _visit_listed_keys_for_dq(
        dQ, Q, dO, L_log2, delta, K_head, V_head, query_rows % TILES.Q_BLOCK,
        tl.load(full_kv_num_blocks_ptr + list_number),
        full_kv_indices_ptr + list_number * FULL_WIDTH, kv_tokens_ptr, token_bits_ptr, problem, TILES, False,
    )  # fmt: skip
    dQ = _visit_listed_keys_for_dq(
        dQ, Q, dO, L_log2, delta, K_head, V_head, query_rows % TILES.Q_BLOCK, tl.load(kv_num_blocks_ptr + list_number),
        kv_indices_ptr + list_number * WIDTH, kv_tokens_ptr + list_number * WIDTH, token_bits_ptr, problem, TILES, True,
    )  # fmt: skip
    store_rows(dQ_ptr + output_base, dQ * scale, query_rows, N_QUERIES, D, TILES)
    await_previous(OVERLAP)


def launch_block_sparse_forward(
    q: Queries, k: Keys, v: Keys, lists: TileLists, *, scale: float, config: KernelConfig
) -> tuple[Queries, Rows]:
    """Contiguous O in q's dtype and L in float32. `config`'s tiles divide the mask's: see `fit_to_blocks`."""
    batch, heads, num_queries, _ = q.shape
    output, lse = empty_results(q)
    tensors, mask_sizes = _lists_of(lists, "kv")
    with stage("forward"):
        launch(
            block_sparse_forward_kernel, grid_of(config, q, k),
            (*described(config, q=q, k=k, v=v), output, lse, *tensors),
            (q.stride(), k.stride(), v.stride(), heads, _heads_together(batch * heads, k), num_queries, k.shape[2],
             *mask_sizes, scale * LOG2_E.value, 0.0),
            _options(q, k, lists, config),
        )  # fmt: skip
    return output, lse


def launch_block_sparse_backward(
    q: Queries, k: Keys, v: Keys, output: Queries, lse: Rows, grad_output: Queries, grad_lse: Rows | None,
    lists: TileLists, *, scale: float, dkdv_config: KernelConfig, dq_config: KernelConfig,
) -> tuple[Queries, Keys, Keys]:  # fmt: skip
    """Contiguous gradients of q, k, v in their dtypes; what `launch_backward` says of its arguments holds here."""
    batch, heads, num_queries, _ = q.shape
    kv_heads, num_keys = k.shape[1:3]
    grad_q, grad_k, grad_v = empty_like(q), empty_like(k), empty_like(v)
    rows = launch_preprocess(output, lse, grad_output, grad_lse)
    strides = (q.stride(), k.stride(), v.stride(), grad_output.stride())
    scales = (scale, scale * LOG2_E.value, 0.0)
    overlap = overlap_options(q.device, follows=True)

    tensors, mask_sizes = _lists_of(lists, "q")
    with stage("dkv"):
        launch(
            block_sparse_dkdv_kernel, grid_of(dkdv_config, q, k),
            (*described(dkdv_config, q=q, k=k, v=v, grad_output=grad_output), *rows, grad_k, grad_v, *tensors),
            (*strides, kv_heads, _heads_together(batch * kv_heads, q, heads // kv_heads), num_queries, num_keys,
             *mask_sizes, *scales),
            _options(q, k, lists, dkdv_config) | overlap,
        )  # fmt: skip
    tensors, mask_sizes = _lists_of(lists, "kv")
    with stage("dq"):
        launch(
            block_sparse_dq_kernel, grid_of(dq_config, q, k),
            (*described(dq_config, q=q, k=k, v=v, grad_output=grad_output), *rows, grad_q, *tensors),
            (*strides, heads, _heads_together(batch * heads, k), num_queries, num_keys, *mask_sizes, *scales),
            _options(q, k, lists, dq_config) | overlap,
        )  # fmt: skip
    return grad_q, grad_k, grad_v


def _lists_of(lists: TileLists, side: str) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """What a program walks, `kv` in the forward and dQ, `q` in dK and dV, and the sizes by which it finds its lists."""
    walked = lists[:5] if side == "kv" else lists[5:10]
    return (*walked, lists.token_bits), (*walked[0].shape[:2], walked[1].shape[3], walked[4].shape[3])


def _options(q: Tensor, k: Tensor, lists: TileLists, config: KernelConfig) -> dict[str, Any]:
    # A tile's address hangs on a load of its index, and Triton spreads the two loads over its stages: it takes these
    # many for as many tiles in flight as the dense kernels have with config.num_stages.
    tiling = tile_options(config, q.shape[3], lists.block_size) | {"num_stages": 2 * config.num_stages - 1}
    return {"GROUP": q.shape[1] // k.shape[1], **tiling}
