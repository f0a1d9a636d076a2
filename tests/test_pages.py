"""Tables, figures and pages: what a reader sees of records, and what a page may not say."""

import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from msgspec.structs import replace

from cs336_systems.bench.placing import NotMade
from cs336_systems.bench.records import Record, append_records
from cs336_systems.bench.spec import Experiment, experiments, load, measured_problems
from cs336_systems.book.figures import (
    COLORS,
    PAGE_INK,
    Bars,
    Heat,
    Lines,
    Spans,
    scale_of,
    spec_of,
    spread,
)
from cs336_systems.book.frames import digits, load_frame, pick, speed
from cs336_systems.book.html_report import write_report
from cs336_systems.book.lookups import Page
from cs336_systems.book.pages import ANSWER, FIGURE, Book, check_template
from cs336_systems.book.tables import ABSENT, Listing, Pick, Pivot, Ratio, Wide, escape
from cs336_systems.config import RunConfig
from cs336_systems.handout import HANDOUT
from cs336_systems.subjects.implementations import IMPLEMENTATIONS
from tests.test_records import RUN, broken, gpu_record

ROOT = Path(__file__).resolve().parent.parent
GPU_RUN = replace(RUN, device={"name": "a GPU", "kind": "cuda"}, scale="smoke")
SHAPES = load("attention_shapes")
CASES = list(SHAPES.cases(RunConfig(scale="smoke", device="cuda")))


def row(implementation: str, samples: list[float], case: object = CASES[0], **changes) -> Record:
    return gpu_record(
        "attention_shapes", case, implementation, samples, **{"run": GPU_RUN} | changes
    )


def frame_of(*records: Record) -> pd.DataFrame:
    return load_frame(SHAPES, records)


DOWN = {"S": "seqlen_q", "d": "head_dim"}
TIMES = Pivot(title="t", down=DOWN, where={"quantity": "time"}, ratios=(("hopper", "flex"),))


def texts(table) -> list[list[str]]:
    return [[cell.text for cell in line] for line in table.lines]


def test_rows_stand_in_the_order_of_the_cells_whatever_that_of_the_file():
    records = [row(name, [1.0], case) for case in CASES for name in ("triton", "hopper", "flex")]
    table = TIMES.build(frame_of(*reversed(records)))
    assert table.header == ["S", "d", "triton", "hopper", "flex", "speed of hopper over flex"]
    assert [line[1].text for line in table.lines] == ["64", "128"] and table.title == "t (ms)"


def test_a_cell_without_a_number_says_why():
    lost = {"triton": ("oom",), "hopper": ("skipped", "needs\na GPU"), "flex": ("failed",)}
    records = [broken(row(name, []), *why) for name, why in lost.items()]
    table = TIMES.build(
        frame_of(*records, row("sdpa_flash", [2.0]), row("sdpa_cudnn", [3.0], CASES[1]))
    )
    assert texts(table)[0][2:] == ["OOM", "skipped", ABSENT, "failed", "2.00", ABSENT]
    less, needs = table.without_blanks()
    assert less.header == ["S", "d", "triton", "sdpa_cudnn", "flex", "sdpa_flash"], (
        "nor an unknown ratio"
    )
    assert needs == {"hopper": "needs a GPU"}


def test_the_report_prints_why_something_failed(tmp_path):
    """The reason was in the record alone, while a skip's stood under the table."""
    records = [broken(row("flex", [], case), "failed", "no <backward>") for case in CASES]
    append_records(tmp_path / "records/attention_shapes.jsonl", [row("triton", [1.0]), *records])
    assert write_report(tmp_path) == ["attention_shapes, rows: 2 failed, 1 ok"]
    (line,) = re.findall(
        r"flex failed \(.* and 1 more\): .*</p>", (tmp_path / "report.html").read_text()
    )
    assert line.endswith("no &lt;backward&gt;</p>")


