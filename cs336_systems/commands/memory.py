"""`cs336-systems memory`: predict the GPU memory of a forward or training step, on any machine."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cs336_systems.commands.shared import one_line_errors
from cs336_systems.commands.terminal import show_table, show_text
from cs336_systems.measure.text import printable

EXIT_DOES_NOT_FIT = 1
GIB = 2**30
NUM_LARGEST = 8  # allocations that are listed
# Options that only a prediction uses: with --snapshot they are refused.
OF_A_PREDICTION = (
    "model",
    "context",
    "batch",
    "mode",
    "attention",
    "parameters",
    "autocast",
    "checkpoint",
)


def memory(
    given: typer.Context,
    *,
    model: Annotated[
        str,
        typer.Option(
            help="A size of the handouts: small, medium, large, xl, 10b, xl-2025, 2.7b-2025, 8b."
        ),
    ] = "xl",
    context: Annotated[
        int | None, typer.Option(help="Tokens in a sequence; default: the size's own.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    mode: Annotated[str, typer.Option(help="forward or train_step.")] = "train_step",
    attention: Annotated[
        str,
        typer.Option(
            help="Of the model: reference, which is the handout's; compiled, sdpa, tiled, triton "
            "or hopper."
        ),
    ] = "reference",
    parameters: Annotated[str, typer.Option(help="Parameters' dtype.")] = "float32",
    autocast: Annotated[
        str | None, typer.Option(help="Autocast's dtype: bfloat16 or float16.")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="none, recursive, selective, or blocks per group.")
    ] = "none",
    fits: Annotated[
        str | None, typer.Option(help="Does it fit in so much memory, like 80GB or 80GiB?")
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="Read this PyTorch memory snapshot instead; runs nothing.")
    ] = None,
) -> None:
    """Predict peak memory by phase and category, and the largest allocations, allocating nothing.

    The step's own code runs on tensors without storage. With --fits the answer is the exit code,
    too: 0 or 1.
    """
    with one_line_errors(context_length="--context", checkpointing="--checkpoint"):
        limit = None if fits is None else parse_bytes(fits)

        # The trace comes from a snapshot file, or from a step that runs on meta tensors.
        if snapshot is not None:
            from cs336_systems.measure.snapshot import read_snapshot

            if without_effect := [
                f"--{name}" for name in OF_A_PREDICTION if _is_typed(given, name)
            ]:
                raise ValueError(
                    f"--snapshot is read as it is, without {', '.join(without_effect)}"
                )
            if not snapshot.exists():
                raise ValueError(f"--snapshot {snapshot}: no such file")
            trace = read_snapshot(snapshot)
            title = snapshot.name
        else:
            from cs336_systems.config import MODEL_SIZES, Precision
            from cs336_systems.subjects.model_memory import MemoryCase, simulated_trace

            if model not in MODEL_SIZES:
                raise ValueError(f"--model must be one of {', '.join(MODEL_SIZES)}, got {model!r}")

            size = (
                MODEL_SIZES[model]
                if context is None
                else replace(MODEL_SIZES[model], context_length=context)
            )
            precision = Precision(
                parameters=parameters,  # type: ignore[arg-type]
                autocast=autocast,  # type: ignore[arg-type]
            )
            case = MemoryCase(
                model=size,
                batch=batch,
                attention=attention,
                precision=precision,
                checkpointing=checkpoint,
            )
            trace = simulated_trace(case, mode)
            title = (
                f"{model}, context {size.context_length}, batch {batch}, {mode}, "
                f"{attention} attention, {f'{autocast} autocast' if autocast else parameters}, "
                f"checkpointing {checkpoint}"
            )

    show_text(printable(title))
    phases = Table("phase", "peak (GiB)", box=None)
    for name, num_bytes in trace.phase_peaks().items():
        phases.add_row(name, f"{num_bytes / GIB:.2f}")
    show_table(phases)

    show_text(f"\nat the peak, in {trace.phase_of(trace.peak_event())}:")
    parts = Table("category", "GiB", box=None)
    for category, num_bytes in trace.breakdown(trace.peak_event()).items():
        parts.add_row(category, f"{num_bytes / GIB:.2f}")
    show_table(parts)

    show_text("\nlargest allocations:")
    largest = Table("MiB", "count", "category", "where", box=None)
    for one in trace.largest(NUM_LARGEST):
        largest.add_row(
            f"{one.num_bytes / 2**20:.1f}", str(one.count), one.category, printable(one.where)
        )
    show_table(largest)

    if limit is not None:
        peak = trace.peak_bytes()
        verdict = "fits" if peak <= limit else "does not fit"
        typer.echo(f"{verdict} in {fits}: peak {peak / GIB:.2f} GiB of {limit / GIB:.2f} GiB")
        if peak > limit:
            raise typer.Exit(EXIT_DOES_NOT_FIT)


def _is_typed(given: typer.Context, name: str) -> bool:
    """Return whether the option `name` was on the command line."""
    source = given.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def parse_bytes(text: str) -> int:
    """Return the bytes of "80GB" (10⁹ each) or "80GiB" (2³⁰ each); ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B", text.strip(), re.IGNORECASE)
    if match is None:
        units = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise ValueError(f"--fits must be a number with one of {units}, like 80GB, got {text!r}")
    number, prefix, binary = match.groups()
    return int(
        float(number) * (2**10 if binary else 10**3) ** (" KMGT".index((prefix or " ").upper()))
    )
