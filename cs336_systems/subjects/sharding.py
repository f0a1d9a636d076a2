"""Define cells and tables of one sharded training step, and predict its memory.

ranks.py says what a rank does, and parallel_step.py how an implementation is built and checked.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from cs336_systems.bench.spec import Cell, Sample
from cs336_systems.book.tables import Pick, Wide
from cs336_systems.config import DTypeName, Precision, RunConfig
from cs336_systems.measure.allocations import MIB
from cs336_systems.subjects import ranks
from cs336_systems.subjects.parallel_step import MEMORY, ShardingCase, fsdp_case_bytes

PREDICTED = "predicted_peak_memory"
MOMENT_WORDS = dict(zip(("after init", "before the step", "after the step"), ranks.MOMENTS))
MEMORY_WORDS = {
    **MOMENT_WORDS,
    "peak": "peak_memory",
    "peak predicted": PREDICTED,
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer_state",
}
TIME_WORDS = {
    "traced (ms)": "traced_time",
    "compute (ms)": "compute_time",
    "communication (ms)": "communication_time",
    "beside compute (ms)": "overlap_time",
}


class ShardingExperiment(ranks.StepExperiment):
    """Base class of the experiments with sharding: measurement, columns and tables."""

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Yield the predicted peak memory if it is promised, then the measured samples."""
        case = cell.case
        for row in cell.rows:
            if row.quantity == PREDICTED:  # comes first, so that a failing cell still has it
                peak = fsdp_case_bytes(case, checkpointing=case.checkpointing != "none").peak
                yield Sample(row=row, samples=[peak / MIB])
        yield from super().measure(cell, run)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the columns `compute`, `reduce`, `kept` and the base class's `lane`.

        `compute` is the dtype of the matmuls, `reduce` that of the averaged gradients, and `kept`
        the kind of memory that a row in MEMORY measures, in words.
        """
        compute = row["precision"].removesuffix(" autocast")
        kept = row["quantity"].replace("_", " ") if row["quantity"] in MEMORY else ""
        return super().columns(row) | {
            "compute": compute,
            "reduce": row["reduce_dtype"] or compute,
            "kept": kept,
        }

    down = {
        "implementation": "implementation",
        "model": "model",
        "ranks": "num_ranks",
        "compute": "compute",
        "reduce": "reduce",
    }
    times = {heading: Pick({"quantity": quantity}) for heading, quantity in TIME_WORDS.items()}
    tables = {
        "steps": Wide(
            title="A training step, and one traced",
            down=down,
            where={"mode": "train_step", "quantity": ("time", *ranks.TIMES)},
            columns={"step (ms)": Pick({"quantity": "time"}, significant=4)} | times,
        ),
        "forward": Wide(
            title="A traced forward pass",
            down=down,
            where={"mode": "forward", "quantity": ranks.TIMES},
            columns=times,
        ),
        "memory": Wide(
            title="Memory of a rank (GiB): the most so far, and what stays between steps",
            down=down,
            where={"mode": "train_step", "quantity": tuple(MEMORY_WORDS.values())},
            columns={
                heading: Pick({"quantity": quantity}, unit="GiB")
                for heading, quantity in MEMORY_WORDS.items()
            },
        ),
    }


def sharding_cell(case: ShardingCase, implementation: str) -> Cell:
    """Return the cell with every row that its device can measure, traced in forward and step."""
    kinds: tuple[str, ...] = (
        (*MEMORY, *ranks.MOMENTS, "peak_memory") if case.backend == "nccl" else MEMORY
    )
    kinds += (PREDICTED,) if implementation in ("fsdp", "fsdp_layer") else ()
    return ranks.step_cell(case, implementation, kinds, traced=("forward", "train_step"))


def sharding_cells(
    run: RunConfig,
    names: Sequence[str],
    dtypes: Sequence[tuple[DTypeName | None, str | None]],
    alone: Sequence[str],
) -> list[Cell]:
    """Return a cell for each (compute, reduce) of `dtypes`, number of ranks and implementation.

    The numbers are 2, 4 and 8 as far as there are GPUs, and 2 on a CPU. At handout scale the
    implementations `alone` come first on a single rank, which sends nothing: efficiency on more
    ranks is relative to it.
    """
    single = [(1, name) for name in alone] if run.scale == "handout" else []
    pairs = [*single, *((number, name) for number in ranks.rank_counts(run) for name in names)]
    cells = []
    for (compute, reduce), (number, name) in product(dtypes, pairs):
        precision = Precision(autocast=compute)
        case = ranks.ranks_case(ShardingCase, run, number, precision, reduce_dtype=reduce)
        cells.append(sharding_cell(case, name))
    return cells
