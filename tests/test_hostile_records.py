"""Reports of records of which one is changed: that row is told and left out, and every page is
written (B3, B6, B7).
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.placing import NotMade
from cs336_systems.bench.spec import load
from cs336_systems.book.frames import read_frame
from cs336_systems.book.html_report import PAGE, write_report
from cs336_systems.book.tables import Listing
from tests.command_line import invoke

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = {path.stem: path for device in ("nvidia-h100", "nvidia-h200")
             for path in (ROOT / "results" / device / "records").glob("*.jsonl")}  # fmt: skip
PROBLEMS = sorted(PUBLISHED.keys() - {"runs", "tests", "tune_flash"})
FEW = ["benchmarking_mixed_precision", "leaderboard_2025", "mixed_precision_accumulation", "naive_ddp_benchmarking",
       "training_run"]  # fmt: skip
FACTS = re.compile(r'<p class="quiet">python .*?</p>')  # of the run of the last record
REMOVED = object()
MARKUP = "<img src=x onerror=alert(1)>|`*_[a](b)\n# b\x1b[2J <!-- end made --> {{ 1 }}"
VALUES: tuple[Any, ...] = (
    REMOVED, None, [], ["a"], {"name": 1}, "another", "", MARKUP, "\ud800", True, 7, -1, 0, 2.5, -1e300, 10**400
)  # fmt: skip


def fields(row: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field of `row` and of the objects in it."""
    for name, value in row.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from fields(value, (*above, name))


def changed(row: dict[str, Any], path: tuple[str, ...], value: Any) -> str:
    """The line of `row` with another value at `path`, or without the field."""
    row = json.loads(json.dumps(row))
    inner = row
    for name in path[:-1]:
        inner = inner[name]
    if value is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(row)


def mutations(row: dict[str, Any]) -> Iterator[str]:
    """Lines that differ from `row` in one field: removed, of another type, of another value, or one
    more.
    """
    for path in fields(row):
        for value in VALUES:
            yield changed(row, path, value)
        own = row
        for name in path:
            own = own[name]
        if isinstance(own, dict):
            yield changed(row, (*path, "of_a_later_release"), 1)
    yield changed(row, ("of_a_later_release",), 1)
    yield json.dumps(row)


class Folder:
    """A results folder with the published records of one problem, and lines that are added to them."""

    def __init__(self, problem: str, folder: Path) -> None:
        self.problem, self.folder = problem, folder / PUBLISHED[problem].parents[1].name
        self.path = self.folder / "records" / f"{problem}.jsonl"
        self.path.parent.mkdir(parents=True)
        shutil.copy(PUBLISHED[problem].with_name("runs.jsonl"), self.path.parent)
        self.text = PUBLISHED[problem].read_text()
        rows = [json.loads(line) for line in self.text.splitlines()]
        self.good = [row for row in rows if row["status"] == "ok"]

    def report(self, *lines: str, replace: str = "") -> tuple[str, list[str]]:
        """The report with `lines` added, in the place of the line `replace` if given, and its
        warnings.
        """
        before = self.text.replace(replace + "\n", "") if replace else self.text
        self.path.write_text(before + "".join(f"{line}\n" for line in lines), encoding="utf-8")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert write_report(self.folder, None, [self.problem])
        assert not [one for one in told if issubclass(one.category, NotMade)], [
            str(one.message) for one in told
        ]
        text = (self.folder / PAGE).read_text(encoding="utf-8")
        text = text[: text.find("<script>")] + text[text.rfind("<script>") :]  # without the library
        return FACTS.sub("", text, count=1), [str(one.message) for one in told]

    def costs_itself(self, line: str) -> bool:
        """Whether `line`, behind a few good rows, is told and left out; else it is a row, and
        nothing is told.
        """
        few = "".join(f"{json.dumps(row)}\n" for row in self.good[:3])
        self.path.write_text(f"{few}{line}\n", encoding="utf-8")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            frame = read_frame(load(self.problem), self.folder)
        messages = [str(one.message) for one in told]
        assert "\x1b" not in "".join(messages)
        if any(re.search(rf"{self.problem}(.jsonl:\d+)?: .*left out", one) for one in messages):
            return True
        assert messages == [] and frame["position"].max() == len(self.good[:3]), (line, messages)
        return False


@pytest.fixture(params=FEW)
def few(request, tmp_path) -> Folder:
    return Folder(request.param, tmp_path)


