"""`cs336-systems tune flash`: measure a grid of tile configurations and propose rows of the tables.

    cs336-systems tune flash --head-dim 64 --seqlen 4096 --seqlen 16384 --causal            # on a GPU
    cs336-systems tune flash --head-dim 128 --kernel dkdv --compile-only --arch sm90        # anywhere

A configuration is compiled, checked against the oracle and timed, in that order, and what fails one step does not reach
the next. Records are those of an experiment: a second run measures only what is missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cs336_systems.commands.kernels import compile_with_progress, machine_arch, print_reports, print_table
from cs336_systems.commands.shared import EXIT_NOTHING_MEASURED, ResultsOption, one_line_errors
from cs336_systems.commands.sweeps import check_sweep_options, measure_shown, measuring

if TYPE_CHECKING:
    from cs336_systems.attention.compilation import CompileReport
    from cs336_systems.attention.tiles import KernelConfig
    from cs336_systems.config import AttentionShape
    from cs336_systems.experiments.harness import Sweep
    from cs336_systems.experiments.tuning import Proposal, Times

KERNELS = ("forward", "dkdv", "dq")
DEFAULT_HEAD_DIMS = (64, 128)
DEFAULT_SEQLENS = (2048, 16384)
MAX_SPILL_BYTES = 256  # a few registers stored outside the inner loop may not matter; more of them do

tune = typer.Typer(no_args_is_help=True)


@tune.callback()
def _group() -> None:  # keeps `flash` a subcommand, although it is the only one
    """Measure tile configurations and propose rows of the tile tables."""


@tune.command()
def flash(
    kernel: Annotated[list[str] | None, typer.Option(help="forward, dkdv or dq; may be repeated. All three.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="May be repeated. 64 and 128.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="May be repeated. bfloat16.")] = None,
    seqlen: Annotated[list[int] | None, typer.Option(help="May be repeated. 2048 and 16384.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads, and as many key heads.")] = 16,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="One mask only; without, both.")] = None,
    config: Annotated[list[str] | None, typer.Option(help="Only these configurations; may be repeated.")] = None,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Compile; needs no GPU.")] = False,
    arch: Annotated[str | None, typer.Option(help="With --compile-only: sm80, sm86, sm89, sm90 or sm100.")] = None,
    max_spill_bytes: Annotated[int, typer.Option(help="Do not measure what spills more.")] = MAX_SPILL_BYTES,
    jobs: Annotated[int | None, typer.Option(help="Compiling processes; default: one a core.")] = None,
    results: ResultsOption = Path("results"),
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    rerun: Annotated[str, typer.Option(help="Measure again what is finished: none, failed or all.")] = "none",
    time_budget: Annotated[float | None, typer.Option(help="Start no cell after this many seconds.")] = None,
    commit: Annotated[str | None, typer.Option(help="Revision that runs, where there is no git.")] = None,
    dirty: Annotated[bool | None, typer.Option("--dirty/--clean", help="Whether it has uncommitted changes.")] = None,
) -> None:
    """Compile, check and time a grid of tiles for the attention kernels; say what the tables might hold."""
    from cs336_systems.attention.compilation import check_arch
    from cs336_systems.attention.tiles import target_of

    with one_line_errors():
        kernels = _choices("--kernel", kernel, KERNELS)
        dtypes = _choices("--dtype", dtype, ("bfloat16", "float16", "float32"))[: None if dtype else 1]
        if max_spill_bytes < 0:
            raise ValueError(f"--max-spill-bytes must not be negative, got {max_spill_bytes}")
        shapes = _shapes(
            dtypes, head_dim or DEFAULT_HEAD_DIMS, seqlen or DEFAULT_SEQLENS, batch, heads,
            (True, False) if causal is None else (causal,),
        )  # fmt: skip
        if compile_only:
            target = arch or machine_arch("--compile-only")
            check_arch(target)
            pairs = _pairs(shapes, kernels, target, config or [])
            reports = _compile(pairs, target, jobs)
        elif arch is not None:
            raise ValueError("--arch goes with --compile-only: what is measured is this machine's GPU")
        else:
            sweep = _open_sweep(results, seed, rerun, time_budget, commit, dirty)
    if compile_only:
        print_reports(reports, max_spill_bytes)
        good = sum(not report.obstacle(max_spill_bytes) for report in reports)
        typer.echo(f"{good} of {len(reports)} are worth measuring (at most {max_spill_bytes} bytes spilled)")
        if not good:
            raise typer.Exit(EXIT_NOTHING_MEASURED)
        return
    with measuring(sweep):
        with one_line_errors():
            pairs = _pairs(shapes, kernels, target_of(sweep.device.compute_capability), config or [])
        counts = _measure(sweep, pairs, max_spill_bytes, jobs, time_budget)
    typer.echo(", ".join(f"{count} {status}" for status, count in counts.items()))
    if not _show_measured(sweep, shapes, seed):
        typer.echo("error: nothing could be measured", err=True)
        raise typer.Exit(EXIT_NOTHING_MEASURED)


def _choices(option: str, given: Sequence[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    for name in given or ():
        if name not in known:
            raise ValueError(f"{option} must be one of {', '.join(known)}, got {name!r}")
    return tuple(dict.fromkeys(given or known))


def _shapes(
    dtypes: Sequence[str], head_dims: Sequence[int], seqlens: Sequence[int], batch: int, heads: int,
    masks: Sequence[bool],
) -> list[AttentionShape]:  # fmt: skip
    from cs336_systems.attention.tiles import MAX_HEAD_DIM
    from cs336_systems.config import AttentionShape

    for head_dim in head_dims:
        if not 1 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"--head-dim must be between 1 and {MAX_HEAD_DIM}, got {head_dim}")
    axes = product(dtypes, dict.fromkeys(head_dims), masks, dict.fromkeys(seqlens))
    return [
        AttentionShape(
            batch=batch, heads=heads, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, is_causal=is_causal,
            dtype=dtype,
        )
        for dtype, head_dim, is_causal, seqlen in axes
    ]  # fmt: skip


def _pairs(
    shapes: Sequence[AttentionShape], kernels: Sequence[str], target: str, names: Sequence[str]
) -> list[tuple[AttentionShape, KernelConfig]]:
    """Every shape with every configuration to try on it: the named ones, or the grid of the `target` table."""
    from cs336_systems.attention.tiles import KernelConfig, tuning_grid
    from cs336_systems.attention.tiles.tables import TABLES

    named = [KernelConfig.from_name(name) for name in dict.fromkeys(names)]
    for config in named:
        if config.target not in TABLES:
            raise ValueError(f"--config must name a table of {', '.join(TABLES)}, got {config.name}")
    if named and not any(config.kernel in kernels for config in named):
        raise ValueError(f"--config must name configurations of {', '.join(kernels)}, got {', '.join(names)}")
    pairs = []
    for shape, kernel in product(shapes, kernels):
        tried = named or tuning_grid(kernel, arch=target, head_dim=shape.head_dim, dtype=shape.dtype)
        pairs += [(shape, config) for config in tried if config.kernel == kernel]
    return pairs


def _compile(pairs: Sequence[tuple[AttentionShape, KernelConfig]], arch: str, jobs: int | None) -> list[CompileReport]:
    from cs336_systems.experiments.tuning import compile_request

    requests = dict.fromkeys(compile_request(shape, config, arch) for shape, config in pairs)
    return compile_with_progress(list(requests), jobs)


def _open_sweep(
    results: Path, seed: int, rerun: str, time_budget: float | None, commit: str | None, dirty: bool | None
) -> Sweep:
    """The locked results folder of this machine's GPU; ValueError without one."""
    import torch

    from cs336_systems.config import RunConfig
    from cs336_systems.device import get_device_info
    from cs336_systems.experiments.harness import Sweep, find_provenance, results_folder

    if not torch.cuda.is_available():
        raise ValueError("tune flash measures on a GPU, and there is none here (the interpreter's times say nothing of "
                         "speed): --compile-only --arch sm90 compiles without one")  # fmt: skip
    check_sweep_options(rerun, time_budget)
    run = RunConfig(scale="handout", device="cuda", seed=seed)
    folder = results_folder(results, get_device_info("cuda"), run)
    folder.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(run, folder, find_provenance(commit, dirty), rerun=rerun)  # type: ignore[arg-type]
    sweep.lock()
    return sweep


