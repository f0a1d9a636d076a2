"""How good the rows of the tile tables are, and what choosing tiles brings.

On twelve shapes every kernel is timed under the table's tiles and under all others that are
plausible for it. Each kernel is timed alone, so that a good one cannot hide a bad one in the same
backward. Then the whole backward on long sequences runs beside one fixed configuration, tiles of 64
× 64 and four warps, as a launcher without tables has.

On a GPU a first cell compiles the grid on all cores, into Triton's cache on disk; compiling one
configuration after the other would take longer than all the rest.
"""

import time
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch

from cs336_systems.attention.choose import HOPPER_CAPABILITY
from cs336_systems.attention.tiles import KernelConfig, target_of, tuning_grid
from cs336_systems.attention.tiles.search import TMA_TARGETS
from cs336_systems.book.frames import dicts, digits, pick
from cs336_systems.compiler.offline import arch_of_capability
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments import Cell, Heat, Listing, Pivot, Row, Sample, Unsupported, problem
from cs336_systems.subjects.attention_passes import (
    BACKWARD,
    BY_SHAPE,
    AttentionExperiment,
    sized_shape,
)
from cs336_systems.subjects.tuning import (
    ROWS,
    TABLE,
    chosen_tiles,
    compile_ahead,
    measure_tiles,
)

TileSizes = tuple[int, int, int, int, bool] | tuple[int, int, int, int, bool, int]
# (batch, heads, length, head_dim, causal), and the number of key heads if they are grouped: short
# and long, full and causal, few programs and many.
GRID_SHAPES: dict[str, tuple[TileSizes, ...]] = {
    "tiny": ((1, 2, 64, 64, True, 1),),
    "smoke": ((1, 2, 64, 64, True, 1),),
    "handout": (
        (4, 16, 1024, 64, True),
        (8, 16, 2048, 64, True),
        (2, 32, 4096, 64, False),
        (1, 32, 8192, 64, True, 8),
        (1, 16, 16384, 64, True),
        (1, 16, 16384, 64, False),
        (1, 8, 512, 128, True),
        (8, 16, 2048, 128, True),
        (1, 32, 8192, 128, True, 8),
        (1, 16, 16384, 128, True),
        (1, 16, 16384, 128, False),
        (1, 16, 32768, 128, True),
    ),
}
FIXED_SHAPES: dict[str, tuple[TileSizes, ...]] = {
    "tiny": ((1, 1, 64, 64, True),),
    "smoke": ((1, 1, 64, 64, True),),
    "handout": tuple(
        (1, 16, seqlen, head_dim, True) for head_dim in (64, 128) for seqlen in (8192, 16384, 32768)
    ),
}
OF_TABLE = {"implementation": lambda name: name.startswith(f"{TABLE}_")}
# Tiles read through pointers, and by Hopper's copy engine.
FIXED = {"fixed": "64x64_w4_s2", "fixed_tma": "64x64_w4_s2_tma"}
BACKWARD_KERNELS = ("dkdv", "dq")
# A grid of two is enough, since the interpreter's times say nothing of speed.
INTERPRETED_TILES = ("64x64_w8_s1", "32x32_w8_s1")
COMPILE_AHEAD = "compile_ahead"
COMPILE = Row(mode="forward_backward", quantity="compile_time", unit="s")

# From `tune_flash`'s records of an H200: tiles that hold 256 rows take at least 1.7 times the time
# of the best, and no fastest kernel has a fourth stage.
MAX_HELD_ROWS = 128
MAX_DEPTH = 3
WARP_GROUP_ROWS = 64  # rows of the held tile that a group of four warps multiplies at once


def table_claim(rows: pd.DataFrame) -> str:
    ratios = rows["over_best"]
    best = (ratios < 1.005).sum()
    return (
        f"Of {len(ratios)} choices in the table {best} are the grid's best; "
        f"the worst takes {digits(ratios.max())}×"
    )


