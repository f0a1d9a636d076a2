"""Checks that share a job have the results and the errors that they would have alone."""

from __future__ import annotations

from typing import Any

import pytest

from cs336_systems.distributed.launch import RankError
from tests import one_job
from tests.one_job import OneJob


def place(rank: int, num_ranks: int, word: str) -> str:
    return f"{word} {rank} of {num_ranks}"


def fail(rank: int, num_ranks: int) -> None:
    raise RankError("planted", rank)


@pytest.fixture
def jobs(monkeypatch) -> list[Any]:
    """What was run as a job, here as calls in a loop."""
    started: list[Any] = []

    def run_ranks(function: Any, num_ranks: int, *arguments: Any) -> list[Any]:
        started.append(function)
        return [function(rank, num_ranks, *arguments) for rank in range(num_ranks)]

    monkeypatch.setattr(one_job, "run_ranks", run_ranks)
    return started


def test_checks_share_a_job(jobs):
    job = OneJob(2, (place, "a"), (place, "b"))
    assert jobs == [], "nothing starts before a result is asked for"
    assert job.results(place, "b") == ["b 0 of 2", "b 1 of 2"]
    assert job.results(place, "a") == ["a 0 of 2", "a 1 of 2"]
    assert jobs == [one_job.make_all]


def test_a_check_that_fails_fails_alone(jobs):
    job = OneJob(2, (place, "a"), (fail,))
    assert job.results(place, "a") == ["a 0 of 2", "a 1 of 2"]
    with pytest.raises(RankError, match="planted"):
        job.results(fail)
    assert jobs == [one_job.make_all, place, fail]
