"""Run experiments of several ranks: start them, time them together, trace one, draw its lanes.

Ranks are children of the measuring process and die with it. `run_cell` is `run_ranks` that turns a
rank's error into the cell's: out of memory, wrong result, or failed. The model is xl at handout
scale and a narrow proxy of it below.

A training step is measured alike under every wrapper, ours and PyTorch's (`measure_rank`). Phases
on every rank:

- check: check the wrapper (parallel_step.py), then build it anew;
- memory: one step in parts, with the memory after construction, before and after the optimizer;
- time: whole steps, which all ranks begin together, and which end when the last rank is done;
- trace: traced calls, on rank 0.
"""

import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pandas as pd
import torch
import torch.distributed as dist

from cs336_systems.bench.spec import Cell, Disagreement, Experiment, Row, Sample, Unsupported
from cs336_systems.book.figures import WIDTH, Spans
from cs336_systems.book.frames import dicts, pick, speed
from cs336_systems.config import MODEL_SIZES, ModelConfig, Precision, RunConfig, proxy_model
from cs336_systems.distributed.spawn import RankError, run_ranks
from cs336_systems.measure.allocations import CPU_ALLOCATOR, MIB, release
from cs336_systems.measure.intervals import Interval, length, simplify, union
from cs336_systems.measure.overlap import trace_lanes
from cs336_systems.measure.timing import plan_samples, synchronize, time_calls, time_once
from cs336_systems.subjects.parallel_step import ParallelStep, check_wrapper

# Long, since ranks take different times to compile, allocate and load.
COLLECTIVE_TIMEOUT_S = 240.0
BATCH = {"tiny": 1, "smoke": 2, "handout": 4}  # sequences of each rank; 4 is the handout's
BUDGET_MS = {"tiny": 100.0, "smoke": 500.0, "handout": 2000.0}  # for the timed steps of a cell
MIN_SAMPLES = 5
WARMUP = 2  # steps after the one in parts and before the one that plans the number of samples
# quantities: peaks up to a moment, from CUDA's allocator
MOMENTS = ("memory_after_init", "memory_before_step", "memory_after_step")
# quantities of one traced call of rank 0, in ms
TIMES = ("traced_time", "communication_time", "compute_time", "overlap_time")
# quantities that a figure draws: start, end, start, end, ... of one traced call
INTERVALS = ("compute_intervals", "communication_intervals")
TRACED = (*TIMES, *INTERVALS)
Samples = dict[tuple[str, str], list[float]]  # (mode, quantity) -> samples of one rank
C = TypeVar("C")
T = TypeVar("T")
MOST_INTERVALS = 300  # of a lane in a record: more are indistinguishable in a figure


def sized_model(
    run: RunConfig, size: str = "xl", contexts: tuple[int, int] = (16, 64)
) -> ModelConfig:
    """Return the model `size` at handout scale, and a narrow proxy of it at the other scales.

    `contexts` are the proxy's context lengths at tiny and at smoke scale.
    """
    if run.scale == "handout":
        return MODEL_SIZES[size]
    tiny = run.scale == "tiny"
    proxy = proxy_model(size, 64 if tiny else 128)
    return replace(
        proxy, context_length=contexts[0 if tiny else 1], vocab_size=256 if tiny else 1000
    )


def most_ranks(run: RunConfig) -> int:
    """Return the number of the host's GPUs, but at least 2; 2 on a CPU.

    On a host with one GPU the cells of two ranks are skipped, with a message that says why.
    """
    return max(2, torch.cuda.device_count()) if run.device == "cuda" else 2


def rank_counts(run: RunConfig) -> list[int]:
    """Return the numbers among 2, 4 and 8 that `most_ranks` allows; [2] on a CPU."""
    return [ranks for ranks in (2, 4, 8) if ranks <= most_ranks(run)]


def backend_of(run: RunConfig) -> str:
    """Return the backend of torch.distributed: "nccl" on GPUs, "gloo" on a CPU."""
    return "nccl" if run.device == "cuda" else "gloo"


