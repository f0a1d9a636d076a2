"""When FSDP of a feed-forward layer is bound by communication: the limit is data parallelism's, the traffic is not."""

from __future__ import annotations

from typing import Any

from cs336_systems.experiments.figures import Lines
from cs336_systems.experiments.layer_times import TOKENS, times
from cs336_systems.experiments.spec import Calculation, problem


@problem()
class FullyShardedCalcs(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        return times(("FSDP forward", "FSDP backward"))

    figures = {
        "ratio": Lines(
            title=f"FSDP: communication over computation of 8B's feed-forward layer, B = {TOKENS:,}",
            x="GPUs",
            x_title="N",
            y="ratio",
            y_title="communication over computation",
            color="link",
            facet="scheme",
        )
    }
