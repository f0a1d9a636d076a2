"""The report: frames, tables, figures, answers and generated blocks from synthetic records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from cs336_systems.config import MODEL_SIZES, AttentionShape, ModelCase
from cs336_systems.records import Record, append_records, case_to_dict
from cs336_systems.report.answers import answer
from cs336_systems.report.blocks import CASE_TYPES, Blocks
from cs336_systems.report.build import build_report
from cs336_systems.report.figures import problem_figures
from cs336_systems.report.frames import IMPLEMENTATIONS, load_frame
from cs336_systems.report.markdown import code_span, number, table
from cs336_systems.report.plots import PLOTS, plots
from cs336_systems.report.styles import colour, marker
from cs336_systems.report.tables import TABLES, sections
from cs336_systems.report.writeup import fill
from tests.distributed_records import DISTRIBUTED_MAKERS

GPU = {"name": "Test GPU", "kind": "cuda", "driver": "1.2"}
CPU = {"name": "Test CPU", "kind": "cpu"}
LENGTHS = (1024, 4096, 16384)
HEAD_DIMS = (32, 64)
FLASH_MS = {"eager": 8.0, "compiled": 4.0, "triton": 1.0, "sdpa_cudnn": 0.5}  # at S=1024, d=32, forward
OOM = "CUDA out of memory. Tried to allocate 64.00 GiB"
NO_KERNEL = "no kernel for head dim 32"


def record(problem: str, case: Any, implementation: str, mode: str, **changes: Any) -> Record:
    values: dict[str, Any] = {"quantity": "time", "unit": "ms", "device": GPU, "commit": "c0ffee", "dirty": False}
    values |= {"software": {"torch": "2.11.0", "triton": "3.6.0"}, "date": "2026-01-02T03:04:05+00:00"}
    values |= {"problem": problem, "implementation": implementation, "mode": mode, "scale": "handout"}
    return Record(case=case_to_dict(case), **values | changes)


def attention(seqlen: int, head_dim: int, dtype: Any = "bfloat16", heads: int = 1) -> AttentionShape:
    return AttentionShape(
        batch=1, heads=heads, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, is_causal=True, dtype=dtype
    )


def model_case(name: str, warmup: int = 5) -> ModelCase:
    return ModelCase(model=MODEL_SIZES[name], batch=4, attention="reference", warmup=warmup)


def spread(middle: float) -> list[float]:
    return [middle * 0.9, middle, middle * 1.1]


MAKERS: dict[str, Callable[[], list[Record]]] = {
    **DISTRIBUTED_MAKERS,
}


def on_cpu(records: list[Record]) -> list[Record]:
    """The same rows as a laptop leaves them: Triton in its interpreter."""
    kernels = {"triton": "fwd_64x64 (interpreter)"}
    return [
        dataclasses.replace(row, device=CPU, scale="smoke", kernel=kernels.get(row.implementation, ""))
        for row in records
    ]


def table_of(records: list[Record], name: str) -> str:
    problem = records[0].problem
    return next(section.body for section in sections(problem, load_frame(records)) if section.name == name)


def row_of(table: str, *keys: str) -> list[str]:
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    return next(line for line in lines if line[: len(keys)] == list(keys))


# Frames ---------------------------------------------------------------------------------------------------------------


# Tables ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123456, "0.01235"), (12.3, "12.30"), (9.99996, "10.00"), (123456.7, "123,457"), (0, "0"), (3e-7, "3.000e-07")],
)
def test_numbers_have_four_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("problem", MAKERS)
def test_every_status_of_the_records_reaches_the_tables(problem: str) -> None:
    frame = load_frame(MAKERS[problem]())
    text = "\n".join(section.body for section in sections(problem, frame))
    words = {"oom": "OOM", "failed": "failed [", "skipped": "skipped ["}
    assert all(words[status] in text for status in set(frame["status"]) - {"ok"})


def test_no_text_of_a_record_gives_orders_to_a_terminal() -> None:
    """A report is read with `cat`, too."""
    name = "a\x1b[2Jb"
    assert code_span(name) == r"`a\x1b[2Jb`" and r"| a\\x1b[2Jb |" in table([name], [])


def test_no_text_of_a_record_ends_its_cell_or_row() -> None:
    """A line break in the name of an implementation or in a case cut the table in two."""
    case = attention(1024, 64)
    rows = [
        dataclasses.replace(
            record("another", case, name, "forward", samples=[1.0]), case={**case_to_dict(case), "note": "a\n|\nb"}
        )
        for name in ("one\n| two", "back\\|slash")
    ]
    shown = sections("another", load_frame(rows))[0]
    assert "note a | b" in shown.title and "\n" not in shown.title
    assert [line.split(" | ")[0] for line in shown.body.splitlines()[2:]] == ["| back\\\\\\|slash", "| one \\| two"]


# Figures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", MAKERS)
def test_figures_name_the_device_and_the_units(problem: str) -> None:
    figures = problem_figures(problem, load_frame(MAKERS[problem]()))
    assert bool(figures) == (problem in PLOTS)
    for stem, figure in figures:
        assert stem.startswith(problem)
        assert "Test GPU" in figure.get_suptitle()
        texts = " ".join(axes.get_xlabel() + axes.get_ylabel() for axes in figure.axes)
        units = (
            "(ms)",
            "(MiB)",
            "(TFLOP/s)",
            "(GB/s)",
            "(%)",
            "(nats a byte)",
            "time eager / time compiled",
            "time dense / time",
            "time / time of sdpa_cudnn",
        )
        assert any(unit in texts for unit in units)


@pytest.mark.parametrize("problem", MAKERS)
def test_dollars_in_a_record_are_no_formula(problem: str) -> None:
    """Two dollar signs in a message or name went to matplotlib's formula parser, which ended the report."""
    names = {"compiled": r"$\frac$", "triton": "$a_{$"}
    rows = [
        dataclasses.replace(
            row,
            implementation=names.get(row.implementation, row.implementation),
            message=r"set $\nothing$ " if row.message else "",
            device={"name": r"$\gpu$", "kind": "cuda"},
        )
        for row in MAKERS[problem]()
    ]
    for _, figure in problem_figures(problem, load_frame(rows)):
        figure.draw_without_rendering()


