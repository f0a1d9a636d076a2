"""Allocations over time: the common form of recorded runs and snapshots, and questions about it.

    with AllocationRecorder() as recorder:
        recorder.assign(model.parameters(), "parameters")
        recorder.phase("forward")
        loss = ...
    trace = recorder.trace()    # a MemoryTrace
    trace.phase_peaks()         # {"forward": bytes, "backward": bytes, ...}
    trace.largest(5)            # the largest allocations, with their operation and line
    trace.sampled(400)          # bytes by category at 400 events, no peak lost

Time is counted in events (one an allocation, one a release), as in PyTorch's memory viewer: a phase
of many small kernels is as wide as it has allocations, and two runs of the same code have the same
axis.

The recorder works on real tensors of any device and on fake ones that take no memory, so that a
laptop records the step of a model that needs a hundred gigabytes. A dispatch mode sees the result
of every operator that PyTorch runs, below autograd and autocast; a weak reference on a new storage
says when its last tensor is gone. Memory that a kernel allocates and releases inside itself is not
seen; for the operators with much of it, `HIDDEN_TEMPORARIES` says how much.
"""

import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# From the bottom of the picture to its top: what lives longest first.
CATEGORIES = ("parameters", "optimizer", "gradients", "activations", "temporaries")
CUDA_BLOCK_BYTES = 512  # the caching allocator rounds every request up to a multiple
CPU_BLOCK_BYTES = 1
PACKAGE_FOLDER = Path(__file__).parents[1]
# Frames of PyTorch, of this folder and of generated code are not where an allocation comes from.
SKIPPED_FRAMES = (str(Path(torch.__file__).parent), str(PACKAGE_FOLDER / "measure"), "<")
# Copies of the result's size that a kernel allocates and releases inside itself. Softmax's backward
# on CUDA writes P ∘ dP first; log-sum-exp, on any device, the exponentials of its input (counted in
# copies of the input).
HIDDEN_TEMPORARIES: dict[str, dict[str, int]] = {
    "cuda": {"_softmax_backward_data": 1, "logsumexp": 1},
    "cpu": {"logsumexp": 1},
}
SIZED_BY_INPUT = ("logsumexp",)
# Name of the phase in which activations are released, and computed again under checkpointing.
BACKWARD = "backward"


@dataclass(kw_only=True, slots=True)
class Allocation:
    """One block of memory, from the event that made it to the one that released it."""

    num_bytes: int
    born: int  # the event that made it
    died: int | None = None  # the event that released it; None: alive at the end
    category: str = ""  # one of CATEGORIES; empty as long as none is assigned
    where: str = ""  # the operation, and the line of source that asked for it
    in_forward: bool = False  # made by a forward pass


class Phase(NamedTuple):
    """A part of the run, from event `start` to the start of the next phase."""

    name: str
    start: int


@dataclass(frozen=True)
class Large:
    """All allocations of one size, category and origin."""

    num_bytes: int  # of each
    category: str
    where: str
    count: int


