"""When skipping tiles pays: the adaptive rule between a mask's lists and dense attention."""

from __future__ import annotations

# A list costs an indirect load for each tile, so a mask that skips little is slower than dense attention. On an H200
# (`block_sparse`: S=16384, d=128, forward and backward) lists of nine tenths of the tiles still take less time than
# dense attention, by about half of what they skip; all tiles take slightly more. The two meet between.
MAX_LIST_DENSITY = 0.95


def use_lists(block_density: float) -> bool:
    """Whether skipping the dead tiles of a mask of this block density is worth its lists: the adaptive rule.

    A pure function of the share of live tiles, for a caller who may choose: a mask that only saves work (top-k blocks,
    a window) can be dropped where this is False. `flash_attention` attends what its block_mask says at any density.
    ValueError outside [0, 1].
    """
    if not isinstance(block_density, int | float) or not 0 <= block_density <= 1:
        raise ValueError(f"block_density must be between 0 and 1, got {block_density!r}")
    return block_density < MAX_LIST_DENSITY
