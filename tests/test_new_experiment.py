"""A new experiment is one Python file and one Markdown file, and nothing else: listed, run,
compared, on its page.
"""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = '''"""How long a sort takes, by length."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cs336_systems.config import RunConfig
from cs336_systems.experiments import Cell, Disagreement, Experiment, Lines, Pivot, Row, Sample, Unsupported, problem
from cs336_systems.measure.timing import time_calls

TIME = Row("forward", "time", "ms")


@dataclass(frozen=True, kw_only=True)
class SortCase:
    length: int


@problem(title="How long a sort takes", order=99)
class SortSpeed(Experiment):
    implementations = ("sort", "topk", "bitonic", "out_of_memory")
    rows = (TIME,)

    def cases(self, run: RunConfig) -> list[SortCase]:
        return [SortCase(length=length) for length in (256, 1024, 16384)]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        if cell.implementation == "bitonic":
            raise Unsupported("no <b>bitonic</b> sort | here")
        if cell.implementation == "out_of_memory":
            raise torch.OutOfMemoryError("no memory is left")
        x = torch.randn(cell.case.length, generator=torch.Generator().manual_seed(run.seed))
        sort = torch.sort if cell.implementation == "sort" else lambda x: x.topk(len(x), largest=False)
        if not torch.equal(sort(x)[0], x.sort()[0]):
            raise Disagreement("not sorted")
        yield Sample(row=TIME, samples=time_calls(lambda: sort(x), device=run.device, num_samples=5), error=0.0)

    tables = {"times": Pivot(title="sorting", down=("length",), where={"quantity": "time"}, ratios=(("sort", "topk"),))}
    figures = {"times": Lines(title="Sorting", x="length", where={"quantity": "time"})}
'''
ODD_SAMPLES = '''"""What is no number, and what is no sample."""

from dataclasses import dataclass
import math
from cs336_systems.experiments import Experiment, Row, Sample, problem

TIME, LOSS = Row("forward", "time", "ms"), Row("forward", "loss", "nats")

@dataclass(frozen=True, kw_only=True)
class OddCase:
    size: int = 1

@problem(title="Odd samples", order=99)
class OddSamples(Experiment):
    implementations, rows = ("nan", "nothing", "good"), (TIME, LOSS)

    def cases(self, run):
        return [OddCase()]

    def measure(self, cell, run):
        yield Sample(row=TIME, samples=[1.0])
        yield {"nan": Sample(row=LOSS, samples=[math.nan]), "nothing": None}.get(
            cell.implementation, Sample(row=LOSS, samples=[2.0])
        )
'''
DOCUMENT = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
PASTED = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)[0]
PAGE = """# sort_speed

*How long does a sort take?*

> **Answer.** {{ time("sort", length=1024, unit="µs") }} for 1,024 numbers, {{ speed("sort", "topk") }} topk's speed.

{{ figure("times") }}

{{ table("times") }}
"""


# The commands, one after the other, in a process that imports the copy.
COMMANDS = """
import json, shutil, sys
from pathlib import Path
from typer.testing import CliRunner
from cs336_systems.cli import app
from cs336_systems.book.pages import Book

def run(*arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return result.stdout

measure = ["run", "sort_speed", "--scale", "tiny", "--device", "cpu", "--commit", "0123456789ab", "--clean"]
run(*measure)
(records,) = Path("results").glob("*/records")
path = records / "sort_speed.jsonl"
said = {"list": run("list"), "records": path.read_text(), "again": run(*measure)}
said["unchanged"] = path.read_text() == said["records"]
said["compare"] = run("compare", str(path), str(path), "--problem", "sort_speed")
said["report"] = run("report", "--problem", "sort_speed")
shutil.copytree(records.parent, "results/nvidia-h200", dirs_exist_ok=True)
book = Book(Path(), Path("results/nvidia-h200"))
book.write()
said["differences"] = book.check()
published = Path("results/nvidia-h200/records/sort_speed.jsonl")
lines = [json.loads(line) for line in published.read_text().splitlines()]
for line in lines:
    if line["implementation"] == "sort":
        line["samples"] = [123.0]
published.write_text("".join(json.dumps(line) + "\\n" for line in lines))
said["stale"] = [str(one) for one in Book(Path(), Path("results/nvidia-h200")).check()]
said["pasted"] = run("run", "select_speed", "--scale", "tiny", "--device", "cpu")
said["odd"] = run("run", "odd_samples", "--scale", "tiny", "--device", "cpu")
said["odd records"] = (records / "odd_samples.jsonl").read_text()
json.dump(said, open("said.json", "w"))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The repository with two files more, run at scale tiny, its records in the place of the
    published ones.
    """
    root = tmp_path_factory.mktemp("copy")
    for folder in ("cs336_systems", "writeup"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "cs336_systems" / "experiments" / "beyond" / "sort_speed.py").write_text(EXPERIMENT)
    (root / "cs336_systems" / "experiments" / "beyond" / "select_speed.py").write_text(PASTED)
    (root / "cs336_systems" / "experiments" / "beyond" / "odd_samples.py").write_text(ODD_SAMPLES)
    for page in (root / "writeup").glob("*.md"):
        page.unlink()  # their records are not here
    (root / "writeup" / "sort_speed.md").write_text(PAGE)
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return root


