"""Sharded optimizer state: memory before and after the step, step time, and ZeRO's first stage beside it."""

from cs336_systems.config import DTypeName, RunConfig
from cs336_systems.experiments import Bars, Cell, Pick, Wide, problem
from cs336_systems.experiments.parallel_step import MEMORY, OPTIMIZER_IMPLEMENTATIONS
from cs336_systems.experiments.sharding import MOMENT_WORDS, ShardingExperiment, sharding_cells

SO_FAR = MOMENT_WORDS | {"peak of later steps": "peak_memory"}


@problem()
class OptimizerStateSharding(ShardingExperiment):
    implementations = OPTIMIZER_IMPLEMENTATIONS

    def cells(self, run: RunConfig) -> list[Cell]:
        """Every implementation at every number of ranks, float32 parameters; with bfloat16 autocast too on a GPU."""
        computes: tuple[DTypeName | None, ...] = ("bfloat16", None) if run.device == "cuda" else (None,)
        names = ("sharded", "zero1") if run.scale == "tiny" else self.implementations
        return sharding_cells(run, names, [(compute, None) for compute in computes], alone=("unsharded",))

    tables = ShardingExperiment.tables | {
        "memory_two": Wide(
            title="Memory of a rank of two, the most so far (GiB)",
            down={"implementation": "implementation", "compute": "compute"},
            where={"num_ranks": 2, "mode": "train_step", "quantity": tuple(SO_FAR.values())},
            columns={words: Pick({"quantity": quantity}, unit="GiB") for words, quantity in SO_FAR.items()},
        )
    }
    figures = {
        "kept": Bars(
            title="What a rank of two keeps between steps",
            x="kept",
            color="implementation",
            facet="compute",
            unit="GiB",
            y_title="GiB",
            where={"quantity": MEMORY, "num_ranks": 2, "model": ("xl", "xl-proxy")},
        )
    }
