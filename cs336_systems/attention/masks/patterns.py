"""The masks themselves, each a function (plane, data, numbers...) -> TileMap that `make_lists`
finds by its name.

None of them makes a (queries, keys) tensor but where the caller hands one in: bands (causal,
sliding window) are classified by arithmetic on tile corners, others by looking at the tokens of
those tiles alone that corners cannot decide, a bounded number at a time. `data` are tensors on the
mask's device, at least one; numbers are integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cs336_systems.attention.masks.tiles import (
    Plane,
    TileMap,
    by_rows,
    by_tiles,
    combine,
    num_blocks,
)


def dense(plane: Plane, data: Sequence[Tensor]) -> TileMap:
    """data: the (batch, heads, queries, keys) mask itself."""
    return by_rows(plane, lambda queries: data[0][:, :, queries], data[0].device)


def blocks(plane: Plane, data: Sequence[Tensor], is_causal: int) -> TileMap:
    """data: True for whole tiles, (batch, heads, query_blocks, key_blocks); those that an end cuts
    are partial.
    """
    live, device = data[0], data[0].device
    same = plane.raggedness(device)
    whole = by_tiles(
        plane, live, live, lambda batch, head, query, key: (query >= 0) & (key >= 0), same
    )
    if not is_causal:
        return whole
    causal = band(plane._replace(leading=(1, 1)), data, 0, sum(plane.seq_lengths), 0)
    return combine(whole, causal, plane.block_size, either=False)


def band(plane: Plane, data: Sequence[Tensor], low: int, high: int, shift: int) -> TileMap:
    """Query i attends key j where low <= i + shift - j <= high; causal is low = 0 with high past
    every distance.

    A tile is a rectangle, so it attends every distance i + shift - j between those of its two
    extreme corners.
    """
    device = data[0].device
    first_q, last_q, first_k, last_k = plane.corners(device)
    nearest, farthest = first_q + shift - last_k, last_q + shift - first_k
    # The tokens of a tile depend on the distance of its corner from the diagonal and on how the
    # ends cut it.
    same = (first_q - first_k + plane.seq_lengths[1]) * 4 + plane.raggedness(device)
    return by_tiles(
        plane,
        (farthest >= low) & (nearest <= high),
        (nearest >= low) & (farthest <= high),
        lambda batch, head, query, key: (
            (query + shift - key >= low) & (query + shift - key <= high)
        ),
        same,
    )


def prefix(plane: Plane, data: Sequence[Tensor]) -> TileMap:
    """data: lengths (batch, heads, queries); query i attends the first lengths[i] keys."""
    lengths = data[0]
    shortest, longest = _ranges(lengths, plane.block_size[0])
    _, _, first_k, last_k = plane.corners(lengths.device)
    return by_tiles(
        plane,
        longest[..., None] > first_k,
        shortest[..., None] > last_k,
        lambda batch, head, query, key: key < lengths[batch, head, query],
    )


def documents(plane: Plane, data: Sequence[Tensor], is_causal: int, *lengths: int) -> TileMap:
    """data: ids (batch, 1, tokens), unless `lengths` are given. A token attends the tokens with its
    own id.

    Tiles whose ranges of ids do not meet are dead unseen.
    """
    ids = data[0]
    if not ids.numel():
        numbers = torch.arange(len(lengths), device=ids.device)
        ids = numbers.repeat_interleave(
            torch.tensor(lengths, dtype=torch.int64, device=ids.device)
        )[None, None]

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        equal = ids[batch, 0, query] == ids[batch, 0, key]
        return equal & (query >= key) if is_causal else equal

    return by_tiles(plane, *_by_ids(plane, ids, is_causal), attends)


def dilated(
    plane: Plane,
    data: Sequence[Tensor],
    segment_length: int,
    rate: int,
    by_head: int,
    is_causal: int,
) -> TileMap:
    """Tokens of one segment and one phase (position in the segment modulo the rate) attend each
    other.

    `by_head`: head h keeps the tokens of phase h % rate only; the other rows have no key (LongNet's
    form).
    """
    segments = torch.arange(plane.seq_lengths[0], device=data[0].device) // segment_length
    live, _ = _by_ids(plane, segments[None, None], is_causal)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        phase = query % segment_length % rate
        together = (query // segment_length == key // segment_length) & (
            phase == key % segment_length % rate
        )
        if by_head:
            together = together & (phase == head % rate)
        return together & (query >= key) if is_causal else together

    return by_tiles(plane, live, torch.zeros_like(live), attends)


def neighbourhood(plane: Plane, data: Sequence[Tensor], n: int, radius: int) -> TileMap:
    """data: the tokens of an n × n grid in their order; those at most `radius` rows and columns
    apart attend.
    """
    rows, columns = data[0] // n, data[0] % n
    live = full = torch.ones((), dtype=torch.bool, device=data[0].device)
    for places in (rows, columns):
        (first_q, last_q), (first_k, last_k) = (
            _ranges(places[None, None], block) for block in plane.block_size
        )
        above, below = (
            first_k[..., None, :] - last_q[..., :, None],
            first_q[..., :, None] - last_k[..., None, :],
        )
        live = live & (above <= radius) & (below <= radius)
        reach = torch.maximum(
            last_q[..., :, None] - first_k[..., None, :],
            last_k[..., None, :] - first_q[..., :, None],
        )
        full = full & (reach <= radius)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        down, right = rows[query] - rows[key], columns[query] - columns[key]
        return (down.abs() <= radius) & (right.abs() <= radius)

    return by_tiles(plane, live, full, attends)


def random_blocks(plane: Plane, data: Sequence[Tensor], num_kept: int, seed: int) -> TileMap:
    """In each row of tiles `num_kept` random ones, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(plane.shape, dtype=torch.float32, device="cpu", generator=generator)
    return blocks(plane, [_best(scores, num_kept).to(data[0].device)], False)


