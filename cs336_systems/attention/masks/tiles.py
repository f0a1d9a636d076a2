"""What every constructor of `BlockMask` makes first: a map of its tiles, and the token bits of the partial ones.

A `TileMap` holds one int32 a tile: DEAD (no pair attended), FULL (every pair attended) or the row of `token_bits` that
says which pairs are. Several tiles may share a row: the diagonal tiles of a causal mask are all the same triangle. A
tile that the end of the queries or keys cuts is never FULL, so that only partial tiles need bounds.

Tokens are packed 32 keys to an int32 word: bit c % 32 of word c // 32 in a row is the tile's key c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

DEAD, FULL = -1, -2
BITS = 32  # keys in a word of token bits
MIN_BLOCK = 16  # the smallest side of a tile that tensor cores multiply
MAX_BLOCK = 4096  # its token pairs are MAX_TOKENS; kernels take tiles of 128 at most out of it
MAX_TOKENS = 2**24  # token pairs that a constructor looks at together, so that its memory stays small

BlockSize = tuple[int, int]  # query rows and key columns of a tile


class TileMap(NamedTuple):
    """Shape of a mask by tiles: see the module's docstring."""

    tiles: Int[Tensor, "batch heads query_blocks key_blocks"]  # int32: DEAD, FULL or a row of token_bits
    token_bits: Int[Tensor, "patterns query_block words"]  # int32; bits of keys or queries past the end are 0


def words_per_row(key_block: int) -> int:
    """Words of 32 bits that hold a tile's row of `key_block` keys."""
    return -(-key_block // BITS)


def pack_tokens(tokens: Bool[Tensor, "patterns query_block key_block"]) -> Int[Tensor, "patterns query_block words"]:
    """Bits of `tokens`, 32 keys to an int32 word, the lowest bit first."""
    patterns, rows, columns = tokens.shape
    words = words_per_row(columns)
    if columns != words * BITS:
        tokens = torch.nn.functional.pad(tokens, (0, words * BITS - columns))
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=tokens.device)
    octets = tokens.view(patterns, rows, words * 4, 8).to(torch.uint8).mul_(weights).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int32)  # four octets a word, the first one lowest: little-endian, as GPUs are


def unpack_tokens(
    token_bits: Int[Tensor, "patterns query_block words"], key_block: int
) -> Bool[Tensor, "patterns query_block key_block"]:
    """The inverse of `pack_tokens`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=token_bits.device)
    octets = token_bits.contiguous().view(torch.uint8)
    return (octets[..., None] >> shifts & 1).bool().flatten(-2)[..., :key_block]


def count_tokens(token_bits: Int[Tensor, "patterns query_block words"]) -> Int[Tensor, " patterns"]:
    """Attended pairs of each pattern, int64."""
    octets = token_bits.contiguous().view(torch.uint8).flatten(1)
    counts = torch.tensor([value.bit_count() for value in range(256)], dtype=torch.uint8, device=octets.device)
    step = max(1, MAX_TOKENS // max(1, octets.shape[1]))
    sums = [counts[part.int()].sum(-1, dtype=torch.int64) for part in octets.split(step)]
    return torch.cat(sums) if sums else octets.new_zeros(0, dtype=torch.int64)


def num_blocks(seqlen: int, block: int) -> int:
    """Tiles along a side of `seqlen` tokens; the last may be ragged."""
    return -(-seqlen // block)


def block_starts(seqlen: int, block: int, device: torch.device | str) -> Int[Tensor, " blocks"]:
    return torch.arange(0, seqlen, block, device=device)


def inside(seq_lengths: tuple[int, int], block_size: BlockSize, device: torch.device | str) -> Bool[Tensor, "q k"]:
    """True for tiles that no end of the sequences cuts."""
    queries, keys = (
        block_starts(seqlen, block, device) + block <= seqlen for seqlen, block in zip(seq_lengths, block_size)
    )
    return queries[:, None] & keys[None, :]


def from_tokens(
    tiles: Int[Tensor, "batch heads query_blocks key_blocks"],
    candidates: Bool[Tensor, "batch heads query_blocks key_blocks"],
    attends: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    seq_lengths: tuple[int, int],
    block_size: BlockSize,
    same: Tensor | None = None,
) -> TileMap:
    """`tiles` with its `candidates` classified by looking at their tokens.

    `attends(batch, head, query, key)` gets index tensors that broadcast to (tiles, query_block, key_block) and says
    which pairs are attended; tokens past the end never are. `same` is an int64 for each candidate, in order: tiles with
    equal numbers have equal tokens, which are then looked at and stored once.
    """
    where = candidates.nonzero(as_tuple=True)
    if same is None:
        chosen, pattern_of = where, None
    else:
        _, pattern_of = same.unique(return_inverse=True)
        number = int(pattern_of.max()) + 1 if len(pattern_of) else 0
        first = torch.full((number,), len(pattern_of), dtype=torch.int64, device=tiles.device)
        order = torch.arange(len(pattern_of), device=tiles.device)
        first.scatter_reduce_(0, pattern_of, order, "amin")
        chosen = tuple(index[first] for index in where)
    kinds, stored = [], []
    step = max(1, MAX_TOKENS // (block_size[0] * block_size[1]))
    rows, columns = (torch.arange(block, device=tiles.device) for block in block_size)
    used = 0
    for start in range(0, len(chosen[0]), step):
        batch, head, query_block, key_block = (index[start : start + step, None, None] for index in chosen)
        query, key = query_block * block_size[0] + rows[:, None], key_block * block_size[1] + columns
        exists = (query < seq_lengths[0]) & (key < seq_lengths[1])
        last = (query.clamp(max=seq_lengths[0] - 1), key.clamp(max=seq_lengths[1] - 1))
        tokens = attends(batch, head, *last).expand_as(exists) & exists
        kind, bits = classify(tokens, used)
        used += len(bits)
        kinds.append(kind)
        stored.append(bits)
    kind = torch.cat(kinds) if kinds else tiles.new_zeros(0)
    tiles = tiles.clone()
    tiles[where] = kind if pattern_of is None else kind[pattern_of]
    return TileMap(tiles, join_patterns(stored, block_size, tiles.device))


def classify(
    tokens: Bool[Tensor, "tiles query_block key_block"], used: int
) -> tuple[Int[Tensor, " tiles"], Int[Tensor, "patterns query_block words"]]:
    """DEAD, FULL or `used`, `used` + 1, ... for each tile, and the packed bits of the latter."""
    flat = tokens.flatten(1)
    kind = torch.where(flat.all(-1), FULL, DEAD).to(torch.int32)
    partial = flat.any(-1) & (kind == DEAD)
    kind[partial] = used + torch.arange(int(partial.sum()), dtype=torch.int32, device=tokens.device)
    return kind, pack_tokens(tokens[partial])


def join_patterns(stored: list[Tensor], block_size: BlockSize, device: torch.device | str) -> Tensor:
    """One store of all patterns."""
    nothing = torch.empty((0, block_size[0], words_per_row(block_size[1])), dtype=torch.int32, device=device)
    return torch.cat([nothing, *stored])
