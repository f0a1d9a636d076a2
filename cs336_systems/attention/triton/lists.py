"""What the walk of a block mask's lists adds to a kernel's steps: where a step's tile is, and the
bits of its pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import triton
import triton.language as tl

from cs336_systems.attention.masks.tiles import TileLists
from cs336_systems.attention.tiles import KernelConfig
from cs336_systems.attention.triton.steps import visible_pairs
from cs336_systems.device import interpreter_is_on

KEYS_PER_WORD = tl.constexpr(32)
INTERPRETED = tl.constexpr(interpreter_is_on())  # decided when kernels are loaded
# $0 = $1 & $2 ? $3 : $4, two instructions. From `tl.where`, LLVM makes one comparison of 64 lanes,
# packs its result into integers bit by bit and takes it apart again: four more instructions a
# score.
SELECT_BY_BIT = tl.constexpr("""{
.reg .pred attended;
.reg .b32 tested;
and.b32 tested, $1, $2;
setp.ne.b32 attended, tested, 0;
selp.f32 $0, $3, $4, attended;
}""")


class Lists(NamedTuple):
    """The tensors that programs walk, and the sizes by which one finds its own list."""

    num_partial: tl.tensor
    partial: tl.tensor  # (masks, rows of tiles, WIDTH): numbers of partial tiles
    patterns: tl.tensor  # the same: their numbers in `token_bits`
    num_full: tl.tensor
    full: tl.tensor  # (masks, rows of tiles, FULL_WIDTH)
    token_bits: tl.tensor
    MASK_BATCHES: tl.tensor
    MASK_HEADS: tl.tensor
    WIDTH: tl.tensor
    FULL_WIDTH: tl.tensor


class Walk(NamedTuple):
    """One list, and the bits of its tiles if they are partial."""

    indices: tl.tensor
    patterns: tl.tensor
    token_bits: tl.tensor


@triton.jit
def list_of_tile(batch, head, block, num_blocks, MASK_BATCHES, MASK_HEADS):
    """Number of the list that (batch, head, row or column of tiles) walks; a mask of one batch or
    head serves all.
    """
    return ((batch % MASK_BATCHES) * MASK_HEADS + head % MASK_HEADS) * num_blocks + block


@triton.jit
def _load_words(
    token_bits, pattern, rows, first_column, TILES: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Words of the mask's tile number `pattern` at `rows` and K_TILE_SIZE columns, 32 keys each, as
    one load.

    (rows, words, 1), or TRANSPOSED (words, 1, rows). In a tile of keys that begins inside a word,
    shifted to it.
    """
    K_TILE_SIZE: tl.constexpr = TILES.K_TILE_SIZE
    WORDS: tl.constexpr = TILES.K_BLOCK // KEYS_PER_WORD
    LOADED: tl.constexpr = (K_TILE_SIZE + KEYS_PER_WORD - 1) // KEYS_PER_WORD
    first_word = (
        token_bits + pattern.to(tl.int64) * (TILES.Q_BLOCK * WORDS) + first_column // KEYS_PER_WORD
    )
    word = tl.arange(0, LOADED)
    if TRANSPOSED:
        words = tl.load(first_word + rows[None, :] * WORDS + word[:, None])[:, None, :]
    else:
        words = tl.load(first_word + rows[:, None] * WORDS + word[None, :])[:, :, None]
    if K_TILE_SIZE < KEYS_PER_WORD:
        words = words >> first_column - first_column // KEYS_PER_WORD * KEYS_PER_WORD
    return words


