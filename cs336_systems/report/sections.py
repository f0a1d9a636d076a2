"""Sections: one table with its legend, and the two shapes that most tables have.

`pivot` puts cases down and implementations across, `measures_section` cases down and quantities across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cs336_systems.report.frames import (
    ATTENTION_KEYS,
    ATTENTION_VARIANTS,
    BASELINE,
    MODES,
    complete,
    labels,
    ordered,
    select,
    tuples,
    variants,
)
from cs336_systems.report.markdown import Cells, factor, plain, table

KEY_HEADINGS = {
    "head_dim": "d",
    "seqlen": "S",
    "seqlen_k": "S of keys",
    "kv_heads": "KV heads",
    "label": "implementation",
}
# A measure is a quantity (or "tflops", the rate of a timed call), its mode (None: any) and the heading of its column.
Measure = tuple[str, str | None, str]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table with its legend."""

    name: str  # what follows "<problem>.table." in the name of a block
    title: str
    body: str  # Markdown


def present_modes(frame: pd.DataFrame) -> list[str]:
    """Modes that were timed, in the order forward, backward, both, full step."""
    return ordered(frame[frame["quantity"] == "time"]["mode"], MODES)


def speed_up(slow: Any, fast: Any) -> float:
    """How many times faster `fast` is than `slow` (rows of frames), NaN unless both were timed on real kernels."""
    if slow is None or fast is None or slow.status != "ok" or fast.status != "ok":
        return float("nan")
    if slow.interpreted or fast.interpreted or not fast.median > 0:
        return float("nan")
    return slow.median / fast.median


def pivot(
    name: str, title: str, rows: pd.DataFrame, keys: list[str], *, fast: str | None = None, value: str = "median"
) -> Section:
    """Cases down, implementations across; with `fast`, a last column of how many times it is faster than eager.

    `rows` hold one row a cell and label (see `select`). The speed-up has no column where `fast` was interpreted.
    """
    across = labels(rows)
    compared = fast is not None and {fast, BASELINE} <= set(across)
    cells = Cells()
    lines = []
    for group in groups(complete(rows, keys), keys):
        by_label = {row.label: row for row in tuples(group)}
        found = [by_label[label] for label in across]
        line = key_cells(found[0], keys)
        line += [cells.time(row) if value == "median" else cells.text(row, value) for row in found]
        if compared:
            line.append(factor(speed_up(by_label[BASELINE], by_label[fast])))
        lines.append(line)
    if fast is not None and f"{fast} (interpreter)" in across:
        cells.remark(f"{fast} (interpreter): interpreted kernels run at no meaningful speed, so none is compared")
    header = [*map(key_heading, keys), *across, *([f"{fast} over {BASELINE}"] if compared else [])]
    return section(name, title, header, lines, len(keys), cells)


def measures_section(
    name: str, title: str, frame: pd.DataFrame, keys: list[str], measures: Sequence[Measure]
) -> Section:
    """Cases down, measures across: each (quantity or "tflops", mode or None for any, heading)."""
    columns = []
    for quantity, mode, heading in measures:
        value = "tflops" if quantity == "tflops" else "median"
        rows = select(frame, "time" if quantity == "tflops" else quantity, mode)
        if len(rows):
            by_cell = {(row.implementation, row.case): row for row in tuples(rows)}
            columns.append((heading, value, by_cell))
    cells = Cells()
    lines = []
    for row in tuples(frame.drop_duplicates(["implementation", "case"])):
        found = [(by_cell.get((row.implementation, row.case)), value) for _, value, by_cell in columns]
        written = [cells.time(one) if value == "median" else cells.text(one, value) for one, value in found]
        lines.append([*key_cells(row, keys), *written])
    header = [*map(key_heading, keys), *(heading for heading, *_ in columns)]
    return section(name, title, header, lines, len(keys), cells)


def section(name: str, title: str, header: list[str], rows: list[list[str]], num_keys: int, cells: Cells) -> Section:
    """A section of these cells, whose first `num_keys` columns are names, with the legend of `cells`."""
    title = " ".join(title.split())  # a case's text may hold line breaks
    legend = cells.legend()
    body = table(header, rows, num_keys) + (f"\n\n{legend}" if legend else "")
    return Section(name=name, title=title[:1].upper() + title[1:], body=body)


def groups(rows: pd.DataFrame, keys: list[str]) -> list[pd.DataFrame]:
    """`rows` split by `keys`, in the order of their first rows."""
    return [group for _, group in rows.groupby(keys, sort=False, dropna=False)]


def attention_keys(rows: pd.DataFrame) -> list[str]:
    """Columns that name an attention case here: d and S, and whatever else varies."""
    rectangular = ["seqlen_k"] if (rows["seqlen_k"] != rows["seqlen"]).any() else []
    return [*ATTENTION_KEYS, *rectangular, *variants(rows, ATTENTION_VARIANTS)]


def constants(rows: pd.DataFrame) -> str:
    """What all cases of a table have in common: `bfloat16, batch 1, heads 1, causal`."""
    varying = variants(rows, ATTENTION_VARIANTS)
    parts = [str(rows["dtype"].iloc[0])] if "dtype" not in varying else []
    parts += [f"{name} {plain(rows[name].iloc[0])}" for name in ("batch", "heads") if name not in varying]
    if "causal" not in varying:
        parts.append("causal" if rows["causal"].iloc[0] else "not causal")
    return ", ".join(parts)


def key_cells(row: Any, keys: list[str]) -> list[str]:
    """The cells that name the case of `row` (a named tuple)."""
    return [plain(getattr(row, key)) for key in keys]


def key_heading(key: str) -> str:
    """The heading of a column that names cases."""
    return KEY_HEADINGS.get(key, key)
