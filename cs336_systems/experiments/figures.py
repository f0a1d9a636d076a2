"""The kinds of figures, declared beside an experiment: one Altair spec is the PNG of the page and the interactive
figure of the report.

    Lines(x="seqlen_q", y="tflops", color="implementation", facet="head_dim", where={"mode": "forward"})
    Bars(x="shape", y="median", color="implementation", unit="GiB", where={"quantity": "peak_memory"})
    Heat, Spans (intervals of a trace)

Bars are never on a log axis; lines are where the range is ten or more. Bars with long names lie, so that the names can
be read. An implementation has one colour everywhere.
What fits none of these is a class of its own with `chart(frame)` in the experiment's file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from cs336_systems.experiments.frames import Where, pick, with_unit

if TYPE_CHECKING:
    import altair as alt


class _Altair:
    """The package, imported at its first use: two seconds, which a process that measures and draws nothing can spare.

    Not importlib's LazyLoader, whose module is loaded by whatever looks through `sys.modules`, as torch's custom
    operators do.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("altair"), name)


if not TYPE_CHECKING:
    alt = _Altair()

RANGE_OF_LOG = 10  # largest over smallest, from which on an axis is logarithmic
WIDTH, HEIGHT = 640, 320  # of a figure of one panel
BAR = 14  # height of a lying bar
LONGEST_STANDING = 12  # letters of a name below a bar
PNG_SCALE = 2.0
INK = "#808080"  # read on white and on black
COLORS = {  # ours in colour, the plain baselines in grey, the libraries' in cooler tones
    "eager": "#999999", "compiled": "#555555", "tiled": "#e6ab02", "tiled_compiled": "#a6761d",
    "triton_first": "#a50f15", "triton": "#d95f02",
    "hopper": "#e7298a", "sdpa_flash": "#1b9e77", "sdpa_cudnn": "#66a61e", "sdpa_efficient": "#b3de69",
    "flex": "#7570b3", "flex_flash": "#80b1d3", "fa4": "#377eb8", "triton_lists": "#fdae61", "hopper_lists": "#fbb4d9",
    "triton_whole": "#fee08b",
    "sdpa_mask": "#a1d99b", "sdpa_padded": "#74c476", "torch_varlen": "#80cdc1", "tiles allow": "#bbbbbb",
}  # fmt: skip
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
    title: str = ""
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
        across, width, height = self._size(rows, 1 if self.facet is None else rows[self.facet].nunique())
        marks = self._marks(rows).properties(width=width, height=height)
        if self.facet is not None:
            names, title = [str(one) for one in dict.fromkeys(rows[self.facet])], self.facet.replace("_", " ")
            marks = marks.facet(facet=alt.Facet(f"{_field(self.facet)}:N", sort=names, title=title), columns=across)
        return marks.properties(title=self.title)

    @abstractmethod
    def _marks(self, rows: pd.DataFrame) -> Any: ...

    def _data(self, rows: pd.DataFrame, *more: str) -> alt.Data:
        """Only what is drawn, so that a figure's file holds no raw samples."""
        names = dict.fromkeys(name for name in (self.x, self.y, self.color, self.facet, *more) if name)
        kept = rows[list(names)].rename(columns=str)
        return alt.Data(values=json.loads(kept.rename(columns=_field).to_json(orient="records", double_precision=6)))

    def _color(self, rows: pd.DataFrame) -> Any:
        """The colours, with a legend unless the x axis names what they stand for."""
        names = [str(name) for name in dict.fromkeys(rows[self.color])]
        scale = alt.Scale(domain=names)
        if not COLORS.keys().isdisjoint(names):
            others = [name for name in names if name not in COLORS]
            colors = COLORS | dict(zip(others, cycle(SPARE_COLORS)))
            scale = alt.Scale(domain=names, range=[colors[name] for name in names])
        color = alt.Color(f"{_field(self.color)}:N", scale=scale, sort=names, title=None)
        return color.legend(None) if self.color == self.x else color

    def _tooltip(self, rows: pd.DataFrame) -> list[alt.Tooltip]:
        """What the pointer shows in the interactive figure."""
        numeric = {name: pd.api.types.is_numeric_dtype(rows[name]) for name in (self.color, self.x, self.y)}
        return [
            alt.Tooltip(f"{_field(name)}:Q", format=",.4~g") if number else alt.Tooltip(f"{_field(name)}:N")
            for name, number in numeric.items()
        ]

    def _x_title(self) -> str:
        return self.x_title or self.x.replace("_", " ")

    def _unit_title(self, rows: pd.DataFrame) -> str:
        return self.y_title or f"{rows['quantity'].iloc[0].replace('_', ' ')} ({rows['unit'].iloc[0]})"

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        """Panels side by side, and each one's width and height."""
        across = min(panels, self.columns)
        return across, WIDTH // across, HEIGHT if panels == 1 else HEIGHT * 2 // 3


