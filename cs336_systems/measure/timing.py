"""Timing of closures: warm-up, synchronisation and sample counts, in one place for all benchmarks.

    samples_ms = time_calls(lambda: attention(q, k, v), device="cuda")

On CUDA a sample is the time between two events around the call, with the L2 cache overwritten
before the first of them, so that a small problem is not served from what its last repetition left
there. On CPU it is the wall clock.
"""

import time
from collections.abc import Callable

import torch

CACHE_FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any present GPU
MIN_SAMPLES = 5
MAX_SAMPLES = 100
DEFAULT_WARMUP = 2
DEFAULT_BUDGET_MS = 400.0


def synchronize(device: str) -> None:
    """Wait until all work queued on `device` has finished; on CPU there is nothing to wait for."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_once(call: Callable[[], object], device: str) -> float:
    """Return the milliseconds of wall clock of one synchronised call, compilation included.

    It is for first calls.
    """
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def time_in_a_row(call: Callable[[], object], count: int, device: str) -> float:
    """Return the mean milliseconds of a call among `count` calls in a row.

    Nothing comes between the calls, neither a wait nor another kernel. On CUDA it is the GPU's
    time, from the end of what was queued before; on CPU the wall clock.
    """
    if device != "cuda":
        return time_once(lambda: [call() for _ in range(count)], device) / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def plan_samples(estimate_ms: float, budget_ms: float, minimum: int = MIN_SAMPLES) -> int:
    """Return how many samples of `estimate_ms` fit the budget, from `minimum` to a hundred."""
    if estimate_ms <= 0:
        return MAX_SAMPLES
    return max(minimum, min(MAX_SAMPLES, int(budget_ms / estimate_ms)))


def time_calls(
    call: Callable[[], object],
    *,
    device: str,
    warmup: int = DEFAULT_WARMUP,
    num_samples: int | None = None,
    before: Callable[[], object] = lambda: None,
    budget_ms: float = DEFAULT_BUDGET_MS,
    min_samples: int = MIN_SAMPLES,
) -> list[float]:
    """Return the milliseconds of each of `num_samples` calls, after `warmup` untimed ones.

    `before` runs ahead of every call, outside the timed part (resetting gradients). Without
    `num_samples` one more call is measured, which is no sample, and as many samples are taken as
    `budget_ms` allows, at least `min_samples` (five) and at most a hundred.
    """
    for _ in range(warmup):
        before()
        call()
    if num_samples is None:
        before()
        num_samples = plan_samples(time_once(call, device), budget_ms, min_samples)

    if device == "cuda":
        cache = torch.empty(CACHE_FLUSH_BYTES, dtype=torch.int8, device="cuda")
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_samples)
        ]
        for start, end in events:
            before()
            cache.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    samples = []
    for _ in range(num_samples):
        before()
        samples.append(time_once(call, device))
    return samples
