"""Former home of the words of an experiment; see spec.py. It goes with the last problem that is not moved yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Cell, Disagreement, Row, Sample, Unsupported

__all__ = ["Cell", "Disagreement", "Measurement", "Problem", "Row", "Unsupported"]
Measurement = Sample


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem that is not moved yet."""

    name: str  # the handout's; also the CLI argument, the record file and the block of the writeup
    title: str
    section: str  # of the handout
    editions: tuple[int, ...]
    points: int
    cells: Callable[[RunConfig], list[Cell]]
    measure: Callable[[Cell, RunConfig], Iterator[Measurement]]
