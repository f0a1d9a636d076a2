"""The command line: `cs336-systems` doctor, list, run, report, train, generate, grade and others; each says --help.

A wrong argument is one line on stderr and exit code 2; a run in which nothing could be measured exits 1; Ctrl-C exits
130 and loses only the cell it interrupted, and so does a termination or a hang-up (143, 129).
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import signal
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cs336_systems.commands.branches import branches
from cs336_systems.commands.compare import compare
from cs336_systems.commands.doctor import doctor
from cs336_systems.commands.generate import generate
from cs336_systems.commands.grade import grade
from cs336_systems.commands.memory import memory
from cs336_systems.commands.profile import profile
from cs336_systems.commands.shared import (
    EXIT_NOTHING_MEASURED,
    EXIT_SIGNAL,
    DeviceOption,
    ResultsOption,
    one_line_errors,
    termination_interrupts,
    wait_briefly,
)
from cs336_systems.commands.train import train
from cs336_systems.commands.tune import tune
from cs336_systems.measure.text import in_one_line, printable

if TYPE_CHECKING:
    from cs336_systems.config import RunConfig
    from cs336_systems.experiments.cells import Cell
    from cs336_systems.experiments.lanes import Lanes
    from cs336_systems.experiments.sweep import Sweep
    from cs336_systems.records import Record

PUBLISHED_FOLDER = "nvidia-h200"  # whose records the writeup and the README show
DOCUMENTS = ("README.md", "writeup.md")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reference implementation and lab for the systems half of building language models.",
)
app.command()(doctor)
app.add_typer(tune, name="tune")
app.command()(train)
app.command()(generate)
app.command()(grade)
app.command()(memory)
app.command()(compare)
app.command()(branches)
app.command()(profile)


@app.command("list")
def list_problems() -> None:
    """List every problem: what `run` measures, what `grade` grades, and what is answered in writing."""
    from cs336_systems.experiments.registry import PROBLEMS
    from cs336_systems.grading.problems import PROBLEMS as HANDOUT

    # Two lines each: a table would cut the names, which are there to be copied.
    others: list[Any] = [problem for name, problem in PROBLEMS.items() if name not in HANDOUT]
    for problem in [*HANDOUT.values(), *others]:
        place = "beyond the handout" if problem.section == "beyond" else f"section {problem.section}"
        points = [_count(problem.points, "point")] if problem.points else []
        how = {"graded": ["`grade`"], "written": ["in writing"]}.get(getattr(problem, "answer", ""), ["`run`"])
        facts = ", ".join([place, *points, *(str(edition) for edition in problem.editions), *how])
        title = PROBLEMS[problem.name].title if problem.name in PROBLEMS else problem.title
        typer.echo(f"{problem.name}\n    {title} ({facts})")


@app.command()
def run(
    problems: Annotated[list[str] | None, typer.Argument(help="Problem names; see `list`.")] = None,
    run_all: Annotated[bool, typer.Option("--all", help="Run every problem.")] = False,
    scale: Annotated[
        str, typer.Option(help="auto, tiny, smoke or handout; auto: smoke on CPU, handout on GPU.")
    ] = "auto",
    device: DeviceOption = "auto",
    results: ResultsOption = Path("results"),
    model: Annotated[str | None, typer.Option(help="Your own model, as package.module:Class.")] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(help="Only cells with these, and all of a cell by turns; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of inputs and weights.")] = 0,
    rerun: Annotated[str, typer.Option(help="Measure again what is finished: none, failed or all.")] = "none",
    time_budget: Annotated[float | None, typer.Option(help="Start no cell after this many seconds.")] = None,
    cell_timeout: Annotated[int, typer.Option(help="Seconds after which a cell becomes a failed row.")] = 600,
    gpus: Annotated[int | None, typer.Option(help="Measure on this many GPUs at once; see CONTRIBUTING.md.")] = None,
    commit: Annotated[str | None, typer.Option(help="Revision that runs, where there is no git.")] = None,
    dirty: Annotated[bool | None, typer.Option("--dirty/--clean", help="Whether it has uncommitted changes.")] = None,
) -> None:
    """Measure problems and append the records; finished cells are kept, so an interrupted run continues."""
    with one_line_errors():
        from cs336_systems.config import RunConfig
        from cs336_systems.device import get_device_info, resolve_device
        from cs336_systems.experiments.lanes import Lanes, gpu_environments
        from cs336_systems.experiments.sweep import Sweep, find_provenance, results_folder

        kind = resolve_device(device)
        chosen = _choose_problems(problems or [], run_all)
        if rerun not in ("none", "failed", "all"):
            raise ValueError(f"--rerun must be none, failed or all, got {rerun!r}")
        if time_budget is not None and not (math.isfinite(time_budget) and time_budget > 0):
            raise ValueError(f"--time-budget must be a positive number of seconds, got {time_budget}")
        environments = [] if gpus is None else gpu_environments(gpus, kind)
        if scale == "auto":
            scale = "handout" if kind == "cuda" else "smoke"
        config = RunConfig(scale=scale, device=kind, seed=seed, model=model, cell_timeout_s=cell_timeout)  # type: ignore[arg-type]
        _check_model(config, chosen)
        _check_implementations(implementation, chosen, config)
        interpret = kind == "cpu" and importlib.util.find_spec("triton") is not None
        provenance = find_provenance(commit, dirty)
        folder = results_folder(results, get_device_info(kind), config)
        _check_writable(folder, chosen)
        if kind == "cpu":
            wait_briefly(os.environ)
        sweep = Sweep(
            config,
            folder,
            provenance,
            rerun=rerun,  # type: ignore[arg-type]
            implementations=implementation,
            interpret=interpret,
        )
        lanes = Lanes(sweep, environments) if len(environments) > 1 else None
        sweep.lock()
        pending = {name: sweep.pending(name) for name in chosen}
        for name, (cells, finished) in pending.items():
            if not cells and not finished:
                raise ValueError(f"{name} has no cells of {', '.join(implementation or [])} at scale {scale}")
    todo = sum(len(cells) for cells, _ in pending.values())
    if todo:
        what = f"{_count(todo, 'cell')} of {_count(len(chosen), 'problem')}"
        typer.echo(f"{what} at scale {scale} into {folder}", err=True)
    totals: Counter[str] = Counter()
    started = time.monotonic()
    try:
        with termination_interrupts():
            if lanes is not None:
                totals += _run_lanes(lanes, pending, time_budget)
            for name in chosen if lanes is None else ():
                left = None if time_budget is None else time_budget - (time.monotonic() - started)
                totals += _run_problem(sweep, name, *pending[name], left)
            sweep.worker.stop()
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_NOTHING_MEASURED) from None
    except KeyboardInterrupt as interrupt:
        typer.echo(f"interrupted: finished cells are in {folder}; the same command continues", err=True)
        raise typer.Exit(EXIT_SIGNAL + getattr(interrupt, "signal_number", signal.SIGINT)) from None
    finally:
        if lanes is not None:
            lanes.close()
        sweep.worker.kill()  # also where the interrupt came between two cells
        sweep.unlock()
    typer.echo(f"records: {folder / 'records'}")
    if totals and not any(status.startswith(("ok", "partly")) for status in totals):
        typer.echo("error: nothing could be measured", err=True)
        raise typer.Exit(EXIT_NOTHING_MEASURED)


def _run_problem(
    sweep: Sweep, name: str, cells: list[Cell], finished: Counter[str], time_budget_s: float | None
) -> Counter[str]:
    """Measure the pending cells of one problem under a progress bar; cells counted by status.

    The measuring process stays for the next problem, as starting it takes as long as many a cell.
    """
    start = time.monotonic()
    measure = partial(sweep.measure, cells, time_budget_s=time_budget_s, keep_worker=True)
    measured = _measure_shown(name, cells, measure)[name]
    seconds = time.monotonic() - start
    return _summarize(name, measured, finished, len(cells), f" in {seconds:.0f} s")


def _run_lanes(
    lanes: Lanes, pending: dict[str, tuple[list[Cell], Counter[str]]], time_budget_s: float | None
) -> Counter[str]:
    """Measure the pending cells of all problems on several GPUs under one progress bar; cells counted by status."""
    start = time.monotonic()
    todo = [cell for cells, _ in pending.values() for cell in cells]
    measured = _measure_shown("all", todo, partial(lanes.measure, todo, time_budget_s=time_budget_s))
    totals: Counter[str] = Counter()
    for name, (cells, finished) in pending.items():
        totals += _summarize(name, measured[name], finished, len(cells), "")
    count = sum(counts.total() for counts in measured.values())
    typer.echo(f"{_count(count, 'cell')} on {len(lanes.workers)} GPUs in {time.monotonic() - start:.0f} s")
    return totals


def _measure_shown(
    title: str, cells: list[Cell], measure: Callable[..., Iterator[list[Record]]]
) -> defaultdict[str, Counter[str]]:
    """Iterate over `measure`, which says what it starts, under a progress bar; cells by problem and status."""
    from cs336_systems.experiments.sweep import cell_status

    measured: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failures: dict[tuple[str, str, str], dict[str, None]] = {}  # the cases of each, all in their order
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[cell]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=len(cells), cell="")

        def show(cell: Cell) -> None:
            progress.update(task, cell=f"{cell.implementation} {describe_case(cell.case)}")

        for records in measure(started=show):
            measured[records[0].problem][cell_status(record.status for record in records)] += 1
            failed = [record for record in records if record.status == "failed"]
            for r in failed:
                failures.setdefault((r.problem, r.implementation, r.message), {})[describe_case(r.case)] = None
            progress.advance(task)
        progress.update(task, cell="")
    if failures:
        from cs336_systems.report.markdown import one_line

        for (problem, name, message), cases in failures.items():
            first, more = next(iter(cases)), f" and {len(cases) - 1} more" if len(cases) > 1 else ""
            typer.echo(f"  {one_line(f'{problem}: {name} failed ({first}{more}): {message}')}", err=True)
    return measured


def _summarize(name: str, measured: Counter[str], finished: Counter[str], todo: int, duration: str) -> Counter[str]:
    """Print what a problem's cells came to, those of former runs included; the counts."""
    counts = Counter({f"{status} before": count for status, count in finished.items()}) + measured
    left = todo - measured.total()
    hint = " (--rerun failed measures them again)"
    hints = {"failed before": hint, "partly failed before": hint}
    summary = ", ".join(f"{count} {status}{hints.get(status, '')}" for status, count in counts.items()) or "no cells"
    later = f"; {_count(left, 'cell')} left for a later run" if left else ""
    typer.echo(f"{name}: {summary}{duration}{later}")
    return counts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_case(case: object) -> str:
    """A few words for the progress bar, of a cell's case or a record's."""

    def field(of: object, name: str, otherwise: str) -> Any:
        return of.get(name, otherwise) if isinstance(of, dict) else getattr(of, name, otherwise)

    if model := field(case, "model", ""):
        return str(field(model, "name", "?"))
    parts = (field(case, "dtype", ""), f"d={field(case, 'head_dim', '?')}", f"S={field(case, 'seqlen_q', '?')}")
    return " ".join(part for part in parts if part)


