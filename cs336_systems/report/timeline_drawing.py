"""Draws a memory timeline: categories stacked over events, phases between dashed lines, the peak marked."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from cs336_systems.measure.timeline import CATEGORIES
from cs336_systems.report.memory_plots import sorted_phases
from cs336_systems.report.points import Plot
from cs336_systems.report.styles import LITERAL, TEXT_POINTS, colour

NARROW_PHASE = 0.12  # of the axis: a narrower one has its name written upwards
NARROWEST_PHASE = 0.02  # a narrower one has no room for its name


def draw_timeline(axes: Axes, plot: Plot, data: pd.DataFrame) -> None:
    by_category = {name: data[data["series"] == name] for name in CATEGORIES}
    events = by_category[CATEGORIES[0]]["x"].to_numpy(dtype=float)
    layers = np.array([by_category[name]["y"].to_numpy(dtype=float) for name in CATEGORIES])
    axes.stackplot(events, layers, labels=CATEGORIES, colors=[colour(name) for name in CATEGORIES], linewidth=0)
    total = layers.sum(axis=0)
    peak = int(total.argmax())
    right = max(float(events[-1]), 1.0)
    axes.set_xlim(min(float(events[0]), right / 2), right)  # before the first sample nothing is known
    axes.set_ylim(0, max(float(total.max()), 1e-3) * 1.2)
    axes.plot(events[peak], total[peak], marker="v", color="black", markersize=6)
    side = "right" if events[peak] > right / 2 else "left"
    axes.annotate(
        f"peak {total[peak]:,.0f} MiB", (events[peak], total[peak]), (0, 7), textcoords="offset points", ha=side,
        fontsize=TEXT_POINTS, fontweight="bold",
    )  # fmt: skip
    phases = sorted_phases(data)
    for (name, start), end in zip(phases, [*(start for _, start in phases[1:]), right]):
        if start > 0:
            axes.axvline(start, color="#444444", linewidth=0.9, linestyle="--")
        width = (end - start) / right
        if width > NARROWEST_PHASE:
            axes.text(
                (start + end) / 2, 0.97, name, transform=axes.get_xaxis_transform(), ha="center", va="top",
                rotation=90 if width < NARROW_PHASE else 0, fontsize=TEXT_POINTS, **LITERAL,
            )  # fmt: skip
