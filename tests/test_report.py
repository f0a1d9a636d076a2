"""The report: frames, tables, figures, answers and generated blocks from synthetic records."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from cs336_systems.config import MODEL_SIZES, AttentionShape, ModelCase
from cs336_systems.records import Record, append_records, case_to_dict
from cs336_systems.report.answers import answer
from cs336_systems.report.blocks import CASE_TYPES, Blocks
from cs336_systems.report.build import build_report, check_documents, update_documents
from cs336_systems.report.figures import file_stem, problem_figures
from cs336_systems.report.frames import IMPLEMENTATIONS, load_frame, select
from cs336_systems.report.headline import NO_SPEED
from cs336_systems.report.markdown import code_span, number, table
from cs336_systems.report.plots import PLOTS, plots
from cs336_systems.report.styles import colour, marker
from cs336_systems.report.tables import TABLES, sections
from cs336_systems.report.writeup import fill
from tests.counter_records import counter_records
from tests.distributed_records import DISTRIBUTED_MAKERS
from tests.mask_records import MASK_MAKERS
from tests.shape_records import (
    few_queries_records,
    ladder_records,
    long_call_records,
    shape_records,
    short_call_records,
)
from tests.tile_records import tile_records

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


def flash_records() -> list[Record]:
    """Every status: eager runs out of memory at the longest, compiled fails there, cuDNN skips d = 32."""
    found = []
    for seqlen, head_dim, implementation in itertools.product(LENGTHS, HEAD_DIMS, FLASH_MS):
        case = attention(seqlen, head_dim)
        broken: dict[str, Any] = {}
        if implementation == "eager" and seqlen == LENGTHS[-1]:
            broken = {"status": "oom", "message": OOM}
        elif implementation == "compiled" and seqlen == LENGTHS[-1]:
            broken = {"status": "failed", "message": "cell took longer than 600 s"}
        elif implementation == "sdpa_cudnn" and head_dim == 32:
            broken = {"status": "skipped", "message": NO_KERNEL}
        if broken:  # one row for the whole cell, as a run leaves it that dies in its first pass
            found.append(record("flash_benchmarking", case, implementation, "forward", **broken))
            continue
        middle = FLASH_MS[implementation] * (seqlen / 1024) ** 2 * head_dim / 32
        for mode, share in (("forward", 1.0), ("backward", 2.0), ("forward_backward", 3.0)):
            found.append(record("flash_benchmarking", case, implementation, mode, samples=spread(middle * share)))
        peak = {"quantity": "peak_memory", "unit": "MiB", "samples": [100.0 if implementation == "eager" else 10.0]}
        found.append(record("flash_benchmarking", case, implementation, "forward_backward", **peak))
    return found


def leaderboard_records() -> list[Record]:
    case = attention(16384, 64, heads=16)
    rows = [
        record("leaderboard_2025", case, implementation, "forward_backward", samples=spread(middle))
        for implementation, middle in {"eager": 90.0, "triton": 6.0, "sdpa_cudnn": 5.0}.items()
    ]
    return [*rows, record("leaderboard_2025", case, "flex", "forward_backward", status="failed", message="no compiler")]


MAKERS: dict[str, Callable[[], list[Record]]] = {
    "flash_benchmarking": flash_records,
    "leaderboard_2025": leaderboard_records,
    "attention_shapes": shape_records,
    "long_calls": long_call_records,
    "short_calls": short_call_records,
    "few_queries": few_queries_records,
    "hopper_ladder": ladder_records,
    "kernel_counters": counter_records,
    "tile_choice": tile_records,
    **MASK_MAKERS,
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


def test_frame_flattens_the_case_and_summarises_the_samples() -> None:
    frame = load_frame(
        [record("flash_benchmarking", attention(1024, 64), "triton", "forward", samples=[4.0, 1.0, 2.0])]
    )
    row = frame.iloc[0]
    assert (row["seqlen"], row["head_dim"], row["dtype"], row["causal"]) == (1024, 64, "bfloat16", True)
    assert (row["median"], row["quartile_low"], row["quartile_high"], row["first"]) == (2.0, 1.5, 3.0, 4.0)
    pairs = 1024 * 1025 // 2  # of the causal mask
    assert row["tflops"] == pytest.approx(4 * pairs * 64 / 2e-3 / 1e12)


def test_frame_keeps_the_newest_record_of_a_cell() -> None:
    old = record("flash_benchmarking", attention(1024, 64), "eager", "forward", samples=[1.0])
    new = dataclasses.replace(old, samples=[2.0], date="2026-02-02T00:00:00+00:00")
    assert list(load_frame([old, new])["median"]) == [2.0]


@pytest.mark.parametrize(
    ("change", "names"), [({"device": CPU}, "Test CPU, Test GPU"), ({"scale": "smoke"}, "handout, smoke")]
)
def test_mixed_devices_and_scales_are_refused(change: dict[str, Any], names: str) -> None:
    rows = flash_records()
    with pytest.raises(ValueError, match=names):
        load_frame([*rows[1:], dataclasses.replace(rows[0], **change)])


def test_interpreted_rows_carry_another_label_even_when_they_broke() -> None:
    broken = record("flash_benchmarking", attention(1024, 64), "triton", "forward", status="failed", message="no")
    frame = load_frame([dataclasses.replace(broken, device=CPU)])
    assert list(frame["label"]) == ["triton (interpreter)"]


def test_a_cell_that_broke_in_one_mode_is_selected_in_every_mode() -> None:
    frame = load_frame(flash_records())
    for quantity, mode in (("time", "backward"), ("time", "forward_backward"), ("peak_memory", None)):
        rows = select(frame, quantity, mode)
        statuses = rows[rows["implementation"] == "eager"].set_index(["seqlen", "head_dim"])["status"]
        assert dict(statuses) == {
            (seqlen, d): "oom" if seqlen == LENGTHS[-1] else "ok" for seqlen, d in itertools.product(LENGTHS, HEAD_DIMS)
        }


# Tables ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123456, "0.01235"), (12.3, "12.30"), (9.99996, "10.00"), (123456.7, "123,457"), (0, "0"), (3e-7, "3.000e-07")],
)
def test_numbers_have_four_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_flash_table_holds_medians_quartiles_speed_ups_and_reasons() -> None:
    body = table_of(flash_records(), "bfloat16.forward")
    assert row_of(body, "d") == ["d", "S", "eager", "compiled", "triton", "sdpa_cudnn", "triton over eager"]
    assert row_of(body, "64", "1024") == [
        "64", "1024", "16.00 (15.2–16.8)", "8.000 (7.60–8.40)", "2.000 (1.90–2.10)", "1.000 (0.950–1.05)", "8.00×",
    ]  # fmt: skip
    assert row_of(body, "32", "16384")[2:] == ["OOM", "failed [2]", "256.0 (243–269)", "skipped [1]", "–"]
    assert f"- OOM: `{OOM}`" in body
    assert f"- skipped [1]: `{NO_KERNEL}`" in body
    assert body.count(NO_KERNEL) == 1


def test_reasons_that_differ_in_their_numbers_share_a_line() -> None:
    rows = flash_records()
    sizes = itertools.count(1)
    rows = [dataclasses.replace(row, message=f"{next(sizes)} GiB") if row.status == "oom" else row for row in rows]
    assert "- OOM: `1 GiB` (and 1 alike)" in table_of(rows, "bfloat16.forward")


def test_a_cell_without_any_record_is_a_dash_with_its_legend() -> None:
    rows = [row for row in flash_records() if not (row.implementation == "triton" and row.case["seqlen_q"] == 4096)]
    body = table_of(rows, "bfloat16.backward")
    assert row_of(body, "64", "4096")[4] == "–"
    assert "- –: not measured" in body


def test_interpreted_kernels_have_no_speed_up_column() -> None:
    body = table_of(on_cpu(flash_records()), "bfloat16.forward")
    assert row_of(body, "d")[-2:] == ["triton (interpreter)", "sdpa_cudnn"]
    assert "none is compared" in body


def test_leaderboard_is_sorted_by_time_with_the_broken_last() -> None:
    body = table_of(leaderboard_records(), "implementations")
    assert [line.split(" | ")[0].strip("| ") for line in body.splitlines()[2:6]] == [
        "sdpa_cudnn", "triton", "eager", "flex",
    ]  # fmt: skip
    assert "failed [1]" in row_of(body, "flex")


@pytest.mark.parametrize("problem", MAKERS)
def test_every_status_of_the_records_reaches_the_tables(problem: str) -> None:
    frame = load_frame(MAKERS[problem]())
    text = "\n".join(section.body for section in sections(problem, frame))
    words = {"oom": "OOM", "failed": "failed [", "skipped": "skipped ["}
    assert all(words[status] in text for status in set(frame["status"]) - {"ok"})


def test_a_problem_without_a_table_of_its_own_gets_a_row_a_record() -> None:
    rows = [dataclasses.replace(row, problem="another") for row in leaderboard_records()]
    section = sections("another", load_frame(rows))[0]
    assert len(section.body.split("\n\n")[0].splitlines()) == 2 + len(rows)
    assert "dtype bfloat16" in section.title


def test_a_report_without_memory_has_no_table_of_it() -> None:
    """A CPU has no peak memory, and its report had an empty table of it."""
    rows = [row for row in on_cpu(flash_records()) if row.quantity != "peak_memory"]
    names = [section.name for section in sections("flash_benchmarking", load_frame(rows))]
    assert "bfloat16.forward" in names and "memory.bfloat16" not in names


@pytest.mark.parametrize(
    ("message", "span"),
    [("*a* <!-- b", "`*a* <!-- b`"), ("two\nlines", "`two lines`"), ("`a` or ``b``", "``` `a` or ``b`` ```")],
)
def test_a_reason_is_quoted_as_code(message: str, span: str) -> None:
    """An error message was read as Markdown where it stood in a list."""
    rows = [dataclasses.replace(row, message=message) if row.status == "oom" else row for row in flash_records()]
    assert f"- OOM: {span}" in table_of(rows, "bfloat16.forward").splitlines()
    assert f"S=16384, d=32, bfloat16: {span}." in answer("flash_benchmarking", load_frame(rows))


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


def test_times_in_seconds_and_milliseconds_share_a_table() -> None:
    """A time recorded in seconds stood as it was under a heading of milliseconds, and in the figure's line."""
    rows = [
        dataclasses.replace(row, unit="s", samples=[sample / 1000 for sample in row.samples])
        if row.implementation == "triton" and row.quantity == "time" else row for row in flash_records()
    ]  # fmt: skip
    for name in ("bfloat16.forward", "tflops.bfloat16.forward"):
        assert table_of(rows, name) == table_of(flash_records(), name)


