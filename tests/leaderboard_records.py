"""Synthetic records of `leaderboard_2026`: every cell of the handout's scale, one of which ran out of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cs336_systems.config import MODEL_SIZES, Precision
from cs336_systems.experiments.cells import Cell
from cs336_systems.experiments.s9_training_step import PROBLEM, LongStepCase, long_step_cell
from cs336_systems.records import Record
from tests.distributed_records import GPU, record

CASE = LongStepCase(
    model=MODEL_SIZES["8b"], batch=1, num_ranks=2, backend="nccl", attention="hopper",
    precision=Precision(autocast="bfloat16"), reduce_dtype="float32", compiled=True,
)  # fmt: skip
STEP_MS = {"after_attention": 6000.0, "around_attention": 6300.0, "block": 8000.0}
VALUES = {
    "start_time": 60.0, "peak_memory": 100_000.0, "predicted_peak_memory": 110_000.0, "communication_time": 400.0,
    "overlap_time": 300.0,
}  # fmt: skip


def leaderboard_2026_cells() -> list[Cell]:
    cases = [(CASE, "fsdp"), (CASE, "torch_fsdp"), (replace(CASE, compiled=False), "fsdp")]
    cases += [(replace(CASE, recompute=name), "fsdp") for name in ("after_attention", "block")]  # type: ignore[arg-type]
    return [long_step_cell(case, name) for case, name in cases]


def leaderboard_2026_records(device: dict[str, Any] = GPU) -> list[Record]:
    found = []
    for cell in leaderboard_2026_cells():
        slower = 1.25 if cell.implementation == "torch_fsdp" else 1.0
        for row in cell.rows:
            middle = VALUES.get(row.quantity, 50.0)
            if row.quantity == "time":
                middle = STEP_MS[cell.case.recompute] * slower
            outcome: dict[str, Any] = {"samples": [middle - 1, middle, middle + 1]}
            if row.quantity.endswith("_intervals"):
                outcome = {"samples": [0.0, 2.0, 3.0, 4.5]}
            if not cell.case.compiled:
                outcome = {"status": "oom", "message": "CUDA out of memory"}
            found.append(
                record(PROBLEM, cell.case, cell.implementation, quantity=row.quantity, unit=row.unit, device=device,
                       **outcome)
            )  # fmt: skip
    return found