def test_all_changes_of_a_row_at_once_leave_a_report_of_all_good_rows(few):
    """One of them ended `report` for every problem. The good rows stand behind the others: of two
    the newest counts.
    """
    plain, told = few.report()
    assert told == []
    text, told = few.report(*mutations(few.good[0]), *few.text.splitlines())
    assert told and all("left out" in one for one in told)
    good, shown = (re.findall(r"<td[^>]*>.*?</td>", page) for page in (plain, text))
    assert good and not set(good) - set(shown)


def test_what_cannot_be_placed_changes_nothing(few):
    """A field more in a case, as a new release adds, ended `report` for 28 of 29 problems; so did a
    null or a list.
    """
    plain, _ = few.report()
    row = few.good[0]
    for path, value in (
        (("case", "of_a_later_release"), 1), (("case", "type"), "Odd"), (("case",), None), (("implementation",), ["a"]),
        (("mode",), {"a": 1}), (("quantity",), None), (("unit",), "parsec"), (("problem",), "another"),
        (("run",), "another"), (("samples",), [1e300]), (("status",), "fine"), (("message",), "\ud800"),
    ):  # fmt: skip
        text, told = few.report(changed(row, path, value))
        assert len(told) == 1 and "left out" in told[0], (path, told)
        assert text == plain, path


def test_a_row_of_an_older_release_finds_its_cell(few):
    """Fields with a default are what later releases add to a case: rows without them were cells of
    their own.
    """
    plain, _ = few.report()
    row = next(
        (row for row in few.good if any(row["case"].get(name, "") is None for name in row["case"])),
        None,
    )
    if row is None:
        row = few.good[0]
        without = json.dumps(row)
    else:
        (name, *_) = (name for name, value in row["case"].items() if value is None)
        without = changed(row, ("case", name), REMOVED)
    text, told = few.report(without)
    assert told == [] and text == plain, without


@pytest.mark.parametrize(
    ("problem", "change", "why"),
    [
        ("masked_attention", {"mask": "another"}, "'another' is unknown here"),
        ("benchmarking_script", {"samples": [0.0]}, "float division by zero"),
    ],
)
def test_a_row_without_columns_is_left_out_with_its_reason(problem, change, why, tmp_path):
    folder = Folder(problem, tmp_path)
    row = folder.good[0]
    row = row | change if "samples" in change else row | {"case": row["case"] | change}
    folder.path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.warns(UserWarning, match=f"left out, no columns for its .*: {re.escape(why)}"):
        assert read_frame(load(problem), folder.folder).empty


def test_a_mistake_in_an_experiments_columns_is_raised(tmp_path, monkeypatch):
    folder = Folder("mixed_precision_accumulation", tmp_path)
    folder.path.write_text(folder.text, encoding="utf-8")
    experiment = load(folder.problem)
    monkeypatch.setattr(experiment, "columns", lambda row: row["kernel"].no_such_method())
    with pytest.raises(AttributeError, match="no_such_method"):
        read_frame(experiment, folder.folder)


def test_the_command_says_what_it_left_out_in_a_line_and_ends_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no documents are
    folder = Folder("mixed_precision_accumulation", tmp_path)
    row = json.dumps(folder.good[0] | {"implementation": MARKUP, "unit": "parsec"})
    folder.path.write_text(f"{folder.text}{row}\n{row[:40]}", encoding="utf-8")
    result = invoke("report", "--results", tmp_path, "--folder", folder.folder.name)
    assert result.exit_code == 0, result.stderr
    torn, odd = result.stderr.splitlines()
    assert torn.startswith(
        "warning: mixed_precision_accumulation.jsonl:6: not a record, left out ("
    )
    assert odd.startswith("warning: mixed_precision_accumulation: <img") and odd.endswith(
        "unit must be 1, got parsec"
    )
    assert "\x1b" not in result.stderr and (folder.folder / PAGE).is_file()


def test_the_command_fails_where_a_table_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Folder("mixed_precision_accumulation", tmp_path)
    folder.path.write_text(folder.text, encoding="utf-8")
    monkeypatch.setattr(
        load(folder.problem), "tables", {"broken": Listing(columns=("no_such_column",))}
    )
    result = invoke("report", "--results", tmp_path, "--folder", folder.folder.name)
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "warning: the table broken of mixed_precision_accumulation cannot be made: Key"
    )
    assert (folder.folder / PAGE).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_each_change_of_a_row_costs_that_row(problem, tmp_path):
    folder = Folder(problem, tmp_path)
    plain, told = folder.report()
    assert told == []
    lines = list(mutations(folder.good[0]))
    told_of = {line for line in lines if folder.costs_itself(line)}
    assert told_of and set(lines) - told_of
    text, _ = folder.report(*told_of)
    assert text == plain
    text, _ = folder.report(*(line for line in lines if line not in told_of))
    assert "<img" not in text
