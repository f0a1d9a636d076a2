"""Many checks of ranks in one job: starting the processes takes longer than most of the checks.

    JOB = OneJob(2, (train, "naive"), (train, "flat"))                      # run_ranks(train, 2, "naive"), ...

    def test_naive():
        first, second = JOB.results(train, "naive")                         # starts the job when it is the first

    @JOB.check
    def test_sends(rank, num_ranks):                                        # asserts on every rank of the job
        assert ...

If any of them fails, each runs in a job of its own when its results are asked for: so a test fails
by its own check only, with its own error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch.distributed as dist

from cs336_systems.distributed.spawn import RankError, run_ranks

Call = tuple[Any, ...]  # a function of (rank, num_ranks, *arguments), and the arguments


class OneJob:
    """Jobs of `num_ranks` ranks, run as one; see the module."""

    def __init__(self, num_ranks: int, *calls: Call) -> None:
        self.num_ranks, self.calls = num_ranks, calls

    def check(self, function: Callable[[int, int], object]) -> Callable[..., None]:
        """The test that `function`, one more call of this job, raises on no rank."""

        def test(*place: int) -> None:
            if place:  # on a rank
                function(*place)
            else:
                self.results(test)

        # a rank finds it by these
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(function, name))
        self.calls += ((test,),)
        return test

    def call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, one more call of this job."""
        self.calls += ((function,),)
        return function

    def results(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `run_ranks(function, num_ranks, *arguments)` returns or raises."""
        place = self.calls.index((function, *arguments))
        if self._together is None:
            return run_ranks(function, self.num_ranks, *arguments)
        return [results[place] for results in self._together]

    @cached_property
    def _together(self) -> list[list[Any]] | None:
        try:
            return run_ranks(make_all, self.num_ranks, self.calls)
        except RankError:
            return None


def make_all(rank: int, num_ranks: int, calls: tuple[Call, ...]) -> list[Any]:
    return [function(rank, num_ranks, *arguments) for function, *arguments in calls]


def run_alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(0, 1, *arguments)` in this process, as the only rank of a default group: a second
    saved.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function(0, 1, *arguments)
    finally:
        dist.destroy_process_group()