def _choose_problems(names: list[str], run_all: bool) -> list[str]:
    from cs336_systems.experiments.registry import PROBLEMS
    from cs336_systems.grading.problems import PROBLEMS as HANDOUT

    if run_all and names:
        raise ValueError("give problem names or --all, not both")
    for name in names:
        if name in HANDOUT and HANDOUT[name].answer != "measured":
            how = "graded: cs336-systems grade" if HANDOUT[name].answer == "graded" else "answered in writing"
            raise ValueError(f"{name} is not measured; it is {how}")
        if name not in PROBLEMS:
            near = difflib.get_close_matches(name, PROBLEMS, n=1)
            raise ValueError(f"unknown problem {name!r}; {f'did you mean {near[0]!r}? ' if near else ''}"
                             f"known: {', '.join(PROBLEMS)}; `list` shows them")  # fmt: skip
    if not names and not run_all:
        raise ValueError(f"give problem names or --all; known: {', '.join(PROBLEMS)}")
    return list(PROBLEMS) if run_all else list(dict.fromkeys(names))


def _check_model(config: RunConfig, chosen: list[str]) -> None:
    """Raise an error where the user's model cannot be found, or none of the problems has cells of a model."""
    from cs336_systems.experiments.registry import PROBLEMS
    from cs336_systems.experiments.worker import search_current_folder
    from cs336_systems.model import load_model_class

    if config.model is None:
        return
    search_current_folder()  # a console script does not search the folder it was typed in
    load_model_class(config.model)
    if not any(hasattr(cell.case, "model") for name in chosen for cell in PROBLEMS[name].cells(config)):
        raise ValueError(f"--model has no effect on {', '.join(chosen)}")


