"""What the grade consists of, run on tests/adapters.py: one test a check of
`cs336_systems.grading`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cs336_systems.grading.points import Grader
from cs336_systems.grading.registry import CHECKS

ADAPTERS = Path(__file__).resolve().parent / "adapters.py"


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader() as grader:
        yield grader


@pytest.mark.parametrize("name", CHECKS)
def test_our_adapters_pass(name: str, grader: Grader):
    result = grader.run(CHECKS[name], ADAPTERS)
    if result.status == "skipped":
        pytest.skip(result.message)
    assert result.status == "passed", f"{result.message}\n{result.detail}"
