"""FSDP beside PyTorch's `fully_shard`: memory, step time, and how much of the gathers is hidden."""

from cs336_systems.config import MODEL_SIZES, DTypeName, Precision, RunConfig
from cs336_systems.experiments import Cell, Pivot, problem
from cs336_systems.subjects.parallel_step import FSDP_IMPLEMENTATIONS, ShardingCase
from cs336_systems.subjects.ranks import Traces, hidden_claim, ranks_case
from cs336_systems.subjects.sharding import ShardingExperiment, sharding_cell, sharding_cells

# Implementations that also run on one rank, since both FSDPs compute in other dtypes than autocast.
ALONE = ("unsharded", "fsdp", "torch_fsdp")


@problem()
class FSDPAccounting(ShardingExperiment):
    implementations = FSDP_IMPLEMENTATIONS
    takes = "fsdp"

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return 10b, which fits only if sharded, then every implementation by ranks and dtype."""
        computes: list[tuple[DTypeName | None, str | None]] = [(None, None)]
        if run.device == "cuda":  # the dtypes of real training come first
            computes = [("bfloat16", "float32"), ("bfloat16", None), *computes]
        names = ("fsdp", "torch_fsdp") if run.scale == "tiny" else self.implementations
        cells = []
        if run.scale == "handout":
            large = ranks_case(
                ShardingCase,
                run,
                2,
                Precision(autocast="bfloat16"),
                reduce_dtype="float32",
                attention="sdpa",
                model=MODEL_SIZES["10b"],
                checkpointing="non_reentrant",
            )
            cells += [sharding_cell(large, name) for name in ("fsdp", "torch_fsdp")]
        return cells + sharding_cells(run, names, computes, ALONE)

    tables = ShardingExperiment.tables | {
        "peaks": Pivot(
            title="Peak memory of a rank of two, xl",
            down={"compute": "compute", "gradients averaged in": "reduce"},
            unit="GiB",
            where={"quantity": "peak_memory", "num_ranks": 2, "model": "xl"},
        )
    }
    figures = {
        "gathers": Traces(
            title="One traced forward pass of rank 0, two ranks",
            claim=hidden_claim,
            subtitle="one traced forward pass of rank 0",
            where={
                "num_ranks": 2,
                "mode": "forward",
                "implementation": ("fsdp", "torch_fsdp"),
                "reduce_dtype": None,  # a forward pass averages no gradients
            },
        )
    }
