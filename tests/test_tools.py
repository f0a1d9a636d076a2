"""The scripts that the Makefile runs: the course's tests against our adapters, notebooks, the check
of the Python.
"""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from cs336_systems.book.lookups import Page
from cs336_systems.book.pages import Book
from cs336_systems.notebook import check
from tools import course_tests

ROOT = Path(__file__).resolve().parent.parent


COURSE_TEST = """
import importlib.metadata
import cs336_basics, cs336_systems
from .adapters import get_answer
from .common import EXPECTED

def test_answer():
    assert get_answer() == EXPECTED
    assert cs336_basics.VERSION == importlib.metadata.version("cs336-basics") == "26.1.4"
    assert cs336_systems.__doc__ == "hers"
"""


LAYOUTS = ["cs336-basics/cs336_basics", "cs336_basics"]


@pytest.fixture
def checkout(request, tmp_path: Path) -> Path:
    """A checkout laid out like the course's: tests, their adapters, cs336_basics and a
    cs336_systems to shadow ours.
    """
    root = tmp_path / "assignment2-systems"
    basics = root / getattr(request, "param", LAYOUTS[0])
    for folder in (root / "tests", basics, root / "cs336_systems"):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "tests/__init__.py").write_text("")
    (root / "tests/adapters.py").write_text("def get_answer():\n    raise NotImplementedError\n")
    (root / "tests/common.py").write_text("EXPECTED = 42\n")
    (root / "tests/test_answer.py").write_text(COURSE_TEST)
    (root / "cs336_systems/__init__.py").write_text('"""not the course\'s"""\n')
    (basics / "__init__.py").write_text(
        "import importlib.metadata\nVERSION = importlib.metadata.version('cs336_basics')\n"
    )
    (basics.parent / "pyproject.toml").write_text(
        '[project]\nname = "cs336-basics"\nversion = "26.1.4"\n'
    )
    return root


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """A file of adapters in a project with a package of its own."""
    path = tmp_path / "hers/tests/adapters.py"
    for folder in (path.parent, tmp_path / "hers/cs336_systems"):
        folder.mkdir(parents=True)
    (tmp_path / "hers/cs336_systems/__init__.py").write_text('"""hers"""\n')
    path.write_text("def get_answer():\n    return 42\n")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("checkout", LAYOUTS, indirect=True)
def test_course_tests_run_against_our_adapters_and_leave_the_checkout_alone(
    checkout, adapters, capfd
):
    before = contents(checkout)
    assert course_tests.run(checkout, adapters) == 0
    assert "1 passed" in capfd.readouterr().out
    assert contents(checkout) == before


def test_course_tests_name_what_is_missing_and_run_the_rest(checkout, adapters, capfd):
    (checkout / "tests/test_ddp.py").write_text("from .adapters import get_answer, get_ddp\n")
    (checkout / "tests/test_other.py").write_text("import no_such_package\n")
    assert course_tests.run(checkout, adapters) != 0
    output = capfd.readouterr().out
    for said in ("cannot import name 'get_ddp'", "No module named 'no_such_package'", "1 passed"):
        assert said in output


def test_course_tests_run_no_tests_of_the_adapters_project(checkout, adapters, capfd):
    """All of this repository's tests ran with the course's."""
    (adapters.parent / "test_own.py").write_text("def test_own():\n    raise AssertionError\n")
    assert course_tests.run(checkout, adapters) == 0
    assert "1 passed" in capfd.readouterr().out


def test_course_tests_find_what_lies_beside_the_adapters(checkout, adapters):
    """As `grade` does."""
    (adapters.parent / "beside.py").write_text("ANSWER = 42\n")
    adapters.write_text("from beside import ANSWER\ndef get_answer():\n    return ANSWER\n")
    assert course_tests.run(checkout, adapters) == 0


def test_course_tests_import_her_modules_and_her_basics(checkout, adapters):
    """They ran with the course's `cs336_basics`, whose layers are not those that her wrappers look
    for.
    """
    basics = adapters.parent.parent / "cs336_basics"
    basics.mkdir()
    (basics / "__init__.py").write_text("VERSION = '26.1.4'\nANSWER = 42\n")
    (basics.parent / "pyproject.toml").write_text('[project]\nname = "hers"\nversion = "26.1.4"\n')
    (adapters.parent / "beside.py").write_text("from cs336_basics import ANSWER\n")
    adapters.write_text("from .beside import ANSWER\ndef get_answer():\n    return ANSWER\n")
    assert course_tests.run(checkout, adapters) == 0


