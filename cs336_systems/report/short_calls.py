"""Tables, figures and sentences of `short_calls`: what a call takes, and ours over SDPA's kernels in the same round.

    tables(frame)      # time, host_time, graph_time (µs): shapes and modes down, implementations and ratios across

A sample is a round's, in which everybody had a turn, so a ratio is the middle one of the rounds' own ratios.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from cs336_systems.measure.samples import Summary, summarize
from cs336_systems.report.frames import MODE_TITLES, MODES, OUR_KERNELS, labels, ordered, tuples
from cs336_systems.report.markdown import ABSENT, Cells, factor, number
from cs336_systems.report.points import Plot, points
from cs336_systems.report.sections import Section, constants, section
from cs336_systems.report.shapes import short_shape, with_shapes

PROBLEM = "short_calls"
CUDNN, FLASH = "sdpa_cudnn", "sdpa_flash"
PEERS = (CUDNN, FLASH)
MS_PER_US = 1e-3
# By quantity: what the table is titled, and what a sentence says of a call.
QUANTITIES = {
    "time": ("Calls in a row", "called in a row, takes"),
    "host_time": ("What a call keeps the host from", "keeps the host for"),
    "graph_time": ("Calls in a replayed CUDA graph", "in a replayed CUDA graph, takes"),
}


def tables(frame: pd.DataFrame) -> list[Section]:
    """µs of a call, medians, with the ratios of ours to each of SDPA's kernels; a section for each quantity."""
    frame = with_shapes(frame)
    return [_section(quantity, rows) for quantity, rows in _by_quantity(frame)]


def plots(frame: pd.DataFrame) -> list[Plot]:
    """The time of each implementation over cuDNN's in the same round, a figure for each quantity with a ratio."""
    frame = with_shapes(frame)
    found = []
    for quantity, rows in _by_quantity(frame):
        rows = _over_cudnn(rows)
        data = points(rows, panel=(), series="label", style="implementation", x="short")
        data["panel"] = [MODE_TITLES[row.mode] for row in tuples(rows)]
        title = f"{QUANTITIES[quantity][0]} on {frame['device'].iloc[0]}, {constants(rows)}"
        found.append(
            Plot(
                name=quantity, title=title, kind="bars", data=data, x_label="batch × heads × length × head dim, mask",
                y_label="time / time of sdpa_cudnn (lower is better)", log_y=False, line_at=1.0,
                notes=("Bars: median of the rounds' ratios; whiskers: their quartiles.",),
            )
        )  # fmt: skip
    return [plot for plot in found if (plot.data["drawn"] & plot.data["y"].notna()).any()]  # cuDNN's may not have run


def answers(frame: pd.DataFrame) -> list[str]:
    """A sentence for each quantity, mode and kernel of ours: the range of its ratios to each of SDPA's kernels."""
    frame = with_shapes(frame)
    said = []
    for quantity, rows in _by_quantity(frame):
        for mode in ordered(rows["mode"], MODES):
            for ours in OUR_KERNELS:
                parts = [_range(rows[rows["mode"] == mode], ours, peer) for peer in PEERS]
                if any(parts):
                    what = f"A call of {ours}, {MODE_TITLES[mode]}, {QUANTITIES[quantity][1]}"
                    said.append(f"{what} {' and '.join(part for part in parts if part)}.")
    return said


def ratio(ours: Any, theirs: Any) -> Summary | None:
    """What `ratios` come to; None where there are none."""
    by_round = ratios(ours, theirs)
    return summarize(by_round) if by_round else None


def ratios(ours: Any, theirs: Any) -> list[float]:
    """The times of `ours` over those of `theirs`, round by round; none unless both are of the same rounds.

    Those have one date, since all rows of a cell are written together.
    """
    if ours is None or theirs is None or ours.status != "ok" or theirs.status != "ok" or ours.date != theirs.date:
        return []
    if ours.interpreted or theirs.interpreted or 0.0 in theirs.values:  # a clock that saw nothing
        return []
    return [mine / other for mine, other in zip(ours.values, theirs.values)]


def _by_quantity(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for quantity in QUANTITIES:
        rows = frame[frame["quantity"] == quantity]
        if len(rows):
            yield quantity, rows


def _section(quantity: str, rows: pd.DataFrame) -> Section:
    rows = rows.assign(microseconds=rows["median"] / MS_PER_US)
    across = labels(rows)
    pairs = [(ours, peer) for ours in OUR_KERNELS if ours in across for peer in PEERS if peer in across]
    cells = Cells()
    lines = []
    for (shape, mode), group in rows.groupby(["shape", "mode"], sort=False):
        by_label = {row.label: row for row in tuples(group)}
        written = [cells.text(by_label.get(label), "microseconds") for label in across]
        ratios = [_ratio_cell(by_label.get(ours), by_label.get(peer)) for ours, peer in pairs]
        lines.append([str(shape), MODE_TITLES[str(mode)], *written, *ratios])
    if pairs:
        cells.remark("ratios: the middle one of the rounds' own, their quartiles in brackets; lower is better")
    header = ["batch × heads × S × d", "mode", *across, *(f"{ours} over {peer}" for ours, peer in pairs)]
    return section(quantity, f"{QUANTITIES[quantity][0]} (µs a call), {constants(rows)}", header, lines, 2, cells)


def _ratio_cell(ours: Any, theirs: Any) -> str:
    found = ratio(ours, theirs)
    if found is None:
        return ABSENT
    return f"{factor(found.median)} ({number(found.quartile_low, 3)}–{number(found.quartile_high, 3)})"


def _over_cudnn(rows: pd.DataFrame) -> pd.DataFrame:
    """`rows` of all but cuDNN's with the ratios in the place of times."""
    by_cell = {(row.case, row.mode): row for row in tuples(rows) if row.implementation == CUDNN}
    rows = rows[rows["implementation"] != CUDNN]
    found = [ratio(row, by_cell.get((row.case, row.mode))) for row in tuples(rows)]
    return rows.assign(
        short=[short_shape(row) for row in tuples(rows)],
        median=[math.nan if one is None else one.median for one in found],
        quartile_low=[math.nan if one is None else one.quartile_low for one in found],
        quartile_high=[math.nan if one is None else one.quartile_high for one in found],
    )


def _range(rows: pd.DataFrame, ours: str, peer: str) -> str:
    """The least and the largest ratio with its shape; empty without any."""
    found: dict[str, float] = {}
    for shape, group in rows.groupby("shape", sort=False):
        by_name = {row.implementation: row for row in tuples(group)}
        compared = ratio(by_name.get(ours), by_name.get(peer))
        if compared is not None:
            found[str(shape)] = compared.median
    if not found:
        return ""
    ends = dict.fromkeys(choose(found, key=found.__getitem__) for choose in (min, max))  # one, where one shape is all
    return " to ".join(f"{factor(found[shape])} ({shape})" for shape in ends) + f" as long as {peer}'s"


SHORT_CALL_CASES = {PROBLEM: ("AttentionShape",)}
SHORT_CALL_TABLES = {PROBLEM: tables}
SHORT_CALL_PLOTS = {PROBLEM: plots}
SHORT_CALL_ANSWERS = {PROBLEM: answers}
