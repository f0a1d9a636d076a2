"""Section 5's experiments and report: bandwidths, cells, agreed counts, tables, timelines and answers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from cs336_systems.config import (
    COLLECTIVES,
    MODEL_SIZES,
    CollectiveCase,
    DataParallelCase,
    RunConfig,
)
from cs336_systems.distributed.bandwidth import (
    algorithm_gb_per_s,
    best_bucket_bytes,
    bucket_overhead_s,
    bus_factor,
    bus_gb_per_s,
)
from cs336_systems.distributed.launch import RankError, run_ranks
from cs336_systems.experiments import ddp_cells
from cs336_systems.experiments.cells import Disagreement, Unsupported
from cs336_systems.experiments.collective_cells import communication_cells
from cs336_systems.experiments.ddp_cells import ParallelStep, check_gradients, ddp_cell, measure_ddp, wrap
from cs336_systems.experiments.rank_cells import agreed_samples, run_cell, slowest
from cs336_systems.experiments.s5_distributed import bucketed_cells, flat_cells, naive_cells, overlap_cells
from cs336_systems.records import Record
from cs336_systems.report.answers import answer
from cs336_systems.report.blocks import CASE_TYPES
from cs336_systems.report.distributed import COMMUNICATION, DDP_PROBLEMS, num_buckets, steps
from cs336_systems.report.figures import problem_figures
from cs336_systems.report.frames import load_frame
from cs336_systems.report.plots import plots
from cs336_systems.report.tables import TABLES, sections
from tests.distributed_records import communication_records, parallel_case, step_records

TINY = RunConfig(scale="tiny", device="cpu")
SMOKE = RunConfig(scale="smoke", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")

# Bandwidth


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 2, 0.5),
        ("broadcast", 8, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bus_bandwidth_is_what_the_busiest_link_carries(operation, ranks, factor):
    assert bus_factor(operation, ranks) == factor
    assert algorithm_gb_per_s(10**9, 10.0) == 100.0
    assert bus_gb_per_s(operation, ranks, 10**9, 10.0) == pytest.approx(100.0 * factor)


def test_the_best_bucket_has_the_least_overhead():
    total, bandwidth, call = 8e9, 200e9, 2e-5
    best = total / best_bucket_bytes(total, bandwidth, call)  # buckets
    assert best == pytest.approx((total / (bandwidth * call)) ** 0.5)
    least = bucket_overhead_s(total, bandwidth, call, best)
    assert least == pytest.approx(2 * best * call), "half for calls, half for the last bucket"
    assert all(bucket_overhead_s(total, bandwidth, call, best * other) > least for other in (0.5, 0.9, 1.1, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bus_factor("gather", 2), "operation must be one of all_reduce, .*, got 'gather'"),
        (lambda: bus_factor("broadcast", 0), "num_ranks must be positive, got 0"),
        (lambda: algorithm_gb_per_s(1, 0.0), "ms must be positive, got 0.0"),
        (lambda: bucket_overhead_s(1, 1, 1, 0), "num_buckets must be positive, got 0"),
        (lambda: best_bucket_bytes(1, 0, 1), "bytes_per_s must be positive, got 0"),
        (
            lambda: CollectiveCase(operation="gather", num_bytes=4, num_ranks=2, backend="gloo"),
            "CollectiveCase.operation must be one of all_reduce",
        ),
        (
            lambda: CollectiveCase(operation="broadcast", num_bytes=0, num_ranks=2, backend="gloo"),
            "CollectiveCase.num_bytes must be a positive int, got 0",
        ),
        (lambda: replace(parallel_case(), backend="mpi"), "DataParallelCase.backend must be one of gloo, nccl"),
        (lambda: replace(parallel_case(), bucket_size_mb=0), "DataParallelCase.bucket_size_mb must be positive, got 0"),
        (lambda: replace(parallel_case(), num_ranks=0), "DataParallelCase.num_ranks must be a positive int, got 0"),
    ],
)
def test_wrong_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Cells


def test_the_handouts_grid_is_attempted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    cells = communication_cells(HANDOUT)
    assert {(cell.case.backend, cell.case.num_ranks) for cell in cells} == {
        ("nccl", 2), ("nccl", 4), ("gloo", 2), ("gloo", 4), ("gloo", 6), ("gloo", 8),
    }  # fmt: skip
    for cell in cells:
        asked = {(row.case.operation, row.case.num_bytes) for row in cell.rows}
        assert asked == {(name, size) for name in COLLECTIVES for size in (10**6, 10**7, 10**8, 10**9)}
    compared = {(cell.implementation, cell.case.num_ranks) for cell in overlap_cells(HANDOUT)}
    names = ("naive", "flat", "overlap", "bucketed", "torch_ddp", "torch_ddp_view")
    assert compared == {("naive", 1), *((name, ranks) for name in names for ranks in (2, 4))}
    assert {cell.case.num_ranks for cell in naive_cells(HANDOUT)} == {1, 2, 4}
    assert {cell.case.num_ranks for cell in flat_cells(HANDOUT)} == {4}
    ours = [cell.case for cell in bucketed_cells(HANDOUT) if cell.implementation == "bucketed"]
    assert {case.bucket_size_mb for case in ours} == {1, 10, 100, 1000}
    computes = [cell.case.precision.autocast for cell in overlap_cells(HANDOUT)]
    assert computes == ["bfloat16"] * 13 + [None] * 13  # the faster first, if time runs out
    assert {case.precision.autocast for case in ours} == {"bfloat16"}
    assert all(cell.case.model is MODEL_SIZES["xl"] and cell.case.batch == 4 for cell in overlap_cells(HANDOUT))


def tiny_case(ranks: int = 2, bucket: float | None = None) -> DataParallelCase:
    return replace(naive_cells(TINY)[0].case, num_ranks=ranks, bucket_size_mb=bucket)


def check_a_wrapper_that_forgets(rank: int, ranks: int, case: DataParallelCase) -> None:
    step = ParallelStep("naive", case, TINY, rank)
    assert check_gradients(step, ranks) <= 1
    step.model.finish_gradient_synchronization = lambda: None
    with pytest.raises(Disagreement, match="averaged gradients are off by .* times the bound of the plain mean's"):
        check_gradients(step, ranks)


def test_gradients_that_were_not_averaged_are_not_timed():
    run_ranks(check_a_wrapper_that_forgets, 2, tiny_case())


@pytest.mark.parametrize("implementation", ["bucketed", "torch_ddp_view"])
def test_a_cell_measures_every_row(implementation):
    """Ours and the peer, at two ranks: gradients checked, samples positive, the trace's parts within the whole."""
    cell = ddp_cell("ddp_overlap_individual_parameters_benchmarking", tiny_case(bucket=0.1), implementation)
    cell = replace(cell, case=replace(cell.case, backend="gloo"))
    measured = {measurement.row.quantity: measurement for measurement in measure_ddp(cell, TINY)}
    assert len(measured["time"].samples) >= 5 and min(measured["time"].samples) > 0
    assert measured["time"].error is not None and measured["time"].error <= 1
    traced = {name: measured[name].samples[0] for name in ddp_cells.TRACED[:4]}
    assert 0 < traced["communication_time"] < traced["traced_time"]
    assert 0 <= traced["overlap_time"] <= min(traced["communication_time"], traced["compute_time"])
    ends = list(measured["communication_intervals"].samples)
    assert ends == sorted(ends) and len(ends) % 2 == 0 and ends


