"""What the experiments of data parallelism share: one training step under a wrapper, ours and PyTorch's.

Phases on every rank: build the model from one seed and a batch of the rank's own, and average by a plain all-reduce
what each rank computes alone; compare the wrapper's gradients with that; time whole steps (forward, loss, backward,
synchronisation, AdamW) together; trace one more step on rank 0. Ranks start each timed step together, and it is over
when the last is done.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.accounting import model_peak_bytes
from cs336_systems.config import DataParallelCase, ModelCase, Precision, RunConfig
from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.experiments.implementations import load_name
from cs336_systems.experiments.ranks import (
    BATCH,
    BUDGET_MS,
    MIN_SAMPLES,
    TIMES,
    TRACED,
    Traces,
    agreed_samples,
    lane_column,
    peak_mib,
    run_cell,
    sized_model,
    slowest,
    step_numbers,
    time_together,
    trace_on_first,
    traced_samples,
)
from cs336_systems.experiments.spec import Cell, Disagreement, Experiment, Row, Sample, Unsupported
from cs336_systems.experiments.tables import Pick, Ratio, Wide
from cs336_systems.inputs import token_batch
from cs336_systems.measure.overlap import Lanes
from cs336_systems.model import AdamW, build_model, cross_entropy

OURS = ("naive", "flat", "overlap", "bucketed")
PEERS = ("torch_ddp", "torch_ddp_view")  # the second with gradient_as_bucket_view
WITH_BUCKETS = ("bucketed", *PEERS)
DEFAULT_BUCKET_MB = {"tiny": 0.1, "smoke": 1.0, "handout": 25.0}  # the last as PyTorch's
FEWER_RANKS = {"tiny": (), "smoke": (), "handout": (1,)}  # beside the most: what a step costs with nobody to wait for
WARMUP = 2  # after the two backwards of the check, and before the step that plans how many are timed
# Largest difference of a gradient over the largest element of its expectation. Both are computed from the same weights
# and data; they differ in the order of sums, and where a backward adds with atomics.
GRADIENT_TOLERANCE = {None: 1e-4, "bfloat16": 2e-2, "float16": 2e-3}


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


class DataParallelExperiment(Experiment):
    """Base of the four: cells of wrappers, ranks and precisions, their measurement, table and traces."""

    implementations: tuple[str, ...] = (*OURS, *PEERS)
    takes = "ddp"

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        return measure_ddp(cell, run)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return lane_column(row)

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        return step_numbers(frame)

    tables = {"steps": steps_table("A training step", ranks="num_ranks")}
    figures = {
        "traces": Traces(
            title="One traced step of rank 0, two ranks",
            where={"num_ranks": 2, "implementation": ("naive", "flat", "overlap", "bucketed")},
        )
    }


def precisions(run: RunConfig) -> list[Precision]:
    """float32, and before it bfloat16 autocast where a GPU is fast at it, so that communication weighs more."""
    return [Precision(autocast="bfloat16"), Precision()] if run.device == "cuda" else [Precision()]


def ddp_case(
    run: RunConfig, num_ranks: int, precision: Precision, bucket_size_mb: float | None = None
) -> DataParallelCase:
    return DataParallelCase(
        model=sized_model(run),
        batch=BATCH[run.scale],
        num_ranks=num_ranks,
        backend="nccl" if run.device == "cuda" else "gloo",
        attention="reference",
        precision=precision,
        bucket_size_mb=bucket_size_mb,
    )


def ddp_cell(case: DataParallelCase, implementation: str) -> Cell:
    """The cell with every row that its device can give."""
    rows = [Row(mode="train_step", quantity=quantity, unit="ms") for quantity in ("time", *TRACED)]
    if case.backend == "nccl":
        rows.append(Row(mode="train_step", quantity="peak_memory", unit="MiB"))
    alone = ModelCase(model=case.model, batch=case.batch, attention=case.attention, precision=case.precision)
    predicted = case.num_ranks * model_peak_bytes(alone, "train_step") if case.backend == "gloo" else 0
    return Cell(case=case, implementation=implementation, rows=tuple(rows), predicted_bytes=predicted)


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


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank measured."""

    step_ms: list[float]
    gradient_error: float  # over its bound
    peak_mib: float
    lanes: Lanes | None  # rank 0 only


def measure_ddp(cell: Cell, run: RunConfig) -> Iterator[Sample]:
    case: DataParallelCase = cell.case
    if cell.implementation not in (*OURS, *PEERS) and ":" not in cell.implementation:
        raise Unsupported(f"there is no data parallelism called {cell.implementation!r}")
    reports: list[RankReport] = run_cell(
        _measure_rank, case.num_ranks, cell.implementation, case, run, backend=case.backend, run=run
    )
    rows = {row.quantity: row for row in cell.rows}
    error = max(report.gradient_error for report in reports)
    yield Sample(row=rows["time"], samples=slowest([report.step_ms for report in reports]), error=error)
    lanes = reports[0].lanes
    assert lanes is not None
    yield from traced_samples(lanes, rows)
    if "peak_memory" in rows:
        yield Sample(row=rows["peak_memory"], samples=[max(report.peak_mib for report in reports)])