def _measure(
    sweep: Sweep, pairs: Sequence[tuple[AttentionShape, KernelConfig]], max_spill_bytes: int, jobs: int | None,
    time_budget_s: float | None,
) -> Counter[str]:  # fmt: skip
    """Record every pair that has no record yet, or why the compiler says not to try it; cells counted by status."""
    from cs336_systems.attention.compilation import arch_of_capability
    from cs336_systems.experiments.tuning import PROBLEM, compile_request, tune_cell
    from cs336_systems.experiments.worker import Outcome

    started = time.monotonic()
    cells = {tune_cell(shape, config): (shape, config) for shape, config in pairs}
    pending, finished = sweep.unfinished(PROBLEM, list(cells))
    counts: Counter[str] = Counter({f"{status} before": count for status, count in finished.items()})
    arch = arch_of_capability(sweep.device.compute_capability)
    left = pending
    if arch is not None and pending:
        reports = {report.request: report for report in _compile([cells[cell] for cell in pending], arch, jobs)}
        obstacles = [reports[compile_request(*cells[cell], arch)].obstacle(max_spill_bytes) for cell in pending]
        for cell, obstacle in zip(pending, obstacles):
            if obstacle:
                sweep.record(cell, Outcome(status="skipped", message=obstacle))
        left = [cell for cell, obstacle in zip(pending, obstacles) if not obstacle]
        counts["skipped"] += len(pending) - len(left)
    budget = None if time_budget_s is None else time_budget_s - (time.monotonic() - started)
    counts += measure_shown("tuning", left, partial(sweep.measure, left, time_budget_s=budget))[PROBLEM]
    return counts


