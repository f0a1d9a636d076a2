"""Typer classes that report a usage error in one line with exit code 2 and show flags as flags.

app = typer.Typer(cls=Group)
app.command(cls=Command)(run)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from cs336_systems.commands.shared import EXIT_WRONG_ARGUMENT, ends_at_a_signal, one_line_errors
from cs336_systems.measure.text import in_one_line

# click's UsageError. Typer exports only this subclass; some versions take it from click, others
# carry their own copy.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


class _Checked:
    """Checks text arguments before they are converted, and shows flags without a type in help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for parameter in self.params:  # type: ignore[attr-defined]
            _hide_type_of_flag(parameter)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        _hide_type_of_flag(option)
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments once to check every text, then parse them as Typer does."""
        try:
            given, *_ = self.make_parser(ctx).parse_args(  # type: ignore[attr-defined]
                args=list(args)
            )
        except USAGE_ERROR as error:
            error.ctx = error.ctx or ctx  # the command whose help the message names
            raise
        with one_line_errors():
            for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
                for text in _texts(given.get(parameter.name)):
                    check_text(_name(parameter), text)
        return super().parse_args(ctx, args)  # type: ignore[misc]


class Command(_Checked, TyperCommand):
    """A command that ends with "interrupted" on Ctrl-C or a signal if it says nothing itself."""

    def invoke(self, ctx: Any) -> Any:
        with ends_at_a_signal("interrupted"):
            return super().invoke(ctx)


class Group(_Checked, TyperGroup):
    """A group of commands: without a command it shows its help, and it reports usage errors."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **options: Any
    ) -> Any:
        """Run the command; as a program, print a usage error in one line and exit."""
        try:
            code = super().main(args, standalone_mode=False, **options)
        except USAGE_ERROR as error:
            if not standalone_mode:
                raise
            hint = "" if error.ctx is None else f" (see `{error.ctx.command_path} --help`)"
            typer.echo(f"error: {in_one_line(error.format_message()).rstrip('.')}{hint}", err=True)
            code = EXIT_WRONG_ARGUMENT
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def check_text(name: str, text: str) -> None:
    """Raise ValueError if the argument `name` has a `text` that is empty or cannot be encoded.

    An empty path would be the current folder. Bytes that are no text arrive as halves of surrogate
    pairs, which no file, terminal or tokenizer takes.
    """
    if not text:
        raise ValueError(f"{name} must not be empty, got ''")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{name} must be text in {sys.getfilesystemencoding()}, got {ascii(text)}"
        ) from None


def _texts(given: Any) -> Iterator[str]:
    """Yield the strings in what the parser found for a parameter: one, several, or none."""
    for value in given if isinstance(given, list | tuple) else [given]:
        if isinstance(value, str):
            yield value


def _name(parameter: Any) -> str:
    """Return the name of a parameter as its user types it: --checkpoint-every, ADAPTERS."""
    return parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()


def _hide_type_of_flag(parameter: Any) -> None:
    """Leave the type of a flag out of the help text."""
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
