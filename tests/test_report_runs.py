"""Numbers of several runs: named by their commits, set side by side, never divided; figures that hold many of them."""

from __future__ import annotations

from dataclasses import replace

from cs336_systems.records import Record
from cs336_systems.report.answers import answer
from cs336_systems.report.distributed import COMMUNICATION
from cs336_systems.report.figures import problem_figures
from cs336_systems.report.frames import load_frame
from cs336_systems.report.plots import plots
from cs336_systems.report.sharding import FSDP_PROBLEM as FSDP
from cs336_systems.report.styles import colour, marker
from cs336_systems.report.tables import sections
from tests.distributed_records import communication_records, parallel_case, record, sharding_records, step_records

OVERLAP = "ddp_overlap_individual_parameters_benchmarking"
EARLIER = {"commit": "bada55bada55bada", "date": "2026-01-01T03:04:05+00:00"}


def body_of(problem: str, name: str, records: list[Record]) -> str:
    return next(part.body for part in sections(problem, load_frame(records)) if part.name == name)


def line(body: str, *keys: str) -> list[str]:
    lines = [[cell.strip() for cell in one.strip("| ").split(" | ")] for one in body.splitlines()]
    return next(found for found in lines if found[: len(keys)] == list(keys))


def of_two_runs(*earlier: str) -> list[Record]:
    """The records of one problem, those of `earlier` implementations measured the day before."""
    return [replace(row, **EARLIER) if row.implementation in earlier else row for row in step_records(OVERLAP)]


def test_steps_of_two_runs_are_named_by_their_commits_and_not_divided():
    frame = load_frame(of_two_runs("naive", "flat"))
    body = body_of(OVERLAP, "steps", of_two_runs("naive", "flat"))
    assert line(body, "naive")[3] == "other run" and line(body, "naive")[-1] == "`bada55bada`"
    assert line(body, "overlap")[3] == "1.04×" and line(body, "overlap")[-1] == "`c0ffee`"
    assert "- other run: than its peer's" in body
    said = answer(OVERLAP, frame)
    assert "flat has 1.08× the speed of naive" in said, "of one run"
    assert "overlap and naive are of two runs and not compared" in said and "overlap has" not in said
    assert "commit" not in body_of(OVERLAP, "steps", step_records(OVERLAP)), "all of one run"


def test_bars_and_lanes_of_an_earlier_run_are_marked():
    found = plots(OVERLAP, load_frame(of_two_runs("naive")))
    bars = found[0]
    assert bars.runs == ("c0ffee", "bada55bada")
    assert set(bars.data[bars.data["series"] == "naive"]["run"]) == {"bada55bada"}
    assert "times of different runs do not compare" in " ".join(bars.notes)
    figure = dict(problem_figures(OVERLAP, load_frame(of_two_runs("naive"))))[f"{OVERLAP}_steps"]
    hatches = [patch.get_hatch() for patch in figure.axes[0].patches]
    assert sorted(map(str, hatches)) == ["///", "None", "None", "None", "None"]
    assert "commit bada55bada" in [text.get_text() for text in figure.legends[0].get_texts()]
    panels = {panel for plot in found if plot.kind == "timeline" for panel in plot.data["panel"]}
    assert {"naive, commit bada55bada", "overlap, commit c0ffee"} <= panels
    assert plots(OVERLAP, load_frame(step_records(OVERLAP)))[0].runs == ()


def test_a_calls_cost_and_the_best_bucket_are_of_one_run():
    problem = "ddp_bucketed_benchmarking"
    said = answer(problem, load_frame(step_records(problem)))
    assert "the step of bucketed is shortest with buckets of 1000 MiB (101.0 ms) and longest with 1 MiB" in said
    assert (
        "xl: at most 1 MiB make 258 buckets (the last sent has 97.7 MiB, one parameter larger than the limit), 1000 "
        "MiB 14 (the last sent has" in said
    )
    assert said.count("larger than the limit") == 1
    mixed = [replace(row, **EARLIER) if row.case["bucket_size_mb"] == 1.0 else row for row in step_records(problem)]
    said = answer(problem, load_frame(mixed))
    assert "longer than" not in said and "shortest" not in said


