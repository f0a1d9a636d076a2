"""Cells that time a data-parallel training step, ours and PyTorch's, and trace what of it is communication.

Phases on every rank: build the model from one seed and a batch of the rank's own; compare the averaged gradients with
the plain mean of what each rank computes alone; time whole steps (forward, loss, backward, synchronisation, AdamW)
together; trace one more step on rank 0. Ranks start each timed step together, and it is over when the last is done.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.accounting import model_peak_bytes
from cs336_systems.config import DataParallelCase, ModelCase, RunConfig
from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.experiments.cells import Cell, Disagreement, Measurement, Row, Unsupported
from cs336_systems.experiments.rank_cells import agreed_samples, run_cell, slowest
from cs336_systems.inputs import token_batch
from cs336_systems.measure.intervals import simplify
from cs336_systems.measure.memory import MIB
from cs336_systems.measure.overlap import Lanes, trace_lanes
from cs336_systems.measure.timing import synchronize
from cs336_systems.model import AdamW, build_model, cross_entropy

OURS = ("naive", "flat", "overlap", "bucketed")
PEERS = ("torch_ddp", "torch_ddp_view")  # the second with gradient_as_bucket_view
WITH_BUCKETS = ("bucketed", *PEERS)
BUDGET_MS = {"tiny": 100.0, "smoke": 500.0, "handout": 2000.0}  # of timed steps a cell
MIN_SAMPLES = 5
WARMUP = 2  # after the two backwards of the check, and before the step that plans how many are timed
DEFAULT_TORCH_BUCKET_MB = 25.0
MOST_INTERVALS = 300  # of a lane in a record: more cannot be told apart in a figure
# Largest difference of a gradient over the largest element of its expectation. Both are computed from the same weights
# and data; they differ in the order of sums, and where a backward adds with atomics.
GRADIENT_TOLERANCE = {None: 1e-4, "bfloat16": 2e-2, "float16": 2e-3}


def ddp_cell(problem: str, case: DataParallelCase, implementation: str) -> Cell:
    """The cell with every row that its device can give."""
    rows = [Row(mode="train_step", quantity=quantity, unit="ms") for quantity in ("time", *TRACED)]
    if case.backend == "nccl":
        rows.append(Row(mode="train_step", quantity="peak_memory", unit="MiB"))
    alone = ModelCase(model=case.model, batch=case.batch, attention=case.attention, precision=case.precision)
    predicted = case.num_ranks * model_peak_bytes(alone, "train_step") if case.backend == "gloo" else 0
    return Cell(problem=problem, case=case, implementation=implementation, rows=tuple(rows), predicted_bytes=predicted)


TRACED = (  # quantities of one traced step of rank 0
    "traced_time",
    "communication_time",
    "compute_time",
    "overlap_time",
    "compute_intervals",  # start, end, start, end, ... of what a figure can show
    "communication_intervals",
)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank measured."""

    step_ms: list[float]
    gradient_error: float  # over its bound
    peak_mib: float | None  # CUDA only
    lanes: Lanes | None  # rank 0 only


def measure_ddp(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    case: DataParallelCase = cell.case
    if cell.implementation not in (*OURS, *PEERS):
        raise Unsupported(f"there is no data parallelism called {cell.implementation!r}")
    reports: list[RankReport] = run_cell(
        _measure_rank, case.num_ranks, cell.implementation, case, run, backend=case.backend, run=run
    )
    rows = {row.quantity: row for row in cell.rows}
    error = max(report.gradient_error for report in reports)
    yield Measurement(row=rows["time"], samples=slowest([report.step_ms for report in reports]), error=error)
    lanes = reports[0].lanes
    assert lanes is not None
    traced: dict[str, list[float]] = {
        "traced_time": [lanes.span_ms],
        "communication_time": [lanes.communication_ms],
        "compute_time": [lanes.compute_ms],
        "overlap_time": [lanes.overlap_ms],
        "compute_intervals": [time for pair in simplify(lanes.compute, MOST_INTERVALS) for time in pair],
        "communication_intervals": [time for pair in simplify(lanes.communication, MOST_INTERVALS) for time in pair],
    }
    for quantity, samples in traced.items():
        nothing = "" if samples else "the traced step has none"
        yield Measurement(row=rows[quantity], samples=samples, skipped=nothing)
    peaks = [report.peak_mib for report in reports if report.peak_mib is not None]
    if "peak_memory" in rows and peaks:
        yield Measurement(row=rows["peak_memory"], samples=[max(peaks)])


def wrap(module: nn.Module, implementation: str, bucket_size_mb: float | None) -> nn.Module:
    """`module` under the data parallelism of that name, on the default process group."""
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
        bucket_cap_mb=bucket_size_mb or DEFAULT_TORCH_BUCKET_MB,
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
        self.model: Any = wrap(module, implementation, case.bucket_size_mb)
        self.optimizer = AdamW(module.parameters())
        self.tokens, self.targets = token_batch(case.model, case.batch, device=self.device, seed=run.seed + rank)
        self.autocast = case.precision.autocast

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
    error = check_gradients(step, num_ranks)
    for _ in range(WARMUP):
        step.train_step()
    count = agreed_samples(step.train_step, step.device, BUDGET_MS[run.scale], MIN_SAMPLES)
    if step.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    samples = [_time_together(step.train_step, step.device) for _ in range(count)]
    peak = torch.cuda.max_memory_allocated() / MIB if step.device == "cuda" else None
    lanes = _trace_on_first(step, rank)
    return RankReport(step_ms=samples, gradient_error=error, peak_mib=peak, lanes=lanes)


def _time_together(call: Callable[[], object], device: str) -> float:
    """Milliseconds of one call that no rank begins before all are ready."""
    synchronize(device)
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _trace_on_first(step: ParallelStep, rank: int) -> Lanes | None:
    """Rank 0's lanes of one step; the others make the same two steps without a profiler."""

    def together() -> None:
        dist.barrier()
        synchronize(step.device)
        step.train_step()

    if rank == 0:
        return trace_lanes(together, step.device)
    for _ in range(2):
        synchronize(step.device)
        together()
        synchronize(step.device)
    return None


def check_gradients(step: ParallelStep, num_ranks: int) -> float:
    """Largest error of a gradient over its bound; Disagreement if it is above 1, or if the loss is not finite.

    Expected is the mean, by a plain all-reduce, of the gradients that each rank computes alone. Two backwards are
    compared, since the first of some wrappers is unlike the others.
    """
    with step.model.no_sync():
        loss = step.forward_backward()
    if not loss.isfinite().item():
        raise Disagreement(f"the model's loss must be finite, got {loss.item():g}")
    expected = [None if parameter.grad is None else parameter.grad.clone() for parameter in step.parameters]
    for gradient in expected:
        if gradient is not None:
            dist.all_reduce(gradient)
            gradient.div_(num_ranks)
    worst = 0.0
    for _ in range(2):
        step.optimizer.zero_grad(set_to_none=True)
        step.forward_backward()
        step.synchronize_gradients()
        for parameter, gradient in zip(step.parameters, expected):
            if gradient is not None and parameter.grad is not None:
                bound = GRADIENT_TOLERANCE[step.autocast] * gradient.abs().max().item()
                difference = (parameter.grad - gradient).abs().max().item()
                worst = max(worst, difference / bound if bound else float(difference > 0))
    step.optimizer.zero_grad(set_to_none=True)
    if not worst <= 1:
        raise Disagreement(f"averaged gradients are off by {worst:.3g} times the bound of the plain mean's")
    return worst
