"""`cs336-systems grade`: the points of implementations, by checks that run through their adapters."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cs336_systems.commands.shared import ends_at_a_signal, one_line_errors
from cs336_systems.measure.text import printable

if TYPE_CHECKING:
    from cs336_systems.grading.grade import Grade, Result
    from cs336_systems.handout import HandoutProblem

EXIT_POINTS_LOST = 1
LONGEST_S = 86_400  # a day
Paths = Annotated[list[Path], typer.Argument(help="Files of adapters, or the folders of projects.")]
Problems = Annotated[list[str] | None, typer.Option(help="Grade this problem only; may be repeated.")]
Edition = Annotated[int | None, typer.Option(help="2025 or 2026; default: the problems of both.")]
Beyond = Annotated[bool, typer.Option(help="Run the checks beyond the handout, which give no points.")]
Jobs = Annotated[int, typer.Option(help="Submissions that are graded at the same time.")]
TimeLimit = Annotated[float, typer.Option(help="Seconds after which a check has failed.")]
TotalLimit = Annotated[float, typer.Option(help="Seconds after which no check of a submission begins.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with the traceback of each failure.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write a row a submission to this file.")]
Gradescope = Annotated[
    Path | None,
    typer.Option(help="Write Gradescope's results.json; of several submissions, a file each."),
]


def grade(
    adapters: Paths,
    problem: Problems = None,
    edition: Edition = None,
    beyond: Beyond = True,
    jobs: Jobs = 1,
    time_limit: TimeLimit = 180.0,
    total_time_limit: TotalLimit = 3600.0,
    as_json: AsJson = False,
    csv: Csv = None,
    gradescope: Gradescope = None,
) -> None:
    """Grade implementations by their adapters; exits 0 if no point is lost. See docs/grading.md."""
    with one_line_errors():
        from cs336_systems.grading import formats
        from cs336_systems.handout import EDITIONS

        if edition not in (None, *EDITIONS):
            allowed = ", ".join(map(str, EDITIONS))
            raise ValueError(f"--edition must be one of {allowed}, got {edition}")
        for option, seconds in (("--time-limit", time_limit), ("--total-time-limit", total_time_limit)):
            if not 0 < seconds <= LONGEST_S:
                raise ValueError(f"{option} must be positive and at most {LONGEST_S} seconds, got {seconds:g}")
        if jobs < 1:
            raise ValueError(f"--jobs must be positive, got {jobs}")
        submissions = {str(path): adapters_file(path) for path in adapters}
        problems, others = problems_to_grade(problem, edition)

    limits = {"time_limit_s": time_limit, "total_time_limit_s": total_time_limit}
    with ends_at_a_signal("interrupted: nothing is graded"):
        grades = grade_all(submissions, problems, others, beyond, jobs, limits)

    if as_json:
        found = [
            {"adapters": str(submissions[name]), "edition": edition, **formats.as_dict(graded)}
            for name, graded in grades.items()
        ]
        typer.echo(json.dumps(found if len(found) > 1 else found[0], indent=2))
    else:
        for name, graded in grades.items():
            for line in ([name] if len(grades) > 1 else []) + formats.lines(graded):
                typer.echo(printable(line))
    if csv is not None:
        with csv.open("w", newline="") as file:
            formats.write_csv(grades, file)
    if gradescope is not None:
        for number, graded in enumerate(grades.values(), start=1):
            path = gradescope
            if len(grades) > 1:
                path = gradescope.with_stem(f"{gradescope.stem}-{number}")
            path.write_text(json.dumps(formats.gradescope(graded), indent=2) + "\n")
    complete = all(graded.is_complete for graded in grades.values())
    raise typer.Exit(0 if complete else EXIT_POINTS_LOST)


def adapters_file(path: Path) -> Path:
    """Return the file of adapters that `path` names: itself, or that of a project's folder."""
    if path.is_dir():
        for place in ("tests/adapters.py", "adapters.py"):
            if (path / place).is_file():
                return path / place
        raise ValueError(f"{path} has neither tests/adapters.py nor adapters.py")
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.suffix != ".py":
        raise ValueError(f"{path} is no .py file")
    return path


def problems_to_grade(
    names: list[str] | None, edition: int | None
) -> tuple[list[HandoutProblem], list[HandoutProblem]]:
    """The problems that are graded, each once, and those that no adapter reaches."""
    from cs336_systems.grading.grade import chosen_problems
    from cs336_systems.handout import problems_of

    if names:
        chosen = [one for name in names for one in chosen_problems(name, edition)]
        return list(dict.fromkeys(chosen)), []
    others = [problem for problem in problems_of(edition) if problem.answer != "graded"]
    return chosen_problems(None, edition), others


def grade_all(
    submissions: dict[str, Path],
    problems: list[HandoutProblem],
    others: list[HandoutProblem],
    beyond: bool,
    jobs: int,
    limits: dict[str, float],
) -> dict[str, Grade]:
    """Grade every submission, `jobs` at a time, and print how each check ended."""
    from cs336_systems.grading.grade import grade as grade_one

    interrupted = threading.Event()

    def grade_named(name: str) -> Grade:
        def show(number: int, total: int, result: Result) -> None:
            if interrupted.is_set():
                raise RuntimeError("interrupted")
            who = f" {name}" if len(submissions) > 1 else ""
            count = f"[{number:>2}/{total}]{who}"
            line = f"{count} {result.status:<9} {result.check.id} ({result.seconds:.1f} s)"
            typer.echo(line, err=True)

        return grade_one(submissions[name], problems, others, beyond=beyond, progress=show, **limits)

    if jobs == 1 or len(submissions) == 1:
        return {name: grade_named(name) for name in submissions}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            return dict(zip(submissions, pool.map(grade_named, submissions)))
        except BaseException:
            interrupted.set()  # the threads end with the checks that they run
            pool.shutdown(wait=False, cancel_futures=True)
            raise
