"""The 2025 leaderboard: causal attention forward and backward at 1 × 16 × 16384 × 64 in bfloat16."""

from collections.abc import Iterator, Sequence

from cs336_systems.config import RunConfig
from cs336_systems.experiments import Cell, Pick, Sample, Wide, attention, problem
from cs336_systems.experiments.implementations import IMPLEMENTATIONS, TINY_IMPLEMENTATIONS


@problem()
class Leaderboard2025(attention.AttentionExperiment):
    implementations = IMPLEMENTATIONS
    takes = "attention"
    sizes = {**attention.SMALL, "handout": ((1, 16, 16384, 64, True),)}
    rows = (attention.FORWARD, attention.BACKWARD, attention.BOTH, attention.PEAK)

    def names(self, run: RunConfig) -> Sequence[str]:
        names = TINY_IMPLEMENTATIONS if run.scale == "tiny" else IMPLEMENTATIONS
        # Of what is compiled one shows it on a laptop; the tiles take the longest.
        return [name for name in names if name != "tiled_compiled" or run.scale == "handout"]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """The class harness differentiates `o.sum()`, so the gradient of the output is a stride-0 tensor of ones."""
        return attention.measure_attention(cell, run, sum_loss=True, settled=True)

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
        "speed": attention.rate_bars("Forward + backward on the 2025 leaderboard's shape", x="implementation"),
    }
