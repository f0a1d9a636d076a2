"""Which tiles each kernel uses on which GPU, and when a forward splits the keys: pure, and testable without one."""

from cs336_systems.attention.tiles.config import (
    MAX_HEAD_DIM,
    AttentionConfig,
    KernelConfig,
    head_tile,
    parse_configs,
)
from cs336_systems.attention.tiles.grid import smaller_config, smallest_tile, tuning_grid
from cs336_systems.attention.tiles.parts import part_size, seen_keys
from cs336_systems.attention.tiles.tables import select_config, target_of

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
