"""Counted block density of 2D neighbourhood masks, with tokens in rows or along Hilbert's curve."""

from typing import Any

import pandas as pd

from cs336_systems.experiments import Calculation, Lines, Listing, problem
from cs336_systems.grids import hilbert_order, neighbourhood_block_density, row_major_order

ORDERS = {"rows": row_major_order, "Hilbert's curve": hilbert_order}
BLOCK_SIZE = 128


def order_claim(rows: pd.DataFrame) -> str:
    """Return from which radius on the curve has fewer live tiles than rows at every larger one."""
    live = rows.pivot(index="radius", columns="order", values="density").sort_index()
    first = (live["Hilbert's curve"] < live["rows"])[::-1].cummin()
    if not first.any():
        return ""
    return (
        f"From a radius of {first[first].index.min()} on Hilbert's curve has "
        "fewer live tiles than rows"
    )


@problem(title="Tokens along Hilbert's curve", order=21)
class HilbertOrder(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return the percentage of live tiles by grid, radius and order, and both orders' ratio."""
        rows: list[dict[str, Any]] = []
        for n in (64, 128):
            for radius in (1, 3, 7, 15):
                shared = {"grid": f"{n} × {n}", "radius": radius}
                densities = {
                    name: 100
                    * neighbourhood_block_density(
                        n, radius=radius, block_size=BLOCK_SIZE, order=order(n)
                    )
                    for name, order in ORDERS.items()
                }
                rows += [
                    shared | {"quantity": "density", "order": name, "density": one}
                    for name, one in densities.items()
                ]
                ratio = densities["Hilbert's curve"] / densities["rows"]
                rows.append(shared | {"quantity": "both", "curve over rows": ratio} | densities)
        return rows

    tables = {
        "density": Listing(
            title=f"Live tiles of {BLOCK_SIZE} × {BLOCK_SIZE} by the order of the tokens (%)",
            where={"quantity": "both"},
            columns=("grid", "radius", *ORDERS, "curve over rows"),
        )
    }
    figures = {
        "density": Lines(
            claim=order_claim,
            title="Live tiles of a neighbourhood mask",
            subtitle=f"calculated: neighbours on a grid of 128 × 128 tokens, tiles of {BLOCK_SIZE}",
            x="radius",
            y="density",
            y_title="live tiles (%)",
            color="order",
            where={"quantity": "density", "grid": "128 × 128"},
        )
    }
