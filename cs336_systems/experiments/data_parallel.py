"""What the experiments of data parallelism share: one training step under a wrapper, ours and PyTorch's.

Phases on every rank: average by a plain all-reduce what each rank computes alone; compare the wrapper's gradients with
that; time whole steps (forward, loss, backward, synchronisation, AdamW) together; trace one more step on rank 0. Ranks
start each timed step together, and it is over when the last is done.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from cs336_systems.config import Precision, RunConfig
from cs336_systems.experiments.parallel_step import (
    OURS,
    PEERS,
    DataParallelCase,
    ParallelStep,
    check_gradients,
    plain_mean,
)  # fmt: skip
from cs336_systems.experiments.ranks import (
    BATCH,
    TIMES,
    RankReport,
    Traces,
    backend_of,
    lane_column,
    peak_mib,
    report_samples,
    run_cell,
    sized_model,
    step_numbers,
    timed_steps,
    trace_on_first,
    traced_rows,
)  # fmt: skip
from cs336_systems.experiments.spec import Cell, Experiment, Row, Sample, Unsupported
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
        where={"quantity": ("time", "peak_memory", *TIMES), **(where or {})},
        columns={
            "step (ms)": Pick({"quantity": "time"}, significant=4),
            "communication (ms)": Pick({"quantity": "communication_time"}),
            "of the step": Ratio("communication (ms)", "step (ms)", percent=True),
            "beside compute (ms)": Pick({"quantity": "overlap_time"}),
            "hidden": Ratio("beside compute (ms)", "communication (ms)", percent=True),
            "peak (GiB)": Pick({"quantity": "peak_memory"}, unit="GiB"),
        },
    )


def two_rank_traces(what: str, implementations: tuple[str, ...]) -> Traces:
    """The lanes of a step on two ranks; `what` tells the figure from those of the other wrappers."""
    title = f"One traced step of rank 0, two ranks: {what}"
    return Traces(title=title, where={"num_ranks": 2, "implementation": implementations})


class DataParallelExperiment(Experiment):
    """Base of the four: cells of wrappers, ranks and precisions, their measurement and table."""

    implementations: tuple[str, ...] = (*OURS, *PEERS)
    takes = "ddp"

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        return measure_ddp(cell, run)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return lane_column(row)

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        return step_numbers(frame)

    tables = {"steps": steps_table("A training step", ranks="num_ranks")}


def precisions(run: RunConfig) -> list[Precision]:
    """float32, and before it bfloat16 autocast where a GPU is fast at it, so that communication weighs more."""
    return [Precision(autocast="bfloat16"), Precision()] if run.device == "cuda" else [Precision()]


def ddp_case(
    run: RunConfig, num_ranks: int, precision: Precision, bucket_size_mb: float | None = None
) -> DataParallelCase:
    return DataParallelCase(
        model=sized_model(run), batch=BATCH[run.scale], num_ranks=num_ranks, backend=backend_of(run),
        attention="reference", precision=precision, bucket_size_mb=bucket_size_mb,
    )  # fmt: skip


def ddp_cell(case: DataParallelCase, implementation: str) -> Cell:
    """The cell with every row that its device can give."""
    rows = [Row("train_step", "time", "ms"), *traced_rows()]
    if case.backend == "nccl":
        rows.append(Row("train_step", "peak_memory", "MiB"))
    return Cell(case=case, implementation=implementation, rows=tuple(rows), predicted_bytes=case.predicted_bytes)


def ddp_cells(
    run: RunConfig, implementations: Sequence[str], ranks: Sequence[int], computes: Sequence[Precision]
) -> list[Cell]:
    """A cell for each wrapper, number of ranks and precision, with buckets of the usual size."""
    usual = DEFAULT_BUCKET_MB[run.scale]
    return [
        ddp_cell(ddp_case(run, number, precision, usual if name in WITH_BUCKETS else None), name)
        for precision in computes
        for number in ranks
        for name in implementations
    ]


def measure_ddp(cell: Cell, run: RunConfig) -> Iterator[Sample]:
    name, case = cell.implementation, cell.case
    if name not in (*OURS, *PEERS) and ":" not in name:
        raise Unsupported(f"there is no data parallelism called {name!r}")
    reports = run_cell(_measure_rank, case.num_ranks, name, case, run, backend=case.backend, run=run)
    yield from report_samples(cell, reports)


def _measure_rank(rank: int, num_ranks: int, implementation: str, case: DataParallelCase, run: RunConfig) -> RankReport:
    expected = plain_mean(case, run, rank)
    step = ParallelStep(implementation, case, run, rank)
    error = check_gradients(step, expected)
    expected.clear()  # no part of a step's memory
    for _ in range(WARMUP):
        step.train_step()
    if step.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    samples = timed_steps(step.train_step, step.device, run)
    mib = {"peak_memory": peak_mib(step.device)} if step.device == "cuda" else {}
    lanes = {"train_step": trace_on_first(step.train_step, rank, step.device)}
    return RankReport(step_ms=samples, error=error, mib=mib, lanes=lanes)
