"""The 2025 leaderboard: causal attention forward and backward at 1 × 16 × 16384 × 64 in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention import (
    BACKWARD,
    BOTH,
    FORWARD,
    PEAK,
    attention_cell,
    attention_columns,
    measure_attention,
    sized_shape,
)  # fmt: skip
from cs336_systems.experiments.figures import Bars
from cs336_systems.experiments.implementations import IMPLEMENTATIONS, TINY_IMPLEMENTATIONS
from cs336_systems.experiments.spec import Cell, Experiment, Sample, problem
from cs336_systems.experiments.tables import Pick, Wide

SIZES = {"tiny": (1, 1, 64, 64, True), "smoke": (1, 1, 128, 64, True), "handout": (1, 16, 16384, 64, True)}


@problem()
class Leaderboard2025(Experiment):
    implementations = IMPLEMENTATIONS
    takes = "attention"

    def cells(self, run: RunConfig) -> list[Cell]:
        names: tuple[str, ...] = TINY_IMPLEMENTATIONS if run.scale == "tiny" else IMPLEMENTATIONS
        if run.scale == "smoke":  # of what is compiled one shows it; the tiles take the longest
            names = tuple(name for name in names if name != "tiled_compiled")
        shape = sized_shape(run, *SIZES[run.scale])
        return [attention_cell(shape, name, run, (FORWARD, BACKWARD, BOTH, PEAK)) for name in names]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """The class harness differentiates `o.sum()`, so the gradient of the output is a stride-0 tensor of ones."""
        return measure_attention(cell, run, sum_loss=True, settled=True)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return attention_columns(row)

    tables = {
        "times": Wide(
            title="the leaderboard's shape",
            down=("implementation",),
            columns={
                "forward (ms)": Pick({"mode": "forward", "quantity": "time"}),
                "backward (ms)": Pick({"mode": "backward", "quantity": "time"}),
                "both (ms)": Pick({"mode": "forward_backward", "quantity": "time"}),
                "both (TFLOP/s)": Pick({"mode": "forward_backward", "quantity": "time"}, value="tflops"),
                "peak (GiB)": Pick({"quantity": "peak_memory"}, unit="GiB"),
            },
        )
    }
    figures = {
        "speed": Bars(
            title="Forward + backward on the 2025 leaderboard's shape",
            x="implementation",
            y="tflops",
            y_title="TFLOP/s",
            stacked=True,
            where={"quantity": "time", "mode": "forward_backward"},
        )
    }
