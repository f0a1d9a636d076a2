"""What was allocated when: the common form of a recorded run and of a snapshot, and what one asks of it.

    trace.phase_peaks()                    # {"forward": bytes, "backward": bytes, ...}
    trace.largest(5)                       # the largest allocations, with the operation and line they come from
    trace.sampled(400)                     # bytes by category at 400 events, no peak lost

Time is counted in events (one an allocation, one a release), as in PyTorch's memory viewer: a phase of many small
kernels is as wide as it has allocations, and two runs of the same code have the same axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# From the bottom of the picture to its top: what lives longest first.
CATEGORIES = ("parameters", "optimizer", "gradients", "activations", "temporaries")


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """One block of memory and its life."""

    num_bytes: int
    born: int  # the event that made it
    died: int | None  # the event that released it; None: alive at the end
    category: str  # one of CATEGORIES
    where: str = ""  # the operation, and the line of source that asked for it


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the run, from event `start` to the next phase's."""

    name: str
    start: int


@dataclass(frozen=True, kw_only=True)
class Large:
    """Allocations of one size and origin."""

    num_bytes: int  # of each
    count: int
    category: str
    where: str


@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """All allocations of a run. Events are numbered 0 to `num_events` - 1; phases are in order and cover them all."""

    allocations: Sequence[Allocation]
    phases: Sequence[Phase]
    num_events: int

    def active_bytes(self, category: str | None = None) -> np.ndarray:
        """Bytes allocated after each event, of one category or of all: int64, (num_events,)."""
        if category is not None and category not in CATEGORIES:
            raise ValueError(f"category must be one of {', '.join(CATEGORIES)}, got {category!r}")
        change = np.zeros(self.num_events + 1, dtype=np.int64)
        for allocation in self.allocations:
            if category in (None, allocation.category):
                change[allocation.born] += allocation.num_bytes
                if allocation.died is not None:
                    change[allocation.died] -= allocation.num_bytes
        return change.cumsum()[: self.num_events]

    def peak_bytes(self) -> int:
        return int(self.active_bytes().max(initial=0))

    def peak_event(self) -> int:
        """The first event after which the most bytes are allocated."""
        return int(self.active_bytes().argmax()) if self.num_events else 0

    def phase_peaks(self) -> dict[str, int]:
        """The most bytes allocated within each phase, what was already there when it began included."""
        active = self.active_bytes()
        peaks = {}
        for phase, end in zip(self.phases, [*(phase.start for phase in self.phases[1:]), self.num_events]):
            at_start = int(active[phase.start - 1]) if 0 < phase.start <= self.num_events else 0
            peaks[phase.name] = max(at_start, int(active[phase.start : end].max(initial=0)))
        return peaks

    def phase_of(self, event: int) -> str:
        names = [phase.name for phase in self.phases if phase.start <= event]
        return names[-1] if names else ""

    def alive(self, event: int) -> list[Allocation]:
        """What is allocated after `event`."""
        return [one for one in self.allocations if one.born <= event and (one.died is None or one.died > event)]

    def breakdown(self, event: int) -> dict[str, int]:
        """Bytes by category after `event`; every category is there."""
        found = dict.fromkeys(CATEGORIES, 0)
        for allocation in self.alive(event):
            found[allocation.category] += allocation.num_bytes
        return found

    def largest(self, count: int, phases: Sequence[str] | None = None) -> list[Large]:
        """The `count` largest kinds of allocations made in `phases` (default: all), by size and origin."""
        grouped: dict[tuple[int, str, str], int] = {}
        for one in self.allocations:
            if phases is None or self.phase_of(one.born) in phases:
                key = (one.num_bytes, one.category, one.where)
                grouped[key] = grouped.get(key, 0) + 1
        kinds = sorted(grouped.items(), key=lambda item: (-item[0][0], item[0]))[:count]
        return [
            Large(num_bytes=size, count=times, category=category, where=where)
            for (size, category, where), times in kinds
        ]

    def sampled(self, points: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(events, {category: bytes}) at no more than `points` events: of each bucket the one with the most bytes.

        The peak is therefore among them. ValueError if `points` is not positive.
        """
        if points < 1:
            raise ValueError(f"points must be positive, got {points}")
        active = self.active_bytes()
        edges = np.linspace(0, self.num_events, min(points, self.num_events) + 1).astype(int)
        events = np.array(
            [start + int(active[start:end].argmax()) for start, end in zip(edges[:-1], edges[1:])], dtype=np.int64
        )
        return events, {category: self.active_bytes(category)[events] for category in CATEGORIES}
