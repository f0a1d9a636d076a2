"""`cs336-systems grade`: score implementations by checks that run through their adapters."""

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
    from cs336_systems.grading.points import Grade, Grader, Result
    from cs336_systems.handout import HandoutProblem

EXIT_POINTS_LOST = 1
LONGEST_S = 86_400  # a day
Paths = Annotated[list[Path], typer.Argument(help="Files of adapters, or the folders of projects.")]
Problems = Annotated[
    list[str] | None, typer.Option(help="Grade this problem only; may be repeated.")
]
Edition = Annotated[int | None, typer.Option(help="2025 or 2026; default: the problems of both.")]
Beyond = Annotated[
    bool, typer.Option(help="Run the checks beyond the handout, which give no points.")
]
Jobs = Annotated[int, typer.Option(help="Submissions that are graded at the same time.")]
TimeLimit = Annotated[float, typer.Option(help="Seconds after which a check has failed.")]
TotalLimit = Annotated[
    float, typer.Option(help="Seconds after which no check of a submission begins.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, with the traceback of each failure.")
]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write a row a submission to this file.")]
Gradescope = Annotated[
    Path | None,
    typer.Option(help="Write Gradescope's results.json; of several submissions, a file each."),
]


def grade(
    adapters: Paths,
    *,
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
    """Grade implementations by their adapters; exit 0 if no point is lost. See docs/grading.md."""
    with one_line_errors():
        from cs336_systems.grading import formats
        from cs336_systems.handout import EDITIONS

        # All arguments are checked, and the result files opened, before the first check runs.
        if edition not in (None, *EDITIONS):
            allowed = ", ".join(map(str, EDITIONS))
            raise ValueError(f"--edition must be one of {allowed}, got {edition}")
        for option, seconds in (
            ("--time-limit", time_limit),
            ("--total-time-limit", total_time_limit),
        ):
            if not 0 < seconds <= LONGEST_S:
                raise ValueError(
                    f"{option} must be positive and at most {LONGEST_S} seconds, got {seconds:g}"
                )
        if jobs < 1:
            raise ValueError(f"--jobs must be positive, got {jobs}")
        submissions = {str(path): adapters_file(path) for path in adapters}
        problems, others = problems_to_grade(problem, edition)
        results = {} if gradescope is None else gradescope_files(gradescope, list(submissions))
        for option, path in [
            ("--csv", csv),
            *(("--gradescope", path) for path in results.values()),
        ]:
            if path is not None:
                check_writable(option, path)
    if edition is None and not problem:
        typer.echo(
            "the problems of both editions are graded: "
            "--edition 2025 or --edition 2026 takes one's",
            err=True,
        )

    limits = {"time_limit_s": time_limit, "total_time_limit_s": total_time_limit}
    grades: dict[str, Grade] = {}  # holds a submission once all its checks have run

    def said() -> str:
        return f"interrupted: {len(grades)} of {len(submissions)} submissions are graded"

    try:
        with ends_at_a_signal(said):
            grade_all(submissions, problems, others, beyond, jobs, limits, grades)
    finally:
        # Finished grades are shown and written also after an interrupt, in the order of arguments.
        grades = {name: grades[name] for name in submissions if name in grades}
        _show(grades, submissions, edition, as_json)
        if csv is not None and grades:
            with csv.open("w", newline="") as file:
                formats.write_csv(grades, file)
        for name, path in results.items():
            if name in grades:
                path.write_text(json.dumps(formats.gradescope(grades[name]), indent=2) + "\n")
    complete = all(graded.is_complete for graded in grades.values())
    raise typer.Exit(0 if complete else EXIT_POINTS_LOST)


def _show(
    grades: dict[str, Grade], submissions: dict[str, Path], edition: int | None, as_json: bool
) -> None:
    """Print the grades as text or JSON, each under its submission's name if there are several."""
    from cs336_systems.grading import formats

    if as_json and grades:
        found = [
            {"adapters": str(submissions[name]), "edition": edition, **formats.as_dict(graded)}
            for name, graded in grades.items()
        ]
        typer.echo(json.dumps(found if len(submissions) > 1 else found[0], indent=2))
    elif not as_json:
        for name, graded in grades.items():
            for line in ([name] if len(submissions) > 1 else []) + formats.lines(graded):
                typer.echo(printable(line))


def gradescope_files(path: Path, names: list[str]) -> dict[str, Path]:
    """Return the results file of each submission in `names`: `path`, or numbered files for several.

    `results.json` becomes results-1.json, results-2.json, ... in the order of `names`.
    """
    if len(names) == 1:
        return {names[0]: path}
    return {
        name: path.with_stem(f"{path.stem}-{number}") for number, name in enumerate(names, start=1)
    }


def check_writable(option: str, path: Path) -> None:
    """Raise ValueError, which names `option`, if the file `path` cannot be written.

    The check comes before an hour of grading and leaves no new file behind.
    """
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}") from None
    if not existed:
        path.unlink()


def adapters_file(path: Path) -> Path:
    """Return the file of adapters that `path` names: itself, or the one in a project's folder.

    ValueError if there is none, or if `path` is not a .py file.
    """
    if path.is_dir():
        for place in ("tests/adapters.py", "adapters.py"):
            if (path / place).is_file():
                return path / place
        raise ValueError(f"{path} has neither tests/adapters.py nor adapters.py")
    if not path.is_file():
        raise ValueError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    if path.suffix != ".py":
        raise ValueError(f"{path} is not a .py file")
    return path


def problems_to_grade(
    names: list[str] | None, edition: int | None
) -> tuple[list[HandoutProblem], list[HandoutProblem]]:
    """Return the problems to grade, each once, and the problems that no adapter reaches.

    With `names` the second list is empty. ValueError for a name that is not graded.
    """
    from cs336_systems.grading.points import chosen_problems
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
    grades: dict[str, Grade],
) -> None:
    """Add the grade of every submission to `grades` and print how each check ended.

    `submissions` maps a name to its file of adapters; `jobs` of them are graded at the same time.
    """
    from cs336_systems.grading.points import grade as grade_one

    interrupted = threading.Event()
    graders: list[Grader] = []

    def grade_named(name: str) -> None:
        def show(number: int, total: int, result: Result) -> None:
            if interrupted.is_set():
                raise RuntimeError("interrupted")
            who = f" {name}" if len(submissions) > 1 else ""
            count = f"[{number:>2}/{total}]{who}"
            line = f"{count} {result.status:<9} {result.check.id} ({result.seconds:.1f} s)"
            typer.echo(line, err=True)

        grades[name] = grade_one(
            submissions[name],
            problems,
            others,
            beyond=beyond,
            begun=graders.append,
            progress=show,
            **limits,
        )

    if jobs == 1 or len(submissions) == 1:
        for name in submissions:
            grade_named(name)
        return
    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(grade_named, submissions))
        except BaseException:
            interrupted.set()
            for grader in graders:  # the threads end with the checks that they run
                grader.interrupt()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