def test_a_formula_is_found_without_rendering() -> None:
    """What the test above lives by."""
    figure = Figure()
    figure.suptitle(r"$\frac$")
    with pytest.raises(ValueError, match="frac"):
        figure.draw_without_rendering()


def test_colours_are_distinct_and_stable() -> None:
    for look in (colour, marker):
        assert len({look(name) for name in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)
        assert look("triton_lists") != look("triton")  # lines of the same figure
    assert colour("small-proxy") == colour("small")
    assert colour("somebody's kernel") == colour("somebody's kernel")


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Data has no positive values")
@pytest.mark.parametrize("problem", MAKERS)
@pytest.mark.parametrize("kind", ["first", "broken", "zero"])
def test_a_run_in_progress_can_be_reported(problem: str, kind: str) -> None:
    """The first row alone, broken rows alone, or a clock that saw nothing: tables, figures and answers are made."""
    rows = MAKERS[problem]()
    some = {
        "first": rows[:1],
        "broken": [row for row in rows if row.status != "ok"],
        "zero": [dataclasses.replace(row, samples=[0.0]) for row in rows if row.status == "ok"][:6],
    }[kind]
    frame = load_frame(some)
    assert all("nan" not in section.body for section in sections(problem, frame))
    assert "nan" not in answer(problem, frame)
    assert len(problem_figures(problem, frame)) == len(plots(problem, frame))


@pytest.mark.parametrize("problem", MAKERS)
def test_answers_leave_out_what_is_missing(problem: str) -> None:
    """Any single record, broken or not, gives an answer or none, but no error."""
    rows = MAKERS[problem]()
    assert answer(problem, load_frame(rows)).startswith("- ")
    for row in rows[:: max(1, len(rows) // 8)]:
        assert "nan" not in answer(problem, load_frame([row]))


# Blocks and documents -------------------------------------------------------------------------------------------------


def document(*names: str) -> str:
    blocks = [f"<!-- begin generated: {name} -->\nold\n<!-- end generated: {name} -->\n" for name in names]
    return "\n".join(["# Title\n", *blocks])


def test_fill_replaces_content_and_nothing_else() -> None:
    text = "before\n" + document("a") + "after, no newline"
    filled = fill(text, lambda name: f"<{name}>", "x.md")
    assert filled == text.replace("\nold\n", "\n\n<a>\n\n")
    assert fill(filled, lambda name: f"<{name}>", "x.md") == filled


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["<!-- begin generated: a -->"], r"x\.md:1: block 'a' is never closed"),
        (["", "<!-- end generated: a -->"], r"x\.md:2: block 'a' ends but never began"),
        (["<!-- begin generated: a -->", "<!-- begin generated: b -->"], r"x\.md:2: block 'b' begins inside 'a'"),
        (["<!-- begin generated: a -->", "<!-- end generated: b -->"], r"x\.md:2: block 'a' of line 1 ends as 'b'"),
        (["<!-- begin generated -->"], r"x\.md:1: the begin of a generated block needs a name"),
    ],
)
def test_mistakes_in_markers_name_their_line(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill("\n".join(lines), lambda name: name, "x.md")


@pytest.mark.parametrize("problem", MAKERS)
def test_a_case_of_another_problem_is_left_out(problem: str, tmp_path: Path) -> None:
    """Its sizes were NaN on the axes of figures, and drawing them ended the report halfway."""
    rows = MAKERS[problem]()
    other = next(row for row in rows if row.status == "ok")
    append_records(tmp_path / "records" / "rows.jsonl", [*rows, dataclasses.replace(other, case={"type": "Other"})])
    with pytest.warns(UserWarning, match=rf"{problem}: a case of type 'Other', not \w+( or \w+)*, left out"):
        assert len(Blocks.load(tmp_path).frames[problem]) == len(rows)


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no records to report"):
        build_report(tmp_path)


def test_every_problem_with_a_table_is_tested_here() -> None:
    assert set(TABLES) == set(CASE_TYPES) == set(MAKERS)
