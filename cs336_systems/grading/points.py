"""From outcomes of checks to points: `Grader` runs checks, `Grade` counts points.

The checks that the handout requires share a problem's points equally: 15 points and 12 checks are
1.25 a check. A check that this machine cannot run is `skipped`, and its share leaves the total that
the solution is judged by. Checks beyond the handout are reported and change nothing.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from cs336_systems.grading import (  # noqa: F401 - importing them registers their checks
    check_ddp,
    check_flash,
    check_fsdp,
    check_optimizer,
)
from cs336_systems.grading.registry import CHECKS, HUNG, TIME_LIMIT_S, Check
from cs336_systems.handout import HANDOUT, HandoutProblem, problems_of

AFTER_A_HANG_S = 30.0  # limit of a problem's other checks once one of them has hung
# Run with -P: the current folder may hold another package `cs336_systems`.
SERVER = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from cs336_systems.grading.server import serve; serve()"
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one check ended."""

    check: Check
    status: str  # passed, failed, skipped or "not begun"
    message: str = ""  # one line: why it has not passed
    detail: str = ""  # the traceback
    seconds: float = 0.0


class Grader:
    """Runs checks on a file of adapters, one at a time, each in processes of its own.

    It is a context manager. Its server process starts with the first check.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.time_limit_s = time_limit_s
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the server's input, which ends it and what it runs, and wait for it."""
        if (
            self._server is not None
            and self._server.stdin is not None
            and self._server.stdout is not None
        ):
            with suppress(BrokenPipeError):  # the server may have been ended from outside
                self._server.stdin.close()  # the server ends what it runs, then itself
            self._server.wait()
            self._server.stdout.close()
            self._server = None

    def interrupt(self) -> None:
        """End the check that runs, from another thread: `run` returns that it has failed."""
        server = self._server
        if server is not None and server.stdin is not None:
            with suppress(BrokenPipeError, ValueError):  # it has ended by itself
                server.stdin.close()

    def run(self, check: Check, adapters: Path, time_limit_s: float | None = None) -> Result:
        """Run one check on the file `adapters` and return its result; failures are not raised."""
        if self._server is None:
            root = Path(__file__).resolve().parents[2]
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVER, str(root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {
            "adapters": str(adapters.resolve()),
            "check": check.id,
            "time_limit_s": self.time_limit_s,
        }
        answer = ""
        with suppress(BrokenPipeError, ValueError):  # it has been ended between two checks
            print(json.dumps(request), file=self._server.stdin, flush=True)
            answer = self._server.stdout.readline()
        if not answer:
            self.close()  # the next check starts a new server
            return Result(
                check=check,
                status="failed",
                message="the process that runs the checks has been ended",
            )
        return Result(check=check, **json.loads(answer))


def checks_of(problem: str, *, beyond: bool | None = None) -> list[Check]:
    """Return a problem's checks: those beyond the handout, those it requires, or with None both."""
    return [
        check
        for check in CHECKS.values()
        if check.problem == problem and beyond in (None, check.beyond)
    ]


def chosen_problems(name: str | None = None, edition: int | None = None) -> list[HandoutProblem]:
    """Return the graded problems, of one edition or of both, or the one called `name`.

    ValueError if `name` is unknown, not graded, or not of this `edition`.
    """
    graded = problems_of(edition, "graded")
    if name is None:
        return graded
    names = ", ".join(problem.name for problem in graded)
    if name in HANDOUT and HANDOUT[name].answer != "graded":
        raise ValueError(
            f"{name} is {HANDOUT[name].answer}, not graded by running adapters; graded are {names}"
        )
    if name in HANDOUT and HANDOUT[name] not in graded:
        editions = ", ".join(map(str, HANDOUT[name].editions))
        raise ValueError(f"{name} is a problem of {editions}, not of {edition}; graded are {names}")
    if name not in HANDOUT:
        raise ValueError(f"unknown problem {name!r}; graded are {names}")
    return [HANDOUT[name]]


@dataclass
class Grade:
    """The results of the checks of some problems, for one submission."""

    problems: list[HandoutProblem]
    others: list[HandoutProblem]  # problems that no adapter reaches
    results: dict[str, Result] = field(default_factory=dict)  # by the check's id
    seconds: float = 0.0

    def results_of(self, problem: HandoutProblem, *, beyond: bool) -> list[Result]:
        """Return the results of a problem's checks that were run, in the order of the checks."""
        checks = checks_of(problem.name, beyond=beyond)
        return [self.results[check.id] for check in checks if check.id in self.results]

    def counts(self, result: Result) -> bool:
        """Return whether a check earns its share: it has passed, and the check that it needs too.

        A needed check that this machine skips does not prevent it.
        """
        needed = self.results.get(result.check.needs)
        met = needed is None or needed.status in ("passed", "skipped")
        return result.status == "passed" and met

    def share(self, problem: HandoutProblem) -> float:
        """Return the points of each required check of a problem."""
        return problem.points / len(checks_of(problem.name, beyond=False))

    def earned(self, problem: HandoutProblem) -> float:
        """Return the points that a problem earns."""
        required = self.results_of(problem, beyond=False)
        num_checks = len(checks_of(problem.name, beyond=False))
        return problem.points * sum(self.counts(result) for result in required) / num_checks

    def skipped(self, problem: HandoutProblem) -> float:
        """Return the points of a problem that this machine cannot grade."""
        required = self.results_of(problem, beyond=False)
        return self.share(problem) * sum(result.status == "skipped" for result in required)

    @property
    def points(self) -> float:
        return sum(self.earned(problem) for problem in self.problems)

    @property
    def full_points(self) -> int:
        return sum(problem.points for problem in self.problems)

    @property
    def gradable_points(self) -> float:
        """Return the points that can be earned on this machine."""
        return self.full_points - sum(self.skipped(problem) for problem in self.problems)

    @property
    def is_complete(self) -> bool:
        """Return whether all points that this machine can grade are earned, and there are any."""
        return self.gradable_points > 0 and abs(self.points - self.gradable_points) < 1e-6


def grade(
    adapters: Path,
    problems: Iterable[HandoutProblem],
    others: Iterable[HandoutProblem] = (),
    *,
    beyond: bool = True,
    time_limit_s: float = TIME_LIMIT_S,
    total_time_limit_s: float = math.inf,
    begun: Callable[[Grader], None] = lambda grader: None,
    progress: Callable[[int, int, Result], None] = lambda done, total, result: None,
) -> Grade:
    """Run the checks of `problems` on the file `adapters` and return the grade.

    `begun` is given what runs the checks, which another thread may interrupt.
    `progress` is called after each check with its number, the number of checks and the result.
    After a check that hangs, the others of its problem get `AFTER_A_HANG_S` seconds each, since
    they may hang as well. After `total_time_limit_s` no check begins; those that are left count as
    failed.
    """
    counted = Grade(list(problems), list(others))
    wanted = None if beyond else False
    checks = [check for one in counted.problems for check in checks_of(one.name, beyond=wanted)]
    started, hung = time.monotonic(), set()
    with Grader(time_limit_s) as grader:
        begun(grader)
        for number, check in enumerate(checks, start=1):
            left = total_time_limit_s - (time.monotonic() - started)
            limit = min(left, AFTER_A_HANG_S if check.problem in hung else math.inf, time_limit_s)
            if left <= 0:
                told = f"not run: the whole grade has taken {total_time_limit_s:g} s"
                result = Result(check=check, status="failed", message=told)
            else:
                result = grader.run(check, adapters, limit)
            if result.message.startswith(HUNG):
                hung.add(check.problem)
            counted.results[check.id] = result
            progress(number, len(checks), result)
    counted.seconds = time.monotonic() - started
    return counted