def _field(name: str) -> str:
    """A column's name as Vega reads it, where a dot means a part of something."""
    return name.replace(".", "_")


def is_wide(values: pd.Series) -> bool:
    """Whether an axis of `values` is logarithmic: they are above zero and differ by a factor of RANGE_OF_LOG."""
    return bool(values.min() > 0 and values.max() / values.min() >= RANGE_OF_LOG)


def scale_of(values: pd.Series, base: float = 10) -> alt.Scale:
    return alt.Scale(type="log", base=base, nice=False) if is_wide(values) else alt.Scale(zero=False)


def axis_of(values: pd.Series) -> alt.Axis:
    """Ticks of a logarithmic axis at 1, 2 and 5 of each decade, at the decades where they are many."""
    if not is_wide(values):
        return alt.Axis()
    low, high = float(values.min()), float(values.max())
    digits = (1, 2, 5) if high / low < 1e4 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return alt.Axis(values=[digit * 10.0**decade for decade in decades for digit in digits], format=",.6~g")


class Lines(Figure):
    """A line of medians for each colour, with a bar from the lower to the upper quartile at each point."""

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        rows = super().rows(frame)
        return rows.dropna(subset=rows.columns.intersection([self.y]))  # a speed over what was not measured

    def _marks(self, rows: pd.DataFrame) -> Any:
        x: Any = alt.X(f"{_field(self.x)}:O", sort=None, title=self._x_title())
        if pd.api.types.is_numeric_dtype(rows[self.x]):
            axis = alt.Axis(values=sorted(rows[self.x].unique()), labelOverlap=True, format=",.12~g")
            x = alt.X(f"{_field(self.x)}:Q", scale=scale_of(rows[self.x], base=2), axis=axis, title=self._x_title())
        heights, title = rows[self.y], self._unit_title(rows)
        y = alt.Y(f"{_field(self.y)}:Q", scale=scale_of(heights), axis=axis_of(heights), title=title)
        has_quartiles = self.y == "median"
        base = alt.Chart(self._data(rows, *(("low", "high") if has_quartiles else ())))
        line = base.mark_line(point=True).encode(x=x, y=y, color=self._color(rows), tooltip=self._tooltip(rows))
        if not has_quartiles:
            return alt.layer(line)
        color = self._color(rows).legend(symbolOpacity=1)  # not as pale
        bars = base.mark_rule(strokeWidth=3, opacity=0.4).encode(x=x, y="low:Q", y2="high:Q", color=color)
        return alt.layer(bars, line)


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """A group of bars for each x, or one `stacked`, on an axis that begins at zero; they lie if an x is a long name."""

    stacked: bool = False

    def _lie(self, rows: pd.DataFrame) -> bool:
        return rows[self.x].astype(str).str.len().max() > LONGEST_STANDING

    def _grouped(self, rows: pd.DataFrame) -> bool:
        """Whether an x has several bars beside each other."""
        panels = [self.facet] if self.facet else []
        return not self.stacked and bool(rows.groupby([self.x, *panels]).size().max() > 1)

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        across, width, height = super()._size(rows, panels)
        if not self._lie(rows):
            return across, width, height
        bars = rows[self.x].nunique() * (rows[self.color].nunique() if self._grouped(rows) else 2)
        return 1, WIDTH, max(BAR * bars, height // 2)

    def _marks(self, rows: pd.DataFrame) -> alt.Chart:
        lie = self._lie(rows)
        names, lengths, offset = (alt.Y, alt.X, alt.YOffset) if lie else (alt.X, alt.Y, alt.XOffset)
        encoding: list[Any] = [
            names(f"{_field(self.x)}:N", sort=None, title=self.x_title or None, axis=alt.Axis(labelAngle=0)),
            lengths(f"{_field(self.y)}:Q", title=self._unit_title(rows), scale=alt.Scale(nice=not self.stacked)),
        ]
        if self._grouped(rows):
            encoding.append(offset(f"{_field(self.color)}:N", sort=None))
        base = alt.Chart(self._data(rows)).mark_bar()
        return base.encode(*encoding, color=self._color(rows), tooltip=self._tooltip(rows))


@dataclass(frozen=True, kw_only=True)
class Heat(Figure):
    """A coloured field for each (x, y), with its number in it."""

    value: str = "median"

    def _marks(self, rows: pd.DataFrame) -> Any:
        base = alt.Chart(self._data(rows, self.value)).encode(
            x=alt.X(f"{_field(self.x)}:O", sort=None, title=self._x_title()),
            y=alt.Y(f"{_field(self.y)}:O", sort=None, title=self.y_title or self.y.replace("_", " ")),
        )
        fields = base.mark_rect().encode(color=alt.Color(f"{_field(self.value)}:Q", title=None))
        values = rows[self.value]
        light_until = values.min() + 0.6 * (values.max() - values.min())  # beyond it the fields are dark
        shade = alt.condition(alt.datum[_field(self.value)] > light_until, alt.value("white"), alt.value("black"))
        text = base.mark_text().encode(text=alt.Text(f"{_field(self.value)}:Q", format=".3~g"), color=shade)
        return alt.layer(fields, text)


class Spans(Figure):
    """Intervals of a trace as bars over time: rows whose samples are starts and ends by turns. `y` names the lanes."""

    def _marks(self, rows: pd.DataFrame) -> alt.Chart:
        pairs = rows["samples"].map(lambda samples: list(zip(samples[::2], samples[1::2])))
        spans = rows.assign(pair=pairs).explode("pair", ignore_index=True).dropna(subset="pair")
        spans = spans.assign(start=spans["pair"].str[0], end=spans["pair"].str[1])
        return alt.Chart(self._data(spans, "start", "end")).mark_bar(height=14).encode(
            x=alt.X("start:Q", title=self.x_title or f"time ({rows['unit'].iloc[0]})"),
            x2="end:Q",
            y=alt.Y(f"{_field(self.y)}:N", sort=None, title=None),
            color=self._color(spans),
        )  # fmt: skip


def spec_of(chart: alt.TopLevelMixin, background: str = "white") -> dict[str, Any]:
    """The Vega-Lite specification: the same chart gives the same text, whenever it is made."""
    text = {"labelColor": INK, "titleColor": INK, "labelLimit": 400}
    axis = text | {"gridColor": INK, "gridOpacity": 0.25, "domainColor": INK, "tickColor": INK}
    config = {
        "background": background, "axis": axis, "legend": text, "header": text, "title": {"color": INK},
        "view": {"stroke": None},
    }  # fmt: skip
    return chart.to_dict() | {"config": config}


def digest(spec: dict[str, Any]) -> str:
    """What the file of digests says of a figure, so that a check needs no drawing."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def write_png(spec: dict[str, Any], path: Path) -> None:
    import vl_convert

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(vl_convert.vegalite_to_png(spec, scale=PNG_SCALE))
