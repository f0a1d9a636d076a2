"""PyTorch's CUDA memory snapshots: recording one, and reading any without running its content.

    with CudaHistory() as history:    # on a GPU
        history.phase("forward"); ...
        trace = history.trace()       # a MemoryTrace with phases and categories
    trace = read_snapshot(path)       # of a file alone: one phase, categories by source line

A snapshot is what `torch.cuda.memory._snapshot()` returns and `_dump_snapshot` writes as a pickle
(https://docs.pytorch.org/docs/stable/torch_cuda_memory.html): dicts, lists, strings and numbers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cs336_systems.measure.allocations import release
from cs336_systems.measure.timeline import (
    SKIPPED_FRAMES,
    Allocation,
    MemoryTrace,
    Phase,
    short_path,
    unassigned,
)

# Actions of a trace's events that change what is allocated.
ALLOC, FREE = "alloc", "free_requested"
MAX_EVENTS = 1_000_000  # of a recording: many times a training step's

MAX_DEVICES = 128  # of one process

ACTIVE_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free")
TORCH_PARTS = ("/torch/", "torch/utils/", "??")  # in file names of frames that are PyTorch's

Classify = Callable[[Allocation, int], str]  # (allocation, address) -> category


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of dicts, lists, tuples, strings and numbers; it refuses any other pickle.

    A pickle is a program: "import os, call system" is one. It must find every class and function
    that it may call, and finds them by `find_class`.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Raise ValueError: a snapshot is plain data, so it needs no class or function."""
        raise ValueError(
            f"it asks for {module}.{name}, and a snapshot is plain data: refused, nothing was run"
        )


def read_snapshot(path: Path) -> MemoryTrace:
    """Return the trace in the file `path`, whoever wrote it; ValueError if it is no snapshot.

    Of several GPUs in the file it is the one with the highest peak, and its one phase, `recorded`,
    says which unless GPU 0 is the only one. Categories are by the line that allocated. Reading runs
    nothing of the file, and takes several times the file's memory.
    """

    def classify(one: Allocation, address: int) -> str:
        if not one.born or not one.where:
            # autograd's own thread has no Python frames
            return "gradients" if one.died is None else "temporaries"
        return "optimizer" if "optim" in one.where and one.died is None else "activations"

    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise ValueError(f"{path.name}: not a regular file")
    try:
        with open(path, "rb") as file:
            loaded = _PlainUnpickler(file).load()
        devices = _used_devices(loaded) or [0]
        traces = {}
        for device in devices:
            # The file of one rank among several has the events of that rank's GPU.
            name = (
                "recorded"
                if devices == [0]
                else f"recorded on GPU {device} of {', '.join(map(str, devices))}"
            )
            traces[device] = parse_snapshot(loaded, device, [Phase(name=name, start=0)], classify)
        return max(traces.values(), key=lambda trace: trace.peak_bytes())
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        EOFError,
        OverflowError,
        MemoryError,
        RecursionError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(
            f"{path.name}: no memory snapshot: {str(error)[:200] or type(error).__name__}"
        ) from error


def _used_devices(snapshot: dict[str, Any]) -> list[int]:
    """Return the numbers of the GPUs that a snapshot has events or memory of, in order.

    Raises ValueError for a number that no GPU has.
    """
    used = {device for device, events in enumerate(snapshot["device_traces"]) if events}
    used |= {int(segment.get("device", 0)) for segment in snapshot["segments"]}
    if not used <= set(range(MAX_DEVICES)):
        raise ValueError(
            f"GPUs must be numbered from 0 to {MAX_DEVICES - 1}, got {min(used)} to {max(used)}"
        )
    return sorted(used)


