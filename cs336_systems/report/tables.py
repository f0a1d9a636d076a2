"""Markdown tables: one function a problem, each giving named sections that documents may quote alone.

    sections("flash_benchmarking", frame)       # [Section(name="bfloat16.forward", title=..., body=...), ...]
    problem_table(shown, frame)                 # these under their titles, with the line of provenance

A cell quotes the median and, in brackets, the quartiles. Where there is nothing to quote it says why, and the reasons
stand below the table. A problem without a function of its own gets a table with one row a record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from cs336_systems.report.distributed import DISTRIBUTED_TABLES
from cs336_systems.report.frames import (
    tuples,
)
from cs336_systems.report.markdown import Cells, plain, provenance
from cs336_systems.report.sections import (
    Section,
    section,
)
from cs336_systems.report.sharding import SHARDING_TABLES


def sections(problem: str, frame: pd.DataFrame) -> list[Section]:
    """The sections of `problem` from its frame; none when the frame is empty."""
    return TABLES.get(problem, one_row_a_record)(frame) if len(frame) else []


def problem_table(shown: Sequence[Section], frame: pd.DataFrame) -> str:
    """`shown`, sections of one problem, as one Markdown text with the provenance of `frame` below."""
    parts = [f"**{section.title}**\n\n{section.body}" for section in shown]
    return "\n\n".join([*parts, provenance(frame)])


def one_row_a_record(frame: pd.DataFrame) -> list[Section]:
    """Any problem: what the cases have in common above, what tells them apart in columns."""
    cases = pd.DataFrame([_leaves(json.loads(case)) for case in frame["case"]])
    names = [str(name) for name in cases]
    common = [name for name in names if cases[name].nunique(dropna=False) == 1]
    differing = [name for name in names if name not in common]
    cells = Cells()
    rows = []
    for row, case in zip(tuples(frame), cases[differing].itertuples(index=False)):
        described = [str(row.label), *map(plain, case), plain(row.mode), str(row.quantity)]
        rows.append([*described, cells.time(row), str(row.unit)])
    header = ["implementation", *differing, "mode", "quantity", "median (quartiles)", "unit"]
    shared = [(name, cases[name].iloc[0]) for name in common if name != "type"]
    title = ", ".join(f"{name} {plain(value)}" for name, value in shared if value is not None)
    return [section("records", title or "All records", header, rows, len(header) - 2, cells)]


TABLES: dict[str, Callable[[pd.DataFrame], list[Section]]] = {
    **DISTRIBUTED_TABLES,
    **SHARDING_TABLES,
}


def _leaves(case: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"model": {"name": "small"}}` as `{"model.name": "small"}`."""
    flat: dict[str, Any] = {}
    for name, value in case.items():
        flat |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
