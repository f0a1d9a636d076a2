"""The kinds of figures, declared beside an experiment: one Altair spec is the PNG of the page and
the interactive figure of the report.

    Lines(x="seqlen_q", y="tflops", color="implementation", facet="head_dim", where={"mode":
    "forward"}) Bars(x="shape", y="median", color="implementation", unit="GiB", where={"quantity":
    "peak_memory"})
    Heat, Spans (intervals of a trace)

Bars are never on a log axis; lines are where the range is ten or more. Bars with long names lie, so
that the names can be read. An implementation has one colour everywhere. Lines and lying bars carry
their names, others have a legend.

The title states what the figure shows: `claim` makes it of the rows that are drawn, and returns ""
where they do not bear it out, so that `title` stands there. The subtitle names what all of the rows
have in common: device, dtype, shape. What fits none of these is a class of its own with
`chart(frame)` in the experiment's file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from cs336_systems.book.frames import Where, digits, pick, with_unit

if TYPE_CHECKING:
    import altair as alt


class _Altair:
    """The package, imported at its first use: two seconds, which a process that measures and draws
    nothing can spare.

    Not importlib's LazyLoader, whose module is loaded by whatever looks through `sys.modules`, as
    torch's custom operators do.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("altair"), name)


if not TYPE_CHECKING:
    alt = _Altair()

