"""Section 5's experiments: bandwidths, cells, agreed counts, tables and traces."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from cs336_systems.analysis.bandwidth import best_bucket_bytes, bucket_overhead_s
from cs336_systems.bench.harness import planned_cells
from cs336_systems.bench.spec import Disagreement, Unsupported, load
from cs336_systems.book.frames import load_frame
from cs336_systems.config import COLLECTIVES, MODEL_SIZES, CollectiveCase, RunConfig
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.spawn import RankError, run_ranks
from cs336_systems.experiments.distributed_communication_single_node import time_collectives
from cs336_systems.subjects.parallel_step import (
    DataParallelCase,
    ParallelStep,
    check_gradients,
    plain_mean,
    wrap_ddp,
)
from cs336_systems.subjects.ranks import TIMES, run_cell, step_cell
from tests.test_records import broken, gpu_record

TINY = RunConfig(scale="tiny", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")
NAIVE = load("naive_ddp_benchmarking")


def cells_of(problem: str, run: RunConfig):
    return load(problem).cells(run)


# Bandwidth


def test_the_best_bucket_has_the_least_overhead():
    total, bandwidth, call = 8e9, 200e9, 2e-5
    best = total / best_bucket_bytes(total, bandwidth, call)  # buckets
    assert best == pytest.approx((total / (bandwidth * call)) ** 0.5)
    least = bucket_overhead_s(total, bandwidth, call, best)
    assert least == pytest.approx(2 * best * call), "half for calls, half for the last bucket"
    assert all(
        bucket_overhead_s(total, bandwidth, call, best * other) > least
        for other in (0.5, 0.9, 1.1, 2)
    )


# Cells


def test_the_handouts_grid_is_attempted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    cells = cells_of("distributed_communication_single_node", HANDOUT)
    assert {(cell.case.backend, cell.case.num_ranks) for cell in cells} == {
        ("nccl", 2), ("nccl", 4), ("gloo", 2), ("gloo", 4), ("gloo", 6), ("gloo", 8),
    }  # fmt: skip
    for cell in cells:
        asked = {(row.case.operation, row.case.num_bytes) for row in cell.rows}
        assert asked == {
            (name, size) for name in COLLECTIVES for size in (10**6, 10**7, 10**8, 10**9)
        }
    wrappers = cells_of("ddp_overlap_individual_parameters_benchmarking", HANDOUT)
    compared = {(cell.implementation, cell.case.num_ranks) for cell in wrappers}
    names = ("naive", "flat", "overlap", "bucketed", "torch_ddp", "torch_ddp_view")
    assert compared == {("naive", 1), *((name, ranks) for name in names for ranks in (2, 4))}
    assert {cell.case.num_ranks for cell in cells_of("naive_ddp_benchmarking", HANDOUT)} == {
        1,
        2,
        4,
    }
    assert {cell.case.num_ranks for cell in cells_of("minimal_ddp_flat_benchmarking", HANDOUT)} == {
        4
    }
    ours = [
        cell.case
        for cell in cells_of("ddp_bucketed_benchmarking", HANDOUT)
        if cell.implementation == "bucketed"
    ]
    assert {case.bucket_size_mb for case in ours} == {1, 10, 100, 1000}
    computes = [cell.case.precision.autocast for cell in wrappers]
    assert computes == ["bfloat16"] * 13 + [None] * 13  # the faster first, if time runs out
    assert {case.precision.autocast for case in ours} == {"bfloat16"}
    assert all(cell.case.model is MODEL_SIZES["xl"] and cell.case.batch == 4 for cell in wrappers)


def tiny_case(ranks: int = 2, bucket: float | None = None) -> DataParallelCase:
    return replace(
        cells_of("naive_ddp_benchmarking", TINY)[0].case, num_ranks=ranks, bucket_size_mb=bucket
    )


def check_a_wrapper_that_forgets(rank: int, ranks: int, case: DataParallelCase) -> None:
    expected, step = plain_mean(case, TINY, rank), ParallelStep("naive", case, TINY, rank)
    assert check_gradients(step, expected) <= 1
    step.model.finish_gradient_synchronization = lambda: None
    with pytest.raises(
        Disagreement, match="averaged gradients are off by .* times the bound of the plain mean's"
    ):
        check_gradients(step, expected)


def test_gradients_that_were_not_averaged_are_not_timed():
    run_ranks(check_a_wrapper_that_forgets, 2, tiny_case())


@pytest.mark.parametrize("wrong", [None, math.nan])
def test_gradients_that_are_missing_or_nan_are_not_timed(wrong, alone_in_a_group):
    """Both once counted as no error at all."""
    case = tiny_case(1)
    expected, step = plain_mean(case, TINY, 0), ParallelStep("naive", case, TINY, 0)
    parameter = step.parameters[-1]

    def spoil() -> None:
        parameter.grad = None if wrong is None else torch.full_like(parameter, wrong)

    step.model.finish_gradient_synchronization = spoil
    with pytest.raises(
        Disagreement, match="averaged gradients are off by (inf|nan) times the bound"
    ):
        check_gradients(step, expected)


@pytest.mark.parametrize("implementation", ["bucketed", "torch_ddp_view"])
def test_a_cell_measures_every_row(implementation):
    """Ours and the peer, at two ranks: gradients checked, samples positive, the trace's parts
    within the whole.
    """
    cell = step_cell(tiny_case(bucket=0.1), implementation, memory=())
    cell = replace(cell, case=replace(cell.case, backend="gloo"))
    measured = {measurement.row.quantity: measurement for measurement in NAIVE.measure(cell, TINY)}
    assert len(measured["time"].samples) >= 5 and min(measured["time"].samples) > 0
    assert measured["time"].error is not None and measured["time"].error <= 1
    traced = {name: measured[name].samples[0] for name in TIMES}
    assert 0 < traced["communication_time"] < traced["traced_time"]
    assert 0 <= traced["overlap_time"] <= min(traced["communication_time"], traced["compute_time"])
    ends = list(measured["communication_intervals"].samples)
    assert ends == sorted(ends) and len(ends) % 2 == 0 and ends


def test_torchs_wrapper_gets_the_bucket_size(alone_in_a_group):
    wrapped = wrap_ddp(torch.nn.Linear(2, 2), "torch_ddp_view", 7)
    assert wrapped.bucket_bytes_cap == 7 * 2**20 and wrapped.gradient_as_bucket_view


@pytest.mark.parametrize("wrong", [2.0, math.nan])
def test_a_collective_with_a_wrong_result_is_not_timed(wrong, alone_in_a_group, monkeypatch):
    """NaN once passed: it is neither below nor above any bound."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.fill_(wrong))
    case = CollectiveCase(operation="all_reduce", num_bytes=8, num_ranks=1, backend="gloo")
    with pytest.raises(Disagreement, match="all_reduce must give 1 everywhere, got values from"):
        time_collectives(0, 1, [case], 1.0)


