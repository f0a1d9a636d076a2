"""`cs336-systems run`: measure problems, show the progress, and keep every finished cell."""

from __future__ import annotations

import importlib.util
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cs336_systems.commands import shared
from cs336_systems.commands.shared import DeviceOption, ResultsOption, one_line_errors
from cs336_systems.commands.sweeps import (
    LONGEST_MESSAGE,
    check_sweep_options,
    measure_shown,
    measuring,
    open_sweep,
)
from cs336_systems.measure.text import in_one_line

if TYPE_CHECKING:
    from cs336_systems.bench.harness import Sweep
    from cs336_systems.bench.spec import Cell
    from cs336_systems.config import RunConfig


LARGEST_SIZE = 2**31 - 1  # of a dimension, since kernels index with 32 bits
MOST_REASONS = 8  # printed for the skipped cells of a problem


def run(
    problems: Annotated[list[str] | None, typer.Argument(help="Problem names; see `list`.")] = None,
    *,
    run_all: Annotated[bool, typer.Option("--all", help="Run every problem.")] = False,
    scale: shared.ScaleOption = "auto",
    device: DeviceOption = "auto",
    results: ResultsOption = Path("results"),
    model: Annotated[
        str | None, typer.Option(help="Your own model, as package.module:Class.")
    ] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these, and who plays in turns with them; also package.module:Name."
        ),
    ] = None,
    seed: shared.SeedOption = 0,
    rerun: shared.RerunOption = "none",
    time_budget: shared.TimeBudgetOption = None,
    cell_timeout: Annotated[
        int, typer.Option(help="Seconds without a result that make a cell a failed row.")
    ] = 600,
    mode: Annotated[
        str | None, typer.Option(help="Of attention: forward, backward, forward_backward; a,b.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Of attention: these in the place of its own, as 16,64.")
    ] = None,
    seqlen: Annotated[
        str | None, typer.Option(help="Of attention: these lengths, as 4096,8192.")
    ] = None,
    head_dim: Annotated[
        str | None, typer.Option(help="Of attention: these head dims, as 64,128.")
    ] = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="Only our stages of attention; print their table.")
    ] = False,
    shard: Annotated[
        str, typer.Option(help="This process's part, as 2/4: one a GPU, into one folder.")
    ] = "1/1",
    commit: shared.CommitOption = None,
    dirty: shared.DirtyOption = None,
) -> None:
    """Measure problems and append the records; an interrupted run continues where it stopped."""
    with one_line_errors(cell_timeout_s="--cell-timeout"):
        from cs336_systems.bench.harness import Shard, planned_cells
        from cs336_systems.config import SCALES, Axes, RunConfig
        from cs336_systems.device import resolve_device

        kind = resolve_device(device)
        chosen = _choose_problems(problems or [], run_all)
        check_sweep_options(rerun, time_budget)
        part = Shard.parse(shard)
        if scale not in ("auto", *SCALES):
            raise ValueError(f"--scale must be one of auto, {', '.join(SCALES)}, got {scale!r}")
        if scale == "auto":
            scale = "handout" if kind == "cuda" else "smoke"
        config = RunConfig(
            scale=scale,  # type: ignore[arg-type]
            device=kind,
            seed=seed,
            model=model,
            cell_timeout_s=cell_timeout,
            axes=Axes(
                modes=tuple(mode.split(",")) if mode else (),
                heads=_sizes("--heads", heads),
                seqlens=_sizes("--seqlen", seqlen),
                head_dims=_sizes("--head-dim", head_dim),
            ),
        )

        # `planned_cells` also refuses axes that a problem does not have.
        cells = [cell for name in chosen for cell in planned_cells(name, config)]
        if stages:
            implementation = _stages_of(chosen, implementation)
        _check_model(config, chosen, cells)
        _check_implementations(implementation, chosen, cells)

        interpret = kind == "cpu" and importlib.util.find_spec("triton") is not None
        if kind == "cpu":
            shared.wait_briefly(os.environ)
        sweep = open_sweep(
            config,
            results,
            chosen,
            commit,
            dirty,
            rerun=rerun,
            implementations=implementation,
            interpret=interpret,
            shard=part,
        )

    totals: Counter[str] = Counter()
    started = time.monotonic()
    with measuring(sweep):
        # Find what is left over all problems first, so that the terminal can say how much it is.
        with one_line_errors():
            pending = {name: sweep.pending(name) for name in chosen}
            for name, (cells, finished) in pending.items():
                if not cells and not finished and part.count == 1:
                    raise ValueError(
                        f"{name} has no cells of {', '.join(implementation or [])} at scale {scale}"
                    )
        todo = sum(len(cells) for cells, _ in pending.values())
        if todo:
            what = f"{_count(todo, 'cell')} of {_count(len(chosen), 'problem')}"
            typer.echo(f"{what} at scale {scale} into {sweep.folder}", err=True)

        for name in chosen:
            left = None if time_budget is None else time_budget - (time.monotonic() - started)
            totals += _run_problem(sweep, name, *pending[name], left)
        sweep.worker.stop()

    for name in chosen if stages else ():
        _show_stages(name, sweep)
    typer.echo(f"records: {sweep.folder / 'records'}")
    if totals and not any(status.startswith(("ok", "partly")) for status in totals):
        typer.echo("error: nothing could be measured", err=True)
        raise typer.Exit(shared.EXIT_NOTHING_MEASURED)


