"""Naive data parallelism: a training step, and how much of it is communication."""

from cs336_systems.config import RunConfig
from cs336_systems.experiments import Cell, problem
from cs336_systems.subjects import data_parallel as ddp
from cs336_systems.subjects.ranks import rank_counts


@problem()
class NaiveDDPBenchmarking(ddp.DataParallelExperiment):
    implementations = ("naive",)

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return naive data parallelism, at handout scale also the same step on one rank.

        The experiment on overlap has both precisions.
        """
        return ddp.ddp_cells(run, ("naive",), [*ddp.FEWER_RANKS[run.scale], *rank_counts(run)])

    figures = {"traces": ddp.two_rank_traces("an all-reduce for each gradient", ("naive",))}
