"""Masks by tiles: `BlockMask`, its constructors, and the rule that says when skipping tiles pays."""

from cs336_systems.attention.masks.adaptive import MAX_LIST_DENSITY, use_lists
from cs336_systems.attention.masks.block_mask import BlockMask
from cs336_systems.attention.masks.parse import parse_mask

__all__ = ["MAX_LIST_DENSITY", "BlockMask", "parse_mask", "use_lists"]
