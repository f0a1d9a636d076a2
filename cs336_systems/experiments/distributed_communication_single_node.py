"""Collectives on one host: time and bandwidth by message size, backend and number of ranks.

A cell is a backend and a number of ranks, its rows every collective and size. A sample is the time
of the slowest rank. The first result of every case is checked. Bus bandwidth is what the busiest
link carried (analysis/bandwidth.py).
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from cs336_systems.analysis.bandwidth import bus_gb_per_s
from cs336_systems.bench.spec import Cell, Disagreement, Experiment, Row, Sample, problem
from cs336_systems.book.figures import Lines
from cs336_systems.book.frames import digits
from cs336_systems.book.tables import Pivot
from cs336_systems.config import COLLECTIVES, CollectiveCase, RunConfig
from cs336_systems.distributed.collectives import all_gather_flat, reduce_scatter_mean_flat
from cs336_systems.measure.timing import synchronize
from cs336_systems.subjects.ranks import run_cell, slowest, timed_calls

BYTES_PER_FLOAT = 4
MB = 10**6  # bytes, as in the handout's sizes
SIZES_MB = {"tiny": (1,), "smoke": (1, 10), "handout": (1, 10, 100, 1000)}
NUM_RANKS = {"tiny": (2,), "smoke": (2, 4), "handout": (2, 4, 6, 8)}
BUDGET_MS = {"tiny": 20.0, "smoke": 100.0, "handout": 300.0}  # of timed calls a case
MIN_SAMPLES = 5
WARMUP = {"nccl": 3, "gloo": 1}  # gloo has nothing to tune, and its gigabyte takes seconds


def bandwidth_claim(rows: pd.DataFrame) -> str:
    """Return the highest bus bandwidths of NCCL's and gloo's all-reduce, if both ran."""
    most = rows.groupby("backend")["bus_gb_s"].max()
    if not {"nccl", "gloo"} <= set(most.index):
        return ""
    return (
        f"NCCL's all-reduce reaches {digits(most['nccl'])} GB/s of bus bandwidth, "
        f"gloo's {digits(most['gloo'])}"
    )


@problem()
class Communication(Experiment):
    implementations = ("nccl", "gloo")

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return gloo on host memory for every number of ranks, NCCL for as many as GPUs."""
        cells = []
        for backend in ("nccl", "gloo") if run.device == "cuda" else ("gloo",):
            for ranks in NUM_RANKS[run.scale]:
                if backend == "nccl" and ranks > torch.cuda.device_count():
                    continue
                cases = [
                    CollectiveCase(
                        operation=operation,
                        num_bytes=megabytes * MB,
                        num_ranks=ranks,
                        backend=backend,
                    )
                    for operation in COLLECTIVES
                    for megabytes in SIZES_MB[run.scale]
                ]
                rows = tuple(Row("collective", "time", "ms", case=case) for case in cases)
                needed = (
                    3 * max(case.num_bytes for case in cases) * ranks if backend == "gloo" else 0
                )
                cells.append(
                    Cell(case=cases[0], implementation=backend, rows=rows, predicted_bytes=needed)
                )
        return cells

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        cases = [row.case for row in cell.rows]
        timed = partial(time_collectives, cases=cases, budget_ms=BUDGET_MS[run.scale])
        results = run_cell(timed, cell.case, run)
        for number, row in enumerate(cell.rows):
            yield Sample(row=row, samples=slowest([samples[number] for samples in results]))

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        ms, size, ranks = row["median"], row["num_bytes"], row["num_ranks"]
        return {
            "size": f"{size / MB:g} MB",
            "megabytes": size / MB,
            "line": f"{row['backend']}, {ranks} ranks",
            # A time of 0, from a clock that is too coarse, gives no rate.
            "bus_gb_s": bus_gb_per_s(row["operation"], ranks, size, ms) if ms > 0 else math.nan,
        }

    tables = {
        "all_reduce": Pivot(
            title="all-reduce, time",
            down={"backend": "backend", "ranks": "num_ranks"},
            across="size",
            where={"operation": "all_reduce"},
        )
    } | {
        name: Pivot(
            title=words,
            down={"collective": "operation", "backend": "backend", "ranks": "num_ranks"},
            across="size",
            value=value,
        )
        for name, value, words in (
            ("time", "median", "time"),
            ("bus", "bus_gb_s", "bus bandwidth (GB/s)"),
        )
    }
    figures = {
        "all_reduce": Lines(
            claim=bandwidth_claim,
            title="Bus bandwidth of all-reduce",
            subtitle="float32, NCCL on GPUs, gloo on CPUs",
            x="megabytes",
            x_title="size of the tensor (MB)",
            y="bus_gb_s",
            y_title="bus bandwidth (GB/s)",
            color="line",
            where={"operation": "all_reduce"},
        )
    }


def time_collectives(
    rank: int, num_ranks: int, cases: list[CollectiveCase], budget_ms: float
) -> list[list[float]]:
    """Return the milliseconds of each repetition of each case on this rank.

    Disagreement if the first result of a case is wrong.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found = []
    for case in cases:
        call, result, expected = _prepare(case, rank, device)
        call()
        synchronize(device)
        smallest, largest = (extreme.item() for extreme in result.aminmax())
        if not all(
            math.isclose(extreme, expected, rel_tol=1e-5) for extreme in (smallest, largest)
        ):
            raise Disagreement(
                f"{case.operation} must give {expected:g} everywhere, "
                f"got values from {smallest:g} to {largest:g}"
            )
        for _ in range(WARMUP[case.backend] - 1):
            call()
        found.append(timed_calls(call, device, budget_ms, MIN_SAMPLES))
    return found


def _prepare(
    case: CollectiveCase, rank: int, device: str
) -> tuple[Callable[[], object], torch.Tensor, float]:
    """Return a collective as a call, the tensor of its first result, and that result's value.

    All elements of the result have the same value.
    """
    ranks = case.num_ranks
    # Ranks get equal parts, so that at 6 ranks the message is a few bytes smaller.
    size = case.num_bytes // BYTES_PER_FLOAT // ranks * ranks
    whole = torch.full((size,), float(rank + 1), device=device)
    part = torch.full((size // ranks,), float(rank + 1), device=device)
    total = ranks * (ranks + 1) / 2
    prepared: dict[str, tuple[Callable[[], object], torch.Tensor, float]] = {
        "all_reduce": (lambda: dist.all_reduce(whole), whole, total),
        "broadcast": (lambda: dist.broadcast(whole, src=0), whole, 1.0),
        "all_gather": (
            lambda: all_gather_flat(whole, part),
            whole.view(ranks, -1)[ranks - 1],
            float(ranks),
        ),
        "reduce_scatter": (lambda: reduce_scatter_mean_flat(part, whole), part, total / ranks),
    }
    return prepared[case.operation]
