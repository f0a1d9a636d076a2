"""Profiles of steps as the report shows them: tables, figures and answers of `nsys_profile`.

The frame's rows of one case and mode make a `Profile`; everything here is made from these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cs336_systems.accounting import eager_attention_part_flops
from cs336_systems.config import ModelConfig
from cs336_systems.report.frames import MODE_TITLES, MODEL_VARIANTS, NOT_MEASURED, tuples, variants
from cs336_systems.report.markdown import Cells, code_span, factor, number, plain
from cs336_systems.report.points import POINT, Plot
from cs336_systems.report.sections import Section, key_heading, section

# In the order of tables and stacks; see cs336_systems/measure/kernels.py.
CATEGORIES = (
    "gemm", "attention", "softmax", "elementwise", "reduction", "copy", "communication", "optimizer", "other",
)  # fmt: skip
CATEGORY_TITLES = {"gemm": "matmul", "attention": "fused attention"}
ANY_RANK = "kernel"
NO_MATMUL = "other_kernel"
SHOWN_RANKS = 3
ABOVE_WALL_CLOCK = (
    "busy share: union of the kernels' intervals in the profiled steps over the unprofiled step's time; profiling "
    "slows a CPU, so it may exceed 100 %"
)
ATTENTION_COLUMNS = (
    ("attention_scores_time", "QKᵀ (ms)"),
    ("attention_softmax_time", "scale, mask, softmax (ms)"),
    ("attention_softmax_kernel_time", "of it softmax (ms)"),
    ("attention_values_time", "PV (ms)"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """One profiled case and mode: its record rows by quantity."""

    first: Any  # any of the rows: the case's columns
    mode: str
    rows: dict[str, Any]

    def row(self, quantity: str) -> Any:
        """The row of `quantity`; where there is none, a row that says why the case has none, or None."""
        return self.rows.get(quantity) or next((row for row in self.rows.values() if row.status != "ok"), None)

    def value(self, quantity: str) -> float:
        """The median of `quantity`, NaN where it was not measured."""
        row = self.rows.get(quantity)
        return float(row.median) if row is not None and row.status == "ok" else float("nan")

    def share(self, quantity: str) -> float:
        """Percentage of the kernels' summed time, NaN where that is 0 or was not measured."""
        total = self.value("kernel_time")
        return 100 * self.value(quantity) / total if total > 0 else float("nan")

    @property
    def name(self) -> str:
        return f"{self.first.model} ({self.first.precision}, context {plain(self.first.context)})"

    @property
    def softmax_ratio(self) -> float:
        """Time between the two products over the time of the products."""
        products = self.value("attention_scores_time") + self.value("attention_values_time")
        return self.value("attention_softmax_time") / products if products > 0 else float("nan")

    @property
    def kernel(self) -> str:
        """Name of the kernel that takes the most time, empty where none is known."""
        row = self.rows.get(f"{ANY_RANK}_1_time")
        return row.kernel if row is not None and row.status == "ok" else ""


def profiles(frame: pd.DataFrame) -> list[Profile]:
    """Every case and mode in `frame`, which is sorted already."""
    found = []
    for _, rows in frame.groupby(["label", "case", "mode"], sort=False):
        by_quantity = {row.quantity: row for row in tuples(rows)}
        found.append(Profile(first=next(iter(by_quantity.values())), mode=str(rows["mode"].iloc[0]), rows=by_quantity))
    return found


def case_keys(frame: pd.DataFrame) -> list[str]:
    """Columns that tell the profiled cases apart."""
    return ["model", "context", *variants(frame, ("label", *(name for name in MODEL_VARIANTS if name != "context")))]


# Tables


def tables(frame: pd.DataFrame) -> list[Section]:
    """Wall clock against kernels; the longest kernels, of all and of no matmul; shares; attention's parts."""
    found, keys = profiles(frame), case_keys(frame)
    sections = [
        _time_table(found, keys),
        _kernel_table("top", "The kernels that take the most time", found, keys, ANY_RANK),
    ]
    forward = [profile for profile in found if profile.mode == "forward"]
    if forward:
        title = "Kernels that are no matmul, forward"
        sections.append(_kernel_table("others", title, forward, keys, NO_MATMUL))
    sections.append(_share_table(found, keys))
    attention = [profile for profile in found if "attention_scores_time" in profile.rows]
    if attention:
        sections.append(_attention_table(attention, keys))
    return sections


