"""Dilated attention by reshape at growing rates against dense attention, full and causal."""

from collections.abc import Iterator, Sequence

import pandas as pd

from cs336_systems.book.frames import digits
from cs336_systems.config import MaskCase, RunConfig
from cs336_systems.experiments import Lines, problem
from cs336_systems.subjects import mask_cases as masks
from cs336_systems.subjects.attention_passes import BOTH_TIMES

# (tokens, rates)
SIZES = {"tiny": (128, (2,)), "smoke": (128, (2, 4)), "handout": (32768, (2, 4, 8))}


def dilated_claim(rows: pd.DataFrame) -> str:
    fastest = rows.sort_values("over_dense").iloc[-1]
    gain = f"{digits(fastest['over_dense'])} times as fast as dense attention"
    return f"At a rate of {fastest['number']:.0f}, {fastest['implementation']} is {gain}"


@problem(title="Dilated attention by reshape against dense attention", order=11)
class DilatedAttention(masks.MaskExperiment):
    implementations = ("triton", *masks.DENSE_PEERS, "sdpa_mask")

    def planned(self, run: RunConfig) -> Iterator[tuple[MaskCase, Sequence[str]]]:
        """Yield dense attention and each rate of dilation, full and causal, with their peers."""
        seqlen, rates = SIZES[run.scale]
        for suffix, dense in (("", "full"), ("+causal", "causal")):
            if run.scale == "tiny" and suffix:
                continue
            for mask in (dense, *(f"dilated:{seqlen}/{rate}{suffix}" for rate in rates)):
                peers = masks.DENSE_PEERS if mask == dense else ("hopper", "sdpa_mask")
                yield (
                    masks.mask_case(run, mask, seqlen, heads=16, head_dim=64),
                    masks.names_of(run, peers),
                )

    tables = {**masks.dense_tables(), "memory": masks.PEAKS}
    figures = {
        "forward_backward": Lines(
            claim=dilated_claim,
            subtitle="causal, forward + backward",
            title="Dilated attention, forward + backward: speed over dense attention",
            x="number",
            x_title="rate",
            y="over_dense",
            y_title="times as fast as dense",
            where=BOTH_TIMES
            | {
                "family": "causal dilated",
                "implementation": ("triton", "hopper"),
                "number": lambda rate: rate > 1,
            },
        )
    }
