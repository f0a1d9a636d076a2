"""Orders of the tokens of a 2-D grid, and how many tiles of a block-sparse mask they leave.

A neighbourhood mask lets each token of an n × n grid attend those at most `radius` away in both
directions. Kernels skip tiles of the (queries, keys) matrix in which nothing is attended, so the
order of tokens decides how many are left. Hilbert's curve makes a tile's tokens a square instead
of a piece of a row. That helps where the neighbourhood is wide, and costs where it is narrow: rows
put a narrow one into few diagonals.

    order = hilbert_order(64)                         # order[i] is the token, row-major, at place i
    tokens = tokens[:, order]
    neighbourhood_block_density(64, radius=3, block_size=128, order=order)
"""

import torch
from jaxtyping import Int
from torch import Tensor


def row_major_order(n: int) -> Int[Tensor, " n*n"]:
    """Return the tokens of an n × n grid row after row, the order of a flattened image."""
    return torch.arange(n * n)


def hilbert_order(n: int) -> Int[Tensor, " n*n"]:
    """Return the tokens of an n × n grid along Hilbert's curve, as row-major indices.

    The curve begins at (0, 0). Consecutive tokens are always neighbours, and every aligned run of
    4ᵏ of them is a square. Built from the last refinement to the first: a curve through quadrants
    of side s turns and mirrors its first and last quadrant. Raises ValueError unless n is a power
    of two.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1 or n & (n - 1):
        raise ValueError(f"n must be a power of two, got {n!r}")
    place = torch.arange(n * n)  # along the curve
    row, column = torch.zeros_like(place), torch.zeros_like(place)
    side = 1
    while side < n:
        # Each place's quadrant at this refinement: (down, right) is (0, 0), (1, 0), (1, 1), (0, 1).
        right = 1 & (place // 2)
        down = 1 & (place ^ right)

        # Mirror the last quadrant, then turn the first and the last.
        mirrored = (down == 0) & (right == 1)
        row, column = (
            torch.where(mirrored, side - 1 - row, row),
            torch.where(mirrored, side - 1 - column, column),
        )
        row, column = torch.where(down == 0, column, row), torch.where(down == 0, row, column)
        row, column = row + side * down, column + side * right
        place = place // 4
        side *= 2
    return row * n + column


def inverse_order(order: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """Return the place of each token in `order`: the permutation that undoes `tokens[:, order]`.

    Raises ValueError if `order` is not a permutation.
    """
    places = torch.arange(len(order), device=order.device)
    if not torch.equal(order.sort().values, places):
        raise ValueError(f"order must be a permutation of its {len(order)} places, got another")
    return torch.empty_like(order).scatter_(0, order, places)


def neighbourhood_block_density(
    n: int, *, radius: int, block_size: int, order: Int[Tensor, " n*n"]
) -> float:
    """Return the fraction of (block_size, block_size) tiles of the mask that hold an attended pair.

    The tokens of the n × n grid are in `order`. No (tokens, tokens) tensor is made. The last tile
    of a row may be shorter. Raises ValueError on a bad argument.
    """
    if len(order) != n * n:
        raise ValueError(f"order must have n * n = {n * n} tokens, got {len(order)}")
    if radius < 0:
        raise ValueError(f"radius must not be negative, got {radius}")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    block = (inverse_order(order) // block_size).view(n, n)  # of the token at each grid point
    num_blocks = -(-n * n // block_size)
    attended = torch.zeros(num_blocks * num_blocks, dtype=torch.bool)

    # The mask is symmetric: half of the offsets are enough, and what they mark is mirrored.
    for down in range(min(radius, n - 1) + 1):
        for right in range(-min(radius, n - 1), min(radius, n - 1) + 1):
            ours = block[: n - down, max(0, -right) : n - max(0, right)]
            theirs = block[down:, max(0, right) : n - max(0, -right)]
            attended.index_fill_(0, (ours * num_blocks + theirs).flatten(), True)
    tiles = attended.view(num_blocks, num_blocks)
    return (tiles | tiles.T).float().mean().item()
