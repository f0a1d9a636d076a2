"""What every command has in common: its help, one line for a mistake in the arguments, and words
that stay whole.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table

from cs336_systems.bench.spec import experiments, measured_problems, outlines
from cs336_systems.cli import app
from cs336_systems.commands.terminal import table_lines, wrapped
from cs336_systems.commands.usage import Command, Group
from tests.command_line import ROOT, assert_refused, invoke

NOT_TEXT = "\udcff\udcfe"  # as Python hands over the bytes ff fe


def every_command(
    group: Any = None, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command with the words that call it."""
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, (*path, name))
        yield (*path, name), command


COMMANDS = dict(every_command())
TAKING_TEXT = [
    (path, parameter)
    for path, command in COMMANDS.items()
    for parameter in command.params
    if not getattr(parameter, "is_flag", False)
]
TEXT_IDS = [f"{' '.join(path)} {parameter.name}" for path, parameter in TAKING_TEXT]


def call_with(path: tuple[str, ...], parameter: Any, text: str) -> Any:
    """The command with `text` for one parameter, and for the arguments before it something."""
    before = [one for one in COMMANDS[path].params if one.param_type_name == "argument"]
    if parameter.param_type_name == "option":
        return invoke(*path, f"{parameter.opts[0]}={text}")
    return invoke(*path, *("x" for _ in before[: before.index(parameter)]), text)


def test_every_command_checks_its_texts():
    """A command that is registered in Typer's own way would take an empty path for the current
    folder.
    """
    assert len(COMMANDS) == 14
    assert all(isinstance(command, Command | Group) for command in COMMANDS.values())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_shows_a_flag_as_a_flag(path):
    """Behind --all stood <bool>, as if it took a value."""
    shown = invoke(*path, "--help")
    assert shown.exit_code == 0 and "--help" in shown.stdout and "bool" not in shown.stdout


def test_the_help_groups_the_commands():
    """Twelve stood in one list."""
    shown = invoke()
    assert shown.exit_code == 0 and shown.stdout == invoke("--help").stdout
    panels = ["Begin", "Train", "Measure", "Grade", "Develop kernels"]
    places = [shown.stdout.index(f"─ {panel} ─") for panel in panels]
    assert places == sorted(places) and "─ Commands ─" not in shown.stdout


def test_list_and_help_do_not_wait_for_pytorch(tmp_path):
    """`list` imported every experiment, and with them PyTorch."""
    script = f"""
import sys
from cs336_systems.cli import app
for arguments in {[["list"], ["--help"], ["--version"], *([*path, "--help"] for path in COMMANDS)]!r}:
    app(arguments, standalone_mode=False)
    assert "torch" not in sys.modules, arguments
"""
    subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL
    )


def test_an_outline_says_what_the_experiment_says():
    assert list(outlines()) == list(experiments())
    for name, outline in outlines().items():
        experiment = experiments()[name]
        assert (outline.title, outline.is_measured) == (
            experiment.title,
            name in measured_problems(),
        )
        assert outline.order == experiment.order


@pytest.mark.parametrize(("path", "parameter"), TAKING_TEXT, ids=TEXT_IDS)
def test_an_empty_text_is_refused_by_name(path, parameter, tmp_path, monkeypatch):
    """`train --out ""` trained into the current folder."""
    monkeypatch.chdir(tmp_path)
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
    assert_refused(call_with(path, parameter, ""), f"error: {name} must not be empty, got ''")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("path", "parameter"), TAKING_TEXT, ids=TEXT_IDS)
def test_bytes_that_are_no_text_are_refused_by_name(path, parameter, tmp_path, monkeypatch):
    """`generate --prompt` ended in a traceback of the encoder."""
    monkeypatch.chdir(tmp_path)
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
    message = f"error: {name} must be text in utf-8, got '\\udcff\\udcfe'"
    assert_refused(call_with(path, parameter, NOT_TEXT), message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nothing", "nothing"),
        ("run --nothing", "--nothing"),
        ("run --seed many", "--seed"),
        ("run --seed", "--seed"),
        ("generate", "--out"),
        ("profile", "case"),
        ("compare one", "target"),
        ("list more", "more"),
        ("tune nothing", "nothing"),
        ("profile small --steps 0", "--steps"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(arguments, message):
    """Typer draws a box of four lines."""
    result = invoke(*arguments.split())
    assert_refused(result, message)
    assert "--help`)" in result.stderr


# Words stay whole


def some_table(heads: list[str], rows: list[list[str]]) -> Table:
    table = Table(*heads, box=None)
    for row in rows:
        table.add_row(*row)
    return table


WORDS = st.text("abcdefgh:,<>_[]/ ", max_size=60).map(lambda text: " ".join(text.split()))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 5), st.integers(1, 200))
def test_a_table_keeps_every_word_at_any_width(data, num_columns, width):
    """`profile` cut the names of kernels and the heads of its columns at 80 columns."""
    rows = data.draw(
        st.lists(
            st.lists(WORDS, min_size=num_columns, max_size=num_columns), min_size=1, max_size=4
        )
    )
    heads = data.draw(st.lists(WORDS.filter(bool), min_size=num_columns, max_size=num_columns))
    for limit in (width, None):
        lines = table_lines(some_table(heads, rows), limit)
        shown = " ".join(lines).replace(":", " ").split()
        for word in " ".join(" ".join(row) for row in rows).replace(":", " ").split():
            assert word in shown, (word, lines)
        longest = max(
            (len(word) for row in [heads, *rows] for cell in row for word in cell.split()),
            default=0,
        )
        assert limit is None or max(map(len, lines), default=0) <= max(limit, longest + 9)


def test_a_table_too_wide_for_the_terminal_becomes_paragraphs():
    rows = [["1.5", "3", "void at::native::kernel<4>"], ["0.5", "1", "x"]]
    table = some_table(["ms", "calls a step", "kernel"], rows)
    assert table_lines(table, 30) == [
        "ms: 1.5", "    calls a step: 3", "    kernel: void", "        at::native::kernel<4>",
        "ms: 0.5", "    calls a step: 1", "    kernel: x",
    ]  # fmt: skip
    assert table_lines(table, None) == [
        " ms   calls a step  kernel", " 1.5  3             void at::native::kernel<4>", " 0.5  1             x",
    ]  # fmt: skip


def test_a_line_is_wrapped_below_its_indentation():
    assert wrapped("    one two three", 12) == "    one two\n    three"


def test_commands_print_tables_in_one_place():
    """A table that rich prints by itself cuts words where the terminal is narrow."""
    for file in Path(ROOT, "cs336_systems", "commands").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        # sweeps: a progress bar
        assert "Console" not in text or file.name in ("terminal.py", "sweeps.py"), file
