"""The kinds of panels: lines over lengths, bars in groups or stacks, a ranking, a timeline.

Each drawer gets the axes, the whole plot (for scales common to its panels) and the points of its panel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from cs336_systems.report.frames import tuples
from cs336_systems.report.markdown import number, one_line
from cs336_systems.report.points import Plot
from cs336_systems.report.styles import LITERAL, TEXT_POINTS, colour, line_width, marker, short_length
from cs336_systems.report.timeline import draw_timeline

STATUS_WORDS = {"oom": "OOM", "ok": "interpreter"}  # ok and yet not drawn: an interpreted kernel
ROW_HEIGHT = 0.062  # of a panel, for one row of crosses at its foot
MOST_LABELLED_TICKS = 6
SHARED_CROSSES = "#444444"  # of several series
LONGEST_BAR = 8  # times the shortest; longer ones are cut
MANY_BARS = 40  # in a panel: beyond, the values above them stand upright
MANY_WIDE_BARS = {1e2: 24, 1e3: 12, 1e4: 6}  # the same where values reach so much, counting places left empty
MANY_RATIOS = 20  # the same of ratios: bars of nearly one height
HATCHES = ("", "///", "...", "xxx", "\\\\\\")  # of bars by their run, the newest first


def _draw_lines(axes: Axes, plot: Plot, data: pd.DataFrame) -> None:
    """Median lines with bands between the quartiles, both axes logarithmic."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for series, marks in _series(data[data["drawn"]]):
        style = marks["style"].iloc[0]
        look: dict[str, Any] = {"color": colour(style), "linewidth": line_width(style), "zorder": 2 + line_width(style)}
        axes.plot(marks["x"], marks["y"], marker=marker(style), markersize=5.5, label=series, **look)
        axes.fill_between(marks["x"], marks["low"], marks["high"], color=colour(style), alpha=0.15, linewidth=0)
    lengths = sorted(plot.data["x"].unique())
    every = -(-len(lengths) // MOST_LABELLED_TICKS)
    axes.xaxis.set_major_locator(FixedLocator(lengths[(len(lengths) - 1) % every :: every]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_length(value)))
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    _crosses(axes, plot, data)


def _draw_bars(axes: Axes, plot: Plot, data: pd.DataFrame) -> None:
    """A group of bars for each x, a bar for each series, its value above it or the reason why it is missing."""
    if plot.log_y:
        axes.set_yscale("log")
    groups = list(dict.fromkeys(plot.data["x"]))
    names = list(dict.fromkeys(plot.data["series"]))
    alike = _on_one_scale(plot, data)
    low, high = _limits(alike, rows=0)
    highest, sizes = _highest(alike), plot.data.groupby("panel").size()
    most = sizes.max()
    slots = len(groups) * len(names) / (1 if len(sizes) > 1 else 1.7)  # a panel alone is so much wider
    reached = highest / 10 if plot.log_y else highest  # where neighbours differ in height they do not collide
    wide = any(slots > room and reached >= least for least, room in MANY_WIDE_BARS.items())
    wide = wide or (plot.line_at is not None and slots > MANY_RATIOS)
    upright = wide or most > MANY_BARS
    axes.set_ylim((low, high) if plot.log_y else (0, highest * (1.25 if wide else 1.15)))
    width = 0.82 / len(names)
    for row in tuples(data):
        place = groups.index(row.x) + width * (names.index(row.series) - (len(names) - 1) / 2)
        if row.drawn:
            axes.bar(place, row.y, width * 0.94, color=colour(row.style), **hatching(plot, getattr(row, "run", "")))
            if row.low == row.low:  # not NaN
                axes.errorbar(place, row.y, yerr=[[row.y - row.low], [row.high - row.y]], color="#444444", capsize=2)
            top = row.high if row.high == row.high else row.y
            # Upright, a baseline is beside the number, whose first digit would then stand on the whisker.
            look: dict[str, Any] = {"rotation": 90, "va": "bottom"} if upright else {}
            if upright and plot.line_at is not None:  # which would else cross the numbers of bars below it
                look |= {"zorder": 3, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
            axes.annotate(
                number(row.y, 3), (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=7.5, **look
            )
        else:
            foot = (place, 0.02)
            axes.text(
                *foot,
                _word(row.status),
                transform=axes.get_xaxis_transform(),
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=TEXT_POINTS,
                color=colour(row.style),
                **LITERAL,
            )
    if plot.line_at is not None:
        axes.axhline(plot.line_at, color="#444444", linewidth=1)
    axes.set_xticks(range(len(groups)), groups, **LITERAL)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.grid(False, axis="x")


def hatching(plot: Plot, run: str) -> dict[str, Any]:
    """How a bar looks that is of `run`."""
    place = plot.runs.index(run) if run in plot.runs else 0
    return {"hatch": HATCHES[place % len(HATCHES)], "edgecolor": "white", "linewidth": 0} if place else {}


def _draw_ranking(axes: Axes, plot: Plot, data: pd.DataFrame) -> None:
    """Horizontal bars in the order of `data`, the first above; what was not timed says why in its bar's place.

    Bars are cut at LONGEST_BAR times the shortest: a slow oracle must not flatten the others.
    """
    drawn = data[data["drawn"]]
    longest = min(drawn["high"].max(), LONGEST_BAR * drawn["y"].min()) if len(drawn) else 1.0
    small: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": TEXT_POINTS, **LITERAL}
    for place, row in enumerate(tuples(data)):
        if row.drawn and row.y <= longest:
            axes.barh(place, row.y, 0.7, color=colour(row.style))
            axes.errorbar(row.y, place, xerr=[[row.y - row.low], [row.high - row.y]], color="#444444", capsize=3)
            axes.annotate(f"{number(row.y)} ms", (row.high, place), (5, 0), **small)
        elif row.drawn:
            axes.barh(place, longest, 0.7, color=colour(row.style), hatch="//", edgecolor="white")
            axes.annotate(f"{number(row.y)} ms, cut", (longest, place), (5, 0), **small)
        else:
            reason = one_line(row.message)[:90]
            text = f"{_word(row.status)}: {reason}" if reason else _word(row.status)
            axes.annotate(text, (0, place), (5, 0), xycoords=("axes fraction", "data"), color="#555555", **small)
    axes.set_yticks(range(len(data)), data["series"], **LITERAL)
    axes.set_ylim(len(data) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.18 or 1.0)
    axes.grid(False, axis="y")


def _draw_stacked(axes: Axes, plot: Plot, data: pd.DataFrame) -> None:
    """A bar for each x, of its series from the foot up in the order of `plot.data`; large pieces carry a number."""
    groups = list(dict.fromkeys(plot.data["x"]))
    names = list(dict.fromkeys(plot.data["series"]))
    axes.set_ylim(0, max(1.0, *plot.data[plot.data["drawn"]].groupby(["panel", "x"])["y"].sum(), 0.0) * 1.02)
    largest = axes.get_ylim()[1]
    inside: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5, "color": "white"}
    upright: dict[str, Any] = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": TEXT_POINTS, **LITERAL}
    for place, group in enumerate(groups):
        foot = 0.0
        marks = sorted(tuples(data[(data["x"] == group) & data["drawn"]]), key=lambda mark: names.index(mark.series))
        for mark in marks:
            axes.bar(place, mark.y, 0.8, bottom=foot, color=colour(mark.style), edgecolor="white", linewidth=0.5)
            if mark.y > 0.05 * largest:
                axes.text(place, foot + mark.y / 2, number(mark.y, 2), **inside)
            foot += mark.y
        absent = data[(data["x"] == group) & ~data["drawn"]]
        if not marks and len(absent):
            axes.text(place, 0.02 * largest, _word(absent["status"].iloc[0]), **upright)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right", fontsize=8, **LITERAL)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.grid(False, axis="x")


DRAWERS: dict[str, Callable[[Axes, Plot, pd.DataFrame], None]] = {
    "lines": _draw_lines,
    "bars": _draw_bars,
    "ranking": _draw_ranking,
    "timeline": draw_timeline,
    "stacked": _draw_stacked,
}


def _crosses(axes: Axes, plot: Plot, data: pd.DataFrame) -> None:
    """At the foot of the panel rows of crosses for what has no mark, with the names of the series."""
    absent = set(never_drawn(plot))
    unmarked = plot.data[~plot.data["drawn"] & ~plot.data["series"].isin(absent)]
    depths = [len(_rows_of_crosses(marks)) for _, marks in unmarked.groupby("panel")]
    axes.set_ylim(*_limits(plot, max(depths, default=0)))  # the same in all panels
    foot = axes.get_xaxis_transform()  # x in data, y as a fraction of the panel
    left, right = axes.get_xlim()
    rows = _rows_of_crosses(data[~data["drawn"] & ~data["series"].isin(absent)])
    for row, ((status, places), series) in enumerate(rows.items()):
        x = pd.Series(places)
        shade = colour(data[data["series"] == series[0]]["style"].iloc[0]) if len(series) == 1 else SHARED_CROSSES
        height = ROW_HEIGHT * (row + 0.6)
        name = f"{', '.join(series)} {_word(status)}"
        axes.plot(x, [height] * len(x), "x:", color=shade, markersize=6, linewidth=0.8, transform=foot, clip_on=False)
        first, last = _fraction(axes, x.min(), left, right), _fraction(axes, x.max(), left, right)
        text: dict[str, Any] = {
            "textcoords": "offset points",
            "va": "center",
            "color": "#333333",
            "fontsize": 8,
            **LITERAL,
        }
        if first > 0.3:
            axes.annotate(name, (x.min(), height), (-7, 0), xycoords=foot, ha="right", **text)
        elif last < 0.7:
            axes.annotate(name, (x.max(), height), (7, 0), xycoords=foot, ha="left", **text)
        else:  # crosses from end to end: the name stands on the line that joins them
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            middle = (first + last) / 2
            axes.annotate(
                name, (middle, height), (0, 0), xycoords="axes fraction", ha="center", bbox=box, zorder=6, **text
            )


def _rows_of_crosses(unmarked: pd.DataFrame) -> dict[tuple[str, tuple[float, ...]], list[str]]:
    """The series that have the same status at the same places, which share a row."""
    rows: dict[tuple[str, tuple[float, ...]], list[str]] = {}
    for (series, status), marks in unmarked.groupby(["series", "status"], sort=False):
        rows.setdefault((str(status), tuple(marks["x"])), []).append(str(series))
    return rows


def _fraction(axes: Axes, value: float, left: float, right: float) -> float:
    """Where `value` stands between the ends of the x axis, from 0 to 1."""
    start, here, end = axes.transScale.transform([(left, 1), (value, 1), (right, 1)])[:, 0]
    return float((here - start) / (end - start))


def _limits(plot: Plot, rows: int) -> tuple[float, float]:
    """Ends of a y axis that leave `rows` rows free at the foot."""
    drawn = plot.data[plot.data["drawn"] & (plot.data["y"] > 0)]  # zero (no memory seen) has no place on a log axis
    if drawn.empty:
        return (0.1, 1.0)
    low, high = drawn[["y", "low"]].min().min(), drawn[["y", "high"]].max().max()
    low, high = max(low, high * 1e-9) / 1.4, high * 1.6
    share = min(0.6, ROW_HEIGHT * (rows + 0.6)) if rows else 0.0
    return float(low / (high / low) ** (share / (1 - share))), float(high)


def _on_one_scale(plot: Plot, data: pd.DataFrame) -> Plot:
    """`plot` with those of its panels that share the y axis of the panel of `data`."""
    if "scale" not in plot.data:
        return plot
    return replace(plot, data=plot.data[plot.data["scale"].isin(data["scale"])])


def _highest(plot: Plot) -> float:
    """The top of what a panel with a linear y axis must hold."""
    drawn = plot.data[plot.data["drawn"]]
    found = [value for value in (*drawn["y"], *drawn["high"], plot.line_at) if value is not None and value > 0]
    return float(max(found, default=1.0))


def never_drawn(plot: Plot) -> dict[str, str]:
    """Series without a single mark, and why: `sdpa_flash: skipped everywhere: no float32 kernel`."""
    reasons = {}
    for series, marks in _series(plot.data):
        if not marks["drawn"].any():
            words = sorted({_word(status) for status in marks["status"]})
            if words == ["interpreter"]:
                reasons[series] = f"{series} is not drawn: interpreted kernels run at no meaningful speed."
            else:
                messages = [one_line(message) for message in marks["message"] if message]
                why = f": {messages[0]}" if messages else ""
                reasons[series] = f"{series} is not drawn: {' or '.join(words)} everywhere{why}."
    return reasons


def _series(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(series), marks) for series, marks in data.groupby("series", sort=False)]


def _whiskers(marks: pd.DataFrame) -> list[list[float]]:
    return [list(marks["y"] - marks["low"]), list(marks["high"] - marks["y"])]


def _word(status: str) -> str:
    return STATUS_WORDS.get(status, status)
