"""`cs336-systems tune flash`: measure a grid of tile configurations and propose rows of the tables.

    cs336-systems tune flash --head-dim 64 --seqlen 4096 --seqlen 16384 --causal      # on a GPU
    cs336-systems tune flash --head-dim 128 --kernel dkdv --compile-only --arch sm90  # anywhere

A configuration is compiled, then checked against the oracle, then timed. One that fails a step does
not reach the next. The records are those of an experiment: a second run measures only what is
missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cs336_systems.commands import shared
from cs336_systems.commands.kernels import compile_with_progress, machine_arch, print_reports
from cs336_systems.commands.shared import EXIT_NOTHING_MEASURED, ResultsOption, one_line_errors
from cs336_systems.commands.sweeps import check_sweep_options, measure_shown, measuring, open_sweep
from cs336_systems.commands.terminal import show_table
from cs336_systems.commands.usage import Command, Group

if TYPE_CHECKING:
    from cs336_systems.bench.harness import Sweep
    from cs336_systems.bench.spec import Cell
    from cs336_systems.compiler.offline import CompileReport
    from cs336_systems.config import AttentionShape

KERNELS = ("forward", "dkdv", "dq")
DTYPES = ("bfloat16", "float16", "float32")
DEFAULT_HEAD_DIMS = (64, 128)
DEFAULT_SEQLENS = (2048, 16384)
# A few registers that are stored outside the inner loop may cost nothing; more of them do.
MAX_SPILL_BYTES = 256

tune = typer.Typer(cls=Group)


@tune.callback()
def _group() -> None:  # keeps `flash` a subcommand, although it is the only one
    """Measure tile configurations and propose rows of the tile tables."""


@tune.command(cls=Command)
def flash(
    *,
    kernel: Annotated[
        list[str] | None, typer.Option(help="forward, dkdv or dq; may be repeated. All three.")
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="May be repeated. 64 and 128.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="May be repeated. bfloat16.")] = None,
    seqlen: Annotated[
        list[int] | None, typer.Option(help="May be repeated. 2048 and 16384.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads, and as many key heads.")] = 16,
    causal: Annotated[
        bool | None, typer.Option("--causal/--full", help="One mask only; without, both.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="Only these, and the table's; may be repeated.")
    ] = None,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile; needs no GPU.")
    ] = False,
    arch: Annotated[
        str | None, typer.Option(help="With --compile-only: sm80, sm86, sm89, sm90 or sm100.")
    ] = None,
    results: ResultsOption = Path("results"),
    seed: shared.SeedOption = 0,
    rerun: shared.RerunOption = "none",
    time_budget: shared.TimeBudgetOption = None,
    commit: shared.CommitOption = None,
    dirty: shared.DirtyOption = None,
) -> None:
    """Compile, check and time a grid of attention tiles; print what the tile tables might hold."""
    from cs336_systems.attention.tiles import MAX_HEAD_DIM, target_of
    from cs336_systems.compiler.offline import check_arch
    from cs336_systems.config import AttentionShape, RunConfig
    from cs336_systems.subjects.tuning import TUNE_FLASH, tune_cells

    with one_line_errors(seqlen_q="--seqlen"):
        kernels = _choices("--kernel", kernel or KERNELS, KERNELS)
        dtypes = _choices("--dtype", dtype or DTYPES[:1], DTYPES)
        check_sweep_options(rerun, time_budget)
        for width in head_dim or ():
            if not 1 <= width <= MAX_HEAD_DIM:
                raise ValueError(f"--head-dim must be between 1 and {MAX_HEAD_DIM}, got {width}")
        masks = (True, False) if causal is None else (causal,)
        axes = product(dtypes, head_dim or DEFAULT_HEAD_DIMS, masks, seqlen or DEFAULT_SEQLENS)
        shapes = [
            AttentionShape(
                batch=batch,
                heads=heads,
                seqlen_q=length,
                seqlen_k=length,
                head_dim=width,
                is_causal=is_causal,
                dtype=name,  # type: ignore[arg-type]
            )
            for name, width, is_causal, length in dict.fromkeys(axes)
        ]
        if compile_only:
            target = arch or machine_arch("--compile-only")
            check_arch(target)
            cells = tune_cells(shapes, kernels, target, config or [])
        elif arch is not None:
            raise ValueError(
                "--arch goes with --compile-only: what is measured is this machine's GPU"
            )
        else:
            _require_gpu()
            run = RunConfig(scale="handout", device="cuda", seed=seed)
            sweep = open_sweep(run, results, [TUNE_FLASH], commit, dirty, rerun=rerun)

    if compile_only:
        _show_compiled(list(dict.fromkeys(_compile(cells, target).values())))
        return
    with measuring(sweep):
        with one_line_errors():
            capability = sweep.device.compute_capability
            cells = tune_cells(shapes, kernels, target_of(capability), config or [], capability)
        counts = _measure(sweep, cells, time_budget)
    typer.echo(", ".join(f"{count} {status}" for status, count in counts.items()))
    if not _show_measured(sweep, shapes):
        typer.echo("error: nothing could be measured", err=True)
        raise typer.Exit(EXIT_NOTHING_MEASURED)


def _choices(option: str, given: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the values of `option`, each once; ValueError for one that is not in `known`."""
    for name in given:
        if name not in known:
            raise ValueError(f"{option} must be one of {', '.join(known)}, got {name!r}")
    return list(dict.fromkeys(given))


