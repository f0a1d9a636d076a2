"""What `run` and `tune` share: checked options, a progress bar, and a clean end after errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from cs336_systems.commands.shared import EXIT_NOTHING_MEASURED, check_writable, ends_at_a_signal
from cs336_systems.measure.text import in_one_line

if TYPE_CHECKING:
    from cs336_systems.bench.harness import Sweep
    from cs336_systems.bench.records import Record
    from cs336_systems.bench.spec import Cell
    from cs336_systems.config import RunConfig

BAR_WIDTH = 10  # so that count and time stand beside the longest problem's name in 80 columns
LONGEST_MESSAGE = 300  # characters of a failure on the terminal; the record has the whole text


def check_sweep_options(rerun: str, time_budget: float | None) -> None:
    """Raise ValueError for an unknown --rerun or a --time-budget that is no positive number."""
    if rerun not in ("none", "failed", "all"):
        raise ValueError(f"--rerun must be none, failed or all, got {rerun!r}")
    if time_budget is not None and not (math.isfinite(time_budget) and time_budget > 0):
        raise ValueError(f"--time-budget must be a positive number of seconds, got {time_budget}")


def open_sweep(
    run: RunConfig,
    results: Path,
    problems: Sequence[str],
    commit: str | None,
    dirty: bool | None,
    **options: Any,
) -> Sweep:
    """Return a sweep of `problems` that has locked the folder of `run` below `results`.

    `options` are those of `Sweep`. ValueError if another run is in that folder, OSError if it
    cannot be written.
    """
    from cs336_systems.bench.harness import Sweep, find_provenance, results_folder
    from cs336_systems.device import get_device_info

    folder = results_folder(results, get_device_info(run.device), run)
    records = folder / "records"
    check_writable(records, [records / f"{name}.jsonl" for name in problems])
    sweep = Sweep(run, folder, find_provenance(commit, dirty), **options)
    sweep.lock()
    return sweep


@contextmanager
def measuring(sweep: Sweep) -> Iterator[None]:
    """Turn an OSError or Ctrl-C inside into one line and an exit code, and release the sweep.

    On exit the measuring process has ended and the folder is unlocked.
    """
    try:
        with ends_at_a_signal(
            f"interrupted: finished cells are in {sweep.folder}; the same command continues"
        ):
            yield
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_NOTHING_MEASURED) from None
    finally:
        sweep.worker.kill()  # an interrupt between two cells leaves it running
        sweep.unlock()


def progress_bar() -> Progress:
    """Return a progress bar for stderr that shows nothing where stderr is no terminal.

    Each task has a field `cell`, whose text the bar shows.
    """
    console = Console(stderr=True)
    cell = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # takes the width the others leave
    columns = (
        TextColumn("{task.description}"),
        BarColumn(BAR_WIDTH),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[cell]}", table_column=cell),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal, expand=True)


def measure_shown(
    title: str, sweep: Sweep, cells: list[Cell], time_budget_s: float | None
) -> Counter[str]:
    """Measure `cells` under a progress bar and return how many cells ended with each status.

    Without a terminal a line is printed for each cell instead. Failures are printed at the end.
    """
    from cs336_systems.bench.harness import cell_status
    from cs336_systems.bench.records import case_to_dict, describe_case, failures

    measured: Counter[str] = Counter()
    failed: list[Record] = []
    with progress_bar() as progress:
        task = progress.add_task(title, total=len(cells), cell="")

        def show(cell: Cell) -> None:
            text = f"{cell.implementation} {describe_case(case_to_dict(cell.case))}"
            progress.update(task, cell=text)
            if progress.disable:
                typer.echo(
                    f"{title} {int(progress.tasks[0].completed) + 1}/{len(cells)}: {text}", err=True
                )

        for records in sweep.measure(cells, time_budget_s=time_budget_s, started=show):
            measured[cell_status(record.status for record in records)] += 1
            failed += (record for record in records if record.status == "failed")
            progress.advance(task)
        progress.update(task, cell="")
    for line in failures(failed):
        typer.echo(f"  {in_one_line(line)[:LONGEST_MESSAGE]}", err=True)
    return measured