def _keys(profile: Profile, keys: list[str]) -> list[str]:
    return [*(plain(getattr(profile.first, key)) for key in keys), plain(profile.mode)]


def _headings(keys: list[str]) -> list[str]:
    return [*map(key_heading, keys), "mode"]


def _time_table(found: list[Profile], keys: list[str]) -> Section:
    cells, above = Cells(), False
    lines = []
    for profile in found:
        line = [cells.time(profile.row("time")), cells.text(profile.row("kernel_time"))]
        busy = 100 * profile.value("busy_time") / profile.value("time") if profile.value("time") > 0 else float("nan")
        above = above or busy > 100
        lines.append([*_keys(profile, keys), *line, _percent(busy), _whole(cells, profile.row("kernel_calls"))])
    if above:
        cells.remark(ABOVE_WALL_CLOCK)
    header = [*_headings(keys), "wall clock (ms)", "kernels, summed (ms)", "busy share of wall clock", "kernels"]
    return section("time", "Wall clock of a step, unprofiled, against its kernels", header, lines, len(keys) + 1, cells)


def _kernel_table(name: str, title: str, found: list[Profile], keys: list[str], prefix: str) -> Section:
    """A line for each rank: name, calls, time, share of all kernels' time."""
    cells = Cells()
    lines = []
    for profile in found:
        for rank in range(1, SHOWN_RANKS + 1):
            quantity = f"{prefix}_{rank}_time"
            if rank > 1 and quantity not in profile.rows:
                continue
            row = profile.row(quantity)
            kernel = code_span(row.kernel) if row is not None and row.kernel else "–"
            calls = _whole(cells, profile.row(f"{prefix}_{rank}_calls"))
            lines.append(
                [*_keys(profile, keys), str(rank), kernel, calls, cells.text(row), _percent(profile.share(quantity))]
            )
    header = [*_headings(keys), "rank", "kernel", "calls", "time (ms)", "share"]
    return section(name, title, header, lines, len(keys) + 3, cells)


def _share_table(found: list[Profile], keys: list[str]) -> Section:
    present = [name for name in CATEGORIES if any(profile.value(f"{name}_time") > 0 for profile in found)]
    cells = Cells()
    lines = []
    for profile in found:
        shares = [_percent(profile.share(f"{name}_time")) for name in present]
        lines.append([*_keys(profile, keys), cells.text(profile.row("kernel_time")), *shares])
    header = [*_headings(keys), "kernels (ms)", *(CATEGORY_TITLES.get(name, name) for name in present)]
    return section("categories", "Share of the kernels' time", header, lines, len(keys) + 1, cells)


def _attention_table(found: list[Profile], keys: list[str]) -> Section:
    cells = Cells()
    lines = []
    for profile in found:
        values = [cells.text(profile.row(quantity)) for quantity, _ in ATTENTION_COLUMNS]
        ratios = [factor(profile.softmax_ratio), factor(flops_ratio(profile))]
        lines.append([*_keys(profile, keys), *values, *ratios])
    columns = [heading for _, heading in ATTENTION_COLUMNS]
    header = [*_headings(keys), *columns, "between ÷ products, time", "softmax ÷ products, FLOPs"]
    title = "Attention: its two products and what stands between them, all layers"
    return section("attention", title, header, lines, len(keys) + 1, cells)


def flops_ratio(profile: Profile) -> float:
    """FLOPs of the softmax over those of the two products, forward; NaN for a model whose shape is not known."""
    model = _model(profile)
    if model is None:
        return float("nan")
    flops = eager_attention_part_flops(model, int(profile.first.batch))
    return flops["softmax"] / (flops["scores"] + flops["values"])


def _model(profile: Profile) -> ModelConfig | None:
    described = json.loads(profile.first.case).get("model", {})
    try:
        return ModelConfig(**described)
    except (TypeError, ValueError):  # a record of others, with a case that is checked no further than tables need
        return None


def _whole(cells: Cells, row: Any) -> str:
    """A count without digits behind the point, where it is one in every profiled step."""
    return plain(row.median) if row is not None and row.status == "ok" else cells.text(row)


