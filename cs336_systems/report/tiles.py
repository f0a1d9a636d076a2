"""Tables and sentences of `tile_choice`: the table's tiles beside the best of the grid, and beside one fixed tile.

A ratio is a quotient of medians of one run. The best of the grid may be the table's own configuration: then it is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from cs336_systems.report.comparisons import real
from cs336_systems.report.frames import select, tuples
from cs336_systems.report.markdown import ABSENT, Cells, factor, plain
from cs336_systems.report.sections import Section, constants, section, speed_up
from cs336_systems.report.shapes import heads_in_words

PROBLEM = "tile_choice"
TABLE = "table"  # the implementation of a whole backward under the table's tiles; of one kernel, table_<kernel>
COMPILE_AHEAD = "compile_ahead"
FIXED = {"fixed": "by pointers", "fixed_tma": "by TMA"}
KERNELS = {"forward": "time", "dkdv": "dkdv_time", "dq": "dq_time"}  # with the quantity that times each alone
MAX_RATIO = 1.15  # of the table's time to the best's: what a table row may cost
MIN_GAIN = 1.15  # of the fixed tile's time to the table's: what choosing is worth having


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One kernel on one shape: rows of the frame."""

    shape: str
    kernel: str
    chosen: Any  # None where no record is
    best: Any  # the fastest of all, None where nothing has a time that says something
    tried: int  # configurations with a record, the table's included
    untimed: list[Any]  # those of them without a time

    @property
    def ratio(self) -> float:
        """The chosen one's time over the best's; NaN where either is missing or interpreted."""
        return speed_up(self.chosen, self.best)


def tables(frame: pd.DataFrame) -> list[Section]:
    """`grid`: shapes and kernels down, the table's and the best tiles across. `fixed`: whole backwards."""
    frame = _with_shapes(frame)
    found = [_grid(frame), _fixed(frame)]
    return [part for part in found if part is not None]


def answers(frame: pd.DataFrame) -> list[str]:
    """How far the tables are from the best, with the worst case; what choosing brings over a fixed tile."""
    frame = _with_shapes(frame)
    said = []
    judged = [choice for choice in choices(frame) if choice.ratio == choice.ratio]
    if judged:
        worst = max(judged, key=lambda choice: choice.ratio)
        within = sum(choice.ratio <= MAX_RATIO for choice in judged)
        said.append(
            f"Over {len(judged)} kernels and shapes the table's tiles take at most {factor(worst.ratio)} the time of "
            f"the best of the grid ({worst.kernel} at {worst.shape}); {_of(within, len(judged))} within {MAX_RATIO}×."
        )
    for name, how in FIXED.items():
        gains = [gain for _, gain in fixed_gains(frame, name) if gain == gain]
        if gains:
            reached = sum(gain >= MIN_GAIN for gain in gains)
            lowest, highest = factor(min(gains)), factor(max(gains))
            said.append(
                f"The chosen backward has {lowest} to {highest} the speed of one with tiles of 64 × 64 and four warps "
                f"that reads {how}; {_of(reached, len(gains))} at {MIN_GAIN}× or more."
            )
    return said


def choices(frame: pd.DataFrame) -> list[Choice]:
    """Each kernel on each shape that has records, shapes in the frame's order."""
    found = []
    for kernel, quantity in KERNELS.items():
        mode = "forward" if kernel == "forward" else "backward"
        rows = frame[(frame["quantity"] == quantity) & (frame["mode"] == mode)]
        rows = rows[~rows["implementation"].isin([TABLE, *FIXED])]
        for shape, group in rows.groupby("shape", sort=False):
            chosen = group[group["implementation"] == f"{TABLE}_{kernel}"]
            best = real(group).sort_values("median", kind="stable")
            found.append(
                Choice(
                    shape=str(shape),
                    kernel=kernel,
                    chosen=tuples(chosen)[0] if len(chosen) else None,
                    best=tuples(best)[0] if len(best) else None,
                    tried=len(group),
                    untimed=tuples(group[group["status"] != "ok"]),
                )
            )
    order = list(dict.fromkeys(frame["shape"]))
    return sorted(found, key=lambda choice: order.index(choice.shape))


def fixed_gains(frame: pd.DataFrame, name: str) -> list[tuple[str, float]]:
    """(shape, the speed of the chosen backward over that of the fixed tile `name`), NaN where either has no time."""
    return [(shape, speed_up(by_name.get(name), by_name.get(TABLE))) for shape, by_name in _backwards(frame).items()]


