"""Define the kinds of figures that experiments declare, each built as an Altair chart.

    Lines(
        x="seqlen_q", y="tflops", color="implementation", facet="head_dim",
        where={"mode": "forward"},
    )
    Bars(
        x="shape", y="median", color="implementation", unit="GiB",
        where={"quantity": "peak_memory"},
    )
    Heat, Spans (intervals of a trace)

One chart is drawn both as the PNG of a page and as the interactive figure of the report. Bars never
have a log axis; lines have one if values differ by a factor of ten or more. Bars with long names
are horizontal, so that the names can be read. An implementation has one colour in all figures.
Lines and grouped horizontal bars are labelled with their names; others have a legend.

The title states what the figure shows: `claim` makes it from the drawn rows, and returns "" if they
do not support it; then `title` is used. The subtitle names what all of the rows have in common:
device, dtype, shape. A figure of another kind is a class with `chart(frame)` in the experiment's
file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from cs336_systems.book.frames import Where, digits, pick, with_unit

if TYPE_CHECKING:
    import altair as alt


class _Altair:
    """A stand-in for the package `altair` that imports it at its first use.

    The import takes two seconds, which a process that only measures does not spend. importlib's
    LazyLoader is not used: any code that looks through `sys.modules`, such as torch's custom
    operators, would load its module.
    """

    def __getattr__(self, name: str) -> Any:
        """Import altair and return its attribute `name`."""
        return getattr(importlib.import_module("altair"), name)


if not TYPE_CHECKING:
    alt = _Altair()

RANGE_OF_LOG = 10  # an axis is logarithmic if largest / smallest is at least this
WIDTH, HEIGHT = 520, 300  # pixels of a figure with one panel
LYING_WIDTH = 400  # pixels for horizontal bars, which have names on both sides
BAR = 16  # height of a horizontal bar in pixels
LABEL_SIZE, TITLE_SIZE = 13, 16  # font sizes in pixels
LETTER = 7.5  # average width of a letter in a label, in pixels
LINE = 15  # least distance of two labels in pixels
TITLE_LETTERS, SUBTITLE_LETTERS = 62, 84  # letters a line
FACTS = {  # columns whose value a subtitle names if all rows share it
    "device": "{}",
    "dtype": "{}",
    "precision": "{}",
    "num_ranks": "{} ranks",
    "model": "{}",
    "model.context_length": "context {:,.0f}",
    "batch": "batch {:.0f}",
    "heads": "{:.0f} heads",
    "seqlen_q": "{:,.0f} tokens",
    "length": "{:,} tokens",
    "head_dim": "head dim {:.0f}",
}
SINGLE = {"heads": "one head", "seqlen_q": "one query a head"}
LONGEST_STANDING = 12  # letters of the longest name below a vertical bar
PNG_SCALE = 2.0
BLACK = "black"  # text colour on the white of a PNG
PAGE_INK = "currentColor"  # text colour of the page: black if it is light, white if it is dark
GRID = "#808080"  # visible on white and on black
PAPER, LOW, HIGH = "#ffffff", "#fdae61", "#74add1"  # colours of the fields of a heat map
COLORS = {  # ours in colour, the plain baselines in grey, the libraries' in cooler tones
    "eager": "#999999",
    "compiled": "#555555",
    "tiled": "#e6ab02",
    "tiled_compiled": "#a6761d",
    "triton_first": "#a50f15",
    "triton": "#d95f02",
    "hopper": "#e7298a",
    "sdpa_flash": "#1b9e77",
    "sdpa_cudnn": "#66a61e",
    "sdpa_efficient": "#b3de69",
    "flex": "#7570b3",
    "flex_flash": "#80b1d3",
    "fa4": "#377eb8",
    "triton_lists": "#fdae61",
    "hopper_lists": "#fbb4d9",
    "triton_whole": "#fee08b",
    "sdpa_mask": "#a1d99b",
    "sdpa_padded": "#74c476",
    "torch_varlen": "#80cdc1",
    "tiles allow": "#bbbbbb",
}
NAMES = {  # name in records -> name in labels
    "triton": "triton (ours)",
    "hopper": "hopper (ours)",
    "triton_whole": "triton, keys whole (ours)",
    "triton_first": "triton_first (ours)",
    "triton_lists": "triton, lists (ours)",
    "hopper_lists": "hopper, lists (ours)",
    "fa4": "FlashAttention-4",
    "flex": "FlexAttention",
    "sdpa_cudnn": "cuDNN",
    "sdpa_flash": "SDPA flash",
    "sdpa_mask": "SDPA, mask",
    "sdpa_padded": "SDPA, padded",
    "torch_varlen": "torch varlen",
    "forward_backward": "forward + backward",
    "train_step": "training step",
}
# Vega expression for the text of a label: its entry in NAMES, else the name itself
NAMED = f"{json.dumps(NAMES)}[datum.label] || datum.label"
SPARE_COLORS = ("#1f78b4", "#b15928", "#6a3d9a", "#e31a1c")  # for users' own implementations


@dataclass(frozen=True, kw_only=True)
class Figure(ABC):
    """Base class of figures; a subclass defines `_marks`, the marks in a panel."""

    x: str  # x, y, color and facet are columns of the frame
    y: str = "median"
    color: str = "implementation"
    facet: str | None = None  # one panel for each of its values
    where: Where = field(default_factory=dict)  # choice of rows
    unit: str | None = None  # unit to which the median is converted
    title: str = ""  # used if there is no claim, or the rows do not support it
    claim: Callable[[pd.DataFrame], str] | None = None  # the title from the drawn rows, or ""
    subtitle: str = ""  # stands after what the rows have in common
    x_title: str = ""  # x's name if empty
    y_title: str = ""  # y's quantity and unit if empty
    columns: int = 2  # panels side by side

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the rows to draw: chosen by `where`, measured, and not by Triton's interpreter."""
        rows = pick(frame, self.where)
        return with_unit(rows[(rows["status"] == "ok") & ~rows["interpreted"]], self.unit)

    def chart(self, frame: pd.DataFrame) -> alt.TopLevelMixin | None:
        """Return the Altair chart with its title and panels; None if there is no row to draw."""
        rows = self.rows(frame)
        if rows.empty:
            return None
        across, width, height = self._size(
            rows, 1 if self.facet is None else rows[self.facet].nunique()
        )
        marks = self._marks(rows).properties(width=width, height=height)
        if self.facet is not None:
            names, title = (
                [str(one) for one in dict.fromkeys(rows[self.facet])],
                self.facet.replace("_", " "),
            )
            marks = marks.facet(
                facet=alt.Facet(f"{_field(self.facet)}:N", sort=names, title=title), columns=across
            )
        text = textwrap.wrap(self.heading(frame), TITLE_LETTERS)
        below = textwrap.wrap(
            ", ".join(filter(None, (*self.facts(frame), self.subtitle))), SUBTITLE_LETTERS
        )
        return marks.properties(title=alt.Title(text=text, subtitle=below))

    def heading(self, frame: pd.DataFrame) -> str:
        """Return the claim if the drawn rows support it, else the title."""
        rows = self.rows(frame)
        claimed = self.claim(rows) if self.claim is not None and not rows.empty else ""
        return claimed or self.title

    def facts(self, frame: pd.DataFrame) -> list[str]:
        """Return what all measured rows share, e.g. ["NVIDIA H200", "bfloat16", "head dim 64"]."""
        rows = Figure.rows(self, frame)
        found = []
        for column, words in FACTS.items():
            values = list(rows[column].dropna().unique()) if column in rows else []
            if len(values) == 1:
                found.append(
                    SINGLE[column]
                    if column in SINGLE and values[0] == 1
                    else words.format(values[0])
                )
        return found

    @abstractmethod
    def _marks(self, rows: pd.DataFrame) -> Any:
        """Return the Altair chart of one panel, without size and title."""
        ...

    def _data(self, rows: pd.DataFrame, more: Sequence[str]) -> alt.Data:
        """Return the drawn columns of `rows` and `more`, so that a figure holds no raw samples."""
        names = dict.fromkeys(
            name for name in (self.x, self.y, self.color, self.facet, *more) if name
        )
        kept = rows[list(names)].rename(columns=str)
        return alt.Data(
            values=json.loads(
                kept.rename(columns=_field).to_json(orient="records", double_precision=6)
            )
        )

    def _color(self, rows: pd.DataFrame) -> Any:
        """Return the colour encoding; its legend is left out if the x axis has the same names."""
        names = [str(name) for name in dict.fromkeys(rows[self.color])]
        scale = alt.Scale(domain=names)
        if not COLORS.keys().isdisjoint(names):
            others = [name for name in names if name not in COLORS]
            colors = COLORS | dict(zip(others, cycle(SPARE_COLORS)))
            scale = alt.Scale(domain=names, range=[colors[name] for name in names])
        color = alt.Color(f"{_field(self.color)}:N", scale=scale, sort=names, title=None)
        if self.color == self.x or len(names) == 1:
            return color.legend(None)
        longest = max(len(NAMES.get(name, name)) for name in names)
        across = max(1, int(WIDTH / (LETTER * longest + 30)))
        return color.legend(orient="top", columns=across, labelExpr=NAMED)

    def _tooltip(self, rows: pd.DataFrame) -> list[alt.Tooltip]:
        """Return the tooltips of the interactive figure: colour, x and y."""
        numeric = {
            name: pd.api.types.is_numeric_dtype(rows[name]) for name in (self.color, self.x, self.y)
        }
        return [
            alt.Tooltip(f"{_field(name)}:Q", format=",.4~g")
            if number
            else alt.Tooltip(f"{_field(name)}:N")
            for name, number in numeric.items()
        ]

    def _x_title(self) -> str:
        """Return the title of the x axis."""
        return self.x_title or self.x.replace("_", " ")

    def _unit_title(self, rows: pd.DataFrame) -> str:
        """Return the title of the y axis, by default the quantity and its unit."""
        return (
            self.y_title or f"{rows['quantity'].iloc[0].replace('_', ' ')} ({rows['unit'].iloc[0]})"
        )

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        """Return the number of panels side by side, and a panel's width and height in pixels."""
        across = min(panels, self.columns)
        return across, WIDTH // across, HEIGHT if panels == 1 else HEIGHT * 2 // 3


