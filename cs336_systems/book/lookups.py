"""The functions that a page's template may call: numbers, tables and figures of one problem.

    page = Page(Book(Path(), Path("results/nvidia-h200")), "flash_benchmarking")
    page.time("hopper", mode="forward", shape="1 × 16 × 16,384 × 64 causal")    # "1.07 ms"

`pages.Book` renders the templates with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from cs336_systems.bench.placing import preferred_rows
from cs336_systems.bench.spec import Experiment, experiments
from cs336_systems.book.frames import dicts, digits, in_unit, pick, span, with_speeds
from cs336_systems.book.tables import Table, escape

if TYPE_CHECKING:
    from cs336_systems.book.pages import Book

PAGES = "writeup"  # the folder of templates
MOST_LINES = 14  # most lines of a table on a page


class Page:
    """The functions that the template of one problem may call.

    Lookups take values of the frame's columns as keywords: `shape="..."`, `seqlen_q=512`. They must
    fit exactly one record. So `implementation`, which comes first, may be left out if there is only
    one, and `mode` if the quantity has only one.
    """

    def __init__(self, book: Book, problem: str) -> None:
        self._book, self._problem = book, problem

    @cached_property
    def _experiment(self) -> Experiment:
        """The problem's experiment; ValueError if it has none."""
        if self._problem not in experiments():
            raise ValueError(f"{self._problem} has no experiment")
        return experiments()[self._problem]

    @property
    def _frame(self) -> pd.DataFrame:
        """The experiment's frame; ValueError if it is empty."""
        frame = self._book.frame(self._experiment.name)
        if frame.empty:
            raise ValueError(f"no records of {self._problem} in {self._book.folder.name}")
        return frame

    def names(self) -> dict[str, Any]:
        """Return the names that the template may use: public methods, and the experiment's own."""
        own: dict[str, Any] = {
            name: getattr(self, name)
            for name in dir(type(self))
            if not name.startswith("_") and name != "names" and callable(getattr(type(self), name))
        }
        if self._problem in experiments() and not self._book.frame(self._problem).empty:
            own |= self._experiment.numbers(self._frame)
        return own

    def _one(
        self, quantity: str, implementation: str | None, where: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the only row with the given values; ValueError if there is not just one, measured.

        Of several rows `preferred_rows` are considered.
        """
        asked = {
            "quantity": quantity,
            **({"implementation": implementation} if implementation else {}),
            **where,
        }
        rows = preferred_rows(
            dicts(pick(self._frame, asked)), f"{PAGES}/{self._problem}.md: {asked}"
        )
        if len(rows) != 1:
            raise ValueError(f"{len(rows)} records of {self._problem} have {asked}, one is needed")
        if rows[0]["status"] != "ok":
            raise ValueError(f"{asked} is {rows[0]['status']}: {rows[0]['message']}")
        return rows[0]

    def number(
        self,
        quantity: str,
        implementation: str | None = None,
        *,
        unit: str | None = None,
        column: str = "median",
        **where: Any,
    ) -> Any:
        """Return the median, or another `column`, of one record, to calculate with.

        A template prints the result with `{{ (a / b) | digits }}`. `unit` converts the median. A
        column may hold text, which is returned as it is. Raises ValueError for NaN.
        """
        row = self._one(quantity, implementation, where)
        found = in_unit(row[column], row["unit"], unit) if column == "median" else row[column]
        # for example a speed over a record of another run
        if isinstance(found, float) and math.isnan(found):
            raise ValueError(f"{column} of {quantity} of {implementation} is no number")
        return found

    def value(
        self,
        quantity: str,
        implementation: str | None = None,
        *,
        unit: str | None = None,
        column: str = "median",
        significant: int = 3,
        **where: Any,
    ) -> str:
        """Return the median of one record as text with its unit, or another `column` without unit.

        Text, such as `column="kernel"`, is escaped for Markdown.
        """
        found = self.number(quantity, implementation, unit=unit, column=column, **where)
        if not isinstance(found, int | float):
            return escape(str(found))
        if column == "median":
            row = self._one(quantity, implementation, where)
            self._book.show(row)
            unit = unit or row["unit"]
        else:
            unit = ""
        return f"{digits(float(found), significant)} {unit if unit != '1' else ''}".rstrip()

    def time(
        self, implementation: str | None = None, *, unit: str | None = None, **where: Any
    ) -> str:
        """Return a median time: `time("hopper", mode="forward", seqlen_q=16384)` is "1.07 ms"."""
        return self.value("time", implementation, unit=unit, **where)

    def memory(
        self, implementation: str | None = None, *, quantity: str = "peak_memory", **where: Any
    ) -> str:
        """Return the median of a memory quantity in GiB, e.g. "12.3 GiB"; by default the peak."""
        return self.value(quantity, implementation, unit="GiB", **where)

    def speed(self, ours: str, theirs: str, **where: Any) -> str:
        """Return how many times as fast `ours` is as `theirs`: "1.12×", or a range "1.05 to 1.15×".

        The range is over all cases and modes of `where`.
        """
        times = pick(self._frame, {"quantity": "time"} | where)
        rows = pick(
            with_speeds(times, "speed", {"implementation": theirs}), {"implementation": ours}
        )
        if (found := rows["speed"].dropna()).empty:
            raise ValueError(
                f"no times of {ours} and {theirs} in one run of {self._problem} with {where}"
            )
        return f"{span(found)}×"

    def values(
        self, column: str, implementation: str | None = None, *, significant: int = 3, **where: Any
    ) -> str:
        """Return a column's range: `values("tflops", "hopper", mode="forward")` is "511 to 640"."""
        rows = pick(
            self._frame, where | ({"implementation": implementation} if implementation else {})
        )
        numbers = rows[column].dropna()
        if numbers.empty:
            raise ValueError(f"no {column} of {implementation} with {where}")
        return span(numbers, significant)

    def table(
        self,
        name: str,
        *,
        lines: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        age: bool = True,
    ) -> str:
        """Return the table `name` as Markdown, with the age of its records below if `age`.

        `lines` (texts of the first column) and `columns` (headings) choose a part of it. Raises
        ValueError if it is unknown or has more than MOST_LINES lines.
        """
        if name not in self._experiment.tables:
            raise ValueError(f"no table {name!r}; there are {', '.join(self._experiment.tables)}")
        spec = self._experiment.tables[name]
        table: Table = spec.build(self._frame).only(lines, columns)
        if len(table.lines) > MOST_LINES:
            raise ValueError(
                f"table {name!r} has over {MOST_LINES} lines, {len(table.lines)}: "
                "choose with lines=[...]"
            )
        rows = pick(self._frame, spec.where)
        for row in dicts(rows) if lines is columns is None and "case" in rows else ():
            if row["status"] == "ok":
                self._book.show(row)
        words = self._book.age(self._problem, rows) if age else ""
        return "\n\n".join(
            filter(None, (f"**{table.title}**" if table.title else "", table.markdown(), words))
        )

    def figure(self, name: str) -> str:
        """Return the figure `name` as a Markdown image whose alternative text is its title."""
        if name not in self._experiment.figures:
            raise ValueError(f"no figure {name!r}; there are {', '.join(self._experiment.figures)}")
        path = self._book.figure_path(self._problem, name).relative_to(self._book.root).as_posix()
        title = getattr(self._experiment.figures[name], "title", "") or f"{self._problem}: {name}"
        return f"![{title}](../{path})"

    def given(self, text: str, source: str) -> str:
        """Return `text` as it is: a number that is derived, the handout's, or measured by others.

        `source` says where it is from; it is not printed. Raises ValueError if it is blank.
        """
        if not source.strip():
            raise ValueError(f"given({text!r}) must say its source")
        return text

    def device(self) -> str:
        """Return the name of the device on which the records were measured."""
        return escape(self._frame["device"].iloc[0])

    def of(self, problem: str, device: str = "") -> Page:
        """Return the same lookups in another problem's records, or in those of another GPU.

        For example `{{ of("fsdp_accounting").time("fsdp") }}`. `device` is a results folder such as
        "nvidia-h100"; ValueError if it has no records of the problem.
        """
        book = self._book.on(device) if device else self._book
        if device and not book.has(problem):
            raise ValueError(f"no records of {problem} in {device}")
        return Page(book, problem)
