"""From outcomes of checks to points: `Grader` runs checks, `Grade` counts them and prints itself.

A problem's points count when every check that the handout requires has passed. A check that this machine cannot run
is `skipped`, and its problem earns nothing here. Checks beyond the handout are reported and change nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cs336_systems.grading import ddp, flash, fsdp, optimizer  # noqa: F401 - they register their checks
from cs336_systems.grading.checks import CHECKS, HUNG, TIME_LIMIT_S, Check
from cs336_systems.handout import HANDOUT, HandoutProblem, problems_of

# -P: the folder in which the command was typed may hold a `cs336_systems` of its own.
SERVER = "import sys; sys.path.insert(0, sys.argv[1]); from cs336_systems.grading.server import serve; serve()"


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one check ended."""

    check: Check
    status: str  # passed, failed or skipped
    message: str = ""  # one line: why not
    detail: str = ""  # the traceback
    seconds: float = 0.0


class Grader:
    """Runs checks on a file of adapters, one at a time, each in processes of its own."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.time_limit_s = time_limit_s
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._server.stdin is not None and self._server.stdout is not None:
            with suppress(BrokenPipeError):  # where it has been ended
                self._server.stdin.close()  # it ends what it runs, and itself
            self._server.wait()
            self._server.stdout.close()
            self._server = None

    def run(self, check: Check, adapters: Path) -> Result:
        if self._server is None:
            root = Path(__file__).resolve().parents[2]
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVER, str(root)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {"adapters": str(adapters.resolve()), "check": check.id, "time_limit_s": self.time_limit_s}
        answer = ""
        with suppress(BrokenPipeError):  # it has been ended between two checks
            print(json.dumps(request), file=self._server.stdin, flush=True)
            answer = self._server.stdout.readline()
        if not answer:
            self.__exit__()  # the next check has another
            return Result(check=check, status="failed", message="the process that runs the checks has been ended")
        return Result(check=check, **json.loads(answer))


def checks_of(problem: str, *, beyond: bool | None = None) -> list[Check]:
    """The checks of a problem; those beyond the handout, those it requires, or both."""
    return [check for check in CHECKS.values() if check.problem == problem and beyond in (None, check.beyond)]


def chosen_problems(name: str | None = None, edition: int | None = None) -> list[HandoutProblem]:
    """The problems to grade; ValueError where `name` is not graded."""
    graded = problems_of(edition, "graded")
    if name is None:
        return graded
    names = ", ".join(problem.name for problem in graded)
    if name in HANDOUT and HANDOUT[name].answer != "graded":
        raise ValueError(f"{name} is {HANDOUT[name].answer}, not graded by running adapters; graded are {names}")
    if name in HANDOUT and HANDOUT[name] not in graded:
        editions = ", ".join(map(str, HANDOUT[name].editions))
        raise ValueError(f"{name} is a problem of {editions}, not of {edition}; graded are {names}")
    if name not in HANDOUT:
        raise ValueError(f"unknown problem {name!r}; graded are {names}")
    return [HANDOUT[name]]


@dataclass
class Grade:
    """The results of the checks of some problems."""

    problems: list[HandoutProblem]
    others: list[HandoutProblem]  # what the handout asks and no adapter reaches
    results: dict[str, Result] = field(default_factory=dict)  # by the check's id

    def earned(self, problem: HandoutProblem) -> int:
        required = self._of(problem, beyond=False)
        return problem.points if required and all(result.status == "passed" for result in required) else 0

    @property
    def points(self) -> int:
        return sum(self.earned(problem) for problem in self.problems)

    @property
    def full_points(self) -> int:
        return sum(problem.points for problem in self.problems)

    def _of(self, problem: HandoutProblem, *, beyond: bool) -> list[Result]:
        return [self.results[check.id] for check in checks_of(problem.name, beyond=beyond) if check.id in self.results]

    def first_failure(self, problem: HandoutProblem) -> Result | None:
        return next((result for result in self._of(problem, beyond=False) if result.status != "passed"), None)

    def lines(self) -> list[str]:
        """The table: a line a problem with its first failure, what is beyond, what is not graded; last the total."""
        width = max(len("problem"), *(len(problem.name) for problem in self.problems))
        lines = [f"{'problem':<{width}}  points   checks    first that does not pass"]
        for problem in self.problems:
            required = self._of(problem, beyond=False)
            passed = sum(result.status == "passed" for result in required)
            failure = self.first_failure(problem)
            verdict = f"{failure.check.name}: {_reason(failure)}" if failure else ""
            points = f"{self.earned(problem)} of {problem.points}"
            row = f"{problem.name:<{width}}  {points:<8} {f'{passed} of {len(required)}':<9} {verdict}"
            lines.append(row.rstrip())
        beyond = [result for problem in self.problems for result in self._of(problem, beyond=True)]
        if beyond:
            passed = sum(result.status == "passed" for result in beyond)
            lines.append(f"beyond the handout, without points: {passed} of {len(beyond)} checks pass")
            solved = [problem.name for problem in self.problems if self.earned(problem)]  # the others have other work
            lines += [
                f"  {result.check.id}: {_reason(result)}"
                for result in beyond
                if result.status != "passed" and result.check.problem in solved
            ]
        for answer in ("measured", "written"):
            names = [problem.name for problem in self.others if problem.answer == answer]
            if names:
                lines.append(f"{answer}, no points here: {', '.join(names)}")
        return [*lines, f"total: {self.points} of {self.full_points} points"]

    def as_dict(self) -> dict[str, Any]:
        """The same for programs."""
        problems = []
        for problem in self.problems:
            checks = [
                {"name": result.check.name, "requires": result.check.requires, "beyond_the_handout": beyond}
                | {name: getattr(result, name) for name in ("status", "message", "detail")}
                | {"seconds": round(result.seconds, 2)}
                for beyond in (False, True)
                for result in self._of(problem, beyond=beyond)
            ]
            problems.append({**asdict(problem), "earned": self.earned(problem), "checks": checks})
        others = [asdict(problem) for problem in self.others]
        return {"total": self.points, "points": self.full_points, "problems": problems, "not_graded_here": others}


def _reason(result: Result) -> str:
    return f"skipped, {result.message}" if result.status == "skipped" else result.message


def grade(
    adapters: Path,
    problems: Iterable[HandoutProblem],
    others: Iterable[HandoutProblem] = (),
    *,
    time_limit_s: float = TIME_LIMIT_S,
    progress: Callable[[int, int, Result], None] = lambda done, total, result: None,
) -> Grade:
    """Run every check of `problems` on the file `adapters`, and say after each how it ended.

    A problem that has lost its points by a check that hangs is left there: its other checks may hang as long.
    """
    counted = Grade(list(problems), list(others))
    checks = [check for problem in counted.problems for check in checks_of(problem.name)]
    hung: dict[str, str] = {}  # by problem, the check
    with Grader(time_limit_s) as grader:
        for number, check in enumerate(checks, start=1):
            if check.problem in hung:
                result = Result(check=check, status="failed", message=f"not run, as {hung[check.problem]} {HUNG}")
            else:
                result = grader.run(check, adapters)
            if result.message.startswith(HUNG) and not check.beyond:
                hung[check.problem] = check.name
            counted.results[check.id] = result
            progress(number, len(checks), result)
    return counted
