"""Block density of two-dimensional neighbourhood masks, with tokens in rows and along Hilbert's curve: counted."""

from typing import Any

from cs336_systems.experiments import Calculation, Lines, Listing, problem
from cs336_systems.grids import hilbert_order, neighbourhood_block_density, row_major_order

ORDERS = {"rows": row_major_order, "Hilbert's curve": hilbert_order}
BLOCK_SIZE = 128


@problem(title="Tokens along Hilbert's curve", order=21)
class HilbertOrder(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for n in (64, 128):
            for radius in (1, 3, 7, 15):
                shared = {"grid": f"{n} × {n}", "radius": radius}
                densities = {
                    name: 100 * neighbourhood_block_density(n, radius=radius, block_size=BLOCK_SIZE, order=order(n))
                    for name, order in ORDERS.items()
                }
                rows += [
                    shared | {"quantity": "density", "order": name, "density": one} for name, one in densities.items()
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
            title=f"Live tiles of a neighbourhood mask, tiles of {BLOCK_SIZE}",
            x="radius",
            y="density",
            y_title="live tiles (%)",
            color="order",
            facet="grid",
            where={"quantity": "density"},
        )
    }