def _grid(frame: pd.DataFrame) -> Section | None:
    cells = Cells()
    lines = []
    found = choices(frame)
    if not found:
        return None
    for choice in found:
        best = "" if choice.best is None else _tiles(choice.best, choice.kernel)
        lines.append(
            [
                choice.shape, choice.kernel, _tiles(choice.chosen, choice.kernel), cells.time(choice.chosen),
                best or ABSENT, ABSENT if choice.best is None else cells.time(choice.best), factor(choice.ratio),
                _timed(choice, cells),
            ]
        )  # fmt: skip
    cells.remark("table / best: the table's time over the best's; dkdv and dq are timed alone, within a backward")
    cells.remark("timed: configurations of the grid, the table's included")
    for row in tuples(frame[frame["implementation"] == COMPILE_AHEAD]):
        cells.remark(f"compiling the grid ahead, in all cores (s): {cells.text(row)}")
    ratios = [choice.ratio for choice in found if choice.ratio == choice.ratio]
    if ratios:
        within = sum(ratio <= MAX_RATIO for ratio in ratios)
        cells.remark(f"verdict: {_of(within, len(ratios))} within {MAX_RATIO}× of the best")
    header = ["batch × heads × S × d", "kernel", "table", "(ms)", "best", "(ms)", "table / best", "timed"]
    rows = frame[frame["implementation"].isin([f"{TABLE}_{kernel}" for kernel in KERNELS])]
    title = f"The table's tiles beside the best of the grid, {constants(rows if len(rows) else frame)}"
    return section("grid", title, header, lines, 3, cells)


def _fixed(frame: pd.DataFrame) -> Section | None:
    backwards = _backwards(frame)
    if not backwards:
        return None
    cells = Cells()
    lines = []
    for shape, by_name in backwards.items():
        rows = [by_name.get(name) for name in (TABLE, *FIXED)]
        gains = [factor(speed_up(row, rows[0])) for row in rows[1:]]
        lines.append([shape, *map(cells.time, rows), *gains])
    cells.remark("fixed: tiles of 64 × 64, four warps and two stages in both kernels, read by pointers or by TMA")
    for name, how in FIXED.items():
        gains_of = [gain for _, gain in fixed_gains(frame, name) if gain == gain]
        if gains_of:
            reached = sum(gain >= MIN_GAIN for gain in gains_of)
            cells.remark(f"verdict, fixed {how}: {_of(reached, len(gains_of))} at {MIN_GAIN}× or more")
    names = [f"fixed {how}" for how in FIXED.values()]
    header = ["batch × heads × S × d", "table (ms)", *(f"{name} (ms)" for name in names)]
    header += [f"table over {name}" for name in names]
    common = constants(frame[frame["implementation"].isin([TABLE, *FIXED])])
    return section("fixed", f"Backward under chosen and fixed tiles, {common}", header, lines, 1, cells)


def _backwards(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Rows of whole backwards by shape and implementation."""
    rows = frame[frame["implementation"].isin([TABLE, *FIXED])]
    if not len(rows):
        return {}
    rows = select(rows, "time", "backward")
    return {
        str(shape): {row.implementation: row for row in tuples(group)}
        for shape, group in rows.groupby("shape", sort=False)
    }


def _with_shapes(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with the column `shape`, which tells the cases apart, by head dim, mask and length."""
    frame = frame.assign(shape=[_words(row) for row in tuples(frame)], full=~frame["causal"].astype(bool))
    order = ["head_dim", "full", "seqlen", "batch", "heads", "shape"]
    return frame.sort_values(order, kind="stable", ignore_index=True)


def _words(row: Any) -> str:
    """`1 × 32/8 × 8192 × 128 causal`."""
    sizes = " × ".join([plain(row.batch), heads_in_words(row), plain(row.seqlen), plain(row.head_dim)])
    return f"{sizes} {'causal' if row.causal else 'full'}"


def _timed(choice: Choice, cells: Cells) -> str:
    """How many of the configurations have a time, and what became of the others: `22 of 24, skipped [1]`."""
    counts = f"{choice.tried - len(choice.untimed)} of {choice.tried}"
    return ", ".join(dict.fromkeys([counts, *map(cells.text, choice.untimed)]))


def _tiles(row: Any, kernel: str) -> str:
    """The tiles of `kernel` in what ran, as a table's row writes them; – where nothing ran."""
    if row is None:
        return ABSENT
    mark = f"_{kernel}_"
    return next((name.partition(mark)[2] for name in row.kernel.split() if mark in name), ABSENT)


def _of(count: int, total: int) -> str:
    """`all 36`, `35 of 36`."""
    return f"all {total} are" if count == total else f"{count} of {total} are"


TILE_CASES = {PROBLEM: ("AttentionShape",)}
TILE_TABLES = {PROBLEM: tables}
TILE_ANSWERS = {PROBLEM: answers}