@pytest.fixture(scope="module")
def said(copy: Path) -> dict[str, Any]:
    return json.loads((copy / "said.json").read_text())


def test_it_is_short_and_listed(said):
    assert len(EXPERIMENT.splitlines()) <= 150
    assert "sort_speed\n    How long a sort takes (beyond the handout, `run`)" in said["list"]


def test_the_class_of_the_documents_runs_as_pasted(said):
    assert "select_speed, cells: 6 ok in " in said["pasted"]


def test_what_is_no_number_or_no_sample_costs_its_row_and_the_sweep_goes_on(said):
    """The sweep ended with a traceback, and later cells were not measured."""
    assert "odd_samples, cells: 2 partly failed, 1 ok in " in said["odd"]
    found = {
        (row["implementation"], row["quantity"]): row
        for row in map(json.loads, said["odd records"].splitlines())
    }
    assert len(found) == 6 and all(
        row["status"] == "ok" for (_, quantity), row in found.items() if quantity == "time"
    )
    assert found["nan", "loss"]["message"].endswith(
        "samples must be finite and at most 1e+30, got nan"
    )
    assert (
        found["nothing", "loss"]["message"]
        == "TypeError: measure must yield Samples, got a NoneType"
    )


def test_every_cell_leaves_a_row_and_a_second_run_finds_them(said):
    rows = [json.loads(line) for line in said["records"].splitlines()]
    statuses = {(row["implementation"], row["status"]) for row in rows}
    assert statuses == {
        ("sort", "ok"),
        ("topk", "ok"),
        ("bitonic", "skipped"),
        ("out_of_memory", "oom"),
    }
    assert "6 ok before, 3 skipped before, 3 oom before" in said["again"] and said["unchanged"]
    assert "12 rows at a threshold of 1.5 %" in said["compare"]


def test_the_report_is_one_file_with_a_figure_and_a_table(copy, said):
    assert "sort_speed, rows: 6 ok, 3 skipped, 3 oom" in said["report"]
    (report,) = copy.glob("results/cpu*/report.html")
    text = report.read_text()
    assert 'id="sort_speed"' in text and text.count('class="spec"') == 1 and "vegaEmbed" in text
    shown = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(https?:)?//', shown), "no network"
    assert "Ran, agrees" in shown and "writeup/sort_speed.md" in shown
    assert (
        "Not on this machine: bitonic (no &lt;b&gt;bitonic&lt;/b&gt; sort | here)" in shown
        and "<b>" not in shown
    )
    lengths = re.findall(r'<tr><td class="number" data-number="[\d.]+">([\d,]+)</td>', shown)
    assert lengths == ["256", "1,024", "16,384"], "in the order of the cases"
    assert shown.count(">OOM</td>") == 3


IN_THE_BROWSER = """<script>
const errors = [];
window.addEventListener("error", event => errors.push(event.message));
window.addEventListener("unhandledrejection", event => errors.push(String(event.reason)));
console.error = (...words) => errors.push(words.join(" "));
window.addEventListener("load", () => setTimeout(() => {
  const head = document.querySelector("th"), shown = [];
  for (let click = 0; click < 2; click++) {
    head.click();
    shown.push([...document.querySelectorAll("tbody tr")].map(row => row.cells[0].textContent));
  }
  const found = {errors, shown, wide: document.documentElement.scrollWidth - innerWidth, figures: {}};
  for (const section of document.querySelectorAll("section"))
    found.figures[section.id] = section.querySelectorAll("figure svg").length;
  document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
}, 500));
</script>"""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_report_opens_in_a_browser_and_sorts(copy, tmp_path):
    (report,) = copy.glob("results/cpu*/report.html")
    page = tmp_path / "watched.html"
    page.write_text(report.read_text().replace("<head>", "<head>" + IN_THE_BROWSER, 1))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=500,900",
        "--virtual-time-budget=20000",
    ]
    shown = subprocess.run(
        [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    match = re.search(r"<pre>(\{.*\})</pre>", shown.stdout)
    assert match, shown.stderr
    found = json.loads(html.unescape(match[1]))
    assert found["errors"] == []
    assert found["shown"] == [["256", "1,024", "16,384"], ["16,384", "1,024", "256"]]
    assert found["figures"] == {"sort_speed": 1}
    assert found["wide"] <= 0, "wide tables scroll within the page"


def test_its_page_has_the_records_numbers(copy, said):
    assert said["differences"] == []
    document = (copy / "beyond.md").read_text()
    assert re.search(
        r"> \*\*Answer.\*\* [\d.,]+ µs for 1,024 numbers, [\d.]+( to [\d.]+)?× topk's speed",
        document,
    )
    assert (
        "| 1,024 |" in document
        and "![Sorting](results/nvidia-h200/figures/sort_speed_times.png)" in document
    )
    published = copy / "results" / "nvidia-h200"
    assert (published / "figures" / "sort_speed_times.png").read_bytes().startswith(b"\x89PNG")
    assert "**sorting (ms)**" in (published / "tables" / "sort_speed.md").read_text()
    stale = "\n".join(said["stale"])
    assert "beyond.md: differs" in stale and "sort_speed_times.png: differs" in stale
