"""The time of a mean over ranks of bfloat16 gradients: added in bfloat16 or in float32, by turns.

- bfloat16: an all-reduce of the gradients as they are;
- float32: they are copied to float32, averaged and rounded back;
- messages: each rank receives its chunk of all gradients in bfloat16 (all-to-all), adds them in
  float32, and sends the rounded mean to all (all-gather). As many bytes as bfloat16.

Every way is checked against the exact mean first. What the ways' errors are is on the page
`reduction_precision`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.bench.turns import in_order
from cs336_systems.config import RunConfig
from cs336_systems.distributed.collectives import all_gather_flat, all_reduce_mean
from cs336_systems.experiments import Cell, Disagreement, Experiment, Pivot, Row, Sample, problem
from cs336_systems.subjects import ranks

TIME = Row("collective", "time", "ms")
MB = 10**6  # bytes
SIZES_MB = {"tiny": (1,), "smoke": (10,), "handout": (10, 100, 1000)}  # of bfloat16 gradients
ROUNDS = {"tiny": 2, "smoke": 6, "handout": 12}
CALLS = 3  # a turn, after one that is not counted
CHECKED = 4096  # elements a rank
# most relative error of one rounding
ROUNDOFF, FLOAT32_ROUNDOFF = 2.0**-8, 2.0**-24


@dataclass(frozen=True, kw_only=True)
class ReductionCase:
    """A mean of bfloat16 gradients among the ranks of one host."""

    num_bytes: int  # of one rank's gradients
    num_ranks: int
    backend: str  # nccl on GPUs, gloo on CPUs


def mean_in_bfloat16(gradients: Tensor) -> None:
    """Replace bfloat16 `gradients` by their mean over all ranks, added in bfloat16."""
    all_reduce_mean(gradients)


def mean_in_float32(gradients: Tensor) -> None:
    """Replace bfloat16 `gradients` by their mean over all ranks, sent and added in float32."""
    wide = gradients.float()
    all_reduce_mean(wide)
    gradients.copy_(wide)


def mean_of_messages(gradients: Tensor) -> None:
    """Replace bfloat16 `gradients` by their mean over all ranks, sent in bfloat16 and rounded once.

    Their number must be a multiple of the number of ranks, else ValueError is raised.
    """
    num_ranks = dist.get_world_size()
    if len(gradients) % num_ranks:
        raise ValueError(
            f"gradients must have a multiple of {num_ranks} elements, got {len(gradients)}"
        )
    received = torch.empty_like(gradients)
    dist.all_to_all_single(received, gradients)
    mean = received.view(num_ranks, -1).sum(0, dtype=torch.float32) / num_ranks
    all_gather_flat(gradients, mean.to(gradients.dtype))


MEANS = {"bfloat16": mean_in_bfloat16, "float32": mean_in_float32, "messages": mean_of_messages}


@problem(title="The time of a mean over ranks in bfloat16 and in float32", order=18.5)
class ReductionTime(Experiment):
    implementations = tuple(MEANS)
    rows = (TIME,)
    by_turns = True

    def cases(self, run: RunConfig) -> list[ReductionCase]:
        """Return every size and number of ranks: as many as GPUs, or 2 and 4 on a CPU."""
        counts = ranks.rank_counts(run)
        if run.device == "cpu" and run.scale != "tiny":
            counts = [2, 4]
        return [
            ReductionCase(num_bytes=megabytes * MB, num_ranks=number, backend=ranks.backend_of(run))
            for number in counts
            for megabytes in SIZES_MB[run.scale]
        ]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        turns = partial(take_turns, names=cell.implementations, case=cell.case, run=run)
        reports = ranks.run_cell(turns, cell.case, run)
        for row in cell.rows:
            of_ranks = [report[row.implementation] for report in reports]
            yield Sample(
                row=row,
                samples=ranks.slowest([samples for _, samples in of_ranks]),
                error=max(error for error, _ in of_ranks),
            )

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"size": f"{row['num_bytes'] / MB:g} MB"}

    tables = {
        "times": Pivot(
            title="A mean over ranks of bfloat16 gradients, by turns",
            down={"backend": "backend", "ranks": "num_ranks", "gradients": "size"},
            ratios=(("bfloat16", "float32"), ("messages", "float32")),
        )
    }


def take_turns(
    rank: int, num_ranks: int, names: Sequence[str], case: ReductionCase, run: RunConfig
) -> dict[str, tuple[float, list[float]]]:
    """Check the means `names` on this rank, then time them in rounds.

    Returns each one's error over its bound and the milliseconds of its calls. Raises Disagreement
    if one is wrong.
    """
    checked = {name: check_mean(name, rank, num_ranks, run) for name in names}
    gradients = torch.ones(case.num_bytes // 2, dtype=torch.bfloat16, device=run.device)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(ROUNDS[run.scale]):
        for name in in_order(names, number):
            call = partial(MEANS[name], gradients)
            call()
            samples[name] += [ranks.time_together(call, run.device) for _ in range(CALLS)]
    return {name: (checked[name], samples[name]) for name in names}


def check_mean(name: str, rank: int, num_ranks: int, run: RunConfig) -> float:
    """Return the largest error of the mean `name` over its bound; Disagreement if it is above 1.

    The bound is that of one rounding after the other of sums of all magnitudes, as many as ranks;
    one that adds in float32 rounds once.
    """
    generator = torch.Generator().manual_seed(run.seed)
    drawn = torch.randn(num_ranks, CHECKED * num_ranks, generator=generator).bfloat16()
    mean = drawn[rank].clone().to(run.device)
    MEANS[name](mean)
    exact, magnitude = drawn.double().mean(0), drawn.double().abs().mean(0)
    if name == "bfloat16":
        bound = num_ranks * ROUNDOFF * magnitude
    else:
        bound = ROUNDOFF * exact.abs() + num_ranks * FLOAT32_ROUNDOFF * magnitude
    error = float(((mean.cpu().double() - exact).abs() / bound).max())
    if not error <= 1:
        raise Disagreement(f"the mean by {name} is off by {error:.3g} times its bound")
    return error
