"""Chrome traces of torch.profiler: what ran, for how long, and for which part of the model.

    trace = trace_of(read_events(Path("step.trace.json")))
    trace.kernel_ms(category="gemm")                    # of all steps
    for row in trace.top_kernels(3): print(row.name, row.calls, row.ms)

On a GPU the work is the device's kernels and copies; without one it is the CPU operators, each
counted with its own time (without what it called). A kernel belongs to the ranges that were open
where it was launched. Backward operators are launched by autograd, outside of any module, but carry
the sequence number of the forward operator that they differentiate: they belong to that one's
ranges, with `phase` "backward". What an optimizer's step launches is the phase "optimizer" and the
category `optimizer`, whatever its name.

Times in a trace are microseconds; results here are milliseconds.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cs336_systems.measure.intervals import length, union
from cs336_systems.measure.kernel_names import categorize, short_name
from cs336_systems.measure.ranges import STEP

Phase = Literal["forward", "backward", "optimizer"]
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
BACKWARD_OPERATOR = "autograd::engine::evaluate_function"
OPTIMIZER_RANGE = "Optimizer.step#"
# Fields of each event that is read.
EVENT_FIELDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "ts": (float, int),
    "dur": (float, int),
    "pid": (int, str),
    "tid": (int, str),
}
# Fields of an event's "args", each of which may be absent.
ARGUMENTS: dict[str, tuple[type, ...]] = {
    "Sequence number": (int,),
    "correlation": (int, str),
    "External id": (int, str),
}
READ_CATEGORIES = (*DEVICE_CATEGORIES, *LAUNCH_CATEGORIES, "cpu_op", "user_annotation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One execution of a kernel, or the own time of one CPU operator."""

    name: str  # as the trace has it
    category: str  # see kernel_names.CATEGORIES
    phase: Phase
    start_us: float
    duration_us: float
    ranges: tuple[str, ...]  # open where it was launched, the outermost first
    step: int  # which repetition (`ranges.STEP`) it belongs to; -1 outside of all


@dataclass(frozen=True, kw_only=True)
class KernelTotal:
    """All executions of the kernels that share a (short) name."""

    name: str
    category: str
    calls: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The kernels of a trace, and the wall clock of its steps."""

    kernels: tuple[Kernel, ...]
    on_gpu: bool  # whether kernels ran on a device, or are CPU operators
    # wall clock of each profiled step, with the profiler's own cost
    step_ms: tuple[float, ...] = ()

    def select(self, *, within: str = "", **wanted: Any) -> list[Kernel]:
        """Return the kernels launched in a range whose name starts with `within`.

        `wanted` are values that the kernels' fields must have: `category`, `phase`, `step`.
        """
        return [
            kernel
            for kernel in self.kernels
            if (not within or any(name.startswith(within) for name in kernel.ranges))
            and all(getattr(kernel, name) == value for name, value in wanted.items())
        ]

    def in_steps(self) -> Trace:
        """Return this trace without what ran outside of the profiled steps (preparing each)."""
        return replace(self, kernels=tuple(kernel for kernel in self.kernels if kernel.step >= 0))

    def kernel_ms(self, **selection: Any) -> float:
        """Return the summed duration of what `select` returns; kernels that overlap count each."""
        return sum(kernel.duration_us for kernel in self.select(**selection)) / 1e3

    def busy_ms(self, **selection: Any) -> float:
        """Return the time in which at least one selected kernel ran.

        On a CPU it is an estimate, since an operator's own time is in pieces.
        """
        chosen = self.select(**selection)
        return length(union((one.start_us, one.start_us + one.duration_us) for one in chosen)) / 1e3

    def top_kernels(self, count: int | None = None, **selection: Any) -> list[KernelTotal]:
        """Return totals by short name and category of the selected kernels, the longest first.

        Ties are ordered by name, so that the same trace gives the same order. `count` limits the
        list.
        """
        groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
        for kernel in self.select(**selection):
            groups[short_name(kernel.name), kernel.category].append(kernel)
        totals = [
            KernelTotal(
                name=name,
                category=category,
                calls=len(group),
                ms=sum(k.duration_us for k in group) / 1e3,
            )
            for (name, category), group in groups.items()
        ]
        return sorted(totals, key=lambda total: (-total.ms, total.name))[:count]


# Reading


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the entries of "traceEvents" in the profiler's file at `path`, .json or .json.gz.

    A file that is the list alone, which the format allows, is read, too. Raises ValueError naming
    any other file.
    """
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise ValueError(f"{path.name}: not a regular file")
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = json.loads(file.read().decode(errors="replace"))
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError, RecursionError) as error:
        hint = ""
        if isinstance(error, json.JSONDecodeError):
            hint = "; torch.profiler escapes no double quote in the name of a range"
        raise ValueError(f"{path.name}: no chrome trace: {error}{hint}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(
            f"{path.name}: no chrome trace: it has no list of objects under 'traceEvents'"
        )
    return events


def trace_of(events: Sequence[dict[str, Any]]) -> Trace:
    """Return the trace that `events`, the entries of "traceEvents", describe.

    Raises ValueError naming the event, of those that are read, that lacks what torch.profiler gives
    each.
    """
    complete = [
        event for event in events if event.get("ph") == "X" and event.get("cat") in READ_CATEGORIES
    ]
    for event in complete:
        _check(event)

    sites = _launch_sites(complete)
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"]) for event in complete if event["name"] == STEP
    )
    on_gpu = any(event["cat"] in DEVICE_CATEGORIES for event in complete)
    if on_gpu:
        kernels = _device_kernels(complete, sites, steps)
    else:
        # The operators, each with its own time.
        operators = [site for site in sites if site.event["cat"] == "cpu_op"]
        kernels = [_kernel(site.event, site, max(0.0, site.own_us), steps) for site in operators]
    return Trace(
        kernels=tuple(sorted(kernels, key=lambda kernel: kernel.start_us)),
        on_gpu=on_gpu,
        step_ms=tuple((end - start) / 1e3 for start, end in steps),
    )


