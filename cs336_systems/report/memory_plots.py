"""Figures of memory over time, of checkpointing, and of low precision; `plots.py` lists them by problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from cs336_systems.measure.timeline import CATEGORIES
from cs336_systems.report.frames import MODE_TITLES, MODEL_VARIANTS, tuples, variants
from cs336_systems.report.memory_tables import PHASES, RANKS, Lookup, precision_of
from cs336_systems.report.points import POINT, Plot, points
from cs336_systems.report.sections import present_modes

PHASE = "phase: "  # begins the series of a mark where a phase begins
MOST_ON_ONE_SCALE = 10  # times the shorter model's bars: beyond, they would look empty beside the other's
SLUG = str.maketrans({" ": "_", "(": "", ")": ""})


def mixed_precision(frame: pd.DataFrame) -> list[Plot]:
    """Time of a step by model and precision, a panel for each mode."""
    steps = frame[(frame["case_type"] == "ModelCase") & (frame["quantity"] == "time")]
    panel = ["mode", *variants(steps, [name for name in MODEL_VARIANTS if name != "precision"])]
    return [
        Plot(
            name="steps",
            title=f"Time of a step by precision on {_device(frame)}",
            kind="bars",
            data=points(steps, panel=panel, series="precision", style="precision", x="model"),
            x_label="model",
            y_label="time of a step (ms)",
            notes=("Bars: median; whiskers: quartiles.",),
        )
    ]


def memory_profiling(frame: pd.DataFrame) -> list[Plot]:
    """The active-memory timeline of each pass that has one, its largest allocations below it."""
    lookup = Lookup(frame)
    found = []
    for key, case in lookup.of_type("MemoryCase"):
        for mode in lookup.modes:
            for implementation in lookup.implementations:
                rows = {row.quantity: row for row in lookup.cell(key, implementation, mode)}
                marks = _timeline(rows)
                if len(marks):
                    model = case.get("model") or {}
                    context, precision = model.get("context_length"), precision_of(case)
                    where = f"{model.get('name')}, context {context}, {precision}, {MODE_TITLES[mode]}"
                    parts = (model.get("name"), context, precision, mode, implementation)
                    found.append(
                        Plot(
                            name="timeline_" + "_".join(str(part).translate(SLUG) for part in parts),
                            title=f"Active memory: {where}\n{implementation}, {_device(frame)}",
                            kind="memory_timeline",
                            data=marks,
                            x_label="allocations and releases",
                            y_label="allocated (MiB)",
                            log_y=False,
                            notes=(*_ran_out(rows), *_largest(rows)),
                        )
                    )
    return found


def _timeline(rows: dict[str, Any]) -> pd.DataFrame:
    """A row for each category and sampled event, and one for each phase's beginning; none if a part is missing."""
    needed = ["timeline.event", *(f"timeline.{category}" for category in CATEGORIES)]
    broken = [name for name in needed if name not in rows or rows[name].status != "ok"]
    if broken or len({len(rows[name].values) for name in needed}) != 1:
        return pd.DataFrame(columns=list(POINT))
    events = rows["timeline.event"].values
    nothing = {"panel": "", "low": float("nan"), "high": float("nan"), "status": "ok", "message": "", "drawn": True}
    marks = []
    for category in CATEGORIES:
        for x, y in zip(events, rows[f"timeline.{category}"].values):
            marks.append(nothing | {"series": category, "style": category, "x": x, "y": y})
    for phase in PHASES:
        row = rows.get(f"timeline.start.{phase}")
        if row is not None and row.status == "ok":
            marks.append(nothing | {"series": PHASE + phase, "style": "phase", "x": row.values[0], "y": 0.0})
    return pd.DataFrame(marks, columns=list(POINT))


def _ran_out(rows: dict[str, Any]) -> tuple[str, ...]:
    """Says of a step that ran out of memory which phase it reached, and how to read its picture."""
    for phase in PHASES:
        row = rows.get(f"peak_memory.{phase}")
        if row is not None and row.status == "oom":
            kept = " Without a backward pass that uses them, activations count as temporaries." * (phase == "forward")
            return (f"Ran out of memory in the {phase} phase: the fall at the end is what it released.{kept}",)
    return ()


def _largest(rows: dict[str, Any]) -> tuple[str, ...]:
    found = [rows.get(f"allocation.{rank}") for rank in RANKS]
    texts = [
        f"{row.median:,.0f} MiB, {row.kernel.rstrip(': ')}" for row in found if row is not None and row.status == "ok"
    ]
    return (f"Largest allocations: {'; '.join(texts)}.",) if texts else ()


def gradient_checkpointing(frame: pd.DataFrame) -> list[Plot]:
    """Peak of a step and its time by strategy, a series for each implementation; a panel for each model."""
    cases = frame[frame["case_type"] == "MemoryCase"].copy()
    lookup = Lookup(cases)
    cases["strategy"] = [str(lookup.cases[str(case)].get("checkpointing", "")) for case in cases["case"]]
    order = [key for key, _ in lookup.of_type("MemoryCase")]
    cases = cases.assign(_order=[order.index(str(case)) for case in cases["case"]]).sort_values("_order", kind="stable")
    found = []
    for quantity, mode, title, label in (
        ("peak_memory", None, "Peak memory of a training step", "peak memory (MiB)"),
        ("added_memory", None, "Memory added by forward and backward", "memory (MiB)"),
        ("time", "train_step", "Time of a training step", "time of a step (ms)"),
    ):
        rows = cases[cases["quantity"] == quantity]
        if mode is not None and mode not in present_modes(cases):
            continue
        data = points(rows, panel=["model", "attention"], series="label", style="implementation", x="strategy")
        heights = data["y"].groupby(list(rows["model"])).max()
        if heights.max() > MOST_ON_ONE_SCALE * heights.min():  # a proxy beside the model that it stands for
            data["scale"] = list(rows["model"])
        found.append(
            Plot(
                name=quantity,
                title=f"{title} by checkpointing strategy on {_device(frame)}",
                kind="bars",
                data=data,
                x_label="blocks per group",
                y_label=label,
                log_y=False,
                notes=("A number is a group size; the table says what has no bar.",),
            )
        )
    return found


MEMORY_PLOTS: dict[str, Callable[[pd.DataFrame], list[Plot]]] = {
    "benchmarking_mixed_precision": mixed_precision,
    "memory_profiling": memory_profiling,
    "gradient_checkpointing": gradient_checkpointing,
}


def _device(frame: pd.DataFrame) -> str:
    return str(frame["device"].iloc[0])


def sorted_phases(data: pd.DataFrame) -> list[tuple[str, float]]:
    """(name, event) of each phase's mark in the data of a timeline."""
    marks = data[data["series"].str.startswith(PHASE)]
    return sorted(
        ((str(row.series).removeprefix(PHASE), float(row.x)) for row in tuples(marks)), key=lambda one: one[1]
    )
