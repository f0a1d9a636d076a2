"""Table, figure and sentences of `training_run`: loss curves of one text under every wrapper."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from cs336_systems.report.frames import select, tuples
from cs336_systems.report.markdown import ABSENT, Cells, number, plain
from cs336_systems.report.points import POINT, Plot
from cs336_systems.report.sections import Section, section

LAST_STEPS = 10  # over whose mean a run's last loss is quoted
MOST_POINTS = 400  # of a curve; longer ones are thinned
# Colours and markers of `styles` that stand for the wrappers.
STYLES = {
    "none": "eager",
    "naive": "compiled",
    "flat": "sdpa_efficient",
    "overlap": "sdpa_flash",
    "bucketed": "tiled",
    "sharded-optimizer": "flex",
    "zero1": "sdpa_cudnn",
    "fsdp": "triton",
}


def training_sections(frame: pd.DataFrame) -> list[Section]:
    """A row a wrapper: first and last loss, held-out loss, step time."""
    held_out, times = (_by_cell(select(frame, name)) for name in ("validation_loss", "time"))
    cells = Cells()
    rows = []
    for row in _in_order(select(frame, "loss")):
        case = json.loads(row.case)
        key = (row.implementation, row.case)
        names = [row.implementation, plain(case.get("num_ranks", 1)), plain(case.get("accumulation", 1))]
        if row.status == "ok":
            first, last = number(row.values[0], 5), number(_last(row.values), 5)
            difference = cells.text(row, "error") if row.implementation != "none" else ABSENT
        else:
            first = last = cells.text(row)
            difference = ABSENT
        rows.append([*names, first, last, cells.text(held_out.get(key)), difference, cells.time(times.get(key))])
    header = ["wrapper", "ranks", "micro-batches", "first loss", f"mean of the last {LAST_STEPS}", "held-out loss",
              "difference from one process / bound", "step (ms)"]  # fmt: skip
    return [section("losses", f"{_what(frame)}, loss in nats a byte", header, rows, 3, cells)]


def training_plots(frame: pd.DataFrame) -> list[Plot]:
    """The loss of every step, a line a wrapper; lines that lie on each other are the point."""
    marks: list[dict[str, Any]] = []
    for row in _in_order(select(frame, "loss")):
        stride = max(1, len(row.values) // MOST_POINTS)
        points = list(enumerate(row.values, start=1))[::stride] or [(1, float("nan"))]
        marks += [
            {
                "panel": "", "series": row.implementation, "style": STYLES.get(row.implementation, row.implementation),
                "x": step, "y": loss, "low": loss, "high": loss, "status": row.status, "message": row.message,
                "drawn": row.status == "ok",
            }
            for step, loss in points
        ]  # fmt: skip
    return [
        Plot(
            name="losses",
            title=f"Training loss on {frame['device'].iloc[0]}\n{_what(frame)}",
            kind="curves",
            data=pd.DataFrame(marks, columns=list(POINT)),
            x_label="step",
            y_label="loss (nats a byte)",
            log_y=False,
            notes=("Each wrapper trains on the same text from the same seed: equal losses lie on one line.",),
        )
    ]


def training_answer(frame: pd.DataFrame) -> list[str]:
    """What was learned, and whether the wrappers agree."""
    said = []
    good = [row for row in _in_order(select(frame, "loss")) if row.status == "ok"]
    held_out = _by_cell(select(frame, "validation_loss"))
    alone = next((row for row in good if row.implementation == "none"), None)
    if alone is not None:
        row = held_out.get((alone.implementation, alone.case))
        unseen = f", and {number(row.median)} on text it never saw" if row is not None and row.status == "ok" else ""
        said.append(
            f"One process: the loss falls from {number(alone.values[0])} to {number(_last(alone.values))} nats a byte "
            f"in {len(alone.values)} steps{unseen}."
        )
    others = [row for row in good if row.implementation != "none" and row.error == row.error]
    if others:
        names = ", ".join(row.implementation for row in others)
        errors = [number(row.error, 2) for row in others]
        most = number(max(row.error for row in others), 2)
        text = f"The curves of {names} differ from one process's by at most {most} times what rounding may make "
        text += "(the bound)"
        if len(others) > 1 and errors.count(most) == 1:
            text += f", the most for {others[errors.index(most)].implementation}"
        said.append(f"{text}.")
    return said


def _in_order(rows: pd.DataFrame) -> list[Any]:
    order = list(STYLES)

    def rank(row: Any) -> int:
        return order.index(row.implementation) if row.implementation in order else len(order)

    return sorted(tuples(rows), key=rank)


def _by_cell(rows: pd.DataFrame) -> dict[tuple[str, str], Any]:
    return {(row.implementation, row.case): row for row in tuples(rows)}


def _last(values: tuple[float, ...]) -> float:
    last = values[-LAST_STEPS:]
    return sum(last) / len(last)


def _what(frame: pd.DataFrame) -> str:
    case = json.loads(frame["case"].iloc[0])
    model = case.get("model") or {}
    parts = [
        f"model {model.get('name')}", f"context {plain(model.get('context_length'))}",
        f"batch {plain(case.get('batch'))}", f"attention {case.get('attention')}",
    ]  # fmt: skip
    return ", ".join(parts)