def test_interpreted_times_are_no_times():
    frame = frame_of(row("triton", [5.0], kernel="interpreter portable"), row("eager", [1.0]))
    assert (
        TIMES.build(frame).lines[0][2].text == "ran, agrees"
        and TIMES.build(frame).lines[0][2].number is None
    )
    assert Bars(x="shape").rows(frame)["implementation"].tolist() == ["eager"]


def test_no_table_has_a_number_of_the_interpreter():
    """Those that list records, and quantities such as `dkdv_time`, showed its milliseconds and
    TFLOP/s.
    """
    kernel = "interpreter portable"
    times = [
        row("triton", [5.0], quantity=quantity, kernel=kernel) for quantity in ("time", "dkdv_time")
    ]
    memory = row("triton", [3.0], quantity="saved_for_backward", unit="MiB", kernel=kernel)
    frame = frame_of(*times, memory)
    listing = Listing(
        columns={"ms": "median", "TFLOP/s": "tflops", "twice": lambda row: 2 * row["median"]}
    )
    unknown = ["ran, agrees", ABSENT, ABSENT]
    assert sorted(texts(listing.build(frame))) == [["3.00", ABSENT, "6.00"], unknown, unknown]
    wide = Wide(down=("implementation",), where={"unit": "ms"}, columns={
        "dkdv": Pick({"quantity": "dkdv_time"}), "time": Pick({"quantity": "time"}),
        "rate": Pick({"quantity": "time"}, value="tflops"), "ratio": Ratio("dkdv", "time"),
    })  # fmt: skip
    assert texts(wide.build(frame))[0] == ["triton", *["ran, agrees"] * 3, ABSENT]
    assert frame[frame["interpreted"]]["samples"].map(len).sum() == 0


def test_a_ratio_is_of_one_run_and_by_turns_of_rounds():
    ours, theirs = row("hopper", [1.0, 2.0, 4.0]), row("flex", [2.0, 2.0, 12.0])
    frame = frame_of(ours, theirs)
    assert texts(TIMES.build(frame))[0][-1] == "2.00", "the median of 2, 1 and 3"
    assert texts(TIMES.build(frame.assign(by_turns=False)))[0][-1] == "1.00"
    other = replace(theirs, run=replace(GPU_RUN, id="another"))
    assert texts(TIMES.build(frame_of(ours, other)))[0][-1] == ABSENT
    assert math.isnan(speed(None, None))


def test_two_records_in_one_cell_are_an_error():
    frame = frame_of(row("hopper", [1.0]), row("hopper", [1.0], mode="backward"))
    with pytest.raises(ValueError, match="several records for hopper"):
        TIMES.build(frame)
    with pytest.raises(KeyError, match="no column 'size'; there are run, problem"):
        pick(frame, {"size": 1})


def test_wide_tables_put_quantities_side_by_side_in_their_units():
    frame = frame_of(
        row("hopper", [0.5]), row("hopper", [2048.0], quantity="peak_memory", unit="MiB")
    )
    wide = Wide(down=("implementation",), columns={
        "time (µs)": Pick({"quantity": "time"}, unit="µs"), "peak (GiB)": Pick({"quantity": "peak_memory"}, unit="GiB"),
        "share": Ratio("peak (GiB)", "time (µs)", percent=True), "none": Pick({"quantity": "loss"}),
    })  # fmt: skip
    assert texts(wide.build(frame)) == [["hopper", "500", "2.00", "0.40 %", ABSENT]]
    listing = Listing(
        columns={"who": "implementation", "twice": lambda row: 2 * row["median"]},
        where={"unit": "ms"},
    )
    assert texts(listing.build(frame)) == [["hopper", "1.00"]]
    with pytest.raises(ValueError, match="no factor from MiB to µs"):
        Pivot(down=("implementation",), across="quantity", unit="µs").build(frame)