def test_two_records_for_one_cell_of_a_table_are_refused() -> None:
    rows = leaderboard_records()
    other = dict(rows[0].case, note="another case that the keys do not tell apart")
    with pytest.raises(ValueError, match="several records for one cell"):
        plots("leaderboard_2025", load_frame([
            *rows, dataclasses.replace(rows[0], case=other), dataclasses.replace(rows[0], case=dict(other, seqlen_q=1)),
        ]))  # fmt: skip


# Figures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["forward", "backward", "forward_backward"])
def test_speed_plot_has_every_implementation_and_length(mode: str) -> None:
    found = plots("flash_benchmarking", load_frame(flash_records()))
    plot = next(plot for plot in found if plot.name == f"speed_bfloat16_{mode}")
    cells = set(zip(plot.data["series"], plot.data["panel"], plot.data["x"]))
    assert cells == set(itertools.product(FLASH_MS, ("d = 32", "d = 64"), LENGTHS))
    assert set(plot.data[~plot.data["drawn"]]["status"]) == {"oom", "failed", "skipped"}
    drawn = plot.data[plot.data["drawn"]]
    assert ((drawn["low"] < drawn["y"]) & (drawn["y"] < drawn["high"])).all()


def test_what_is_missing_at_the_same_places_shares_a_row_of_crosses() -> None:
    rows = [
        dataclasses.replace(row, status="skipped", message="too long", samples=[])
        if row.implementation in ("triton", "sdpa_cudnn") and row.case["seqlen_q"] == LENGTHS[0]
        else row
        for row in flash_records()
    ]
    figure = dict(problem_figures("flash_benchmarking", load_frame(rows)))["flash_benchmarking_speed_bfloat16_forward"]
    texts = [text.get_text() for text in figure.axes[HEAD_DIMS.index(64)].texts]
    assert "triton, sdpa_cudnn skipped" in texts and "triton skipped" not in texts


