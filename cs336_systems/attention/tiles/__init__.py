"""The tiles that each kernel uses on each GPU, and when a forward splits the keys.

    config = select_config("forward", capability=(9, 0), head_dim=64, ...)    # a KernelConfig

All functions are pure, and testable without a GPU.
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
