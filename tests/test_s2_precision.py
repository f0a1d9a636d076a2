"""Mixed precision: the handout's sums, autocast's dtypes from a real run, the norm whose squares
overflow.
"""

import pytest

from cs336_systems.bench.spec import load
from cs336_systems.config import SIZES_OF_BOTH, ModelCase, RunConfig
from cs336_systems.experiments.benchmarking_mixed_precision import (
    AutocastCase,
    NormCase,
    autocast_dtypes,
    norm_in,
)

COVERS = ("cs336_systems/experiments/benchmarking_mixed_precision.py",)
TINY = RunConfig(scale="tiny", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")
EXPERIMENT = load("benchmarking_mixed_precision")


def test_the_handouts_four_sums():
    experiment = load("mixed_precision_accumulation")
    sums = {
        (cell.case.accumulator, cell.case.addend, cell.case.converted): float(sample.kernel)
        for cell in experiment.cells(TINY)
        for sample in experiment.measure(cell, TINY)
    }
    assert sums == {
        ("float32", "float32", False): pytest.approx(10.00013, abs=1e-5),
        ("float16", "float16", False): pytest.approx(9.953125, abs=1e-5),
        ("float32", "float16", False): pytest.approx(10.00214, abs=1e-5),
        ("float32", "float16", True): pytest.approx(10.00214, abs=1e-5),
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_under_autocast_on_a_cpu(dtype):
    found = autocast_dtypes("cpu", dtype)
    assert found["fc1 output"] == found["logits"] == dtype
    assert found["parameters"] == found["gradients"] == found["loss"] == "float32"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_under_autocast_on_a_gpu(dtype):
    """There layer norm is computed, and answers, in float32."""
    assert autocast_dtypes("cuda", dtype) == {
        "parameters": "float32", "fc1 output": dtype, "layer norm output": "float32", "logits": dtype,
        "loss": "float32", "gradients": "float32",
    }  # fmt: skip


def test_squares_overflow_in_float16_alone():
    small, large = norm_in("float16", 1.0), norm_in("float16", 1000.0)
    assert small.overflowing_squares == 0 and small.error < 0.01
    assert large.overflowing_squares > 0.7 and large.error > 1, (
        "the output is zero where it should be of order one"
    )
    wide = norm_in("bfloat16", 1000.0)
    assert wide.overflowing_squares == 0 and 1e-3 < wide.error < 0.1
    assert norm_in("float32", 1000.0).error < 1e-5


def test_every_size_is_timed_in_three_precisions():
    cells = [cell for cell in EXPERIMENT.cells(HANDOUT) if isinstance(cell.case, ModelCase)]
    assert [cell.case.model.name for cell in cells] == list(SIZES_OF_BOTH), (
        "the precisions of a size take turns"
    )
    timed = [case for cell in cells for case in dict.fromkeys(row.case for row in cell.rows)]
    assert len(timed) == 3 * len(SIZES_OF_BOTH)
    assert {(case.precision.parameters, case.precision.autocast) for case in timed} == {
        ("float32", None), ("float32", "bfloat16"), ("bfloat16", None),
    }  # fmt: skip


def test_each_kind_of_cell_gives_all_its_rows():
    cells = EXPERIMENT.cells(TINY)
    chosen = [
        next(cell for cell in cells if isinstance(cell.case, kind))
        for kind in (AutocastCase, NormCase, ModelCase)
    ]
    for cell in chosen:
        measurements = list(EXPERIMENT.measure(cell, TINY))
        assert [measurement.row for measurement in measurements] == list(cell.rows)
        assert all(measurement.samples for measurement in measurements)