def _field(name: str) -> str:
    """Return a column's name for Vega, without dots, which would mean nested fields."""
    return name.replace(".", "_")


def is_wide(values: pd.Series) -> bool:
    """Return whether `values` need a log axis: all are positive and span a factor RANGE_OF_LOG."""
    return bool(values.min() > 0 and values.max() / values.min() >= RANGE_OF_LOG)


def scale_of(values: pd.Series, base: float = 10) -> alt.Scale:
    """Return a log scale to `base` if `is_wide(values)`, else a linear one without a forced 0."""
    return (
        alt.Scale(type="log", base=base, nice=False) if is_wide(values) else alt.Scale(zero=False)
    )


def axis_of(values: pd.Series) -> alt.Axis:
    """Return the axis of `values`; a log axis has ticks at 1, 2 and 5 of each decade.

    From a factor of 1e4 on it has ticks at the decades only.
    """
    if not is_wide(values):
        return alt.Axis()
    low, high = float(values.min()), float(values.max())
    digits = (1, 2, 5) if high / low < 1e4 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return alt.Axis(
        values=[digit * 10.0**decade for decade in decades for digit in digits], format=",.6~g"
    )


@dataclass(frozen=True, kw_only=True)
class Lines(Figure):
    """A line for each colour with its name at the end; medians have a bar between their quartiles.

    `bound` is for figures of one panel.
    """

    # (y, name) of a dashed horizontal line across the panel
    bound: tuple[float, str] | None = None

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the rows to draw, without those whose y is missing."""
        rows = super().rows(frame)
        # A speed is missing if its baseline was not measured.
        return rows.dropna(subset=rows.columns.intersection([self.y]))

    def _marks(self, rows: pd.DataFrame) -> Any:
        """Return lines, quartile bars, names and the bound as layers."""
        # Axes: names are equally spaced, numbers are to scale.
        x: Any = alt.X(f"{_field(self.x)}:O", sort=None, title=self._x_title())
        if pd.api.types.is_numeric_dtype(rows[self.x]):
            axis = alt.Axis(
                values=sorted(rows[self.x].unique()), labelOverlap=True, format=",.12~g"
            )
            x = alt.X(
                f"{_field(self.x)}:Q",
                scale=scale_of(rows[self.x], base=2),
                axis=axis,
                title=self._x_title(),
            )
        heights, title = rows[self.y], self._unit_title(rows)
        y = alt.Y(
            f"{_field(self.y)}:Q", scale=scale_of(heights), axis=axis_of(heights), title=title
        )

        # Lines, with bars between the quartiles behind them.
        has_quartiles = self.y == "median"
        rows = self._with_labels(rows)
        quartiles = ("low", "high") if has_quartiles else ()
        base = alt.Chart(self._data(rows, ["label", "shift", *quartiles]))
        color = self._color(rows).legend(None)
        line = base.mark_line(point=True).encode(x=x, y=y, color=color, tooltip=self._tooltip(rows))
        layers = [line]
        if has_quartiles:
            bars = base.mark_rule(strokeWidth=3, opacity=0.4)
            layers.insert(0, bars.encode(x=x, y="low:Q", y2="high:Q", color=color))

        # Names of the lines and of the bound.
        if rows[self.color].nunique() > 1:
            names = base.mark_text(align="left", dx=8, dy=alt.expr("datum.shift"))
            layers.append(names.encode(x=x, y=y, text="label:N"))
        if self.bound is not None:
            height, name = self.bound
            across = alt.Chart(alt.Data(values=[{"height": height, "name": name}]))
            at = alt.Y("height:Q", title=title)
            layers.append(across.mark_rule(strokeDash=[6, 4]).encode(y=at))
            words = across.mark_text(align="right", dy=-8)
            layers.append(words.encode(x=alt.value("width"), y=at, text="name:N"))
        return alt.layer(*layers)

    def _with_labels(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return `rows` with two more columns for the labels: `label` and `shift`.

        The last row of each line has the line's name as `label`, the others "". `shift` in pixels
        keeps labels at the same x apart.
        """
        panels = [self.facet] if self.facet else []
        rows = rows.reset_index(drop=True)
        last = rows.drop_duplicates([*panels, self.color], keep="last")
        _, _, height = self._size(rows, 1 if self.facet is None else rows[self.facet].nunique())
        low, high = rows[self.y].min(), rows[self.y].max()

        def place(value: float) -> float:
            """Return the distance of a y value from the top of the panel in pixels."""
            if high == low:
                return height / 2
            share = (
                math.log(high / value) / math.log(high / low)
                if is_wide(rows[self.y])
                else high - value
            )
            return float(height * share / (1 if is_wide(rows[self.y]) else high - low))

        rows = rows.assign(label="", shift=0.0)
        for _, panel in last.groupby([*panels, self.x], sort=False):
            panel = panel.sort_values(self.y, ascending=False, kind="stable")
            places = [place(value) for value in panel[self.y]]
            shifts = [moved - before for moved, before in zip(spread(places, LINE), places)]
            if len(panel) == 1 and panel[self.x].iloc[0] != rows[self.x].iloc[last.index].max():
                # A line that ends before others may have them to its right: its label goes above.
                shifts = [-float(LINE)]
            rows.loc[panel.index, "label"] = [
                NAMES.get(str(name), str(name)) for name in panel[self.color]
            ]
            rows.loc[panel.index, "shift"] = shifts
        return rows


