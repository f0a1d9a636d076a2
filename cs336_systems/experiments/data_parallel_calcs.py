"""When data parallelism of a feed-forward layer is bound by communication: closed forms on four links."""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems.analysis import ffn
from cs336_systems.experiments.figures import Lines
from cs336_systems.experiments.frames import pick
from cs336_systems.experiments.layer_times import FEW_TOKENS, TOKENS, layer, links, times
from cs336_systems.experiments.spec import Calculation, problem
from cs336_systems.experiments.tables import Listing


@problem()
class DataParallelCalcs(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        rows = times(("DP backward",))
        for link, flops_per_s, bytes_per_s in links():
            rates = {"flops_per_s": flops_per_s, "bytes_per_s": bytes_per_s}
            row = {"quantity": "limit", "link": link, "rate": round(bytes_per_s / 1e9)}
            row |= {"tokens": flops_per_s / bytes_per_s}
            row |= {"few": ffn.data_parallel_limit(layer(FEW_TOKENS), **rates)}
            rows.append(row | {"many": ffn.data_parallel_limit(layer(), **rates)})
        return rows

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """`limit(link)`: C/W, the tokens that each GPU needs."""
        return {"limit": lambda link: pick(frame, {"quantity": "limit", "link": link})["tokens"].item()}

    tables = {
        "limits": Listing(
            title="Largest N that computation hides the communication of",
            where={"quantity": "limit"},
            significant=4,
            columns={
                "C, W of": "link",
                "W (GB/s)": "rate",
                "C/W: tokens a GPU": "tokens",
                f"N at B = {FEW_TOKENS:,}": "few",
                f"N at B = {TOKENS:,}": "many",
            },
        )
    }
    figures = {
        "ratio": Lines(
            title=f"Data parallelism: communication over computation of 8B's feed-forward layer, B = {TOKENS:,}",
            x="GPUs",
            x_title="N",
            y="ratio",
            y_title="communication over computation",
            color="link",
            where={"quantity": "ratio"},
        )
    }
