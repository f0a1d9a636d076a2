"""What the subcommands share: exit codes, options, one-line errors, and the handling of signals."""

import difflib
import os
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, TextIO

import typer

from cs336_systems.config import FieldError
from cs336_systems.measure.text import in_one_line

EXIT_NOTHING_MEASURED = 1
EXIT_WRONG_ARGUMENT = 2
EXIT_SIGNAL = 128  # plus the signal's number
ENDING = (signal.SIGTERM, signal.SIGHUP)  # end a process by default; a run ends like on Ctrl-C
# How often a PyTorch thread on a CPU polls for the other threads before it sleeps. By default
# libgomp polls for milliseconds. One other busy program is enough to put two threads on one core.
# The polling thread then keeps the other one from working until the scheduler's next tick: calls of
# 0.2 ms take 8 or 40 ms, in every sample. With 1,000 polls they take 0.5 ms, and as long as before
# where each thread has a core.
SPIN_SWITCHES = {"GOMP_SPINCOUNT": "1000"}

ScaleOption = Annotated[
    str, typer.Option(help="auto, tiny, smoke or handout; auto: smoke on CPU, handout on GPU.")
]
ResultsOption = Annotated[Path, typer.Option(help="Folder of the results folders.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
SeedOption = Annotated[int, typer.Option(help="Seed of inputs and, of models, weights.")]
RerunOption = Annotated[
    str, typer.Option(help="Measure again what is finished: none, failed or all.")
]
TimeBudgetOption = Annotated[
    float | None, typer.Option(help="Start no cell after this many seconds.")
]
CommitOption = Annotated[
    str | None, typer.Option(help="Revision that runs, where there is no git.")
]
DirtyOption = Annotated[
    bool | None, typer.Option("--dirty/--clean", help="Whether it has uncommitted changes.")
]


def unknown_problem(name: str) -> str:
    """Return the error message for a problem that `run` does not measure.

    It names the nearest problem, or how a problem of the handout that measures nothing is answered.
    """
    from cs336_systems.bench.spec import measured_problems
    from cs336_systems.handout import COMMANDS, HANDOUT

    if name in COMMANDS:
        return f"{name} measures nothing; it is answered by `cs336-systems {COMMANDS[name]}`"
    if name in HANDOUT:
        if HANDOUT[name].answer == "graded":
            return (
                f"{name} measures nothing; "
                f"it is graded: `cs336-systems grade ADAPTERS --problem {name}`"
            )
        return (
            f"{name} measures nothing; it is answered in writing: see its page, writeup/{name}.md"
        )
    known = list(measured_problems())
    near = [one for one in known if name in one] or difflib.get_close_matches(name, known)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown problem {name!r}; {hint}`cs336-systems list` shows the names"


@contextmanager
def one_line_errors(**shown: str) -> Iterator[None]:
    """Turn a wrong argument, or a command that does not end, into one line and exit code 2.

    The line of a FieldError begins with the option that sets the field: `--top-p must ...` for the
    field `top_p`. `shown` says what it begins with where that is another text: `num_ranks="--ranks"`.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, subprocess.TimeoutExpired) as error:
        message: object = error
        if isinstance(error, FieldError):
            option = shown.get(error.field, "--" + error.field.replace("_", "-"))
            message = f"{option} {error.problem}"
        typer.echo(f"error: {in_one_line(message)}", err=True)
        raise typer.Exit(EXIT_WRONG_ARGUMENT) from None


@contextmanager
def out_of_memory_in_one_line() -> Iterator[None]:
    """Turn an out-of-memory error of a GPU or the host into one line and exit code 1."""
    import torch

    from cs336_systems.measure.allocations import one_out_of_memory_error

    try:
        with one_out_of_memory_error():
            yield
    except torch.OutOfMemoryError as error:
        typer.echo(
            f"error: out of memory, take a smaller batch, context or model: {in_one_line(error)}",
            err=True,
        )
        raise typer.Exit(EXIT_NOTHING_MEASURED) from None


@contextmanager
def warnings_as_lines() -> Iterator[list[type[Warning]]]:
    """Print each warning as one line on stderr, without its place in the code.

    The list that is yielded holds the categories of the warnings so far.
    """
    told: list[type[Warning]] = []

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        told.append(category)
        typer.echo(f"warning: {in_one_line(message)}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield told


def check_writable(folder: Path, files: Iterable[Path] = ()) -> None:
    """Raise OSError if `folder`, or one of the `files` that exist, cannot be written.

    Commands call it before they measure anything. The folder is created.
    """
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for path in filter(os.path.lexists, files):
            with open(path, "ab"):
                pass
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def ends_at_a_signal(
    message: str | Callable[[], str], numbers: Sequence[int] = ENDING
) -> Iterator[None]:
    """Turn Ctrl-C or one of the signals `numbers` into a message and exit code 128 + its number.

    Every `finally` inside has run before the message is printed. A function as `message` is called
    at that time; an empty text is not printed.
    """
    received = int(signal.SIGINT)

    def interrupt(signal_number: int, _: FrameType | None) -> None:
        nonlocal received
        received = signal_number
        raise KeyboardInterrupt

    # An ignored signal stays ignored, such as a hang-up under nohup.
    previous = {
        n: signal.signal(n, interrupt) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN
    }
    try:
        yield
    except KeyboardInterrupt:
        if said := message if isinstance(message, str) else message():
            typer.echo(said, err=True)
        raise typer.Exit(EXIT_SIGNAL + received) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Set SPIN_SWITCHES in `environment`, so that its processes' waiting threads sleep early.

    A value that the user has set for libgomp or for OpenMP stays.
    """
    if not environment.keys() & {*SPIN_SWITCHES, "OMP_WAIT_POLICY"}:
        environment.update(SPIN_SWITCHES)