def _check_implementations(names: list[str] | None, chosen: list[str], config: RunConfig) -> None:
    from cs336_systems.experiments.implementations import IMPLEMENTATIONS
    from cs336_systems.experiments.mask_implementations import BUILDERS
    from cs336_systems.experiments.registry import PROBLEMS

    cells = [cell for name in chosen for cell in PROBLEMS[name].cells(config)] if names else []
    theirs = [name for cell in cells for name in cell.implementations]
    known = dict.fromkeys((*IMPLEMENTATIONS, *BUILDERS, *theirs))
    for name in names or []:
        if name not in known:
            raise ValueError(f"unknown implementation {name!r}; known: {', '.join(known)}")


def _check_writable(folder: Path, problems: list[str]) -> None:
    """Raise OSError before anything is measured if the records of `problems` could not be written."""
    records = folder / "records"
    what = f"results folder {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, *filter(os.path.lexists, [records])):
            what = f"results folder {place}"
            with tempfile.TemporaryFile(dir=place):
                pass
        for path in filter(os.path.lexists, (records / f"{name}.jsonl" for name in problems)):
            what = f"file of records {path}"
            with open(path, "ab"):
                pass
    except OSError as error:
        raise OSError(f"{what} cannot be written: {error.strerror or error}") from error


@app.command()
def report(
    results: ResultsOption = Path("results"),
    folder: Annotated[str | None, typer.Option(help="One results folder; default: all of this machine's.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare the published documents; write nothing.")] = False,
) -> None:
    """Turn records into tables and figures; the published folder's also into the writeup and the README."""
    from cs336_systems.report import build_report, check_documents

    documents = [Path(name) for name in DOCUMENTS]
    with one_line_errors():
        if folder is not None and (Path(folder).name != folder or folder in ("", "..") or "\\" in folder):
            raise ValueError(f"--folder must be the name of a folder in {results}, got {folder!r}")
        if check:
            differences = check_documents(documents, results / PUBLISHED_FOLDER)
        else:
            folders = [results / folder] if folder is not None else _own_folders(results)
            for path in folders:
                if not (path / "records").is_dir():
                    there = ", ".join(sorted(other.parent.name for other in results.glob("*/records")))
                    raise ValueError(f"no records in {path}; {f'there are some of {there}, or' if there else ''} "
                                     "measure something first: cs336-systems run --all")  # fmt: skip
    if check:
        for difference in differences:
            typer.echo(printable(difference), err=True)
        typer.echo(f"report --check: {len(differences)} differences")
        raise typer.Exit(1 if differences else 0)
    with one_line_errors():
        for path in folders:
            # Away from the repository the published device's folder is one like any other, with a report of its own.
            published = path.name == PUBLISHED_FOLDER and all(document.is_file() for document in documents)
            written = build_report(path, published=published, documents=documents if published else ())
            typer.echo(f"{path}: {len(written)} files written")
            for file in written:
                if file.name == "report.md":
                    typer.echo(f"read {file}")


def _own_folders(results: Path) -> list[Path]:
    """The folders that this machine's runs write to."""
    from cs336_systems.device import get_device_info

    slugs = {get_device_info(kind).slug for kind in _device_kinds()}
    names = [slug + suffix for slug in sorted(slugs) for suffix in ("", "-smoke", "-tiny")]
    own = [results / name for name in names if (results / name / "records").is_dir()]
    if not own:
        raise ValueError(f"no records of this machine in {results}; measure something first: cs336-systems run --all")
    return own


def _device_kinds() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def main(run_app: Callable[[], None] = app) -> None:
    """Entry point of the console script."""
    format_warning = warnings.formatwarning

    def briefly(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> str:
        if not issubclass(category, UserWarning):
            return format_warning(message, category, *place, **options)
        return f"warning: {in_one_line(message)}\n"

    warnings.formatwarning = briefly
    run_app()
