"""What the experiments of data parallelism share: one training step under a wrapper, ours and PyTorch's.

Phases on every rank: average by a plain all-reduce what each rank computes alone; compare the wrapper's gradients with
that; time whole steps (forward, loss, backward, synchronisation, AdamW) together; trace one more step on rank 0. Ranks
start each timed step together, and it is over when the last is done.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from cs336_systems.config import Precision, RunConfig
from cs336_systems.experiments import parallel_step as steps
from cs336_systems.experiments import ranks
from cs336_systems.experiments.parallel_step import OURS, PEERS, DataParallelCase
from cs336_systems.experiments.spec import Cell, Sample
from cs336_systems.experiments.tables import Pick, Ratio, Wide

WITH_BUCKETS = ("bucketed", *PEERS)
DEFAULT_BUCKET_MB = {"tiny": 0.1, "smoke": 1.0, "handout": 25.0}  # the last as PyTorch's
FEWER_RANKS = {"tiny": (), "smoke": (), "handout": (1,)}  # beside the most: what a step costs with nobody to wait for
WARMUP = 2  # after the two backwards of the check, and before the step that plans how many are timed


def steps_table(title: str, where: Mapping[str, Any] | None = None, **more: str) -> Wide:
    """A line a wrapper: its step, what of it is communication, and how much of that is hidden; `more` columns down."""
    return Wide(
        title=title,
        down={"wrapper": "implementation", "bucket (MiB)": "bucket_size_mb", "precision": "precision", **more},
        where={"quantity": ("time", "peak_memory", *ranks.TIMES), **(where or {})},
        columns={
            "step (ms)": Pick({"quantity": "time"}, significant=4),
            "communication (ms)": Pick({"quantity": "communication_time"}),
            "of the step": Ratio("communication (ms)", "step (ms)", percent=True),
            "beside compute (ms)": Pick({"quantity": "overlap_time"}),
            "hidden": Ratio("beside compute (ms)", "communication (ms)", percent=True),
            "peak (GiB)": Pick({"quantity": "peak_memory"}, unit="GiB"),
        },
    )


def two_rank_traces(what: str, implementations: tuple[str, ...]) -> ranks.Traces:
    """The lanes of a step on two ranks; `what` tells the figure from those of the other wrappers."""
    title = f"One traced step of rank 0, two ranks: {what}"
    return ranks.Traces(title=title, where={"num_ranks": 2, "implementation": implementations})


def precisions(run: RunConfig) -> list[Precision]:
    """float32, and before it bfloat16 autocast where a GPU is fast at it, so that communication weighs more."""
    return [Precision(autocast="bfloat16"), Precision()] if run.device == "cuda" else [Precision()]


def ddp_cells(
    run: RunConfig, implementations: Sequence[str], num_ranks: Sequence[int], *, precision: Precision | None = None,
    bucket_size_mb: float | None = None,
) -> list[Cell]:  # fmt: skip
    """A cell for each number of ranks and wrapper; in the first of `precisions` and usual buckets unless given."""
    size = bucket_size_mb or DEFAULT_BUCKET_MB[run.scale]
    memory = ("peak_memory",) if run.device == "cuda" else ()
    cells = []
    for number, name in product(num_ranks, implementations):
        buckets = {"bucket_size_mb": size if name in WITH_BUCKETS else None}
        case = ranks.ranks_case(DataParallelCase, run, number, precision or precisions(run)[0], **buckets)
        cells.append(ranks.step_cell(case, name, memory))
    return cells


class DataParallelExperiment(ranks.StepExperiment):
    """Base of the four."""

    implementations: tuple[str, ...] = (*OURS, *PEERS)
    takes = "ddp"
    tables = {"steps": steps_table("A training step", ranks="num_ranks")}

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        return ranks.measure_step(_measure_rank, cell, run)


def _measure_rank(
    rank: int, num_ranks: int, implementation: str, case: DataParallelCase, run: RunConfig
) -> ranks.RankReport:  # fmt: skip
    expected = steps.plain_mean(case, run, rank)
    step = steps.ParallelStep(implementation, case, run, rank)
    error = steps.check_gradients(step, expected)
    expected.clear()  # no part of a step's memory
    for _ in range(WARMUP):
        step.train_step()
    if step.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    samples = {("train_step", "time"): ranks.timed_steps(step.train_step, step.device, run)}
    samples["train_step", "peak_memory"] = ranks.peak_mib(step.device)
    return ranks.RankReport(error=error, samples=samples | ranks.trace_on_first(step.train_step, rank, step.device))
