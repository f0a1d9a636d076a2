"""`passes(check)`: the check ran on tests/adapters.py, in processes of its own, and passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cs336_systems.grading.checks import Check
from cs336_systems.grading.grade import Grader

ADAPTERS = Path(__file__).resolve().parents[1] / "adapters.py"


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    with Grader() as grader:
        yield grader


@pytest.fixture
def passes(grader: Grader) -> Callable[[Check], None]:
    def run(check: Check) -> None:
        result = grader.run(check, ADAPTERS)
        if result.status == "skipped":
            pytest.skip(result.message)
        assert result.status == "passed", f"{result.message}\n{result.detail}"

    return run
