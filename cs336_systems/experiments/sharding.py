"""What the experiments of sharding share: cases, measurement and tables of one sharded training step.

Phases on every rank: check the training of a shallow model (sharded_step.py); build the model itself; measure one step
in parts (memory after construction, before and after the optimizer); time whole steps together; trace a forward and a
step. Every implementation, PyTorch's too, goes the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from cs336_systems.accounting import model_peak_bytes
from cs336_systems.config import ModelCase, Precision, RunConfig
from cs336_systems.distributed.memory_plan import fsdp_bytes
from cs336_systems.experiments.ranks import (
    BATCH,
    BUDGET_MS,
    MIN_SAMPLES,
    TIMES,
    TRACED,
    agreed_samples,
    lane_column,
    peak_mib,
    rank_counts,
    run_cell,
    sized_model,
    slowest,
    step_numbers,
    time_together,
    trace_on_first,
    traced_samples,
)
from cs336_systems.experiments.sharded_step import (
    FSDP_IMPLEMENTATIONS,
    MEMORY,
    OPTIMIZER_IMPLEMENTATIONS,
    ShardedStep,
    ShardingCase,
    check_training,
)
from cs336_systems.experiments.spec import Cell, Experiment, Row, Sample, Unsupported
from cs336_systems.experiments.tables import Pick, Wide
from cs336_systems.measure.memory import MIB, release
from cs336_systems.measure.overlap import Lanes

WARMUP = 1  # after the step whose memory is read, and before the one that plans how many are timed
MOMENTS = ("memory_after_init", "memory_before_step", "memory_after_step")  # peaks so far, from CUDA's allocator


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
        "implementation": "implementation",
        "model": "model",
        "ranks": "num_ranks",
        "compute": "compute",
        "reduce": "reduce",
    }
    tables = {
        "steps": Wide(
            title="A training step, and one traced",
            down=down,
            where={"mode": "train_step", "quantity": ("time", *TIMES)},
            columns={
                "step (ms)": Pick({"quantity": "time"}, significant=4),
                "traced (ms)": Pick({"quantity": "traced_time"}),
                "compute (ms)": Pick({"quantity": "compute_time"}),
                "communication (ms)": Pick({"quantity": "communication_time"}),
                "beside compute (ms)": Pick({"quantity": "overlap_time"}),
            },
        ),
        "forward": Wide(
            title="A traced forward pass",
            down=down,
            where={"mode": "forward", "quantity": TIMES},
            columns={
                "traced (ms)": Pick({"quantity": "traced_time"}),
                "compute (ms)": Pick({"quantity": "compute_time"}),
                "communication (ms)": Pick({"quantity": "communication_time"}),
                "beside compute (ms)": Pick({"quantity": "overlap_time"}),
            },
        ),
        "memory": Wide(
            title="Memory of a rank (GiB): the most so far, and what stays between steps",
            down=down,
            where={"mode": "train_step", "quantity": (*MEMORY, *MOMENTS, "peak_memory", "predicted_peak_memory")},
            columns={
                heading: Pick({"quantity": quantity}, unit="GiB")
                for heading, quantity in (
                    ("after init", "memory_after_init"),
                    ("before the step", "memory_before_step"),
                    ("after the step", "memory_after_step"),
                    ("peak", "peak_memory"),
                    ("peak predicted", "predicted_peak_memory"),
                    ("parameters", "parameters"),
                    ("gradients", "gradients"),
                    ("optimizer state", "optimizer_state"),
                )
            },
        ),
    }


def sharding_case(
    run: RunConfig, num_ranks: int, compute_dtype: str | None, reduce_dtype: str | None = None
) -> ShardingCase:
    """The standard configuration on `num_ranks`: plain attention, no checkpointing."""
    return ShardingCase(
        model=sized_model(run),
        batch=BATCH[run.scale],
        num_ranks=num_ranks,
        backend="nccl" if run.device == "cuda" else "gloo",
        attention="reference",
        precision=Precision(autocast=compute_dtype),  # type: ignore[arg-type]
        reduce_dtype=reduce_dtype,
    )


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
    rows = [Row("train_step", "time", "ms")]
    kinds = (*MEMORY, *MOMENTS, "peak_memory") if case.backend == "nccl" else MEMORY
    rows += [Row("train_step", name, "MiB") for name in kinds]
    if implementation in ("fsdp", "fsdp_layer"):
        rows.append(Row("train_step", "predicted_peak_memory", "MiB"))
    rows += [Row(mode, name, "ms") for mode in ("forward", "train_step") for name in TRACED]
    alone = ModelCase(model=case.model, batch=case.batch, attention=case.attention, precision=case.precision)
    predicted = case.num_ranks * model_peak_bytes(alone, "train_step") if case.backend == "gloo" else 0
    return Cell(case=case, implementation=implementation, rows=tuple(rows), predicted_bytes=predicted)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank measured; lanes on rank 0 only."""

    step_ms: list[float]
    error: float  # over its bound
    mib: dict[str, float] = field(default_factory=dict)
    lanes: dict[str, Lanes] = field(default_factory=dict)  # by mode