def test_course_tests_do_not_serve_our_package_for_hers(checkout, adapters, capfd):
    (adapters.parent.parent / "cs336_systems/__init__.py").unlink()
    (adapters.parent.parent / "cs336_systems").rmdir()
    assert course_tests.run(checkout, adapters) != 0
    assert "has no folder cs336_systems" in capfd.readouterr().out


def test_course_tests_get_a_free_port(checkout, adapters):
    """Two runs on one machine met at the fixed one."""
    (checkout / "tests/common.py").write_text(
        'import os\nos.environ["MASTER_PORT"] = "12390"\nEXPECTED = 42\n'
    )
    with (checkout / "tests/test_answer.py").open("a") as test:
        test.write("    import os\n    assert os.environ['MASTER_PORT'] not in ('', '12390')\n")
    assert course_tests.run(checkout, adapters) == 0


def test_course_tests_end_at_the_time_limit(checkout, adapters, capfd):
    adapters.write_text("import time\ndef get_answer():\n    time.sleep(600)\n")
    assert course_tests.run(checkout, adapters, time_limit_s=3.0) == 124
    assert "error: the tests have not ended after 3 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        (".", "is not a folder: give DIR=path/to/assignment2-systems"),
        ("tests", "has no tests/ folder: it is not a checkout of the assignment"),
        ("cs336", "has no cs336_basics package in any of cs336-basics/cs336_basics, cs336_basics"),
    ],
)
def test_course_tests_refuse_a_folder_that_is_no_checkout(
    checkout, adapters, remove, message, capsys
):
    for path in [checkout] if remove == "." else checkout.glob(f"{remove}*"):
        path.rename(checkout.parent / f"removed-{path.name}")
    with pytest.raises(course_tests.CourseError, match=message):
        course_tests.run(checkout, adapters)
    assert course_tests.main([str(checkout)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.fixture
def check_notebooks() -> ModuleType:
    pytest.importorskip("jupytext")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    return importlib.import_module("tools.check_notebooks")


def test_a_notebook_runs_and_finds_the_package_and_one_that_raises_fails_the_check(
    check_notebooks, tmp_path, capsys
):
    good = "# %% [markdown]\n# # Title\n# %%\nimport cs336_systems\nopen('left', 'w').close()\n"
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "bad.py").write_text("# %%\nvalue = 1\n# %%\nassert value == 2, 'wrong value'\n")
    assert check_notebooks.main([str(tmp_path / "good.py")]) == 0
    assert capsys.readouterr().out.startswith("good.py: ok in ")
    assert check_notebooks.main([str(tmp_path / "bad.py")]) == 1
    output = capsys.readouterr()
    assert output.out.startswith("bad.py: FAILED in ") and "wrong value" in output.err
    assert {path.name for path in tmp_path.iterdir()} == {"good.py", "bad.py"}


def test_a_figure_that_is_shown_as_its_name_fails_the_check(check_notebooks, tmp_path, capsys):
    """A figure that pyplot does not know, returned by a cell, was `<Figure size ...>` in the
    notebook, and passed.
    """
    make = "# %%\nfrom matplotlib.figure import Figure\nfigure = Figure()\nfigure.subplots()\n"
    show = "from cs336_systems.notebook import show\nshow(figure, 'axes')\n{'a': 1}\n"
    (tmp_path / "shown.py").write_text(make + show)
    (tmp_path / "named.py").write_text(make + "figure\n")
    assert check_notebooks.main([str(tmp_path / "shown.py"), str(tmp_path / "named.py")]) == 1
    output = capsys.readouterr()
    assert "shown.py: ok" in output.out and "named.py: FAILED" in output.out
    assert "cell-0 shows '<Figure size 640x480 with 1 Axes>' in place of what it is" in output.err


CELLS = """\
# %%
from cs336_systems.notebook import check
def double(x):
    # yours: twice x
    result = ...
    # to here
    return result
# %%
check((double(3), 6, "add it to itself"))
# %% [markdown]
# <details>
# <summary>Answer</summary>
#
# ```python
# result = ANSWER
# ```
# </details>
"""


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        (("ANSWER", "x + x"), None),
        (
            ("ANSWER", "x * x"),
            "a check says 'not yet: 9, but expected 6. add it to itself', not 'right'",
        ),
        (("(double(3), 6", "(6, 6"), "a check says 'right', not 'not yet: '"),
        (("<summary>Answer", "<summary>Hint"), "no answer to the blank of"),
        (("check((", "print(("), "blanks: 1, checks: 0"),
    ],
    ids=["right", "wrong answer", "no blank is seen", "no answer", "no check"],
)
def test_a_notebook_with_blanks_runs_with_them_and_with_answers(
    check_notebooks, replaced, said, tmp_path, capsys
):
    cells = CELLS.replace(*replaced).replace("ANSWER", "x + x")
    (tmp_path / "blanks.py").write_text(cells)
    assert check_notebooks.main([str(tmp_path / "blanks.py")]) == (said is not None)
    output = capsys.readouterr()
    assert said is None or said in output.err


