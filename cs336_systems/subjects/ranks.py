"""What experiments of several ranks share: running them, timing them together, tracing one, and
drawing its lanes.

Ranks are children of the measuring process and die with it. `run_cell` is `run_ranks` with a rank's
error told as the cell's: out of memory, wrong result, or failed. The model is xl, or a narrow proxy
of it where there is no time.

A training step goes the same way under every wrapper, ours and PyTorch's (`measure_rank`). Phases
on every rank:

- check the wrapper (parallel_step.py), then build it anew;
- one step in parts: memory after construction, before and after the optimizer;
- whole steps, which all ranks begin together, and which are over when the last rank is done;
- traced calls, on rank 0.
"""

import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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

# ranks differ in the time that they take to compile, allocate and load
COLLECTIVE_TIMEOUT_S = 240.0
BATCH = {"tiny": 1, "smoke": 2, "handout": 4}  # sequences of each rank; the last as the handout's
BUDGET_MS = {"tiny": 100.0, "smoke": 500.0, "handout": 2000.0}  # of timed steps a cell
MIN_SAMPLES = 5
WARMUP = 2  # after the step in parts, and before the one that plans how many are timed
# peaks so far, from CUDA's allocator
MOMENTS = ("memory_after_init", "memory_before_step", "memory_after_step")
# of one traced call of rank 0, in ms
TIMES = ("traced_time", "communication_time", "compute_time", "overlap_time")
# start, end, start, end, ...: what a figure can show
INTERVALS = ("compute_intervals", "communication_intervals")
TRACED = (*TIMES, *INTERVALS)
Samples = dict[tuple[str, str], list[float]]  # of one rank, by mode and quantity
C = TypeVar("C")
MOST_INTERVALS = 300  # of a lane in a record: more cannot be told apart in a figure


def sized_model(
    run: RunConfig, size: str = "xl", contexts: tuple[int, int] = (16, 64)
) -> ModelConfig:
    """The model at handout scale, below it a narrow proxy of so few tokens, at tiny and at smoke
    scale.
    """
    if run.scale == "handout":
        return MODEL_SIZES[size]
    tiny = run.scale == "tiny"
    proxy = proxy_model(size, 64 if tiny else 128)
    return replace(
        proxy, context_length=contexts[0 if tiny else 1], vocab_size=256 if tiny else 1000
    )


def most_ranks(run: RunConfig) -> int:
    """All GPUs of the host; two processes on a CPU, and where one GPU is, whose cells then say what
    lacks.
    """
    return max(2, torch.cuda.device_count()) if run.device == "cuda" else 2


def rank_counts(run: RunConfig) -> list[int]:
    """2, 4 and 8 ranks, as far as there are GPUs; on a CPU 2."""
    return [ranks for ranks in (2, 4, 8) if ranks <= most_ranks(run)]


def backend_of(run: RunConfig) -> str:
    return "nccl" if run.device == "cuda" else "gloo"


def ranks_case(
    kind: Callable[..., C], run: RunConfig, num_ranks: int, precision: Precision, **more: Any
) -> C:
    """A case of a training step on `num_ranks`, of xl under plain attention where `more` does not
    say otherwise.
    """
    usual = {"model": sized_model(run), "batch": BATCH[run.scale], "attention": "reference"}
    return kind(num_ranks=num_ranks, backend=backend_of(run), precision=precision, **(usual | more))


