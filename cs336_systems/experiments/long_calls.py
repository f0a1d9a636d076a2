"""The longest of `attention_shapes`, the implementations taking turns.

A large kernel runs at the clock that the power limit leaves it, and that clock moves with the GPU's temperature and
with the host's other GPUs. Implementations measured seconds apart have ratios that differ by a percent or two from run
to run. Here they take turns: so short that a round sees one machine, so long that each runs at the clock of its own
power. The first SETTLE_MS of a turn are not timed. The cache is not overwritten between calls, unlike in
`attention_shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention import BY_SHAPE, AttentionExperiment
from cs336_systems.experiments.figures import Bars
from cs336_systems.experiments.frames import digits, pick, tuples
from cs336_systems.experiments.implementations import AttentionFunction, without_overhead
from cs336_systems.experiments.spec import Cell, Sample, problem
from cs336_systems.experiments.tables import Pivot
from cs336_systems.experiments.turns import Call, Turn, measure_by_turns
from cs336_systems.measure.samples import median_interval
from cs336_systems.measure.timing import time_in_a_row

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


@problem(title="Our kernels and cuDNN's on the longest of those shapes, by turns", order=2)
class LongCalls(AttentionExperiment):
    implementations = ("triton", "hopper", "sdpa_cudnn")
    by_turns = True
    sizes = SHAPES

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """All implementations of a shape by turns, and the reasons of those that are left out."""
        return measure_by_turns(cell, run, partial(turns, device=run.device), num_rounds=ROUNDS[run.device])

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """`interval(ours, theirs, shape=..., mode=...)`: where the median of the rounds' ratios lies with 95 %."""

        def interval(ours: str, theirs: str, **where: Any) -> str:
            (a,), (b,) = (tuples(pick(frame, where | {"implementation": name})) for name in (ours, theirs))
            ends = median_interval([slow / fast for fast, slow in zip(a["samples"], b["samples"])])
            return "too few rounds" if ends is None else " to ".join(digits(end) for end in ends)

        return {"interval": interval}

    tables = {
        "times": Pivot(
            title="by turns",
            down={**BY_SHAPE, "pass": "pass"},
            by_turns=True,
            ratios=(("hopper", "sdpa_cudnn"), ("hopper", "triton"), ("triton", "sdpa_cudnn")),
        )
    }
    figures = {
        "tflops": Bars(
            title="Forward + backward by turns",
            x="shape",
            y="tflops",
            y_title="TFLOP/s",
            where={"mode": "forward_backward"},
        )
    }


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