@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """All allocations of a run, its phases, and the number of its events.

    Events are numbered 0 to `num_events` - 1; phases are in order and cover them all.
    """

    allocations: Sequence[Allocation]
    phases: Sequence[Phase]
    num_events: int

    def active_bytes(self, category: str | None = None) -> np.ndarray:
        """Return the bytes allocated after each event, of one category or of all.

        The array is int64, (num_events,).
        """
        change = np.zeros(self.num_events + 1, dtype=np.int64)
        for allocation in self.allocations:
            if category in (None, allocation.category):
                change[allocation.born] += allocation.num_bytes
                if allocation.died is not None:
                    change[allocation.died] -= allocation.num_bytes
        return change.cumsum()[: self.num_events]

    def peak_bytes(self) -> int:
        """Return the most bytes allocated after any event."""
        return int(self.active_bytes().max(initial=0))

    def peak_event(self) -> int:
        """Return the first event after which the most bytes are allocated."""
        return int(self.active_bytes().argmax()) if self.num_events else 0

    def phase_peaks(self) -> dict[str, int]:
        """Return the most bytes allocated within each phase, earlier allocations included."""
        active = self.active_bytes()
        ends = [*(phase.start for phase in self.phases[1:]), self.num_events]
        return {
            phase.name: int(active[max(0, phase.start - 1) : end].max(initial=0))
            for phase, end in zip(self.phases, ends)
        }

    def phase_of(self, event: int) -> str:
        """Return the name of the phase in which `event` lies; "" before the first phase."""
        return next((phase.name for phase in reversed(self.phases) if phase.start <= event), "")

    def breakdown(self, event: int) -> dict[str, int]:
        """Return the bytes by category after `event`; every category is a key."""
        return {category: int(self.active_bytes(category)[event]) for category in CATEGORIES}

    def largest(self, count: int, phases: Sequence[str] | None = None) -> list[Large]:
        """Return the `count` largest kinds of allocations made in `phases` (default: all).

        A kind has one size, category and origin; the largest is that of the largest single
        allocation.
        """
        grouped = Counter(
            (one.num_bytes, one.category, one.where)
            for one in self.allocations
            if phases is None or self.phase_of(one.born) in phases
        )
        kinds = sorted(grouped.items(), key=lambda item: (-item[0][0], item[0]))[:count]
        return [Large(*kind, times) for kind, times in kinds]

    def sampled(self, points: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return (events, {category: bytes}) at no more than `points` events.

        Events are divided into equal buckets, each represented by the event with the most bytes.
        The peak is therefore among them.
        """
        active = self.active_bytes()
        edges = np.linspace(0, self.num_events, min(points, self.num_events) + 1).astype(int)
        events = np.array(
            [start + int(active[start:end].argmax()) for start, end in zip(edges[:-1], edges[1:])],
            dtype=np.int64,
        )
        return events, {category: self.active_bytes(category)[events] for category in CATEGORIES}


def unassigned(phases: Sequence[Phase], one: Allocation) -> str:
    """Return the category of an allocation to which none was assigned: activations or temporaries.

    It is an activation if it outlived its phase, unless that is the last phase, which leaves its
    result, or `BACKWARD`. In `BACKWARD` it is an activation if a forward made it (computed again).
    """
    place = bisect_right(phases, one.born, key=lambda phase: phase.start) - 1
    if place >= 0 and phases[place].name == BACKWARD:
        return "activations" if one.in_forward else "temporaries"
    outlived = 0 <= place < len(phases) - 1 and (
        one.died is None or one.died >= phases[place + 1].start
    )
    return "activations" if outlived else "temporaries"


class AllocationRecorder(TorchDispatchMode):
    """Context in which allocations are recorded.

    Args:
        device: "cuda" or "cpu", whose allocator and kernels are counted: rounding, and memory that
            kernels hide.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._hidden = HIDDEN_TEMPORARIES[device]
        self._block_bytes = CUDA_BLOCK_BYTES if device == "cuda" else CPU_BLOCK_BYTES
        self._clock = 0
        self._phases: list[Phase] = []
        self._allocations: list[Allocation] = []
        self._alive: dict[int, tuple[Allocation, weakref.ref[Any]]] = {}  # by the id of the storage

    def phase(self, name: str) -> None:
        """Begin phase `name`, to which all that follows belongs."""
        self._phases.append(Phase(name=name, start=self._clock))

    def assign(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Put the storages of `tensors` in `category`; None among `tensors` is skipped.

        A storage that was never seen is recorded as a new allocation.
        """
        for tensor in tensors:
            if tensor is not None:
                self._see(tensor, lambda: category).category = category

    def trace(self) -> MemoryTrace:
        """Return everything recorded so far; `unassigned` gives the categories that are missing."""
        allocations = [
            replace(one, category=one.category or unassigned(self._phases, one))
            for one in self._allocations
        ]
        return MemoryTrace(
            allocations=allocations, phases=tuple(self._phases), num_events=self._clock
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._see(tensor, lambda: _origin(name))
        copies = self._hidden.get(name, 0)
        if copies and tensors:
            sized = args[0] if name in SIZED_BY_INPUT else tensors[0]
            self._release(
                self._allocate(
                    copies * sized.numel() * sized.element_size(), f"inside {_origin(name)}"
                )
            )
        return result

    def _see(self, tensor: Tensor, where: Callable[[], str]) -> Allocation:
        """Return the block that holds `tensor`, a new one if its storage is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            block = self._allocate(storage.nbytes(), where())

            def released(_: object) -> None:
                del self._alive[key]
                self._release(block)

            self._alive[key] = block, weakref.ref(storage, released)
        return self._alive[key][0]

    def _allocate(self, num_bytes: int, where: str) -> Allocation:
        """Record an allocation at a new event, rounded as the allocator does, and return it."""
        rounded = -(-num_bytes // self._block_bytes) * self._block_bytes
        block = Allocation(
            num_bytes=rounded, born=self._clock, where=where, in_forward=torch.is_grad_enabled()
        )
        self._allocations.append(block)
        self._clock += 1
        return block

    def _release(self, block: Allocation) -> None:
        """Record the release of `block` at a new event."""
        block.died = self._clock
        self._clock += 1


def _origin(operation: str) -> str:
    """Return an operation and its line: `_softmax in attention/reference.py:62`.

    In backward the autograd node stands for the line.
    """
    node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
    if node is not None:
        return f"{operation} for {node.name()}"
    return with_line(operation)


def with_line(operation: str) -> str:
    """Return `operation` and the line that asked for it: `softmax in model/layers.py:130`.

    The line is that of the innermost frame that is neither PyTorch's nor this folder's, if there is
    one.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(SKIPPED_FRAMES):
            return f"{operation} in {short_path(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return operation


def short_path(file: str) -> str:
    """Return a path fit for a record: from this package's folder on, or else its last two parts."""
    path = Path(file)
    if path.is_relative_to(PACKAGE_FOLDER):
        return path.relative_to(PACKAGE_FOLDER).as_posix()
    return "/".join(path.parts[-2:])
