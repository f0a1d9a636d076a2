"""Hilbert's curve by its defining properties; `test_mask_kinds.py` holds block densities to dense masks."""

import pytest

from cs336_systems.grids import hilbert_order, neighbourhood_block_density, row_major_order

SIDES = [1, 2, 4, 8, 64]


@pytest.mark.parametrize("n", SIDES)
def test_the_curve_visits_every_token_once(n: int):
    assert hilbert_order(n).sort().values.tolist() == list(range(n * n))


@pytest.mark.parametrize("n", SIDES)
def test_every_step_of_the_curve_goes_to_a_neighbour(n: int):
    """Z-order and Gray-code curves jump; this one never does."""
    order = hilbert_order(n)
    distance = (order // n).diff().abs() + (order % n).diff().abs()
    assert distance.eq(1).all()


@pytest.mark.parametrize("n", SIDES)
def test_every_aligned_run_of_a_power_of_four_is_a_square(n: int):
    order = hilbert_order(n)
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
