"""Pipeline parallelism on paper: GPipe, 1F1B and interleaved 1F1B, simulated and in closed form.

    pipeline = Pipeline(num_stages=4, num_microbatches=8)
    run = simulate_pipeline(pipeline, one_forward_one_backward(pipeline))
    run.makespan, run.bubble_fraction, run.peak_activations   # 33.0, 0.27, [4.0, 3.0, 2.0, 1.0]

The model is cut into p stages, one a device, and a batch into m micro-batches. The backward of a
micro-batch passes through the stages in reverse. Interleaving cuts the model into p·v parts, its
virtual stages, and gives each stage v of them as model chunks: chunk c of stage s is part c·p + s.

A schedule is the order of the operations on each stage, and nothing else. Start times follow from
the dependencies: an operation starts when its stage is free and its input has arrived. Bubble is
the time during which a stage is idle. Times are in any one unit, here that of a stage's forward.

GPipe is arXiv:1811.06965. 1F1B (PipeDream-Flush) and its interleaved form are section 2.2 of
arXiv:2104.04473, whose order of operations is Megatron-LM's. Not modelled: contention for links,
parts of unequal time, the optimizer, recomputation of activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

from cs336_systems.config import FieldError, require_positive


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline and what passes through it in one training step.

    Raises FieldError, a ValueError with the field's name, for a count below 1 and for a time that
    is not positive; `message_time` may be 0.
    """

    num_stages: int  # p: devices
    num_microbatches: int  # m: of one batch, after which the pipeline is flushed
    num_chunks: int = 1  # v: model chunks of a stage
    forward_time: float = 1.0  # of one micro-batch in one stage, all of its chunks together
    backward_time: float = 2.0
    message_time: float = 0.0  # from the end of an operation until its result is on the next stage

    def __post_init__(self) -> None:
        require_positive(self, ["num_stages", "num_microbatches", "num_chunks"])
        for field in ("forward_time", "backward_time"):
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise FieldError(
                    field, f"must be positive and finite, got {value!r}", owner="Pipeline"
                )
        if not 0 <= self.message_time < math.inf:
            raise FieldError(
                "message_time",
                f"must be finite and not negative, got {self.message_time!r}",
                owner="Pipeline",
            )

    @property
    def ideal_time(self) -> float:
        """Return the time in which a stage that never waits computes the batch: m·(f + b)."""
        return self.num_microbatches * (self.forward_time + self.backward_time)


class Operation(NamedTuple):
    """The forward or the backward of one micro-batch in one model chunk of a stage."""

    mode: str  # "forward" or "backward"
    microbatch: int  # from 0
    chunk: int  # from 0, in the order of the forward


class Span(NamedTuple):
    """An operation and the time during which its stage computes it."""

    operation: Operation
    start: float
    end: float


# [stage]: its operations in their order
Orders = Sequence[Sequence[Operation]]


# Schedules


def gpipe(pipeline: Pipeline) -> list[list[Operation]]:
    """Return each stage's operations under GPipe: all forwards, then all backwards.

    Source: arXiv:1811.06965, with the backwards in the order of the micro-batches. Raises
    FieldError unless num_chunks is 1.
    """
    _require_one_chunk(pipeline, "GPipe")
    forwards, backwards = _passes(pipeline)
    return [_alternate(forwards, backwards, len(forwards)) for _ in range(pipeline.num_stages)]


def one_forward_one_backward(pipeline: Pipeline) -> list[list[Operation]]:
    """Return each stage's operations under 1F1B, also called PipeDream-Flush.

    Stage s runs p - 1 - s forwards as its warm-up, then one forward and one backward by turns, then
    the backwards that are left: arXiv:2104.04473, section 2.2.1. Raises FieldError unless
    num_chunks is 1.
    """
    _require_one_chunk(pipeline, "1F1B")
    forwards, backwards = _passes(pipeline)
    return [
        _alternate(forwards, backwards, num_warmup=pipeline.num_stages - 1 - stage)
        for stage in range(pipeline.num_stages)
    ]


def interleaved(pipeline: Pipeline) -> list[list[Operation]]:
    """Return each stage's operations under interleaved 1F1B, Megatron-LM's virtual stages.

    Groups of p micro-batches pass through chunk 0, then through chunk 1, and so on; backwards begin
    with the last chunk. The warm-up of stage s has 2·(p - 1 - s) + (v - 1)·p forwards of chunks:
    arXiv:2104.04473, section 2.2.2. Raises FieldError unless num_chunks is at least 2 and
    num_microbatches a multiple of num_stages.
    """
    num_stages, num_chunks = pipeline.num_stages, pipeline.num_chunks
    if num_chunks < 2:
        raise FieldError(
            "num_chunks",
            f"must be at least 2 for interleaved 1F1B, got {num_chunks}",
            owner="Pipeline",
        )
    if pipeline.num_microbatches % num_stages:
        raise FieldError(
            "num_microbatches",
            f"must be a multiple of num_stages={num_stages} for interleaved 1F1B, "
            f"got {pipeline.num_microbatches}",
            owner="Pipeline",
        )
    forwards, backwards = _passes(pipeline)
    whole_chunks = (num_chunks - 1) * num_stages
    return [
        _alternate(forwards, backwards, num_warmup=2 * (num_stages - 1 - stage) + whole_chunks)
        for stage in range(num_stages)
    ]


