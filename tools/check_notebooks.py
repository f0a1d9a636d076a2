"""Execute every notebook source headless, as a reader would, and fail on the first cell that raises
in any of them.

A cell that shows an object's name for itself, such as `<Figure size 900x360 with 1 Axes>`, and no
picture or table of it fails, too: a reader sees nothing there. A notebook with blanks (`...` between
`yours` and `to here`) runs twice: as it is, where every check must say "not yet", and with the
answers that are folded behind the checks, where every check must say "right".

    python tools/check_notebooks.py [--write] [NOTEBOOK ...]

Sources are the .py files (jupytext's percent format) of notebooks/, and .ipynb files with no .py
beside them. Each runs in a temporary folder, so what it saves is not left in the repository; two
run side by side. With --write they run one by one, since some show times, and replace the committed
.ipynb files, with fixed cell ids and no timestamps, so that the same outputs give the same bytes.
"""

import copy
import os
import re
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT_S = 300
SIDE_BY_SIDE = 2
BLANK = re.compile(r"^ *# yours:.*\n((?:.*\n)*?)^ *# to here$", re.MULTILINE)
ANSWER = re.compile(r"<summary>Answer</summary>\s*```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHECK = re.compile(r"^check\w*\(", re.MULTILINE)
NAME_ALONE = re.compile(r"\[?<.*>\]?", re.DOTALL)


def notebook_sources(folder: Path) -> list[Path]:
    """The notebooks of `folder`: each .py, and each .ipynb that is not generated from one."""
    paired = [path for path in folder.glob("*.ipynb") if not path.with_suffix(".py").exists()]
    return sorted([*folder.glob("*.py"), *paired])


def shown_names(cell: NotebookNode) -> list[str]:
    """The outputs of `cell` that are an object's name for itself and nothing else: `<Figure ...>`,
    `[<Line2D ...>]`.
    """
    shown = [output["data"] for output in cell.get("outputs", ()) if "data" in output]
    alone = ["".join(data["text/plain"]) for data in shown if set(data) == {"text/plain"}]
    return [text for text in alone if NAME_ALONE.fullmatch(text.strip())]


def blank_of(cell: NotebookNode) -> str:
    """The lines of a code cell's blank with its `...`, "" if the cell has none."""
    blank = BLANK.search(cell["source"]) if cell["cell_type"] == "code" else None
    return blank[1] if blank and re.search(r"(^|= )\.\.\.$", blank[1].strip()) else ""


def fill_blanks(notebook: NotebookNode) -> list[str]:
    """Put each answer in the place of the blank before it, and return the answers.

    ValueError for a blank without an answer, or, in a notebook with blanks, an answer without one.
    """
    answers: list[str] = []
    open_cell = None
    if not any(map(blank_of, notebook.cells)):
        return answers
    for cell in notebook.cells:
        if blank_of(cell):
            if open_cell is not None:
                raise ValueError(f"no answer to the blank of:\n{open_cell['source']}")
            open_cell = cell
        answer = ANSWER.search(cell["source"]) if cell["cell_type"] == "markdown" else None
        if answer is None:
            continue
        if open_cell is None:
            raise ValueError(f"no blank before the answer:\n{answer[1]}")
        blank = blank_of(open_cell)
        indent = blank[: len(blank) - len(blank.lstrip())]
        lines = textwrap.indent(answer[1], indent)
        open_cell["source"] = open_cell["source"].replace(blank, lines)
        answers.append(answer[1])
        open_cell = None
    if open_cell is not None:
        raise ValueError(f"no answer to the blank of:\n{open_cell['source']}")
    return answers


def verdicts(notebook: NotebookNode) -> list[str]:
    """The first line that each check of an executed notebook has printed."""
    return [
        "".join(output.get("text", "") for output in cell.outputs).split("\n")[0]
        for cell in notebook.cells
        if cell.cell_type == "code" and CHECK.search(cell.source)
    ]


def execute(source: Path, write: bool = False) -> str | None:
    """Run all cells of `source` in a fresh kernel; what is wrong, or None when every cell ran and
    shows what it has. A notebook with blanks runs a second time with its answers.
    """
    notebook = jupytext.read(source)
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    filled = copy.deepcopy(notebook)
    try:
        answers = fill_blanks(filled)
    except ValueError as error:
        return str(error)
    error = run_cells(notebook)
    if error is None and answers:
        error = said_otherwise(notebook, "not yet: ", at_least=len(answers)) or run_cells(filled)
        error = error or said_otherwise(filled, "right", at_least=len(answers))
    if write and error is None:
        notebook.metadata.pop("language_info", None)  # it names the Python that happened to run
        jupytext.write(notebook, source.with_suffix(".ipynb"))
    return error


def said_otherwise(notebook: NotebookNode, expected: str, at_least: int) -> str | None:
    """The first verdict of a notebook that does not begin with `expected`; None if all do."""
    said = verdicts(notebook)
    if len(said) < at_least:
        return f"blanks: {at_least}, checks: {len(said)}"
    wrong = [
        f"a check says {line!r}, not {expected!r}" for line in said if not line.startswith(expected)
    ]
    return wrong[0] if wrong else None


def run_cells(notebook: NotebookNode) -> str | None:
    """Run all cells in a fresh kernel; what is wrong, or None."""
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            return str(error).strip()
    for cell in notebook.cells:
        if names := shown_names(cell):
            return f"{cell['id']} shows {names[0]!r} in place of what it is:\n{cell['source']}"
    return None


def main(arguments: list[str]) -> int:
    write = "--write" in arguments
    named = [Path(argument) for argument in arguments if argument != "--write"]
    sources = named or notebook_sources(ROOT / "notebooks")
    if not sources:
        print("error: no notebook in notebooks/", file=sys.stderr)
        return 2
    # Kernels are processes of their own and find the package, installed or not, through the path
    # they inherit.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    for source in sources:
        if not source.is_file():
            print(f"error: no notebook {source}", file=sys.stderr)
            return 2
    # a kernel is a process, which a thread waits for
    with ThreadPoolExecutor(1 if write else SIDE_BY_SIDE) as pool:
        return int(not all(list(pool.map(lambda source: check(source, write), sources))))


def check(source: Path, write: bool) -> bool:
    """Whether `source` ran to its end; says so, and the error if not."""
    start = time.monotonic()
    error = execute(source, write)
    print(
        f"{source.name}: {'ok' if error is None else 'FAILED'} in {time.monotonic() - start:.0f} s",
        flush=True,
    )
    if error is not None:
        print(error, file=sys.stderr, flush=True)
    return error is None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
