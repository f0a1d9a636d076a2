"""Times of the stages inside one call: mask build, preprocess, forward, dq, dkv, cast.

The code that is measured marks its stages, at no cost while nobody measures:

    with stage("dq"):
        launch_dq(...)

and whoever measures gets samples of each stage and of the whole, in milliseconds:

    samples = time_stages(lambda: attention(q, k, v).backward(grad), device="cuda")
    samples["forward"], samples["dq"], samples[TOTAL]

On CUDA the times lie between events on the stream, so that nothing waits inside the call, and each stage is an NVTX
range. The GPU overwrites its L2 cache ahead of each call until the host has queued the call's kernels: otherwise a
stage of a short call would take as long as its launches do. On CPU times are wall clock. Stages add up: time in an
inner stage is not the outer one's, and a stage entered twice in a call is summed. Marks may stand in code that autograd
runs on its own thread. One measurement at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from cs336_systems.measure.ranges import named_range
from cs336_systems.measure.timing import CACHE_FLUSH_BYTES, synchronize

STAGES = ("mask_build", "preprocess", "forward", "dq", "dkv", "cast")  # the names that tables know, in order
TOTAL = "total"
DEFAULT_SAMPLES = 10
FLUSH_MS = 0.03  # what overwriting CACHE_FLUSH_BYTES takes at least, on any present GPU (8 TB/s)
MAX_FLUSHES = 1000  # the driver queues about as many kernels before it makes the host wait


class _Timer:
    """The open stages of one call and the finished segments of all calls."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.open: list[tuple[str, Any]] = []  # name and beginning of the running segment, the innermost last
        self.segments: list[tuple[str, Any, Any]] = []  # of the current call
        self.calls: list[list[tuple[str, Any, Any]]] = []

    def now(self) -> Any:
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def enter(self, name: str) -> None:
        now = self.now()
        if self.open:  # the outer stage pauses
            outer, begin = self.open[-1]
            self.segments.append((outer, begin, now))
        self.open.append((name, now))

    def leave(self) -> None:
        now = self.now()
        name, begin = self.open.pop()
        self.segments.append((name, begin, now))
        if self.open:
            self.open[-1] = (self.open[-1][0], now)

    def call(self, function: Callable[[], object]) -> None:
        begin = self.now()
        function()
        self.segments.append((TOTAL, begin, self.now()))
        assert not self.open, "a stage was left open"
        self.calls.append(self.segments)
        self.segments = []

    def samples_ms(self) -> dict[str, list[float]]:
        synchronize(self.device)

        def elapsed_ms(begin: Any, end: Any) -> float:
            return begin.elapsed_time(end) if self.device == "cuda" else (end - begin) * 1e3

        names = dict.fromkeys(name for segments in self.calls for name, _, _ in segments)
        return {
            name: [sum(elapsed_ms(*ends) for other, *ends in segments if other == name) for segments in self.calls]
            for name in names
        }


_NO_STAGE = nullcontext()
_active: _Timer | None = None  # module-wide, not context-local: autograd's thread must see it


def stage(name: str) -> AbstractContextManager[None]:
    """What runs inside is the stage `name` of the call being timed; without a measurement nothing happens."""
    timer = _active
    return _NO_STAGE if timer is None else _timed_stage(timer, name)


def stages_are_timed() -> bool:
    """Whether a measurement is on: code that has a way around its stages must not take it."""
    return _active is not None


@contextmanager
def _timed_stage(timer: _Timer, name: str) -> Iterator[None]:
    with named_range(f"stage:{name}"):
        timer.enter(name)
        try:
            yield
        finally:
            timer.leave()


def time_stages(
    call: Callable[[], object],
    *,
    device: str,
    num_samples: int = DEFAULT_SAMPLES,
    warmup: int = 2,
    before: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of every stage that `call` marks, and of the whole call as `TOTAL`: one sample a call.

    `before` runs ahead of every call, outside of the timed part. A stage that a call does not reach has a sample of 0
    for it. Raises ValueError on fewer than one sample, and RuntimeError inside of another measurement.
    """
    global _active
    if num_samples < 1 or warmup < 0:
        raise ValueError(f"num_samples must be positive and warmup not negative, got {num_samples} and {warmup}")
    if _active is not None:
        raise RuntimeError("stages are being timed already: one measurement at a time")

    def prepare() -> None:
        if before is not None:
            before()

    for _ in range(warmup):
        prepare()
        call()
    synchronize(device)
    flushes = 0
    _active = timer = _Timer(device)
    try:
        if device == "cuda":
            for _ in range(2):  # the first may compile what is launched only while stages are timed
                prepare()
                synchronize(device)
                begin = time.perf_counter()
                timer.call(call)
                host_ms = (time.perf_counter() - begin) * 1e3
                flushes = min(MAX_FLUSHES, 1 + int(1.5 * host_ms / FLUSH_MS))  # for half as long again
            timer.calls.clear()
        cache = torch.empty(CACHE_FLUSH_BYTES if flushes else 0, dtype=torch.int8, device=device)
        for _ in range(num_samples):
            prepare()
            for _ in range(flushes):
                cache.zero_()
            timer.call(call)
    finally:
        _active = None
    return timer.samples_ms()
