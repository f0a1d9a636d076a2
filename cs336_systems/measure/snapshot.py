"""PyTorch's CUDA memory snapshots: recording one, and reading any without running what is in it.

    with CudaHistory(path) as history:            # on a GPU
        history.phase("forward"); ...
        history.dump()
    snapshot = read_snapshot(path)                # anywhere; a file from somebody else is safe to open
    trace = history.trace(snapshot)               # a MemoryTrace with phases and categories
    trace = snapshot_trace(snapshot)              # of a file alone: one phase, categories by source line

The file (torch.cuda.memory._dump_snapshot, https://docs.pytorch.org/docs/stable/torch_cuda_memory.html) is a pickle.
`plain_pickle` reads it; events become rows of numbers as they pass, so that a gigabyte of file takes a few hundred
megabytes of memory. What is kept of events, frames and stacks is limited, too, by the file's size: a gigabyte of the
most hostile file takes less than two. Each stack, list of frames and block is looked at once, however often it occurs.
"""

from __future__ import annotations

import reprlib
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_systems.measure.allocations import BACKWARD, SKIPPED_FRAMES, short_path
from cs336_systems.measure.memory import release
from cs336_systems.measure.plain_pickle import MAX_FILE_BYTES, PlainPickleError, read_plain_pickle
from cs336_systems.measure.timeline import CATEGORIES, Allocation, MemoryTrace, Phase

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "snapshot", "oom", "user_defined", "workspace_snapshot",
)  # fmt: skip
OTHER_ACTION = len(ACTIONS)
ALLOC, FREE = ACTIONS.index("alloc"), ACTIONS.index("free_requested")
FRAME_KEYS = {"filename", "line", "name"}
MAX_EVENTS = 1_000_000  # of a recording: many times a training step's
BYTES_PER_EVENT = 200  # of file for each further event; one with thirty frames has more
# Of different frames and stacks, in memory: a hundred thousand of a stack of thirty frames, and a quarter of the file.
MAX_TABLE_BYTES = 2**26
TABLE_BYTES_PER_FILE_BYTE = 0.25
ENTRY_BYTES = 192  # of two dicts' and a list's entry and a row number, for each frame or stack
MAX_TOTAL_BYTES = 2**62  # of all blocks: sums of them are 64-bit integers
MAX_LINE = 2**64
LONGEST_ORIGIN = 256  # characters of a path or name that are shown
ACTIVE_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free")
TORCH_PARTS = ("/torch/", "torch/utils/", "??")  # in file names of frames that are PyTorch's


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A line of Python (or, where recorded, C++) that led to an event."""

    file: str
    line: int
    name: str


@dataclass(kw_only=True)
class Snapshot:
    """Events of one device in columns, in the order in which they happened, and what was allocated at the end."""

    actions: array[int] = field(default_factory=lambda: array("b"))  # index in ACTIONS
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    stacks: array[int] = field(default_factory=lambda: array("i"))  # row of `stack_table`
    stack_table: list[tuple[int, ...]] = field(default_factory=list)  # rows of `frames`, the innermost first
    frames: list[Frame] = field(default_factory=list)
    active: dict[int, int] = field(default_factory=dict)  # address -> bytes, of blocks in use at the end
    _shown: dict[int, str] = field(default_factory=dict, repr=False)  # by row of `frames`, each text once
    _origins: dict[int, str] = field(default_factory=dict, repr=False)  # by row of `stack_table`

    def origin(self, stack: int) -> str:
        """`model/layers.py:39 forward` of the innermost frame outside of PyTorch; empty if the stack has none."""
        if stack not in self._origins:
            self._origins[stack] = next(filter(None, map(self._show, self.stack_table[stack])), "")
        return self._origins[stack]

    def _show(self, number: int) -> str:
        if number not in self._shown:
            self._shown[number] = _shown_frame(self.frames[number])
        return self._shown[number]


def _shown_frame(frame: Frame) -> str:
    """Where the frame is, the last part of a very long path; empty if it is PyTorch's."""
    if frame.file.startswith(SKIPPED_FRAMES) or any(part in frame.file for part in TORCH_PARTS):
        return ""
    return f"{short_path(frame.file)[-LONGEST_ORIGIN:]}:{frame.line} {frame.name[:LONGEST_ORIGIN]}"


class _Event(int):
    """The row of an event that has become columns."""

    __slots__ = ()


class _Stack(int):
    """The row of a list of frames."""

    __slots__ = ()


class _FrameRow(int):
    """The row of a frame."""

    __slots__ = ()