def test_wide_tables_tell_sizes_apart_that_a_run_has_chosen():
    """The report of `run leaderboard_2025 --seqlen 64,128` ended at two records in one cell."""
    wide = Wide(down=("implementation",), columns={"ms": Pick({"quantity": "time"})})
    table = wide.build(frame_of(row("hopper", [1.0]), row("hopper", [2.0], CASES[1])))
    assert table.header == ["implementation", "head dim", "ms"]
    assert texts(table) == [["hopper", "64", "1.00"], ["hopper", "128", "2.00"]]


def test_text_of_records_is_no_markup():
    """HTML and links of a record's text reached the page."""
    text = escape(
        "<script>alert(1)</script> [a](javascript:x) | `b` *c* _d_ sdpa_flash <!-- begin -->\n# e"
    )
    assert text == (
        "&lt;script&gt;alert(1)&lt;/script&gt; \\[a](javascript:x) \\| \\`b\\` \\*c\\* \\_d\\_ sdpa_flash "
        "&lt;!-- begin --&gt; # e"
    )


def test_a_record_that_an_experiment_cannot_read_is_told_and_left_out():
    for odd, message in (
        (
            row("hopper", [1.0], {"type": "Odd"}),
            "case is of the class Odd, must be of AttentionShape",
        ),
        (row("hopper", [1.0], mode="sideways"), "no columns .*: 'sideways' is unknown here"),
    ):
        with pytest.warns(UserWarning, match=f"attention_shapes: hopper left out, {message}"):
            frame = frame_of(odd, row("flex", [1.0]))
        assert list(frame["implementation"]) == ["flex"]
    with pytest.raises(
        ValueError, match="records of different devices cannot share a table: a GPU, a processor"
    ):
        frame_of(row("hopper", [1.0]), row("flex", [1.0], run=RUN))


def test_of_two_rows_for_one_cell_the_promised_or_the_newest_is_shown():
    """A row of a batch size that the experiment does not have ended the report at two records in
    one cell.
    """
    promised = row("hopper", [1.0])
    larger, newest = (
        replace(promised, case=promised.case | {"batch": size}, samples=[float(size)])
        for size in (3, 5)
    )
    for records, shown in (
        ([promised, larger], "1.00"),
        ([larger, promised], "1.00"),
        ([larger, newest], "5.00"),
    ):
        with pytest.warns(
            UserWarning, match=r"table 't', hopper of .*: hopper left out, a second record of"
        ):
            (line,) = texts(
                Pivot(title="t", down=DOWN, where={"quantity": "time"}).build(frame_of(*records))
            )
        assert line[2] == shown
    with pytest.warns(
        UserWarning, match="table 't', ms of .*: hopper left out, a second record of"
    ):
        wide = Wide(title="t", down=DOWN, columns={"ms": Pick({"quantity": "time"})}).build(
            frame_of(promised, larger)
        )
    assert texts(wide)[0][2] == "1.00"


def test_a_report_is_of_the_device_that_most_records_are_of(tmp_path):
    """One row of another device ended it; which one it is says the warning."""
    path = tmp_path / "records/attention_shapes.jsonl"
    other = replace(GPU_RUN, id="another", device={"name": "B200 \x1b[2J", "kind": "cuda"})
    append_records(
        path, [row("triton", [1.0]), row("hopper", [1.0]), row("flex", [1.0], run=other)]
    )
    with pytest.warns(
        UserWarning,
        match=r"flex left out, it was measured on B200 \\x1b\[2J at scale smoke, most were",
    ):
        assert write_report(tmp_path) == ["attention_shapes, rows: 2 ok"]


def test_a_table_that_cannot_be_made_costs_itself(tmp_path, monkeypatch):
    broken_table = Pivot(title="t", down=DOWN, where={"no_such_column": 1})
    monkeypatch.setattr(SHAPES, "tables", {"broken": broken_table, "times": TIMES})
    append_records(tmp_path / "records/attention_shapes.jsonl", [row("triton", [1.0])])
    with pytest.warns(
        NotMade,
        match="the table broken of attention_shapes cannot be made: KeyError: .no column 'no_s",
    ):
        assert write_report(tmp_path)
    assert "<h3>t (ms)</h3>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://a.example", "see https:&#47;/a.example"), ("www.a.example", "www&#46;a.example"),
        ("$x$ ~~y~~", "\\$x\\$ \\~\\~y\\~\\~"),
    ],
)  # fmt: skip
def test_text_of_records_is_no_link_and_no_formula(text, shown):
    """GitHub makes links of bare addresses, and formulas of what stands between dollars."""
    assert escape(text) == shown


