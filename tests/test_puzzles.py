"""The puzzles of notebooks/s1_triton.py: answers pass, blanks and known-wrong solutions get hints."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("jupytext")
pytest.importorskip("nbclient")
if torch.cuda.is_available():
    pytest.skip("kernels run compiled where there is a GPU", allow_module_level=True)

import jupytext
import triton
import triton.language as tl

from cs336_systems.learning import examples
from cs336_systems.learning.judging import MOST_STATEMENTS, judge
from cs336_systems.learning.puzzles import PUZZLES, check_puzzle, show_launch, show_puzzle
from tests.puzzle_mutants import MUTANTS
from tools import check_notebooks

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "s1_triton.py"
CHECKED = re.compile(r'^check_puzzle\("(\w+)", (\w+)\)$', re.MULTILINE)


class Sheet:
    """One puzzle of the notebook: its cell with the blank, the answer, and its kernel's name."""

    def __init__(self, source: str, blank: str, answer: str, kernel: str) -> None:
        self.source, self.blank, self.answer, self.kernel = source, blank, answer, kernel

    def filled(self, answer: str) -> str:
        """The cell with `answer`, which is not indented, in place of the blank."""
        indent = self.blank[: len(self.blank) - len(self.blank.lstrip())]
        lines = "".join(f"{indent}{line}\n" for line in answer.splitlines())
        return self.source.replace(self.blank, lines)


def read_sheets() -> dict[str, Sheet]:
    """The notebook's puzzles by name."""
    cells = jupytext.read(NOTEBOOK).cells
    answers = check_notebooks.fill_blanks(jupytext.read(NOTEBOOK))
    blanks = [cell for cell in cells if check_notebooks.blank_of(cell)]
    names = [match for cell in cells for match in CHECKED.findall(cell.source)]
    return {
        name: Sheet(cell.source, check_notebooks.blank_of(cell), answer, kernel)
        for cell, answer, (name, kernel) in zip(blanks, answers, names, strict=True)
    }


SHEETS = read_sheets()


@pytest.fixture
def kernel_of(tmp_path, monkeypatch):
    """A function that makes the kernel of a cell: the interpreter wants its source in a file."""

    def make(source: str, name: str) -> Any:
        path = tmp_path / "solution.py"
        path.write_text(f"import triton\nimport triton.language as tl\n\n\n{source}\n")
        spec = importlib.util.spec_from_file_location("solution", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "solution", module)
        spec.loader.exec_module(module)
        return getattr(module, name)

    return make


def test_the_notebook_has_every_puzzle_in_order():
    assert list(SHEETS) == list(PUZZLES) and len(SHEETS) == 12


@pytest.mark.parametrize("name", SHEETS)
def test_the_answer_is_right_and_the_blank_is_not_yet(name, kernel_of, capsys):
    sheet = SHEETS[name]
    check_puzzle(name, kernel_of(sheet.source, sheet.kernel))
    check_puzzle(name, kernel_of(sheet.filled(sheet.answer), sheet.kernel))
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "not yet: the blank is still there: write your lines in place of `...`",
        "right",
    ]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_wrong_solution_is_told_its_cause(name, kernel_of):
    mutant = MUTANTS[name]
    sheet = SHEETS[mutant.puzzle]
    solution = sheet.filled(mutant.answer(sheet.answer))
    hint = judge(PUZZLES[mutant.puzzle], kernel_of(solution, sheet.kernel)).hint
    assert mutant.hint in hint


def test_every_puzzle_has_three_known_wrong_solutions():
    for name in PUZZLES:
        assert sum(mutant.puzzle == name for mutant in MUTANTS.values()) >= 3, name


@triton.jit
def adds_pointers(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, x_ptr + out_ptr)


@triton.jit
def other_arguments(x_ptr):
    tl.load(x_ptr)


@triton.jit
def stores_nothing(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.load(x_ptr + tl.arange(0, BLOCK))


def not_a_kernel(x_ptr, out_ptr, BLOCK):
    pass


@pytest.mark.parametrize(
    ("kernel", "hint"),
    [
        (adds_pointers, "line 3 of the kernel: "),
        (other_arguments, "TypeError: other_arguments() "),
        (stores_nothing, "out[0] is nan, but expected "),
        (not_a_kernel, "the kernel needs @triton.jit above its def"),
        (3, "the kernel needs @triton.jit above its def"),
    ],
    ids=["pointers", "arguments", "nothing", "plain", "number"],
)
def test_whatever_a_reader_writes_is_a_line_and_no_traceback(kernel, hint, capsys):
    check_puzzle("load", kernel)
    said = capsys.readouterr().out
    assert said.startswith(f"not yet: {hint}") and said.count("\n") == 1


def test_an_unknown_puzzle_is_named():
    with pytest.raises(ValueError, match="puzzle must be one of load, mask, .*, got 'laod'"):
        check_puzzle("laod", adds_pointers)


def test_right_kernels_are_far_from_the_limit_of_statements(kernel_of, monkeypatch):
    """A launch with more is taken for one that does not end."""
    monkeypatch.setattr("cs336_systems.learning.judging.MOST_STATEMENTS", MOST_STATEMENTS // 4)
    for name, sheet in SHEETS.items():
        verdict = judge(PUZZLES[name], kernel_of(sheet.filled(sheet.answer), sheet.kernel))
        assert verdict.hint == "", name


# Pictures


def test_a_picture_is_a_figure_and_a_page(tmp_path, monkeypatch, capsys):
    displayed = []
    monkeypatch.setattr("IPython.display.display", displayed.append)
    show_launch(examples.add_without_masks, tmp_path)
    figure, link = displayed
    assert figure.data.startswith(b"\x89PNG") and len(figure.data) < 40_000
    assert "add_kernel loads and stores. line 21: load of 56 elements outside x_ptr" in figure.alt
    assert f'href="{tmp_path.as_posix()}/add_without_masks.html"' in link.data
    assert (tmp_path / "add_without_masks.html").stat().st_size > 20_000


def test_without_a_launch_there_is_no_picture(tmp_path, capsys):
    show_puzzle("load", not_a_kernel, tmp_path)
    assert capsys.readouterr().out == "no picture yet: the kernel has not run\n"
    assert not list(tmp_path.iterdir())


def test_the_picture_of_a_kernel_that_raises_goes_up_to_there(tmp_path, monkeypatch):
    monkeypatch.setattr("IPython.display.display", lambda shown: None)
    show_puzzle("load", adds_pointers, tmp_path)
    assert "stopped: " in (tmp_path / "load.html").read_text()
