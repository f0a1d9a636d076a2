"""Tables and paragraphs on a terminal of any width: no name is cut and no word broken.

    show_table(table)        # a rich table; its rows become paragraphs on a too narrow terminal
    show_text("    a line")  # wrapped between words, below its own indentation

Output to a file or to another program is not wrapped: there a row is a line.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

PADDING = 2  # columns of a terminal, left and right of a cell
INDENT = "    "
UNBOUNDED = 10_000  # columns, where there is no terminal


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is, or None if stdout is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show_table(table: Table) -> None:
    """Print `table`, whose cells are plain strings, with every word whole."""
    for line in table_lines(table, terminal_width()):
        print(line)


def show_text(text: str) -> None:
    """Print `text` and break its lines between words at the terminal's width."""
    width = terminal_width()
    for line in text.splitlines() or [""]:
        print(line if width is None else wrapped(line, width))


def wrapped(line: str, width: int, further: str = "") -> str:
    """Return `line` broken between words into lines of at most `width`; longer words stay whole.

    The lines after the first have the first one's indentation and then `further`.
    """
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=indent + further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table_lines(table: Table, width: int | None) -> list[str]:
    """Return the lines of `table` for a terminal of `width` columns; None stands for any width.

    If the longest words of a row do not fit beside each other, each row becomes a paragraph.
    """
    heads = [str(column.header) for column in table.columns]
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    if not columns:
        return []

    # Each column needs at least its longest word and wants its longest text.
    texts = [[head, *cells] for head, cells in zip(heads, columns)]
    least = [
        max(cell_len(word) for text in column for word in text.split() or [""]) for column in texts
    ]
    wanted = [max(map(cell_len, column)) for column in texts]
    room = UNBOUNDED if width is None else width - PADDING * len(columns)
    if sum(least) > room:
        assert width is not None
        return [line for row in zip(*columns) for line in _paragraph(heads, row, width)]
    for column, column_width in zip(table.columns, _widths(least, wanted, room)):
        column.width = column_width
        column.overflow = "fold"  # never takes effect, since the longest word has room

    # Cells are plain text: `[x]` is no style and `:a:` no emoji.
    console = Console(
        width=UNBOUNDED if width is None else width, markup=False, emoji=False, highlight=False
    )
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def _widths(least: Sequence[int], wanted: Sequence[int], room: int) -> list[int]:
    """Return column widths between `least` and `wanted` whose sum is at most `room`.

    The columns that lack the least are widened first, each by at most an equal part of the rest.
    """
    widths, spare = list(least), room - sum(least)
    for place, index in enumerate(
        sorted(range(len(least)), key=lambda index: wanted[index] - least[index])
    ):
        more = min(wanted[index] - least[index], spare // (len(least) - place))
        widths[index] += more
        spare -= more
    return widths


def _paragraph(heads: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """Return a table row as lines: its first cell, then an indented `head: cell` for the others.

    Empty cells are left out.
    """
    named = [f"{head}: {cell}" if head else cell for head, cell in zip(heads, row) if cell]
    lines = [named[0], *(INDENT + text for text in named[1:])] if named else []
    return [part for line in lines for part in wrapped(line, width, INDENT).splitlines()]
