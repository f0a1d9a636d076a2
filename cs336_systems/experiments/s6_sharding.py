"""Section 6, `optimizer_state_sharding_accounting`: memory and step time, the optimizer's state whole or shared out."""

from __future__ import annotations

from cs336_systems.config import RunConfig
from cs336_systems.experiments.cells import Cell
from cs336_systems.experiments.s7_fsdp import comparisons, sharding_case
from cs336_systems.experiments.sharding_cells import OPTIMIZER_IMPLEMENTATIONS, sharding_cell


def optimizer_sharding_cells(run: RunConfig) -> list[Cell]:
    """Every implementation at every number of ranks, float32 parameters; with bfloat16 autocast too on a GPU."""
    computes = ("bfloat16", None) if run.device == "cuda" else (None,)
    implementations = ("sharded", "zero1") if run.scale == "tiny" else OPTIMIZER_IMPLEMENTATIONS
    return [
        sharding_cell("optimizer_state_sharding_accounting", sharding_case(run, ranks, compute), implementation)
        for compute in computes
        for ranks, implementation in comparisons(run, implementations)
    ]
