"""`cs336-systems grade`: the points of an implementation, by checks that run through its adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cs336_systems.commands.shared import ends_at_a_signal, one_line_errors
from cs336_systems.measure.text import printable

if TYPE_CHECKING:
    from cs336_systems.grading.grade import Result

EXIT_POINTS_LOST = 1
LONGEST_S = 86_400  # a day


def grade(
    adapters: Annotated[Path, typer.Argument(help="The implementation's adapters.py, with the handout's functions.")],
    problem: Annotated[list[str] | None, typer.Option(help="Grade this problem only; may be repeated.")] = None,
    edition: Annotated[int | None, typer.Option(help="2025 or 2026; default: the problems of both.")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds after which a check has failed.")] = 180.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the traceback of each failure.")] = False,
) -> None:
    """Grade an implementation by its adapters; exits 0 with all points only. See docs/grading.md."""
    with one_line_errors():
        from cs336_systems.grading import grade as grading
        from cs336_systems.handout import EDITIONS, problems_of

        if edition not in (None, *EDITIONS):
            raise ValueError(f"--edition must be one of {', '.join(map(str, EDITIONS))}, got {edition}")
        if not 0 < time_limit <= LONGEST_S:
            raise ValueError(f"--time-limit must be positive and at most {LONGEST_S} seconds, got {time_limit}")
        if adapters.is_dir():
            raise ValueError(f"{adapters} is a folder; name the file with the adapters, as {adapters}/adapters.py")
        if not adapters.is_file():
            raise ValueError(f"{adapters} is not a file")
        if adapters.suffix != ".py":
            raise ValueError(f"{adapters} is no .py file")
        problems = grading.chosen_problems(None, edition)
        if problem:
            problems = list(dict.fromkeys(one for name in problem for one in grading.chosen_problems(name, edition)))
        others = [] if problem else [other for other in problems_of(edition) if other.answer != "graded"]

    def show(number: int, total: int, result: Result) -> None:
        typer.echo(f"[{number:>2}/{total}] {result.status:<7} {result.check.id} ({result.seconds:.1f} s)", err=True)

    with ends_at_a_signal("interrupted: nothing is graded"):
        graded = grading.grade(adapters, problems, others, time_limit_s=time_limit, progress=show)
    if as_json:
        typer.echo(json.dumps({"adapters": str(adapters), "edition": edition, **graded.as_dict()}, indent=2))
    else:
        for line in graded.lines():
            typer.echo(printable(line))
    raise typer.Exit(0 if graded.points == graded.full_points else EXIT_POINTS_LOST)
