"""Block masks: `BlockMask` with its constructors, and the patterns that the command line names.

mask = BlockMask.sliding_window(4096, window=512)
mask = parse_mask("random:0.1+causal", seqlen=4096)
"""

from cs336_systems.attention.masks.block_mask import MAX_LIST_DENSITY, BlockMask
from cs336_systems.attention.masks.grid import neighbourhood_mask
from cs336_systems.attention.masks.parse import parse_mask
from cs336_systems.attention.masks.tiles import TileLists

__all__ = ["MAX_LIST_DENSITY", "BlockMask", "TileLists", "neighbourhood_mask", "parse_mask"]