def test_speed_plot_annotates_cells_without_records() -> None:
    rows = [row for row in flash_records() if not (row.implementation == "triton" and row.case["seqlen_q"] == 4096)]
    data = plots("flash_benchmarking", load_frame(rows))[0].data
    absent = data[(data["series"] == "triton") & (data["x"] == 4096)]
    assert list(absent["status"]) == ["not measured"] * len(HEAD_DIMS)


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


def test_speed_axes_are_logarithmic_and_breaks_are_written_on_them() -> None:
    figures = dict(problem_figures("flash_benchmarking", load_frame(flash_records())))
    figure = figures["flash_benchmarking_speed_bfloat16_forward"]
    assert [(axes.get_xscale(), axes.get_yscale()) for axes in figure.axes] == [("log", "log")] * len(HEAD_DIMS)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts.count("eager OOM") == len(HEAD_DIMS)
    assert "sdpa_cudnn skipped" in texts
    lowest = min(line.get_ydata().min() for axes in figure.axes for line in axes.lines if line.get_linestyle() == "-")
    assert figure.axes[0].get_ylim()[0] < lowest  # the crosses stand below all data


def test_interpreted_kernels_are_named_but_not_drawn() -> None:
    figure = problem_figures("flash_benchmarking", load_frame(on_cpu(flash_records())))[0][1]
    assert not any("triton" in str(line.get_label()) for axes in figure.axes for line in axes.lines)
    assert any("eager" in str(line.get_label()) for axes in figure.axes for line in axes.lines)
    assert "triton (interpreter) is not drawn" in figure.legends[0].get_title().get_text()