def test_collectives_of_two_runs_are_named_by_their_commits():
    rows = [replace(row, **EARLIER) if row.case["num_bytes"] == 10**6 else row for row in communication_records()]
    body = body_of(COMMUNICATION, "nccl", rows)
    assert line(body, "all-reduce", "4", "1")[-1] == "`bada55bada`"
    assert line(body, "all-reduce", "4", "1000")[-1] == "`c0ffee`"
    assert "c0ffee" not in body_of(COMMUNICATION, "nccl", communication_records())


def test_no_two_lines_of_the_bandwidth_figure_look_alike():
    """gloo of 2 and of 8 ranks had one colour and one marker, and NCCL of 4 those of gloo of 4."""
    names = [f"{backend}, {ranks} ranks" for backend in ("nccl", "gloo") for ranks in (2, 4, 6, 8)]
    assert len({colour(name) for name in names}) == len(names)
    assert len({(colour(name), marker(name)) for name in names}) == len(names)
    assert {marker(name) for name in names[:4]} == {marker(name) for name in names[4:]}, "a marker a number of ranks"


def fsdp_of_two_runs() -> list[Record]:
    """All cells of FSDP, ours of an earlier commit and day than the others."""
    rows = sharding_records(FSDP)
    return [replace(row, **EARLIER) if row.implementation == "fsdp" else row for row in rows]


def test_times_of_two_runs_are_not_divided_but_bytes_are():
    """FSDP at 4 ranks of a slower machine was said to take 1.17× of fully_shard's time."""
    frame = load_frame(fsdp_of_two_runs())
    said = answer(FSDP, frame)
    assert (
        "xl, 2 ranks, float32: a step takes 50.00 ms with FSDP at commit `bada55bada` and 100.0 ms with torch "
        "fully_shard at commit `c0ffee`: two runs, not compared." in said
    )
    assert said.count("two runs") == 7, "once a case with PyTorch's: 10b, and xl in three ways on one rank and on two"
    assert "xl, 1 rank, float32: a step takes" in said and "1 ranks" not in said
    assert "50.00 ms with FSDP (a unit a layer), 0.500× the 100.0 ms of torch fully_shard." in said
    assert "ms with FSDP, " not in said
    assert "its peak is 0.500× that of torch fully_shard" in said, "bytes do not depend on the run"
    body = body_of(FSDP, "step", fsdp_of_two_runs())
    assert "`bada55bada` |" in body and "`c0ffee` |" in body and "- commit: of the run that a row is of" in body
    time = next(plot for plot in plots(FSDP, frame) if plot.name == "time")
    assert time.runs == ("c0ffee", "bada55bada")
    lanes = next(plot for plot in plots(FSDP, frame) if plot.kind == "timeline")
    assert set(lanes.data["panel"]) == {"FSDP, commit bada55bada", "torch fully_shard, commit c0ffee"}


def test_panels_go_from_few_ranks_to_many_and_the_names_below_are_apart():
    """The largest model is measured on two ranks only, and its panel came first."""
    frame = load_frame(sharding_records(FSDP))
    time = next(plot for plot in plots(FSDP, frame) if plot.name == "time")
    assert list(dict.fromkeys(time.data["panel"])) == ["ranks = 1", "ranks = 2"]
    figure = dict(problem_figures(FSDP, frame))["fsdp_accounting_time"]
    figure.canvas.draw()
    for axes in figure.axes:
        extents = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert len(extents) > 2
        assert all(left.x1 < right.x0 for left, right in zip(extents, extents[1:]))


def test_a_step_of_one_rank_has_no_timeline():
    """Nothing is gathered there."""
    named = [plot.name for plot in plots(FSDP, load_frame(sharding_records(FSDP))) if plot.kind == "timeline"]
    assert any("2_ranks" in name for name in named) and not any("1_rank" in name for name in named)