def test_an_answer_without_a_blank_fails_beside_others(check_notebooks, tmp_path, capsys):
    cells = CELLS.replace("ANSWER", "x + x")
    without = cells.replace("    result = ...\n", "    result = x + x\n")
    (tmp_path / "blanks.py").write_text(cells + "\n" + without)
    assert check_notebooks.main([str(tmp_path / "blanks.py")]) == 1
    assert "no blank before the answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "executed", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_no_committed_notebook_shows_a_name_in_place_of_a_picture(check_notebooks, executed):
    """Both timelines of s3_memory were the names of their figures."""
    cells = check_notebooks.jupytext.read(executed).cells
    assert [name for cell in cells for name in check_notebooks.shown_names(cell)] == []


# Documents

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = ["README.md", "writeup.md", "beyond.md", "CONTRIBUTING.md"]
DOCUMENTS += sorted(
    f"{folder}/{path.name}"
    for folder in ("docs", "writeup", "writeup/chapters")
    for path in (ROOT / folder).glob("*.md")
)


def anchors(text: str) -> set[str]:
    """The fragments that GitHub gives the headings of `text`."""
    headings = re.findall(r"^#{1,6} (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    """Relative links of `document` to a file or a heading that is not there."""
    broken = []
    for link in LINK.findall(FENCED.sub("", document.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        name, _, fragment = link.partition("#")
        target = document.parent / name if name else document
        found = target.exists()
        if found and fragment:
            found = target.is_file() and fragment in anchors(target.read_text(encoding="utf-8"))
        if not found:
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_of_a_document_leads_somewhere(document):
    assert broken_links(ROOT / document) == []


@pytest.mark.parametrize(
    "source", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda path: path.stem
)
def test_the_executed_notebook_has_the_cells_of_its_source(check_notebooks, source):
    written, executed = (
        check_notebooks.jupytext.read(path).cells for path in (source, source.with_suffix(".ipynb"))
    )
    assert [(cell.cell_type, cell.source) for cell in written] == [
        (cell.cell_type, cell.source) for cell in executed
    ]


@pytest.mark.parametrize(
    "executed", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_the_committed_solutions_of_exercises_are_right(check_notebooks, executed):
    """Each exercise's check prints one line, which nothing but this test reads. A notebook with
    blanks is committed with them.
    """
    notebook = check_notebooks.jupytext.read(executed)
    cells = notebook.cells
    if any(check_notebooks.blank_of(cell) for cell in cells):
        said = check_notebooks.verdicts(notebook)
        assert len(said) >= 2 and all(line.startswith("not yet: ") for line in said), said
        return
    checks = [
        cell
        for cell in cells
        if cell.cell_type == "code" and re.search(r"^check\(", cell.source, re.MULTILINE)
    ]
    assert len(checks) >= 2
    for cell in checks:
        assert [output.get("text") for output in cell.outputs] == ["right\n"], cell.source


def test_a_check_tells_the_first_difference_and_its_hint(capsys):
    check((1, 1, "one"), ([2.0 + 1e-9], [2.0], "two"))
    check((1, 1, "one"), (None, [2.0], "two"), (3, 4, "three"))
    assert capsys.readouterr().out == "right\nnot yet: None, but expected [2.0]. two\n"


def test_the_hopper_notebook_answers_from_the_records_of_now(check_notebooks):
    """It is not executed when records are published; what it says of them would stay what they
    were.
    """
    shown = [
        output["data"]["text/markdown"]
        for cell in check_notebooks.jupytext.read(ROOT / "notebooks" / "s4_hopper.ipynb").cells
        for output in cell.get("outputs", ())
        if "text/markdown" in output.get("data", {})
    ]
    book = Book(ROOT, ROOT / "results" / "nvidia-h200")
    for problem in ("hopper_ladder", "attention_shapes"):
        assert Page(book, problem).table("forward_backward", age=False) in shown
