"""How many GPUs FSDP and tensor parallelism can use together in a feed-forward layer's forward."""

from typing import Any

import pandas as pd

from cs336_systems.analysis import ffn
from cs336_systems.book.frames import digits
from cs336_systems.experiments import Calculation, Lines, Listing, problem
from cs336_systems.subjects.counted_bytes import counted_rows, counted_table
from cs336_systems.subjects.layer_times import FEW_TOKENS, MODEL, TOKENS, layer, links

OVERLAPS = {"overlapped": True, "one after the other": False}
# Headings of the columns with whole numbers of GPUs.
WHOLE = {"overlapped": "N_FSDP × N_TP in whole numbers", "one after the other": "in whole numbers"}


def both_claim(rows: pd.DataFrame) -> str:
    """Return on how many times the GPUs of FSDP alone both together hide communication."""
    limits = rows.pivot(index="tokens", columns="scheme", values="GPUs")
    gain = digits((limits["both, overlapped"] / limits["FSDP"]).min(), 2)
    return f"FSDP and TP together hide communication on {gain} times the GPUs of FSDP alone"


@problem()
class FullyShardedTensorParallelCalcs(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return the limits on GPUs by link, tokens and scheme, and the best whole grids."""
        rows = []
        for link, rates in links().items():
            for tokens in (2**power for power in range(14, 25)):
                one = layer(tokens)
                limits = {
                    "FSDP": ffn.fsdp_limit(one, "forward", **rates),
                    "TP": ffn.tp_limit(one, "forward", **rates),
                }
                for name, overlap in OVERLAPS.items():
                    limits[f"both, {name}"] = ffn.fsdp_tp_limit(
                        one, overlap=overlap, **rates
                    ).devices
                rows += [
                    {
                        "quantity": "limit",
                        "link": link,
                        "tokens": tokens,
                        "scheme": name,
                        "GPUs": limit,
                    }
                    for name, limit in limits.items()
                ]

        # The best grids in real and in whole numbers, at two batch sizes.
        for tokens in (FEW_TOKENS, TOKENS):
            for link, rates in links().items():
                row: dict[str, Any] = {"quantity": "grid", "C, W of": link, "B": tokens}
                for name, overlap in OVERLAPS.items():
                    row[f"N, {name}"] = ffn.fsdp_tp_limit(
                        layer(tokens), overlap=overlap, **rates
                    ).devices
                    fsdp, tp = ffn.best_integer_grid(layer(tokens), overlap=overlap, **rates)
                    row[WHOLE[name]] = f"{fsdp:,} × {tp} = {fsdp * tp:,}"
                rows.append(row)
        return rows + counted_rows([(2, 2), (4, 2), (4, 8)])

    tables = {
        "bytes": counted_table(["grid", "axis"]),
        "grids": Listing(
            title="Largest N of FSDP and tensor parallelism, forward",
            where={"quantity": "grid"},
            significant=4,
            columns=(
                "C, W of",
                "B",
                *(heading for name in OVERLAPS for heading in (f"N, {name}", WHOLE[name])),
            ),
        ),
    }
    figures = {
        "limits": Lines(
            claim=both_claim,
            title="GPUs at which the forward is bound by communication",
            subtitle=f"calculated: forward of 8B, F = {MODEL.d_ff:,}, bfloat16, H200s on NVLink",
            x="tokens",
            x_title="tokens of the whole batch",
            y="GPUs",
            y_title="largest N",
            color="scheme",
            where={"quantity": "limit", "link": "H200, NVLink"},
        )
    }
