"""Section 2, profiling and benchmarking: `benchmarking_script`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cs336_systems.config import HANDOUT_SIZES, MODEL_SIZES, ModelCase, ModelConfig, RunConfig, proxy_model
from cs336_systems.experiments.cells import Cell, Measurement
from cs336_systems.experiments.model_cells import MODEL_MODES, measure_warmup, model_cell, time_row

WARMUPS = (0, 1, 2, 5)
NUM_STEPS = {"tiny": 5, "smoke": 5, "handout": 10}


def models(run: RunConfig) -> list[tuple[ModelConfig, int]]:
    """(model, batch) of each size at the run's scale.

    handout: the handout's five sizes, batch 4, context 512. smoke: the real small model at context 128, batch 1, and
    a narrow proxy of medium (another would say nothing new in a laptop's minutes). tiny: one narrow proxy.
    """
    if run.scale == "handout":
        return [(MODEL_SIZES[size], 4) for size in HANDOUT_SIZES]
    if run.scale == "tiny":
        return [(replace(proxy_model("small", 64), context_length=32, vocab_size=256), 1)]
    small = replace(MODEL_SIZES["small"], context_length=128)
    return [(small, 1), (replace(proxy_model("medium"), context_length=128), 1)]


def benchmarking_script_cells(run: RunConfig) -> list[Cell]:
    """Every size and mode, each in a process of its own, with one row a warm-up count."""
    cells = []
    for model, batch in models(run):
        for mode in MODEL_MODES:
            cases = [ModelCase(model=model, batch=batch, attention="reference", warmup=warmup) for warmup in WARMUPS]
            rows = tuple(time_row(mode, case) for case in cases)
            cells.append(model_cell("benchmarking_script", cases[0], "eager", rows, fresh_process=True))
    return cells


def measure_benchmarking_script(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    return measure_warmup(cell, run, num_steps=NUM_STEPS[run.scale])
