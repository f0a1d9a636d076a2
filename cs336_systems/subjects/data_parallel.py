"""Define cells, table and figure of a training step for the experiments of data parallelism.

ranks.py says what a rank does, and parallel_step.py how a wrapper is built and checked.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd

from cs336_systems.bench.spec import Cell
from cs336_systems.book.tables import Pick, Ratio, Wide
from cs336_systems.config import Precision, RunConfig
from cs336_systems.subjects import ranks
from cs336_systems.subjects.parallel_step import OURS, PEERS, DataParallelCase

WITH_BUCKETS = ("bucketed", *PEERS)
DEFAULT_BUCKET_MB = {"tiny": 0.1, "smoke": 1.0, "handout": 25.0}  # MiB; 25 is PyTorch's default
# numbers of ranks besides the largest: on one rank a step waits for no other
FEWER_RANKS = {"tiny": (), "smoke": (), "handout": (1,)}


def steps_table(title: str, where: Mapping[str, Any] | None = None, **more: str) -> Wide:
    """Return a table with a line per wrapper: its step, its communication, and the hidden part.

    `where` chooses rows; `more` maps headings to further columns that identify a line.
    """
    return Wide(
        title=title,
        down={
            "wrapper": "implementation",
            "bucket (MiB)": "bucket_size_mb",
            "precision": "precision",
            **more,
        },
        where={"quantity": ("time", "peak_memory", *ranks.TIMES), **(where or {})},
        columns={
            "step (ms)": Pick({"quantity": "time"}, significant=4),
            "communication (ms)": Pick({"quantity": "communication_time"}),
            "of the step": Ratio("communication (ms)", "step (ms)", percent=True),
            "beside compute (ms)": Pick({"quantity": "overlap_time"}),
            "hidden": Ratio("beside compute (ms)", "communication (ms)", percent=True),
            "peak (GiB)": Pick({"quantity": "peak_memory"}, unit="GiB"),
        },
    )


def two_rank_traces(
    what: str,
    implementations: tuple[str, ...],
    claim: Callable[[pd.DataFrame], str] = ranks.hidden_claim,
) -> ranks.Traces:
    """Return a figure of the lanes of a step on two ranks, one panel per implementation.

    `what` names the implementations in the title.
    """
    title = f"One traced step of rank 0, two ranks: {what}"
    return ranks.Traces(
        title=title,
        claim=claim,
        subtitle="one traced step of rank 0",
        where={"num_ranks": 2, "implementation": implementations},
    )


def precisions(run: RunConfig) -> list[Precision]:
    """Return [bfloat16 autocast, float32] on a GPU and [float32] on a CPU.

    With bfloat16 a GPU computes faster, so that communication weighs more.
    """
    return [Precision(autocast="bfloat16"), Precision()] if run.device == "cuda" else [Precision()]


def ddp_cells(
    run: RunConfig,
    implementations: Sequence[str],
    num_ranks: Sequence[int],
    *,
    precision: Precision | None = None,
    bucket_size_mb: float | None = None,
) -> list[Cell]:
    """Return a cell for each number of ranks and implementation.

    Defaults are the first of `precisions` and DEFAULT_BUCKET_MB. Implementations without buckets
    have None as their bucket size.
    """
    size = bucket_size_mb or DEFAULT_BUCKET_MB[run.scale]
    memory = ("peak_memory",) if run.device == "cuda" else ()
    cells = []
    for number, name in product(num_ranks, implementations):
        buckets = {"bucket_size_mb": size if name in WITH_BUCKETS else None}
        case = ranks.ranks_case(
            DataParallelCase, run, number, precision or precisions(run)[0], **buckets
        )
        cells.append(ranks.step_cell(case, name, memory))
    return cells


class DataParallelExperiment(ranks.StepExperiment):
    """Base class of the experiments that time a training step under data parallelism."""

    implementations: tuple[str, ...] = (*OURS, *PEERS)
    takes = "ddp"
    tables = {"steps": steps_table("A training step", ranks="num_ranks")}