def test_an_unknown_implementation_is_skipped():
    cell = replace(naive_cells(TINY)[0], implementation="sorcery")
    with pytest.raises(Unsupported, match="there is no data parallelism called 'sorcery'"):
        list(measure_ddp(cell, TINY))


def test_torchs_wrapper_gets_the_bucket_size():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = wrap(torch.nn.Linear(2, 2), "torch_ddp_view", 7)
        assert wrapped.bucket_bytes_cap == 7 * 2**20 and wrapped.gradient_as_bucket_view
    finally:
        dist.destroy_process_group()


def count_slowly(rank: int, ranks: int) -> int:
    return agreed_samples(lambda: time.sleep(0.2 if rank == 0 else 0.0), "cpu", budget_ms=2000.0, minimum=2)


def test_every_rank_takes_rank_0s_number_of_samples():
    """A count of each rank's own would leave one waiting in a collective that the other never enters."""
    first, second = run_ranks(count_slowly, 2)
    assert first == second and 2 <= first <= 10


def test_a_step_is_over_when_the_last_rank_is():
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


def fail(rank: int, ranks: int, error: str) -> None:
    if rank == 1:
        if error == "host":
            torch.empty(2**58, dtype=torch.uint8)
        kinds = {"memory": torch.OutOfMemoryError, "python": MemoryError, "wrong": Disagreement, "bug": ArithmeticError}
        raise kinds[error]("planted")
    dist.barrier()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        ("memory", torch.OutOfMemoryError),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("bug", RankError), ("host", torch.OutOfMemoryError), ("python", torch.OutOfMemoryError),
            ("wrong", Disagreement),
        )),
    ],
)  # fmt: skip
def test_a_ranks_error_becomes_the_cells(error, raised):
    with pytest.raises(raised, match="rank 1 of 2 failed: .*(planted|DefaultCPUAllocator)"):
        run_cell(fail, 2, error, backend="gloo", run=TINY)