def _run_problem(
    sweep: Sweep, name: str, cells: list[Cell], finished: Counter[str], time_budget_s: float | None
) -> Counter[str]:
    """Measure one problem's pending `cells` under a progress bar and return counts by status.

    `finished` counts the cells of earlier runs. The measuring process stays alive for the next
    problem, since starting it takes as long as many cells.
    """
    start = time.monotonic()
    measured = measure_shown(name, sweep, cells, time_budget_s)
    counts = Counter({f"{status} before": count for status, count in finished.items()}) + measured
    left = len(cells) - measured.total()
    summary = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
    later = f"; {_count(left, 'cell')} left for a later run" if left else ""
    if counts["failed before"] or counts["partly failed before"]:
        later += "; --rerun failed measures again what failed"
    typer.echo(f"{name}, cells: {summary} in {time.monotonic() - start:.0f} s{later}")
    if any("skipped" in status for status in counts):
        _show_skips(sweep, name)
    return counts


def _show_skips(sweep: Sweep, name: str) -> None:
    """Print why records of the problem `name` have no samples, for the sweep's implementations."""
    from cs336_systems.bench.records import latest, read_records, skips

    records = latest(read_records(sweep.record_file(name)))
    asked = sweep.implementations
    reasons = skips(record for record in records if asked is None or record.implementation in asked)
    for line in reasons[:MOST_REASONS]:
        typer.echo(f"  {in_one_line(line)[:LONGEST_MESSAGE]}", err=True)
    if len(reasons) > MOST_REASONS:
        typer.echo(
            f"  and {_count(len(reasons) - MOST_REASONS, 'other reason')}, in the records", err=True
        )


def _count(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _choose_problems(names: list[str], run_all: bool) -> list[str]:
    """Return the problems to run, each once; ValueError for an unknown or missing name.

    ValueError, too, if names are given together with --all.
    """
    from cs336_systems.bench.spec import measured_problems

    if run_all and names:
        raise ValueError("give problem names or --all, not both")
    for name in names:
        if name not in measured_problems():
            raise ValueError(shared.unknown_problem(name))
    if not names and not run_all:
        raise ValueError("give problem names or --all; `cs336-systems list` shows the names")
    return list(measured_problems()) if run_all else list(dict.fromkeys(names))


def _sizes(option: str, text: str | None) -> tuple[int, ...]:
    """Return the numbers in a text such as `4096,8192`; ValueError for anything else."""
    parts = [] if text is None else text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"{option} must be positive numbers with commas between them, got {text!r}"
        )
    if too_large := [
        part for part in parts if len(part) > len(str(LARGEST_SIZE)) or int(part) > LARGEST_SIZE
    ]:
        raise ValueError(f"{option} must be at most {LARGEST_SIZE} each, got {too_large[0]}")
    return tuple(int(part) for part in parts)


def _stages_of(chosen: list[str], implementations: list[str] | None) -> list[str]:
    """Return the implementations that are stages of our attention, for --stages.

    ValueError if a chosen problem has no table of stages, or if --implementation is given, too.
    """
    from cs336_systems.bench.spec import load, measured_problems
    from cs336_systems.subjects.implementations import STAGES

    if implementations:
        raise ValueError("give --stages or --implementation, not both")
    for name in chosen:
        if "stages" not in load(name).tables:
            able = ", ".join(
                other
                for other, problem in measured_problems().items()
                if "stages" in problem.tables
            )
            raise ValueError(
                f"--stages has no effect on {name}; problems with a table of stages: {able}"
            )
    return list(STAGES)


def _show_stages(name: str, sweep: Sweep) -> None:
    """Print the table that compares each stage of our attention with the one before."""
    from cs336_systems.bench.records import read_records
    from cs336_systems.bench.spec import load
    from cs336_systems.book.frames import load_frame

    problem = load(name)
    table = problem.tables["stages"].build(
        load_frame(problem, read_records(sweep.record_file(name)))
    )
    typer.echo(f"\n{table.title}\n\n{table.markdown()}\n")


def _check_model(config: RunConfig, chosen: list[str], cells: list[Cell]) -> None:
    """Raise an error if the user's model cannot be found, or if none of the `cells` uses one."""
    from cs336_systems.bench.worker import search_current_folder
    from cs336_systems.model import load_model_class

    if config.model is None:
        return
    search_current_folder()  # a console script does not search the folder it was typed in
    load_model_class(config.model)
    if not any(hasattr(cell.case, "model") for cell in cells):
        raise ValueError(f"--model has no effect on {', '.join(chosen)}")


def _check_implementations(names: list[str] | None, chosen: list[str], cells: list[Cell]) -> None:
    """Raise ValueError for an unknown implementation, or for one that a problem does not take."""
    from cs336_systems.bench.spec import load
    from cs336_systems.bench.worker import search_current_folder
    from cs336_systems.subjects.attention_builders import load_name
    from cs336_systems.subjects.implementations import IMPLEMENTATIONS, MASK_IMPLEMENTATIONS

    of_cells = (name for cell in cells for name in cell.implementations)
    known = dict.fromkeys((*IMPLEMENTATIONS, *MASK_IMPLEMENTATIONS, *of_cells))
    for name in names or []:
        if ":" in name:
            for problem in chosen:
                if not load(problem).takes:
                    raise ValueError(f"{problem} takes no implementation of your own, got {name!r}")
            search_current_folder()
            load_name(name)
        elif name not in known:
            raise ValueError(f"unknown implementation {name!r}; known: {', '.join(known)}")
