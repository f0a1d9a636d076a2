"""When communication limits FSDP of a feed-forward layer.

The largest number of GPUs is data parallelism's, the traffic is not.
"""

from typing import Any

from cs336_systems.experiments import Calculation, problem
from cs336_systems.subjects.counted_bytes import counted_rows, counted_table
from cs336_systems.subjects.layer_times import times


@problem()
class FullyShardedCalcs(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return the ratios of the closed forms, and bytes derived and counted."""
        grids = [(ranks, 1) for ranks in (2, 4, 8)]
        return times(("FSDP forward", "FSDP backward")) + counted_rows(grids)

    tables = {"bytes": counted_table(["FSDP ranks"])}
