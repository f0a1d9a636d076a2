"""Sharded optimizer state beside ZeRO's first stage: memory around the step, and step time."""

import pandas as pd

from cs336_systems.book.frames import digits
from cs336_systems.config import DTypeName, RunConfig
from cs336_systems.experiments import Bars, Cell, Pick, Wide, problem
from cs336_systems.subjects.parallel_step import MEMORY, OPTIMIZER_IMPLEMENTATIONS
from cs336_systems.subjects.sharding import MOMENT_WORDS, ShardingExperiment, sharding_cells

SO_FAR = MOMENT_WORDS | {"peak of later steps": "peak_memory"}


class Kept(Bars):
    """Bars of the first precision only: autocast to bfloat16 leaves a rank's states in float32."""

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        return super().rows(frame).drop_duplicates([self.x, self.color])


def kept_claim(rows: pd.DataFrame) -> str:
    """Return that sharding halves the state, if a rank of two keeps 0.49 to 0.51 of it."""
    kept = rows[rows["kept"] == "optimizer state"].set_index("implementation")["median"]
    if (
        not {"unsharded", "sharded"} <= set(kept.index)
        or not 0.49 <= kept["sharded"] / kept["unsharded"] <= 0.51
    ):
        return ""
    states = f"{digits(kept['unsharded'])} to {digits(kept['sharded'])} GiB"
    return f"Sharding over two ranks halves the optimizer state, from {states} a rank"


@problem()
class OptimizerStateSharding(ShardingExperiment):
    implementations = OPTIMIZER_IMPLEMENTATIONS

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return every implementation by number of ranks, on a GPU also with bfloat16 autocast.

        Parameters are float32.
        """
        computes: tuple[DTypeName | None, ...] = (
            ("bfloat16", None) if run.device == "cuda" else (None,)
        )
        names = ("sharded", "zero1") if run.scale == "tiny" else self.implementations
        return sharding_cells(
            run, names, [(compute, None) for compute in computes], alone=("unsharded",)
        )

    tables = ShardingExperiment.tables | {
        "memory_two": Wide(
            title="Memory of a rank of two, the most so far (GiB)",
            down={"implementation": "implementation", "compute": "compute"},
            where={"num_ranks": 2, "mode": "train_step", "quantity": tuple(SO_FAR.values())},
            columns={
                words: Pick({"quantity": quantity}, unit="GiB")
                for words, quantity in SO_FAR.items()
            },
        )
    }
    figures = {
        "kept": Kept(
            claim=kept_claim,
            title="What a rank of two keeps between steps",
            x="kept",
            color="implementation",
            unit="GiB",
            y_title="GiB",
            where={"quantity": MEMORY, "num_ranks": 2, "model": ("xl", "xl-proxy")},
        )
    }
