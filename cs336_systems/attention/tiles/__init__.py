"""Which tiles each kernel uses on which GPU, and when a forward splits the keys: pure, and testable
without one.
"""

from cs336_systems.attention.tiles.choice import part_size, seen_keys, select_config, target_of
from cs336_systems.attention.tiles.kernel_config import (
    MAX_HEAD_DIM,
    AttentionConfig,
    KernelConfig,
    head_tile,
    parse_configs,
)
from cs336_systems.attention.tiles.search import smaller_config, smallest_tile, tuning_grid

__all__ = [
    "MAX_HEAD_DIM",
    "AttentionConfig",
    "KernelConfig",
    "head_tile",
    "parse_configs",
    "part_size",
    "seen_keys",
    "select_config",
    "smaller_config",
    "smallest_tile",
    "target_of",
    "tuning_grid",
]
