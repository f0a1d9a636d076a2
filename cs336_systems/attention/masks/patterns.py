"""Mask patterns: functions (plane, data, numbers...) -> TileMap, which `make_lists` finds by name.

    plane = Plane((1, 1), (4096, 4096), (128, 128))
    causal = band(plane, [torch.empty(0)], 0, 8192, 0)

`data` are tensors on the mask's device, at least one; the numbers are integers. A pattern makes no
(queries, keys) tensor unless its caller hands one in. Tile corners decide most tiles by arithmetic:
for bands (causal, sliding window) all that the band's edges do not cut. The tokens of the other
tiles are classified, a bounded number at a time.
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
    """Return the map of a token mask; data: the mask, bool (batch, heads, queries, keys)."""
    return by_rows(plane, lambda queries: data[0][:, :, queries], data[0].device)


def blocks(plane: Plane, data: Sequence[Tensor], is_causal: int) -> TileMap:
    """Return the map of whole tiles; data: bool (batch, heads, query_blocks, key_blocks).

    Tiles that the end of the queries or keys cuts are partial. `is_causal` also drops the pairs
    above the diagonal, from the top left.
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
    """Return the map in which query i attends key j if low <= i + shift - j <= high.

    A causal mask has low = 0 and a high beyond every distance. A tile is a rectangle: the
    distances i + shift - j of its pairs are all those between the distances of two corners.
    """
    device = data[0].device
    first_q, last_q, first_k, last_k = plane.corners(device)
    nearest, farthest = first_q + shift - last_k, last_q + shift - first_k
    # A tile's tokens depend only on its corner's distance from the diagonal and on how the ends cut
    # it: tiles with equal numbers share a pattern.
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
    """Return the map in which query i attends the first lengths[i] keys.

    data: the lengths, (batch, heads, queries).
    """
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
    """Return the map in which a token attends the tokens with its own document id.

    data: ids (batch, 1, tokens), or an empty tensor if `lengths` of consecutive documents are
    given. Tiles whose ranges of ids do not meet are dead without a look at their tokens.
    `is_causal` also drops the pairs above the diagonal.
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
    """Return the map in which tokens of one segment and one phase attend each other.

    The phase is the position in the segment modulo the rate. `by_head`: head h keeps the tokens of
    phase h % rate only; its other rows have no key (LongNet's form).
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
    """Return the map in which tokens of an n × n grid attend those at most `radius` away.

    They may be `radius` rows and `radius` columns apart. data: the grid position row · n + column
    of each token, in the order of the sequence.
    """
    rows, columns = data[0] // n, data[0] % n
    live = full = torch.ones((), dtype=torch.bool, device=data[0].device)

    # `live`: the bounding boxes of two tiles' tokens are near enough; `full`: all their pairs are
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
    """Return the map of `num_kept` random tiles in each row of tiles, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(plane.shape, dtype=torch.float32, device="cpu", generator=generator)
    return blocks(plane, [_best(scores, num_kept).to(data[0].device)], False)


def random_tokens(plane: Plane, data: Sequence[Tensor], seed: int) -> TileMap:
    """Return the map in which each pair is attended with a probability, drawn on the CPU.

    data: one number, the probability.
    """
    generator, density = torch.Generator().manual_seed(seed), float(data[0])

    def rows_of(queries: slice) -> Tensor:
        shape = (*plane.leading, queries.stop - queries.start, plane.seq_lengths[1])
        drawn = torch.rand(shape, dtype=torch.float32, device="cpu", generator=generator)
        return (drawn < density).to(data[0].device)

    return by_rows(plane, rows_of, data[0].device)


def top_blocks(plane: Plane, data: Sequence[Tensor], num_kept: int, is_causal: int) -> TileMap:
    """Return the map of the `num_kept` tiles of highest score in each row of tiles.

    data: the scores, (batch, heads, query_blocks, key_blocks). With `is_causal` only tiles with a
    visible pair compete, and pairs above the diagonal are dropped.
    """
    scores = data[0]
    if is_causal:
        _, last_q, first_k, _ = plane.corners(scores.device)
        scores = scores.masked_fill(last_q < first_k, -torch.inf)
    return blocks(plane, [_best(scores, num_kept)], is_causal)


def top_keys(plane: Plane, data: Sequence[Tensor], num_keys: int, is_causal: int) -> TileMap:
    """Return the map in which each query attends the `num_keys` keys of highest bias that it sees.

    data: the bias, (batch, heads, queries or 1, keys). With `is_causal` a query sees keys up to its
    own position. Of equal biases the earlier key is kept. Keys with a bias of -inf are never
    attended; NaN ranks highest, as torch sorts it.
    """
    bias, seqlen_k = data[0], plane.seq_lengths[1]
    kept = min(num_keys, seqlen_k)
    key = torch.arange(seqlen_k, device=bias.device)

    def ranked(
        rows: Float[Tensor, "batch heads rows keys"],
    ) -> Int[Tensor, "batch heads rows keys"]:
        """Return each key's rank: seqlen_k for the best down to 1, and 0 for a bias of -inf."""
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
    """Return the map of the pairs that two masks attend: both of them, or `either` of them.

    data: tiles and token bits of the one, then of the other.
    """
    return combine(TileMap(*data[:2]), TileMap(*data[2:]), plane.block_size, either=bool(either))


def _by_ids(
    plane: Plane, ids: Int[Tensor, "batch 1 tokens"], is_causal: int
) -> tuple[Tensor, Tensor]:
    """Return two bool masks of tiles: those with a possible attended pair, those with all attended.

    The ranges of ids of a tile's queries and keys meet in the first; all its ids are equal in the
    second. With `is_causal` the first also need a visible pair, and the second only visible pairs.
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
    """Return a bool mask of the `num_kept` tiles of highest score in each row of tiles.

    Of equal scores the earlier tile is kept; -inf is never kept.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :num_kept]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & (
        scores != -torch.inf
    )


def _ranges(numbers: Int[Tensor, "batch heads tokens"], block: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest number of each block, both (batch, heads, blocks)."""
    tokens = numbers.shape[2]
    # fill the last block with its own last number
    missing = num_blocks(tokens, block) * block - tokens
    if missing:
        numbers = torch.cat([numbers, numbers[..., -1:].expand(-1, -1, missing)], dim=2)
    by_block = numbers.unflatten(2, (num_blocks(tokens, block), block))
    return by_block.amin(-1), by_block.amax(-1)
