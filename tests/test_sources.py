"""What says that a record is older than the code that it measured."""

import re
import shutil
from pathlib import Path

import pytest

from cs336_systems.bench import sources
from cs336_systems.bench.records import Record, read_records
from cs336_systems.bench.sources import ROOT, code_of, older_hashes, reached, sources_hash
from cs336_systems.bench.spec import load
from cs336_systems.book.pages import AGE, CHANGED, UNCHANGED, Book

EXPERIMENT = "leaderboard_2025"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources, as an unpacked archive has them: without git."""
    shutil.copytree(
        ROOT / "cs336_systems",
        tmp_path / "cs336_systems",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    sources._imported.cache_clear()
    sources_hash.cache_clear()
    return tmp_path


def test_an_experiment_reaches_what_it_measures():
    """Kernels are imported within functions alone, so that the rest works without Triton."""
    names = {file.relative_to(ROOT).as_posix() for file in reached(EXPERIMENT)}
    assert {f"cs336_systems/attention/{name}" for name in ("hopper/forward.py", "triton/backward.py", "reference.py",
                                                           "native/replay.cpp")} <= names  # fmt: skip
    assert not any("/experiments/" in name or "/measure/" in name for name in names)
    assert "cs336_systems/distributed/ddp_overlap.py" in {
        file.relative_to(ROOT).as_posix() for file in reached("naive_ddp_benchmarking")
    }
    assert reached("mixed_precision_accumulation") == ()


@pytest.mark.parametrize(
    ("file", "text", "changes"),
    [
        ("attention/hopper/forward.py", "\nTWO = 2\n", True),
        ("attention/native/replay.cpp", "\n// other\n", True),
        ("attention/hopper/forward.py", "\n# a remark\n", False),
        ("measure/timing.py", "\nTWO = 2\n", False),
        ("experiments/leaderboard_2025.py", "\nTWO = 2\n", False),
    ],
)
def test_a_change_of_what_is_measured_changes_the_hash(file, text, changes, checkout):
    before = sources_hash(EXPERIMENT, checkout)
    assert before == sources_hash(EXPERIMENT), "a copy without git is the same code"
    with (checkout / "cs336_systems" / file).open("a") as opened:
        opened.write(text)
    sources_hash.cache_clear()
    assert (sources_hash(EXPERIMENT, checkout) != before) == changes


def test_another_checkouts_missing_experiment_has_no_hash(tmp_path):
    assert sources_hash(EXPERIMENT, tmp_path) == "" and older_hashes(tmp_path) == {}


@pytest.fixture(scope="module")
def book() -> Book:
    return Book(ROOT, ROOT / "results" / "nvidia-h200")


def test_a_table_says_how_old_it_is(book):
    """README's table and ten pages were older than their code, and none of them said so."""
    rows = book.frame(EXPERIMENT)
    assert book.age(EXPERIMENT, rows.assign(sources="0" * 12)).endswith(f"{CHANGED}.*")
    fresh = rows.assign(sources=sources_hash(EXPERIMENT))
    assert re.fullmatch(
        rf"\*NVIDIA H200, records of 20\d\d-\d\d-\d\d, {UNCHANGED}\.\*", book.age(EXPERIMENT, fresh)
    )
    mixed = fresh.assign(sources=[sources_hash(EXPERIMENT)] * (len(fresh) - 1) + ["0" * 12])
    assert CHANGED in book.age(EXPERIMENT, mixed), "one row is enough"
    held = fresh.assign(held_mib=11264.0)
    assert book.age(EXPERIMENT, held).endswith(f"{UNCHANGED}; up to 11.0 GiB were held before.*")


def test_every_page_with_records_says_its_age(book):
    for name in ("pytorch_attention", "leaderboard_2025", "data_parallel_turns"):
        assert AGE.search(book.page(name)), name
    assert not AGE.search(book.page("tp_calcs")), "a calculation has no records"


def test_a_stale_page_fails_the_check(book, monkeypatch):
    """The line is part of the document, so that what is written differs once the code has changed."""
    fresh = book.frame(EXPERIMENT).assign(sources=sources_hash(EXPERIMENT))
    monkeypatch.setattr(Book, "frame", lambda self, name: fresh)
    written = Book(ROOT, book.folder).page(EXPERIMENT)
    assert UNCHANGED in written and CHANGED not in written
    monkeypatch.setattr("cs336_systems.book.pages.sources_hash", lambda name: "another")
    assert CHANGED in Book(ROOT, book.folder).page(EXPERIMENT) != written


def test_older_records_have_their_hashes_beside_them():
    """By problem and run; what they name is there."""
    for path in ROOT.glob("results/*/records/sources.json"):
        for problem, of_runs in older_hashes(path.parent).items():
            records: list[Record] = read_records(path.with_name(f"{problem}.jsonl"))
            assert load(problem) and set(of_runs) <= {record.run.id for record in records}
            assert all(re.fullmatch("[0-9a-f]{12}", digits) for digits in of_runs.values())


SHORT = "def f(x, *, y=None):\n    return g(x, 'a' 'b', f'{x!r:>{y}}') + 1.50"
LONG = '''
def f(
    x,
    *,
    y=None,  # none
):
    """Say what it is."""
    return (
        g(
            x,
            "ab",
            f"{x!r:>{y}}",
        )
        + 1.5
    )
'''


def test_code_that_is_formatted_anew_keeps_its_hash():
    """A line length of 100 in place of 120 would have made each record and each GPU test stale."""
    assert code_of(SHORT, ".py") == code_of(LONG, ".py")
    assert code_of("x = 1", ".py") == (
        "Module(body=Assign(targets=Name(id='x',),value=Constant(value=1,),),)"
    ), "the same in every version of Python"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f(x, y)", "f(x, *y)"),
        ("f(x, y=1)", "f(x, y=True)"),
        ("{1: x, **y}", "{1: x, 2: y}"),
        ("def f(*, a, b=1): ...", "def f(*, a=1, b): ..."),
        ("f'{x}a'", "f'{x}' 'b'"),
        ("f'{x!r}'", "f'{x!s}'"),
        ("a - (b - c)", "a - b - c"),
        ("return_ = None", "return_ = ()"),
        ("x: int = 1", "x: int"),
        ("if a:\n  b\nc", "if a:\n  b\n  c"),
        ("'a'", "b'a'"),
        ("global a", "global b"),
        ("import a.b as c", "import a.c as c"),
    ],
)
def test_code_that_says_something_else_has_another_hash(before, after):
    assert code_of(before, ".py") != code_of(after, ".py")