def spread(places: list[float], distance: float) -> list[float]:
    """Return ascending `places`, moved so that neighbours are at least `distance` apart.

    Places that would overlap form a group, which stays centred on the mean of its places.

    >>> spread([0.0, 1.0, 50.0], 10)
    [-4.5, 5.5, 50.0]
    """
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _lowest(groups[-2], distance) + distance > _highest(
            groups[-1], distance
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_highest(group, distance) + distance * i for group in groups for i in range(len(group))]


def _highest(group: list[float], distance: float) -> float:
    """Return the smallest place (the highest on the page) of a spread group."""
    return sum(group) / len(group) - distance * (len(group) - 1) / 2


def _lowest(group: list[float], distance: float) -> float:
    """Return the largest place (the lowest on the page) of a spread group."""
    return sum(group) / len(group) + distance * (len(group) - 1) / 2


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """A group of bars, or one stacked bar, for each x, on an axis that begins at zero.

    The bars are horizontal if a name on the x axis has more than LONGEST_STANDING letters.
    """

    stacked: bool = False
    significant: int = 3  # digits of the number at a bar

    def _lie(self, rows: pd.DataFrame) -> bool:
        """Return whether the bars are horizontal."""
        return rows[self.x].astype(str).str.len().max() > LONGEST_STANDING

    def _grouped(self, rows: pd.DataFrame) -> bool:
        """Return whether an x has several bars beside each other."""
        panels = [self.facet] if self.facet else []
        return not self.stacked and bool(rows.groupby([self.x, *panels]).size().max() > 1)

    def _has_room(self, rows: pd.DataFrame, label: pd.Series) -> bool:
        """Return whether a vertical bar is wide enough for the longest number in `label`."""
        panels = 1 if self.facet is None else rows[self.facet].nunique()
        bars = rows[self.x].nunique() * (rows[self.color].nunique() if self._grouped(rows) else 1)
        return 0.8 * self._size(rows, panels)[1] / bars >= LETTER * 0.9 * label.str.len().max()

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        """Return the panels side by side and their size; horizontal bars get BAR pixels each."""
        across, width, height = super()._size(rows, panels)
        if not self._lie(rows):
            return across, width, height
        bars = rows[self.x].nunique() * (rows[self.color].nunique() if self._grouped(rows) else 1.5)
        return 1, LYING_WIDTH, int(BAR * bars / 0.8)  # 0.2 of the height is between bars

    def _marks(self, rows: pd.DataFrame) -> Any:
        """Return the bars, with numbers at them if there is room."""
        # Horizontal bars swap the axes.
        lie = self._lie(rows)
        places, lengths, offset = (
            (alt.Y, alt.X, alt.YOffset) if lie else (alt.X, alt.Y, alt.XOffset)
        )
        axis = alt.Axis(labelAngle=0, labelExpr=NAMED)
        encoding: list[Any] = [
            places(f"{_field(self.x)}:N", sort=None, title=self.x_title or None, axis=axis),
            lengths(
                f"{_field(self.y)}:Q",
                title=self._unit_title(rows),
                scale=alt.Scale(nice=not self.stacked),
                axis=alt.Axis(labelOverlap=True, tickCount=8),
            ),
        ]
        if self._grouped(rows):
            encoding.append(offset(f"{_field(self.color)}:N", sort=None))

        # Horizontal bars have their names at their ends, in place of a legend.
        label = rows[self.y].map(lambda value: digits(value, self.significant))
        color = self._color(rows)
        if lie and self._grouped(rows):
            names = rows[self.color].astype(str)
            label = label + "  " + names.map(lambda name: NAMES.get(name, name))
            color = color.legend(None)

        base = alt.Chart(self._data(rows.assign(label=label), ["label"])).encode(*encoding)
        bars = base.mark_bar().encode(color=color, tooltip=self._tooltip(rows))
        if self.stacked or not (lie or self._has_room(rows, label)):
            return bars
        numbers = (
            base.mark_text(align="left", dx=3) if lie else base.mark_text(baseline="bottom", dy=-2)
        )
        return alt.layer(bars, numbers.encode(text="label:N"))