def wrap(module: nn.Module, implementation: str, bucket_size_mb: float | None) -> nn.Module:
    """`module` under the data parallelism of that name, on the default process group.

    A reader's own, `package.module:Name`, is called with the module, and with `bucket_size_mb` if it has such a
    parameter; it must have `finish_gradient_synchronization` unless its backward does all.
    """
    if ":" in implementation:
        own = load_name(implementation)
        bucketed = "bucket_size_mb" in inspect.signature(own).parameters
        return own(module, bucket_size_mb=bucket_size_mb) if bucketed else own(module)
    if implementation == "naive":
        return NaiveDDP(module)
    if implementation == "flat":
        return FlatDDP(module)
    if implementation == "overlap":
        return OverlapDDP(module)
    if implementation == "bucketed":
        return BucketedDDP(module, bucket_size_mb)
    torch_ddp = nn.parallel.DistributedDataParallel
    # Ours do not send buffers in each forward either. torch 2.13 renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(torch_ddp).parameters
    buffers: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return torch_ddp(
        module,
        bucket_cap_mb=bucket_size_mb or DEFAULT_BUCKET_MB["handout"],
        gradient_as_bucket_view=implementation == "torch_ddp_view",
        **buffers,
    )


class ParallelStep:
    """A wrapped model, its optimizer and this rank's batch."""

    def __init__(self, implementation: str, case: DataParallelCase, run: RunConfig, rank: int) -> None:
        self.device = "cuda" if case.backend == "nccl" else "cpu"
        module = build_model(
            case.model,
            attention=case.attention,
            model_spec=run.model,
            device=self.device,
            dtype=getattr(torch, case.precision.parameters),
            seed=run.seed,
        )
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.tokens, self.targets = token_batch(case.model, case.batch, device=self.device, seed=run.seed + rank)
        self.autocast = case.precision.autocast
        self.optimizer = AdamW(module.parameters())
        self.model: Any = module
        self.expected = self._plain_mean()
        self.model = wrap(module, implementation, case.bucket_size_mb)

    def _plain_mean(self) -> list[Tensor | None]:
        """The mean of what each rank computes alone, by plain all-reduces, before anything is wrapped."""
        loss = self.forward_backward()
        if not loss.isfinite().item():
            raise Disagreement(f"the model's loss must be finite, got {loss.item():g}")
        expected = [parameter.grad for parameter in self.parameters]
        for gradient in expected:
            if gradient is not None:
                dist.all_reduce(gradient)
                gradient.div_(dist.get_world_size())
        self.optimizer.zero_grad(set_to_none=True)
        return expected

    def forward_backward(self) -> Tensor:
        with self._precision():
            loss = cross_entropy(self.model(self.tokens), self.targets)
        loss.backward()
        return loss.detach()

    def synchronize_gradients(self) -> None:
        if hasattr(self.model, "finish_gradient_synchronization"):
            self.model.finish_gradient_synchronization()  # torch's does it at the end of its backward

    def train_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.forward_backward()
        self.synchronize_gradients()
        self.optimizer.step()

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device, dtype=getattr(torch, self.autocast))


def _measure_rank(rank: int, num_ranks: int, implementation: str, case: DataParallelCase, run: RunConfig) -> RankReport:
    step = ParallelStep(implementation, case, run, rank)
    error = check_gradients(step)
    step.expected = []  # no part of a step's memory
    for _ in range(WARMUP):
        step.train_step()
    count = agreed_samples(step.train_step, step.device, BUDGET_MS[run.scale], MIN_SAMPLES)
    if step.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    samples = [time_together(step.train_step, step.device) for _ in range(count)]
    peak = peak_mib(step.device)
    lanes = trace_on_first(step.train_step, rank, step.device)
    return RankReport(step_ms=samples, gradient_error=error, peak_mib=peak, lanes=lanes)


def check_gradients(step: ParallelStep) -> float:
    """Largest error of a gradient over its bound; Disagreement if it is above 1.

    Two backwards are compared, since the first of some wrappers is unlike the others.
    """
    worst = 0.0
    for _ in range(2):
        step.optimizer.zero_grad(set_to_none=True)
        step.forward_backward()
        step.synchronize_gradients()
        for parameter, gradient in zip(step.parameters, step.expected):
            if gradient is not None and parameter.grad is not None:
                bound = GRADIENT_TOLERANCE[step.autocast] * gradient.abs().max().item()
                difference = (parameter.grad - gradient).abs().max().item()
                worst = max(worst, difference / bound if bound else float(difference > 0))
    step.optimizer.zero_grad(set_to_none=True)
    if not worst <= 1:
        raise Disagreement(f"averaged gradients are off by {worst:.3g} times the bound of the plain mean's")
    return worst
