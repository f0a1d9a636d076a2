"""Overlapping the backward with communication: all four wrappers beside PyTorch's own."""

from cs336_systems.config import RunConfig
from cs336_systems.experiments.data_parallel import (
    FEWER_RANKS,
    DataParallelExperiment,
    ddp_cells,
    precisions,
    steps_table,
    two_rank_traces,
)
from cs336_systems.experiments.ranks import rank_counts
from cs336_systems.experiments.spec import Cell, problem


@problem()
class DDPOverlapBenchmarking(DataParallelExperiment):
    def cells(self, run: RunConfig) -> list[Cell]:
        """All wrappers in one run, in both precisions, and before them a rank that sends nothing."""
        names = self.implementations
        if run.scale == "smoke":  # one of PyTorch's is enough to compare with in a laptop's minutes
            names = tuple(name for name in names if name != "torch_ddp")
        elif run.scale == "tiny":
            names = ("overlap",)
        cells = []
        for precision in precisions(run):
            cells += ddp_cells(run, ("naive",), FEWER_RANKS[run.scale], [precision])
            cells += ddp_cells(run, names, rank_counts(run), [precision])
        return cells

    tables = DataParallelExperiment.tables | {
        "two_ranks": steps_table("A training step on two ranks", {"num_ranks": 2})
    }
    figures = {"traces": two_rank_traces("without overlap, and with it", ("naive", "overlap"))}