def test_more_ranks_than_gpus_are_skipped(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Unsupported, match="needs 4 GPUs, this host has 2"):
        run_cell(fail, 4, "bug", backend="nccl", run=HANDOUT)


# Report


def records_of(problem: str) -> list[Record]:
    return communication_records() if problem == COMMUNICATION else step_records(problem)


def table(problem: str, name: str) -> str:
    return next(part.body for part in sections(problem, load_frame(records_of(problem))) if part.name == name)


def line(body: str, *keys: str) -> list[str]:
    lines = [[cell.strip() for cell in one.strip("| ").split(" | ")] for one in body.splitlines()]
    return next(found for found in lines if found[: len(keys)] == list(keys))


def test_the_bandwidth_table_compares_with_the_link():
    body = table(COMMUNICATION, "nccl")
    assert line(body, "all-reduce", "4", "1000") == [
        "all-reduce", "4", "1000", "5.000", "200", "300", "67 %",
    ]  # fmt: skip
    assert line(body, "all-gather", "4", "1000")[-3:] == ["200", "150", "33 %"]
    assert "link peak: 450 GB/s each way (NVIDIA H200 Tensor Core GPU datasheet (SXM))" in body
    gloo = table(COMMUNICATION, "gloo")
    assert line(gloo, "broadcast", "4", "1")[3:] == ["failed [1]", "–", "–"] and "link peak" not in gloo
    said = answer(COMMUNICATION, load_frame(communication_records()))
    assert "nccl, 4 ranks: an all-reduce of 1 MB takes 0.00500 ms" in said and "67 % of the link's peak" in said


def test_the_step_table_shows_what_is_hidden_and_the_peer():
    body = table("ddp_overlap_individual_parameters_benchmarking", "steps")
    # step, over torch's, communication, share, hidden, not hidden, memory
    assert line(body, "naive")[-6:] == ["1.30×", "40.0", "30.8", "0", "40.0", "70,000"]
    assert line(body, "overlap")[-6:] == ["1.04×", "40.0", "38.5", "75.0", "10.0", "70,000"]
    assert line(body, "torch DDP")[2:] == ["OOM", "–", "–", "–", "–", "–", "–"]
    said = answer("ddp_overlap_individual_parameters_benchmarking", load_frame(records_of(DDP_PROBLEMS[2])))
    assert "overlap has 1.25× the speed of naive" in said and "75.0 % of it beside compute" in said


def test_the_overhead_model_is_fitted_to_the_bucket_sizes():
    frame = load_frame(step_records("ddp_bucketed_benchmarking"))
    rows = steps(frame)
    small, large = (next(rows[rows["bucket_mb"] == size].itertuples()) for size in (1.0, 1000.0))
    assert num_buckets(small) > 200 > 20 > num_buckets(large) > 10, "13.6 GB of gradients, matrices of 25 to 100 MiB"
    said = answer("ddp_bucketed_benchmarking", frame)
    assert "communicate 10.0 ms longer" in said and "the model's best bucket then has" in said


