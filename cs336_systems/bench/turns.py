"""Measure implementations in interleaved rounds, so that drift of the machine affects all alike.

A round measures each implementation once in each mode; one such measurement is a turn. Two
successive rounds use opposite orders, and the next two begin with the next implementation, so that
each comes equally often in each place. A ratio is taken within one round, and the median over the
rounds counts.

`long_turn` is for large kernels. Such a kernel runs at the clock that the power limit allows, and
that clock depends on the GPU's temperature and on the host's other GPUs: implementations measured
seconds apart have ratios that differ by a percent or two from run to run. The turns are so short
that the machine hardly changes within a round, and so long that each implementation runs at the
clock of its own power. Between calls the cache is not overwritten.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from cs336_systems.measure.timing import time_in_a_row

# The power limit lowers an H200's clock 20 to 60 ms after large kernels begin.
SETTLE_MS = 60.0
TIMED_MS = 50.0
ROUNDS = {"cpu": 3, "cuda": 12}
# Most calls in a row or in a graph: a call launches about ten kernels, and the host waits after
# about a thousand queued launches.
MOST_CALLS = 20
GRAPH_MS = 2.0  # total time of a graph's calls, next to which its launch is negligible

P = TypeVar("P")
Call = Callable[[], object]  # the operation that is timed
# Measures one turn, leaves the device idle, and returns {quantity: milliseconds per call}.
Turn = Callable[[], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Player:
    """One implementation to be measured by turns, whose results are already checked."""

    name: str
    kernel: str  # name of the kernel that ran
    error: float  # largest error over its bound
    turns: dict[str, Turn]  # mode -> its turn
    context: Callable[[], AbstractContextManager[object]] = nullcontext  # active during each turn


def play(players: Sequence[Player], num_rounds: int) -> dict[tuple[str, str, str], list[float]]:
    """Measure `players` in `num_rounds` rounds; return lists of milliseconds per call.

    The lists are keyed by (player's name, mode, quantity), with one sample per round; samples of
    the same round have the same index in every list. A warm-up round before them is dropped.
    """
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for number in range(-1, num_rounds):
        for mode in players[0].turns if players else ():
            for player in in_order(players, number):
                with player.context():
                    taken = player.turns[mode]()
                for quantity, taken_ms in taken.items():
                    if number >= 0:
                        samples[player.name, mode, quantity].append(taken_ms)
    return samples


def in_order(players: Sequence[P], number: int) -> list[P]:
    """Return `players` in their order of round `number`.

    The first player changes every second round; odd rounds go through the order backwards.
    """
    first = number // 2 % len(players)
    ordered = [*players[first:], *players[:first]]
    return ordered[::-1] if number % 2 else ordered


def long_turn(call: Call, device: str) -> Turn:
    """Return a turn that runs `call` for SETTLE_MS untimed and then for TIMED_MS timed.

    On CUDA the numbers of calls are computed from the time of two calls, made here; on CPU each is
    one. Nothing runs between the untimed and the timed calls.
    """
    untimed = timed = 1
    if device == "cuda":
        call_ms = time_in_a_row(call, 2, device)
        untimed, timed = max(1, math.ceil(SETTLE_MS / call_ms)), max(1, round(TIMED_MS / call_ms))

    def turn() -> dict[str, float]:
        for _ in range(untimed):
            call()
        return {"time": time_in_a_row(call, timed, device)}

    return turn


def captured(call: Call, count: int = MOST_CALLS) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of `count` successive calls of `call`, captured after three warm-ups."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    # First calls load code, which a graph cannot capture.
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def graph_turn(call: Call, device: str) -> Turn:
    """Return a turn that times replays of a CUDA graph whose calls take about GRAPH_MS together.

    The time is per call, for small kernels whose launch would dominate. On CPU: `long_turn`.
    """
    if device == "cpu":
        return long_turn(call, device)
    count = max(1, min(MOST_CALLS, round(GRAPH_MS / time_in_a_row(call, 2, device))))
    replays = long_turn(captured(call, count).replay, device)
    return lambda: {"time": replays()["time"] / count}