class _Compactor:
    """Turns events, lists of frames and frames into rows while a file of `file_bytes` is read."""

    def __init__(self, file_bytes: int) -> None:
        self.snapshot = Snapshot()
        self.max_events = MAX_EVENTS + file_bytes // BYTES_PER_EVENT
        self.max_table_bytes = MAX_TABLE_BYTES + int(TABLE_BYTES_PER_FILE_BYTE * file_bytes)
        self.table_bytes = 0  # of the different frames and stacks
        self.frame_rows: dict[Frame, _FrameRow] = {}
        self.stack_rows: dict[tuple[int, ...], _Stack] = {}
        self.no_frames = self._stack(())
        self.event = _Event(0)  # one for all: their order is the file's

    def __call__(self, container: Any) -> Any:
        if isinstance(container, dict):
            keys = container.keys()
            if "action" in keys and "size" in keys:
                return self._event(container)
            return self._frame(container) if keys >= FRAME_KEYS and "addr" not in keys else container
        if container and type(container[0]) is _FrameRow:
            if not all(type(item) is _FrameRow for item in container):
                raise PlainPickleError("a list of frames must hold nothing else")
            return self._stack(tuple(container))
        return container

    def _frame(self, values: dict[Any, Any]) -> _FrameRow:
        file, line, name = values["filename"], values["line"], values["name"]
        if not (isinstance(file, str) and isinstance(line, int) and abs(line) < MAX_LINE and isinstance(name, str)):
            raise PlainPickleError(f"a frame must have a file, a line and a name, got {reprlib.repr(values)}")
        frame = Frame(file=file, line=line, name=name)
        if frame not in self.frame_rows:
            self._count(sys.getsizeof(frame) + sys.getsizeof(line))
            self.frame_rows[frame] = _FrameRow(len(self.snapshot.frames))
            self.snapshot.frames.append(frame)
        return self.frame_rows[frame]

    def _stack(self, rows: tuple[int, ...]) -> _Stack:
        if rows not in self.stack_rows:
            self._count(sys.getsizeof(rows))
            self.stack_rows[rows] = _Stack(len(self.snapshot.stack_table))
            self.snapshot.stack_table.append(rows)
        return self.stack_rows[rows]

    def _count(self, num_bytes: int) -> None:
        self.table_bytes += ENTRY_BYTES + num_bytes
        if self.table_bytes > self.max_table_bytes:
            raise PlainPickleError(f"different frames and stacks of more than {self.max_table_bytes:,} bytes in memory")

    def _event(self, values: dict[Any, Any]) -> _Event:
        action, size, address = values["action"], values["size"], values.get("addr", 0)
        if not isinstance(action, str) or not _is_count(size) or not _is_count(address):
            raise PlainPickleError(f"an event must have an action, an address and a size, got {reprlib.repr(values)}")
        stack = values.get("frames")
        snapshot = self.snapshot
        if len(snapshot.actions) >= self.max_events:
            raise PlainPickleError(f"more than {self.max_events:,} events")
        snapshot.actions.append(ACTIONS.index(action) if action in ACTIONS else OTHER_ACTION)
        snapshot.addresses.append(address)
        snapshot.sizes.append(size)
        snapshot.stacks.append(stack if type(stack) is _Stack else self.no_frames)
        return self.event


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def read_snapshot(path: Path, *, device: int = 0, max_bytes: int = MAX_FILE_BYTES) -> Snapshot:
    """The snapshot in `path`, events of GPU `device`. PlainPickleError, a ValueError, if it is not one."""
    compactor = _Compactor(path.stat().st_size)
    loaded = read_plain_pickle(path, compact=compactor, max_bytes=max_bytes)
    traces = loaded.get("device_traces") if isinstance(loaded, dict) else None
    segments = loaded.get("segments") if isinstance(loaded, dict) else None
    if not isinstance(traces, list) or not isinstance(segments, list):
        raise PlainPickleError(f"{path.name}: no memory snapshot: it has no 'segments' and 'device_traces'")
    if not 0 <= device < max(1, len(traces)):
        raise ValueError(f"device must be one of the {len(traces)} in {path.name}, got {device}")
    snapshot = compactor.snapshot
    lengths = [len(trace) if isinstance(trace, list) else 0 for trace in traces]
    if sum(lengths) > len(snapshot.actions) or not all(
        isinstance(trace, list) and all(type(item) is _Event for item in trace) for trace in traces
    ):
        raise PlainPickleError(f"{path.name}: no memory snapshot: 'device_traces' must be lists of events, each once")
    if sum(lengths) < len(snapshot.actions):
        raise PlainPickleError(f"{path.name}: no memory snapshot: it has events outside of 'device_traces'")
    start = sum(lengths[:device])
    stop = start + (lengths[device] if lengths else 0)
    for column in (snapshot.actions, snapshot.addresses, snapshot.sizes, snapshot.stacks):
        del column[stop:], column[:start]
    here = [segment for segment in segments if isinstance(segment, dict) and segment.get("device", 0) == device]
    lists_of_blocks = [id(segment["blocks"]) for segment in here if "blocks" in segment]
    if len({*lists_of_blocks}) < len(lists_of_blocks):
        raise PlainPickleError(f"{path.name}: no memory snapshot: segments share their blocks")
    for segment in here:
        snapshot.active |= _active_blocks(segment, path.name)
    sizes = (size for action, size in zip(snapshot.actions, snapshot.sizes) if action in (ALLOC, FREE))
    if sum(sizes) + sum(snapshot.active.values()) > MAX_TOTAL_BYTES:
        raise PlainPickleError(f"{path.name}: no memory snapshot: blocks of more than {MAX_TOTAL_BYTES:,} bytes in all")
    return snapshot


