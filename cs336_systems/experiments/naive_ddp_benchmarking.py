"""Naive data parallelism: a training step, and how much of it is communication."""

from cs336_systems.config import RunConfig
from cs336_systems.experiments.data_parallel import (
    FEWER_RANKS,
    DataParallelExperiment,
    ddp_cells,
    precisions,
    two_rank_traces,
)  # fmt: skip
from cs336_systems.experiments.ranks import rank_counts
from cs336_systems.experiments.spec import Cell, problem


@problem()
class NaiveDDPBenchmarking(DataParallelExperiment):
    implementations = ("naive",)

    def cells(self, run: RunConfig) -> list[Cell]:
        """Naive data parallelism and the same step on a single rank; the overlap's experiment has both precisions."""
        return ddp_cells(run, ("naive",), [*FEWER_RANKS[run.scale], *rank_counts(run)], precisions(run)[:1])

    figures = {"traces": two_rank_traces("an all-reduce for each gradient", ("naive",))}
