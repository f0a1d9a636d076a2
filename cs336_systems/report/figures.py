"""Plots drawn with matplotlib's object API: no pyplot, no display, no state, the same bytes for the same records.

    for stem, figure in problem_figures("flash_benchmarking", frame):
        save_figure(figure, folder / f"{stem}.png", source)

What could not be measured is marked by a cross at the foot of its panel; what is drawn nowhere is named in the notes.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from cs336_systems.report.drawing import DRAWERS, hatching, never_drawn
from cs336_systems.report.plots import plots
from cs336_systems.report.points import Plot
from cs336_systems.report.styles import DPI, LITERAL, TEXT_POINTS, colour

NOTE_WIDTH = 12  # characters of small print an inch
TITLE_WIDTH = 58  # characters of a line above one of several columns of panels
THOUSANDS = ("bars", "stacked")  # kinds whose linear y axis groups its digits
FILE_STEM = re.compile(r"[A-Za-z0-9_-]+")


def problem_figures(problem: str, frame: pd.DataFrame) -> list[tuple[str, Figure]]:
    """File stem and figure of each plot of `problem`."""
    return [(file_stem(problem, plot), draw(plot)) for plot in plots(problem, frame)]


def file_stem(problem: str, plot: Plot) -> str:
    """Name of the plot's file without ".png"; ValueError if it could name another folder (a case's dtype is in it)."""
    stem = f"{problem}_{plot.name}"
    if not FILE_STEM.fullmatch(stem):
        raise ValueError(f"plot {plot.name!r} of problem {problem!r} gives no file name")
    return stem


def save_figure(figure: Figure, path: Path, source: str) -> None:
    """Write `figure` as a PNG with `source`, the digest of its records, and nothing of the machine or the day."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None, "Source": source})


def draw(plot: Plot) -> Figure:
    """The figure of `plot`: one axes a panel, on common scales but for `scale`, title above, legend and notes below."""
    panels = list(dict.fromkeys(plot.data["panel"]))
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    if plot.kind == "timeline":  # one below the other: what is compared stands at the same time
        columns = 1
    rows = -(-len(panels) // columns)
    size = {"bars": (9.5, 4.8), "ranking": (9.5, 1.6 + 0.42 * plot.data["series"].nunique())}
    width, height = size.get(plot.kind, (9.5, 5.4)) if len(panels) == 1 else (5.6 * columns, 3.9 * rows + 1.2)
    if plot.kind == "timeline":
        width, height = 9.5, 0.95 * rows + 1.5
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(plot.title, fontsize=12.5, fontweight="bold", **LITERAL)
    one_y = plot.kind != "ranking" and "scale" not in plot.data
    grid = figure.subplots(rows, columns, squeeze=False, sharex=plot.kind != "ranking", sharey=one_y)
    flat = list(grid.flat)
    for index, (axes, panel) in enumerate(zip(flat, panels)):
        title = textwrap.fill(panel, TITLE_WIDTH) if columns > 1 else panel
        axes.set_title(title, fontsize=10.5, loc="left" if plot.kind == "timeline" else "center", **LITERAL)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#D9D9D9", linewidth=0.7)
        axes.set_axisbelow(True)
        DRAWERS[plot.kind](axes, plot, plot.data[plot.data["panel"] == panel])
        if plot.kind in THOUSANDS and not plot.log_y:
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        lowest = plot.kind == "ranking" or index + columns >= len(panels)
        axes.tick_params(labelbottom=lowest)
        axes.set_xlabel(plot.x_label if lowest else "")
        axes.set_ylabel(plot.y_label if index % columns == 0 else "")
    for axes in flat[len(panels) :]:
        axes.remove()
    _legend(figure, flat[: len(panels)], plot, width)
    return figure


def _legend(figure: Figure, all_axes: list[Axes], plot: Plot, width: float) -> None:
    """Names of the series, and the notes above them, below the panels, where no data can be."""
    handles: dict[str, Artist] = {}
    for axes in all_axes:  # a series may be missing in the first panel
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    reasons = [] if plot.kind in ("bars", "ranking", "stacked") else list(never_drawn(plot).values())
    notes = [line for note in (*plot.notes, *reasons) for line in textwrap.wrap(note, int(width * NOTE_WIDTH))]
    if plot.kind in ("bars", "stacked"):
        styles = dict(zip(plot.data["series"], plot.data["style"]))
        handles = {series: Patch(color=colour(style), label=series) for series, style in styles.items()}
        for run in plot.runs[1:]:
            handles[f"commit {run}"] = Patch(facecolor="#8A8A8A", **hatching(plot, run))
    columns = -(-len(handles) // -(-len(handles) // 5)) if handles else 1  # at most five, the last row nearly full
    legend = figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=TEXT_POINTS,
        title="\n".join(notes) or None,
    )
    for text in (legend.get_title(), *legend.get_texts()):
        text.set_parse_math(LITERAL["parse_math"])
    legend.get_title().set_fontsize(TEXT_POINTS - 0.5)
    legend.get_title().set_color("#444444")