def _active_blocks(segment: dict[str, Any], name: str) -> dict[int, int]:
    blocks, address = segment.get("blocks", []), segment.get("address", 0)
    active = {}
    for block in blocks if isinstance(blocks, list) else [None]:
        if not isinstance(block, dict) or not _is_count(block.get("size")):
            raise PlainPickleError(f"{name}: no memory snapshot: a segment's blocks have no sizes")
        address = block.get("address", address)
        if not _is_count(address):
            raise PlainPickleError(f"{name}: no memory snapshot: a block's address is {reprlib.repr(address)}")
        if block.get("state") in ACTIVE_STATES:
            active[address] = block["size"]
        address += block["size"]
    return active


def snapshot_trace(snapshot: Snapshot) -> MemoryTrace:
    """The trace of a snapshot of which nothing else is known: categories by the line that allocated."""

    def classify(event: int, address: int, stack: int, lives: bool) -> str:
        origin = snapshot.origin(stack)
        if not origin:
            return "gradients" if lives else "temporaries"  # autograd's own thread has no Python frames
        return "optimizer" if "optim" in origin and lives else "activations"

    return _trace(snapshot, [Phase(name="recorded", start=0)], classify)


def _trace(snapshot: Snapshot, phases: Sequence[Phase], classify: Callable[[int, int, int, bool], str]) -> MemoryTrace:
    """Allocations from events; those alive before the first event, known by their release or from the end, come at 0.

    `classify(event, address, stack row, alive at the end)` names the category; event 0 is everything before.
    """
    before: list[Allocation] = []
    allocations: list[Allocation] = []
    open_blocks: dict[int, tuple[int, int, int]] = {}  # address -> bytes, event, stack row
    clock = 0
    for action, address, size, stack in zip(
        snapshot.actions, snapshot.addresses, snapshot.sizes, snapshot.stacks, strict=True
    ):
        if action == ALLOC:
            clock += 1
            open_blocks[address] = (size, clock, stack)
        elif action == FREE:
            clock += 1
            block = open_blocks.pop(address, None)
            if block is None:
                category = classify(0, address, stack, False)
                before.append(Allocation(num_bytes=size, born=0, died=clock, category=category, where="before"))
            else:
                size, born, stack = block
                category = classify(born, address, stack, False)
                where = snapshot.origin(stack)
                allocations.append(Allocation(num_bytes=size, born=born, died=clock, category=category, where=where))
    for address, (size, born, stack) in open_blocks.items():
        category, where = classify(born, address, stack, True), snapshot.origin(stack)
        allocations.append(Allocation(num_bytes=size, born=born, died=None, category=category, where=where))
    for address, size in snapshot.active.items():
        if address not in open_blocks:
            category = classify(0, address, 0, True)
            before.append(Allocation(num_bytes=size, born=0, died=None, category=category, where="before"))
    return MemoryTrace(allocations=[*before, *allocations], phases=tuple(phases), num_events=clock + 1)


class CudaHistory:
    """Records the caching allocator's history, and which tensors and phases belong to it.

    The events are counted by the allocator's own statistics, so that a phase begins at the event at which it began,
    whatever the clock said.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.phases: list[Phase] = []
        self._assigned: list[tuple[int, int, str]] = []  # event, address, category
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
                self._assigned.append((event, tensor.untyped_storage().data_ptr(), category))

    def dump(self) -> None:
        """Write what was recorded so far."""
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(self.path))

    def trace(self, snapshot: Snapshot) -> MemoryTrace:
        """The trace of the snapshot dumped, by the phases and tensors that were named here."""
        phase_starts = [*self.phases]
        last_events = {
            phase.name: following.start for phase, following in zip(phase_starts, phase_starts[1:])
        }  # the last phase is not there: what it leaves is its result
        assigned: dict[int, list[tuple[int, str]]] = {}
        for event, address, category in self._assigned:
            assigned.setdefault(address, []).append((event, category))
        skeleton = MemoryTrace(allocations=(), phases=tuple(phase_starts), num_events=0)
        lives = _lives(snapshot)

        def classify(born: int, address: int, stack: int, alive: bool) -> str:
            died = None if alive else lives.get((address, born))
            for event, category in assigned.get(address, ()):
                if born <= event and (died is None or event < died):
                    return category
            phase = skeleton.phase_of(born)
            if phase == BACKWARD:
                kept = any(snapshot.frames[row].name == "forward" for row in snapshot.stack_table[stack])
            else:
                kept = phase in last_events and (died is None or died >= last_events[phase])
            return "activations" if kept and born else "temporaries"

        return _trace(snapshot, phase_starts, classify)


def _lives(snapshot: Snapshot) -> dict[tuple[int, int], int]:
    """(address, event of birth) -> event of death; birth 0 for what was there before."""
    born: dict[int, int] = {}
    deaths = {}
    clock = 0
    for action, address in zip(snapshot.actions, snapshot.addresses, strict=True):
        if action in (ALLOC, FREE):
            clock += 1
            if action == ALLOC:
                born[address] = clock
            else:
                deaths[address, born.pop(address, 0)] = clock
    return deaths