def _check(event: dict[str, Any]) -> None:
    """Raise ValueError if `event` has no name, place or time, or has them of another type."""
    arguments = event.get("args", {})
    if not isinstance(arguments, dict):
        raise ValueError(
            f"an event's 'args' must be an object, "
            f"got {arguments!r:.100} of {event.get('name')!r:.100}"
        )
    fields = {field: event.get(field) for field in EVENT_FIELDS}
    fields |= {field: arguments[field] for field in ARGUMENTS if field in arguments}
    for field, value in fields.items():
        types = EVENT_FIELDS.get(field) or ARGUMENTS[field]
        if not isinstance(value, types) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(
                f"an event's {field!r} must be a {types[0].__name__}, got {value!r:.100} of "
                f"{event.get('name')!r:.100}"
            )


@dataclass(kw_only=True, slots=True)
class _Site:
    """A range, an operator or a launch on a host thread."""

    event: dict[str, Any]
    end_us: float
    own_us: float  # without the operators that it called
    ranges: tuple[str, ...]  # open there, its own included
    differentiates: int | None  # the forward's sequence number, inside of a backward operator

    @property
    def phase(self) -> Phase:
        """Return the phase of what is launched here."""
        if any(name.startswith(OPTIMIZER_RANGE) for name in self.ranges):
            return "optimizer"
        return "forward" if self.differentiates is None else "backward"


def _launch_sites(events: Sequence[dict[str, Any]]) -> list[_Site]:
    """Return every operator and launch with its ranges.

    Backward ones have the ranges of their forward, too.
    """
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["cat"] not in DEVICE_CATEGORIES:
            threads[event["pid"], event["tid"]].append(event)

    sites: list[_Site] = []
    # sequence number -> start and ranges of the last forward operator with it
    forward_ranges: dict[int, tuple[float, tuple[str, ...]]] = {}
    for thread in threads.values():
        open_sites: list[_Site] = []  # the innermost last
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            start, duration, name = event["ts"], event["dur"], event["name"]
            # Events of a thread nest: what encloses this one is still open.
            while open_sites and open_sites[-1].end_us <= start:
                open_sites.pop()
            outer = open_sites[-1] if open_sites else None
            ranges = () if outer is None else outer.ranges

            # The sequence number joins a forward operator with its backward one.
            found = event.get("args", {}).get("Sequence number", -1)
            number = found if found >= 0 else None
            differentiates = number if name.startswith(BACKWARD_OPERATOR) else None
            if differentiates is None and outer is not None:
                differentiates = outer.differentiates

            if event["cat"] == "user_annotation":
                ranges = (*ranges, name)
            site = _Site(
                event=event,
                end_us=start + duration,
                own_us=duration,
                ranges=ranges,
                differentiates=differentiates,
            )
            # An operator's time is not its caller's own.
            if event["cat"] == "cpu_op":
                caller = next(
                    (one for one in reversed(open_sites) if one.event["cat"] != "user_annotation"),
                    None,
                )
                if caller is not None:
                    caller.own_us -= duration

            open_sites.append(site)
            if event["cat"] != "user_annotation":
                sites.append(site)
                if (
                    differentiates is None
                    and number is not None
                    and start >= forward_ranges.get(number, (start,))[0]
                ):
                    forward_ranges[number] = start, ranges

    # Backward sites take the ranges of their forward, too.
    for site in sites:
        if site.phase == "backward" and site.differentiates in forward_ranges:
            site.ranges = tuple(
                dict.fromkeys((*site.ranges, *forward_ranges[site.differentiates][1]))
            )
    return sites


def _device_kernels(
    events: Sequence[dict[str, Any]], sites: Sequence[_Site], steps: Sequence[tuple[float, float]]
) -> list[Kernel]:
    """Return the device's kernels, each joined with its launch by the correlation number.

    If no launch was recorded, or its time stamp lies outside of all ranges by the clocks'
    difference, the operator that the kernel names as its origin ("External id") stands in.
    """
    launches, operators = {}, {}
    for site in sites:
        arguments = site.event.get("args", {})
        if site.event["cat"] == "cpu_op":
            operators[arguments.get("External id")] = site
        elif "correlation" in arguments:
            launches[arguments["correlation"]] = site

    kernels = []
    for event in events:
        if event["cat"] in DEVICE_CATEGORIES:
            arguments = event.get("args", {})
            launch = launches.get(arguments.get("correlation"))
            if (launch is None or not launch.ranges) and "External id" in arguments:
                launch = operators.get(arguments["External id"], launch)
            kernels.append(_kernel(event, launch, event["dur"], steps))
    return kernels


def _kernel(
    event: dict[str, Any],
    site: _Site | None,
    duration_us: float,
    steps: Sequence[tuple[float, float]],
) -> Kernel:
    """Return the kernel of `event`, in the step in which it was launched.

    It may run after that step's end on the host.
    """
    launched = (event if site is None else site.event)["ts"]
    step = bisect_right(steps, launched, key=lambda step: step[0]) - 1
    phase: Phase = "forward" if site is None else site.phase
    return Kernel(
        name=event["name"],
        category="optimizer" if phase == "optimizer" else categorize(event["name"]),
        phase=phase,
        start_us=event["ts"],
        duration_us=duration_us,
        ranges=() if site is None else site.ranges,
        step=step if step >= 0 and launched < steps[step][1] else -1,
    )
