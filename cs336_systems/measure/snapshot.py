"""PyTorch's CUDA memory snapshots: recording one, and reading any without running what is in it.

    with CudaHistory() as history:                # on a GPU
        history.phase("forward"); ...
        trace = history.trace()                   # a MemoryTrace with phases and categories
    trace = snapshot_trace(read_snapshot(path))   # of a file alone: one phase, categories by source line

A snapshot is what `torch.cuda.memory._snapshot()` returns and `_dump_snapshot` writes as a pickle
(https://docs.pytorch.org/docs/stable/torch_cuda_memory.html): dicts, lists, strings and numbers.
"""

from __future__ import annotations

import pickle
import reprlib
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_systems.measure.memory import release
from cs336_systems.measure.timeline import (
    CATEGORIES,
    SKIPPED_FRAMES,
    Allocation,
    MemoryTrace,
    Phase,
    short_path,
    unassigned,
)

ALLOC, FREE = "alloc", "free_requested"  # the actions of a trace's events that change what is allocated
MAX_EVENTS = 1_000_000  # of a recording: many times a training step's
MAX_FILE_BYTES = 4 * 2**30
MAX_TOTAL_BYTES = 2**62  # of all blocks: sums of them are 64-bit integers
LONGEST_ORIGIN = 256  # characters of a path or name that are shown
ACTIVE_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free")
TORCH_PARTS = ("/torch/", "torch/utils/", "??")  # in file names of frames that are PyTorch's


@dataclass(frozen=True, kw_only=True)
class Event:
    """An allocation, or the release of one."""

    action: str
    address: int
    num_bytes: int
    origin: str  # `model/layers.py:39 forward` of the innermost frame outside of PyTorch; empty if there is none
    in_forward: bool  # whether a function called `forward` asked for it


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Allocations and releases on one device in their order, and what was allocated at the end."""

    events: Sequence[Event]
    active: dict[int, int]  # address -> bytes


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, tuples, strings and numbers. A pickle that asks for anything by name is refused.

    A pickle is a program: "import os, call system" is one. Every class and function that it may call it has to find
    first, and this is where it is found.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it asks for {module}.{name}, and a snapshot is plain data: refused, nothing was run")


def read_snapshot(path: Path, *, device: int = 0, max_bytes: int = MAX_FILE_BYTES) -> Snapshot:
    """The snapshot in the file `path`, whoever wrote it, events of GPU `device`; ValueError if it is not one.

    Reading runs nothing of the file. It takes several times the file's memory.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
        raise ValueError(f"{path.name}: not a regular file")
    if found.st_size > max_bytes:
        raise ValueError(f"{path.name}: {found.st_size:,} bytes, more than the {max_bytes:,} that are read")
    try:
        with open(path, "rb") as file:
            loaded = _PlainUnpickler(file).load()
        return parse_snapshot(loaded, device)
    except (
        ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError, MemoryError,
        RecursionError, pickle.UnpicklingError,
    ) as error:  # fmt: skip
        raise ValueError(f"{path.name}: no memory snapshot: {str(error)[:200]}") from error


def parse_snapshot(snapshot: dict[str, Any], device: int = 0) -> Snapshot:
    """What `torch.cuda.memory._snapshot()` returned, of one device; ValueError or TypeError if it is nonsense."""
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
        raise ValueError("it has no 'segments' and 'device_traces'")
    traces = snapshot["device_traces"]
    if not isinstance(traces, list):
        raise ValueError("'device_traces' is no list")
    if not 0 <= device < max(1, len(traces)):
        raise ValueError(f"device must be one of its {len(traces)}, got {device}")
    stacks: dict[int, tuple[str, bool]] = {}  # by the list's identity: many events share one
    events = []
    for event in traces[device] if traces else []:
        if event["action"] in (ALLOC, FREE):
            frames = event.get("frames") or []
            if id(frames) not in stacks:
                stacks[id(frames)] = _origin(frames), any(frame["name"] == "forward" for frame in frames)
            origin, in_forward = stacks[id(frames)]
            address, num_bytes = _count("addr", event["addr"]), _count("size", event["size"])
            events.append(
                Event(
                    action=event["action"], address=address, num_bytes=num_bytes, origin=origin, in_forward=in_forward
                )
            )
    active: dict[int, int] = {}
    for segment in snapshot["segments"]:
        if segment.get("device", 0) == device:
            address = segment.get("address", 0)
            for block in segment["blocks"]:
                address, num_bytes = _count("address", block.get("address", address)), _count("size", block["size"])
                if block["state"] in ACTIVE_STATES:
                    active[address] = num_bytes
                address += num_bytes
    if sum(event.num_bytes for event in events) + sum(active.values()) > MAX_TOTAL_BYTES:
        raise ValueError(f"blocks of more than {MAX_TOTAL_BYTES:,} bytes in all")
    return Snapshot(events=events, active=active)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ValueError(f"{name} must be a number of 64 bits, got {reprlib.repr(value)}")
    return value


