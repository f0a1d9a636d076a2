"""Table and sentences of `kernel_counters`: how busy the units of a multiprocessor are, and what warps wait for."""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems.report.frames import MODE_TITLES, MODES, OUR_KERNELS, labels, ordered, tuples
from cs336_systems.report.markdown import Cells, number
from cs336_systems.report.sections import Section, constants, section
from cs336_systems.report.shapes import CUDNN, with_shapes

PROBLEM = "kernel_counters"
PIPES = {  # quantity: heading of its column
    "tensor_pipe": "tensor cores (%)",
    "exponential_pipe": "exponentials (%)",
    "issue_slots": "issue slots (%)",
}
STALL = "stall_"
NO_WAIT = ("stall_selected", "stall_not_selected")  # ready, and issued or not
NUM_WAITS = 3


def tables(frame: pd.DataFrame) -> list[Section]:
    """A line for each kernel: time alone, clock, shares of cycles in which units are busy, the longest waits."""
    frame = with_shapes(frame)
    cells = Cells()
    lines = []
    for shape in dict.fromkeys(frame["shape"]):
        for mode in ordered(frame["mode"], MODES):
            for label in labels(frame):
                found = _quantities(frame, shape, mode, label)
                if not found:
                    continue
                line = [shape, MODE_TITLES[mode], label]
                line += [cells.text(found.get("kernel_time")), cells.text(found.get("sm_clock"))]
                line += [cells.text(_in_percent(found.get(pipe))) for pipe in PIPES]
                lines.append([*line, _words(_longest_waits(found)) or "–"])
    header = ["batch × heads × S × d", "pass", "kernel of", "alone (ms)", "clock (GHz)", *PIPES.values()]
    cells.remark("tensor cores, exponentials, issue slots: share of a multiprocessor's cycles in which they are busy")
    cells.remark("waits: cycles that a warp waits for each instruction that it issues, the longest first")
    cells.remark("alone: under the profiler, from a cold cache and without other load; not a benchmark's time")
    title = f"Counters of each pass's longest kernel, {constants(frame)}"
    return [section("counters", title, [*header, "longest waits"], lines, 3, cells)]


def answers(frame: pd.DataFrame) -> list[str]:
    """For each shape and pass how busy the tensor cores are, ours and cuDNN's, and what ours waits for."""
    frame = with_shapes(frame)
    said = []
    for shape in dict.fromkeys(frame["shape"]):
        for mode in ordered(frame["mode"], MODES):
            by_name = {name: _quantities(frame, shape, mode, name) for name in (*OUR_KERNELS, CUDNN)}
            busy = {name: _value(found.get("tensor_pipe")) for name, found in by_name.items()}
            parts = [f"{number(100 * share, 3)} % of {name}'s" for name, share in busy.items() if share is not None]
            if not parts:
                continue
            sentence = f"{shape}, {MODE_TITLES[mode]}: the tensor cores are busy in {', '.join(parts)} cycles"
            waits = _words(_longest_waits(by_name["hopper"]))
            said.append(sentence + (f"; a warp of hopper waits longest for {waits}." if waits else "."))
    return said


def _quantities(frame: pd.DataFrame, shape: str, mode: str, label: str) -> dict[str, Any]:
    rows = frame[(frame["shape"] == shape) & (frame["mode"] == mode) & (frame["label"] == label)]
    return {row.quantity: row for row in tuples(rows)}


def _value(row: Any) -> float | None:
    return float(row.median) if row is not None and row.status == "ok" else None


def _in_percent(row: Any) -> Any:
    return row if _value(row) is None else row._replace(median=100 * row.median)


def _longest_waits(found: dict[str, Any]) -> list[tuple[str, float]]:
    """The longest waits with their cycles, of what is a wait at all."""
    waits = [
        (quantity.removeprefix(STALL), value)
        for quantity, row in found.items()
        if quantity.startswith(STALL) and quantity not in NO_WAIT and (value := _value(row))
    ]
    return sorted(waits, key=lambda wait: -wait[1])[:NUM_WAITS]


def _words(waits: list[tuple[str, float]]) -> str:
    return ", ".join(f"`{name}` {number(cycles, 3)}" for name, cycles in waits)


COUNTER_CASES = {PROBLEM: ("AttentionShape",)}
COUNTER_TABLES = {PROBLEM: tables}
COUNTER_ANSWERS = {PROBLEM: answers}
