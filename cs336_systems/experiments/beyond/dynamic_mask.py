"""Keys chosen by a bias at run time: one set for all queries, or the best keys of each query.

The shared set is gathered, keys of each query are walked by lists of tiles.
"""

from collections.abc import Iterator, Sequence

import pandas as pd

from cs336_systems.book.frames import digits
from cs336_systems.config import MaskCase, RunConfig
from cs336_systems.experiments import Bars, problem
from cs336_systems.subjects import mask_cases as masks
from cs336_systems.subjects.attention_passes import BOTH_TIMES

SIZES = {"tiny": (128, 16), "smoke": (128, 16), "handout": (32768, 1024)}  # (tokens, keys kept)


def chosen_claim(rows: pd.DataFrame) -> str:
    """Return that shared keys gain in some implementation, and keys of each query in none."""
    most = rows.groupby("family")["over_dense"].max()
    if not most.get("shared keys", 0) > 1 >= most.get("keys of each query", 2):
        return ""
    return (
        f"Shared keys make attention {digits(most['shared keys'])} times as fast; "
        "keys of each query gain nothing"
    )


@problem(title="Keys chosen by a bias at run time: gathered, or by lists of tiles", order=10)
class DynamicMask(masks.MaskExperiment):
    implementations = ("triton", *masks.DENSE_PEERS, "sdpa_mask", "flex")

    def planned(self, run: RunConfig) -> Iterator[tuple[MaskCase, Sequence[str]]]:
        """Yield dense causal attention and both kinds of chosen keys, with implementations."""
        seqlen, num_keys = SIZES[run.scale]
        for mask, peers in (
            ("causal", masks.DENSE_PEERS),
            (f"shared:{num_keys}+causal", ("hopper", "sdpa_mask")),
            (f"topk:{num_keys}", ("hopper", "sdpa_mask", "flex")),
        ):
            yield (
                masks.mask_case(run, mask, seqlen, heads=16, head_dim=128),
                masks.names_of(run, peers),
            )

    tables = {
        **masks.dense_tables(),
        "mask_time": masks.MASK_TIMES(
            title="choosing keys and building lists", down={"mask": "pattern"}
        ),
        "memory": masks.PEAKS,
    }
    figures = {
        "times": Bars(
            claim=chosen_claim,
            title="Chosen keys: speed over dense attention",
            subtitle="forward + backward, 1,024 keys chosen, "
            "over the fastest dense causal attention",
            x="family",
            y="over_dense",
            y_title="times as fast as dense",
            where=BOTH_TIMES | {"family": ("shared keys", "keys of each query")},
        )
    }
