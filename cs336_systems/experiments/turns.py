"""Implementations of attention measured by turns, so that what changes a machine for a while changes all of them.

A round is a turn of each implementation in each mode. Two rounds in a row go through them in opposite orders, and the
next two begin with the next one, so that everybody comes as often in each place. Ratios are of one round, and the
middle one of the rounds counts. An experiment says what a turn is:

    measure_by_turns(cell, run, lambda function, calls: {"forward": take_turn, ...}, num_rounds=25)
"""

from __future__ import annotations

import importlib.util
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from cs336_systems.attention.compilation import compiler_errors
from cs336_systems.attention.contract import Oracle, compute_oracle
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments.attention import checked_error
from cs336_systems.experiments.implementations import AttentionFunction, build, kernel_name
from cs336_systems.experiments.spec import Cell, Disagreement, Sample, Unsupported
from cs336_systems.experiments.worker import outcome_of
from cs336_systems.inputs import AttentionInputs, attention_inputs
from cs336_systems.measure.memory import one_out_of_memory_error, release

Call = Callable[[AttentionFunction], object]  # of what `without_overhead` yields
P = TypeVar("P")
Turn = Callable[[], dict[str, float]]  # takes one, at whose end the device is idle; milliseconds a call by quantity
TurnsOf = Callable[[AttentionFunction, dict[str, Call]], dict[str, Turn]]  # of what `build` returns; both by mode


@dataclass(frozen=True, kw_only=True)
class Player:
    """One of those that take turns, found to be correct."""

    name: str
    kernel: str
    error: float
    turns: dict[str, Turn]  # by mode


def measure_by_turns(cell: Cell, run: RunConfig, turns_of: TurnsOf, *, num_rounds: int) -> Iterator[Sample]:
    """Each implementation of `cell` checked against the oracle, then all that are right by turns.

    `turns_of` makes the turns of one in each mode of the rows. Who does not exist, is wrong, or raises before the first
    round has rows that say so, and the others play. An error that leaves a device useless is raised, as everybody's.
    """
    inputs = attention_inputs(cell.case, device=run.device, seed=run.seed)
    oracle = compute_oracle(*inputs, is_causal=cell.case.is_causal)
    players = []
    for name in cell.implementations:
        rows = [row for row in cell.rows if row.implementation == name]
        modes = {row.mode for row in rows}
        broken = None
        try:
            with one_out_of_memory_error():
                players.append(_player(name, cell.case, inputs, oracle, run.device, modes, turns_of))
        except _errors_of_one() as error:
            broken = outcome_of(error)
            traceback.print_exc()
        if broken is not None and broken.status == "skipped":
            yield from (Sample(row=row, skipped=broken.message) for row in rows)
        elif broken is not None:
            is_oom = broken.status == "oom"
            yield from (Sample(row=row, failed=broken.message, oom=is_oom) for row in rows)
            release(run.device)  # raises what a kernel's fault makes of every later call
    del oracle
    samples = play(players, num_rounds)
    by_name = {player.name: player for player in players}
    for row in cell.rows:
        if row.implementation in by_name:
            player = by_name[row.implementation]
            taken = samples[player.name, row.mode, row.quantity]
            yield Sample(row=row, samples=taken, kernel=player.kernel, error=player.error)


def play(players: Sequence[Player], num_rounds: int) -> dict[tuple[str, str, str], list[float]]:
    """Milliseconds a call by (name, mode, quantity), one for each round, after one round that is not kept.

    Samples of one round have the same place in every list.
    """
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for number in range(-1, num_rounds):
        for mode in players[0].turns if players else ():
            for player in in_order(players, number):
                for quantity, taken_ms in player.turns[mode]().items():
                    if number >= 0:
                        samples[player.name, mode, quantity].append(taken_ms)
    return samples


def in_order(players: Sequence[P], number: int) -> list[P]:
    """Who comes after whom in round `number`: begun by the next one every other round, backwards in between."""
    first = number // 2 % len(players)
    ordered = [*players[first:], *players[:first]]
    return ordered[::-1] if number % 2 else ordered


def _errors_of_one() -> tuple[type[Exception], ...]:
    """What one implementation raises: our refusals, and what memory, compilers and drivers have to say."""
    compilers = compiler_errors() if importlib.util.find_spec("triton") else ()
    return (Unsupported, Disagreement, RuntimeError, ValueError, TypeError, *compilers)


def _player(
    name: str, shape: AttentionShape, inputs: AttentionInputs, oracle: Oracle, device: str, modes: set[str],
    turns_of: TurnsOf,
) -> Player:  # fmt: skip
    """Raises Unsupported where `name` does not exist, Disagreement where its results break the numerical contract."""
    function = build(name, shape, device)
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]

    def forward(attend: AttentionFunction) -> Tensor:
        with torch.no_grad():
            return attend(*inputs[:3])

    def both(attend: AttentionFunction) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, inputs.grad_output)

    names = ("output", "grad_q", "grad_k", "grad_v")
    error = checked_error(oracle, dict(zip(names, (forward(function), *both(function)))), name)
    calls: dict[str, Call] = {"forward": forward, "forward_backward": both}
    if "backward" in modes:
        output = function(*leaves)  # the graph is made once, outside of the turns
        calls["backward"] = lambda _: torch.autograd.grad(output, leaves, inputs.grad_output, retain_graph=True)
    calls = {mode: call for mode, call in calls.items() if mode in modes}
    kernel = kernel_name(name, shape, device)
    return Player(name=name, kernel=kernel, error=error, turns=turns_of(function, calls))