def random_tokens(plane: Plane, data: Sequence[Tensor], seed: int) -> TileMap:
    """data: one number, the probability of each pair, drawn on the CPU."""
    generator, density = torch.Generator().manual_seed(seed), float(data[0])

    def rows_of(queries: slice) -> Tensor:
        shape = (*plane.leading, queries.stop - queries.start, plane.seq_lengths[1])
        drawn = torch.rand(shape, dtype=torch.float32, device="cpu", generator=generator)
        return (drawn < density).to(data[0].device)

    return by_rows(plane, rows_of, data[0].device)


def top_blocks(plane: Plane, data: Sequence[Tensor], num_kept: int, is_causal: int) -> TileMap:
    """data: scores of tiles; in each row the `num_kept` best, under the causal mask of those with a
    visible pair.
    """
    scores = data[0]
    if is_causal:
        _, last_q, first_k, _ = plane.corners(scores.device)
        scores = scores.masked_fill(last_q < first_k, -torch.inf)
    return blocks(plane, [_best(scores, num_kept)], is_causal)


def top_keys(plane: Plane, data: Sequence[Tensor], num_keys: int, is_causal: int) -> TileMap:
    """data: bias (batch, heads, queries or 1, keys); each query attends the `num_keys` best of the
    keys that it sees.

    Of equal ones the earlier. Keys with a bias of -inf are never attended; NaN ranks highest, as
    torch sorts it.
    """
    bias, seqlen_k = data[0], plane.seq_lengths[1]
    kept = min(num_keys, seqlen_k)
    key = torch.arange(seqlen_k, device=bias.device)

    def ranked(
        rows: Float[Tensor, "batch heads rows keys"],
    ) -> Int[Tensor, "batch heads rows keys"]:
        """seqlen_k for the best key down to 1; 0 for those that may not be attended."""
        order = rows.argsort(dim=-1, descending=True, stable=True)
        ranks = torch.empty_like(order).scatter_(-1, order, (seqlen_k - key).expand_as(order))
        return ranks.masked_fill(rows == -torch.inf, 0)

    shared = ranked(bias) if bias.shape[2] == 1 else None

    def rows_of(queries: slice) -> Bool[Tensor, "batch heads rows keys"]:
        ranks = ranked(bias[:, :, queries]) if shared is None else shared
        query = torch.arange(queries.start, queries.stop, device=bias.device)
        visible = key <= query[:, None] if is_causal else (key >= 0).expand(len(query), -1)
        ranks = torch.where(visible, ranks, 0)
        if not kept:
            return torch.zeros_like(ranks, dtype=torch.bool)
        worst_kept = ranks.topk(kept, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        return (ranks >= worst_kept) & (ranks > 0)

    return by_rows(plane, rows_of, bias.device)


def combined(plane: Plane, data: Sequence[Tensor], either: int) -> TileMap:
    """data: tiles and token bits of one mask, and of another; pairs that both attend, or `either`
    of them.
    """
    return combine(TileMap(*data[:2]), TileMap(*data[2:]), plane.block_size, either=bool(either))


def _by_ids(
    plane: Plane, ids: Int[Tensor, "batch 1 tokens"], is_causal: int
) -> tuple[Tensor, Tensor]:
    """Tiles whose ranges of ids meet, and those of one id alone; causal: those with a visible pair,
    and with all.
    """
    (first_q, last_q), (first_k, last_k) = (_ranges(ids, block) for block in plane.block_size)
    live = (first_q[..., :, None] <= last_k[..., None, :]) & (
        first_k[..., None, :] <= last_q[..., :, None]
    )
    full = (first_q == last_q)[..., :, None] & (first_k == last_k)[..., None, :]
    if is_causal:
        q_start, q_end, k_start, k_end = plane.corners(ids.device)
        live, full = live & (q_end >= k_start), full & (q_start >= k_end)
    return live, full


def _best(
    scores: Float[Tensor, "batch heads query_blocks key_blocks"], num_kept: int
) -> Bool[Tensor, "batch heads query_blocks key_blocks"]:
    """The `num_kept` tiles of highest score in each row of tiles, of equal ones the earlier; -inf
    is never kept.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :num_kept]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & (
        scores != -torch.inf
    )


def _ranges(numbers: Int[Tensor, "batch heads tokens"], block: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest number of each tile, (batch, heads, blocks); the last tile is filled
    with its own last.
    """
    tokens = numbers.shape[2]
    missing = num_blocks(tokens, block) * block - tokens
    if missing:
        numbers = torch.cat([numbers, numbers[..., -1:].expand(-1, -1, missing)], dim=2)
    by_block = numbers.unflatten(2, (num_blocks(tokens, block), block))
    return by_block.amin(-1), by_block.amax(-1)