def test_a_plot_with_nothing_to_draw_still_says_why() -> None:
    rows = [
        dataclasses.replace(row, status="skipped", samples=[], message="not today")
        for row in flash_records() if row.mode == "forward"
    ]  # fmt: skip
    figure = problem_figures("flash_benchmarking", load_frame(rows))[0][1]
    assert figure.legends[0].get_title().get_text().count("not today") == len(FLASH_MS)


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


def test_flash_answer_compares_quotes_the_oom_and_the_peer() -> None:
    said = answer("flash_benchmarking", load_frame(flash_records()))
    assert "At S=4096, d=64, bfloat16, causal, triton forward + backward takes 96.00 ms against 768.0 ms" in said
    assert "8.00× as fast" in said
    assert "The fastest peer there is sdpa_cudnn with 48.00 ms: triton has 0.500× its speed." in said
    assert f"eager first runs out of memory at S=16384, d=32, bfloat16: `{OOM}`." in said
    assert "10.0× as much" in said


def test_interpreted_kernels_are_compared_with_nothing() -> None:
    said = answer("flash_benchmarking", load_frame(on_cpu(flash_records())))
    assert "interpreter" in said
    assert "triton forward" not in said


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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a report on two problems, and a document."""
    root = tmp_path_factory.mktemp("built")
    folder = root / "results" / "test-gpu"
    for problem in ("flash_benchmarking", "leaderboard_2025"):
        append_records(folder / "records" / f"{problem}.jsonl", MAKERS[problem]())
    one_table = "flash_benchmarking.table.bfloat16.forward"
    names = ("headline", "leaderboard_2025.figures", one_table, "dense_masks.answer")
    (root / "README.md").write_text(document(*names))
    build_report(folder)
    update_documents([root / "README.md"], folder)
    return root


@pytest.fixture
def project(built: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(document, folder) of a fresh copy."""
    root = shutil.copytree(built, tmp_path / "copy")
    return root / "README.md", root / "results" / "test-gpu"