def run_cell(
    function: Callable[..., Any], case: Any, run: RunConfig, *args: Any, from_scratch: bool = False
) -> list[Any]:
    """What `function(rank, num_ranks, *args)` returns on each rank, or the exception that is the
    cell's outcome.

    `from_scratch`: also on a CPU every rank imports all it needs, where that is part of what is
    measured.
    """
    on_gpus = case.backend == "nccl"
    if on_gpus and case.num_ranks > torch.cuda.device_count():
        raise Unsupported(f"needs {case.num_ranks} GPUs, this host has {torch.cuda.device_count()}")
    try:
        return run_ranks(
            function,
            case.num_ranks,
            *args,
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
        # with the rank's traceback, for the log: the record takes one line
        print(error, file=sys.stderr)
        raise (torch.OutOfMemoryError if out_of_memory else Disagreement)(first_line) from error


def agreed_samples(call: Callable[[], object], device: str, budget_ms: float, minimum: int) -> int:
    """How often to time `call`: rank 0's plan, on every rank, since one call more on one rank would
    wait for ever.

    What is there by now stays: left to the garbage collector it would be gone through in a timed
    call, for up to 0.2 s.
    """
    gc.collect()
    gc.freeze()
    dist.barrier()
    planned = plan_samples(time_once(call, device), budget_ms, minimum)
    count = torch.tensor([planned], device="cuda" if device == "cuda" else "cpu")
    dist.broadcast(count, src=0)
    return int(count.item())


def slowest(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of each repetition the time of the rank that took longest: a step is over when all are done."""
    return [max(samples) for samples in zip(*samples_by_rank)]


def time_together(call: Callable[[], object], device: str) -> float:
    """Milliseconds of one call that no rank begins before all are ready."""
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
    """Milliseconds on this rank of as many calls as all agree on; on a CPU each begins when all are
    ready.
    """
    count = agreed_samples(call, device, budget_ms, minimum)
    dist.barrier()
    if device == "cuda":
        return time_calls(call, device=device, warmup=1, num_samples=count)
    return time_calls(call, device=device, warmup=0, num_samples=count, before=dist.barrier)


def peak_mib(device: str) -> list[float]:
    """The most that tensors have occupied since the statistics were reset, as a sample; on a CPU
    nobody counts.
    """
    synchronize(device)
    return [torch.cuda.max_memory_allocated() / MIB] if device == "cuda" else []


def trace_on_first(
    call: Callable[[], object], rank: int, device: str, mode: str = "train_step"
) -> Samples:
    """What rank 0's lanes of one call of `mode` give of TRACED.

    The others make the same two calls without a profiler, and have nothing to say.
    """

    def together() -> None:
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
    # to the nanosecond
    found: Samples = {(mode, name): [round(ms, 6)] for name, ms in zip(TIMES, times)}
    for name, intervals in zip(INTERVALS, (lanes.compute, lanes.communication)):
        found[mode, name] = [end for pair in simplify(intervals, MOST_INTERVALS) for end in pair]
    return found


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank measured."""

    error: float  # over its bound
    samples: Samples


def measure_step(
    function: Callable[..., RankReport],
    cell: Cell,
    run: RunConfig,
    *more: Any,
    from_scratch: bool = False,
) -> Iterator[Sample]:
    """What `function` of (rank, num_ranks, implementation, case, run, *more) reports on every rank
    of `cell`.
    """
    args = (cell.implementation, cell.case, run, *more)
    yield from report_samples(
        cell.rows, run_cell(function, cell.case, run, *args, from_scratch=from_scratch)
    )


def measure_rank(
    rank: int, num_ranks: int, implementation: str, case: Any, run: RunConfig, traced: Sequence[str]
) -> RankReport:
    """One rank's training steps, and the calls of the modes in `traced`."""
    error, device = check_wrapper(implementation, case, run, rank), run.device
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
    found = dict(zip(MOMENTS, moments)) | {name: [mib] for name, mib in step.mib().items()}
    count = agreed_samples(step.train_step, device, BUDGET_MS[run.scale], MIN_SAMPLES)
    found["time"] = [time_together(step.train_step, device) for _ in range(count)]
    found["peak_memory"] = peak_mib(device)
    samples = {("train_step", name): values for name, values in found.items()}
    for mode in traced:
        samples |= trace_on_first(getattr(step, mode), rank, device, mode)
    return RankReport(error=error, samples=samples)


def report_samples(rows: Iterable[Row], reports: Sequence[RankReport]) -> Iterator[Sample]:
    """What the ranks' reports give of `rows`: the slowest rank's times, the most memory, and what
    rank 0 traced.
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
    """The cell of a step's time, those quantities of `memory`, and the traced modes."""
    rows = [Row("train_step", "time", "ms"), *(Row("train_step", name, "MiB") for name in memory)]
    rows += [Row(mode, name, "ms") for mode in traced for name in TRACED]
    return Cell(case=case, implementation=implementation, rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Traces(Spans):
    """The lanes of traced calls, a panel an implementation: of the first precision that there is.

    A call of which one lane is missing is not drawn: half of it would look like no overlap.
    """

    x: str = "start"
    y: str = "lane"
    color: str = "lane"
    facet: str | None = "implementation"

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        return 1, WIDTH, 80  # two lanes

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        rows = super().rows(pick(frame, {"quantity": INTERVALS}))
        if rows.empty:
            return rows
        rows = rows[rows["precision"] == rows["precision"].iloc[0]]
        return rows[
            rows.groupby(["implementation", "case"])["lane"].transform("nunique") == len(INTERVALS)
        ]


def hidden_claim(rows: pd.DataFrame) -> str:
    """How much of the traced communication of each implementation is beside compute."""
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
    """How long the traced communication of each implementation takes."""
    lanes = rows[rows["lane"] == "communication"]
    times = [
        f"{name} {length(union(zip(samples[::2], samples[1::2]))):.0f} ms"
        for name, samples in zip(lanes["implementation"], lanes["samples"])
    ]
    return f"Communication takes: {', '.join(times)}"


class StepExperiment(Experiment):
    """Base of the experiments of one training step on several ranks."""

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        traced = dict.fromkeys(row.mode for row in cell.rows if row.quantity in TRACED)
        return measure_step(measure_rank, cell, run, tuple(traced))

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """The `lane` of intervals: compute or communication."""
        return {"lane": str(row["quantity"]).removesuffix("_intervals")}

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """`efficiency(name, alone, ...)`: the step of one rank over that of N, each with as many
        sequences.

        NaN where the two are not of one run. `messages(name, over=1, ...)`: how long each
        collective of the traced step took, in ms, those over and under a bound.
        `drawn_unhidden(name, ...)`: communication beside no compute in the figure, which closes
        short gaps, in ms.
        """

        def step(name: str, where: dict[str, Any]) -> dict[str, Any]:
            (found,) = dicts(pick(frame, where | {"implementation": name, "quantity": "time"}))
            return found

        def efficiency(name: str, alone: str = "naive", **where: Any) -> float:
            return speed(step(name, where), step(alone, where | {"num_ranks": 1}))

        def lane(name: str, quantity: str, where: dict[str, Any]) -> list[Interval]:
            (found,) = dicts(pick(frame, where | {"implementation": name, "quantity": quantity}))
            ends = found["samples"]
            return list(zip(ends[::2], ends[1::2]))

        def messages(
            name: str, over: float = 0.0, under: float = math.inf, **where: Any
        ) -> pd.Series:
            taken = pd.Series(
                [end - start for start, end in lane(name, "communication_intervals", where)]
            )
            return taken[(taken > over) & (taken < under)]

        def drawn_unhidden(name: str, **where: Any) -> float:
            compute, communication = (lane(name, quantity, where) for quantity in INTERVALS)
            return length(union([*compute, *communication])) - length(compute)

        return {"efficiency": efficiency, "messages": messages, "drawn_unhidden": drawn_unhidden}
