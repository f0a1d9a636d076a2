"""Base of the experiments in which implementations of attention take turns (turns.py) on one case."""

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
    """Base of the experiments whose implementations take turns: `long_turn`s, unless an experiment
    has its own.
    """

    by_turns = True
    rounds: Mapping[str, int] = ROUNDS

    def turn_of(self, call: Call, device: str) -> Turn:
        """The turn of one implementation in one mode."""
        return long_turn(call, device)

    def measure_passes(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Each implementation of the cell checked against the oracle, then all that are right by
        turns.

        Who does not exist, is wrong, or raises before the first round has rows that say so, and the
        others play. An error that leaves a device useless is raised, as everybody's.
        """
        inputs = attention_inputs(cell.case, device=run.device, seed=run.seed)
        oracle = oracle_on(cell.case, run, inputs)
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
            except Exception as error:  # noqa: BLE001 - a reader's own implementation may raise anything
                broken = outcome_of(error)
                traceback.print_exc()
            if broken is not None:
                yield from (
                    Sample(row=row, status=broken.status, message=broken.message) for row in rows
                )
                release(run.device)  # raises what a kernel's fault makes of every later call
        del oracle
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
        """Disagreement where the results of `name` break the numerical contract."""
        built = self.built(name, case, run)
        passes = Passes(built, inputs)
        with built.context():
            results = map(built.unpack, (*passes.forward(), *passes.both()))
            error = checked_error(oracle, dict(zip(RESULTS, results)), name)
            calls: dict[str, Call] = {"forward": passes.forward, "forward_backward": passes.both}
            if "backward" in modes:
                # its graph is made outside of the turns
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
        """`interval(ours, theirs, shape=..., mode=...)`: where the median of the rounds' ratios
        lies with 95 %.
        """
        from scipy.stats import quantile_test  # takes a second to import

        def interval(ours: str, theirs: str, **where: Any) -> str:
            (a,), (b,) = (
                dicts(pick(frame, where | {"implementation": name})) for name in (ours, theirs)
            )
            # The sign test's: as many rounds as heads of a fair coin lie below the median.
            ends = quantile_test(
                [slow / fast for fast, slow in zip(a["samples"], b["samples"])]
            ).confidence_interval()
            return "too few rounds" if math.isnan(ends.low) else " to ".join(map(digits, ends))

        return {"interval": interval}
