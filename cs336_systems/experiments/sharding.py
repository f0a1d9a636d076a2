"""What the experiments of sharding share: cases, measurement and tables of one sharded training step.

Phases on every rank: check the training of a shallow model (parallel_step.py); build the model itself; measure one step
in parts (memory after construction, before and after the optimizer); time whole steps together; trace a forward and a
step. Every implementation, PyTorch's too, goes the same way.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch

from cs336_systems.config import Precision, RunConfig
from cs336_systems.experiments.memory_plan import fsdp_bytes
from cs336_systems.experiments.parallel_step import (
    FSDP_IMPLEMENTATIONS,
    MEMORY,
    OPTIMIZER_IMPLEMENTATIONS,
    ParallelStep,
    RanksCase,
    ShardingCase,
    check_training,
)  # fmt: skip
from cs336_systems.experiments.ranks import (
    BATCH,
    TIMES,
    RankReport,
    backend_of,
    lane_column,
    peak_mib,
    rank_counts,
    report_samples,
    run_cell,
    sized_model,
    step_numbers,
    timed_steps,
    trace_on_first,
    traced_rows,
)  # fmt: skip
from cs336_systems.experiments.spec import Cell, Experiment, Row, Sample, Unsupported
from cs336_systems.experiments.tables import Pick, Wide
from cs336_systems.measure.memory import MIB, release

WARMUP = 1  # after the step whose memory is read, and before the one that plans how many are timed
MOMENTS = ("memory_after_init", "memory_before_step", "memory_after_step")  # peaks so far, from CUDA's allocator
PREDICTED = "predicted_peak_memory"
MEMORY_WORDS = {
    "after init": MOMENTS[0], "before the step": MOMENTS[1], "after the step": MOMENTS[2], "peak": "peak_memory",
    "peak predicted": PREDICTED, "parameters": "parameters", "gradients": "gradients",
    "optimizer state": "optimizer_state",
}  # fmt: skip
TIME_WORDS = {
    "traced (ms)": "traced_time", "compute (ms)": "compute_time", "communication (ms)": "communication_time",
    "beside compute (ms)": "overlap_time",
}  # fmt: skip


class ShardingExperiment(Experiment):
    """Base of both: measurement, columns, tables."""

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        return measure_sharding(cell, run)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """`compute`, the dtype of the matmuls, and `reduce`, that of the averaged gradients."""
        compute = row["precision"].removesuffix(" autocast")
        kept = row["quantity"].replace("_", " ") if row["quantity"] in MEMORY else ""
        return lane_column(row) | {"compute": compute, "reduce": row["reduce_dtype"] or compute, "kept": kept}

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        return step_numbers(frame)

    down = {
        "implementation": "implementation", "model": "model", "ranks": "num_ranks", "compute": "compute",
        "reduce": "reduce",
    }  # fmt: skip
    tables = {
        "steps": Wide(
            title="A training step, and one traced",
            down=down,
            where={"mode": "train_step", "quantity": ("time", *TIMES)},
            columns={"step (ms)": Pick({"quantity": "time"}, significant=4)}
            | {heading: Pick({"quantity": quantity}) for heading, quantity in TIME_WORDS.items()},
        ),
        "forward": Wide(
            title="A traced forward pass",
            down=down,
            where={"mode": "forward", "quantity": TIMES},
            columns={heading: Pick({"quantity": quantity}) for heading, quantity in TIME_WORDS.items()},
        ),
        "memory": Wide(
            title="Memory of a rank (GiB): the most so far, and what stays between steps",
            down=down,
            where={"mode": "train_step", "quantity": tuple(MEMORY_WORDS.values())},
            columns={heading: Pick({"quantity": quantity}, unit="GiB") for heading, quantity in MEMORY_WORDS.items()},
        ),
    }


def sharding_case(
    run: RunConfig, num_ranks: int, compute_dtype: str | None, reduce_dtype: str | None = None
) -> ShardingCase:
    """The standard configuration on `num_ranks`: plain attention, no checkpointing."""
    precision = Precision(autocast=compute_dtype)  # type: ignore[arg-type]
    return ShardingCase(
        model=sized_model(run), batch=BATCH[run.scale], num_ranks=num_ranks, backend=backend_of(run),
        attention="reference", precision=precision, reduce_dtype=reduce_dtype,
    )  # fmt: skip


def comparisons(
    run: RunConfig, implementations: tuple[str, ...], alone: tuple[str, ...] = ("unsharded",)
) -> list[tuple[int, str]]:
    """(ranks, implementation): all on 2, 4 and 8 ranks as far as there are GPUs, on a CPU on 2.

    At handout scale first `alone` on a single rank, which sends nothing: what efficiency at more is measured by.
    """
    single = [(1, name) for name in alone] if run.scale == "handout" else []
    return [*single, *((ranks, name) for ranks in rank_counts(run) for name in implementations)]


def sharding_cell(case: ShardingCase, implementation: str) -> Cell:
    """The cell with every row that its device can give."""
    kinds: tuple[str, ...] = (*MEMORY, *MOMENTS, "peak_memory") if case.backend == "nccl" else MEMORY
    kinds += (PREDICTED,) if implementation in ("fsdp", "fsdp_layer") else ()
    rows = [Row("train_step", "time", "ms"), *(Row("train_step", name, "MiB") for name in kinds)]
    rows += [*traced_rows("forward"), *traced_rows()]
    return Cell(case=case, implementation=implementation, rows=tuple(rows), predicted_bytes=case.predicted_bytes)


def measure_sharding(cell: Cell, run: RunConfig) -> Iterator[Sample]:
    name, case = cell.implementation, cell.case
    if name not in (*OPTIMIZER_IMPLEMENTATIONS, *FSDP_IMPLEMENTATIONS) and ":" not in name:
        raise Unsupported(f"there is no sharding called {name!r}")
    refuse_low_precision(name, case)
    for row in cell.rows:
        if row.quantity == PREDICTED:  # before anything runs
            yield Sample(row=row, samples=[predicted_mib(case)])
    reports = run_cell(_measure_rank, case.num_ranks, name, case, run, backend=case.backend, run=run)
    yield from report_samples(cell, reports)


def refuse_low_precision(implementation: str, case: RanksCase) -> None:
    if implementation == "torch_fsdp" and case.backend != "nccl" and case.precision.autocast is not None:
        raise Unsupported("fully_shard in low precision is measured on GPUs only")


def predicted_mib(case: ShardingCase) -> float:
    """Peak of a rank under FSDP, in closed form."""
    plan = fsdp_bytes(
        case.model, case.batch, num_ranks=case.num_ranks, attention=case.attention,
        compute_dtype=case.precision.autocast, reduce_dtype=case.reduce_dtype,
        checkpointing=case.checkpointing != "none",
    )  # fmt: skip
    return plan.peak / MIB


def _measure_rank(rank: int, num_ranks: int, implementation: str, case: ShardingCase, run: RunConfig) -> RankReport:
    error = check_training(implementation, case, run, rank)
    device = case.device
    release(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = ParallelStep(implementation, case, run, rank)
    moments = [peak_mib(device)]
    step.forward_backward()
    moments.append(peak_mib(device))
    step.optimizer.step()
    moments.append(peak_mib(device))
    for _ in range(WARMUP):
        step.train_step()
    mib = step.mib()
    samples = timed_steps(step.train_step, device, run)
    if device == "cuda":
        mib |= dict(zip(MOMENTS, moments)) | {"peak_memory": peak_mib(device)}
    lanes = {mode: trace_on_first(getattr(step, mode), rank, device) for mode in ("forward", "train_step")}
    return RankReport(step_ms=samples, error=error, mib=mib, lanes=lanes)