SCHEDULES: dict[str, Callable[[Pipeline], list[list[Operation]]]] = {
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "interleaved 1F1B": interleaved,
}


def _require_one_chunk(pipeline: Pipeline, schedule: str) -> None:
    """Raise FieldError unless each stage has one chunk."""
    if pipeline.num_chunks != 1:
        raise FieldError(
            "num_chunks",
            f"must be 1 for {schedule}, got {pipeline.num_chunks}",
            owner="Pipeline",
        )


def _passes(pipeline: Pipeline) -> tuple[list[Operation], list[Operation]]:
    """Return all forwards and all backwards of a stage, each in the order of its group and chunk.

    A group is p micro-batches. With one chunk this is the order of the micro-batches.
    """
    forwards, backwards = [], []
    num_stages, num_microbatches = pipeline.num_stages, pipeline.num_microbatches
    for first in range(0, num_microbatches, num_stages):
        for chunk in range(pipeline.num_chunks):
            for microbatch in range(first, min(first + num_stages, num_microbatches)):
                forwards.append(Operation("forward", microbatch, chunk))
                last_first = pipeline.num_chunks - 1 - chunk
                backwards.append(Operation("backward", microbatch, last_first))
    return forwards, backwards


def _alternate(
    forwards: list[Operation], backwards: list[Operation], num_warmup: int
) -> list[Operation]:
    """Return the warm-up's forwards, one forward and one backward by turns, and the rest."""
    steady = list(chain.from_iterable(zip(forwards[num_warmup:], backwards)))
    return forwards[:num_warmup] + steady + backwards[len(steady) // 2 :]


# Simulation


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """The lanes of a simulated step, one a stage, and what follows from them."""

    pipeline: Pipeline
    lanes: list[list[Span]]  # [stage]: its spans in their order
    num_messages: int  # activations and gradients sent from one stage to another

    @property
    def makespan(self) -> float:
        """Return the time from the start of the first operation to the end of the last one."""
        return max(lane[-1].end for lane in self.lanes)

    @property
    def bubble_fraction(self) -> float:
        """Return the idle share of the whole time, which is the same on every stage."""
        return 1 - self.pipeline.ideal_time / self.makespan

    @property
    def bubble_over_ideal(self) -> float:
        """Return the idle time of a stage over the time that it computes, as the papers count it."""
        return self.makespan / self.pipeline.ideal_time - 1

    @property
    def peak_activations(self) -> list[float]:
        """Return the most activations that each stage holds at once, in micro-batches.

        A chunk's activations are held from the start of its forward to the end of its backward;
        they are 1/v of what one micro-batch leaves in a whole stage. Inputs that have arrived and
        wait for their forward are not counted.
        """
        peaks = []
        for lane in self.lanes:
            held = peak = 0
            for span in lane:
                held += 1 if span.operation.mode == "forward" else -1
                peak = max(peak, held)
            peaks.append(peak / self.pipeline.num_chunks)
        return peaks


def simulate_pipeline(pipeline: Pipeline, orders: Orders) -> PipelineRun:
    """Return the run in which each stage computes its operations in the order of `orders[stage]`.

    An operation starts when its stage is free and its input has arrived. The input of a forward is
    the output of the virtual stage before it, that of a backward the gradient from the one behind
    it; in the last virtual stage it is the forward's own result. Messages take `message_time` and
    do not occupy the stages.

    Raises ValueError unless `orders` holds each operation of each stage once, and if the order
    deadlocks: every stage that is not done waits for another's result.
    """
    _check_orders(pipeline, orders)
    num_stages = pipeline.num_stages
    times = {"forward": pipeline.forward_time, "backward": pipeline.backward_time}
    ends: dict[tuple[int, Operation], float] = {}  # (stage, operation) -> when it ends
    lanes: list[list[Span]] = [[] for _ in range(num_stages)]
    num_messages = 0

    # Start times depend on the orders alone. So the stages may be advanced in turn, each as far as
    # the results that it needs are known, until no stage advances.
    advances = True
    while advances:
        advances = False
        for stage, (order, lane) in enumerate(zip(orders, lanes)):
            while len(lane) < len(order):
                operation = order[len(lane)]
                start = lane[-1].end if lane else 0.0
                source = _input_of(pipeline, stage, operation)
                if source is not None:
                    if source not in ends:
                        break
                    arrives = ends[source]
                    if source[0] != stage:
                        arrives += pipeline.message_time
                        num_messages += 1
                    start = max(start, arrives)

                end = start + times[operation.mode] / pipeline.num_chunks
                ends[stage, operation] = end
                lane.append(Span(operation, start, end))
                advances = True

    waiting = [
        f"stage {stage} at {_name(order[len(lane)])}"
        for stage, (order, lane) in enumerate(zip(orders, lanes))
        if len(lane) < len(order)
    ]
    if waiting:
        raise ValueError(f"orders deadlock: {', '.join(waiting)}")
    return PipelineRun(pipeline=pipeline, lanes=lanes, num_messages=num_messages)


def _input_of(pipeline: Pipeline, stage: int, operation: Operation) -> tuple[int, Operation] | None:
    """Return (stage, operation) whose result `operation` needs; None for the batch itself."""
    virtual = operation.chunk * pipeline.num_stages + stage
    last = pipeline.num_stages * pipeline.num_chunks - 1
    if operation.mode == "backward" and virtual == last:
        return stage, operation._replace(mode="forward")
    if operation.mode == "forward" and virtual == 0:
        return None
    chunk, of_stage = divmod(
        virtual + (1 if operation.mode == "backward" else -1), pipeline.num_stages
    )
    return of_stage, operation._replace(chunk=chunk)


def _check_orders(pipeline: Pipeline, orders: Orders) -> None:
    """Raise ValueError unless `orders` holds each operation of each stage exactly once."""
    if len(orders) != pipeline.num_stages:
        raise ValueError(
            f"orders must have num_stages={pipeline.num_stages} lists, got {len(orders)}"
        )
    forwards, backwards = _passes(pipeline)
    expected = sorted(forwards + backwards)
    for stage, order in enumerate(orders):
        if sorted(order) != expected:
            raise ValueError(
                f"orders[{stage}] must hold the forward and the backward of each micro-batch and "
                f"chunk once, {len(expected)} operations"
            )


def _name(operation: Operation) -> str:
    """Return the words for an operation in a message."""
    return f"{operation.mode} {operation.microbatch} of chunk {operation.chunk}"


# Closed forms. Those of time hold without messages.


def bubble_over_ideal(pipeline: Pipeline) -> float:
    """Return the bubble over the ideal time: (p - 1)/(v·m), with v = 1 for GPipe and 1F1B.

    It depends neither on the forward's nor on the backward's time: arXiv:2104.04473, section 2.2.
    """
    return (pipeline.num_stages - 1) / (pipeline.num_chunks * pipeline.num_microbatches)


def bubble_fraction(pipeline: Pipeline) -> float:
    """Return the bubble's share of the whole time: (p - 1)/(v·m + p - 1)."""
    idle = pipeline.num_stages - 1
    return idle / (pipeline.num_chunks * pipeline.num_microbatches + idle)


def fewest_microbatches(num_stages: int, *, below: float, num_chunks: int = 1) -> int:
    """Return the fewest micro-batches with which the bubble is less than `below` of the whole time.

    With more than one chunk the number is a multiple of num_stages, as interleaved 1F1B needs it.
    Raises FieldError for a count below 1 and a `below` outside (0, 1].
    """
    if not 0 < below <= 1:
        raise FieldError("below", f"must be in (0, 1], got {below!r}")
    pipeline = Pipeline(num_stages=num_stages, num_microbatches=1, num_chunks=num_chunks)
    idle = pipeline.num_stages - 1
    step = num_stages if num_chunks > 1 else 1
    return next(m for m in count(step, step) if idle / (num_chunks * m + idle) < below)


def peak_activations(schedule: str, pipeline: Pipeline) -> list[float]:
    """Return the most activations that each stage holds under a schedule, in micro-batches.

    m under GPipe, min(m, p - s) on stage s under 1F1B. Under interleaved 1F1B a stage holds its
    warm-up and one chunk more, min(v·m, 2·(p - 1 - s) + (v - 1)·p + 1) chunks of 1/v micro-batch
    each; on stage 0 that is p + (p - 1)/v at most, the factor 1 + (p - 1)/(p·v) of
    arXiv:2205.05198. Raises ValueError for a schedule that is not in SCHEDULES.
    """
    p, m, v = pipeline.num_stages, pipeline.num_microbatches, pipeline.num_chunks
    if schedule == "GPipe":
        return [float(m)] * p
    if schedule == "1F1B":
        return [float(min(m, p - stage)) for stage in range(p)]
    if schedule == "interleaved 1F1B":
        return [min(v * m, 2 * (p - 1 - stage) + (v - 1) * p + 1) / v for stage in range(p)]
    raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")


def num_messages(pipeline: Pipeline) -> int:
    """Return the messages of a step: 2·m·(p·v - 1) between stages, 0 with one stage.

    Each is one micro-batch's activations or their gradient at the border of two virtual stages.
    """
    borders = pipeline.num_stages * pipeline.num_chunks - 1
    return 2 * pipeline.num_microbatches * borders if pipeline.num_stages > 1 else 0
