"""What an experiment is made of: a `Problem` lists `Cell`s, a cell promises `Row`s, measuring yields `Measurement`s.

A cell is the unit that is attempted, isolated and resumed. The rows that it promises are known before it runs, so a
cell that runs out of memory or dies still leaves a record for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cs336_systems.config import RunConfig


class Unsupported(Exception):  # noqa: N818 - a reason for a row, not an error
    """An implementation does not exist for a case; the message says why and becomes the `skipped` row's."""


class Disagreement(Exception):  # noqa: N818
    """An implementation's result is outside the numerical contract, so its time is not recorded."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity that a cell promises to report."""

    mode: str  # forward, backward, forward_backward or train_step
    quantity: str  # time, compile_time, peak_memory, memory_before_backward
    unit: str
    case: Any = None  # the config dataclass of this row, where it is not the cell's own
    implementation: str = ""  # whose it is, where the cell measures several by turns


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One implementation on one case, or several of them by turns, each with rows of its own."""

    problem: str
    case: Any  # a config dataclass; stored in the records
    implementation: str  # of several the word for that; no record has it
    rows: tuple[Row, ...]
    fresh_process: bool = False  # measure in a process that has done nothing before (warm-up effects)
    predicted_bytes: int = 0  # closed form of the peak, by which a CPU run skips what cannot fit

    @property
    def group(self) -> tuple[Any, ...]:
        """Cells of one group are measured on one GPU, one after the other, also where a sweep has several.

        Attention of one dtype and head dim, whose inputs, oracle and compiled kernels are shared; one model's cases;
        else the implementations of one case.
        """
        if hasattr(self.case, "head_dim"):
            return (self.problem, self.case.dtype, self.case.head_dim)
        if hasattr(self.case, "model"):
            return (self.problem, self.case.model.name)
        return (self.problem, self.case)

    @property
    def implementations(self) -> tuple[str, ...]:
        """Whose rows the cell promises."""
        return tuple(dict.fromkeys(row.implementation or self.implementation for row in self.rows))

    @property
    def alone(self) -> bool:
        """Whether nothing else may run on the machine meanwhile: it has ranks of its own, or times the host."""
        return hasattr(self.case, "num_ranks") or any(row.quantity == "host_time" for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Samples of one promised row, or the reason why there are none."""

    row: Row
    samples: Sequence[float] = ()
    kernel: str = ""  # the kernel or configuration that really ran
    error: float | None = None  # largest error over its bound, where the row's results were checked
    skipped: str = ""  # the reason, when there are no samples
    failed: str = ""  # what went wrong with this row while others of the cell could be measured
    oom: bool = False  # of what went wrong, whether it was that memory was short


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem of the handout."""

    name: str  # the handout's; also the CLI argument, the record file and the block of the writeup
    title: str
    section: str  # of the handout
    editions: tuple[int, ...]
    points: int
    cells: Callable[[RunConfig], list[Cell]]
    measure: Callable[[Cell, RunConfig], Iterator[Measurement]]
