"""`cs336-systems trace module:function`: the page of a Triton kernel that a function launches.

cs336-systems trace cs336_systems.learning.examples:flash_forward
cs336-systems trace mine:test_add --output add.html     # mine.py, in the current folder

Kernels run in Triton's interpreter, on a CPU.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cs336_systems.commands.shared import check_writable, one_line_errors
from cs336_systems.measure.text import printable, write_whole


def trace_kernel(
    function: Annotated[
        str, typer.Argument(help="module:function without arguments that launches the kernel.")
    ],
    *,
    launch: Annotated[int, typer.Option(min=1, help="Which of its launches, from 1.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="The file to write; by default the kernel's name and .html.")
    ] = None,
) -> None:
    """Record a Triton kernel in the interpreter: a page that steps through its programs.

    It shows every load and store on its tensor and what is wrong: accesses out of bounds, elements
    stored by two programs or never. The page opens in any browser, without a network.
    """
    from cs336_systems.device import interpret_kernels
    from cs336_systems.stepper import finding_text, page_of, trace

    with one_line_errors():
        if output is not None:
            check_writable(output.parent, [output])
        interpret_kernels()
        call = load_function(function)
        ended = ""
        with trace(most_launches=launch) as recorded:
            try:
                call()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code raises anything
                ended = f"{type(error).__name__}: {error}"
        if len(recorded.launches) < launch:
            count = len(recorded.launches)
            said = "launches no Triton kernel"
            if count:
                said = f"launches Triton kernels {count} time{'s'[: count - 1]}, not {launch}"
            raise ValueError(f"{function} {said}" + (f", and ends with {ended}" if ended else ""))

        recording = recorded.launches[launch - 1]
        path = output or Path(f"{recording.name}.html")
        page = page_of(recording, title=function)
        write_whole(path, page)

    width, height, depth = recording.grid
    programs = f"{width * height * depth} programs, {len(recording.steps):,} steps"
    typer.echo(printable(f"{recording.name}: {programs}, {len(page) / 2**20:.2f} MiB in {path}"))
    for finding in recording.findings:
        typer.echo(printable(finding_text(recording, finding)))
    with one_line_errors():
        if ended:
            raise ValueError(f"{function} ends with {ended}")


def load_function(spec: str) -> Callable[[], Any]:
    """Return the function "module:function"; its module may be a file in the current folder.

    ValueError if there is none, or if it is a kernel itself or needs arguments.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name.isidentifier():
        raise ValueError(f"FUNCTION must be module:function, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # Importing runs the user's code, which may raise anything.
        raise ValueError(
            f"cannot import {module_name!r} ({type(error).__name__}: {error})"
        ) from error

    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"module {module_name!r} has no function {name!r}")
    if hasattr(function, "fn") and hasattr(function, "run"):
        raise ValueError(f"{spec} is a kernel: name a function without arguments that launches it")
    if not callable(function):
        raise ValueError(f"{spec} is no function: {type(function).__name__}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{spec} must take no arguments: {error}") from None
    return function
