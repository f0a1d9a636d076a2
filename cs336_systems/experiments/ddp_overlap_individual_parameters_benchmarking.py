"""Training steps of all four wrappers beside PyTorch's: what overlap with the backward gains."""

from cs336_systems.config import RunConfig
from cs336_systems.experiments import Cell, problem
from cs336_systems.subjects import data_parallel as ddp
from cs336_systems.subjects.parallel_step import OURS
from cs336_systems.subjects.ranks import rank_counts


@problem()
class DDPOverlapBenchmarking(ddp.DataParallelExperiment):
    def cells(self, run: RunConfig) -> list[Cell]:
        """Return all wrappers in both precisions, and before them a rank that sends nothing."""
        # A laptop compares with only one of PyTorch's wrappers, to stay within minutes.
        names = {"tiny": ("overlap",), "smoke": (*OURS, "torch_ddp_view")}.get(
            run.scale, self.implementations
        )
        cells = []
        for precision in ddp.precisions(run):
            cells += ddp.ddp_cells(run, ("naive",), ddp.FEWER_RANKS[run.scale], precision=precision)
            cells += ddp.ddp_cells(run, names, rank_counts(run), precision=precision)
        return cells

    two_ranks = ddp.steps_table("A training step on two ranks", {"num_ranks": 2})
    naive = ddp.steps_table(
        "A naive training step",
        {"implementation": "naive", "precision": ("bfloat16 autocast",)},
        ranks="num_ranks",
    )
    tables = ddp.DataParallelExperiment.tables | {"two_ranks": two_ranks, "naive": naive}
    figures = {"traces": ddp.two_rank_traces("without overlap, and with it", ("naive", "overlap"))}