def _origin(frames: Sequence[dict[str, Any]]) -> str:
    """`model/layers.py:39 forward` of the innermost frame outside of PyTorch; empty if there is none."""
    shown = (_shown_frame(frame["filename"], frame["line"], frame["name"]) for frame in frames)
    return next(filter(None, shown), "")


@cache
def _shown_frame(file: str, line: int, name: str) -> str:
    """Where the frame is, the last part of a very long path; empty if it is PyTorch's."""
    if file.startswith(SKIPPED_FRAMES) or any(part in file for part in TORCH_PARTS):
        return ""
    return f"{short_path(file)[-LONGEST_ORIGIN:]}:{line:d} {name[:LONGEST_ORIGIN]}"


def snapshot_trace(snapshot: Snapshot) -> MemoryTrace:
    """The trace of a snapshot of which nothing else is known: categories by the line that allocated."""

    def classify(born: int, died: int | None, address: int, event: Event | None) -> str:
        origin = event.origin if event else ""
        if not origin:
            return "gradients" if died is None else "temporaries"  # autograd's own thread has no Python frames
        return "optimizer" if "optim" in origin and died is None else "activations"

    return _trace(snapshot, [Phase(name="recorded", start=0)], classify)


def _trace(
    snapshot: Snapshot, phases: Sequence[Phase], classify: Callable[[int, int | None, int, Event | None], str]
) -> MemoryTrace:
    """Allocations from events; those alive before the first event, known by their release or from the end, come at 0.

    `classify(birth, death or None, address, the event that made it or None)` names the category.
    """
    before: list[Allocation] = []
    allocations: list[Allocation] = []
    open_blocks: dict[int, tuple[int, Event]] = {}  # address -> number and event of birth

    def add(address: int, num_bytes: int, died: int | None) -> None:
        born, event = open_blocks.pop(address, (0, None))
        one = Allocation(
            num_bytes=num_bytes if event is None else event.num_bytes, born=born, died=died,
            category=classify(born, died, address, event), where="before" if event is None else event.origin,
        )  # fmt: skip
        (before if event is None else allocations).append(one)

    for number, event in enumerate(snapshot.events, start=1):
        if event.action == FREE:
            add(event.address, event.num_bytes, number)
        else:
            open_blocks[event.address] = number, event
    for address in dict.fromkeys([*open_blocks, *snapshot.active]):
        add(address, snapshot.active.get(address, 0), None)
    return MemoryTrace(allocations=[*before, *allocations], phases=tuple(phases), num_events=len(snapshot.events) + 1)


class CudaHistory:
    """Records the caching allocator's history, and which tensors and phases belong to it.

    The events are counted by the allocator's own statistics, so that a phase begins at the event at which it began,
    whatever the clock said.
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._assigned: dict[int, list[tuple[int, str]]] = {}  # address -> event, category
        self._start = 0

    def __enter__(self) -> CudaHistory:
        release("cuda")
        torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=MAX_EVENTS)
        self._start = self._count()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def _count(self) -> int:
        statistics = torch.cuda.memory_stats()
        return int(statistics["allocation.all.allocated"] + statistics["allocation.all.freed"])

    def _event(self) -> int:
        """The number of the last event; 0 before the first."""
        return self._count() - self._start

    def phase(self, name: str) -> None:
        self.phases.append(Phase(name=name, start=self._event() + 1 if self.phases else 0))

    def assign(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Put the blocks that hold `tensors` now in `category`."""
        if category not in CATEGORIES:
            raise ValueError(f"category must be one of {', '.join(CATEGORIES)}, got {category!r}")
        event = self._event()
        for tensor in tensors:
            if tensor is not None:
                self._assigned.setdefault(tensor.untyped_storage().data_ptr(), []).append((event, category))

    def trace(self) -> MemoryTrace:
        """The trace of what was recorded so far, by the phases and tensors that were named here."""
        torch.cuda.synchronize()
        snapshot = parse_snapshot(torch.cuda.memory._snapshot(), torch.cuda.current_device())

        def classify(born: int, died: int | None, address: int, made: Event | None) -> str:
            for event, category in self._assigned.get(address, ()):
                if born <= event and (died is None or event < died):
                    return category
            return unassigned(self.phases, born, died, made is not None and made.in_forward) if born else "temporaries"

        return _trace(snapshot, self.phases, classify)