RANGE_OF_LOG = 10  # largest over smallest, from which on an axis is logarithmic
WIDTH, HEIGHT = 520, 300  # of a figure of one panel
LYING_WIDTH = 400  # of lying bars, whose names stand on both sides
BAR = 16  # height of a lying bar
LABEL_SIZE, TITLE_SIZE = 13, 16  # of letters, in pixels
LETTER = 7.5  # width of one in a label
LINE = 15  # least distance of two labels
TITLE_LETTERS, SUBTITLE_LETTERS = 62, 84  # of a line
FACTS = {  # columns of which a subtitle tells the value that all rows have
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
LONGEST_STANDING = 12  # letters of a name below a bar
PNG_SCALE = 2.0
BLACK = "black"  # of letters on the white of a PNG
PAGE_INK = "currentColor"  # the page's: black where it is light, white where it is dark
GRID = "#808080"  # seen on white and on black
PAPER, LOW, HIGH = "#ffffff", "#fdae61", "#74add1"  # of the fields of a heat map
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
NAMES = {  # as labels have them
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
# a label's own name, as Vega computes it
NAMED = f"{json.dumps(NAMES)}[datum.label] || datum.label"
SPARE_COLORS = ("#1f78b4", "#b15928", "#6a3d9a", "#e31a1c")  # of a reader's own implementations


@dataclass(frozen=True, kw_only=True)
class Figure(ABC):
    """What all kinds share; `chart` is None where no row has a number."""

    x: str  # columns of the frame
    y: str = "median"
    color: str = "implementation"
    facet: str | None = None  # a panel for each of its values
    where: Where = field(default_factory=dict)
    unit: str | None = None  # to which the median is converted
    title: str = ""  # where there is no claim, or the rows do not bear it out
    claim: Callable[[pd.DataFrame], str] | None = None  # the title from the rows that are drawn
    subtitle: str = ""  # after what the rows have in common
    x_title: str = ""
    y_title: str = ""  # y's unit if empty
    columns: int = 2  # panels side by side

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """What is drawn: measured, and not by the interpreter."""
        rows = pick(frame, self.where)
        return with_unit(rows[(rows["status"] == "ok") & ~rows["interpreted"]], self.unit)

    def chart(self, frame: pd.DataFrame) -> alt.TopLevelMixin | None:
        """The Altair chart, or None."""
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
        """The claim where the rows bear it out, else the title."""
        rows = self.rows(frame)
        claimed = self.claim(rows) if self.claim is not None and not rows.empty else ""
        return claimed or self.title

    def facts(self, frame: pd.DataFrame) -> list[str]:
        """What all measured rows have in common, in words: ["NVIDIA H200", "bfloat16", "head dim
        64"].
        """
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
    def _marks(self, rows: pd.DataFrame) -> Any: ...

    def _data(self, rows: pd.DataFrame, *more: str) -> alt.Data:
        """Only what is drawn, so that a figure's file holds no raw samples."""
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
        """The colours, with a legend unless the x axis names what they stand for."""
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
        """What the pointer shows in the interactive figure."""
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
        return self.x_title or self.x.replace("_", " ")

    def _unit_title(self, rows: pd.DataFrame) -> str:
        return (
            self.y_title or f"{rows['quantity'].iloc[0].replace('_', ' ')} ({rows['unit'].iloc[0]})"
        )

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        """Panels side by side, and each one's width and height."""
        across = min(panels, self.columns)
        return across, WIDTH // across, HEIGHT if panels == 1 else HEIGHT * 2 // 3


def _field(name: str) -> str:
    """A column's name as Vega reads it, where a dot means a part of something."""
    return name.replace(".", "_")


def is_wide(values: pd.Series) -> bool:
    """Whether an axis of `values` is logarithmic: they are above zero and differ by a factor of
    RANGE_OF_LOG.
    """
    return bool(values.min() > 0 and values.max() / values.min() >= RANGE_OF_LOG)


def scale_of(values: pd.Series, base: float = 10) -> alt.Scale:
    return (
        alt.Scale(type="log", base=base, nice=False) if is_wide(values) else alt.Scale(zero=False)
    )


def axis_of(values: pd.Series) -> alt.Axis:
    """Ticks of a logarithmic axis at 1, 2 and 5 of each decade, at the decades where they are many."""
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
    """A line of medians for each colour, its name at its end, with a bar between the quartiles at
    each point.
    """

    # a height that is marked across a figure of one panel, and its name
    bound: tuple[float, str] | None = None

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        rows = super().rows(frame)
        # a speed over what was not measured
        return rows.dropna(subset=rows.columns.intersection([self.y]))

    def _marks(self, rows: pd.DataFrame) -> Any:
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
        has_quartiles = self.y == "median"
        rows = self._with_labels(rows)
        quartiles = ("low", "high") if has_quartiles else ()
        base = alt.Chart(self._data(rows, "label", "shift", *quartiles))
        color = self._color(rows).legend(None)
        line = base.mark_line(point=True).encode(x=x, y=y, color=color, tooltip=self._tooltip(rows))
        layers = [line]
        if has_quartiles:
            bars = base.mark_rule(strokeWidth=3, opacity=0.4)
            layers.insert(0, bars.encode(x=x, y="low:Q", y2="high:Q", color=color))
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
        """`rows` with a line's name as the `label` of its last, and the `shift` in pixels that
        keeps labels apart.
        """
        panels = [self.facet] if self.facet else []
        rows = rows.reset_index(drop=True)
        last = rows.drop_duplicates([*panels, self.color], keep="last")
        _, _, height = self._size(rows, 1 if self.facet is None else rows[self.facet].nunique())
        low, high = rows[self.y].min(), rows[self.y].max()

        def place(value: float) -> float:
            """Pixels from the top of the panel."""
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
                # above a line that ends before others, which may cross what is beside it
                shifts = [-float(LINE)]
            rows.loc[panel.index, "label"] = [
                NAMES.get(str(name), str(name)) for name in panel[self.color]
            ]
            rows.loc[panel.index, "shift"] = shifts
        return rows


def spread(places: list[float], distance: float) -> list[float]:
    """Ascending `places`, moved as little as keeps `distance` between neighbours: groups that touch
    stay centred.

    >>> spread([0.0, 1.0, 50.0], 10)
    [-4.5, 5.5, 50.0]
    """
    groups: list[list[float]] = []  # what touches is one, and lies around the mean of its places
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _lowest(groups[-2], distance) + distance > _highest(
            groups[-1], distance
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_highest(group, distance) + distance * i for group in groups for i in range(len(group))]


def _highest(group: list[float], distance: float) -> float:
    return sum(group) / len(group) - distance * (len(group) - 1) / 2


def _lowest(group: list[float], distance: float) -> float:
    return sum(group) / len(group) + distance * (len(group) - 1) / 2


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """A group of bars for each x, or one `stacked`, on an axis that begins at zero; they lie if an
    x is a long name.
    """

    stacked: bool = False
    significant: int = 3  # digits of the number at a bar

    def _lie(self, rows: pd.DataFrame) -> bool:
        return rows[self.x].astype(str).str.len().max() > LONGEST_STANDING

    def _grouped(self, rows: pd.DataFrame) -> bool:
        """Whether an x has several bars beside each other."""
        panels = [self.facet] if self.facet else []
        return not self.stacked and bool(rows.groupby([self.x, *panels]).size().max() > 1)

    def _has_room(self, rows: pd.DataFrame, label: pd.Series) -> bool:
        """Whether a standing bar is as wide as its number."""
        panels = 1 if self.facet is None else rows[self.facet].nunique()
        bars = rows[self.x].nunique() * (rows[self.color].nunique() if self._grouped(rows) else 1)
        return 0.8 * self._size(rows, panels)[1] / bars >= LETTER * 0.9 * label.str.len().max()

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        across, width, height = super()._size(rows, panels)
        if not self._lie(rows):
            return across, width, height
        bars = rows[self.x].nunique() * (rows[self.color].nunique() if self._grouped(rows) else 1.5)
        return 1, LYING_WIDTH, int(BAR * bars / 0.8)  # the rest is between them

    def _marks(self, rows: pd.DataFrame) -> Any:
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
        label = rows[self.y].map(lambda value: digits(value, self.significant))
        color = self._color(rows)
        if lie and self._grouped(rows):
            names = rows[self.color].astype(str)
            label = label + "  " + names.map(lambda name: NAMES.get(name, name))
            color = color.legend(None)
        base = alt.Chart(self._data(rows.assign(label=label), "label")).encode(*encoding)
        bars = base.mark_bar().encode(color=color, tooltip=self._tooltip(rows))
        if self.stacked or not (lie or self._has_room(rows, label)):
            return bars
        numbers = (
            base.mark_text(align="left", dx=3) if lie else base.mark_text(baseline="bottom", dy=-2)
        )
        return alt.layer(bars, numbers.encode(text="label:N"))


@dataclass(frozen=True, kw_only=True)
class Heat(Figure):
    """A coloured field for each (x, y), with its number in it."""

    value: str = "median"
    middle: float | None = None  # a value that has no colour; those below and above have one each

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        across, width, _ = super()._size(rows, panels)
        return across, min(width, 110 * rows[self.x].nunique()), 28 * rows[self.y].nunique()

    def _marks(self, rows: pd.DataFrame) -> Any:
        base = alt.Chart(self._data(rows, self.value)).encode(
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
            # as far on both sides
            ends = min(low, 2 * self.middle - high), max(high, 2 * self.middle - low)
            scale = alt.Scale(
                domain=[ends[0], self.middle, ends[1]], range=[LOW, PAPER, HIGH], interpolate="rgb"
            )
        color = alt.Color(f"{_field(self.value)}:Q", title=None, scale=scale, legend=None)
        fields = base.mark_rect(stroke=GRID, strokeOpacity=0.3).encode(color=color)
        words = alt.Text(f"{_field(self.value)}:Q", format=".3~g")
        text = base.mark_text(color=BLACK).encode(text=words)  # all of the colours are light
        return alt.layer(fields, text)


class Spans(Figure):
    """Intervals of a trace as bars over time: rows whose samples are starts and ends by turns. `y`
    names the lanes.
    """

    def _marks(self, rows: pd.DataFrame) -> alt.Chart:
        pairs = rows["samples"].map(lambda samples: list(zip(samples[::2], samples[1::2])))
        spans = rows.assign(pair=pairs).explode("pair", ignore_index=True).dropna(subset="pair")
        spans = spans.assign(start=spans["pair"].str[0], end=spans["pair"].str[1])
        return (
            alt.Chart(self._data(spans, "start", "end"))
            .mark_bar(height=14)
            .encode(
                x=alt.X(
                    "start:Q",
                    title=self.x_title or f"time ({rows['unit'].iloc[0]})",
                    axis=alt.Axis(labelOverlap=True, tickCount=8),
                ),
                x2="end:Q",
                y=alt.Y(f"{_field(self.y)}:N", sort=None, title=None),
                color=self._color(spans),
            )
        )


def spec_of(
    chart: alt.TopLevelMixin, background: str = "white", ink: str = BLACK
) -> dict[str, Any]:
    """The Vega-Lite specification: the same chart gives the same text, whenever it is made."""
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
    """What the file of digests says of a figure, so that a check needs no drawing."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def write_png(spec: dict[str, Any], path: Path) -> None:
    import vl_convert

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(vl_convert.vegalite_to_png(spec, scale=PNG_SCALE))
