"""0.01 added a thousand times in the handout's four combinations of dtypes.

The result is the same on every machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from cs336_systems.book.frames import digits
from cs336_systems.config import DTypeName, RunConfig
from cs336_systems.experiments import Cell, Experiment, Listing, Row, Sample, problem


@dataclass(frozen=True, kw_only=True)
class AccumulationCase:
    """One of the handout's four sums of a thousand times 0.01."""

    accumulator: DTypeName
    addend: DTypeName
    converted: bool  # each addend is converted to float32 before it is added


SUM = Row("forward", "sum", "1")
ADDENDS, ADDEND = 1000, 0.01


def accumulate(accumulator: str, addend: str, *, converted: bool = False) -> float:
    """Return 0 + 0.01 + 0.01 + ... a thousand times, one by one, in `accumulator`'s dtype.

    Each 0.01 is rounded to `addend`'s dtype first. With `converted` it is brought to float32
    explicitly before it is added; without it, in-place addition converts it to the accumulator's
    dtype by itself.
    """
    total = torch.tensor(0.0, dtype=getattr(torch, accumulator))
    term = torch.tensor(ADDEND, dtype=getattr(torch, addend))
    for _ in range(ADDENDS):
        total += term.to(torch.float32) if converted else term
    return float(total)


def float16_ranges() -> str:
    """Return a table's lines: steps and error of the float16 sum in four ranges of its value.

    The ranges end at 0.5, 4 and 8.
    """
    total, term = torch.tensor(0.0, dtype=torch.float16), torch.tensor(ADDEND, dtype=torch.float16)
    steps: dict[str, list[float]] = {
        "below 0.5": [],
        "from 0.5 to 4": [],
        "from 4 to 8": [],
        "above 8": [],
    }
    for _ in range(ADDENDS):
        before = float(total)
        total += term
        passed = sum(before >= bound for bound in (0.5, 4, 8))
        list(steps.values())[passed].append(float(total) - before)
    lines = []
    for where, moved in steps.items():
        usual, error = max(set(moved), key=moved.count), sum(moved) - ADDEND * len(moved)
        lines.append(f"| {where} | {digits(usual)} | {len(moved)} | {error:+.2f} |")
    return "\n".join(lines)


@problem()
class MixedPrecisionAccumulation(Experiment):
    rows = (SUM,)

    def cases(self, run: RunConfig) -> list[AccumulationCase]:
        return [
            AccumulationCase(accumulator="float32", addend="float32", converted=False),
            AccumulationCase(accumulator="float16", addend="float16", converted=False),
            AccumulationCase(accumulator="float32", addend="float16", converted=False),
            AccumulationCase(accumulator="float32", addend="float16", converted=True),
        ]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        case: AccumulationCase = cell.case
        total = accumulate(case.accumulator, case.addend, converted=case.converted)
        yield Sample(row=SUM, samples=[total], kernel=f"{total:.9g}")  # samples keep six digits

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "sum": row["kernel"],
            "term": row["addend"] + (", converted to float32" if row["converted"] else ""),
        }

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        return {"ranges": float16_ranges}

    tables = {"sums": Listing(columns=("accumulator", "term", "sum"))}
