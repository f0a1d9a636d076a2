"""Skipping tiles: speed over dense attention by density, and what random token masks gain."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import pandas as pd

from cs336_systems.book.frames import span
from cs336_systems.config import MaskCase, RunConfig
from cs336_systems.experiments import Lines, Pivot, problem
from cs336_systems.subjects.mask_cases import (
    DENSE_PEERS,
    MaskExperiment,
    dense_tables,
    mask_case,
    names_of,
)

LENGTH = {"tiny": 128, "smoke": 256, "handout": 16384}
ROW_DENSITIES = {"tiny": (0.5,), "smoke": (0.25, 0.5), "handout": (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)}
TOKEN_DENSITIES = {"tiny": (), "smoke": (0.1,), "handout": (0.1, 0.5)}
# Radii of neighbourhoods on a grid of LENGTH tokens.
RADII = {"tiny": (), "smoke": (3,), "handout": (1, 7, 15)}
SUITE_LENGTH, SUITE_DENSITIES = 49152, (0.05, 0.1, 0.2, 0.5, 1.0)
SHORT = tuple(LENGTH.values())  # lengths of tables without the suite
SUITE_BLOCKS = ((128, 128), (64, 128), (128, 64), (64, 64))
LISTED = ("triton", "hopper", "flex")  # implementations that walk lists of tiles


class AgainstIdeal(Lines):
    """Lines of the measured speeds, and one of the speed that the number of live tiles allows."""

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        rows = super().rows(frame)
        ideal = rows.drop_duplicates("number").assign(
            implementation="tiles allow", over_dense=lambda one: one["ideal"]
        )
        return pd.concat([rows, ideal])


def reached_claim(rows: pd.DataFrame) -> str:
    speeds = rows.pivot(index="number", columns="implementation", values="over_dense")
    if "hopper" not in speeds:
        return ""
    shares = 100 * speeds["hopper"] / speeds["tiles allow"]
    return f"hopper reaches {span(shares, 2)} % of the speed that the live tiles allow"


@problem(title="Skipping tiles: speed by density, and what random token masks gain", order=9)
class BlockSparse(MaskExperiment):
    implementations = ("triton", *DENSE_PEERS, "sdpa_mask", "flex")

    def planned(self, run: RunConfig) -> Iterator[tuple[MaskCase, Sequence[str]]]:
        """Yield each mask with its implementations: dense, random tiles, tokens, neighbours.

        At handout scale the suite of long sequences follows, by tile shape and density.
        """
        short = partial(mask_case, run, seqlen=LENGTH[run.scale], heads=16, head_dim=128)
        peers = ("hopper", "sdpa_mask", "flex")
        yield short("full"), names_of(run, (*DENSE_PEERS, "flex"))
        for density in ROW_DENSITIES[run.scale]:
            yield short(f"random:{density:g}"), names_of(run, peers)
        for density in TOKEN_DENSITIES[run.scale]:
            yield short(f"tokens:{density:g}"), names_of(run, peers)
        # Both orders of the tokens attend the same pairs.
        for radius, order in product(RADII[run.scale], ("grid", "hilbert")):
            yield short(f"{order}:{radius}"), LISTED
        for blocks, density in product(
            SUITE_BLOCKS if run.scale == "handout" else (), SUITE_DENSITIES
        ):
            yield (
                mask_case(
                    run, f"random:{density:g}", SUITE_LENGTH, heads=8, head_dim=128, blocks=blocks
                ),
                LISTED,
            )

    tables = dense_tables(seqlen_q=SHORT) | {
        "suite": Pivot(
            title=f"{SUITE_LENGTH:,} tokens, by tile shape",
            down={"tiles": "blocks", "density": "number", "pass": "pass"},
            value="tflops",
            unit="TFLOP/s",
            where={"quantity": "time", "seqlen_q": SUITE_LENGTH},
            ratios=(("triton", "flex"), ("hopper", "flex")),
        )
    }
    figures = {
        "forward": AgainstIdeal(
            claim=reached_claim,
            subtitle="16,384 tokens, random tiles, forward",
            title="Random tiles, forward: speed over dense attention",
            x="number",
            x_title="share of live tiles",
            y="over_dense",
            y_title="times as fast as dense",
            where={
                "quantity": "time",
                "mode": "forward",
                "family": "random tiles",
                "implementation": LISTED,
            },
        )
    }