def measure_sharding(cell: Cell, run: RunConfig) -> Iterator[Sample]:
    case: ShardingCase = cell.case
    known = (*OPTIMIZER_IMPLEMENTATIONS, *FSDP_IMPLEMENTATIONS)
    if cell.implementation not in known and ":" not in cell.implementation:
        raise Unsupported(f"there is no sharding called {cell.implementation!r}")
    if cell.implementation == "torch_fsdp" and case.backend != "nccl" and case.precision.autocast is not None:
        raise Unsupported("fully_shard in low precision is measured on GPUs only")
    rows = {mode: {row.quantity: row for row in cell.rows if row.mode == mode} for mode in ("forward", "train_step")}
    if "predicted_peak_memory" in rows["train_step"]:  # before anything runs
        yield Sample(row=rows["train_step"]["predicted_peak_memory"], samples=[predicted_mib(case)])
    reports: list[RankReport] = run_cell(
        _measure_rank, case.num_ranks, cell.implementation, case, run, backend=case.backend, run=run
    )
    error = max(report.error for report in reports)
    times = slowest([report.step_ms for report in reports])
    yield Sample(row=rows["train_step"]["time"], samples=times, error=error)
    for name in reports[0].mib:
        yield Sample(row=rows["train_step"][name], samples=[max(report.mib[name] for report in reports)])
    for mode, lanes in reports[0].lanes.items():
        yield from traced_samples(lanes, rows[mode])


def predicted_mib(case: ShardingCase) -> float:
    """Peak of a rank under FSDP, in closed form."""
    plan = fsdp_bytes(
        case.model,
        case.batch,
        num_ranks=case.num_ranks,
        attention=case.attention,
        compute_dtype=case.precision.autocast,
        reduce_dtype=case.reduce_dtype,
        checkpointing=case.checkpointing != "none",
    )
    return plan.peak / MIB


def _measure_rank(rank: int, num_ranks: int, implementation: str, case: ShardingCase, run: RunConfig) -> RankReport:
    error = check_training(implementation, case, run, rank)
    device = "cuda" if case.backend == "nccl" else "cpu"
    release(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    moments = {}
    step = ShardedStep(implementation, case, run, rank)
    moments["memory_after_init"] = peak_mib(device)
    step.forward_backward()
    moments["memory_before_step"] = peak_mib(device)
    step.optimizer.step()
    moments["memory_after_step"] = peak_mib(device)
    for _ in range(WARMUP):
        step.train_step()
    kept = step.mib()
    count = agreed_samples(step.train_step, device, BUDGET_MS[run.scale], MIN_SAMPLES)
    samples = [time_together(step.train_step, device) for _ in range(count)]
    if device == "cuda":
        kept |= moments | {"peak_memory": peak_mib(device)}
    lanes = {
        "forward": trace_on_first(step.forward, rank, device),
        "train_step": trace_on_first(step.train_step, rank, device),
    }
    found = {mode: lane for mode, lane in lanes.items() if lane is not None}
    return RankReport(step_ms=samples, error=error, mib=kept, lanes=found)
