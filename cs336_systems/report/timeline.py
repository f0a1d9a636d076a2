"""The panel of a timeline: a bar for each interval, a row for each lane, as a profiler shows a device's streams."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from cs336_systems.report.points import Plot
from cs336_systems.report.styles import colour

BAR_HEIGHT = 0.8  # of a lane


def draw_timeline(axes: Axes, plot: Plot, data: pd.DataFrame) -> None:
    """Each mark of `data` from x = low to x = high in the lane at height y, called by its series."""
    lanes = plot.data[["series", "y"]].drop_duplicates().sort_values("y")
    for series, height in lanes.itertuples(index=False, name=None):
        marks = data[data["series"] == series]
        bars = list(zip(marks["low"], marks["high"] - marks["low"]))
        look: dict[str, Any] = {"facecolor": colour(str(series)), "linewidth": 0, "label": str(series)}
        axes.broken_barh(bars, (height - BAR_HEIGHT / 2, BAR_HEIGHT), **look)
    axes.set_yticks(list(lanes["y"]), list(lanes["series"]))
    axes.set_ylim(lanes["y"].min() - 0.6, lanes["y"].max() + 0.6)
    axes.set_xlim(0, plot.data["high"].max() * 1.01)
    axes.grid(False, axis="y")