def parse_snapshot(
    snapshot: dict[str, Any], device: int, phases: Sequence[Phase], classify: Classify
) -> MemoryTrace:
    """Return the trace of one device in `snapshot`, which `torch.cuda.memory._snapshot()` returned.

    `classify` gives each allocation its category. An allocation that was alive before the first
    event, known by its release or from the end, is born at event 0.
    """
    traces = snapshot["device_traces"]
    stacks: dict[int, tuple[str, bool]] = {}  # by the list's identity: many events share one
    alive: dict[int, Allocation] = {}  # by address
    allocations: list[Allocation] = []
    number = 0  # of the event; 0: before the first

    def end(address: int, num_bytes: int, died: int | None) -> None:
        one = alive.pop(address, None) or Allocation(num_bytes=num_bytes, born=0, where="before")
        one.died = died
        one.category = classify(one, address)
        allocations.append(one)

    # Events in order
    for event in traces[device] if device < len(traces) else []:
        if event["action"] not in (ALLOC, FREE):
            continue
        number += 1
        address, num_bytes = int(event["addr"]), int(event["size"])
        if event["action"] == FREE:
            end(address, num_bytes, number)
            continue
        frames = event.get("frames") or []
        if id(frames) not in stacks:
            stacks[id(frames)] = (
                _origin(frames),
                any(frame["name"] == "forward" for frame in frames),
            )
        where, in_forward = stacks[id(frames)]
        alive[address] = Allocation(
            num_bytes=num_bytes, born=number, where=where, in_forward=in_forward
        )

    # Alive at the end: address -> bytes
    active = {
        int(block["address"]): int(block["size"])
        for segment in snapshot["segments"]
        if segment.get("device", 0) == device
        for block in segment["blocks"]
        if block["state"] in ACTIVE_STATES
    }
    for address in dict.fromkeys([*alive, *active]):
        end(address, active.get(address, 0), None)
    return MemoryTrace(allocations=allocations, phases=tuple(phases), num_events=number + 1)


def _origin(frames: Sequence[dict[str, Any]]) -> str:
    """Return the innermost frame outside of PyTorch as `model/layers.py:39 forward`; "" if none."""
    for frame in frames:
        file = frame["filename"]
        if not file.startswith(SKIPPED_FRAMES) and not any(part in file for part in TORCH_PARTS):
            return f"{short_path(file)}:{frame['line']:d} {frame['name']}"
    return ""


class CudaHistory:
    """Recorder of the caching allocator's history, with categories, phases and each phase's peak.

    The events are counted by the allocator's own statistics, so that a phase begins at the event at
    which it began, whatever the clock said. `peaks` come from its counters: the most bytes
    allocated in each phase that has ended.
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.peaks: dict[str, int] = {}
        self._assigned: dict[int, list[tuple[int, str]]] = {}  # address -> event, category
        self._start = 0

    def __enter__(self) -> CudaHistory:
        release("cuda")
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=MAX_EVENTS
        )
        self._start = self._count()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def _count(self) -> int:
        """Return the number of allocations and releases of this process so far."""
        statistics = torch.cuda.memory_stats()
        return int(statistics["allocation.all.allocated"] + statistics["allocation.all.freed"])

    def _event(self) -> int:
        """Return the number of the last event; 0 before the first."""
        return self._count() - self._start

    def phase(self, name: str) -> None:
        """Begin phase `name`, and end the one before it."""
        self.end_phase()
        torch.cuda.reset_peak_memory_stats()
        self.phases.append(Phase(name=name, start=self._event() + 1 if self.phases else 0))

    def end_phase(self) -> None:
        """Record the peak of the present phase, if there is one."""
        torch.cuda.synchronize()
        if self.phases:
            self.peaks[self.phases[-1].name] = torch.cuda.max_memory_allocated()

    def assign(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Put the blocks that hold `tensors` now in `category`; None among `tensors` is skipped."""
        event = self._event()
        for tensor in tensors:
            if tensor is not None:
                self._assigned.setdefault(tensor.untyped_storage().data_ptr(), []).append(
                    (event, category)
                )

    def trace(self) -> MemoryTrace:
        """Return the trace recorded so far, with the phases and categories that were named here."""
        torch.cuda.synchronize()

        def classify(one: Allocation, address: int) -> str:
            for event, category in self._assigned.get(address, ()):
                if one.born <= event and (one.died is None or event < one.died):
                    return category
            return unassigned(self.phases, one) if one.born else "temporaries"

        snapshot = torch.cuda.memory._snapshot()
        return parse_snapshot(snapshot, torch.cuda.current_device(), self.phases, classify)
