"""Records of the memory and precision problems as a handout run on a GPU leaves them, every status among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.registry import PROBLEMS
from cs336_systems.measure.timeline import CATEGORIES
from cs336_systems.records import Record

HANDOUT = RunConfig(scale="handout", device="cuda")
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"
POINTS = 20


def records_of(problem: str, record: Callable[..., Record]) -> list[Record]:
    """A record of each promised row: every fifth cell ran out of memory or failed from its second half of rows on."""
    found = []
    for number, cell in enumerate(PROBLEMS[problem].cells(HANDOUT)):
        broken = {"status": "oom", "message": OOM} if number % 2 else {"status": "failed", "message": "no result"}
        for place, row in enumerate(cell.rows):
            values: dict[str, Any] = {"quantity": row.quantity, "unit": row.unit}
            if number % 5 == 3 and place >= len(cell.rows) // 2:
                values |= broken
            else:
                values |= {"samples": _samples(row.quantity, number), "kernel": _kernel(row.quantity)}
            found.append(record(problem, row.case or cell.case, cell.implementation, row.mode, **values))
    return found


def _samples(quantity: str, number: int) -> list[float]:
    if quantity == "timeline.event" or quantity.removeprefix("timeline.") in CATEGORIES:
        return [float(point) for point in range(POINTS)]
    if quantity.startswith("timeline.start"):
        return [5.0]
    return [9.0 + number, 10.0 + number, 11.0 + number] if quantity == "time" else [10.0 + number]


def _kernel(quantity: str) -> str:
    if quantity.startswith("dtype of"):
        return "float32"
    return "softmax in attention/reference.py:60" if quantity.startswith(("saved.", "allocation.")) else ""
