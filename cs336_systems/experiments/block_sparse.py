"""Skipping tiles: speed by density of random tiles against dense attention, and what random token masks gain."""

from __future__ import annotations

import pandas as pd

from cs336_systems.config import RunConfig
from cs336_systems.experiments.figures import Lines, alt
from cs336_systems.experiments.masks import DENSE_PEERS, MaskExperiment, dense_tables, mask_case, mask_cell, names_of
from cs336_systems.experiments.spec import Cell, problem
from cs336_systems.experiments.tables import Pivot

LENGTH = {"tiny": 128, "smoke": 256, "handout": 16384}
ROW_DENSITIES = {"tiny": (0.5,), "smoke": (0.25, 0.5), "handout": (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)}
TOKEN_DENSITIES = {"tiny": (), "smoke": (0.1,), "handout": (0.1, 0.5)}
RADII = {"tiny": (), "smoke": (3,), "handout": (1, 7, 15)}  # of neighbours on a grid of LENGTH tokens
SUITE_LENGTH, SUITE_DENSITIES = 49152, (0.05, 0.1, 0.2, 0.5, 1.0)
SHORT = tuple(LENGTH.values())  # of tables without the suite
SUITE_BLOCKS = ((128, 128), (64, 128), (128, 64), (64, 64))
LISTED = ("triton", "hopper", "flex")  # which walk lists


class AgainstIdeal(Lines):
    """Lines, and the speed that the number of live tiles allows."""

    def chart(self, frame: pd.DataFrame) -> alt.TopLevelMixin | None:
        rows = self.rows(frame)
        if rows.empty:
            return None
        ideal = rows.drop_duplicates("number").assign(implementation="tiles allow", over_dense=lambda one: one["ideal"])
        return self._finished(self._marks(pd.concat([rows, ideal])), rows)


@problem(title="Skipping tiles: speed by density, and what random token masks gain", order=9)
class BlockSparse(MaskExperiment):
    implementations = ("triton", *DENSE_PEERS, "sdpa_mask", "flex")

    def cells(self, run: RunConfig) -> list[Cell]:
        """Random tiles by density, dense, random tokens, neighbours on a grid; of the handout long ones by tile."""
        peers = ("hopper", "sdpa_mask", "flex")
        beside: dict[str, tuple[str, ...]] = {"full": (*DENSE_PEERS, "flex")}
        beside |= {f"random:{density:g}": peers for density in ROW_DENSITIES[run.scale]}
        beside |= {f"tokens:{density:g}": peers for density in TOKEN_DENSITIES[run.scale]}
        planned = [
            (mask_case(run, mask, LENGTH[run.scale], heads=16, head_dim=128), names_of(run, ("triton",), others))
            for mask, others in beside.items()
        ]
        planned += [
            (mask_case(run, f"{order}:{radius}", LENGTH[run.scale], heads=16, head_dim=128), LISTED)
            for radius in RADII[run.scale]  # of which both orders attend the same pairs
            for order in ("grid", "hilbert")
        ]
        planned += [
            (mask_case(run, f"random:{density:g}", SUITE_LENGTH, heads=8, head_dim=128, blocks=blocks), LISTED)
            for blocks in (SUITE_BLOCKS if run.scale == "handout" else ())
            for density in SUITE_DENSITIES
        ]
        return [mask_cell(case, name, run) for case, names in planned for name in names]

    tables = dense_tables(seqlen_q=SHORT) | {
        "suite": Pivot(
            title=f"{SUITE_LENGTH:,} tokens, by tile shape",
            down={"tiles": "blocks", "density": "number", "pass": "pass"},
            value="tflops",
            unit="TFLOP/s",
            where={"quantity": "time", "seqlen_q": SUITE_LENGTH},
            ratios=(("triton", "flex"),),
        )
    }
    figures = {
        "forward": AgainstIdeal(
            title="Random tiles, forward: speed over dense attention",
            x="number",
            x_title="share of live tiles",
            y="over_dense",
            y_title="times as fast as dense",
            where={"quantity": "time", "mode": "forward", "family": "random tiles", "implementation": LISTED},
        )
    }