@dataclass(frozen=True, kw_only=True)
class Heat(Figure):
    """A heat map: a coloured field for each (x, y), with its number in it."""

    value: str = "median"  # column of the numbers
    middle: float | None = None  # the value that is white, with one colour below and one above it

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        """Return the panels side by side and their size, which depends on the number of fields."""
        across, width, _ = super()._size(rows, panels)
        return across, min(width, 110 * rows[self.x].nunique()), 28 * rows[self.y].nunique()

    def _marks(self, rows: pd.DataFrame) -> Any:
        """Return the fields with their numbers."""
        base = alt.Chart(self._data(rows, [self.value])).encode(
            x=alt.X(
                f"{_field(self.x)}:O", sort=None, title=self._x_title(), axis=alt.Axis(labelAngle=0)
            ),
            y=alt.Y(
                f"{_field(self.y)}:O", sort=None, title=self.y_title or self.y.replace("_", " ")
            ),
        )
        low, high = float(rows[self.value].min()), float(rows[self.value].max())
        scale = alt.Scale(domain=[low, high], range=[PAPER, HIGH], interpolate="rgb")
        if self.middle is not None:
            # The domain is symmetric about the middle.
            ends = min(low, 2 * self.middle - high), max(high, 2 * self.middle - low)
            scale = alt.Scale(
                domain=[ends[0], self.middle, ends[1]], range=[LOW, PAPER, HIGH], interpolate="rgb"
            )
        color = alt.Color(f"{_field(self.value)}:Q", title=None, scale=scale, legend=None)
        fields = base.mark_rect(stroke=GRID, strokeOpacity=0.3).encode(color=color)
        words = alt.Text(f"{_field(self.value)}:Q", format=".3~g")
        text = base.mark_text(color=BLACK).encode(text=words)  # all of the colours are light
        return alt.layer(fields, text)


