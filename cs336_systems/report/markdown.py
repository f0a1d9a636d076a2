"""Pieces of Markdown: numbers with their digits, tables, cells that say why they are empty, the line of provenance."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from cs336_systems.measure.text import in_one_line
from cs336_systems.report.frames import MODE_TITLES, NOT_MEASURED

LONGEST_MESSAGE = 240  # characters of a reason below a table; an out-of-memory message can fill a page
ABSENT = "–"


def number(value: float, digits: int = 4) -> str:
    """`value` with `digits` significant digits, never in scientific notation between 1e-4 and 1e9.

    >>> number(0.0123456), number(12.3), number(123456.7)
    ('0.01235', '12.30', '123,457')
    """
    if not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))  # of the rounded value: 9.9996 is 10.00
    if exponent < -4 or exponent >= 9:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def factor(value: float) -> str:
    """A ratio as a reader says it: `2.53×`."""
    return f"{number(value, 3)}×" if math.isfinite(value) else ABSENT


def counted(count: Any, what: str) -> str:
    """A whole number of `what`, which is given in the singular.

    >>> counted(1, "block"), counted(4, "block")
    ('1 block', '4 blocks')
    """
    return f"{plain(count)} {what}{'' if count == 1 else 's'}"


def one_line(message: str) -> str:
    """`message` without line breaks and control characters, and cut at LONGEST_MESSAGE characters."""
    text = in_one_line(message)
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1].rstrip() + "…"


def code_span(message: str) -> str:
    """`message` on one line as Markdown shows it unread: `*` or `<!--` of somebody's error text has no effect.

    >>> code_span("found *p"), code_span("no `x`")
    ('`found *p`', '`` no `x` ``')
    """
    text = one_line(message)
    runs = {len(run) for run in re.findall("`+", text)}
    fence = "`" * next(length for length in range(1, len(runs) + 2) if length not in runs)
    pad = " " if runs or not text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def plain(value: Any) -> str:
    """A key of a table as text: whole numbers without a point, True and False as yes and no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return ABSENT if math.isnan(value) else str(int(value)) if value.is_integer() else f"{value:g}"
    return MODE_TITLES.get(value, str(value)) if isinstance(value, str) else str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], num_keys: int = 1) -> str:
    """A Markdown table; the first `num_keys` columns are names and stand left, the rest numbers and stand right."""
    marks = [":--" if column < num_keys else "--:" for column in range(len(header))]
    lines = [header, marks, *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    """`text` so that it ends neither its cell nor its row."""
    return in_one_line(text).replace("\\", "\\\\").replace("|", "\\|")


class Cells:
    """Writes the cells of one table and remembers why some hold no number: `legend` lists the reasons.

    A cell is `OOM`, `failed [1]` or `skipped [2]` where there was nothing to measure, and `–` where no record is.
    Reasons that differ only in their numbers (bytes, lengths) share a line.
    """

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], list[str]] = {}  # (status, message without numbers) -> messages
        self._any_absent = False
        self._remarks: list[str] = []

    def text(self, row: Any, value: str = "median", low: str | None = None, high: str | None = None) -> str:
        """The cell of `row` (one record's named tuple): `value`, with the range from `low` to `high` if these exist."""
        if row is None or row.status == NOT_MEASURED:
            self._any_absent = True
            return ABSENT
        if row.status != "ok":
            return self._without_number(row.status, one_line(row.message))
        text = number(getattr(row, value))
        if low is None or high is None or row.samples < 2:
            return text
        return f"{text} ({number(getattr(row, low), 3)}–{number(getattr(row, high), 3)})"

    def time(self, row: Any) -> str:
        """Median and quartiles."""
        return self.text(row, "median", "quartile_low", "quartile_high")

    def mean(self, row: Any) -> str:
        """Mean and standard deviation."""
        text = self.text(row, "mean")
        return f"{text} ± {number(row.std, 2)}" if row is not None and row.status == "ok" else text

    def remark(self, text: str) -> None:
        """Add a line to the legend."""
        self._remarks.append(text)

    def legend(self) -> str:
        """A list of the reasons met so far, empty if every cell had a number."""
        lines = []
        for key, messages in self._reasons.items():
            mark = self._mark(key)
            others = len(messages) - 1
            lines.append(f"- {mark}: {code_span(messages[0])}" + (f" (and {others} alike)" if others else ""))
        if self._any_absent:
            lines.append(f"- {ABSENT}: {NOT_MEASURED}")
        return "\n".join([*lines, *(f"- {remark}" for remark in self._remarks)])

    def _without_number(self, status: str, message: str) -> str:
        key = (status, re.sub(r"\d[\d.,]*", "#", message))
        messages = self._reasons.setdefault(key, [])
        if message not in messages:
            messages.append(message)
        return self._mark(key)

    def _mark(self, key: tuple[str, str]) -> str:
        if key[0] == "oom":
            return "OOM"
        numbered = [other for other in self._reasons if other[0] != "oom"]
        return f"{key[0]} [{numbered.index(key) + 1}]"


def provenance(frame: pd.DataFrame) -> str:
    """One line: device, driver, versions, commits, the days measured and the number of samples a cell."""
    measured = frame[(frame["status"] == "ok") & frame["quantity"].isin(("time", "graph_time"))]
    commits = []
    for commit, rows in sorted(frame.groupby("commit"), key=lambda pair: str(pair[0])):
        unclean = rows["dirty"].map(bool).any()
        commits.append(f"`{str(commit)[:10]}`" + (" with uncommitted changes" if unclean else ""))
    days = sorted({str(date)[:10] for date in frame["date"]})
    parts = [
        _distinct("", frame["device"]),
        _distinct("driver ", frame["driver"]),
        _distinct("torch ", frame["torch"]),
        _distinct("triton ", frame["triton"]),
        f"{frame['scale'].iloc[0]} scale",
        "commit " + ", ".join(commits),
        days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
        "nothing timed" if measured.empty else f"{_range(measured['samples'], 'timed sample')} a cell",
    ]
    if frame["interpreted"].any():
        parts.append("Triton ran in its interpreter: those times say nothing about the kernels")
    return "*" + " · ".join(part for part in parts if part) + "*"


def _distinct(prefix: str, values: pd.Series) -> str:
    present = sorted({str(value) for value in values if value})
    return prefix + one_line(", ".join(present)) if present else ""


def _range(values: pd.Series, what: str) -> str:
    """The least and the largest of some counts of `what`."""
    low, high = int(values.min()), int(values.max())
    return counted(low, what) if low == high else f"{low} to {counted(high, what)}"
