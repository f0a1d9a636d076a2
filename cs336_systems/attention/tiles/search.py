"""Configurations around those of the tables: the grid that tuning searches, and the way down when
one does not fit.

Both are pure. What they propose is judged elsewhere: by the compiler (`compiler/offline.py`), by
the oracle, and
by a stopwatch (`cs336-systems tune flash`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from cs336_systems.attention.tiles.choice import SHARED_MEMORY_LIMIT_BYTES, TABLES
from cs336_systems.attention.tiles.kernel_config import KernelConfig, head_tile, tma_reads_rows
from cs336_systems.config import BYTES_PER_ELEMENT

WARPS = (4, 8)
# Depths of the pipeline; 1 where not even 2 fits. In float32 its tiles cost more than the loads
# they hide.
DEPTHS = {"16-bit": (2, 3, 4), "ieee": (1, 2, 3), "tf32x3": (1, 2, 3)}
TMA_TARGETS = ("sm90", "sm100")  # of the architectures that have the engine, in 16 bit
THREADS_PER_WARP = 32
# float32 values a thread may hold of its 255 registers, counting tiles alone
MAX_ACCUMULATORS = 224
COMFORTABLE_TILE = 64  # a full operand of the tensor cores; below it they idle
# What tiles a kernel holds on chip (all along) and streams (in turn), in rows. float32 dots on the
# FMA units unroll their operands into registers, so their tiles stay small.
HELD_TILES = {"16-bit": (64, 128, 256), "ieee": (16, 32, 64), "tf32x3": (32, 64, 128)}
STREAMED_TILES = {"16-bit": (32, 64, 128), "ieee": (16, 32, 64), "tf32x3": (16, 32, 64)}


def smallest_tile(target: str, bytes_per_element: int) -> int:
    """Rows that a tile must have at least: on sm_90 triton 3.6 can miscompile 16-bit dots of fewer
    than 64.
    """
    return 64 if target == "sm90" and bytes_per_element == 2 else 16


def tuning_grid(kernel: str, *, arch: str, head_dim: int, dtype: str) -> list[KernelConfig]:
    """Configurations of `kernel` worth compiling for `arch`, the table's own among them; no two
    alike.

    In 16 bit on GPUs with a TMA engine each comes with it and without, where the engine can read
    contiguous inputs. Left out is what the estimate of shared memory or a count of accumulators
    already rules out.
    """
    bytes_per_element = BYTES_PER_ELEMENT[dtype]
    shipped = TABLES[arch][kernel, bytes_per_element, head_tile(head_dim)].configs
    readable = tma_reads_rows(head_dim, bytes_per_element)
    grid = dict.fromkeys(config for config in shipped if readable or not config.tma)

    def fits(config: KernelConfig) -> bool:
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
    """float32 values of the outputs and of one tile of scores (S, and dP in the backward) that a
    thread holds.
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
    """The next configuration to try where `config` finds too little shared memory; None below the
    smallest.

    First a pipeline of two stages, then tiles of 64 rows, then no pipeline, then smaller tiles
    still.
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