@dataclass(frozen=True, kw_only=True)
class Spans(Figure):
    """Intervals of a trace as horizontal bars over time, in one lane for each value of `y`.

    The samples of a row are the starts and ends of its intervals by turns. Bars with a `text` fill
    their lane and have a border, so that neighbours can be told apart; their colours must be light.
    """

    text: str | None = None  # column whose values stand in the bars

    def _marks(self, rows: pd.DataFrame) -> Any:
        """Return a bar for each interval, with its text in it."""
        pairs = rows["samples"].map(lambda samples: list(zip(samples[::2], samples[1::2])))
        spans = rows.assign(pair=pairs).explode("pair", ignore_index=True).dropna(subset="pair")
        spans = spans.assign(start=spans["pair"].str[0], end=spans["pair"].str[1])
        x = alt.X(
            "start:Q",
            title=self.x_title or f"time ({rows['unit'].iloc[0]})",
            axis=alt.Axis(labelOverlap=True, tickCount=8),
        )
        y = alt.Y(f"{_field(self.y)}:N", sort=None, title=None)
        color = self._color(spans)
        if self.text is None:
            bars = alt.Chart(self._data(spans, ["start", "end"])).mark_bar(height=14)
            return bars.encode(x=x, x2="end:Q", y=y, color=color)

        spans = spans.assign(middle=(spans["start"] + spans["end"]) / 2)
        base = alt.Chart(self._data(spans, ["start", "end", "middle", self.text]))
        bars = base.mark_bar(height=alt.RelativeBandSize(1), stroke=BLACK, strokeWidth=0.5)
        words = base.mark_text(color=BLACK, fontSize=LABEL_SIZE - 1)
        return alt.layer(
            bars.encode(x=x, x2="end:Q", y=y, color=color),
            words.encode(x="middle:Q", y=y, text=f"{_field(self.text)}:N"),
        )


