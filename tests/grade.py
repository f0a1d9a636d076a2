"""The grade: which handout problems' tests passed, as a table with points and a score.

A problem's points count when every test of it that could run passed and at least one did. Tests skipped for want of a
GPU are shown and not counted against it; tests that were deselected are, so that half a run never earns points.

    grade = Grade()
    grade.register("tests/test_a.py::test_x", "flash_forward", 15)
    grade.record("tests/test_a.py::test_x", "passed")
    print("\n".join(grade.lines()))
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

OUTCOMES = ("passed", "failed", "skipped", "not run")


@dataclass(frozen=True, kw_only=True)
class ProblemGrade:
    """What became of one problem's tests."""

    problem: str  # the handout's name
    points: int  # what the handout gives for it
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    not_run: int = 0  # deselected, or the run stopped before them

    @property
    def total(self) -> int:
        return self.passed + self.failed + self.skipped + self.not_run

    @property
    def only_skipped(self) -> bool:
        return self.skipped == self.total

    @property
    def earned(self) -> int:
        return self.points if self.passed and self.passed + self.skipped == self.total else 0

    @property
    def verdict(self) -> str:
        if self.only_skipped:
            return "skipped only"
        if self.failed:
            return f"{self.failed} failed"
        if self.not_run:
            return f"{self.not_run} not run"
        return f"ok, {self.skipped} skipped" if self.skipped else "ok"


class Grade:
    """Collects which test belongs to which problem and how it ended."""

    def __init__(self) -> None:
        self._points: dict[str, int] = {}
        self._tests: dict[str, list[str]] = {}  # problem -> its tests, in collected order
        self._outcomes: dict[str, str] = {}

    def register(self, test: str, problem: str, points: int) -> None:
        """Say that `test` grades `problem`; ValueError when the problem has other points elsewhere."""
        if not isinstance(problem, str) or not problem:
            raise ValueError(f"{test}: problem's name must be a non-empty str, got {problem!r}")
        if not isinstance(points, int) or isinstance(points, bool) or points < 0:
            raise ValueError(f"{test}: problem's points must be an int of at least 0, got {points!r}")
        known = self._points.setdefault(problem, points)
        if known != points:
            raise ValueError(f"{test}: problem {problem} has {points} points here and {known} in an earlier test")
        self._tests.setdefault(problem, []).append(test)

    @property
    def registrations(self) -> list[tuple[str, str, int]]:
        """The arguments of every `register` so far, problem by problem."""
        return [(test, problem, self._points[problem]) for problem, tests in self._tests.items() for test in tests]

    def record(self, test: str, outcome: str) -> None:
        """Note how `test` ended. A failure in any phase (set-up, call, tear-down) stays a failure."""
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {outcome!r}")
        if self._outcomes.get(test) != "failed":
            self._outcomes[test] = outcome

    def problems(self) -> list[ProblemGrade]:
        """The problems in the order of their first test."""
        grades = []
        for problem, tests in self._tests.items():
            count = Counter(self._outcomes.get(test, "not run") for test in tests)
            grades.append(
                ProblemGrade(
                    problem=problem,
                    points=self._points[problem],
                    passed=count["passed"],
                    failed=count["failed"],
                    skipped=count["skipped"],
                    not_run=count["not run"],
                )
            )
        return grades

    def lines(self) -> list[str]:
        """The table and the score, one string a line; empty when no test names a problem."""
        grades = self.problems()
        if not grades:
            return []
        width = max(len("problem"), *(len(grade.problem) for grade in grades))
        lines = [f"{'problem':<{width}}  points  passed  total  verdict"]
        lines += [
            f"{grade.problem:<{width}}  {grade.points:>6}  {grade.passed:>6}  {grade.total:>5}  {grade.verdict}"
            for grade in grades
        ]
        score = f"score: {sum(grade.earned for grade in grades)} of {sum(grade.points for grade in grades)} points"
        unattempted = sum(grade.points for grade in grades if grade.only_skipped)
        return [*lines, score + (f" ({unattempted} of them not attempted: skipped only)" if unattempted else "")]