def _compile(cells: Sequence[Cell], arch: str) -> dict[Cell, CompileReport]:
    """Compile each cell's kernel for `arch` and return the reports by cell.

    Cells that differ only in lengths, batch or heads share a report.
    """
    from cs336_systems.attention.tiles import KernelConfig
    from cs336_systems.compiler.offline import CompileRequest

    requests = {
        cell: CompileRequest(
            config=KernelConfig.from_name(cell.implementation),
            arch=arch,
            head_dim=cell.case.head_dim,
            dtype=cell.case.dtype,
            is_causal=cell.case.is_causal,
        )
        for cell in cells
    }
    found = compile_with_progress(list(dict.fromkeys(requests.values())))
    reports = {report.request: report for report in found}
    return {cell: reports[request] for cell, request in requests.items()}


def _show_compiled(reports: Sequence[CompileReport]) -> None:
    """Print the compiler's reports; typer.Exit(1) if no configuration is worth measuring."""
    print_reports(reports, MAX_SPILL_BYTES)
    good = sum(not report.obstacle(MAX_SPILL_BYTES) for report in reports)
    typer.echo(
        f"{good} of {len(reports)} are worth measuring (at most {MAX_SPILL_BYTES} bytes spilled)"
    )
    if not good:
        raise typer.Exit(EXIT_NOTHING_MEASURED)


def _require_gpu() -> None:
    """Raise ValueError if there is no GPU to measure on."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "tune flash measures on a GPU, and there is none here "
            "(the interpreter's times say nothing of speed): "
            "--compile-only --arch sm90 compiles without one"
        )


def _measure(sweep: Sweep, cells: list[Cell], time_budget_s: float | None) -> Counter[str]:
    """Measure every cell that has no record yet and return how many ended with each status.

    A cell that the compiler rules out is recorded as skipped, with the obstacle as the reason.
    """
    from cs336_systems.attention.tiles import KernelConfig
    from cs336_systems.bench.worker import Outcome
    from cs336_systems.compiler.offline import arch_of_capability
    from cs336_systems.subjects.tuning import TUNE_FLASH, compile_ahead

    started = time.monotonic()
    left, finished = sweep.unfinished(TUNE_FLASH, cells)
    counts: Counter[str] = Counter(
        {f"{status} before": count for status, count in finished.items()}
    )

    # Compile first: a cell with an obstacle is skipped without touching the GPU.
    arch = arch_of_capability(sweep.device.compute_capability)
    if arch is not None and left:
        for cell, report in _compile(left, arch).items():
            if obstacle := report.obstacle(MAX_SPILL_BYTES):
                sweep.record(cell, Outcome(status="skipped", message=obstacle))
                left.remove(cell)
                counts["skipped"] += 1
        compile_ahead(
            [(cell.case, KernelConfig.from_name(cell.implementation)) for cell in left], arch
        )
    budget = None if time_budget_s is None else time_budget_s - (time.monotonic() - started)
    counts += measure_shown("tuning", sweep, left, budget)
    return counts


def _show_measured(sweep: Sweep, shapes: Sequence[AttentionShape]) -> bool:
    """Print the best configurations and the proposed rows from the folder's records.

    Return False if there are no measured records of these shapes.
    """
    from cs336_systems.bench.records import read_records
    from cs336_systems.bench.spec import load
    from cs336_systems.book.frames import load_frame, pick
    from cs336_systems.subjects.tuning import TUNE_FLASH, proposed_rows, tuned_on

    file, choice = sweep.record_file(TUNE_FLASH), load("tile_choice")
    records = [record for record in read_records(file) if record.seed == sweep.run.seed]
    frame = load_frame(choice, tuned_on(shapes, records, sweep.device.compute_capability))
    if frame.empty or not (frame["status"] == "ok").any():
        return False
    spec = choice.tables["grid"]
    grid = spec.build(frame)
    table = Table("dtype", *grid.header, box=None)
    for dtype, line in zip(pick(frame, spec.where)["dtype"], grid.lines):
        table.add_row(dtype, *(cell.text for cell in line))
    show_table(table)
    if numbers := choice.numbers(frame):
        worst, judged = numbers["worst"]["over_best"], numbers["judged"]
        typer.echo(
            f"the table's rows: at most {worst:.3f} x the best, over {judged} kernels and shapes"
        )
    typer.echo(
        "\n".join(
            ["proposed rows:", *(f"    {row}" for row in proposed_rows(frame)), f"records: {file}"]
        )
    )
    return True
