"""Measure implementations of attention by turns on one case (bench/turns.py)."""

import math
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pandas as pd

from cs336_systems.attention.contract import Oracle
from cs336_systems.bench.spec import Cell, Sample
from cs336_systems.bench.turns import ROUNDS, Player, Turn, long_turn, play
from cs336_systems.bench.worker import outcome_of
from cs336_systems.book.frames import dicts, digits, pick
from cs336_systems.config import RunConfig
from cs336_systems.inputs import AttentionInputs, attention_inputs
from cs336_systems.measure.allocations import one_out_of_memory_error, release
from cs336_systems.subjects.attention_passes import (
    RESULTS,
    AttentionExperiment,
    Call,
    Passes,
    checked_error,
    oracle_on,
)


class AttentionByTurns(AttentionExperiment):
    """Base class of attention experiments that measure all implementations of a case by turns.

    Turns are `long_turn`s unless an experiment overrides `turn_of`.
    """

    by_turns = True
    rounds: Mapping[str, int] = ROUNDS  # kind of device -> number of rounds

    def turn_of(self, call: Call, device: str) -> Turn:
        """Return the turn that times `call`, one implementation in one mode."""
        return long_turn(call, device)

    def measure_passes(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Check each implementation of the cell, then time the correct ones by turns.

        The rows of an implementation that is unsupported, wrong, or raises before the first round
        say so, and the others are still timed. An error that leaves the device unusable is raised
        and ends the whole cell.
        """
        inputs = attention_inputs(cell.case, device=run.device, seed=run.seed)
        oracle = oracle_on(cell.case, run, inputs)

        # Check the implementations.
        players = []
        for name in cell.implementations:
            rows = [row for row in cell.rows if row.implementation == name]
            broken = None
            try:
                with one_out_of_memory_error():
                    players.append(
                        self._player(
                            name, {row.mode for row in rows}, cell.case, run, inputs, oracle
                        )
                    )
            except Exception as error:  # noqa: BLE001 - a user's implementation may raise anything
                broken = outcome_of(error)
                traceback.print_exc()
            if broken is not None:
                yield from (
                    Sample(row=row, status=broken.status, message=broken.message) for row in rows
                )
                release(run.device)  # raises if a kernel's fault made the device unusable
        del oracle

        # Time the correct ones.
        samples = play(players, self.rounds[run.device])
        by_name = {player.name: player for player in players}
        for row in cell.rows:
            if player := by_name.get(row.implementation):
                taken = samples[player.name, row.mode, row.quantity]
                yield Sample(row=row, samples=taken, kernel=player.kernel, error=player.error)

    def _player(
        self,
        name: str,
        modes: set[str],
        case: Any,
        run: RunConfig,
        inputs: AttentionInputs,
        oracle: Oracle,
    ) -> Player:
        """Build and check one implementation, and return it with its turns in `modes`.

        Raises Disagreement if its results break the numerical contract, and Unsupported if it does
        not exist for the case.
        """
        built = self.built(name, case, run)
        passes = Passes(built, inputs)
        with built.context():
            results = map(built.unpack, (*passes.forward(), *passes.both()))
            error = checked_error(oracle, dict(zip(RESULTS, results)), name)
            calls: dict[str, Call] = {"forward": passes.forward, "forward_backward": passes.both}
            if "backward" in modes:
                # The graph is built here, outside of the turns.
                calls["backward"] = partial(passes.backward, passes.output())
            turns = {
                mode: self.turn_of(call, run.device)
                for mode, call in calls.items()
                if mode in modes
            }
        return Player(
            name=name, kernel=built.kernel, error=error, turns=turns, context=built.context
        )

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return the template's function `interval(ours, theirs, shape=..., mode=...)`.

        It gives the 95 % confidence interval of the median ratio of speeds within rounds, as text.
        """
        from scipy.stats import quantile_test  # takes a second to import

        def interval(ours: str, theirs: str, **where: Any) -> str:
            """Return "low to high" for how many times as fast `ours` is, or "too few rounds"."""
            (a,), (b,) = (
                dicts(pick(frame, where | {"implementation": name})) for name in (ours, theirs)
            )
            # Interval of the sign test: the number of rounds below the median is binomial.
            ends = quantile_test(
                [slow / fast for fast, slow in zip(a["samples"], b["samples"])]
            ).confidence_interval()
            return "too few rounds" if math.isnan(ends.low) else " to ".join(map(digits, ends))

        return {"interval": interval}