def spec_of(
    chart: alt.TopLevelMixin, background: str = "white", ink: str = BLACK
) -> dict[str, Any]:
    """Return the Vega-Lite specification of `chart` in our style; equal charts give equal ones."""
    sizes = {"labelFontSize": LABEL_SIZE, "titleFontSize": LABEL_SIZE}
    text = {"labelColor": ink, "titleColor": ink, "labelLimit": 400, **sizes}
    axis = text | {"gridColor": GRID, "gridOpacity": 0.25, "domainColor": ink, "tickColor": ink}
    title = {
        "color": ink,
        "subtitleColor": ink,
        "fontSize": TITLE_SIZE,
        "subtitleFontSize": LABEL_SIZE,
        "anchor": "start",
        "frame": "bounds",
        "offset": 12,
    }
    config = {
        "background": background,
        "axis": axis,
        "legend": text,
        "header": text,
        "title": title,
        "text": {"color": ink, "fontSize": LABEL_SIZE - 1},
        "rule": {"color": ink},
        "view": {"stroke": None},
    }
    return chart.to_dict() | {"config": config}


def digest(spec: dict[str, Any]) -> str:
    """Return 16 hex digits that identify a figure's specification, to check it without drawing."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def write_png(spec: dict[str, Any], path: Path) -> None:
    """Draw a Vega-Lite specification into the PNG file `path`, whose folder is made if needed."""
    import vl_convert

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(vl_convert.vegalite_to_png(spec, scale=PNG_SCALE))
