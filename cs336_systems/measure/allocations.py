"""Memory of closures, in bytes: peaks read from CUDA's allocator, and what autograd keeps, on any
device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper, lru_cache
from typing import TypeVar

import numpy as np
import torch

from cs336_systems.measure.saved import saved_tensors

MIB = 2**20
# in the message of the RuntimeError that it raises when the host is full
CPU_ALLOCATOR = "DefaultCPUAllocator"
PHASE_MARK = "cs336_systems.phase"  # the profiler's name of the moment at which a phase begins

T = TypeVar("T")
_kept: list[_lru_cache_wrapper[object]] = []  # all functions under `kept_for_a_case`


def kept_for_a_case(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
    """Keep the latest result of `function` until it is asked for another one, or `forget_case` is
    called.

    For tensors that the implementations of one case share: the measuring process forgets them when
    the case ends.
    """
    kept = lru_cache(maxsize=1)(function)
    _kept.append(kept)
    return kept


def forget_case() -> None:
    """Drop what the functions under `kept_for_a_case` keep."""
    for kept in _kept:
        kept.cache_clear()


def held_bytes(device: str) -> int | None:
    """Bytes of CUDA tensors that are alive in this process; None on a CPU, whose allocator does not
    count.
    """
    return torch.cuda.memory_allocated() if device == "cuda" else None


def release(device: str) -> None:
    """Collect garbage and give cached blocks back, so that the next case starts from what is really
    alive.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def one_out_of_memory_error() -> Iterator[None]:
    """Raise what a CPU says when its memory is full as the error that CUDA raises:
    torch.OutOfMemoryError.
    """
    try:
        yield
    except MemoryError as error:
        raise torch.OutOfMemoryError(str(error) or "the host is out of memory") from error
    except RuntimeError as error:
        if CPU_ALLOCATOR in str(error) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def peak_cuda_bytes(call: Callable[[], object]) -> int:
    """The most bytes that tensors occupied during `call`, beyond those alive before it."""
    release("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def saved_for_backward(call: Callable[[], object]) -> int:
    """Bytes of distinct storages that autograd saves during `call`, on any device; parameters and
    inputs included.
    """
    # as it runs, compiled or not
    return sum(one.num_bytes for one in saved_tensors(call, compiled=True))


def cpu_phase_peaks(
    run: Callable[[Callable[[str], None]], None], base_bytes: int
) -> dict[str, int]:
    """The most bytes that PyTorch's CPU allocator had given out in each phase; `base_bytes` were
    there before.

    `run(mark)` is called under the profiler, which sees every allocation, kernels' own temporaries
    too; it calls `mark` with the name of each phase as it begins.
    """
    names: list[str] = []
    activities = [torch.profiler.ProfilerActivity.CPU]

    def mark(name: str) -> None:
        names.append(name)
        with torch.profiler.record_function(PHASE_MARK):
            pass

    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        run(mark)
    events = profiler.profiler.kineto_results.events()
    starts = sorted(event.start_ns() for event in events if event.name() == PHASE_MARK)
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    assert len(starts) == len(names)
    # after so many changes
    active = base_bytes + np.cumsum([0, *(num_bytes for _, num_bytes in changes)])
    ends = [*np.searchsorted([time for time, _ in changes], starts[1:]), len(changes)]
    return {
        name: int(active[begin : end + 1].max())
        for name, begin, end in zip(names, [0, *ends], ends)
    }
