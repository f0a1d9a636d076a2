"""The problem `nsys_profile`: what its cells promise, and that its rows are what the profile holds."""

from dataclasses import replace

import pytest

from cs336_systems.accounting import model_peak_bytes
from cs336_systems.bench.spec import Sample, load
from cs336_systems.config import MODEL_SIZES, SIZES_2025, ModelCase, Precision, RunConfig
from cs336_systems.experiments.nsys_profile import measurements, profile_rows
from cs336_systems.measure.kernel_names import CATEGORIES
from cs336_systems.measure.trace import trace_of
from tests.test_trace import gpu_events

COVERS = ("cs336_systems/measure", "cs336_systems/experiments/nsys_profile.py")
NSYS = load("nsys_profile")
TINY = RunConfig(scale="tiny", device="cpu")
H200_BYTES = 150_109_880_320


def by_name(found: list[Sample]) -> dict[tuple[str, str], Sample]:
    return {(measurement.row.mode, measurement.row.quantity): measurement for measurement in found}


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str], Sample]:
    """A profile in which products are among the five longest kernels: on a busy machine, which
    stops a small one in its midst, another kernel may be.
    """
    for _ in range(5):
        found = by_name(list(NSYS.measure(NSYS.cells(TINY)[0], TINY)))
        longest = {
            (mode, sample.kernel)
            for (mode, name), sample in found.items()
            if name.startswith("kernel_")
        }
        if {("forward", "aten::mm"), ("forward_backward", "aten::mm")} <= longest:
            break
    return found


def test_cases_are_those_of_both_editions() -> None:
    """2025 asks for every size at four contexts, 2026 for the longest context that fits: neither
    was all there.
    """
    cases = [cell.case for cell in NSYS.cells(RunConfig(scale="handout", device="cuda"))]
    plain = {
        (case.model.name, case.model.context_length)
        for case in cases
        if case.precision == Precision()
    }
    assert {(size, context) for size in SIZES_2025 for context in (128, 256, 512, 1024)} <= plain
    for size in ("small", "xl"):
        contexts = sorted(context for name, context in plain if name == size)
        fits = [replace(MODEL_SIZES[size], context_length=context) for context in contexts[-2:]]
        needed = [
            model_peak_bytes(ModelCase(model=m, batch=4, attention="reference"), "train_step")
            for m in fits
        ]
        assert needed[0] < H200_BYTES < needed[1], "the longest that fits, and one that does not"


def test_every_promised_row_is_measured_or_says_why_not(
    measured: dict[tuple[str, str], Sample],
) -> None:
    cell = NSYS.cells(TINY)[0]
    assert set(measured) == {(row.mode, row.quantity) for row in cell.rows}
    for measurement in measured.values():
        assert bool(measurement.samples) != bool(measurement.message)


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train_step"])
def test_rows_of_a_mode_agree_with_each_other(
    mode: str, measured: dict[tuple[str, str], Sample]
) -> None:
    def value(quantity: str) -> float:
        return measured[mode, quantity].samples[0]

    assert sum(value(f"{category}_time") for category in CATEGORIES) == pytest.approx(
        value("kernel_time")
    )
    # Ranks are those of all steps together: in one of them a busy CPU may have any order.
    totals = [sum(measured[mode, f"kernel_{rank}_time"].samples) for rank in range(1, 6)]
    assert totals == sorted(totals, reverse=True) and totals[-1] > 0
    assert measured[mode, "kernel_1_calls"].kernel == measured[mode, "kernel_1_time"].kernel
    others = {measured[mode, f"other_kernel_{rank}_time"].kernel for rank in range(1, 6)}
    assert not others & {"aten::mm", "aten::bmm", "aten::matmul"}
    assert (value("optimizer_time") > 0) == (mode == "train_step")
    if mode != "train_step":
        assert value("attention_softmax_time") > value("attention_softmax_kernel_time") > 0
        assert 0 < value("attention_scores_time") < value("kernel_time")


def test_calls_are_those_of_one_step(measured: dict[tuple[str, str], Sample]) -> None:
    """Two layers of seven matrices, and the head: 15 products forward; two more for each backward."""
    for mode, calls in (("forward", 15.0), ("forward_backward", 45.0)):
        of_products = [
            measured[mode, f"kernel_{rank}_calls"].samples
            for rank in range(1, 6)
            if measured[mode, f"kernel_{rank}_time"].kernel == "aten::mm"
        ]
        assert of_products == [[calls]]


def test_a_gpus_profile_gives_the_same_rows() -> None:
    rows = {row.quantity: row for row in profile_rows("forward_backward")}
    found = {
        measurement.row.quantity: measurement
        for measurement in measurements(trace_of(gpu_events()), rows)
    }
    assert set(found) == set(rows) - {"time"}
    assert found["gemm_time"].samples == [pytest.approx(0.7)]
    assert found["attention_scores_time"].samples == [pytest.approx(0.7)], "forward and backward"
    assert found["attention_softmax_kernel_time"].samples == [pytest.approx(0.1)]
    assert found["optimizer_time"].samples == [pytest.approx(0.05)]
    assert found["kernel_1_time"].kernel == "nvjet_hsh_256x128_64x4_2x1_v_bz_NTT"
    assert found["kernel_calls"].samples == [4.0], "the collective was launched outside of the step"
    assert found["kernel_5_time"].message == found["kernel_5_calls"].message != ""


@pytest.mark.gpu
def test_a_gpus_step_is_taken_apart_as_the_cpus_is() -> None:
    run = RunConfig(scale="tiny", device="cuda")
    cell = NSYS.cells(run)[1]
    found = by_name(list(NSYS.measure(cell, run)))
    assert set(found) == {(row.mode, row.quantity) for row in cell.rows}
    for mode in ("forward", "forward_backward", "train_step"):
        total = sum(found[mode, f"{category}_time"].samples[0] for category in CATEGORIES)
        assert total == pytest.approx(found[mode, "kernel_time"].samples[0])
        assert found[mode, "gemm_time"].samples[0] > 0
    assert found["train_step", "optimizer_time"].samples[0] > 0
    assert found["forward_backward", "attention_scores_time"].samples[0] > 0
