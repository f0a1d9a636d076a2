"""The data of figures: a `Plot` is one figure to draw, its points a frame with a row a mark.

Every implementation and length of the records is a row: drawn where it was measured on a real kernel, else annotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from cs336_systems.report.frames import complete
from cs336_systems.report.markdown import plain
from cs336_systems.report.sections import attention_keys, key_heading

# panel; series (a line, or one bar of each group); style (the name that gives its colour); x; y with quartiles low and
# high; status and message of the record; drawn: whether there is a y to draw, which interpreted kernels do not have.
POINT = ("panel", "series", "style", "x", "y", "low", "high", "status", "message", "drawn")


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure to draw."""

    name: str  # what follows "<problem>_" in its file name
    title: str  # with the device
    kind: Literal["lines", "bars", "stacked", "ranking", "timeline"]
    data: pd.DataFrame  # columns POINT; of bars of several runs also `run`; where not all panels share y also `scale`
    x_label: str
    y_label: str  # with the unit
    log_y: bool = True
    line_at: float | None = None  # a line across bars, where a ratio changes sides
    notes: tuple[str, ...] = ()  # small print
    runs: tuple[str, ...] = ()  # names of the runs that bars are of, the newest first; bars of others are hatched


def points(rows: pd.DataFrame, *, panel: Sequence[str], series: str, style: str, x: str) -> pd.DataFrame:
    """Rows of a frame as marks at their medians; `series`, `style` and `x` name columns, `panel` any number of them."""
    real = (rows["status"] == "ok") & ~rows["interpreted"].astype(bool)
    return pd.DataFrame(
        {
            "panel": panel_names(rows, panel),
            "series": [plain(value) for value in rows[series]],
            "style": list(rows[style]),
            "x": list(rows[x]),
            "y": list(rows["median"]),
            "low": list(rows["quartile_low"]),
            "high": list(rows["quartile_high"]),
            "status": list(rows["status"]),
            "message": list(rows["message"]),
            "drawn": list(real),
        },
        columns=list(POINT),
    )


def points_by_length(rows: pd.DataFrame, rate: bool = False) -> pd.DataFrame:
    """Attention against length: a panel for each head dim, a series for each label; TFLOP/s if `rate`."""
    keys = attention_keys(rows)
    rows = complete(rows, keys)
    panel = [key for key in keys if key != "seqlen"]
    marks = points(rows, panel=panel, series="label", style="implementation", x="seqlen")
    if rate:  # a rate is inverse to its time
        marks["y"] = list(rows["tflops"])
        marks["low"] = list(rows["tflops"] * rows["median"] / rows["quartile_high"])
        marks["high"] = list(rows["tflops"] * rows["median"] / rows["quartile_low"])
    return marks


def panel_names(rows: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """For each row its panel, e.g. `d = 64, batch = 8`; empty strings when no column tells panels apart."""
    if not names:
        return [""] * len(rows)
    return [
        ", ".join(f"{key_heading(name)} = {plain(value)}" for name, value in zip(names, values))
        for values in rows[list(names)].itertuples(index=False, name=None)
    ]
