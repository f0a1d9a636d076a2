"""When skipping tiles pays: the adaptive rule between walking a mask's lists and visiting every tile."""

from __future__ import annotations

# A list costs an indirect load for each tile, so a mask that skips little is faster in a loop over all tiles. Where the
# two meet is read off the records of `block_sparse`; not measured yet, this is where the search starts.
MAX_LIST_DENSITY = 0.85


def use_lists(block_density: float) -> bool:
    """Whether kernels should walk the lists of a mask of this block density, rather than every tile: the adaptive rule.

    A pure function of the share of live tiles; below MAX_LIST_DENSITY skipping pays. ValueError outside [0, 1].
    """
    if not 0 <= block_density <= 1:
        raise ValueError(f"block_density must be between 0 and 1, got {block_density}")
    return block_density < MAX_LIST_DENSITY
