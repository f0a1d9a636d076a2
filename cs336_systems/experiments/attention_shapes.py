"""Our kernels beside the fastest of the libraries on shapes that models use.

How fast are the kernels where a GPU is full: batches, heads and lengths of real training steps, head dims 64 and 128,
bfloat16. What calls take that are too short for that, `short_calls` measures; and the longest by turns, `long_calls`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention import (
    BACKWARD,
    BOTH,
    FORWARD,
    MODE_WORDS,
    attention_cell,
    attention_columns,
    measure_attention,
    sized_shape,
)
from cs336_systems.experiments.figures import Bars
from cs336_systems.experiments.spec import Cell, Experiment, Sample, problem
from cs336_systems.experiments.tables import Pivot

# (batch, heads, length, head_dim, causal). The first is the 2025 leaderboard's; the last is the 2026 leaderboard's 8B
# step; 64 heads of 8192 are the shape of MagiAttention's published table.
SHAPES = {
    "tiny": ((1, 1, 64, 64, True),),
    "smoke": ((1, 1, 128, 64, True), (1, 1, 128, 128, False)),
    "handout": (
        (1, 16, 16384, 64, True),
        (4, 32, 4096, 64, True),
        (1, 32, 16384, 64, True),
        (1, 32, 16384, 64, False),
        (8, 16, 2048, 128, True),
        (2, 16, 8192, 128, True),
        (1, 16, 16384, 128, True),
        (1, 16, 16384, 128, False),
        (1, 64, 8192, 128, False),
        (1, 32, 32768, 128, True),
    ),
}


@problem(title="Attention on shapes of real models", order=1)
class AttentionShapes(Experiment):
    implementations = ("triton", "hopper", "sdpa_cudnn", "sdpa_flash", "flex")
    takes = "attention"

    def cells(self, run: RunConfig) -> list[Cell]:
        names = [name for name in self.implementations if name != "flex" or run.scale != "tiny"]  # compiles for seconds
        shapes = [sized_shape(run, *sizes) for sizes in SHAPES[run.scale]]
        rows = (FORWARD, BACKWARD, BOTH)
        return [attention_cell(shape, name, run, rows) for shape in shapes for name in names]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """The kernels' times, each pass checked first, and timed when the GPU's clock has settled."""
        return measure_attention(cell, run, settled=True)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return attention_columns(row)

    tables = {
        mode: Pivot(
            title=words,
            down={"batch × heads × length × head dim": "shape"},
            across="implementation",
            value="tflops",
            unit="TFLOP/s",
            where={"quantity": "time", "mode": mode},
            ratios=(("hopper", "sdpa_cudnn"), ("hopper", "flex"), ("triton", "sdpa_cudnn"), ("triton", "flex")),
        )
        for mode, words in MODE_WORDS.items()
    }
    figures = {
        "forward_backward": Bars(
            title="Attention forward + backward on shapes of real models",
            x="shape",
            y="tflops",
            y_title="TFLOP/s",
            color="implementation",
            where={"quantity": "time", "mode": "forward_backward"},
        )
    }
