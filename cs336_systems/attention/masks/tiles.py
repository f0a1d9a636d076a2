"""Tile maps: the kind of each tile of a mask and the token bits of the partial ones.

    tile_map = by_tiles(plane, live, full, attends)     # every constructor of `BlockMask` makes one

A `TileMap` holds one int32 a tile: DEAD (no pair attended), FULL (every pair attended) or the row
of `token_bits` that says which pairs are. Several tiles may share a row: the diagonal tiles of a
causal mask are all the same triangle. A tile that the end of the queries or keys cuts is never
FULL, so that only partial tiles need bounds.

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
MAX_BLOCK = 4096  # such a tile has MAX_TOKENS pairs; kernels take tiles of at most 128 out of it
# (query, key) pairs that a constructor classifies at once, so that its memory stays small.
MAX_TOKENS = 2**24

BlockSize = tuple[int, int]  # query rows and key columns of a tile


class TileMap(NamedTuple):
    """The kind of each tile of a mask, and the attended pairs of partial tiles as bits."""

    # int32: DEAD, FULL or a row of token_bits.
    tiles: Int[Tensor, "batch heads query_blocks key_blocks"]
    # int32; bits of keys or queries past the end are 0.
    token_bits: Int[Tensor, "patterns query_block words"]


class TileLists(NamedTuple):
    """The tensors of a `BlockMask`, in the order in which operators take them.

    Each width is at least 1. b and h are batch and heads, or 1.
    """

    kv_num_blocks: Int[Tensor, "b h query_blocks"]  # partial tiles of a row of tiles
    kv_indices: Int[Tensor, "b h query_blocks width"]  # their key tiles
    kv_tokens: Int[Tensor, "b h query_blocks width"]  # their rows of token_bits
    full_kv_num_blocks: Int[Tensor, "b h query_blocks"]  # full tiles of a row of tiles
    full_kv_indices: Int[Tensor, "b h query_blocks full_width"]
    q_num_blocks: Int[Tensor, "b h key_blocks"]  # partial tiles of a column of tiles
    q_indices: Int[Tensor, "b h key_blocks width_t"]  # their query tiles
    q_tokens: Int[Tensor, "b h key_blocks width_t"]  # their rows of token_bits
    full_q_num_blocks: Int[Tensor, "b h key_blocks"]  # full tiles of a column of tiles
    full_q_indices: Int[Tensor, "b h key_blocks full_width_t"]
    token_bits: Int[Tensor, "patterns query_block words"]  # at least 1 pattern; 32 keys to a word

    @property
    def block_size(self) -> tuple[int, int]:
        """Query rows and key columns of a tile.

        Columns are rounded up to a multiple of 32, the keys of a word.
        """
        return self.token_bits.shape[1], self.token_bits.shape[2] * BITS

    def tile_map(self) -> TileMap:
        """Return the TileMap that the lists were made of."""
        columns, device = self.q_num_blocks.shape[2], self.kv_num_blocks.device
        # one column more than there are, for the slots behind a list's end
        tiles = self.kv_indices.new_full((*self.kv_num_blocks.shape, columns + 1), DEAD)
        full = torch.full_like(self.full_kv_indices, FULL)
        for counts, indices, values in (
            (self.kv_num_blocks, self.kv_indices, self.kv_tokens),
            (self.full_kv_num_blocks, self.full_kv_indices, full),
        ):
            slots = torch.arange(indices.shape[3], device=device)
            places = torch.where(slots < counts[..., None], indices, columns).long()
            tiles = tiles.scatter(3, places, values)
        return TileMap(tiles[..., :columns], self.token_bits)


class Plane(NamedTuple):
    """The size of a mask and its tiles: a (queries, keys) plane for each batch entry and head."""

    leading: tuple[int, int]  # batch and heads
    seq_lengths: tuple[int, int]  # queries and keys, in tokens
    block_size: BlockSize

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The mask's shape in tiles, (batch, heads, query_blocks, key_blocks)."""
        rows, columns = map(num_blocks, self.seq_lengths, self.block_size)
        return (*self.leading, rows, columns)

    def corners(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the first and last query and the first and last key of each tile.

        Those of queries are (query_blocks, 1), those of keys (key_blocks,).
        """
        first_q, first_k = (
            torch.arange(0, seqlen, block, device=device)
            for seqlen, block in zip(self.seq_lengths, self.block_size)
        )
        last_q = (first_q + self.block_size[0]).clamp(max=self.seq_lengths[0]) - 1
        last_k = (first_k + self.block_size[1]).clamp(max=self.seq_lengths[1]) - 1
        return first_q[:, None], last_q[:, None], first_k, last_k

    def raggedness(self, device: torch.device) -> Int[Tensor, "query_blocks key_blocks"]:
        """Return for each tile 2 if the end of the queries cuts it, plus 1 if that of the keys."""
        first_q, _, first_k, _ = self.corners(device)
        cut_q = first_q + self.block_size[0] > self.seq_lengths[0]
        cut_k = first_k + self.block_size[1] > self.seq_lengths[1]
        return cut_q.long() * 2 + cut_k.long()


def num_blocks(seqlen: int, block: int) -> int:
    """Return the number of tiles along a side of `seqlen` tokens; the last may be cut."""
    return -(-seqlen // block)


def check_block_size(block_size: int | BlockSize) -> BlockSize:
    """Return (query_block, key_block), from a pair or one int for both.

    ValueError unless they are powers of two from MIN_BLOCK to MAX_BLOCK.
    """
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    if (
        len(sizes) != 2
        or not whole
        or any(not MIN_BLOCK <= n <= MAX_BLOCK or n & (n - 1) for n in sizes)
    ):
        raise ValueError(
            f"block_size must be a power of two from {MIN_BLOCK} to {MAX_BLOCK}, or two of them, "
            f"got {block_size!r}"
        )
    return sizes[0], sizes[1]


def words_per_row(key_block: int) -> int:
    """Return how many words of 32 bits hold a tile's row of `key_block` keys."""
    return -(-key_block // BITS)


# Classifying tiles by their tokens


def by_tiles(
    plane: Plane,
    live: Bool[Tensor, "#batch #heads query_blocks key_blocks"],
    full: Bool[Tensor, "#batch #heads query_blocks key_blocks"],
    attends: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    same: Int[Tensor, "query_blocks key_blocks"] | None = None,
) -> TileMap:
    """Return the map of a mask whose tiles are known in part to be dead or full.

    Tiles that are not `live` become DEAD. Live ones that are `full` become FULL unless an end cuts
    them. The tokens of all others decide. `attends(batch, head, query, key)` returns which pairs
    are attended, for index tensors that broadcast to (tiles, query_block, key_block); tokens past
    the end never are. Tiles with equal numbers in `same` must have equal tokens, which are then
    classified and stored once.
    """
    device, (q_block, k_block), (seqlen_q, seqlen_k) = (
        live.device,
        plane.block_size,
        plane.seq_lengths,
    )
    ragged = plane.raggedness(device)
    full = (live & full & (ragged == 0)).expand(plane.shape)
    where = (live.expand(plane.shape) & ~full).nonzero(as_tuple=True)

    # the tiles to classify: all in doubt, or the first one of each number of `same`
    if same is None:
        chosen, pattern_of = where, None
    else:
        _, pattern_of = same[where[2:]].unique(return_inverse=True)
        order = torch.arange(len(pattern_of), device=device)
        first = torch.full(
            (int(pattern_of.max()) + 1 if len(order) else 0,), len(order), device=device
        )
        chosen = tuple(index[first.scatter_reduce(0, pattern_of, order, "amin")] for index in where)

    found = _Classifier(plane.block_size, device)
    rows, columns = (
        torch.arange(q_block, device=device)[:, None],
        torch.arange(k_block, device=device),
    )
    step = max(1, MAX_TOKENS // (q_block * k_block))  # tiles at once
    for start in range(0, len(chosen[0]), step):
        batch, head, query_block, key_block = (
            index[start : start + step, None, None] for index in chosen
        )
        query, key = query_block * q_block + rows, key_block * k_block + columns
        exists = (query < seqlen_q) & (key < seqlen_k)
        found.add(
            exists
            & attends(batch, head, query.clamp(max=seqlen_q - 1), key.clamp(max=seqlen_k - 1))
        )

    kinds, token_bits = found.result()
    tiles = torch.where(full, FULL, DEAD).to(torch.int32)
    tiles[where] = kinds if pattern_of is None else kinds[pattern_of]
    return TileMap(tiles, token_bits)


def by_rows(plane: Plane, rows_of: Callable[[slice], Tensor], device: torch.device) -> TileMap:
    """Return the map of a mask that is known by its tokens alone.

    `rows_of(slice of queries)` returns the bool (batch, heads, queries, keys) mask of these
    queries; it is called for one row of tiles after the other.
    """
    (q_block, k_block), (seqlen_q, seqlen_k), columns = (
        plane.block_size,
        plane.seq_lengths,
        plane.shape[3],
    )
    found = _Classifier(plane.block_size, device)
    for start in range(0, seqlen_q, q_block):
        tokens = rows_of(slice(start, min(start + q_block, seqlen_q)))

        # cut the row into tiles, with False past the ends
        missing = (0, columns * k_block - seqlen_k, 0, q_block - tokens.shape[2])
        tokens = (
            torch.nn.functional.pad(tokens, missing)
            .unflatten(-1, (columns, k_block))
            .transpose(2, 3)
        )
        found.add(tokens.flatten(0, 2))

    kinds, token_bits = found.result()
    by_row = kinds.view(plane.shape[2], *plane.leading, columns)
    return TileMap(by_row.permute(1, 2, 0, 3).contiguous(), token_bits)


class _Classifier:
    """Classifies tiles by their tokens, some at a time, and collects the bits of partial ones.

    The kind of a tile is DEAD, FULL or the next free row of the token bits.
    """

    def __init__(self, block_size: BlockSize, device: torch.device) -> None:
        self.kinds = [torch.empty(0, dtype=torch.int32, device=device)]
        words = words_per_row(block_size[1])
        self.stored = [torch.empty((0, block_size[0], words), dtype=torch.int32, device=device)]
        self.used = 0  # rows of token bits

    def add(self, tokens: Bool[Tensor, "tiles query_block key_block"]) -> None:
        """Classify these tiles, True where a pair is attended."""
        flat = tokens.flatten(1)
        kind = torch.where(flat.all(-1), FULL, DEAD).to(torch.int32)
        partial = flat.any(-1) & (kind == DEAD)
        bits = pack_tokens(tokens[partial])
        kind[partial] = torch.arange(
            self.used, self.used + len(bits), dtype=torch.int32, device=tokens.device
        )
        self.used += len(bits)
        self.kinds.append(kind)
        self.stored.append(bits)

    def result(self) -> tuple[Int[Tensor, " tiles"], Int[Tensor, "patterns query_block words"]]:
        """Return the kinds of all tiles, in the order in which they were added, and the bits."""
        return torch.cat(self.kinds), torch.cat(self.stored)


def combine(first: TileMap, second: TileMap, block_size: BlockSize, either: bool) -> TileMap:
    """Return the map of the pairs that both maps attend, or with `either` at least one of them.

    Batch and heads broadcast.
    """
    left, right = torch.broadcast_tensors(first.tiles, second.tiles)

    # Beside a neutral tile the other one decides, and keeps its pattern: rows of `second` follow
    # those of `first`.
    neutral, absorbing = (DEAD, FULL) if either else (FULL, DEAD)
    offset = len(first.token_bits)
    moved = torch.where(right >= 0, right + offset, right)
    tiles = torch.where(left == neutral, moved, torch.where(right == neutral, left, absorbing))

    # two partial tiles: combine each pair of patterns once
    both = (left >= 0) & (right >= 0)
    pairs, pattern_of = (
        torch.stack([left[both], right[both]]).long().unique(dim=1, return_inverse=True)
    )
    found = _Classifier(block_size, tiles.device)
    found.used = offset + len(second.token_bits)
    step = max(1, MAX_TOKENS // (block_size[0] * block_size[1]))
    for left_rows, right_rows in zip(*(row.split(step) for row in pairs)):
        bits = first.token_bits[left_rows], second.token_bits[right_rows]
        found.add(unpack_tokens(bits[0] | bits[1] if either else bits[0] & bits[1], block_size[1]))
    kinds, stored = found.result()
    tiles = tiles.masked_scatter(both, kinds[pattern_of]).contiguous()

    # keep only patterns that a tile refers to
    partial = tiles >= 0
    used, renumbered = tiles[partial].long().unique(return_inverse=True)
    token_bits = torch.cat([first.token_bits, second.token_bits, stored])
    return TileMap(tiles.masked_scatter(partial, renumbered.to(torch.int32)), token_bits[used])


def count_attended(tile_map: TileMap, block_size: BlockSize) -> int:
    """Return the number of attended pairs over all tiles of the map."""
    tiles, token_bits = tile_map
    partial = count_tokens(token_bits)[tiles[tiles >= 0].long()].sum() if len(token_bits) else 0
    return int((tiles == FULL).sum()) * block_size[0] * block_size[1] + int(partial)


# Attended pairs as bits


def pack_tokens(
    tokens: Bool[Tensor, "patterns query_block key_block"],
) -> Int[Tensor, "patterns query_block words"]:
    """Return the bits of `tokens`, 32 keys to an int32 word, the lowest bit first."""
    patterns, rows, columns = tokens.shape
    words = words_per_row(columns)
    if columns != words * BITS:
        tokens = torch.nn.functional.pad(tokens, (0, words * BITS - columns))
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=tokens.device)
    octets = (
        tokens.view(patterns, rows, words * 4, 8)
        .to(torch.uint8)
        .mul_(weights)
        .sum(-1, dtype=torch.uint8)
    )
    # four octets a word, the first one lowest: little-endian, as GPUs are
    return octets.view(torch.int32)


def unpack_tokens(
    token_bits: Int[Tensor, "patterns query_block words"], key_block: int
) -> Bool[Tensor, "patterns query_block key_block"]:
    """Return the bool tokens that `pack_tokens` has packed, `key_block` keys a row."""
    shifts = torch.arange(8, dtype=torch.uint8, device=token_bits.device)
    octets = token_bits.contiguous().view(torch.uint8)
    return (octets[..., None] >> shifts & 1).bool().flatten(-2)[..., :key_block]


def count_tokens(token_bits: Int[Tensor, "patterns query_block words"]) -> Int[Tensor, " patterns"]:
    """Return the number of attended pairs of each pattern, int64."""
    octets = token_bits.contiguous().view(torch.uint8).flatten(1)
    counts = torch.tensor(
        [value.bit_count() for value in range(256)], dtype=torch.uint8, device=octets.device
    )
    step = max(1, MAX_TOKENS // max(1, octets.shape[1]))
    return torch.cat([counts[part.int()].sum(-1, dtype=torch.int64) for part in octets.split(step)])
