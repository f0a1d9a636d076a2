"""Idle time, activations and messages of three pipeline schedules, simulated beside closed forms."""

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from cs336_systems.analysis.pipeline import (
    SCHEDULES,
    Pipeline,
    bubble_fraction,
    fewest_microbatches,
    peak_activations,
    simulate_pipeline,
)
from cs336_systems.book.frames import digits
from cs336_systems.experiments import Calculation, Listing, Spans, problem

# name in tables -> (schedule, chunks of a stage)
VARIANTS = {
    "GPipe": ("GPipe", 1),
    "1F1B": ("1F1B", 1),
    "interleaved, 2 chunks": ("interleaved 1F1B", 2),
    "interleaved, 4 chunks": ("interleaved 1F1B", 4),
}
DRAWN = ("GPipe", "1F1B", "interleaved, 2 chunks")
DRAWN_STAGES, DRAWN_MICROBATCHES = 4, 8
STAGES = (4, 8, 16)
BATCHES = (1, 4, 8)  # micro-batches over stages
FORWARD_TIME, BACKWARD_TIME = 1.0, 2.0  # twice the matmuls
MESSAGE_TIME = 0.1  # in the column "bubble with messages"
HIDDEN = 0.1  # share of the whole time below which a bubble counts as hidden
COLORS = {  # light, as the numbers in the bars are black; a later chunk is paler
    "forward, chunk 0": "#74add1",
    "forward, chunk 1": "#d0e5f2",
    "backward, chunk 0": "#fdae61",
    "backward, chunk 1": "#fee8c8",
}
LANE_WIDTH, LANE_HEIGHT = 760, 24  # pixels


@dataclass(frozen=True, kw_only=True)
class Lanes(Spans):
    """A lane for each stage, a panel for each schedule, with the micro-batch in each bar."""

    def _size(self, rows: pd.DataFrame, panels: int) -> tuple[int, int, int]:
        """Return one panel a row, wide enough for a number in the shortest bar."""
        return 1, LANE_WIDTH, LANE_HEIGHT * rows[self.y].nunique()

    def _color(self, rows: pd.DataFrame) -> Any:
        """Return the colours of the two passes, shaded by the chunk."""
        scale = {"domain": list(COLORS), "range": list(COLORS.values())}
        return super()._color(rows).scale(**scale).legend(orient="top", columns=len(COLORS))


def idle_claim(rows: pd.DataFrame) -> str:
    """Return the idle share of a stage with one chunk and with two, or "" if two save nothing."""
    idle = rows.groupby("schedule", sort=False)["bubble"].first()
    whole, cut = idle["1F1B"], idle["interleaved, 2 chunks"]
    if idle["GPipe"] != whole or cut >= whole:
        return ""
    return f"Two chunks a stage cut its idle time from {digits(whole, 2)} to {digits(cut, 2)} %"


def pipeline_of(variant: str, num_stages: int, num_microbatches: int) -> Pipeline:
    """Return the pipeline of a variant, without messages."""
    return Pipeline(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=VARIANTS[variant][1],
        forward_time=FORWARD_TIME,
        backward_time=BACKWARD_TIME,
    )


def operations(variant: str) -> list[dict[str, Any]]:
    """Return a row for each operation of the drawn pipeline."""
    pipeline = pipeline_of(variant, DRAWN_STAGES, DRAWN_MICROBATCHES)
    run = simulate_pipeline(pipeline, SCHEDULES[VARIANTS[variant][0]](pipeline))
    return [
        {
            "quantity": "operation",
            "schedule": variant,
            "stage": f"stage {stage}",
            "pass": f"{operation.mode}, chunk {operation.chunk}",
            "micro-batch": operation.microbatch,
            "samples": (start, end),
            "bubble": 100 * run.bubble_fraction,
        }
        for stage, lane in enumerate(run.lanes)
        for operation, start, end in lane
    ]


def step(variant: str, num_stages: int, num_microbatches: int) -> dict[str, Any]:
    """Return the row of one step: simulated values, and closed forms beside them."""
    schedule = VARIANTS[variant][0]
    pipeline = pipeline_of(variant, num_stages, num_microbatches)
    run = simulate_pipeline(pipeline, SCHEDULES[schedule](pipeline))
    sending = replace(pipeline, message_time=MESSAGE_TIME)
    sent = simulate_pipeline(sending, SCHEDULES[schedule](sending))
    return {
        "p": num_stages,
        "m": num_microbatches,
        "size": f"{num_stages} × {num_microbatches}",
        "schedule": variant,
        "bubble": 100 * run.bubble_fraction,
        "bubble, formula": 100 * bubble_fraction(pipeline),
        "activations": run.peak_activations[0],
        "activations, formula": peak_activations(schedule, pipeline)[0],
        "messages": run.num_messages,
        "bubble with messages": 100 * sent.bubble_fraction,
    }


@problem(title="A pipeline, simulated: GPipe, 1F1B and interleaved 1F1B", order=20.5)
class PipelineBubbles(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return the drawn operations, the steps of a grid, and the smallest batches."""
        rows = [row for variant in DRAWN for row in operations(variant)]
        for num_stages in STAGES:
            for times in BATCHES:
                rows += [
                    {"quantity": "step"} | step(variant, num_stages, times * num_stages)
                    for variant in VARIANTS
                ]
        for num_stages in STAGES:
            for variant, (_, num_chunks) in VARIANTS.items():
                fewest = fewest_microbatches(num_stages, below=HIDDEN, num_chunks=num_chunks)
                rows.append({"quantity": "hidden"} | step(variant, num_stages, fewest))
        return rows

    steps = {
        "p × m": "size",
        "schedule": "schedule",
        "bubble (%)": "bubble",
        "formula (%)": "bubble, formula",
        "activations": "activations",
        "formula": "activations, formula",
        "messages": "messages",
        "bubble with messages (%)": "bubble with messages",
    }
    tables = {
        "steps": Listing(
            title="p stages, m micro-batches: bubble and activations of stage 0, "
            "simulated and by formula",
            where={"quantity": "step"},
            columns=steps,
        ),
        "hidden": Listing(
            title=f"Fewest micro-batches whose bubble is below {100 * HIDDEN:.0f} %",
            where={"quantity": "hidden"},
            columns=steps,
        ),
    }
    figures = {
        "lanes": Lanes(
            claim=idle_claim,
            title="Three schedules of one step",
            subtitle=f"simulated: {DRAWN_STAGES} stages, {DRAWN_MICROBATCHES} micro-batches, "
            f"a backward as long as {BACKWARD_TIME / FORWARD_TIME:.0f} forwards",
            x="start",
            x_title="time in forwards of a stage",
            y="stage",
            color="pass",
            facet="schedule",
            text="micro-batch",
            where={"quantity": "operation"},
        )
    }
