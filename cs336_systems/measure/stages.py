"""Times of the stages inside one call: mask build, preprocess, forward, dq, dkv, cast.

The code that is measured marks its stages, at no cost while nobody measures:

    with stage("dq"):
        launch_dq(...)

and whoever measures gets samples of each stage and of the whole, in milliseconds:

    samples = time_stages(lambda: attention(q, k, v).backward(grad), device="cuda")
    samples["forward"], samples["dq"], samples[TOTAL], unaccounted(samples)

On CUDA the times lie between events on the stream, so that nothing waits inside the call, and each stage is an NVTX
range. The GPU overwrites its L2 cache ahead of each call until the host has queued the call's kernels: otherwise a
stage of a short call would take as long as its launches do. On CPU times are wall clock. Stages add up: time in an
inner stage is not the outer one's, a stage entered twice in a call is summed, and `unaccounted` says which share of the
whole no stage has. Marks may stand in code that autograd runs on its own thread. One measurement at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from cs336_systems.measure.ranges import named_range
from cs336_systems.measure.samples import summarize
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
        names = dict.fromkeys(name for segments in self.calls for name, _, _ in segments)
        return {
            name: [
                sum(self._elapsed_ms(begin, end) for other, begin, end in segments if other == name)
                for segments in self.calls
            ]
            for name in names
        }

    def _elapsed_ms(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self.device == "cuda" else (end - begin) * 1e3


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

    prepare = before or _nothing
    for _ in range(warmup):
        prepare()
        call()
    occupy = _nothing
    synchronize(device)
    _active = timer = _Timer(device)
    try:
        if device == "cuda":
            for _ in range(2):  # the first may compile what is launched only while stages are timed
                prepare()
                host_ms = _queue(timer, call)
            occupy = _occupier(host_ms)
        for _ in range(num_samples):
            prepare()
            occupy()
            timer.call(call)
    finally:
        _active = None
    return timer.samples_ms()


def _nothing() -> None:
    """Ahead of a call that wants no preparing."""


def _queue(timer: _Timer, call: Callable[[], object]) -> float:
    """Milliseconds that the host takes to queue a call, of which `timer` keeps nothing."""
    synchronize("cuda")
    begin = time.perf_counter()
    timer.call(call)
    host_ms = (time.perf_counter() - begin) * 1e3
    timer.calls.clear()
    return host_ms


def _occupier(host_ms: float) -> Callable[[], None]:
    """What keeps the GPU busy for as long as the host takes to queue a call."""
    flushes = flushes_to_cover(host_ms)
    cache = torch.empty(CACHE_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def occupy() -> None:
        for _ in range(flushes):
            cache.zero_()

    return occupy


def flushes_to_cover(host_ms: float) -> int:
    """How often to overwrite the cache so that a host which takes `host_ms`, or half as long again, is ahead."""
    return min(MAX_FLUSHES, 1 + int(1.5 * host_ms / FLUSH_MS))


def unaccounted(samples: Mapping[str, Sequence[float]]) -> float:
    """The share of the whole call, by medians, that no stage accounts for; ValueError without a `TOTAL`."""
    if TOTAL not in samples:
        raise ValueError(f"samples must hold {TOTAL!r}, got {', '.join(samples) or 'nothing'}")
    stages = sum(summarize(values).median for name, values in samples.items() if name != TOTAL)
    return 1 - stages / summarize(samples[TOTAL]).median