def _percent(value: float) -> str:
    return f"{number(value, 3)} %" if value == value else "–"


# Figures


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Shares of the categories, a stacked bar for each case; and attention's products against what is between them."""
    found = profiles(frame)
    device = str(frame["device"].iloc[0])
    shares = [mark for profile in found for mark in _share_marks(profile, frame)]
    attention = [mark for profile in found if profile.mode == "forward" for mark in _attention_marks(profile, frame)]
    drawn = [
        Plot(
            name="categories",
            title=f"Where the time of a step goes on {device}",
            kind="stacked",
            data=pd.DataFrame(shares, columns=list(POINT)),
            x_label="model, context",
            y_label="share of the kernels' time (%)",
            log_y=False,
        ),
        Plot(
            name="attention",
            title=f"Plain attention in a forward pass on {device}",
            kind="bars",
            data=pd.DataFrame(attention, columns=list(POINT)),
            x_label="context",
            y_label="time over all layers (ms)",
            notes=("Bars: median; whiskers: the profiled steps' quartiles.",),
        ),
    ]
    return [plot for plot in drawn if len(plot.data)]


def _mark(row: Any, **values: Any) -> dict[str, Any]:
    """A mark at the median of `row`, or one that says why there is none."""
    if row is None or row.status != "ok":
        status, message = (row.status, row.message) if row is not None else (NOT_MEASURED, "no record")
        nothing = dict.fromkeys(("y", "low", "high"), float("nan"))
        return {**nothing, **values, "status": status, "message": message, "drawn": False}
    position = {"y": row.median, "low": row.quartile_low, "high": row.quartile_high}
    return {**position, **values, "status": "ok", "message": "", "drawn": True}


def _share_marks(profile: Profile, frame: pd.DataFrame) -> Iterable[dict[str, Any]]:
    case = ", ".join(plain(getattr(profile.first, key)) for key in case_keys(frame))
    for name in CATEGORIES:
        row, share = profile.row(f"{name}_time"), profile.share(f"{name}_time")
        if row is not None and row.status == "ok" and not share >= 0:
            continue  # nothing ran, so there is no share
        title = CATEGORY_TITLES.get(name, name)
        mark = _mark(row, panel=MODE_TITLES.get(profile.mode, profile.mode), series=title, style=name, x=case)
        if mark["drawn"]:
            mark |= {"y": share, "low": float("nan"), "high": float("nan")}
        if mark["drawn"] and share > 0:
            yield mark
        elif not mark["drawn"] and name == CATEGORIES[0]:
            yield mark  # one for the whole bar


def _attention_marks(profile: Profile, frame: pd.DataFrame) -> Iterable[dict[str, Any]]:
    names = [key for key in case_keys(frame) if key != "context"]
    panel = ", ".join(plain(getattr(profile.first, key)) for key in names)
    for quantity, heading in ATTENTION_COLUMNS:
        title = heading.removesuffix(" (ms)")
        yield _mark(profile.row(quantity), panel=panel, series=title, style=quantity, x=plain(profile.first.context))


# Answers


def answers(frame: pd.DataFrame) -> list[str]:
    """The handout's questions (a) to (e), each from the records alone."""
    found = profiles(frame)
    said: list[str] = []
    for question in (_wall_clock, _top_kernels, _other_kernels, _matmul_share, _softmax_against_matmul):
        said += question(found)
    broken = [profile for profile in found if profile.row("time") is not None and profile.row("time").status == "oom"]
    return said + [
        f"{p.name}, {MODE_TITLES[p.mode]}, ran out of memory: {code_span(p.row('time').message)}." for p in broken
    ]


def _wall_clock(found: list[Profile]) -> list[str]:
    shares = {
        profile: 100 * profile.value("kernel_time") / profile.value("time")
        for profile in _in_mode(found, "forward")
        if profile.value("time") > 0 and profile.value("kernel_time") > 0
    }
    if not shares:
        return []
    low, high = (choose(shares, key=lambda profile: shares[profile]) for choose in (min, max))

    def said(share: float) -> str:
        of_another = " (profiled operators against an unprofiled step)" if share > 100 else ""
        return f"{number(share, 3)} %{of_another}"

    text = f"(a) The kernels of a forward pass add up to {said(shares[low])} of its wall clock for {low.name}, "
    text += f"{number(low.value('kernel_time'))} of {number(low.value('time'))} ms"
    if low is high:
        return [text + "."]
    text += f", and to {said(shares[high])} for {high.name}, {number(high.value('kernel_time'))} of "
    return [text + f"{number(high.value('time'))} ms; the others lie between."]


