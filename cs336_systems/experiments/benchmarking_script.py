"""Step time of every model size in three modes, and what warm-up changes.

The modes are the forward, forward and backward, and the full AdamW step. Each size and mode is
timed in a process of its own that has done nothing before, step by step from the first. The row
with w warm-ups is the window of ten steps that follows the first w.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from cs336_systems.book.frames import span
from cs336_systems.config import SIZES_OF_BOTH, RunConfig
from cs336_systems.experiments import (
    Bars,
    Cell,
    Difference,
    Experiment,
    Pick,
    Ratio,
    Row,
    Sample,
    Wide,
    problem,
)
from cs336_systems.subjects.model_steps import MODEL_MODES, TrainingStep, model_cases, wall_clock

WARMUPS = (0, 1, 2, 5)
NUM_STEPS = {"tiny": 5, "smoke": 5, "handout": 10}
SETTLED = {"quantity": "time", "warmup": WARMUPS[-1]}


def warm_claim(rows: pd.DataFrame) -> str:
    """Return that one warm-up step is enough, if warm first steps are within 2 % of the median."""
    cold, warm = (
        rows.loc[(rows["warm-up"] == "0 warm-up steps") == is_cold, "first"]
        for is_cold in (True, False)
    )
    if not (cold.min() > 1.02 and warm.between(0.98, 1.02).all()):
        return ""
    return f"The first forward takes {span(cold)} times the median; one warm-up step is enough"


@problem()
class BenchmarkingScript(Experiment):
    def cells(self, run: RunConfig) -> list[Cell]:
        cells = []
        for case in model_cases(run, SIZES_OF_BOTH):
            for mode in MODEL_MODES:
                cases = [replace(case, warmup=warmup) for warmup in WARMUPS]
                rows = tuple(Row(mode, "time", "ms", one) for one in cases)
                cells.append(
                    Cell(case=cases[0], implementation="eager", rows=rows, fresh_process=True)
                )
        return cells

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Yield windows of one series of steps from a cold process, one window per row.

        The rows' cases differ in `warmup` only, so the first w steps of the series are the warm-up
        of row w: the same experiment as separate runs with w warm-up steps, without drawing a new
        process for each.
        """
        num_steps = NUM_STEPS[run.scale]
        samples = wall_clock(
            TrainingStep(cell.case, run), cell.rows[0].mode, num_steps + WARMUPS[-1]
        )
        for row in cell.rows:
            yield Sample(row=row, samples=samples[row.case.warmup : row.case.warmup + num_steps])

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add the spread in percent, and the first timed step over the median of the window."""
        return {
            "spread": 100 * row["std"] / row["mean"],
            "first": row["samples"][0] / row["median"] if row["samples"] else float("nan"),
            "warm-up": f"{row['warmup']} warm-up steps",
        }

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        def first_step(warmup: int) -> pd.Series:
            return frame[(frame["warmup"] == warmup) & (frame["status"] == "ok")]["first"]

        return {"first_step": lambda warmup: (first_step(warmup).min(), first_step(warmup).max())}

    tables = {
        "steps": Wide(
            title="Median of the steps after five warm-up steps (ms)",
            down=("model",),
            where=SETTLED,
            columns={
                "forward": Pick({"mode": "forward"}),
                "forward + backward": Pick({"mode": "forward_backward"}),
                "backward (difference)": Difference("forward + backward", "forward"),
                "full step": Pick({"mode": "train_step"}),
                "AdamW (difference)": Difference("full step", "forward + backward"),
                "full step, std (%)": Pick({"mode": "train_step"}, value="spread", significant=2),
                "backward over forward": Ratio("backward (difference)", "forward"),
            },
        ),
        "warmup": Wide(
            title="Effect of warm-up: mean and standard deviation (ms)",
            down={"model": "model", "pass": "mode"},
            where={"quantity": "time"},
            columns={
                f"{warmup} warm-ups, {value}": Pick({"warmup": warmup}, value=value)
                for warmup in WARMUPS
                for value in ("mean", "std")
            },
        ),
    }
    figures = {
        "warmup": Bars(
            claim=warm_claim,
            title="First timed forward over the median of those after it, by warm-up steps",
            x="model",
            y="first",
            y_title="first over median",
            color="warm-up",
            where={"quantity": "time", "mode": "forward"},
        )
    }
