"""Table and sentences of `long_calls`: speeds of ours over cuDNN's, and over one another, in the same round.

    tables(frame)      # speed: shapes and modes down; ms, ratios and the intervals of their medians across

A sample is a round's, in which everybody had a turn. A ratio is the middle one of the rounds' own; how far it can be
trusted says the interval in which the median lies with 95 %, by the order of the rounds' ratios alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from cs336_systems.measure.samples import median_interval, summarize
from cs336_systems.report.frames import MODE_TITLES, OUR_KERNELS, labels, select, tuples
from cs336_systems.report.markdown import ABSENT, Cells, number
from cs336_systems.report.sections import Section, constants, present_modes, section
from cs336_systems.report.shapes import with_shapes
from cs336_systems.report.short_calls import ratios

PROBLEM = "long_calls"
PAIRS = (*((ours, "sdpa_cudnn") for ours in OUR_KERNELS), ("hopper", "triton"))
DIGITS = 4  # of a ratio: what turns are for is to tell 1.044 from 1.056


def tables(frame: pd.DataFrame) -> list[Section]:
    """ms of a call, medians; then for each pair the ratio of speeds with its quartiles, and its median's interval."""
    frame = with_shapes(frame)
    rows = frame[frame["quantity"] == "time"]
    across = labels(rows)
    pairs = [(ours, other) for ours, other in PAIRS if ours in across and other in across]
    cells = Cells()
    lines = []
    for (shape, mode), by_label in _groups(rows):
        written = [cells.text(by_label.get(label)) for label in across]
        for ours, other in pairs:
            written += _ratio_cells(ratios(by_label.get(other), by_label.get(ours)))
        lines.append([shape, MODE_TITLES[mode], *written])
    if pairs:
        cells.remark("over: its speed over the other's, the middle one of the rounds' own with their quartiles")
        cells.remark("95 %: where the median of such ratios lies with at least that confidence, as a sign test has it")
    heads = [head for ours, other in pairs for head in (f"{ours} over {other}", "95 %")]
    header = ["batch × heads × S × d", "mode", *across, *heads]
    return [section("speed", f"By turns (ms a call), {constants(rows)}", header, lines, 2, cells)]


def answers(frame: pd.DataFrame) -> list[str]:
    """A sentence for each mode and pair: the least and the largest ratio of speeds, with the intervals of both."""
    frame = with_shapes(frame)
    said = []
    for mode in present_modes(frame):
        groups = list(_groups(select(frame, "time", mode)))
        for ours, other in PAIRS:
            found = {shape: ratios(by_name.get(other), by_name.get(ours)) for (shape, _), by_name in groups}
            found = {shape: by_round for shape, by_round in found.items() if by_round}
            if found:
                middles = {shape: summarize(by_round).median for shape, by_round in found.items()}
                ends = dict.fromkeys(choose(middles, key=middles.__getitem__) for choose in (min, max))
                parts = " to ".join(_words(shape, found[shape]) for shape in ends)
                said.append(f"{ours} {MODE_TITLES[mode]} has {parts} the speed of {other} in the same round.")
    return said


def _groups(rows: pd.DataFrame) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for (shape, mode), group in rows.groupby(["shape", "mode"], sort=False):
        yield (str(shape), str(mode)), {row.label: row for row in tuples(group)}


def _ratio_cells(by_round: Sequence[float]) -> list[str]:
    if not by_round:
        return [ABSENT, ABSENT]
    found = summarize(by_round)
    quartiles = f"{number(found.quartile_low, DIGITS)}–{number(found.quartile_high, DIGITS)}"
    return [f"{number(found.median, DIGITS)}× ({quartiles})", _interval(by_round) or ABSENT]


def _interval(by_round: Sequence[float]) -> str:
    ends = median_interval(by_round)
    return "–".join(number(end, DIGITS) for end in ends) if ends else ""


def _words(shape: str, by_round: Sequence[float]) -> str:
    interval = _interval(by_round)
    surely = f"; 95 %: {interval}" if interval else ""
    return f"{number(summarize(by_round).median, DIGITS)}× ({shape}{surely})"


LONG_CALL_CASES = {PROBLEM: ("AttentionShape",)}
LONG_CALL_TABLES = {PROBLEM: tables}
LONG_CALL_ANSWERS = {PROBLEM: answers}
