"""Section 2.1.5, mixed precision: `benchmarking_mixed_precision`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cs336_systems.config import DTypeName, ModelCase, Precision, RunConfig
from cs336_systems.experiments.cells import Cell, Measurement, Row
from cs336_systems.experiments.model_cells import MODEL_MODES, measure_model, model_cell, time_row
from cs336_systems.experiments.s2_profiling import models
from cs336_systems.measure.precision import AUTOCAST_TENSORS, autocast_dtypes, norm_in

PRECISIONS = {
    "float32": Precision(),
    "bfloat16 autocast": Precision(autocast="bfloat16"),
    "bfloat16": Precision(parameters="bfloat16"),
}
NORM_SCALES = (1.0, 100.0, 300.0, 1000.0)
NORM_DTYPES: tuple[DTypeName, ...] = ("float32", "float16", "bfloat16")
BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}
# Of timed steps a mode, and the fewest: three precisions of five sizes are to fit in the time of one. `compare` needs
# four samples.
BUDGET_MS = {"cuda": 1000.0, "cpu": 250.0}
MIN_STEPS = {"cuda": 4, "cpu": 5}


@dataclass(frozen=True, kw_only=True)
class AutocastCase:
    """The toy model's training step under autocast."""

    dtype: DTypeName


@dataclass(frozen=True, kw_only=True)
class NormCase:
    """A layer norm computed in one dtype throughout, on inputs of standard deviation `scale`."""

    dtype: DTypeName
    scale: float


OVERFLOW = Row(mode="forward", quantity="overflowing_squares", unit="1")
NORM_ERROR = Row(mode="forward", quantity="norm_error", unit="1")
DTYPES_SEEN = tuple(Row(mode="forward_backward", quantity=f"dtype of {name}", unit="bit") for name in AUTOCAST_TENSORS)


def benchmarking_mixed_precision_cells(run: RunConfig) -> list[Cell]:
    """Autocast's dtypes, the norm's overflow, then every size in float32, under bfloat16 autocast and in bfloat16."""
    problem = "benchmarking_mixed_precision"
    low: tuple[DTypeName, ...] = ("float16", "bfloat16")
    cells = [
        Cell(problem=problem, case=AutocastCase(dtype=dtype), implementation="eager", rows=DTYPES_SEEN) for dtype in low
    ]
    for dtype in NORM_DTYPES:
        for scale in NORM_SCALES:
            case = NormCase(dtype=dtype, scale=scale)
            cells.append(Cell(problem=problem, case=case, implementation="eager", rows=(OVERFLOW, NORM_ERROR)))
    modes = MODEL_MODES if run.scale == "handout" else MODEL_MODES[:2]
    for model, batch in models(run):
        if run.scale != "handout" and not model.name.endswith("-proxy"):
            continue  # a CPU without bfloat16 units takes many seconds for a step of a real model in it
        for precision in PRECISIONS.values():
            warmup = 2 if run.scale == "handout" else 0
            timed = ModelCase(model=model, batch=batch, attention="reference", precision=precision, warmup=warmup)
            cells.append(model_cell(problem, timed, "eager", tuple(time_row(mode) for mode in modes)))
    return cells


def measure_mixed_precision(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    if isinstance(cell.case, AutocastCase):
        found = autocast_dtypes(run.device, cell.case.dtype)
        for row, name in zip(DTYPES_SEEN, AUTOCAST_TENSORS, strict=True):
            yield Measurement(row=row, samples=[BITS[found[name]]], kernel=found[name])
    elif isinstance(cell.case, NormCase):
        result = norm_in(cell.case.dtype, cell.case.scale, device=run.device)
        yield Measurement(row=OVERFLOW, samples=[result.overflowing_squares])
        yield Measurement(row=NORM_ERROR, samples=[result.error])
    else:
        yield from measure_model(cell, run, budget_ms=BUDGET_MS[run.device], min_samples=MIN_STEPS[run.device])
