"""Table, figure and sentences of `hopper_ladder`: what each rung adds to the one before, and how far cuDNN is."""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems.report.comparisons import real
from cs336_systems.report.frames import MODE_TITLES, tuples
from cs336_systems.report.markdown import Cells, factor, number
from cs336_systems.report.points import Plot, points
from cs336_systems.report.sections import Section, constants, present_modes, section, speed_up
from cs336_systems.report.shapes import short_shape, times, with_shapes

PROBLEM = "hopper_ladder"
MARK = "sdpa_cudnn"
RUNGS = {  # in the order of the table; what is new
    "triton_pointers": "Triton, tiles read through pointers",
    "triton_tma": "tiles read by TMA",
    "hopper_deterministic": "Gluon forward, warp-specialised",
    "hopper": "Gluon backward of five matmuls",
    MARK: "cuDNN",
}


def tables(frame: pd.DataFrame) -> list[Section]:
    """Rungs down; TFLOP/s of each pass, what a rung adds to the one before, and its share of cuDNN's."""
    frame = _rungs(frame)
    modes = present_modes(frame)
    found = {mode: {(row.shape, row.rung): row for row in tuples(times(frame, mode))} for mode in modes}
    cells = Cells()
    lines = []
    for shape in dict.fromkeys(frame["shape"]):
        for rung, before in zip(RUNGS, (None, *RUNGS)):
            line = [shape, RUNGS[rung]]
            for mode in modes:
                row, last, mark = (found[mode].get((shape, name)) for name in (rung, before, MARK))
                added = factor(speed_up(last, row)) if rung != MARK else "–"
                line += [cells.text(row, "tflops"), added, factor(speed_up(mark, row))]
            lines.append(line)
    heads = [head for mode in modes for head in (f"{MODE_TITLES[mode]} (TFLOP/s)", "over the last", "over cuDNN")]
    cells.remark("over the last: over the rung above in the table")
    cells.remark("the third rung's backward is the second's, in two passes and bit-reproducible; the fourth's is not")
    title = f"Rung by rung, {constants(frame)}"
    return [section("rungs", title, ["batch × heads × S × d", "rung", *heads], lines, 2, cells)]


def plots(frame: pd.DataFrame) -> list[Plot]:
    """TFLOP/s of each rung by shape, a panel for each pass; nothing where no rung has a rate, as on a CPU."""
    frame = _rungs(frame)
    parts = []
    for mode in present_modes(frame):
        rows = times(frame, mode)
        rows = rows.assign(short=[short_shape(row) for row in tuples(rows)], what=rows["rung"].map(RUNGS))
        marks = points(rows, panel=(), series="what", style="implementation", x="short")
        marks["y"] = list(rows["tflops"])
        parts.append(marks.assign(panel=MODE_TITLES[mode], low=float("nan"), high=float("nan")))
    if not any(part["drawn"].any() for part in parts):
        return []
    title = f"What each rung adds on {frame['device'].iloc[0]}\n{constants(frame)}"
    data = pd.concat(parts, ignore_index=True)
    return [
        Plot(
            name="rungs", title=title, kind="bars", data=data, x_label="batch × heads × length × head dim, mask",
            y_label="speed (TFLOP/s)", log_y=False,
        )
    ]  # fmt: skip


def answers(frame: pd.DataFrame) -> list[str]:
    """For each shape and pass the rungs' rates as one sentence."""
    frame = _rungs(frame)
    said = []
    for mode in present_modes(frame):
        for shape, rows in times(frame, mode).groupby("shape", sort=False):
            timed: dict[str, Any] = {row.rung: row for row in tuples(real(rows))}
            parts = [f"{RUNGS[rung]} {number(timed[rung].tflops, 3)}" for rung in RUNGS if rung in timed]
            if len(parts) > 1:
                said.append(f"{shape}, {MODE_TITLES[mode]}, in TFLOP/s: {'; '.join(parts)}.")
    return said


def _rungs(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with the columns `shape` and `rung`, in the order of both; other implementations left out."""
    frame = frame[frame["implementation"].isin(RUNGS)]
    frame = frame.assign(rung=frame["implementation"], place=frame["implementation"].map(list(RUNGS).index))
    return with_shapes(frame.sort_values("place", kind="stable"))


LADDER_CASES = {PROBLEM: ("AttentionShape",)}
LADDER_TABLES = {PROBLEM: tables}
LADDER_PLOTS = {PROBLEM: plots}
LADDER_ANSWERS = {PROBLEM: answers}
