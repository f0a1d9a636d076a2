"""Hilbert's curve by its defining properties; `test_masks.py` holds block densities to dense masks."""

import pytest

from cs336_systems.grids import hilbert_order, neighbourhood_block_density, row_major_order


@pytest.mark.parametrize("n", [1, 2, 4, 8, 64])
def test_the_curve_visits_every_token_goes_to_neighbours_and_fills_squares(n: int):
    """Z-order and Gray-code curves jump; this one never does, and each aligned run of 4ᵏ tokens is
    a square.
    """
    order = hilbert_order(n)
    assert order.sort().values.tolist() == list(range(n * n))
    distance = (order // n).diff().abs() + (order % n).diff().abs()
    assert distance.eq(1).all()
    side = 1
    while side <= n:
        for run in order.split(side * side):
            rows, columns = run // n, run % n
            assert (rows.max() - rows.min() + 1, columns.max() - columns.min() + 1) == (side, side)
        side *= 2


@pytest.mark.parametrize(("radius", "curve_is_denser"), [(1, True), (15, False)])
def test_the_curve_pays_for_wide_neighbourhoods_only(radius: int, curve_is_denser: bool):
    rows, curve = (
        neighbourhood_block_density(64, radius=radius, block_size=64, order=order)
        for order in (row_major_order(64), hilbert_order(64))
    )
    assert (curve > rows) is curve_is_denser