def _show_measured(sweep: Sweep, shapes: Sequence[AttentionShape], seed: int) -> bool:
    """Print the best and the proposals from the folder's records; False if there are none for these shapes."""
    from cs336_systems.experiments.records import read_records
    from cs336_systems.experiments.tuning import PROBLEM, medians, proposals

    times = medians(read_records(sweep.record_file(PROBLEM)), shapes, seed)
    if not any(times.values()):
        return False
    table, ratios = best_beside_table(times, sweep.device.compute_capability)
    print_table(table)
    for line in summary_lines(ratios, proposals(times)):
        typer.echo(line)
    typer.echo(f"records: {sweep.record_file(PROBLEM)}")
    return True


def best_beside_table(
    times: dict[AttentionShape, Times], capability: tuple[int, int] | None
) -> tuple[Table, list[float]]:
    """A line a kernel and shape: the fastest configuration beside the table's, and all ratios of their times.

    Backward kernels are timed within a backward.
    """
    from cs336_systems.experiments.implementations import chosen_tiles
    from cs336_systems.experiments.tuning import by_kernel

    table = Table("kernel", "dtype", "head dim", "seq", "mask", "best", "ms", "table", "ms", "ratio", box=None)
    ratios = []
    for shape, kernel, measured in by_kernel(times):
        best, shipped = min(measured, key=measured.__getitem__), chosen_tiles(kernel, shape, capability)
        beside = ["-", "-"]
        if shipped in measured:
            ratios.append(measured[shipped] / measured[best])
            beside = [f"{measured[shipped]:.3f}", f"{ratios[-1]:.3f}"]
        table.add_row(
            kernel, shape.dtype, str(shape.head_dim), str(shape.seqlen_q), "causal" if shape.is_causal else "full",
            best.spelling, f"{measured[best]:.3f}", shipped.spelling, *beside,
        )  # fmt: skip
    return table, ratios


def summary_lines(ratios: Sequence[float], rows: Sequence[Proposal]) -> list[str]:
    """How far the tables are from the best, and the rows that would be nearer."""
    lines = []
    if ratios:
        lines.append(f"the table's rows: at most {max(ratios):.3f} x the best, over {len(ratios)} kernels and shapes")
    return [*lines, "proposed rows:", *(f"    {row.line}" for row in rows), *_precision_lines(rows)]


def _precision_lines(rows: Sequence[Proposal]) -> list[str]:
    """A line for each width and head tile whose kernels would round the same scores differently."""
    from cs336_systems.attention.tiles.config import KERNELS
    from cs336_systems.attention.tiles.tables import TABLES

    proposed = {row.key: row.config.precision for row in rows}
    lines = []
    for target, width, tile in dict.fromkeys((row.config.target, *row.key[1:]) for row in rows):
        keys = [(kernel, width, tile) for kernel in KERNELS]
        precisions = [proposed.get(key, TABLES[target][key].default.precision) for key in keys]
        if len(set(precisions)) > 1:
            found = ", ".join(f"{kernel} {precision}" for kernel, precision in zip(KERNELS, precisions))
            lines.append(f"the kernels of a call need one precision, and in head tile {tile} they would have {found}")
    return lines