@triton.jit
def _keep_attended(values, otherwise, words, TRANSPOSED: tl.constexpr):
    """`values` (rows, columns), or TRANSPOSED, where their bit in `words` of `_load_words` is 1;
    else `otherwise`.

    A word is spread over its keys by shape alone, so that a thread holds the words of its own
    scores, and which word a score belongs to is known when the kernel is compiled.
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
            # A thread's keys differ from lane to lane in bits 1 and 2 alone: shifted by those, a
            # word's bits are the same numbers in every lane, and several go to predicates in one
            # instruction (R2P).
            words = words >> (keys & 6)
            bits = 1 << (keys & 25)
        return tl.inline_asm_elementwise(
            SELECT_BY_BIT, "=f,r,r,f,f", [words.reshape(values.shape), bits.reshape(values.shape), values, otherwise],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def walks_of(lists, batch, head, block, num_blocks):
    """(full tiles, the walk of them, partial tiles, the walk of them) of a row or column of the
    mask's tiles.
    """
    number = list_of_tile(batch, head, block, num_blocks, lists.MASK_BATCHES, lists.MASK_HEADS)
    full = Walk(lists.full + number * lists.FULL_WIDTH, lists.patterns, lists.token_bits)
    partial = Walk(
        lists.partial + number * lists.WIDTH,
        lists.patterns + number * lists.WIDTH,
        lists.token_bits,
    )
    return tl.load(lists.num_full + number), full, tl.load(lists.num_partial + number), partial


@triton.jit
def row_of_step(start, walk, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The first row of a step's tile: `start` itself, or along a list what is `start` rows behind
    its beginning.
    """
    if BLOCK:
        return tl.load(walk.indices + start // BLOCK) * BLOCK + row_in_block(start, BLOCK, TILE)
    else:
        return start


@triton.jit
def row_in_block(start, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """`start`, a multiple of TILE, modulo BLOCK, so written that the compiler knows it for 0 where
    TILE is BLOCK.
    """
    return start // TILE % (BLOCK // TILE) * TILE


@triton.jit
def hide_keys(
    values,
    otherwise,
    query_rows,
    key_rows,
    start,
    walk,
    problem,
    TILES: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """`values` (queries, keys) of a cut tile, `otherwise` where the query does not attend the key."""
    if TILES.K_BLOCK:
        pattern = tl.load(walk.patterns + start // TILES.K_BLOCK)
        first_column = row_in_block(start, TILES.K_BLOCK, TILES.K_TILE_SIZE)
        words = _load_words(
            walk.token_bits, pattern, query_rows % TILES.Q_BLOCK, first_column, TILES, False
        )
        return _keep_attended(values, otherwise, words, False)
    else:
        return tl.where(
            visible_pairs(query_rows, key_rows, problem.N_KEYS, IS_CAUSAL), values, otherwise
        )


@triton.jit
def hide_queries(P_T, query_rows, first_key, start, walk, TILES: tl.constexpr):
    """Probabilities (keys, queries) of a cut tile, 0 where the query does not attend the key."""
    if TILES.Q_BLOCK:
        pattern = tl.load(walk.patterns + start // TILES.Q_BLOCK)
        block_rows = row_in_block(start, TILES.Q_BLOCK, TILES.Q_TILE_SIZE) + tl.arange(
            0, TILES.Q_TILE_SIZE
        )
        first_column = row_in_block(first_key, TILES.K_BLOCK, TILES.K_TILE_SIZE)
        words = _load_words(walk.token_bits, pattern, block_rows, first_column, TILES, True)
        return _keep_attended(P_T, 0.0, words, True)
    else:
        key_rows = first_key + tl.arange(0, TILES.K_TILE_SIZE)
        return tl.where(query_rows[None, :] >= key_rows[:, None], P_T, 0.0)


def fit_to_blocks(config: KernelConfig, block_size: tuple[int, int]) -> KernelConfig:
    """`config` with tiles that divide the mask's; both are powers of two. Fewer rows take fewer
    warps.

    The rows that warps share are those of the tile that a program holds: of queries, of keys for
    dkdv.
    """
    query_tile, key_tile = (
        min(tile, block) for tile, block in zip((config.query_tile, config.key_tile), block_size)
    )
    held, fitted = (
        (config.key_tile, key_tile) if config.kernel == "dkdv" else (config.query_tile, query_tile)
    )
    num_warps = max(min(4, config.num_warps), config.num_warps * fitted // held)
    return replace(config, query_tile=query_tile, key_tile=key_tile, num_warps=num_warps)


def walked(lists: TileLists, side: str) -> Lists:
    """What programs walk: `kv` in the forward and dQ, `q` in dK and dV."""
    partial_counts, partial, patterns, full_counts, full = (
        lists[:5] if side == "kv" else lists[5:10]
    )
    sizes = (*partial_counts.shape[:2], partial.shape[3], full.shape[3])
    return Lists(partial_counts, partial, patterns, full_counts, full, lists.token_bits, *sizes)