def ranks_case(
    kind: Callable[..., C], run: RunConfig, num_ranks: int, precision: Precision, **more: Any
) -> C:
    """Return a case of class `kind`: a training step on `num_ranks` ranks.

    Defaults are `sized_model`, BATCH and plain attention; `more` overrides them and sets further
    fields.
    """
    usual = {"model": sized_model(run), "batch": BATCH[run.scale], "attention": "reference"}
    return kind(num_ranks=num_ranks, backend=backend_of(run), precision=precision, **(usual | more))


def run_cell(
    function: Callable[[int, int], T], case: Any, run: RunConfig, *, from_scratch: bool = False
) -> list[T]:
    """Run `function(rank, num_ranks)` on the ranks of `case`, and return each rank's result.

    `functools.partial` binds further arguments. With `from_scratch` every rank imports all it
    needs, also on a CPU, for cells that measure it. Raises Unsupported if the host has too few
    GPUs. A rank's error is raised as OutOfMemoryError or Disagreement if it is one of these, else
    as RankError.
    """
    on_gpus = case.backend == "nccl"
    if on_gpus and case.num_ranks > torch.cuda.device_count():
        raise Unsupported(f"needs {case.num_ranks} GPUs, this host has {torch.cuda.device_count()}")
    try:
        return run_ranks(
            function,
            case.num_ranks,
            backend=case.backend,
            device="cuda" if on_gpus else "cpu",
            timeout_s=COLLECTIVE_TIMEOUT_S,
            start_method="forkserver" if run.device == "cpu" and not from_scratch else "spawn",
        )
    except RankError as error:
        first_line = str(error).splitlines()[0]
        out_of_memory = (
            error.error_type in ("OutOfMemoryError", "MemoryError") or CPU_ALLOCATOR in error.reason
        )
        if not out_of_memory and error.error_type != "Disagreement":
            raise
        # The log gets the rank's traceback; the record holds one line only.
        print(error, file=sys.stderr)
        raise (torch.OutOfMemoryError if out_of_memory else Disagreement)(first_line) from error


def agreed_samples(call: Callable[[], object], device: str, budget_ms: float, minimum: int) -> int:
    """Return how often to time `call` on every rank, as planned by rank 0 after one call.

    All ranks must call equally often: an extra call on one rank would wait for ever.
    """
    # Objects that exist now stay alive. Without freeze, the garbage collector would scan them in a
    # timed call, for up to 0.2 s.
    gc.collect()
    gc.freeze()
    dist.barrier()
    planned = plan_samples(time_once(call, device), budget_ms, minimum)
    count = torch.tensor([planned], device="cuda" if device == "cuda" else "cpu")
    dist.broadcast(count, src=0)
    return int(count.item())


