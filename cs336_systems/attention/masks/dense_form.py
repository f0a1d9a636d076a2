"""Which masks are no masks: exactly full or exactly causal ones, which the dense kernels attend without lists.

Found once, where a mask is made; `flash_attention` and `doctor --mask` both read `BlockMask.dense_form`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

from cs336_systems.attention.masks.patterns import band
from cs336_systems.attention.masks.tiles import FULL, Plane, TileMap, combine, count_tokens

if TYPE_CHECKING:
    from cs336_systems.attention.masks.block_mask import BlockMask

DenseForm = Literal["full", "causal"]


def find_dense_form(mask: BlockMask) -> DenseForm | None:
    """ "full" or "causal" (top left) where every batch entry and head of `mask` is exactly that, else None.

    The widths of the lists, which the host knows, rule out nearly all others without a look at the device.
    """
    queries, keys = mask.seq_lengths
    if not math.prod(mask.shape):
        return None
    whole_rows, whole_columns = queries // mask.block_size[0], keys // mask.block_size[1]
    last_row = (whole_rows - 1) * mask.block_size[0]  # the first query of the last whole row of tiles
    widths = {  # of the lists of full tiles
        "full": whole_columns if whole_rows else 0,
        "causal": min(whole_columns, (last_row + 1) // mask.block_size[1]) if whole_rows else 0,
    }
    width = mask.full_kv_indices.shape[3]
    if width not in [max(1, value) for value in widths.values()]:
        return None
    visible = min(queries, keys)
    areas = {"full": queries * keys, "causal": visible * (visible + 1) // 2 + (queries - visible) * keys}
    num_masks, attended = math.prod(mask.shape[:2]), mask.num_attended
    if attended == num_masks * areas["full"]:
        return "full"
    if attended != num_masks * areas["causal"]:
        return None
    tiles = mask._tile_map()
    plane = Plane((1, 1), mask.seq_lengths, mask.block_size)
    causal = band(plane, [torch.empty(0, device=mask.device)], 0, queries + keys, 0)
    common = combine(tiles, causal, mask.block_size, either=False)
    return "causal" if _count(common, mask.block_size) == attended else None


def _count(tile_map: TileMap, block_size: tuple[int, int]) -> int:
    """Attended pairs."""
    tiles, token_bits = tile_map
    partial = count_tokens(token_bits)[tiles[tiles >= 0].long()].sum() if len(token_bits) else 0
    return int((tiles == FULL).sum()) * math.prod(block_size) + int(partial)
