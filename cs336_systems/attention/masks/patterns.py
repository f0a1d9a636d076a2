"""The masks themselves, each as a function from its parameters to a `TileMap`; `BlockMask` is how they are used.

None of them makes a (queries, keys) tensor but where the caller hands one in: bands (causal, sliding window) are
classified by arithmetic on tile corners, the others by looking at the tokens of those tiles alone that corners cannot
decide, a bounded number at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cs336_systems.attention.masks.checks import Device
from cs336_systems.attention.masks.tiles import (
    DEAD,
    FULL,
    MAX_TOKENS,
    BlockSize,
    TileMap,
    block_starts,
    classify,
    from_tokens,
    inside,
    join_patterns,
    num_blocks,
    unpack_tokens,
)

SeqLengths = tuple[int, int]


def dense(mask: Bool[Tensor, "batch heads queries keys"], block_size: BlockSize) -> TileMap:
    """Every tile of `mask` looked at, a row of tiles at a time."""
    batch, heads, seqlen_q, seqlen_k = mask.shape
    return by_rows(lambda queries: mask[:, :, queries], (batch, heads), (seqlen_q, seqlen_k), block_size, mask.device)


def blocks(
    live: Bool[Tensor, "batch heads query_blocks key_blocks"], seq_lengths: SeqLengths, block_size: BlockSize
) -> TileMap:
    """Whole tiles; those that an end of the sequences cuts are partial, by at most three patterns."""
    tiles = torch.where(live, FULL, DEAD).to(torch.int32)
    ragged = live & ~inside(seq_lengths, block_size, live.device)
    return from_tokens(
        tiles, ragged, lambda batch, head, query, key: (query >= 0) & (key >= 0), seq_lengths, block_size,
        same=_raggedness(seq_lengths, block_size, live.device).expand_as(ragged)[ragged],
    )  # fmt: skip


def band(seq_lengths: SeqLengths, block_size: BlockSize, low: int, high: int, shift: int, device: Device) -> TileMap:
    """Query i attends key j where low <= i + shift - j <= high; causal is low = 0 with high past every distance.

    A tile is a rectangle, so it attends every distance i + shift - j between those of its two extreme corners.
    """
    first_q, first_k = (block_starts(seqlen, block, device) for seqlen, block in zip(seq_lengths, block_size))
    last_q = (first_q + block_size[0]).clamp(max=seq_lengths[0]) - 1
    last_k = (first_k + block_size[1]).clamp(max=seq_lengths[1]) - 1
    nearest = (first_q + shift)[:, None] - last_k
    farthest = (last_q + shift)[:, None] - first_k
    dead = (farthest < low) | (nearest > high)
    full = (nearest >= low) & (farthest <= high) & inside(seq_lengths, block_size, device)
    tiles = torch.where(dead, DEAD, FULL).to(torch.int32)[None, None]
    partial = ~(dead | full)[None, None]
    # The tokens of a tile depend on the distance of its corner from the diagonal and on how the ends cut it.
    distance = first_q[:, None] - first_k + seq_lengths[1]
    same = distance * 4 + _raggedness(seq_lengths, block_size, device)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + shift - key
        return (distance >= low) & (distance <= high)

    return from_tokens(tiles, partial, attends, seq_lengths, block_size, same=same[partial[0, 0]])


def prefix(lengths: Int[Tensor, "batch heads queries"], seqlen_k: int, block_size: BlockSize) -> TileMap:
    """Query i attends the first lengths[i] keys."""
    batch, heads, seqlen_q = lengths.shape
    shortest, longest = _ranges(lengths.flatten(0, 1), block_size[0])  # (batch * heads, query_blocks)
    first_k = block_starts(seqlen_k, block_size[1], lengths.device)
    seq_lengths = (seqlen_q, seqlen_k)
    full = (shortest[..., None] >= first_k + block_size[1]) & inside(seq_lengths, block_size, lengths.device)
    partial = ((longest[..., None] > first_k) & ~full).unflatten(0, (batch, heads))
    tiles = torch.where(full, FULL, DEAD).to(torch.int32).unflatten(0, (batch, heads))
    return from_tokens(
        tiles, partial, lambda batch, head, query, key: key < lengths[batch, head, query], seq_lengths, block_size
    )


def documents(ids: Int[Tensor, "batch tokens"], is_causal: bool, block_size: BlockSize) -> TileMap:
    """A token attends the tokens with its own id; tiles whose ranges of ids do not meet are dead unseen."""
    batch, seqlen = ids.shape
    first_q, last_q, first_k, last_k = (
        bound for block in block_size for bound in _ranges(ids, block)
    )  # each (batch, blocks)
    meet = (first_q[:, :, None] <= last_k[:, None]) & (first_k[:, None] <= last_q[:, :, None])
    alone = (first_q == last_q)[:, :, None] & (first_k == last_k)[:, None]
    whole = inside((seqlen, seqlen), block_size, ids.device)
    if is_causal:
        q_start, k_start = (block_starts(seqlen, block, ids.device) for block in block_size)
        meet &= q_start[:, None] + block_size[0] > k_start
        whole &= q_start[:, None] >= k_start + block_size[1] - 1
    full = meet & alone & whole
    tiles = torch.where(full, FULL, DEAD).to(torch.int32)[:, None]

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        equal = ids[batch, query] == ids[batch, key]
        return equal & (query >= key) if is_causal else equal

    return from_tokens(tiles, (meet & ~full)[:, None], attends, (seqlen, seqlen), block_size)


def dilated(
    seqlen: int, segment_length: int, dilation_rate: int, heads: int | None, is_causal: bool, block_size: BlockSize,
    device: Device,
) -> TileMap:  # fmt: skip
    """Tokens of one segment and one phase (position in the segment modulo the rate) attend each other.

    With `heads`, head h keeps the tokens of phase h % rate only; the other rows have no key (LongNet's form).
    """
    first_q, first_k = (block_starts(seqlen, block, device) for block in block_size)
    last_q = (first_q + block_size[0]).clamp(max=seqlen) - 1
    last_k = (first_k + block_size[1]).clamp(max=seqlen) - 1
    segment_q, segment_k = (first_q // segment_length, last_q // segment_length), (
        first_k // segment_length, last_k // segment_length,
    )  # fmt: skip
    meet = (segment_q[0][:, None] <= segment_k[1]) & (segment_k[0] <= segment_q[1][:, None])
    if is_causal:
        meet &= last_q[:, None] >= first_k
    candidates = meet[None, None].expand(1, heads or 1, -1, -1)
    tiles = torch.full(candidates.shape, DEAD, dtype=torch.int32, device=device)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        phase = query % segment_length % dilation_rate
        together = (query // segment_length == key // segment_length) & (phase == key % segment_length % dilation_rate)
        if heads is not None:
            together = together & (phase == head % dilation_rate)
        return together & (query >= key) if is_causal else together

    return from_tokens(tiles, candidates, attends, (seqlen, seqlen), block_size)


def top_keys(
    bias: Float[Tensor, "batch heads queries_or_1 keys"], num_keys: int, is_causal: bool, seqlen_q: int,
    block_size: BlockSize,
) -> TileMap:  # fmt: skip
    """Each query attends the `num_keys` keys of highest bias among those it may see; of equal ones the earlier.

    Keys with a bias of -inf are never attended; NaN ranks highest, as torch sorts it. Fewer visible keys than
    `num_keys` are all attended.
    """
    batch, heads, bias_rows, seqlen_k = bias.shape
    kept = min(num_keys, seqlen_k)
    key = torch.arange(seqlen_k, device=bias.device)

    def ranked(rows: Tensor) -> Tensor:
        """seqlen_k for the best key down to 1; 0 for those that may not be attended."""
        order = rows.argsort(dim=-1, descending=True, stable=True)
        ranks = torch.empty_like(order).scatter_(-1, order, (seqlen_k - key).expand_as(order))
        return ranks.masked_fill(rows == -torch.inf, 0)

    shared = ranked(bias) if bias_rows == 1 else None

    def rows_of(queries: slice) -> Tensor:
        ranks = ranked(bias[:, :, queries]) if shared is None else shared
        query = torch.arange(queries.start, queries.stop, device=bias.device)
        visible = key <= query[:, None] if is_causal else (key >= 0).expand(len(query), -1)
        ranks = torch.where(visible, ranks, 0)
        if not kept:
            return torch.zeros_like(ranks, dtype=torch.bool)
        worst_kept = ranks.topk(kept, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        return (ranks >= worst_kept) & (ranks > 0)

    return by_rows(rows_of, (batch, heads), (seqlen_q, seqlen_k), block_size, bias.device)


def best_blocks(
    scores: Float[Tensor, "batch heads query_blocks key_blocks"], num_kept: int
) -> Bool[Tensor, "batch heads query_blocks key_blocks"]:
    """The `num_kept` tiles of highest score in each row of tiles, of equal ones the earlier; -inf is never kept."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :num_kept]
    live = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
    return live & (scores != -torch.inf)


def intersect(first: TileMap, second: TileMap, block_size: BlockSize) -> TileMap:
    """Pairs that both attend; batch and heads broadcast."""
    left, right = torch.broadcast_tensors(first.tiles, second.tiles)
    # Where one is full the other decides, and its patterns are kept; rows of `second` follow those of `first`.
    offset = len(first.token_bits)
    moved = torch.where(right >= 0, right + offset, right)
    tiles = torch.where(left == FULL, moved, torch.where(right == FULL, left, DEAD))
    both = (left >= 0) & (right >= 0)
    pairs, pattern_of = torch.stack([left[both], right[both]]).long().unique(dim=1, return_inverse=True)
    kinds, stored = [], [first.token_bits, second.token_bits]
    used = offset + len(second.token_bits)
    step = max(1, MAX_TOKENS // (block_size[0] * block_size[1]))
    for left_rows, right_rows in zip(*(row.split(step) for row in pairs)):
        bits = first.token_bits[left_rows] & second.token_bits[right_rows]
        kind, bits = classify(unpack_tokens(bits, block_size[1]), used)
        used += len(bits)
        kinds.append(kind)
        stored.append(bits)
    if kinds:
        tiles = tiles.masked_scatter(both, torch.cat(kinds)[pattern_of])
    return without_unused(TileMap(tiles.contiguous(), torch.cat(stored)))


def without_unused(tile_map: TileMap) -> TileMap:
    """The same map, its patterns those alone that a tile refers to."""
    tiles, token_bits = tile_map
    partial = tiles >= 0
    used, renumbered = tiles[partial].long().unique(return_inverse=True)
    return TileMap(tiles.masked_scatter(partial, renumbered.to(torch.int32)), token_bits[used])


def by_rows(
    rows_of: Callable[[slice], Tensor], leading: tuple[int, int], seq_lengths: SeqLengths, block_size: BlockSize,
    device: Device,
) -> TileMap:  # fmt: skip
    """Classify the (batch, heads, rows, keys) masks that `rows_of(slice of queries)` returns, row of tiles by row."""
    (batch, heads), (seqlen_q, seqlen_k), (q_block, k_block) = leading, seq_lengths, block_size
    shape = (batch, heads, num_blocks(seqlen_q, q_block), num_blocks(seqlen_k, k_block))
    tiles = torch.full(shape, DEAD, dtype=torch.int32, device=device)
    stored: list[Tensor] = []
    used = 0
    for row, start in enumerate(range(0, seqlen_q, q_block)):
        tokens = rows_of(slice(start, min(start + q_block, seqlen_q)))
        ragged = (0, shape[3] * k_block - seqlen_k, 0, q_block - tokens.shape[2])
        tokens = torch.nn.functional.pad(tokens, ragged).unflatten(-1, (shape[3], k_block)).transpose(2, 3)
        kind, bits = classify(tokens.flatten(0, 2), used)
        used += len(bits)
        tiles[:, :, row] = kind.view(batch, heads, shape[3])
        stored.append(bits)
    return TileMap(tiles, join_patterns(stored, block_size, device))


def _raggedness(seq_lengths: SeqLengths, block_size: BlockSize, device: Device) -> Int[Tensor, "q k"]:
    """0 to 3: whether the end of the queries (2) and of the keys (1) cuts a tile."""
    cut_q, cut_k = (
        block_starts(seqlen, block, device) + block > seqlen for seqlen, block in zip(seq_lengths, block_size)
    )
    return cut_q[:, None].long() * 2 + cut_k.long()


def _ranges(ids: Int[Tensor, "batch tokens"], block: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest id of each tile, (batch, blocks) each; the last tile is filled with its own last id."""
    batch, seqlen = ids.shape
    missing = num_blocks(seqlen, block) * block - seqlen
    if missing:
        ids = torch.cat([ids, ids[:, -1:].expand(batch, missing)], dim=1)
    by_block = ids.view(batch, num_blocks(seqlen, block), block)
    return by_block.amin(-1), by_block.amax(-1)
