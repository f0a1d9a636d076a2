"""`cs336-systems list` and `report`: list the problems, and turn records into pages."""

from pathlib import Path
from typing import Annotated

import typer

from cs336_systems.commands.shared import (
    ResultsOption,
    one_line_errors,
    unknown_problem,
    warnings_as_lines,
)
from cs336_systems.commands.terminal import show_text
from cs336_systems.measure.text import printable

PUBLISHED_FOLDER = "nvidia-h200"  # whose records the pages and the README show
DOCUMENTS = ("README.md", "writeup.md", "beyond.md")
EXIT_NOT_WHOLE = 1  # a table, figure or page could not be made
# Endings of the folders that runs write to: by scale, and whether axes were chosen.
SUFFIXES = [scale + axes for axes in ("", "-chosen") for scale in ("", "-smoke", "-tiny")]


def list_problems() -> None:
    """List every problem and who answers it: `run` measures, `grade` grades, or it is written."""
    from cs336_systems.bench.spec import outlines
    from cs336_systems.handout import COMMANDS, HANDOUT

    answered = {"graded": "`grade`", "written": "in writing", "measured": "`run`"}
    for asked in HANDOUT.values():  # two lines per problem, since a table would cut the names
        points = [f"{asked.points} point{'s' if asked.points > 1 else ''}"] if asked.points else []
        facts = [f"section {asked.section}", *points, *map(str, asked.editions)]
        facts.append(
            f"`{COMMANDS[asked.name]}`" if asked.name in COMMANDS else answered[asked.answer]
        )
        show_text(f"{asked.name}\n    {asked.title} ({', '.join(facts)})")
    for name, outline in outlines().items():
        if name not in HANDOUT and outline.is_measured:
            show_text(f"{name}\n    {outline.title} (beyond the handout, `run`)")


def report(
    *,
    results: ResultsOption = Path("results"),
    folder: Annotated[
        str | None, typer.Option(help="One results folder; default: all of this machine's.")
    ] = None,
    problem: Annotated[
        list[str] | None, typer.Option(help="Only this problem; may be repeated.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the published pages; write nothing.")
    ] = False,
) -> None:
    """Turn records into report.html; the published folder's also into pages, figures and tables.

    A record that fits no experiment is left out with a warning. Where a table, figure or page
    cannot be made, all others are, and the exit code is 1.
    """
    from cs336_systems.bench.placing import NotMade
    from cs336_systems.bench.spec import measured_problems
    from cs336_systems.book.html_report import PAGE, write_report
    from cs336_systems.book.pages import Book

    only = problem or []
    published = results / PUBLISHED_FOLDER
    # The pages are written only from this folder's own records: others would lack their numbers.
    is_here = (
        all(Path(name).is_file() for name in DOCUMENTS)
        and results.resolve() == Path("results").resolve()
    )
    with one_line_errors(), warnings_as_lines() as told:
        for name in only:
            if name not in measured_problems():
                raise ValueError(unknown_problem(name))
        if check:
            if folder is not None or only:
                raise ValueError(
                    "give --check alone: it checks the published pages, "
                    "without --folder and --problem"
                )
            found = Book(Path(), published).check()
            for difference in found:
                typer.echo(printable(difference), err=True)
            typer.echo(f"report --check: {len(found)} differences")
            raise typer.Exit(1 if found else 0)
        pages = []
        for path in _chosen_folders(results, folder):
            beside = published if published.is_dir() and path != published else None
            if lines := write_report(path, beside, only):
                pages.append(path / PAGE)
                typer.echo("\n".join([*lines, f"read {pages[-1]}"]))
            if path.name == PUBLISHED_FOLDER and is_here and not only:
                for file in Book(Path(), path).write():
                    typer.echo(f"written: {file}")
        if not pages:
            of, what = (f" of {', '.join(only)}", " ".join(only)) if only else ("", "--all")
            raise ValueError(
                f"no records{of} in {path}; measure something first: cs336-systems run {what}"
            )
        if any(issubclass(category, NotMade) for category in told):
            raise typer.Exit(EXIT_NOT_WHOLE)


def _chosen_folders(results: Path, folder: str | None) -> list[Path]:
    """Return the results folders to report on: the named one, or all that this machine wrote.

    ValueError if `folder` is no plain name, or if there are no records.
    """
    from cs336_systems.device import get_device_info

    if folder is not None and (
        Path(folder).name != folder or folder in ("", "..") or "\\" in folder
    ):
        raise ValueError(f"--folder must be the name of a folder in {results}, got {folder!r}")
    if folder is not None:
        if not (results / folder / "records").is_dir():
            there = ", ".join(sorted(other.parent.name for other in results.glob("*/records")))
            raise ValueError(
                f"no records in {results / folder}; "
                f"{f'there are some of {there}, or' if there else ''} "
                "measure something first: cs336-systems run --all"
            )
        return [results / folder]

    # The folders that this machine's runs write to, with the CPU and with the GPU.
    slugs = {get_device_info(kind).slug for kind in ("cpu", "auto")}
    names = [slug + suffix for slug in sorted(slugs) for suffix in SUFFIXES]
    own = [results / name for name in names if (results / name / "records").is_dir()]
    if not own:
        raise ValueError(
            f"no records of this machine in {results}; "
            "measure something first: cs336-systems run --all"
        )
    return own
