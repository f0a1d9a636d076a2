"""Masks of neighbourhoods on a 2-D grid of tokens, row by row or along Hilbert's curve.

mask = neighbourhood_mask(64, radius=7, order="hilbert", block_size=128)
order = hilbert_order(64)
out = flash_attention(q[:, :, order], k[:, :, order], v[:, :, order], block_mask=mask)
out = out[:, :, inverse_order(order)]
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from cs336_systems.attention.checks import check_count
from cs336_systems.attention.masks.block_mask import DEFAULT_BLOCK, BlockMask, Device
from cs336_systems.attention.masks.tiles import BlockSize, Plane, check_block_size
from cs336_systems.grids import hilbert_order, row_major_order

GridOrder = Literal["rows", "hilbert"]


def neighbourhood_mask(
    n: int,
    *,
    radius: int,
    order: GridOrder = "rows",
    block_size: int | BlockSize = DEFAULT_BLOCK,
    device: Device = "cpu",
) -> BlockMask:
    """Return the mask of an n × n grid in which a token attends those at most `radius` away.

    The distance is at most `radius` rows and at most `radius` columns. Queries and keys stand in
    `order`: row after row, or along Hilbert's curve, for which n must be a power of two. No
    (tokens, tokens) tensor is made: only tiles whose bounding boxes on the grid are close enough
    are classified token by token.
    """
    check_count("n", n, 1, 2**15)
    check_count("radius", radius)
    if order not in get_args(GridOrder):
        raise ValueError(f"order must be one of {', '.join(get_args(GridOrder))}, got {order!r}")
    tokens = (hilbert_order if order == "hilbert" else row_major_order)(n).to(torch.device(device))
    plane = Plane((1, 1), (n * n, n * n), check_block_size(block_size))
    return BlockMask._make("neighbourhood", plane, [tokens], n, radius)