def _top_kernels(found: list[Profile]) -> list[str]:
    said = []
    for forward in _longest_contexts(found, "forward"):
        if not forward.kernel:
            continue
        text = f"(b) {forward.name}: the kernel with the most time of a forward pass is {_top(forward)}"
        both = next((p for p in found if p.mode == "forward_backward" and p.first.case == forward.first.case), None)
        if both is not None and both.kernel:
            same = "the same" if both.kernel == forward.kernel else "another one"
            text += f"; of forward and backward it is {same}, {_top(both)}"
        said.append(text + ".")
    return said


def _top(profile: Profile) -> str:
    calls, share = profile.value(f"{ANY_RANK}_1_calls"), profile.share(f"{ANY_RANK}_1_time")
    times = (
        f"{number(profile.value(f'{ANY_RANK}_1_time'))} ms in {plain(calls)} calls, {_percent(share)} of all kernels"
    )
    return f"{code_span(profile.kernel)} ({times})"


def _other_kernels(found: list[Profile]) -> list[str]:
    said = []
    for profile in _longest_contexts(found, "forward"):
        named = []
        for rank in range(1, SHOWN_RANKS + 1):
            row, share = profile.rows.get(f"{NO_MATMUL}_{rank}_time"), profile.share(f"{NO_MATMUL}_{rank}_time")
            if row is not None and row.status == "ok" and share == share:
                named.append(f"{code_span(row.kernel)} {_percent(share)}")
        if named:
            said.append(f"(c) {profile.name}, forward: besides matmuls the time goes to {', '.join(named)}.")
    return said


def _matmul_share(found: list[Profile]) -> list[str]:
    said = []
    for forward in _longest_contexts(found, "forward"):
        step = next((p for p in found if p.mode == "train_step" and p.first.case == forward.first.case), None)
        share = forward.share("gemm_time")
        if share != share:
            continue
        text = f"(d) {forward.name}: matmuls are {_percent(share)} of the kernels' time in inference"
        if step is not None and step.share("gemm_time") == step.share("gemm_time"):
            text += f" and {_percent(step.share('gemm_time'))} of a full training step"
            if step.share("optimizer_time") > 0:
                text += f", where AdamW's update takes {_percent(step.share('optimizer_time'))}"
        said.append(text + ".")
    return said


def _softmax_against_matmul(found: list[Profile]) -> list[str]:
    said = []
    for profile in _longest_contexts(found, "forward"):
        ratio, flops = profile.softmax_ratio, flops_ratio(profile)
        if ratio != ratio:
            continue
        products = profile.value("attention_scores_time") + profile.value("attention_values_time")
        text = (
            f"(e) {profile.name}, forward: attention's two products take {number(products)} ms over all layers, scale, "
        )
        text += f"mask and softmax between them {number(profile.value('attention_softmax_time'))} ms"
        kernel = profile.value("attention_softmax_kernel_time")
        text += f" (the softmax alone {number(kernel)} ms): {factor(ratio)} the time" if kernel == kernel else ""
        said.append(text + (f" for {factor(flops)} the FLOPs of the products." if flops == flops else "."))
    return said


def _in_mode(found: list[Profile], mode: str) -> list[Profile]:
    return [profile for profile in found if profile.mode == mode]


def _longest_contexts(found: list[Profile], mode: str) -> list[Profile]:
    """Of each model and precision, its profile of `mode` at the longest context that ran."""
    ran = [profile for profile in _in_mode(found, mode) if profile.value("kernel_time") > 0]
    longest: dict[tuple[str, str], Profile] = {}
    for profile in ran:
        key = (profile.first.model, profile.first.precision)
        if key not in longest or profile.first.context > longest[key].first.context:
            longest[key] = profile
    return list(longest.values())
