"""The panel of a timeline: a bar for each interval, a row for each lane, as a profiler shows a device's streams."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from cs336_systems.measure.intervals import union
from cs336_systems.report.points import Plot
from cs336_systems.report.styles import colour

BAR_HEIGHT = 0.8  # of a lane
INVISIBLE_GAP = 1 / 3000  # of the axis: bars closer than that, a third of a pixel, are drawn as one


def draw_timeline(axes: Axes, plot: Plot, data: pd.DataFrame) -> None:
    """Each mark of `data` from x = low to x = high in the lane at height y, called by its series."""
    lanes = plot.data[["series", "y"]].drop_duplicates().sort_values("y")
    longest = float(plot.data["high"].max())
    for series, height in lanes.itertuples(index=False, name=None):
        marks = data[data["series"] == series]
        joined = union(zip(marks["low"], marks["high"]), longest * INVISIBLE_GAP)
        bars = [(start, end - start) for start, end in joined]
        look: dict[str, Any] = {"facecolor": colour(str(series)), "linewidth": 0, "snap": False}  # true to a sub-pixel
        axes.broken_barh(bars, (height - BAR_HEIGHT / 2, BAR_HEIGHT), label=str(series), **look)
    axes.set_yticks(list(lanes["y"]), list(lanes["series"]))
    axes.set_ylim(lanes["y"].min() - 0.6, lanes["y"].max() + 0.6)
    axes.set_xlim(0, longest * 1.01)
    axes.grid(False, axis="y")