def fail(rank: int, ranks: int, error: str) -> None:
    if rank == 1:
        if error == "host":
            torch.empty(2**58, dtype=torch.uint8)
        kinds = {
            "memory": torch.OutOfMemoryError,
            "python": MemoryError,
            "wrong": Disagreement,
            "bug": ArithmeticError,
        }
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
        run_cell(partial(fail, error=error), tiny_case(), TINY)


def test_more_ranks_than_gpus_are_skipped(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Unsupported, match="needs 4 GPUs, this host has 2"):
        run_cell(partial(fail, error="bug"), replace(tiny_case(4), backend="nccl"), HANDOUT)


# Pages


def step_frame(**skipped: str):
    """Records of `overlap` and `naive` on two ranks, in the order of the experiment."""
    experiment = load("ddp_overlap_individual_parameters_benchmarking")
    values = {
        "naive": {"time": [130.0], "communication_time": [40.0], "overlap_time": [0.0],
                  "compute_intervals": [0.0, 90.0], "communication_intervals": [90.0, 130.0]},
        "overlap": {"time": [104.0], "communication_time": [40.0], "overlap_time": [30.0],
                    "compute_intervals": [0.0, 90.0], "communication_intervals": [50.0, 80.0, 90.0, 100.0]},
    }  # fmt: skip
    case = DataParallelCase(
        model=MODEL_SIZES["xl"], batch=4, num_ranks=2, backend="nccl", attention="reference"
    )
    records = [
        gpu_record(experiment.name, case, name, samples, mode="train_step", quantity=quantity)
        for name, quantities in values.items()
        for quantity, samples in quantities.items()
    ]
    planted = [
        broken(one, "skipped") if skipped.get(one.implementation) == one.quantity else one
        for one in records
    ]
    return experiment, load_frame(experiment, planted)


def test_the_step_table_says_what_is_communication_and_what_is_hidden():
    experiment, frame = step_frame()
    table = (
        experiment.tables["two_ranks"]
        .build(frame)
        .only(columns=["wrapper", "of the step", "hidden"])
    )
    assert [[cell.text for cell in line] for line in table.lines] == [
        ["naive", "31 %", "0 %"], ["overlap", "38 %", "75 %"],
    ]  # fmt: skip


def test_a_step_with_half_of_its_lanes_is_not_drawn():
    """Communication without the compute beside it would look like no overlap."""
    for skipped, drawn in (
        ({}, {"naive", "overlap"}),
        ({"overlap": "compute_intervals"}, {"naive"}),
    ):
        experiment, frame = step_frame(**skipped)
        assert set(experiment.figures["traces"].rows(frame)["implementation"]) == drawn


def naive_of_a_reader(module: torch.nn.Module) -> torch.nn.Module:
    return NaiveDDP(module)


def test_a_readers_own_wrapper_is_measured():
    own = f"{__name__}:naive_of_a_reader"
    cells = planned_cells("naive_ddp_benchmarking", TINY, [own])
    (cell,) = [cell for cell in cells if cell.implementation == own]
    measured = {sample.row.quantity: sample for sample in NAIVE.measure(cell, TINY)}
    assert measured["time"].error <= 1 and len(measured["time"].samples) >= 5
