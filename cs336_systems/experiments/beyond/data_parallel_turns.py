"""All data parallelism, sharded optimizers and FSDP in one job, by turns, beside PyTorch's.

A host may be slow for minutes, longer than the job of one wrapper, so small differences between
jobs mean nothing. Here the ranks stay and the wrappers change. Phases on every rank:

- check: a shallow model of the same width under each wrapper, by its gradients or its training
  (parallel_step.py);
- rounds: each wrapper in its turn is built, warmed up and timed; two rounds in a row go in opposite
  orders.

A rank holds one wrapper's model at a time, since xl with AdamW takes up to 75 GiB. A wrapper that
runs out of memory is left out, and the others go on. Ratios are of one round.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from cs336_systems.bench.spec import (
    Cell,
    Disagreement,
    Experiment,
    Row,
    Sample,
    Unsupported,
    problem,
)
from cs336_systems.bench.turns import in_order
from cs336_systems.book.frames import dicts, speed
from cs336_systems.book.tables import Pivot
from cs336_systems.config import MODEL_SIZES, Precision, RunConfig
from cs336_systems.measure.allocations import release
from cs336_systems.subjects import ranks
from cs336_systems.subjects.data_parallel import precisions
from cs336_systems.subjects.parallel_step import (
    OURS,
    PEERS,
    ParallelStep,
    ShardingCase,
    check_wrapper,
)

# The implementations with which each of ours is compared; of several the fastest counts.
RIVALS = dict.fromkeys(OURS, PEERS) | {
    "sharded": ("torch_zero",),
    "zero1": ("torch_zero",),
    "fsdp": ("torch_fsdp",),
}
# PyTorch's DDP rearranges its buckets in the second step, and FSDP learns the order of its units in
# the first.
WARMUP = 2
# Timed steps of a turn. Low precision, whose steps are shorter, has LOW_PRECISION_STEPS.
STEPS = {"tiny": 1, "smoke": 2, "handout": 2}
LOW_PRECISION_STEPS = 5
LEAST_ROUNDS, MOST_ROUNDS = 2, {"tiny": 2, "smoke": 2, "handout": 6}
BUDGET_S = 75.0  # a further round begins only if it can end by then
NO_MEMORY = "out of memory"


@problem(title="Data parallelism, sharded optimizers and FSDP by turns, beside PyTorch's", order=12)
class DataParallelTurns(Experiment):
    implementations = (*OURS, *PEERS, "sharded", "zero1", "torch_zero", "fsdp", "torch_fsdp")
    rows = (Row("train_step", "time", "ms"),)
    by_turns = True

    def cases(self, run: RunConfig) -> list[ShardingCase]:
        """Return every precision and number of ranks, at handout scale with xl of both editions."""
        models = [ranks.sized_model(run)] + (
            [MODEL_SIZES["xl-2025"]] if run.scale == "handout" else []
        )
        return [
            ranks.ranks_case(ShardingCase, run, number, precision, model=model)
            for precision, model, number in product(precisions(run), models, ranks.rank_counts(run))
        ]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        if run.model is not None:
            raise Unsupported(
                "the user's model has no known way to be built on the meta device, "
                "as fully_shard needs"
            )
        turns = partial(take_turns, names=cell.implementations, case=cell.case, run=run)
        reports = ranks.run_cell(turns, cell.case, run)
        for row in cell.rows:
            of_ranks = [report[row.implementation] for report in reports]
            error, wrong = (
                max(error for error, _, _ in of_ranks),
                next((what for _, what, _ in of_ranks if what), ""),
            )
            if wrong:
                yield Sample(
                    row=row, status="oom" if wrong == NO_MEMORY else "failed", message=wrong
                )
            else:
                yield Sample(
                    row=row,
                    samples=ranks.slowest([samples for _, _, samples in of_ranks]),
                    error=error,
                )

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        compute = row["precision"].removesuffix(" autocast")
        return {"compute": compute, "setting": f"{row['model']}, {compute}"}

    def compared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Add `rival`, the fastest of PyTorch's in the case, and `of_rival`, the time over its.

        The ratio is the median over rounds.
        """
        rows = dicts(frame)
        known = {(row["case"], row["implementation"]): row for row in rows}
        rivals = []
        for row in rows:
            others = [
                known.get((row["case"], name)) for name in RIVALS.get(row["implementation"], ())
            ]
            rivals.append(
                min(filter(None, others), key=lambda other: other["median"], default=None)
            )
        return frame.assign(
            rival=[rival["implementation"] if rival else "" for rival in rivals],
            of_rival=[speed(rival, row) for rival, row in zip(rivals, rows)],
        )

    tables = {
        "times": Pivot(
            title="A training step, by turns",
            down={"ranks": "num_ranks", "wrapper": "implementation"},
            across="setting",
            significant=4,
        ),
        "ratios": Pivot(
            title="Time of a step over that of PyTorch's in the same round",
            down={"ranks": "num_ranks", "wrapper": "implementation"},
            across="setting",
            value="of_rival",
            where={"implementation": tuple(RIVALS)},
        ),
    }


def take_turns(
    rank: int, num_ranks: int, names: Sequence[str], case: ShardingCase, run: RunConfig
) -> dict[str, tuple[float, str, list[float]]]:
    """Check all wrappers and time them in rounds on this rank.

    Each wrapper's result is its error over the bound, what is wrong with it ("" if nothing), and
    the milliseconds of its timed steps.
    """
    began = time.monotonic()
    checks = {name: _check(name, case, run, rank) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(MOST_ROUNDS[run.scale]):
        round_began = time.monotonic()
        for name in in_order(names, number):
            if checks[name][1] == NO_MEMORY:
                continue
            # All ranks leave a wrapper out as soon as one of them runs out of memory.
            try:
                samples[name] += _turn(name, case, run, rank)
                fitted = True
            except torch.OutOfMemoryError:
                fitted = False
            release(run.device)
            if not _agree(fitted, run.device):
                checks[name] = (float("inf"), NO_MEMORY)

        now = time.monotonic()
        in_time = number + 1 < LEAST_ROUNDS or now - began + (now - round_began) < BUDGET_S
        if not _agree(in_time, run.device):
            break
    return {name: (*checks[name], samples[name]) for name in names}


def _agree(yes: bool, device: str) -> bool:
    """Return whether all ranks pass True."""
    answers = torch.tensor([yes], dtype=torch.uint8, device=device)
    dist.all_reduce(answers, dist.ReduceOp.MIN)
    return bool(answers.item())


def _check(name: str, case: ShardingCase, run: RunConfig, rank: int) -> tuple[float, str]:
    """Return the wrapper's error over its bound and what is wrong with it, "" if nothing.

    A wrong wrapper takes its turns all the same, since it may be wrong on one rank only.
    """
    gc.collect()
    try:
        return check_wrapper(name, case, run, rank), ""
    except Disagreement as wrong:
        return float("inf"), str(wrong)


def _turn(name: str, case: ShardingCase, run: RunConfig, rank: int) -> list[float]:
    """Build a wrapper, warm it up and return the milliseconds of its timed steps."""
    step = ParallelStep(name, case, run, rank)
    for _ in range(WARMUP):
        step.train_step()
    gc.collect()
    gc.freeze()  # otherwise a collection in a timed step would go through all objects until here
    count = STEPS[run.scale] if case.precision == Precision() else LOW_PRECISION_STEPS
    samples = [ranks.time_together(step.train_step, run.device) for _ in range(count)]
    gc.unfreeze()
    return samples
