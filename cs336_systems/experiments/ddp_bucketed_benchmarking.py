"""Bucketed data parallelism by bucket size, ours and PyTorch's, and a model of the cost."""

from typing import Any

import pandas as pd
import torch

from cs336_systems.analysis.bandwidth import best_bucket_bytes, bucket_overhead_s
from cs336_systems.book.frames import digits
from cs336_systems.config import MODEL_SIZES, RunConfig
from cs336_systems.distributed.ddp_bucketed import BYTES_PER_MB, plan_buckets
from cs336_systems.experiments import Cell, Lines, problem
from cs336_systems.model import TransformerLM
from cs336_systems.subjects.data_parallel import DataParallelExperiment, ddp_cells
from cs336_systems.subjects.ranks import most_ranks

BUCKET_SIZES_MB = {"tiny": (0.1,), "smoke": (0.1, 1, 10), "handout": (1, 10, 100, 1000)}


def buckets_claim(rows: pd.DataFrame) -> str:
    """Return that larger buckets are faster, if none makes our step longer than a smaller one."""
    steps = rows[rows["implementation"] == "bucketed"].sort_values("bucket_size_mb")["median"]
    if not (len(steps) > 1 and steps.is_monotonic_decreasing):
        return ""
    return (
        f"Larger buckets shorten our step from {digits(steps.iloc[0])} "
        f"to {digits(steps.iloc[-1])} ms"
    )


@problem()
class DDPBucketedBenchmarking(DataParallelExperiment):
    implementations = ("bucketed", "torch_ddp_view")

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return a cell for each bucket size, ours and at handout scale PyTorch's."""
        names = self.implementations if run.scale == "handout" else ("bucketed",)
        cells = [
            ddp_cells(run, names, [most_ranks(run)], bucket_size_mb=size)
            for size in BUCKET_SIZES_MB[run.scale]
        ]
        return sum(cells, [])

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return functions of xl's buckets: their number, best size and overhead.

        `buckets(mib)` counts the buckets of a size. `best_mib` and `overhead_ms` come from the
        model of their cost: the best size, and the overhead at that size.
        """
        with torch.device("meta"):
            parameters = list(TransformerLM.from_config(MODEL_SIZES["xl"]).parameters())
        total = sum(4 * parameter.numel() for parameter in parameters)  # float32

        def best_mib(call_ms: float, gb_per_s: float) -> float:
            return best_bucket_bytes(total, gb_per_s * 1e9, call_ms * 1e-3) / BYTES_PER_MB

        def overhead_ms(call_ms: float, gb_per_s: float) -> float:
            buckets = total / (best_mib(call_ms, gb_per_s) * BYTES_PER_MB)
            return 1e3 * bucket_overhead_s(total, gb_per_s * 1e9, call_ms * 1e-3, buckets)

        return super().numbers(frame) | {
            "buckets": lambda mib: len(plan_buckets(parameters, mib * BYTES_PER_MB)),
            "best_mib": best_mib,
            "overhead_ms": overhead_ms,
        }

    figures = {
        "steps": Lines(
            claim=buckets_claim,
            title="A training step by the size of buckets",
            x="bucket_size_mb",
            x_title="largest bucket (MiB)",
            y_title="step (ms)",
            where={"quantity": "time"},
        )
    }
