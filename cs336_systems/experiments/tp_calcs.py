"""When communication limits tensor parallelism of a feed-forward layer: closed forms, 4 links."""

from typing import Any

from cs336_systems.analysis import ffn
from cs336_systems.experiments import Calculation, Listing, problem
from cs336_systems.subjects.counted_bytes import counted_rows, counted_table
from cs336_systems.subjects.layer_times import MODEL, layer, links, ratio_lines, times


@problem()
class TensorParallelCalcs(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return times on up to 64 GPUs, and the largest N that hides communication, by link."""
        rows = [row for row in times(("TP forward", "TP backward")) if row["GPUs"] <= 64]
        for link, rates in links().items():
            limits = {
                f"N {mode}": ffn.tp_limit(layer(), mode, **rates)
                for mode in ("forward", "backward")
            }
            rows.append(
                {
                    "quantity": "limit",
                    "C, W of": link,
                    "W (GB/s)": round(rates["bytes_per_s"] / 1e9),
                }
                | limits
            )
        return rows + counted_rows([(1, ranks) for ranks in (2, 4, 8)])

    tables = {
        "bytes": counted_table(["TP ranks"]),
        "limits": Listing(
            title="Largest N that computation hides the communication of, "
            f"F = {MODEL.d_ff:,}, any batch",
            where={"quantity": "limit"},
            columns=("C, W of", "W (GB/s)", "N forward", "N backward"),
        ),
    }
    figures = {"ratio": ratio_lines("tensor parallelism, forward", "any batch", "TP forward")}
