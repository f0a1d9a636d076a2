"""Tile configurations beside the tables': the grid that tuning searches, and smaller fallbacks.

    configs = tuning_grid("forward", arch="sm90", head_dim=64, dtype="bfloat16")
    config = smaller_config(configs[0], bytes_per_element=2)    # None if nothing smaller is left

Both functions are pure. Others judge what they propose: the compiler (`compiler/offline.py`), the
oracle, and measured times (`cs336-systems tune flash`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from cs336_systems.attention.tiles.choice import SHARED_MEMORY_LIMIT_BYTES, TABLES
from cs336_systems.attention.tiles.kernel_config import KernelConfig, head_tile, tma_reads_rows
from cs336_systems.config import BYTES_PER_ELEMENT

WARPS = (4, 8)
# Depths of the pipeline; 1 where not even 2 fits. In float32 the pipeline's tiles may cost more
# than the loads that they hide, so 1 is tried too.
DEPTHS = {"16-bit": (2, 3, 4), "ieee": (1, 2, 3), "tf32x3": (1, 2, 3)}
TMA_TARGETS = ("sm90", "sm100")  # architectures with a TMA engine, used in 16 bit
THREADS_PER_WARP = 32
# float32 values of tiles that a thread may hold in its 255 registers.
MAX_ACCUMULATORS = 224
COMFORTABLE_TILE = 64  # rows of a full operand of the tensor cores; with fewer they idle
# Rows of the tiles that a kernel holds on chip throughout, and of those that it streams in turn.
# float32 dots on the FMA units unroll their operands into registers, so their tiles stay small.
HELD_TILES = {"16-bit": (64, 128, 256), "ieee": (16, 32, 64), "tf32x3": (32, 64, 128)}
STREAMED_TILES = {"16-bit": (32, 64, 128), "ieee": (16, 32, 64), "tf32x3": (16, 32, 64)}


def smallest_tile(target: str, bytes_per_element: int) -> int:
    """Return the fewest rows that a tile may have: 64 in 16 bit on sm_90, else 16.

    On sm_90 triton 3.6 can miscompile 16-bit dots of fewer rows.
    """
    return 64 if target == "sm90" and bytes_per_element == 2 else 16


def tuning_grid(kernel: str, *, arch: str, head_dim: int, dtype: str) -> list[KernelConfig]:
    """Return the distinct configurations of `kernel` worth compiling for `arch`, the table's first.

    In 16 bit on GPUs with a TMA engine each comes with and without it, if the engine can read
    contiguous inputs. Configurations that need too much shared memory, by estimate, or too many
    accumulators are left out.
    """
    bytes_per_element = BYTES_PER_ELEMENT[dtype]
    shipped = TABLES[arch][kernel, bytes_per_element, head_tile(head_dim)].configs
    readable = tma_reads_rows(head_dim, bytes_per_element)
    grid = dict.fromkeys(config for config in shipped if readable or not config.tma)

    def fits(config: KernelConfig) -> bool:
        """Return whether the estimate of shared memory is within the architecture's limit."""
        return (
            config.shared_memory_bytes(head_dim, bytes_per_element)
            <= SHARED_MEMORY_LIMIT_BYTES[arch]
        )

    engines = (
        (False, True) if readable and arch in TMA_TARGETS and bytes_per_element == 2 else (False,)
    )
    for kind in ("16-bit",) if bytes_per_element == 2 else ("ieee", "tf32x3"):
        for held in HELD_TILES[kind]:
            for streamed in STREAMED_TILES[kind]:
                if min(held, streamed) < smallest_tile(arch, bytes_per_element):
                    continue

                query_tile, key_tile = (streamed, held) if kernel == "dkdv" else (held, streamed)
                for num_warps, tma in product(WARPS, engines):
                    shallow = KernelConfig(
                        target=arch,
                        kernel=kernel,
                        query_tile=query_tile,
                        key_tile=key_tile,
                        num_warps=num_warps,
                        num_stages=1,
                        tma=tma,
                        precision="ieee" if kind == "16-bit" else kind,
                    )
                    # all depths that fit, or no pipeline if none does
                    if (
                        fits(shallow)
                        and accumulators_per_thread(shallow, head_dim) <= MAX_ACCUMULATORS
                    ):
                        deep = (replace(shallow, num_stages=depth) for depth in DEPTHS[kind])
                        grid.update(
                            dict.fromkeys([config for config in deep if fits(config)] or [shallow])
                        )
    return list(grid)


def accumulators_per_thread(config: KernelConfig, head_dim: int) -> int:
    """Return how many float32 values of outputs and scores a thread holds.

    Outputs are O, dQ, or dK and dV; scores are one tile of S, and of dP in the backward.
    """
    scores = config.query_tile * config.key_tile
    queries, keys = (rows * head_tile(head_dim) for rows in (config.query_tile, config.key_tile))
    values = {
        "forward": queries + scores,
        "dq": queries + 2 * scores,
        "dkdv": 2 * keys + 2 * scores,
    }
    return values[config.kernel] // (config.num_warps * THREADS_PER_WARP)


def smaller_config(config: KernelConfig, bytes_per_element: int) -> KernelConfig | None:
    """Return the next smaller configuration, for a GPU with too little shared memory for `config`.

    None if nothing smaller is left. The order is: a shallower pipeline down to two stages, halved
    tiles down to 64 rows, no pipeline, smaller tiles still.
    """
    smallest = smallest_tile(config.target, bytes_per_element)
    larger = "query_tile" if config.query_tile > config.key_tile else "key_tile"
    rows = getattr(config, larger)
    halved = {larger: rows // 2}
    if config.num_stages > 2:
        return replace(config, num_stages=config.num_stages - 1)
    if rows > max(COMFORTABLE_TILE, smallest):
        return replace(config, **halved)
    if config.num_stages > 1:
        return replace(config, num_stages=1)
    return replace(config, **halved) if rows > smallest else None