# Figures

SERIES = frame_of(
    row("hopper", [0.0, 1.0, 2.0, 5.0], quantity="compute_intervals"),
)
MANY = frame_of(*(row(name, [time, 2 * time]) for name, time in (("hopper", 1.0), ("flex", 20.0))))
KINDS = {
    "lines": (Lines(x="seqlen_q", facet="head_dim"), MANY),
    "bars": (Bars(x="shape", y="tflops", y_title="TFLOP/s"), MANY),
    "heat": (Heat(x="implementation", y="head_dim"), MANY),
    "spans": (
        Spans(x="", y="quantity", color="quantity", where={"quantity": "compute_intervals"}),
        SERIES,
    ),
    "spans with text": (
        Spans(x="", y="quantity", color="quantity", text="implementation"),
        SERIES,
    ),
}


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (9.996, "10.0"),
        (0.0123456, "0.0123"),
        (123456.7, "123,457"),
        (1e-9, "1.00e-09"),
        (math.nan, "–"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert digits(value) == text


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_drawn_the_same_each_time(kind):
    import vl_convert

    figure, frame = KINDS[kind]
    spec = spec_of(figure.chart(frame))
    assert json.dumps(spec) == json.dumps(spec_of(figure.chart(frame)))
    assert vl_convert.vegalite_to_png(spec).startswith(b"\x89PNG")
    assert figure.chart(frame[frame["status"] == "oom"]) is None


def test_a_span_has_its_text_in_its_middle():
    """Without a text the bars are as they were: the data of a figure holds no more columns."""
    where = {"x": "", "y": "quantity", "color": "quantity"}
    plain, named = (
        spec_of(figure.chart(SERIES))
        for figure in (Spans(**where), Spans(**where, text="implementation"))
    )
    assert plain["data"]["values"] == [
        {"quantity": "compute_intervals", "start": start, "end": end}
        for start, end in ((0.0, 1.0), (2.0, 5.0))
    ]
    bars, words = named["layer"]
    assert (words["encoding"]["x"]["field"], words["encoding"]["text"]["field"]) == (
        "middle",
        "implementation",
    )
    drawn = [(row["middle"], row["implementation"]) for row in named["data"]["values"]]
    assert drawn == [(0.5, "hopper"), (3.5, "hopper")]


def test_axes_are_logarithmic_from_a_range_of_ten_on_and_bars_never():
    assert scale_of(pd.Series([1.0, 9.0])).to_dict() == {"zero": False}
    scale = scale_of(pd.Series([1.0, 10.0])).to_dict()
    assert scale == {"base": 10, "type": "log", "nice": False}, "not widened to whole decades"
    assert scale_of(pd.Series([0.0, 10.0])).to_dict() == {"zero": False}
    assert '"log"' not in json.dumps(spec_of(Bars(x="shape").chart(MANY)))
    assert '"log"' in json.dumps(spec_of(Lines(x="seqlen_q").chart(MANY)))


def test_bars_lie_where_a_name_is_long():
    short, long = (
        frame_of(row("hopper", [1.0])).assign(shape=name) for name in ("xl", "1 × 16 × 16,384 × 64")
    )
    specs = (spec_of(Bars(x="shape").chart(frame)) for frame in (short, long))
    standing, lying = (spec["layer"][0]["encoding"] for spec in specs)
    assert (standing["x"]["field"], lying["y"]["field"]) == ("shape", "shape")


def test_a_title_is_the_claim_where_the_rows_bear_it_out():
    """A figure of other records, such as a reader's own, must not repeat what those published show."""

    def claim(rows: pd.DataFrame) -> str:
        return f"{len(rows)} are fast" if rows["median"].max() < 3 else ""

    figure = Bars(x="shape", title="Speed", claim=claim, subtitle="forward")
    fast, slow = (frame_of(row("hopper", [time])) for time in (1.0, 4.0))
    assert (figure.heading(fast), figure.heading(slow)) == ("1 are fast", "Speed")
    shown = spec_of(figure.chart(fast))["title"]
    assert shown["text"] == ["1 are fast"] and shown["subtitle"][-1].endswith("forward")


def test_a_subtitle_names_what_all_rows_have_in_common():
    figure = Bars(x="shape")
    alike = frame_of(row("hopper", [1.0]), row("flex", [2.0])).assign(
        device="H200", dtype="bfloat16", heads=1
    )
    assert {"H200", "bfloat16", "one head"} <= set(figure.facts(alike))
    assert not {"bfloat16", "float32"} & set(
        figure.facts(alike.assign(dtype=["bfloat16", "float32"]))
    )


def test_labels_at_the_ends_of_lines_keep_their_distance_and_order():
    places = spread([10.0, 11.0, 12.0, 90.0], 15)
    assert places == pytest.approx([-4, 11, 26, 90])
    times = {"hopper": 1.0, "triton": 1.01, "flex": 50.0}
    rows = frame_of(*(row(name, [time]) for name, time in times.items()))
    values = spec_of(Lines(x="seqlen_q").chart(rows))["data"]["values"]
    labels = {value["label"]: value["shift"] for value in values}
    assert labels["triton (ours)"] < 0 < labels["hopper (ours)"] and labels["FlexAttention"] == 0


def test_letters_are_black_on_white_and_the_pages_in_a_report():
    chart = Bars(x="shape").chart(MANY)
    white, report = spec_of(chart)["config"], spec_of(chart, "transparent", PAGE_INK)["config"]
    for config, ink in ((white, "black"), (report, "currentColor")):
        assert {config[part]["labelColor"] for part in ("axis", "legend", "header")} == {ink}
        assert config["title"]["color"] == config["text"]["color"] == ink
        assert min(config["text"]["fontSize"], config["axis"]["labelFontSize"]) >= 12


def test_every_figure_of_a_page_states_a_claim_that_its_records_bear_out(book):
    for name in book.names:
        for figure in FIGURE.findall(book.template(name)):
            drawn = experiments()[name].figures[figure]
            assert drawn.heading(book.frame(name)) != drawn.title, f"{name}: {figure}"


def test_an_implementation_has_one_colour_whoever_stands_beside_it():
    """Beside one without a colour of its own all got others, ten of them by turns for thirteen."""
    names = ("eager", "own:Fast", *IMPLEMENTATIONS[1:])
    rows = frame_of(*(row(name, [1.0]) for name in names)).assign(place=0)
    color = spec_of(Bars(x="shape").chart(rows))["layer"][0]["encoding"]["color"]
    given = dict(zip(color["scale"]["domain"], color["scale"]["range"]))
    assert given.keys() == set(names) and len(set(given.values())) == len(names)
    assert given["eager"] == COLORS["eager"] and set(IMPLEMENTATIONS) <= COLORS.keys()
    named = spec_of(Bars(x="implementation").chart(rows))["layer"][0]["encoding"]["color"]
    assert named["legend"] is None, "the axis has the names"
    assert color["legend"] is None, "lying bars carry their names"
    standing = spec_of(Bars(x="head_dim").chart(rows))["layer"][0]["encoding"]["color"]
    assert standing["legend"]["orient"] == "top"


# Pages


def test_a_calculation_is_a_frame_without_records(book):
    frame = book.frame("communication_accounting")
    numbers = load("communication_accounting").numbers(frame)
    assert (numbers["fixed_terabytes"], numbers["fewest"], numbers["tokens"]) == (
        "3.518",
        "38",
        "319.4",
    )
    assert (
        "communication_accounting" not in measured_problems()
        and book.folder_of("tp_calcs").name == "calculated"
    )


@pytest.fixture(scope="module")
def book() -> Book:
    return Book(ROOT, ROOT / "results" / "nvidia-h200")


@pytest.mark.parametrize(
    "line, typed",
    [
        ("It takes 1.07 ms.", "1.07 ms"), ("up to 12,345 MiB,", "12,345 MiB"), ("1.12× as fast", "1.12×"),
        ("(-0.55 %)", "-0.55 %"), ("from 3 to 5 TFLOP/s", "5 TFLOP/s"), ("| 43 µs |", "43 µs"),
        ("2.5 times", "2.5 times"),
    ],
)  # fmt: skip
def test_a_measured_number_typed_by_hand_is_found(line, typed):
    (found,) = check_template(f"{ANSWER} So.\n\n{line}\n")
    assert found == (
        3,
        f"{typed!r} is typed by hand: take it from a record, or quote it with given()",
    )


def test_the_answer_stands_at_the_beginning():
    assert check_template("# x\n" * 11 + f"{ANSWER} late")[0][1].startswith("the answer")


def test_a_page_that_cannot_be_made_names_itself(book, tmp_path):
    (tmp_path / "writeup").mkdir()
    for text, message in (
        (
            '{{ time("hopper") }}',
            "records of attention_shapes have {'quantity': 'time', 'implementation': 'hop",
        ),
        ('{{ tme("hopper") }}', "'tme' is undefined"),
        # One H100's rings of four ranks are another run than those of one: the page had "–× as
        # fast".
        (
            '{{ of("context_parallel", "nvidia-h100").number("time", column="of_one", length=524288, kv_heads=8, '
            'num_ranks=4, mode="forward_backward") }}',
            "of_one of time of None is no number",
        ),
        ('{{ table("speed") }}', "no table 'speed'; there are forward, backward"),
        ('{{ figure("speed") }}', "no figure 'speed'"),
        ('{{ table("forward", columns=["no"]) }}', r"has no columns \['no'\]"),
        ('{{ given("3 ms", "") }}', "must say its source"),
        ("", "must begin with '# attention_shapes'"),
    ):
        heading = "# attention_shapes\n" if text else "# other\n"
        (tmp_path / "writeup" / "attention_shapes.md").write_text(heading + text)
        with pytest.raises(
            ValueError, match=r"writeup/attention_shapes.md: .*" + message.replace("{", r"\{")
        ):
            Book(tmp_path, book.folder).page("attention_shapes")


def test_one_quantity_with_two_values_is_found(book, tmp_path, monkeypatch):
    """An overlapped step took 252 ms on its page and 248 on that of the turns."""
    (tmp_path / "writeup").mkdir()
    where = 'num_ranks=2, precision="bfloat16 autocast", model="xl", mode="train_step"'
    shown = {
        "data_parallel_turns": f'{{{{ time("overlap", {where}) }}}}',
        "ddp_overlap_individual_parameters_benchmarking": f'{{{{ time("overlap", {where}) }}}}',
    }
    for name, text in shown.items():
        (tmp_path / "writeup" / f"{name}.md").write_text(f"# {name}\n\n{text}\n")
    (found,) = Book(tmp_path, book.folder).contradictions()
    assert found.startswith("NVIDIA H200 overlap train_step time ") and "num_ranks=2" in found
    assert all(f" ms on {name}" in found for name in shown)
    # all tables and figures: nothing about values
    monkeypatch.setattr(Book, "_stale", lambda book: ())
    assert f"one quantity, two values: {found}" in Book(tmp_path, book.folder).check()
    name = "ddp_overlap_individual_parameters_benchmarking"
    cited = f'{{{{ of("data_parallel_turns").time("overlap", {where}) }}}}'
    (tmp_path / "writeup" / f"{name}.md").write_text(f"# {name}\n\n{cited}\n")
    assert Book(tmp_path, book.folder).contradictions() == []


def test_a_page_that_cannot_be_made_is_said_in_its_place(book, tmp_path):
    """It ended `report`, and no page was written."""
    (tmp_path / "writeup").mkdir()
    good = "# mixed_precision_accumulation\n\n> **Answer.** {{ device() }}\n"
    (tmp_path / "writeup" / "mixed_precision_accumulation.md").write_text(good)
    (tmp_path / "writeup" / "attention_shapes.md").write_text(
        '# attention_shapes\n\n{{ time("nobody") }}\n'
    )
    there = Book(tmp_path, book.folder)
    with pytest.warns(
        NotMade, match="the section attention_shapes of beyond.md cannot be made: .*0 records of"
    ):
        document = there.document("beyond.md")
    assert document.endswith("## attention_shapes\n\n*The records do not have what this says: `cs336-systems report "
                             "--check` names it.*\n")  # fmt: skip
    assert "> **Answer.** NVIDIA H200\n" in there.document("writeup.md")


def test_a_link_to_another_page_is_one_to_its_section_in_the_document(book, tmp_path):
    (tmp_path / "writeup").mkdir()
    links = "[a](few_queries.md), [b](../cs336_systems/config.py) and [c](fsdp_calcs.md)\n"
    (tmp_path / "writeup" / "attention_shapes.md").write_text(f"# attention_shapes\n\n{links}")
    page = Book(tmp_path, book.folder).page("attention_shapes")
    assert page.endswith(
        "[a](#few_queries), [b](cs336_systems/config.py) and [c](writeup.md#fsdp_calcs)\n"
    )


def test_ranks_of_kernels_are_numbers(book):
    """They stood there as `other_kernel_1_time`."""
    table = (
        load("nsys_profile")
        .tables["kernels"]
        .build(book.frame("nsys_profile"))
        .only(columns=["of", "rank"])
    )
    assert texts(table)[:10] == [
        [of, str(rank)] for of in ("all", "no matmul") for rank in range(1, 6)
    ]


def test_lookups(book):
    page = Page(book, "attention_shapes")
    where = {"mode": "forward", "shape": "1 × 16 × 16,384 × 64 causal"}
    assert (
        page.time("hopper", **where) == "1.11 ms"
        and page.time("hopper", unit="µs", **where) == "1,112 µs"
    )
    assert page.number("time", "hopper", **where) == pytest.approx(1.11160)
    assert page.speed("hopper", "sdpa_cudnn", **where) == "1.18×"
    assert (
        page.of("mixed_precision_accumulation").value("sum", column="kernel", accumulator="float16")
        == "9.953125"
    )
    assert page.device() == "NVIDIA H200"
    with pytest.raises(ValueError, match="no times of hopper and eager in one run"):
        page.speed("hopper", "eager")


# The list


def test_another_gpus_records_are_shown_of_it_alone(book):
    there = Page(book, "context_parallel").of("context_parallel", "nvidia-h100")
    assert there.device().startswith("NVIDIA H100")
    for problem, device in (
        ("leaderboard_2026", "nvidia-h100"),
        ("context_parallel", "nvidia-h1000"),
    ):
        with pytest.raises(ValueError, match=f"no records of {problem} in {device}"):
            Page(book, problem).of(problem, device)


def test_experiments_are_named_like_their_files_and_stand_in_handout_order():
    assert len(HANDOUT) == 31
    names = [name for name in experiments() if name in HANDOUT]
    assert names == sorted(names, key=list(HANDOUT).index)
    for name, experiment in experiments().items():
        assert experiment.name == name and experiment.title and isinstance(experiment, Experiment)
    files = {
        file.stem: file.parent.name
        for file in (ROOT / "cs336_systems" / "experiments").rglob("[!_]*.py")
    }
    assert files == {name: "experiments" if name in HANDOUT else "beyond" for name in experiments()}
