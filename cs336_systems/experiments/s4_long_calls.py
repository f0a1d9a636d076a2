"""Beyond the handout: `long_calls`, the longest of `attention_shapes`, by turns.

A large kernel runs at the clock that the power limit leaves it, and that clock moves: with the GPU's temperature, and
with what the host's other GPUs do. Implementations that are measured one after the other, seconds apart, have ratios
that differ by a percent or two from run to run. Here they take turns (`turns`), so short that a whole round sees one
machine, and so long that each runs at the clock of its own power: of a turn the first SETTLE_MS are not timed.

Unlike in `attention_shapes`, the cache is not overwritten between calls: what a call of milliseconds finds there is no
part of its time that counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention import BACKWARD, BOTH, FORWARD, sized_shape
from cs336_systems.experiments.cells import Cell, Measurement
from cs336_systems.experiments.implementations import AttentionFunction, without_overhead
from cs336_systems.experiments.turns import BY_TURNS, Call, Turn, measure_by_turns
from cs336_systems.measure.timing import time_in_a_row

PROBLEM = "long_calls"
LONG_IMPLEMENTATIONS = ("triton", "hopper", "sdpa_cudnn")
ROWS = (FORWARD, BACKWARD, BOTH)
# (batch, heads, length, head_dim, causal)
SHAPES = {
    "tiny": ((1, 1, 64, 64, True),),
    "smoke": ((1, 1, 128, 64, True), (1, 1, 128, 64, False)),
    "handout": (
        (1, 16, 16384, 64, True),
        (1, 16, 16384, 64, False),
        (1, 16, 16384, 128, True),
        (1, 16, 16384, 128, False),
    ),
}
# The power limit lowers an H200's clock 20 to 60 ms after large kernels begin. The two and the rounds are what four
# shapes in three modes leave of 90 s.
SETTLE_MS = 60.0
TIMED_MS = 50.0
ROUNDS = {"cpu": 3, "cuda": 18}  # three times every order of three


def long_calls_cells(run: RunConfig) -> list[Cell]:
    """A cell for each shape, with the rows of all implementations."""
    rows = tuple(replace(row, implementation=name) for name in LONG_IMPLEMENTATIONS for row in ROWS)
    shapes = [sized_shape(run, *sizes) for sizes in SHAPES[run.scale]]
    return [Cell(problem=PROBLEM, case=shape, implementation=BY_TURNS, rows=rows) for shape in shapes]


def measure_long_calls(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """All implementations of a shape by turns, and the reasons of those that do not play."""
    return measure_by_turns(cell, run, partial(turns, device=run.device), num_rounds=ROUNDS[run.device])


def turns(function: AttentionFunction, calls: dict[str, Call], device: str) -> dict[str, Turn]:
    """The turns in each mode of `calls`, of as many calls as make everybody's about equally long."""
    found: dict[str, Turn] = {}
    for mode, call in calls.items():
        counts = (1, 1)
        if device == "cuda":
            with without_overhead(function) as attend:
                counts = counts_of(time_in_a_row(partial(call, attend), 2, device))
        found[mode] = partial(_turn, function, call, counts, device)
    return found


def counts_of(call_ms: float) -> tuple[int, int]:
    """Calls of a turn that are not timed, and that are, where one takes about `call_ms`."""
    return max(1, math.ceil(SETTLE_MS / call_ms)), max(1, round(TIMED_MS / call_ms))


def _turn(function: AttentionFunction, call: Call, counts: tuple[int, int], device: str) -> dict[str, float]:
    """Milliseconds a call: those that are not timed and those that are, with nothing between the two."""
    untimed, timed = counts
    with without_overhead(function) as attend:
        for _ in range(untimed):
            call(attend)
        return {"time": time_in_a_row(partial(call, attend), timed, device)}
