"""`cs336-systems profile CASE`: profile one case, break its time down, and save a trace."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cs336_systems.commands.shared import (
    EXIT_NOTHING_MEASURED,
    DeviceOption,
    ResultsOption,
    check_writable,
    ends_at_a_signal,
    one_line_errors,
)
from cs336_systems.commands.terminal import show_table, show_text
from cs336_systems.measure.text import in_one_line, printable

if TYPE_CHECKING:
    from cs336_systems.measure.trace import Trace

OWN_TOOLS = ("torch", "api")  # api: what runs inside of nsys and ncu
PROFILES = "profiles"  # below the logs of a results folder, which git ignores
# The kernels that ncu measures. It replays each of them many times, so a whole step takes hours.
NCU_LAUNCHES = 200
# NVIDIA's profilers, where installed: first the option that names the report, then the others.
# Both record only what runs between cudaProfilerStart and cudaProfilerStop, so that model building
# and warm-up stay out.
TOOLS = {
    "nsys": (
        "--output",
        "profile",
        "--force-overwrite=true",
        "--trace=cuda,nvtx,cublas,cudnn,osrt",
        "--cuda-memory-usage=true",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
    ),
    "ncu": (
        "--export",
        "--force-overwrite",
        "--set=full",
        "--profile-from-start=off",
        # Ranges are only shown. They select no kernels, since autograd launches kernels on a thread
        # that has no range.
        "--nvtx",
        f"--launch-count={NCU_LAUNCHES}",
        "--target-processes=all",
    ),
}


def profile(
    case: Annotated[
        str,
        typer.Argument(help="A model size (xl, small-proxy) or an attention shape (1x16x4096x64)."),
    ],
    *,
    mode: Annotated[
        str, typer.Option(help="forward, backward, forward_backward or train_step.")
    ] = "forward_backward",
    implementation: Annotated[
        str, typer.Option(help="eager, compiled; of a shape, any in its tables.")
    ] = "eager",
    attention: Annotated[
        str, typer.Option(help="Attention inside of a model: reference, triton, hopper, sdpa, ...")
    ] = "reference",
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, bfloat16-autocast or float16-autocast.")
    ] = "float32",
    context: Annotated[int | None, typer.Option(help="Tokens in a sequence of a model.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences in a batch of a model; default 4.")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal/--full", help="Mask of an attention shape.")
    ] = True,
    model: Annotated[
        str | None, typer.Option(help="Your own model, as package.module:Class.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Profiled repetitions.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Repetitions before them.")] = 2,
    ranges: Annotated[bool, typer.Option(help="Name the model's parts in the profile.")] = True,
    top: Annotated[int, typer.Option(min=1, help="How many kernels to list.")] = 10,
    tool: Annotated[
        str, typer.Option(help="torch (torch.profiler), or NVIDIA's nsys or ncu where installed.")
    ] = "torch",
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the command of nsys or ncu; run nothing.")
    ] = False,
    device: DeviceOption = "auto",
    results: ResultsOption = Path("results"),
) -> None:
    """Run one case under a profiler: where the time goes, and a trace for ui.perfetto.dev."""
    with one_line_errors(context_length="--context"), ends_at_a_signal("interrupted"):
        from cs336_systems.accounting import predicted_peak_bytes
        from cs336_systems.config import ModelCase, RunConfig
        from cs336_systems.device import get_device_info, interpret_kernels, resolve_device

        kind = resolve_device(device)
        if tool not in (*OWN_TOOLS, *TOOLS):
            raise ValueError(f"--tool must be one of torch, {', '.join(TOOLS)}, got {tool!r}")
        if print_only and tool not in TOOLS:
            raise ValueError(
                f"--print shows the command of {' or '.join(TOOLS)}, got --tool {tool}"
            )
        if tool != "torch" and kind != "cuda" and not print_only:
            raise ValueError(f"--tool {tool} needs a CUDA device; --tool torch profiles a CPU, too")
        interprets = kind == "cpu" and not {"triton", "triton_first"}.isdisjoint(
            (implementation, attention)
        )
        if interprets:
            interpret_kernels()

        # Without this the profiler's library prints its start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        import torch

        from cs336_systems.bench.harness import predicted_overflow
        from cs336_systems.bench.worker import search_current_folder
        from cs336_systems.measure.capture import capture, run_steps
        from cs336_systems.measure.ranges import annotate
        from cs336_systems.subjects.profiled import parse_case, prepare

        parsed = parse_case(
            case,
            implementation=implementation,
            mode=mode,
            precision=precision,
            batch=batch,
            context=context,
            attention=attention,
            is_causal=causal,
        )
        if model is not None and not isinstance(parsed, ModelCase):
            raise ValueError(f"--model is an option of models, and {case!r} is an attention shape")

        parts = [
            case,
            mode,
            implementation,
            precision,
            *([attention] if attention != "reference" else []),
        ]
        parts += [
            f"{name}{size}"
            for name, size in (("context", context), ("batch", batch))
            if size is not None
        ]
        parts += [] if causal else ["full"]

        # The trace is named by the case and the options that differ from their defaults.
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join(parts))
        folder = results / get_device_info(kind).slug / "logs" / PROFILES
        if tool in TOOLS:
            _run_vendor_tool(tool, folder / stem, print_only)
            return

        # Refuse a case that cannot fit before allocating anything.
        if model is not None:
            search_current_folder()
        run = RunConfig(scale="handout" if kind == "cuda" else "smoke", device=kind, model=model)
        if why := predicted_overflow(
            predicted_peak_bytes(parsed, implementation, [mode]), get_device_info(kind)
        ):
            typer.echo(f"error: {why}", err=True)
            raise typer.Exit(EXIT_NOTHING_MEASURED)
        typer.echo(
            f"profiling {case} on {kind}: {warmup} warm-up and {steps} profiled "
            f"step{'s' * (steps != 1)}"
        )
        with _ends_in_one_line():
            if tool == "torch":
                check_writable(folder)
            prepared = prepare(parsed, implementation, mode, run)

    path = folder / f"{stem}.trace.json.gz"
    annotated = annotate(prepared.model) if ranges and prepared.model is not None else nullcontext()
    with _ends_in_one_line(path), annotated:
        if tool == "api":  # what nsys and ncu record: the steps alone, with NVTX ranges
            run_steps(prepared.call, kind, warmup, prepared.before)
            torch.cuda.synchronize()
            with torch.cuda.profiler.profile():
                run_steps(prepared.call, kind, steps, prepared.before)
            return
        if warmup and kind == "cpu":  # time the first warm-up step, to say how long the rest takes
            begin = time.perf_counter()
            prepared.before()
            prepared.call()
            seconds = time.perf_counter() - begin
            warmup -= 1
            typer.echo(
                f"the first took {seconds:.1f} s: about {seconds * (warmup + steps):.0f} s for "
                "the others"
            )
        trace = capture(
            prepared.call,
            device=kind,
            num_steps=steps,
            warmup=warmup,
            before=prepared.before,
            path=path,
        )
    show_trace(trace.in_steps(), top)
    if interprets:
        typer.echo(
            "Triton's kernels ran on its interpreter: their times are NumPy's and say nothing of "
            "a GPU"
        )
    typer.echo(f"trace: {path} (open it in https://ui.perfetto.dev)")


@contextmanager
def _ends_in_one_line(trace: Path | None = None) -> Iterator[None]:
    """Turn an error that a valid case can meet on this machine into one line and an exit code.

    These are unsupported cases, wrong results, lack of memory and Ctrl-C. The line names the file
    `trace` if the error left one.
    """
    import torch

    from cs336_systems.bench.spec import Disagreement, Unsupported
    from cs336_systems.measure.allocations import one_out_of_memory_error

    try:
        with one_line_errors(), one_out_of_memory_error(), ends_at_a_signal("interrupted"):
            yield
    except (Unsupported, Disagreement, torch.OutOfMemoryError) as error:
        kept = f"; the trace up to there is {trace}" if trace is not None and trace.exists() else ""
        typer.echo(f"error: {in_one_line(str(error).splitlines()[0])}{kept}", err=True)
        raise typer.Exit(EXIT_NOTHING_MEASURED) from None


def _run_vendor_tool(tool: str, output: Path, print_only: bool) -> None:
    """Run this command again under nsys or ncu, which writes its report to `output`.

    With `print_only` the command line is only printed. ValueError if the tool is not on PATH.
    """
    arguments = [argument for argument in sys.argv[1:] if argument != "--print"]
    report, *options = TOOLS[tool]
    command = [shutil.which(tool) or tool, *options, f"{report}={output}"]
    # The last of two equal options counts, so this --tool replaces the user's.
    command += [sys.executable, "-m", "cs336_systems", *arguments, "--tool", "api"]
    if print_only:
        typer.echo(shlex.join(command))
        return
    if shutil.which(tool) is None:
        raise ValueError(
            f"--tool {tool}: it is not on PATH; install it, or see its command with --print"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    code = subprocess.run(command).returncode
    if code:
        typer.echo(f"error: {tool} ended with exit code {code}", err=True)
        raise typer.Exit(EXIT_NOTHING_MEASURED)
    typer.echo(f"report: {output}")


def show_trace(trace: Trace, top: int) -> None:
    """Print where a profiled step's time goes: by category, by part of the model, and by kernel.

    Times are averages over the profiled steps; `top` kernels are listed.
    """
    from cs336_systems.measure.kernel_names import CATEGORIES
    from cs336_systems.measure.ranges import ATTENTION_PARTS, ROLES

    steps = len(trace.step_ms)
    total = trace.kernel_ms()
    what = "kernels" if trace.on_gpu else "operators"

    def row(table: Table, name: str, **selection: str) -> None:
        ms = [
            trace.kernel_ms(phase=phase, **selection) / steps
            for phase in ("forward", "backward", "optimizer")
        ]
        if sum(ms) > 0:
            table.add_row(
                name,
                *(f"{value:.3f}" for value in (*ms, sum(ms))),
                f"{100 * steps * sum(ms) / total:.1f} %",
            )

    wall = sum(trace.step_ms) / steps
    show_text(
        f"{steps} step{'s' * (steps != 1)}: {wall:.3f} ms of wall clock each, profiled; "
        f"{what} {total / steps:.3f} ms, {len(trace.kernels) // steps} of them; "
        f"busy {trace.busy_ms() / steps:.3f} ms"
    )
    for title, names, by in (
        ("category", CATEGORIES, "category"),
        ("part of the model", [*(f"{role}:" for role in ROLES), *ATTENTION_PARTS], "within"),
    ):
        table = Table(
            title, "forward (ms)", "backward (ms)", "optimizer (ms)", "all (ms)", "share", box=None
        )
        for name in names:
            row(table, name.removesuffix(":"), **{by: name})
        if table.row_count:
            show_table(table)

    # The name is the last column: names of templates have hundreds of characters.
    table = Table("ms a step", "share", "calls a step", "category", what[:-1], box=None)
    for kernel in trace.top_kernels(top):
        share = f"{100 * kernel.ms / total:.1f} %"
        name, calls = printable(kernel.name), f"{kernel.calls / steps:g}"
        table.add_row(f"{kernel.ms / steps:.3f}", share, calls, kernel.category, name)
    show_table(table)