@problem(title="The tile tables against the best of a grid, and against one fixed tile", order=7)
class TileChoice(AttentionExperiment):
    implementations = (TABLE, *FIXED)

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return a cell that compiles, then each shape's kernels by tiles, then whole backwards."""
        cells: list[Cell] = []
        capability = _capability(run)
        for shape in (sized_shape(run, *sizes) for sizes in GRID_SHAPES[run.scale]):
            if run.device == "cuda" and not cells:
                cells.append(Cell(case=shape, implementation=COMPILE_AHEAD, rows=(COMPILE,)))
            for kernel, row in ROWS.items():
                chosen = chosen_tiles(kernel, shape, capability)
                names = [
                    config.name
                    for config in plausible_grid(kernel, shape, chosen.target)
                    if config != chosen
                ]
                cells += [
                    Cell(case=shape, implementation=name, rows=(row,))
                    for name in (f"{TABLE}_{kernel}", *names)
                ]
        for shape in (sized_shape(run, *sizes) for sizes in FIXED_SHAPES[run.scale]):
            cells += [
                Cell(case=shape, implementation=name, rows=(BACKWARD,)) for name in (TABLE, *FIXED)
            ]
        return cells

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Yield the seconds of compiling the grid, or a kernel's times under a cell's tiles."""
        if cell.implementation != COMPILE_AHEAD:
            yield measure_tiles(cell, run, cell_configs(cell.implementation, cell.case, run))
            return
        arch = arch_of_capability(_capability(run))
        if arch is None:
            raise Unsupported("no kernels are compiled ahead for this GPU")
        started = time.monotonic()
        grid = [
            cell
            for cell in self.cells(run)
            if cell.implementation not in (*self.implementations, COMPILE_AHEAD)
        ]
        compile_ahead(
            [(cell.case, *cell_configs(cell.implementation, cell.case, run)) for cell in grid], arch
        )
        yield Sample(row=COMPILE, samples=[time.monotonic() - started])

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add `alone`, the kernel that is timed alone, and its `config` and `tiles`."""
        kernels = {(of.mode, of.quantity): kernel for kernel, of in ROWS.items()}
        alone = kernels.get((row["mode"], row["quantity"]), "")
        config = next((name for name in row["kernel"].split() if f"_{alone}_" in name), "")
        return super().columns(row) | {
            "alone": alone,
            "config": config,
            "tiles": config.partition(f"_{alone}_")[2],
        }

    def compared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Add the best of a case and kernel: `best` tiles, `best_ms`, and `over_best`.

        `timed` is how many configurations were timed, `over_best` the time over the best one's.
        """
        keys = ["case", "alone"]
        alone = frame[(frame["alone"] != "") & (frame["status"] == "ok") & ~frame["interpreted"]]
        groups = alone.sort_values("median", kind="stable").groupby(keys)
        best = groups.agg(
            best=("tiles", "first"), best_ms=("median", "first"), timed=("median", "size")
        ).reset_index()
        joined = (
            frame.merge(best, how="left", on=keys)
            .fillna({"best": "", "timed": 0})
            .astype({"timed": int})
        )
        return joined.assign(over_best=joined["median"] / joined["best_ms"])

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return `worst`, the table's row farthest from the best, and how many are `judged`."""
        judged = pick(frame, OF_TABLE).dropna(subset="over_best")
        return (
            {"worst": dicts(judged.sort_values("over_best"))[-1], "judged": len(judged)}
            if len(judged)
            else {}
        )

    tables = {
        "grid": Listing(
            title="the table's tiles beside the best of the grid",
            columns={
                **BY_SHAPE,
                "kernel": "alone",
                "table": "tiles",
                "ms": "median",
                "best": "best",
                "best (ms)": "best_ms",
                "table / best": "over_best",
                "timed": "timed",
            },
            where=OF_TABLE,
        ),
        "fixed": Pivot(
            title="backward under chosen and fixed tiles",
            down=BY_SHAPE,
            where={"implementation": (TABLE, *FIXED), "quantity": "time"},
            ratios=tuple((TABLE, name) for name in FIXED),
        ),
    }
    figures = {
        "over_best": Heat(
            claim=table_claim,
            subtitle="time over the grid's best, batch × heads × tokens × head dim",
            title="Time under the table's tiles over the best of the grid",
            x="alone",
            x_title="kernel",
            y="shape",
            value="over_best",
            where=OF_TABLE | {"over_best": pd.notna},
        )
    }


def plausible_grid(kernel: str, shape: AttentionShape, target: str) -> list[KernelConfig]:
    """Return the grid of `tune flash` without configurations that cannot be the fastest.

    These have idle warps, tiles that are too large, or too many stages.
    """
    if target == "portable":
        return [KernelConfig.from_name(f"portable_{kernel}_{tiles}") for tiles in INTERPRETED_TILES]
    found = []
    for config in tuning_grid(kernel, arch=target, head_dim=shape.head_dim, dtype=shape.dtype):
        held = config.key_tile if kernel == "dkdv" else config.query_tile
        has_rows = held >= WARP_GROUP_ROWS * config.num_warps // 4
        if has_rows and held <= MAX_HELD_ROWS and config.num_stages <= MAX_DEPTH:
            found.append(config)
    return found


def cell_configs(name: str, shape: AttentionShape, run: RunConfig) -> list[KernelConfig]:
    """Return the configurations that `name` stands for: one kernel's, or both of a backward.

    ValueError for a name that stands for none, `Unsupported` if this GPU cannot run it.
    """
    capability = _capability(run)
    if name == TABLE:
        return [chosen_tiles(kernel, shape, capability) for kernel in BACKWARD_KERNELS]
    if name.startswith(f"{TABLE}_"):
        return [chosen_tiles(name.removeprefix(f"{TABLE}_"), shape, capability)]
    if name not in FIXED:
        return [KernelConfig.from_name(name)]
    target = target_of(capability)
    if name == "fixed_tma" and target not in TMA_TARGETS:
        raise Unsupported(
            f"GPUs of {' and '.join(TMA_TARGETS)} read tiles by TMA, and this is {target}"
        )
    return [
        KernelConfig.from_name(f"{target}_{kernel}_{FIXED[name]}") for kernel in BACKWARD_KERNELS
    ]


def _capability(run: RunConfig) -> tuple[int, int] | None:
    """Return the compute capability of the measured GPU, None on a CPU.

    A plan for a GPU that is made on a machine without one is for Hopper.
    """
    if run.device != "cuda":
        return None
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else HOPPER_CAPABILITY
