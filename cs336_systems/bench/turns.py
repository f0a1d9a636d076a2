"""Implementations measured by turns, so that what changes a machine for a while changes all of
them.

A round is a turn of each implementation in each mode. Two rounds in a row go through them in
opposite orders, and the next two begin with the next one, so that each comes as often in each
place. Ratios are of one round, and the middle one of the rounds counts.

`long_turn` is for large kernels. Such a kernel runs at the clock that the power limit leaves it,
and that clock
moves with the GPU's temperature and with the host's other GPUs: implementations measured seconds
apart have ratios that differ by a percent or two from run to run. The turns are so short that a
round sees one machine, and so long that each runs at the clock of its own power. Between calls the
cache is not overwritten.
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
# in a row or a graph: a GPU queues a thousand launches before the host waits, and a call makes ten
MOST_CALLS = 20
GRAPH_MS = 2.0  # of a graph's calls, beside which its launch takes nothing

P = TypeVar("P")
Call = Callable[[], object]  # what is timed
# takes one, at whose end the device is idle; milliseconds a call by quantity
Turn = Callable[[], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Player:
    """One of those that take turns, found to be correct."""

    name: str
    kernel: str
    error: float
    turns: dict[str, Turn]  # by mode
    context: Callable[[], AbstractContextManager[object]] = nullcontext  # in which turns are taken


def play(players: Sequence[Player], num_rounds: int) -> dict[tuple[str, str, str], list[float]]:
    """Milliseconds a call by (name, mode, quantity), one for each round, after one round that is
    not kept.

    Samples of one round have the same place in every list.
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
    """Who comes after whom in round `number`: begun by the next one every other round, backwards in
    between.
    """
    first = number // 2 % len(players)
    ordered = [*players[first:], *players[:first]]
    return ordered[::-1] if number % 2 else ordered


def long_turn(call: Call, device: str) -> Turn:
    """So many calls as fill SETTLE_MS, not timed, and then TIMED_MS, with nothing between the two."""
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
    """`count` calls in a row as a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    # what runs for the first time loads code, which no graph can hold
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
    """`long_turn` of graphs of so many calls as fill GRAPH_MS."""
    if device == "cpu":
        return long_turn(call, device)
    count = max(1, min(MOST_CALLS, round(GRAPH_MS / time_in_a_row(call, 2, device))))
    replays = long_turn(captured(call, count).replay, device)
    return lambda: {"time": replays()["time"] / count}
