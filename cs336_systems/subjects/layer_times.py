"""Apply the closed forms of section 8 to the feed-forward layer of the 8B model on H200 and B200.

rows = times(("FSDP backward",))      # communication / computation for each link and GPU count
"""

from collections.abc import Callable
from typing import Any

import pandas as pd

from cs336_systems.analysis import HARDWARE, FeedForward, ffn
from cs336_systems.book.figures import Lines
from cs336_systems.config import MODEL_SIZES

MODEL = MODEL_SIZES["8b"]
TOKENS = 4_194_304  # a large pre-training batch
FEW_TOKENS = 65_536  # a step of the leaderboard
GPUS = tuple(2**power for power in range(1, 15))

# scheme -> function that returns seconds of communication of a layer's pass on N GPUs at W bytes/s
COMMUNICATION: dict[str, Callable[..., float]] = {
    "DP": lambda one, _, gpus, **link: ffn.data_parallel_seconds(one, gpus, **link),
    "FSDP": ffn.fsdp_seconds,
    "TP": ffn.tp_seconds,
}


def links() -> dict[str, dict[str, float]]:
    """Return each link's C and W: FLOP/s of a GPU, and its bytes/s over the link.

    The links are NVLink and each GPU's own network adapter, for each machine of HARDWARE.
    """
    return {
        f"{machine.name}, {link}": {"flops_per_s": machine.flops_per_s, "bytes_per_s": bytes_per_s}
        for machine in HARDWARE.values()
        for link, bytes_per_s in (
            ("NVLink", machine.node_bytes_per_s),
            ("network", machine.network_bytes_per_s),
        )
    }


def limit_claim(rows: pd.DataFrame) -> str:
    """Return a title: the most drawn GPUs at which computation hides communication.

    It names the links with the highest and with the lowest limit.
    """
    hidden = rows[rows["ratio"] <= 1].groupby("link")["GPUs"].max()
    most = hidden.reindex(rows["link"].unique(), fill_value=1)
    by_limit = sorted(most.to_dict().items(), key=lambda item: item[1])
    slow, fast = (f"{limit:,} ({link})" for link, limit in (by_limit[0], by_limit[-1]))
    return f"Computation hides communication up to N = {fast}, or {slow}"


def ratio_lines(scheme: str, batch: str, drawn: str) -> Lines:
    """Return a figure of communication over computation against the number of GPUs.

    `drawn` is the scheme in the rows, `scheme` its name in words, and `batch` describes the batch.
    """
    return Lines(
        title=f"{scheme}: communication over computation of 8B's feed-forward layer",
        x="GPUs",
        x_title="N",
        claim=limit_claim,
        subtitle=f"calculated: {scheme}, a feed-forward layer of 8B, bfloat16, {batch}",
        bound=(1, "bound by communication above"),
        y="ratio",
        y_title="communication over computation",
        color="link",
        where={"quantity": "ratio", "scheme": drawn},
    )


def layer(tokens: int = TOKENS) -> FeedForward:
    """Return the feed-forward layer of the 8B model for a batch of `tokens`."""
    return FeedForward(tokens=tokens, d_model=MODEL.d_model, d_ff=MODEL.d_ff)


def times(schemes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return rows with the `ratio` of communication to computation by scheme, link and GPUs.

    A scheme is a kind and a mode, such as "FSDP backward"; above a ratio of 1 communication bounds
    it.
    """
    rows = []
    for scheme in schemes:
        kind, mode = scheme.split()
        for link, rates in links().items():
            for gpus in GPUS:
                seconds = ffn.ffn_flops(layer(), mode, gpus) / rates["flops_per_s"]
                sent_s = COMMUNICATION[kind](layer(), mode, gpus, bytes_per_s=rates["bytes_per_s"])
                ratio = sent_s / seconds
                rows.append(
                    {
                        "quantity": "ratio",
                        "scheme": scheme,
                        "link": link,
                        "GPUs": gpus,
                        "ratio": ratio,
                    }
                )
    return rows