def test_report_writes_tables_figures_and_one_page(project: tuple[Path, Path]) -> None:
    readme, folder = project
    assert {path.name for path in (folder / "tables").iterdir()} == {"flash_benchmarking.md", "leaderboard_2025.md"}
    page = (folder / "report.md").read_text()
    assert "![" in page and "(figures/leaderboard_2025_ranking.png)" in page
    text = readme.read_text()
    assert "(results/test-gpu/figures/leaderboard_2025_ranking.png)" in text
    assert "| 1 × 16 × 16384 × 64 |" in text and "0.833×" in text
    assert "*Not measured on Test GPU: there are no records of `dense_masks`.*" in text
    assert str(folder.parent.parent) not in text + page


def test_the_published_folder_has_no_page_of_its_own(tmp_path: Path) -> None:
    append_records(tmp_path / "records" / "leaderboard_2025.jsonl", leaderboard_records())
    assert tmp_path / "report.md" not in build_report(tmp_path, published=True)
    assert check_documents([], tmp_path) == []


@pytest.mark.parametrize("problem", ["{outside}/PWN", "a/b", "../../x", "foo.bar"])
def test_a_problem_that_is_no_name_is_not_reported(problem: str, tmp_path: Path) -> None:
    """The problem of a record became a path: tables outside of the folder, or a KeyError."""
    folder = tmp_path / "results" / "test-gpu"
    path = folder / "records" / "leaderboard_2025.jsonl"
    append_records(path, leaderboard_records())
    bad = dataclasses.asdict(leaderboard_records()[0]) | {"problem": problem.format(outside=tmp_path)}
    with path.open("a") as file:
        file.write(json.dumps(bad) + "\n")
    with pytest.warns(UserWarning, match=r"leaderboard_2025\.jsonl:5: not a record, skipped \(record\.problem"):
        written = build_report(folder)
    assert {found for found in tmp_path.rglob("*") if found.is_file()} == {path, *written}
    assert {found.parent for found in written} == {folder, folder / "tables", folder / "figures"}


@pytest.mark.parametrize("problem", MAKERS)
def test_a_case_of_another_problem_is_left_out(problem: str, tmp_path: Path) -> None:
    """Its sizes were NaN on the axes of figures, and drawing them ended the report halfway."""
    rows = MAKERS[problem]()
    other = next(row for row in rows if row.status == "ok")
    append_records(tmp_path / "records" / "rows.jsonl", [*rows, dataclasses.replace(other, case={"type": "Other"})])
    with pytest.warns(UserWarning, match=rf"{problem}: a case of type 'Other', not \w+( or \w+)*, left out"):
        assert len(Blocks.load(tmp_path).frames[problem]) == len(rows)


@pytest.mark.parametrize("name", ["tables", "figures"])
def test_a_link_out_of_the_folder_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "results", tmp_path / "outside"
    append_records(folder / "records" / "leaderboard_2025.jsonl", leaderboard_records())
    outside.mkdir()
    (folder / name).symlink_to(outside)
    with pytest.raises(ValueError, match=rf"{name}.*: not inside of .*results, so nothing is written"):
        build_report(folder)
    assert not any(outside.iterdir()) and {path.name for path in folder.iterdir()} == {"records", name}


def test_a_plot_that_names_another_folder_is_refused() -> None:
    plot = plots("leaderboard_2025", load_frame(leaderboard_records()))[0]
    with pytest.raises(ValueError, match=r"plot '\.\./ranking' of problem 'leaderboard_2025' gives no file name"):
        file_stem("leaderboard_2025", dataclasses.replace(plot, name="../ranking"))


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, r"x\.md: no such document; it is looked for from"), ("<!-- begin generated: a -->", r"x\.md:1: unknown")],
)
def test_a_document_that_cannot_be_filled_leaves_the_folder_as_it_was(
    text: str | None, message: str, tmp_path: Path
) -> None:
    """Run outside of the repository, the report wrote tables and figures and only then missed its documents."""
    folder, document = tmp_path / "results", tmp_path / "x.md"
    append_records(folder / "records" / "leaderboard_2025.jsonl", leaderboard_records())
    if text is not None:
        document.write_text(text)
    with pytest.raises(ValueError, match=message):
        build_report(folder, published=True, documents=[document])
    assert [path.name for path in folder.iterdir()] == ["records"]


