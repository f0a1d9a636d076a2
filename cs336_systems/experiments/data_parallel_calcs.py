"""When communication limits data parallelism of a feed-forward layer: closed forms, four links."""

from typing import Any

from cs336_systems.analysis import ffn
from cs336_systems.experiments import Calculation, Listing, problem
from cs336_systems.subjects.layer_times import FEW_TOKENS, TOKENS, layer, links, ratio_lines, times


@problem()
class DataParallelCalcs(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return times of a backward, and the largest N that hides communication, by link."""
        rows = times(("DP backward",))
        for link, rates in links().items():
            row = {"quantity": "limit", "link": link, "rate": round(rates["bytes_per_s"] / 1e9)}
            row |= {"tokens": rates["flops_per_s"] / rates["bytes_per_s"]}
            row |= {"few": ffn.data_parallel_limit(layer(FEW_TOKENS), **rates)}
            rows.append(row | {"many": ffn.data_parallel_limit(layer(), **rates)})
        return rows

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
    figures = {"ratio": ratio_lines("data parallelism", f"B = {TOKENS:,}", "DP backward")}
