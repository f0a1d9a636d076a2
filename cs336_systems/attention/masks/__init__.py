"""Masks by tiles: `BlockMask` with its constructors, and the patterns that the command line names."""

from cs336_systems.attention.masks.block_mask import MAX_LIST_DENSITY, BlockMask
from cs336_systems.attention.masks.grid import neighbourhood_mask
from cs336_systems.attention.masks.parse import parse_mask
from cs336_systems.attention.masks.tiles import TileLists

__all__ = ["MAX_LIST_DENSITY", "BlockMask", "TileLists", "neighbourhood_mask", "parse_mask"]
