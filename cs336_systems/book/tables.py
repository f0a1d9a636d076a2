"""Define the three kinds of tables that experiments declare, each built from a frame.

    Pivot(
        down=("shape",), across="implementation", where={"mode": "forward"},
        ratios=(("hopper", "flex"),),
    )
    Listing(columns=("dtype", "sum"))
    Wide(
        down=("model",),
        columns={
            "forward (ms)": Pick({"mode": "forward"}),
            "peak (GiB)": Pick({...}, unit="GiB"),
        },
    )

`build(frame)` returns a `Table`, which pages show as Markdown and the report as HTML. A cell
without a number says why: OOM, failed, skipped, or "ran, agrees" if Triton's interpreter ran, whose
times say nothing of the kernel.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from cs336_systems.bench.placing import preferred_rows
from cs336_systems.book.frames import Where, dicts, digits, pick, speed, with_unit
from cs336_systems.measure.text import in_one_line

ABSENT = "–"
# the columns of the frame that identify a line of a table, or heading -> column
Down = Sequence[str] | Mapping[str, str]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class TableCell:
    """A cell of a finished table: its text, and the number behind it or why there is none."""

    text: str
    number: float | None = None  # the number by which lines are sorted
    why: str = ""
    status: str = "ok"  # a record's status, or "absent"


@dataclass(frozen=True)
class Table:
    """A finished table: a title, a heading per column, and lines of as many cells."""

    title: str
    header: list[str]
    lines: list[list[TableCell]]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds a number in any line."""
        return [
            any(line[place].number is not None for line in self.lines)
            for place in range(len(self.header))
        ]

    def only(
        self, lines: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> Table:
        """Return the table with the given `lines` (texts of first cells) and `columns` (headings).

        None keeps all. Raises ValueError if one of them is not in the table.
        """
        chosen = [line for line in self.lines if lines is None or line[0].text in lines]
        places = [
            place for place, name in enumerate(self.header) if columns is None or name in columns
        ]
        for what, wanted, known in (
            ("lines", lines, [line[0].text for line in self.lines]),
            ("columns", columns, self.header),
        ):
            if missing := set(wanted or ()) - set(known):
                raise ValueError(
                    f"table {self.title!r} has no {what} {sorted(missing)}; it has {known}"
                )
        header = [self.header[place] for place in places]
        return Table(self.title, header, [[line[place] for place in places] for line in chosen])

    def without_blanks(self) -> tuple[Table, dict[str, str]]:
        """Return the table without its blank columns, and the reasons of skipped ones by heading.

        A column is blank if each of its cells is empty or skipped.
        """
        needs, kept = {}, []
        for place, name in enumerate(self.header):
            column = [line[place] for line in self.lines]
            if any(cell.status != "skipped" and cell.text not in (ABSENT, "") for cell in column):
                kept.append(name)
            elif whys := [cell.why for cell in column if cell.status == "skipped"]:
                needs[name] = whys[0]
        return self.only(columns=kept), needs

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown, without its title; all texts are escaped."""
        marks = ["--:" if right else ":--" for right in self.numeric]
        lines = [[escape(name) for name in self.header], marks]
        lines += [[escape(cell.text) for cell in line] for line in self.lines]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escape(text: str) -> str:
    """Return `text` in one line, escaped so that Markdown shows it as it is.

    It makes no HTML and no link, and does not end a table's cell.
    """
    text = in_one_line(text)
    for mark, harmless in (
        ("\\", "\\\\"),
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "\\|"),
        ("[", "\\["),
        ("`", "\\`"),
        ("*", "\\*"),
        ("~", "\\~"),
        ("$", "\\$"),
        ("://", ":&#47;/"),
        ("www.", "www&#46;"),
    ):
        text = text.replace(mark, harmless)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # an underscore within a word is no mark


def cell_of(row: Row | None, value: str = "median", significant: int = 3) -> TableCell:
    """Return the cell for the column `value` of a frame's row, or for the reason why it is missing.

    `row` is None if nothing was measured.
    """
    if row is None:
        return TableCell(ABSENT, why="not measured", status="absent")
    if row["status"] != "ok":
        text = "OOM" if row["status"] == "oom" else row["status"]
        return TableCell(text, why=in_one_line(row["message"]), status=row["status"])
    if row["interpreted"]:
        return TableCell(
            "ran, agrees", why="in Triton's interpreter, whose times say nothing of the kernel"
        )
    return shown(row[value], significant)


def shown(value: Any, significant: int = 3) -> TableCell:
    """Return a cell with a value of any type.

    A float has `significant` digits, or all digits before the point if it is a larger whole number.
    True and False are "yes" and "no", None is "–", and other values are their `str`.
    """
    if isinstance(value, bool):
        return TableCell("yes" if value else "no")
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e15
        text = (
            f"{value:,.0f}"
            if whole and abs(value) >= 10**significant
            else digits(value, significant)
        )
        return TableCell(text, None if math.isnan(value) else value)
    if isinstance(value, int):
        return TableCell(f"{value:,}", float(value))
    return TableCell(ABSENT if value is None else str(value))


@dataclass(frozen=True, kw_only=True)
class TableSpec(ABC):
    """Base class of the declared tables; a subclass defines `build`."""

    title: str = ""
    where: Where = field(default_factory=dict)  # choice of rows of the frame
    significant: int = 3  # digits of numbers

    @abstractmethod
    def build(self, frame: pd.DataFrame) -> Table:
        """Return the finished table of an experiment's frame."""


@dataclass(frozen=True, kw_only=True)
class Pivot(TableSpec):
    """A table of one quantity: a line per case, a column per implementation, then speed ratios."""

    down: Down  # columns that identify a line
    across: str = "implementation"  # column whose values become the table's columns
    value: str = "median"  # column of the numbers
    unit: str | None = None  # unit to which the median is converted
    # (ours, theirs), two values of `across`: how many times as fast ours is (`frames.speed`)
    ratios: Sequence[tuple[str, str]] = ()

    def build(self, frame: pd.DataFrame) -> Table:
        """Return the table; ValueError if several promised records claim one cell."""
        rows = pick(frame, self.where)
        if self.value == "median":
            rows = with_unit(rows, self.unit)

        # Columns: implementations in the experiment's order, then the ratios that exist.
        headings, groups = _grouped(rows, self.down, (self.across,))
        across = (
            rows.sort_values("place", kind="stable") if self.across == "implementation" else rows
        )
        names = list(dict.fromkeys(across[self.across]))
        pairs = [
            (ours, theirs) for ours, theirs in self.ratios if ours in names and theirs in names
        ]

        # A line for each combination of values of `down`.
        lines = []
        for keys, group in groups:
            by_name: dict[Any, Row] = {}
            for name, cell in group.groupby(self.across, sort=False, dropna=False):
                there = preferred_rows(dicts(cell), f"table {self.title!r}, {name} of {keys}")
                if len(there) > 1:
                    raise ValueError(f"table {self.title!r}: several records for {name} in {keys}")
                by_name[name] = there[0]
            numbers = [cell_of(by_name.get(name), self.value, self.significant) for name in names]
            ratios = [speed(by_name.get(ours), by_name.get(theirs)) for ours, theirs in pairs]
            lines.append([*map(shown, keys), *numbers, *map(shown, ratios)])

        header = [*headings, *map(str, names), *(f"speed of {a} over {b}" for a, b in pairs)]
        unit = self.unit or (rows["unit"].iloc[0] if self.value == "median" and len(rows) else "")
        return Table(
            f"{self.title} ({unit})" if unit not in ("", "1") else self.title, header, lines
        )


@dataclass(frozen=True, kw_only=True)
class Listing(TableSpec):
    """A table with a line per record and the given columns of the frame."""

    # columns of the frame, or heading -> a column or a function of the row
    columns: Sequence[str] | Mapping[str, str | Callable[[Row], Any]]

    def build(self, frame: pd.DataFrame) -> Table:
        """Return the table; empty cells of a record without samples show its status."""
        columns = self.columns.values() if isinstance(self.columns, Mapping) else self.columns
        lines = []
        for row in dicts(pick(frame, self.where)):
            cells = [
                shown(of(row) if callable(of) else row[of], self.significant) for of in columns
            ]
            if row["status"] != "ok":
                blank = cell_of(row)
                cells = [cell if cell.text not in (ABSENT, "") else blank for cell in cells]
            elif row["interpreted"]:
                cells = [
                    cell_of(row) if of == "median" else cell for of, cell in zip(columns, cells)
                ]
            lines.append(cells)
        return Table(self.title, list(self.columns), lines)


@dataclass(frozen=True)
class Pick:
    """A column of a `Wide` table: a value of the one row in each line that `where` chooses."""

    where: Where
    unit: str | None = None  # unit to which the median is converted
    value: str = "median"  # column of the frame
    significant: int | None = None  # digits; None: the table's


@dataclass(frozen=True)
class Ratio:
    """A column of a `Wide` table: the number under heading `of` divided by that under `other`."""

    of: str
    other: str
    percent: bool = False


@dataclass(frozen=True)
class Difference:
    """A column of a `Wide` table: the number under heading `of` minus that under `other`."""

    of: str
    other: str


@dataclass(frozen=True, kw_only=True)
class Wide(TableSpec):
    """A table of several quantities side by side, with a line for each value of `down`."""

    down: Down
    # heading -> column; `Ratio` and `Difference` refer to headings before them
    columns: Mapping[str, Pick | Ratio | Difference]

    def build(self, frame: pd.DataFrame) -> Table:
        """Return the table; ValueError if several promised records claim one cell."""
        headings, groups = _grouped(
            pick(frame, self.where), self.down, ("implementation", "mode", "quantity")
        )
        lines = []
        for keys, group in groups:
            found: dict[str, TableCell] = {}
            for heading, column in self.columns.items():
                if isinstance(column, Pick):
                    found[heading] = self._one(column, group, f"{heading} of {keys}")
                else:
                    found[heading] = self._of(column, found)
            lines.append([*map(shown, keys), *found.values()])
        return Table(self.title, [*headings, *self.columns], lines)

    def _one(self, column: Pick, group: pd.DataFrame, cell: str) -> TableCell:
        """Return the cell of a `Pick` in the line of `group`; `cell` names it in messages."""
        rows = preferred_rows(
            dicts(with_unit(pick(group, column.where), column.unit)),
            f"table {self.title!r}, {cell}",
        )
        if len(rows) > 1:
            raise ValueError(
                f"table {self.title!r}: {len(rows)} records in one cell of {dict(column.where)}"
            )
        return cell_of(
            rows[0] if rows else None, column.value, column.significant or self.significant
        )

    def _of(self, column: Ratio | Difference, found: Mapping[str, TableCell]) -> TableCell:
        """Return the cell of a `Ratio` or `Difference` from the line's cells found so far."""
        of, other = (found[name].number for name in (column.of, column.other))
        if of is None or not other:
            return TableCell(ABSENT)
        if isinstance(column, Difference):
            return shown(of - other, self.significant)
        if column.percent:
            return TableCell(f"{digits(100 * of / other, 2)} %", 100 * of / other)
        return shown(of / other)


def _grouped(
    rows: pd.DataFrame, down: Down, apart: Sequence[str]
) -> tuple[list[str], list[tuple[tuple[Any, ...], pd.DataFrame]]]:
    """Return the headings of a table's first columns, and each line's values there with its rows.

    The first columns are those of `down`. An axis that `run --heads ...` sets (heads, seqlen_q,
    head_dim) is added if rows of one line that agree in the columns `apart` differ in it.
    """
    names = (
        dict(down) if isinstance(down, Mapping) else {name.replace("_", " "): name for name in down}
    )
    if rows.empty:
        return list(names), []
    for axis in ("heads", "seqlen_q", "head_dim"):
        if axis in rows and axis not in names.values():
            keys = list(dict.fromkeys([*names.values(), *apart]))
            if (rows.groupby(keys, dropna=False)[axis].nunique() > 1).any():
                names[axis.replace("_", " ")] = axis
    return list(names), list(rows.groupby(list(names.values()), sort=False, dropna=False))
