"""The three shapes of tables, declared beside an experiment and made from its frame.

    Pivot(down=("shape",), across="implementation", where={"mode": "forward"}, ratios=(("hopper",
    "flex"),)) Listing(columns=("dtype", "sum"))
    Wide(down=("model",), columns={"forward (ms)": Pick({"mode": "forward"}), "peak (GiB)":
    Pick({...}, unit="GiB")})

`build(frame)` gives a `Table`, which pages show as Markdown and the report as HTML. A cell without
a
number says why: OOM, failed, skipped, or "ran, agrees" where Triton's interpreter ran and its time
says nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from cs336_systems.bench.placing import preferred_rows
from cs336_systems.book.frames import Where, dicts, digits, pick, speed, with_unit
from cs336_systems.measure.text import in_one_line

ABSENT = "–"
# columns of the frame that name a line, or heading -> column
Down = Sequence[str] | Mapping[str, str]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class TableCell:
    """What stands in a cell, the number it is sorted by, and why it holds none."""

    text: str
    number: float | None = None
    why: str = ""
    status: str = "ok"


@dataclass(frozen=True)
class Table:
    """A finished table."""

    title: str
    header: list[str]
    lines: list[list[TableCell]]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold a number."""
        return [
            any(line[place].number is not None for line in self.lines)
            for place in range(len(self.header))
        ]

    def only(
        self, lines: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> Table:
        """The table with those `lines`, by the text of their first cell, and `columns`, by their
        headings.
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
        """The table without columns that are empty or in which all is skipped, and what the latter
        need, by heading.
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
        """The table as GitHub shows it; text of records is escaped."""
        marks = ["--:" if right else ":--" for right in self.numeric]
        lines = [[escape(name) for name in self.header], marks]
        lines += [[escape(cell.text) for cell in line] for line in self.lines]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escape(text: str) -> str:
    """`text` on one line, so that Markdown shows it as it is: no HTML, no link, no end of a cell."""
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
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # within a name it is no mark


def cell_of(row: Row | None, value: str = "median", significant: int = 3) -> TableCell:
    """The cell of one row of a frame: its `value`, or why there is none."""
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
    """A value of any type as a cell: numbers with their digits, True and False as yes and no."""
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
class TableSpec:
    """What all shapes share."""

    title: str = ""
    where: Where = field(default_factory=dict)  # which rows of the frame
    significant: int = 3  # digits of numbers

    def build(self, frame: pd.DataFrame) -> Table:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Pivot(TableSpec):
    """One quantity: cases down, implementations (or another column) across, then ratios of speed
    (`frames.speed`).
    """

    down: Down
    across: str = "implementation"
    value: str = "median"  # column of the frame
    unit: str | None = None  # of the numbers; the median is converted to it
    # (ours, theirs) of `across`: how many times as fast ours is
    ratios: Sequence[tuple[str, str]] = ()

    def build(self, frame: pd.DataFrame) -> Table:
        rows = pick(frame, self.where)
        if self.value == "median":
            rows = with_unit(rows, self.unit)
        headings, groups = _grouped(rows, self.down, (self.across,))
        across = (
            rows.sort_values("place", kind="stable") if self.across == "implementation" else rows
        )
        names = list(dict.fromkeys(across[self.across]))
        pairs = [
            (ours, theirs) for ours, theirs in self.ratios if ours in names and theirs in names
        ]
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
    """A line a record: columns of the frame, or heading -> column, or a function of the row."""

    columns: Sequence[str] | Mapping[str, str | Callable[[Row], Any]]

    def build(self, frame: pd.DataFrame) -> Table:
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
    """A column of a `Wide` table: the one row of a line that `where` names."""

    where: Where
    unit: str | None = None
    value: str = "median"
    significant: int | None = None


@dataclass(frozen=True)
class Ratio:
    """A column of a `Wide` table: the number under one heading over that under another."""

    of: str
    other: str
    percent: bool = False


@dataclass(frozen=True)
class Difference:
    """A column of a `Wide` table: the number under one heading less that under another."""

    of: str
    other: str


@dataclass(frozen=True, kw_only=True)
class Wide(TableSpec):
    """Several quantities side by side: a line for each value of `down`, a column for each `Pick`,
    `Ratio`, ...
    """

    down: Down
    columns: Mapping[str, Pick | Ratio | Difference]

    def build(self, frame: pd.DataFrame) -> Table:
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
    """The headings of a table's first columns, and for each line what stands in them and its rows.

    Beside `down` these are the axes that `run --heads ...` sets, where nothing else tells rows of
    the same `apart` in one line from each other.
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
