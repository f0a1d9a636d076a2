"""When a device computed and when it communicated in one call, read from a torch.profiler trace.

    lanes = trace_lanes(step, device="cuda")
    lanes.communication_ms    # time of communication
    lanes.overlap_ms          # its part that ran beside compute

On CUDA the trace says when each kernel ran: those of NCCL communicate, the others (and copies)
compute. On a CPU the operators of ATen compute, and gloo's own spans, which it records in its
threads, communicate. A kernel of NCCL also spins while it waits for other ranks, so that
communication includes their delay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity

from cs336_systems.measure.capture import record_events
from cs336_systems.measure.intervals import Interval, length, union
from cs336_systems.measure.timing import synchronize
from cs336_systems.measure.trace import DEVICE_CATEGORIES

US_PER_MS = 1e3


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Disjoint intervals of compute and communication, in milliseconds from the first of them."""

    compute: list[Interval]
    communication: list[Interval]

    @property
    def compute_ms(self) -> float:
        """Return the time in which compute ran."""
        return length(self.compute)

    @property
    def communication_ms(self) -> float:
        """Return the time in which communication ran."""
        return length(self.communication)

    @property
    def overlap_ms(self) -> float:
        """Return the time in which both ran: `compute_ms` and `communication_ms` both count it."""
        either_ms = length(union([*self.compute, *self.communication]))
        return max(0.0, self.compute_ms + self.communication_ms - either_ms)

    @property
    def span_ms(self) -> float:
        """Return the time from the first to the last of all intervals."""
        return max((end for _, end in [*self.compute, *self.communication]), default=0.0)


def trace_lanes(call: Callable[[], object], device: str) -> Lanes:
    """Return the lanes of one `call` in this process, after another one that is not traced."""

    def run() -> None:
        call()
        synchronize(device)

    activities = [ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]
    run()
    return read_lanes(record_events(run, activities), device)


def read_lanes(events: list[dict[str, Any]], device: str) -> Lanes:
    """Return the lanes in the events of a Chrome trace, whose times are microseconds."""
    compute: list[Interval] = []
    communication: list[Interval] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        start = float(event["ts"]) / US_PER_MS
        interval = (start, start + float(event.get("dur", 0)) / US_PER_MS)
        name, category = str(event.get("name", "")), str(event.get("cat", ""))
        if device == "cuda":
            if category in DEVICE_CATEGORIES:
                (communication if "nccl" in name.lower() else compute).append(interval)
        elif name.startswith("gloo:") and name != "gloo:barrier":
            communication.append(interval)
        elif category == "cpu_op" and name.startswith("aten::"):
            compute.append(interval)
    origin = min((start for start, _ in [*compute, *communication]), default=0.0)

    def shifted(intervals: list[Interval]) -> list[Interval]:
        return [(start - origin, end - origin) for start, end in union(intervals)]

    return Lanes(compute=shifted(compute), communication=shifted(communication))
