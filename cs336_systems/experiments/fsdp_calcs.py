"""When communication limits FSDP of a feed-forward layer.

The largest number of GPUs is data parallelism's, the traffic is not.
"""

from typing import Any

from cs336_systems.experiments import Calculation, problem
from cs336_systems.subjects.layer_times import times


@problem()
class FullyShardedCalcs(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        return times(("FSDP forward", "FSDP backward"))
