"""Times of the stages inside one call: mask build, preprocess, forward, dq, dkv, cast.

The code that is measured marks its stages, at no cost without a measurement:

    with stage("dq"):
        launch_dq(...)

A measurement returns samples of each stage and of the whole, in milliseconds:

    samples = time_stages(lambda: attention(q, k, v).backward(grad), device="cuda")
    samples["forward"], samples["dq"], samples[TOTAL]

On CUDA the times lie between events on the stream, so that nothing waits inside the call, and each
stage is an NVTX range. The GPU overwrites its L2 cache ahead of each call until the host has queued
the call's kernels: otherwise a stage of a short call would take as long as its launches do. On CPU
times are wall clock. Stages add up: time in an inner stage is not the outer one's, and a stage
entered twice in a call is summed. Marks may stand in code that autograd runs on its own thread. One
measurement at a time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from cs336_systems.measure.ranges import named_range
from cs336_systems.measure.timing import CACHE_FLUSH_BYTES, synchronize

# Names of stages in tables, in order.
STAGES = ("mask_build", "preprocess", "forward", "dq", "dkv", "cast")
TOTAL = "total"
DEFAULT_SAMPLES = 10
FLUSH_MS = 0.03  # what overwriting CACHE_FLUSH_BYTES takes at least, on any present GPU (8 TB/s)
MAX_FLUSHES = 1000  # the driver queues about as many kernels before it makes the host wait


class _Timer:
    """The open stages of one call, and the marks of all calls: which stage runs from when on."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.open: list[str] = []  # the innermost last
        self.marks: list[tuple[str, Any]] = []  # of the current call
        self.calls: list[list[tuple[str, Any]]] = []

    def mark(self) -> None:
        """Record that the innermost open stage, if any, runs from now on."""
        now: Any = time.perf_counter()
        if self.device == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((self.open[-1] if self.open else "", now))

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` once between two marks, and keep the call's marks."""
        self.mark()
        function()
        self.mark()
        assert not self.open, "a stage was left open"
        self.calls.append(self.marks)
        self.marks = []

    def samples_ms(self) -> dict[str, list[float]]:
        """Return the milliseconds of each stage, and of the whole as TOTAL: one sample a call."""
        synchronize(self.device)

        def elapsed_ms(begin: Any, end: Any) -> float:
            return begin.elapsed_time(end) if self.device == "cuda" else (end - begin) * 1e3

        samples = {
            name: [0.0] * len(self.calls) for marks in self.calls for name, _ in marks if name
        }
        for number, marks in enumerate(self.calls):
            for (name, begin), (_, end) in pairwise(marks):
                if name:
                    samples[name][number] += elapsed_ms(begin, end)
        return samples | {TOTAL: [elapsed_ms(marks[0][1], marks[-1][1]) for marks in self.calls]}


_NO_STAGE = nullcontext()
_active: _Timer | None = None  # module-wide, not context-local: autograd's thread must see it


def stage(name: str) -> AbstractContextManager[None]:
    """Return a context that is the stage `name` of the call being timed.

    Without a measurement the context does nothing.
    """
    timer = _active
    return _NO_STAGE if timer is None else _timed_stage(timer, name)


def stages_are_timed() -> bool:
    """Return whether a measurement is on, in which code must not go around its stages."""
    return _active is not None


@contextmanager
def _timed_stage(timer: _Timer, name: str) -> Iterator[None]:
    """Mark begin and end of stage `name` around the context, which is also a named range."""
    with named_range(f"stage:{name}"):
        timer.open.append(name)
        timer.mark()
        try:
            yield
        finally:
            timer.open.pop()
            timer.mark()


def time_stages(
    call: Callable[[], object], *, device: str, num_samples: int = DEFAULT_SAMPLES, warmup: int = 2
) -> dict[str, list[float]]:
    """Return milliseconds of every stage that `call` marks, and of the whole call as `TOTAL`.

    There is one sample a call, after `warmup` calls; a stage that a call does not reach has a
    sample of 0 for it. Raises RuntimeError inside of another measurement.
    """
    global _active
    if _active is not None:
        raise RuntimeError("stages are being timed already: one measurement at a time")
    for _ in range(warmup):
        call()
    synchronize(device)
    flushes = 0
    _active = timer = _Timer(device)
    try:
        if device == "cuda":
            # How long the host takes to queue a call. The first of two may compile kernels that are
            # launched only while stages are timed.
            for _ in range(2):
                synchronize(device)
                begin = time.perf_counter()
                timer.call(call)
                host_ms = (time.perf_counter() - begin) * 1e3
                # enough to keep the GPU busy for 1.5 times as long
                flushes = min(MAX_FLUSHES, 1 + int(1.5 * host_ms / FLUSH_MS))
            timer.calls.clear()

        cache = torch.empty(CACHE_FLUSH_BYTES if flushes else 0, dtype=torch.int8, device=device)
        for _ in range(num_samples):
            for _ in range(flushes):
                cache.zero_()
            timer.call(call)
    finally:
        _active = None
    return timer.samples_ms()
