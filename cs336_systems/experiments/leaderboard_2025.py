"""The 2025 leaderboard: causal attention, both passes, at 1 × 16 × 16384 × 64 in bfloat16."""

from collections.abc import Sequence

from cs336_systems.config import RunConfig
from cs336_systems.experiments import Pick, Wide, problem
from cs336_systems.subjects import attention_passes as attention
from cs336_systems.subjects.implementations import IMPLEMENTATIONS, TINY_IMPLEMENTATIONS


@problem()
class Leaderboard2025(attention.AttentionExperiment):
    implementations = IMPLEMENTATIONS
    takes = "attention"
    sizes = {**attention.SMALL, "handout": ((1, 16, 16384, 64, True),)}
    rows = (attention.FORWARD, attention.BACKWARD, attention.BOTH, attention.PEAK)
    sum_loss = True  # the class harness differentiates `o.sum()`
    settled = True

    def names(self, run: RunConfig) -> Sequence[str]:
        names = TINY_IMPLEMENTATIONS if run.scale == "tiny" else IMPLEMENTATIONS
        # On a laptop one compiled implementation is enough; compiling the tiles takes longest.
        return [name for name in names if name != "tiled_compiled" or run.scale == "handout"]

    tables = {
        "times": Wide(
            title="causal attention",
            down=("implementation",),
            columns={
                "forward (ms)": Pick({"mode": "forward", "quantity": "time"}),
                "backward (ms)": Pick({"mode": "backward", "quantity": "time"}),
                "both (ms)": Pick({"mode": "forward_backward", "quantity": "time"}),
                "both (TFLOP/s)": Pick(
                    {"mode": "forward_backward", "quantity": "time"}, value="tflops"
                ),
                "peak (GiB)": Pick({"quantity": "peak_memory"}, unit="GiB"),
            },
        )
    }
    figures = {
        "speed": attention.rate_bars("Causal attention, forward + backward", x="implementation"),
    }