def slowest(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return each repetition's largest time over the ranks: a step ends when all are done."""
    return [max(samples) for samples in zip(*samples_by_rank)]


def time_together(call: Callable[[], object], device: str) -> float:
    """Return the milliseconds of one call, which begins when all ranks are ready."""
    synchronize(device)
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def timed_calls(
    call: Callable[[], object], device: str, budget_ms: float, minimum: int
) -> list[float]:
    """Return milliseconds of repeated calls on this rank, as many as `agreed_samples`.

    On a CPU each call begins when all ranks are ready; on a GPU only the first does.
    """
    count = agreed_samples(call, device, budget_ms, minimum)
    dist.barrier()
    if device == "cuda":
        return time_calls(call, device=device, warmup=1, num_samples=count)
    return time_calls(call, device=device, warmup=0, num_samples=count, before=dist.barrier)


def peak_mib(device: str) -> list[float]:
    """Return [peak MiB of CUDA tensors since the statistics were reset]; [] on a CPU."""
    synchronize(device)
    return [torch.cuda.max_memory_allocated() / MIB] if device == "cuda" else []


def trace_on_first(
    call: Callable[[], object], rank: int, device: str, mode: str = "train_step"
) -> Samples:
    """Trace one `call` of `mode` on rank 0, and return its samples of the quantities in TRACED.

    The other ranks make the same two calls without a profiler, and return no samples.
    """

    def together() -> None:
        """Make the call once all ranks are ready."""
        dist.barrier()
        synchronize(device)
        call()

    if rank > 0:
        for _ in range(2):
            together()
            synchronize(device)
        return {}

    lanes = trace_lanes(together, device)
    times = (lanes.span_ms, lanes.communication_ms, lanes.compute_ms, lanes.overlap_ms)
    # rounded to the nanosecond
    found: Samples = {(mode, name): [round(ms, 6)] for name, ms in zip(TIMES, times)}
    for name, intervals in zip(INTERVALS, (lanes.compute, lanes.communication)):
        found[mode, name] = [end for pair in simplify(intervals, MOST_INTERVALS) for end in pair]
    return found


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The samples of one rank, and the error of its check."""

    error: float  # largest error over its bound
    samples: Samples


def measure_step(
    function: Callable[..., RankReport],
    cell: Cell,
    run: RunConfig,
    *,
    from_scratch: bool = False,
) -> Iterator[Sample]:
    """Run `function` on every rank of `cell`, and yield the cell's samples from their reports.

    `function` takes rank, num_ranks, implementation, case and run.
    """
    of_cell = partial(function, implementation=cell.implementation, case=cell.case, run=run)
    yield from report_samples(
        cell.rows, run_cell(of_cell, cell.case, run, from_scratch=from_scratch)
    )


def measure_rank(
    rank: int, num_ranks: int, implementation: str, case: Any, run: RunConfig, traced: Sequence[str]
) -> RankReport:
    """Measure this rank's training steps, and trace one call of each mode in `traced`."""
    # Check.
    error, device = check_wrapper(implementation, case, run, rank), run.device
    release(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    # Memory: one step in parts.
    step = ParallelStep(implementation, case, run, rank)
    moments = [peak_mib(device)]
    step.forward_backward()
    moments.append(peak_mib(device))
    step.optimizer.step()
    moments.append(peak_mib(device))

    # Time: whole steps.
    for _ in range(WARMUP):
        step.train_step()
    found = dict(zip(MOMENTS, moments)) | {name: [mib] for name, mib in step.mib().items()}
    count = agreed_samples(step.train_step, device, BUDGET_MS[run.scale], MIN_SAMPLES)
    found["time"] = [time_together(step.train_step, device) for _ in range(count)]
    found["peak_memory"] = peak_mib(device)
    samples = {("train_step", name): values for name, values in found.items()}

    # Trace.
    for mode in traced:
        samples |= trace_on_first(getattr(step, mode), rank, device, mode)
    return RankReport(error=error, samples=samples)


def report_samples(rows: Iterable[Row], reports: Sequence[RankReport]) -> Iterator[Sample]:
    """Yield the samples of `rows` from the ranks' reports.

    Times and memory are the largest over the ranks; traced quantities are rank 0's. A row that rank
    0 does not report is left out.
    """
    error = max(report.error for report in reports)
    for row in rows:
        key = (row.mode, row.quantity)
        if key in reports[0].samples:
            samples = slowest([report.samples[key] for report in reports if key in report.samples])
            message = (
                ""
                if samples
                else f"rank 0's traced call has no {row.quantity.removesuffix('_intervals')}"
            )
            yield Sample(
                row=row,
                samples=samples,
                message=message,
                error=error if row.quantity == "time" else None,
            )


def step_cell(
    case: Any, implementation: str, memory: Sequence[str], traced: Sequence[str] = ("train_step",)
) -> Cell:
    """Return a cell with the rows of a step's time, of `memory` in MiB, and of the traced modes."""
    rows = [Row("train_step", "time", "ms"), *(Row("train_step", name, "MiB") for name in memory)]
    rows += [Row(mode, name, "ms") for mode in traced for name in TRACED]
    return Cell(case=case, implementation=implementation, rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Traces(Spans):
    """A figure of the lanes of traced calls in the first precision, a panel per implementation.

    A call with a missing lane is not drawn: a single lane would look like no overlap.
    """

    x: str = "start"
    y: str = "lane"
    color: str = "lane"
    facet: str | None = "implementation"

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        """Return one panel a row, of full width and the height of two lanes."""
        return 1, WIDTH, 80

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the interval rows of calls with both lanes, in the first row's precision."""
        rows = super().rows(pick(frame, {"quantity": INTERVALS}))
        if rows.empty:
            return rows
        rows = rows[rows["precision"] == rows["precision"].iloc[0]]
        return rows[
            rows.groupby(["implementation", "case"])["lane"].transform("nunique") == len(INTERVALS)
        ]


def hidden_claim(rows: pd.DataFrame) -> str:
    """Return a title: each implementation's share of traced communication beside compute."""
    shares = []
    for name, lanes in rows.groupby("implementation", sort=False):
        times = {
            lane: list(zip(of[::2], of[1::2])) for lane, of in zip(lanes["lane"], lanes["samples"])
        }
        compute, sent = union(times["compute"]), union(times["communication"])
        both = length(compute) + length(sent) - length(union([*compute, *sent]))
        shares.append(f"{name} {100 * both / length(sent):.0f} %")
    return f"Communication hidden behind compute: {', '.join(shares)}"


def sent_claim(rows: pd.DataFrame) -> str:
    """Return a title: the time of each implementation's traced communication in ms."""
    lanes = rows[rows["lane"] == "communication"]
    times = [
        f"{name} {length(union(zip(samples[::2], samples[1::2]))):.0f} ms"
        for name, samples in zip(lanes["implementation"], lanes["samples"])
    ]
    return f"Communication takes: {', '.join(times)}"


class StepExperiment(Experiment):
    """Base class of experiments on one training step of several ranks."""

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Run `measure_rank` on every rank of the cell and yield its samples."""
        traced = dict.fromkeys(row.mode for row in cell.rows if row.quantity in TRACED)
        return measure_step(partial(measure_rank, traced=tuple(traced)), cell, run)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the column `lane`: "compute" or "communication" for rows of intervals."""
        return {"lane": str(row["quantity"]).removesuffix("_intervals")}

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return the template's functions `efficiency`, `messages` and `drawn_unhidden`.

        `efficiency(name, alone, ...)`: the step time of `alone` on one rank over that of `name` on
        N, with the same sequences per rank; NaN if the two are of different runs.
        `messages(name, over=1, ...)`: the ms of each collective of the traced step, between the
        bounds `over` and `under`.
        `drawn_unhidden(name, ...)`: ms of communication without compute beside it, in the figure,
        which closes short gaps.
        """

        def step(name: str, where: dict[str, Any]) -> dict[str, Any]:
            """Return the only row of the implementation's step time."""
            (found,) = dicts(pick(frame, where | {"implementation": name, "quantity": "time"}))
            return found

        def efficiency(name: str, alone: str = "naive", **where: Any) -> float:
            """Return the step time of `alone` on one rank over that of `name`."""
            return speed(step(name, where), step(alone, where | {"num_ranks": 1}))

        def lane(name: str, quantity: str, where: dict[str, Any]) -> list[Interval]:
            """Return the intervals of one lane of the implementation."""
            (found,) = dicts(pick(frame, where | {"implementation": name, "quantity": quantity}))
            ends = found["samples"]
            return list(zip(ends[::2], ends[1::2]))

        def messages(
            name: str, over: float = 0.0, under: float = math.inf, **where: Any
        ) -> pd.Series:
            """Return the ms of each collective that took between `over` and `under` ms."""
            taken = pd.Series(
                [end - start for start, end in lane(name, "communication_intervals", where)]
            )
            return taken[(taken > over) & (taken < under)]

        def drawn_unhidden(name: str, **where: Any) -> float:
            """Return the ms of communication without compute beside it."""
            compute, communication = (lane(name, quantity, where) for quantity in INTERVALS)
            return length(union([*compute, *communication])) - length(compute)

        return {"efficiency": efficiency, "messages": messages, "drawn_unhidden": drawn_unhidden}
