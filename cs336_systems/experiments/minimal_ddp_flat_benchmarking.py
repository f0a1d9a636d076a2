"""Data parallelism with one flattened all-reduce against one all-reduce per parameter."""

from cs336_systems.config import RunConfig
from cs336_systems.experiments import Cell, problem
from cs336_systems.subjects import data_parallel as ddp
from cs336_systems.subjects.ranks import most_ranks, sent_claim


@problem()
class MinimalDDPFlatBenchmarking(ddp.DataParallelExperiment):
    implementations = ("naive", "flat")

    def cells(self, run: RunConfig) -> list[Cell]:
        names = ("flat",) if run.scale == "tiny" else self.implementations
        return ddp.ddp_cells(run, names, [most_ranks(run)])

    figures = {
        "traces": ddp.two_rank_traces(
            "gradients one by one, and all at once", implementations, sent_claim
        )
    }