@pytest.mark.parametrize(
    "size, milliseconds, contradicts",
    [(100.0, 45.0, False), (100.0, 50.0, False), (100.0, 60.0, True), (10.0, 60.0, False)],
    ids=["between", "equal", "hill", "the smallest size's buckets"],
)
def test_the_overhead_model_is_not_fitted_where_a_size_between_contradicts_it(size, milliseconds, contradicts):
    """Two ends gave a cost of a call and a best bucket, though a size between them took longer than both."""
    records = step_records("ddp_bucketed_benchmarking")
    middle = [
        replace(
            row,
            case={**row.case, "bucket_size_mb": size},
            samples=[milliseconds] if row.quantity == "communication_time" else row.samples,
        )
        for row in records
        if row.case["bucket_size_mb"] == 1.0
    ]
    said = answer("ddp_bucketed_benchmarking", load_frame([*records, *middle]))
    assert f"{size:g} MiB" in said and ("best bucket" not in said) == ("a call costs" not in said) == contradicts


@pytest.mark.parametrize("problem", [COMMUNICATION, *DDP_PROBLEMS])
def test_every_problem_has_a_table_figures_and_its_case(problem):
    rows = records_of(problem)
    frame = load_frame(rows)
    assert problem in TABLES and CASE_TYPES[problem] == (rows[0].case["type"],)
    kinds = {plot.kind for plot in plots(problem, frame)}
    assert kinds == ({"lines"} if problem == COMMUNICATION else {"bars", "timeline"})
    assert all(figure.axes for _, figure in problem_figures(problem, frame))


def test_a_timeline_has_a_mark_an_interval():
    frame = load_frame(step_records("ddp_overlap_individual_parameters_benchmarking"))
    plot = next(
        plot for plot in plots("ddp_overlap_individual_parameters_benchmarking", frame) if plot.kind == "timeline"
    )
    panel = plot.data[plot.data["panel"] == "overlap"]
    communication = panel[panel["series"] == "communication"]
    assert list(zip(communication["low"], communication["high"])) == [(50.0, 80.0), (90.0, 100.0)]


def test_a_step_with_half_of_its_lanes_is_not_drawn():
    """Communication without the compute beside it would look like no overlap."""
    problem = "ddp_overlap_individual_parameters_benchmarking"
    rows = [
        replace(row, status="skipped", message="planted", samples=[])
        if (row.implementation, row.quantity) == ("overlap", "compute_intervals")
        else row
        for row in step_records(problem)
    ]
    timelines = [plot for plot in plots(problem, load_frame(rows)) if plot.kind == "timeline"]
    drawn = {name for plot in timelines for name in plot.data["panel"]}
    assert "naive" in drawn and "overlap" not in drawn


@pytest.mark.parametrize("problem", [COMMUNICATION, *DDP_PROBLEMS])
@pytest.mark.parametrize("status", ["oom", "failed", "skipped"])
def test_a_report_of_nothing_but_failures_is_written(problem, status):
    rows = [replace(row, status=status, message="planted", samples=[]) for row in records_of(problem)]
    frame = load_frame(rows)
    text = "\n".join(part.body for part in sections(problem, frame))
    assert "planted" in text
    answer(problem, frame)
    assert all(figure.axes for _, figure in problem_figures(problem, frame))


def test_timelines_share_their_axis_and_touching_intervals_are_one_bar():
    """A seam between any two kernels made busy lanes look half empty; side by side, steps could not be compared."""
    problem = "ddp_overlap_individual_parameters_benchmarking"
    rows = [
        replace(row, samples=[0.0, 40.0, 40.001, 90.0]) if row.quantity == "compute_intervals" else row
        for row in step_records(problem)
    ]
    figure = dict(problem_figures(problem, load_frame(rows)))[f"{problem}_timeline_float32"]
    assert len({axes.get_position().x0 for axes in figure.axes}) == 1, "one below the other"
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    bars = {collection.get_label(): len(collection.get_paths()) for collection in figure.axes[2].collections}
    assert bars == {"compute": 1, "communication": 2}


def test_bucket_sizes_stand_side_by_side_in_one_colour():
    plot = plots("ddp_bucketed_benchmarking", load_frame(step_records("ddp_bucketed_benchmarking")))[0]
    ours = plot.data[plot.data["series"] == "bucketed"]
    assert list(ours["x"]) == ["1", "1000"] and plot.x_label == "largest bucket (MiB)"
    assert not plot.log_y, "bars of steps within a tenth of each other must begin at zero"