def test_one_prediction_a_case_and_wide_numbers_upright():
    """The closed form stood twice in each group, in one colour, and four-digit values ran into each other."""
    frame = load_frame(sharding_records(FSDP))
    memory = next(plot for plot in plots(FSDP, frame) if plot.name == "memory")
    assert [name for name in dict.fromkeys(memory.data["series"]) if "predicted" in name] == ["FSDP, predicted"]
    rows = sharding_records(FSDP)  # ten times as long, and on twice as many ranks: two panels
    rows = [replace(row, samples=[1e1 * value for value in row.samples]) for row in rows]
    rows += [replace(row, case=row.case | {"num_ranks": 2 * row.case["num_ranks"]}) for row in rows]
    for records, angle in ((sharding_records(FSDP), 0.0), (rows, 90.0)):
        figure = dict(problem_figures(FSDP, load_frame(records)))["fsdp_accounting_time"]
        angles = {text.get_rotation() for axes in figure.axes for text in axes.texts if text.get_text()[0].isdigit()}
        assert angles == {angle}
        tops = [text.get_window_extent().y1 for axes in figure.axes for text in axes.texts]
        assert max(tops) <= max(axes.get_window_extent().y1 for axes in figure.axes)


def earlier(records: list[Record], *implementations: str, mask: str = "") -> list[Record]:
    """`records`, those of `implementations` on masks with `mask` in their names measured the day before."""
    old = [row.implementation in implementations and mask in row.case.get("mask", "") for row in records]
    return [replace(row, **EARLIER) if is_old else row for row, is_old in zip(records, old)]


def scaled_records() -> list[Record]:
    """Steps on 1, 2 and 4 ranks: naive of one run, overlap of two; four ranks of flat ran out of memory."""
    found = [record(OVERLAP, parallel_case(1), "naive", samples=[80.0])]
    found += [record(OVERLAP, parallel_case(2), name, samples=[100.0]) for name in ("naive", "overlap", "flat")]
    found += [record(OVERLAP, parallel_case(4), "naive", samples=[160.0])]
    found += [record(OVERLAP, parallel_case(4), "overlap", samples=[120.0], **EARLIER)]
    return [*found, record(OVERLAP, parallel_case(4), "flat", status="oom", message="CUDA out of memory")]


def test_scaling_efficiency_is_one_ranks_step_over_that_of_many_in_one_run():
    body = body_of(OVERLAP, "efficiency", scaled_records())
    assert line(body, "naive") == ["naive", "naive", "80.00", "80.0", "50.0"]
    assert line(body, "overlap") == ["overlap", "naive", "80.00", "80.0", "other run"]
    assert line(body, "flat") == ["flat", "naive", "80.00", "80.0", "–"]
    assert "other run: than one rank's" in body
    said = answer(OVERLAP, load_frame(scaled_records()))
    assert "2 ranks: scaling efficiency naive 80.0 %, flat 80.0 %, overlap 80.0 %." in said
    assert "4 ranks: scaling efficiency naive 50.0 %." in said


def test_an_implementation_of_its_own_on_one_rank_is_what_it_scales_from():
    rows = [replace(row, samples=[30.0]) if row.case["num_ranks"] == 1 and row.quantity == "time"
            and row.implementation == "fsdp" and row.samples else row for row in sharding_records(FSDP)]  # fmt: skip
    body = body_of(FSDP, "efficiency", rows)
    assert line(body, "xl", "float32", "as computed", "none", "FSDP")[5:7] == ["FSDP", "30.00"]
    unsharded = line(body, "xl", "float32", "as computed", "none", "FSDP, a unit a layer")
    assert unsharded[5:7] == ["DDP, nothing sharded", "100.0"] and unsharded[7] == "200"


def test_without_one_rank_there_is_no_efficiency():
    rows = [row for row in scaled_records() if row.case["num_ranks"] > 1]
    assert [part.name for part in sections(OVERLAP, load_frame(rows))] == ["steps"]
    assert "efficiency" not in answer(OVERLAP, load_frame(rows))
