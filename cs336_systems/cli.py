"""The command line `cs336-systems`: its commands, their panels in the help, and its entry point.

The commands are list, run, report, profile, memory, train, generate, grade, doctor, tune, trace,
compare and branches. A wrong argument is one line on stderr and exit code 2. A run in which nothing could
be measured exits 1. Ctrl-C exits 130 and loses only the cell it interrupted, and so does a
termination or a hang-up (143, 129).
"""

import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from cs336_systems import __version__
from cs336_systems.commands.branches import branches
from cs336_systems.commands.compare import compare
from cs336_systems.commands.doctor import doctor
from cs336_systems.commands.generate import generate
from cs336_systems.commands.grade import grade
from cs336_systems.commands.memory import memory
from cs336_systems.commands.profile import profile
from cs336_systems.commands.report import list_problems, report
from cs336_systems.commands.run import run
from cs336_systems.commands.shared import EXIT_WRONG_ARGUMENT
from cs336_systems.commands.trace_kernel import trace_kernel
from cs336_systems.commands.train import train
from cs336_systems.commands.tune import tune
from cs336_systems.commands.usage import Command, Group
from cs336_systems.measure.text import in_one_line

app = typer.Typer(
    cls=Group,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help="Reference implementation and lab for the systems half of building language models.",
)


@app.callback()
def options(
    *,
    version: Annotated[bool, typer.Option("--version", help="Say which version this is.")] = False,
) -> None:
    if version:
        typer.echo(f"cs336-systems {__version__}")
        raise typer.Exit


# Panels of the help, in the order in which a user needs the commands.
PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Begin": {"list": list_problems, "doctor": doctor},
    "Train": {"train": train, "generate": generate},
    "Measure": {"run": run, "report": report, "profile": profile, "memory": memory},
    "Grade": {"grade": grade},
    "Develop kernels": {"trace": trace_kernel, "compare": compare, "branches": branches},
}
for panel, commands in PANELS.items():
    for name, command in commands.items():
        app.command(name, cls=Command, rich_help_panel=panel)(command)
app.add_typer(tune, name="tune", rich_help_panel="Develop kernels")


def main(run_app: Callable[[], None] = app) -> None:
    """Run the command line: the entry point of the console script.

    A UserWarning is printed as one line. A package that is not installed is one line on stderr,
    with the command that installs it, and exit code 2.
    """
    format_warning = warnings.formatwarning

    def briefly(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if not issubclass(category, UserWarning):
            return format_warning(message, category, filename, lineno, line)
        return f"warning: {in_one_line(message)}\n"

    warnings.formatwarning = briefly
    try:
        run_app()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise  # a module of this package is missing: our own mistake
        typer.echo(
            f"error: {error.name} is not installed: pip install {error.name.partition('.')[0]}",
            err=True,
        )
        raise SystemExit(EXIT_WRONG_ARGUMENT) from None
