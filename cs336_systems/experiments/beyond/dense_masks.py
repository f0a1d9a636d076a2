"""Full and causal attention, alone and over packed documents, beside library kernels.

Packed documents go through `flash_attention_varlen`. `triton_lists` and `hopper_lists` walk the
same mask as lists of tiles, `sdpa_padded` is SDPA on the padded batch, and `torch_varlen` PyTorch's
own packed attention.
"""

from collections.abc import Iterator, Sequence

import pandas as pd

from cs336_systems.book.frames import span
from cs336_systems.config import MaskCase, RunConfig
from cs336_systems.experiments import Lines, problem
from cs336_systems.subjects.attention_passes import BOTH_TIMES, rate_tables
from cs336_systems.subjects.mask_cases import (
    DENSE_PEERS,
    MASK_TIMES,
    MaskExperiment,
    mask_case,
    names_of,
)

# Eight documents of a packed sequence, in 32nds of it. The longest is twice the mean, so that a
# padded batch is half padding.
DOCUMENTS = (8, 6, 5, 4, 3, 3, 2, 1)
PACKED_PEERS = ("hopper", "hopper_lists", "sdpa_padded", "torch_varlen")
DOWN = {"mask": "family", "tokens": "seqlen_q"}
LENGTHS = {"tiny": (128,), "smoke": (64, 128), "handout": (1024, 4096, 8192, 16384)}


def documents_claim(rows: pd.DataFrame) -> str:
    """Return how much faster hopper is than FlexAttention, if it is at every length."""
    rates = rows.pivot(index="seqlen_q", columns="implementation", values="tflops")
    if (
        not {"hopper", "flex"} <= set(rates)
        or not (gains := rates["hopper"] / rates["flex"]).min() > 1
    ):
        return ""
    return f"Over packed documents hopper is {span(gains)} times as fast as FlexAttention"


@problem(
    title="Full and causal attention, alone and over packed documents, against library kernels",
    order=8,
)
class DenseMasks(MaskExperiment):
    implementations = (
        "triton",
        "triton_lists",
        *DENSE_PEERS,
        "hopper_lists",
        "flex",
        "sdpa_padded",
        "torch_varlen",
    )

    def planned(self, run: RunConfig) -> Iterator[tuple[MaskCase, Sequence[str]]]:
        """Yield full, causal and packed masks of each length, with their implementations."""
        for seqlen in LENGTHS[run.scale]:
            documents = "document:" + ",".join(
                str(seqlen * share // sum(DOCUMENTS)) for share in DOCUMENTS
            )
            masks: tuple[str, ...] = ("full", "causal", documents, f"{documents}+causal")
            if run.scale == "smoke" and seqlen < LENGTHS["smoke"][-1]:
                # On a laptop the shorter length runs only causal masks, to stay within minutes.
                masks = masks[1::2]
            for mask in masks if run.scale != "tiny" else masks[-1:]:
                peers: tuple[str, ...] = (
                    PACKED_PEERS if mask.startswith("document") else DENSE_PEERS
                )
                ours = ("triton",) if mask == "full" else ("triton", "triton_lists")
                yield (
                    mask_case(run, mask, seqlen, heads=64, head_dim=128),
                    names_of(run, (*peers, "flex"), ours),
                )

    tables = rate_tables(
        tuple(
            ("hopper", peer)
            for peer in ("triton", "torch_varlen", "flex", "sdpa_padded", "sdpa_cudnn")
        ),
        DOWN,
    ) | {"mask_time": MASK_TIMES(title="building the mask's lists", down=DOWN)}
    figures = {
        "forward_backward": Lines(
            claim=documents_claim,
            subtitle="eight causal documents, forward + backward",
            title="Eight packed documents, forward + backward",
            x="seqlen_q",
            x_title="tokens",
            y="tflops",
            y_title="TFLOP/s",
            where=BOTH_TIMES
            | {"family": "causal documents", "seqlen_q": lambda tokens: tokens >= 4096},
        )
    }
