"""Memory of closures in bytes: CUDA's peaks, a CPU's peaks by phase, and what autograd keeps."""

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
# named in the RuntimeError that PyTorch raises when the host's memory is full
CPU_ALLOCATOR = "DefaultCPUAllocator"
PHASE_MARK = "cs336_systems.phase"  # the profiler's name of the moment at which a phase begins

T = TypeVar("T")
_kept: list[_lru_cache_wrapper[object]] = []  # all functions under `kept_for_a_case`


def kept_for_a_case(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
    """Decorate `function` so that its latest result is kept until other arguments or `forget_case`.

    For tensors that the implementations of one case share: the measuring process forgets them when
    the case ends.
    """
    kept = lru_cache(maxsize=1)(function)
    _kept.append(kept)
    return kept


def forget_case() -> None:
    """Drop the results that functions decorated with `kept_for_a_case` keep."""
    for kept in _kept:
        kept.cache_clear()


def held_bytes(device: str) -> int | None:
    """Return the bytes of this process's live CUDA tensors; None on a CPU, which does not count."""
    return torch.cuda.memory_allocated() if device == "cuda" else None


def release(device: str) -> None:
    """Collect garbage and free cached blocks: the next case starts from what is really alive."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def one_out_of_memory_error() -> Iterator[None]:
    """Raise torch.OutOfMemoryError in place of a CPU's errors for a full memory, as CUDA does.

    On a CPU PyTorch raises a RuntimeError and Python a MemoryError.
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
    """Return the most bytes of CUDA tensors during `call`, beyond those alive before it."""
    release("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def saved_for_backward(call: Callable[[], object]) -> int:
    """Return the bytes of distinct storages that autograd saves during `call`, on any device.

    Parameters and inputs are included.
    """
    # compiled=True leaves a compiled `call` compiled, and works for an eager one, too
    return sum(one.num_bytes for one in saved_tensors(call, compiled=True))


def cpu_phase_peaks(
    run: Callable[[Callable[[str], None]], None], base_bytes: int
) -> dict[str, int]:
    """Return the most bytes that PyTorch's CPU allocator had given out in each phase of `run`.

    `run(mark)` is called under the profiler, which sees every allocation, kernels' own temporaries
    too; it calls `mark` with the name of each phase as it begins. `base_bytes` are those allocated
    before.
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

    # active[i]: bytes after the first i changes
    active = base_bytes + np.cumsum([0, *(num_bytes for _, num_bytes in changes)])
    ends = [*np.searchsorted([time for time, _ in changes], starts[1:]), len(changes)]
    return {
        name: int(active[begin : end + 1].max())
        for name, begin, end in zip(names, [0, *ends], ends)
    }
