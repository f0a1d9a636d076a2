"""One flattened all-reduce against one a parameter."""

from cs336_systems.config import RunConfig
from cs336_systems.experiments.data_parallel import DataParallelExperiment, ddp_cells, precisions, two_rank_traces
from cs336_systems.experiments.ranks import most_ranks
from cs336_systems.experiments.spec import Cell, problem


@problem()
class MinimalDDPFlatBenchmarking(DataParallelExperiment):
    implementations = ("naive", "flat")

    def cells(self, run: RunConfig) -> list[Cell]:
        names = ("flat",) if run.scale == "tiny" else self.implementations
        return ddp_cells(run, names, [most_ranks(run)], precisions(run)[:1])

    figures = {"traces": two_rank_traces("gradients one by one, and all at once", implementations)}