@pytest.mark.slow
def test_documents_are_filled_with_the_report(project: tuple[Path, Path]) -> None:
    readme, folder = project
    expected = readme.read_text()
    readme.write_text(document("headline", "leaderboard_2025.figures"))
    assert build_report(folder, documents=[readme])[-1] == readme
    assert readme not in build_report(folder, documents=[readme])
    assert expected != readme.read_text() and check_documents([readme], folder) == []


def test_same_records_in_any_order_give_the_same_bytes(project: tuple[Path, Path]) -> None:
    readme, folder = project
    paths = [path for path in folder.rglob("*") if path.suffix in (".md", ".png")]
    before = {path: path.read_bytes() for path in [readme, *paths]}
    for path in (folder / "records").iterdir():
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert sorted(build_report(folder)) == sorted(paths)
    assert update_documents([readme], folder) == []
    assert {path: path.read_bytes() for path in before} == before


def test_check_is_silent_when_nothing_differs(project: tuple[Path, Path]) -> None:
    readme, folder = project
    assert check_documents([readme], folder) == []


def test_check_finds_a_number_changed_by_hand(project: tuple[Path, Path]) -> None:
    readme, folder = project
    readme.write_text(readme.read_text().replace("| 15.0×", "| 25.0×"))
    (found,) = check_documents([readme], folder)
    assert found.startswith(f"{readme}:") and "25.0×" in found
    assert "25.0×" in readme.read_text()  # a check writes nothing


def test_check_finds_records_newer_than_tables_and_figures(project: tuple[Path, Path]) -> None:
    readme, folder = project
    later = [dataclasses.replace(row, date="2026-03-03T00:00:00+00:00") for row in leaderboard_records()]
    append_records(folder / "records" / "leaderboard_2025.jsonl", later)
    found = "\n".join(check_documents([readme], folder))
    assert "tables/leaderboard_2025.md:" in found
    assert "leaderboard_2025_ranking.png: shows other records" in found


def test_check_finds_missing_and_stale_files(project: tuple[Path, Path]) -> None:
    readme, folder = project
    figures = folder / "figures"
    (figures / "leaderboard_2025_ranking.png").rename(figures / "leaderboard_2025_old.png")
    (folder / "tables" / "gone.md").write_text("| 1 |\n")
    found = "\n".join(check_documents([readme], folder))
    assert "leaderboard_2025_ranking.png: missing" in found
    assert "leaderboard_2025_old.png: no records give this figure" in found
    assert "gone.md: no records give this table" in found
    assert f"{readme}: image results/test-gpu/figures/leaderboard_2025_ranking.png does not exist" in found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash_benchmarkin.table", r"README\.md:3: unknown block .* no problem 'flash_benchmarkin'"),
        ("flash_benchmarking.plot", "is none of table, answer, figures"),
        ("flash_benchmarking.table.bfloat17", "no table 'bfloat17'; it has bfloat16.forward"),
        ("flash_benchmarking.figures.nothing", "no figure 'nothing'; it has speed_bfloat16_forward"),
    ],
)
def test_unknown_blocks_leave_every_document_as_it_was(project: tuple[Path, Path], name: str, message: str) -> None:
    readme, folder = project
    readme.write_text(document(name))
    other = readme.with_name("other.md")
    other.write_text(document("headline"))
    with pytest.raises(ValueError, match=message):
        update_documents([other, readme], folder)
    assert other.read_text() == document("headline")


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no records to report"):
        build_report(tmp_path)


def test_headline_does_not_speak_of_interpreted_kernels(tmp_path: Path) -> None:
    append_records(tmp_path / "records" / "flash_benchmarking.jsonl", on_cpu(flash_records()))
    assert Blocks.load(tmp_path).text("headline", tmp_path / "x.md") == NO_SPEED


def test_every_problem_with_a_table_is_tested_here() -> None:
    assert set(TABLES) == set(CASE_TYPES) == set(MAKERS)
