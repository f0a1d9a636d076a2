"""The number of heads whose tiles programs take at a time, against a simulation of whole calls."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from cs336_systems.attention import flash_attention
from cs336_systems.attention.hopper.division import MULTIPROCESSORS, START_STEPS
from cs336_systems.attention.tiles import choice
from cs336_systems.attention.tiles.choice import COST_OF_DOUBLING, Walks
from cs336_systems.attention.triton import launch

heads_at_a_time = partial(choice.heads_at_a_time, start_steps=START_STEPS, places=MULTIPROCESSORS)


def simulated(steps: list[int], heads: int, together: int) -> float:
    """Time of a call over that of its steps spread evenly: each program starts where one ends."""
    items = [
        one
        for first in range(0, heads, together)
        for one in steps
        for _ in range(min(together, heads - first))
    ]
    free = [0] * MULTIPROCESSORS
    for one in items:
        place = free.index(min(free))
        free[place] += one + START_STEPS
    return max(free) / (sum(one + START_STEPS for one in items) / MULTIPROCESSORS)


# (causal tiles, key heads, heads that fit, steps a block), and the order that was the fastest
# measured one on an H200, or within 2 % of it
MEASURED = {
    "32 over 8 heads, 8,192 tokens": (64, 8, 1, 8, 2),
    "4 x 32 over 4 heads, 4,096 tokens": (32, 16, 2, 8, 4),
    "2 x 16 heads, 6,000 tokens": (47, 32, 5, 2, 4),
    "8 x 16 heads, 2,048 tokens": (16, 128, 16, 2, 16),
    "4 x 32 over 8 heads, 4,096 tokens": (32, 32, 2, 8, 4),
    "8 x 32 over 8 heads, 2,048 tokens": (16, 64, 4, 8, 8),
    "32 over 8 heads, 16,384 tokens": (128, 8, 1, 8, 1),
    "2 x 16 heads, 8,192 tokens": (64, 32, 4, 2, 4),
    "16 heads, 16,384 tokens, 64 columns": (128, 16, 4, 1, 4),
}


@pytest.mark.parametrize("call", MEASURED)
def test_the_order_is_the_one_that_was_measured_to_be_fastest(call: str) -> None:
    tiles, heads, fitting, block_steps, fastest = MEASURED[call]
    chosen = heads_at_a_time(
        Walks(tiles, tiles), heads=heads, fitting=fitting, block_steps=block_steps
    )
    assert chosen == fastest


@pytest.mark.parametrize("call", MEASURED)
def test_no_order_ends_much_sooner(call: str) -> None:
    """By a simulation of all of the call, of which the module judges the end."""
    tiles, heads, fitting, block_steps, _ = MEASURED[call]
    walks = Walks(tiles, tiles)
    steps = [blocks * block_steps for blocks in walks.blocks()]

    def time_of(together: int) -> float:
        cost = COST_OF_DOUBLING * max(0.0, math.log2(together / fitting))
        return simulated(steps, heads, together) * (1 + cost)

    chosen = heads_at_a_time(walks, heads=heads, fitting=fitting, block_steps=block_steps)
    assert time_of(chosen) <= 1.02 * min(time_of(2**n) for n in range(heads.bit_length()))


def test_heads_one_at_a_time_leave_multiprocessors_waiting() -> None:
    """The example of the module."""
    steps = [8 * blocks for blocks in Walks(64, 64).blocks()]
    assert simulated(steps, 8, 1) == pytest.approx(1.23, abs=0.01)
    assert simulated(steps, 8, 2) == pytest.approx(1.01, abs=0.01)


def test_long_calls_keep_the_heads_that_fit() -> None:
    for fitting in (1, 3, 64):
        chosen = heads_at_a_time(Walks(256, 256), heads=32, fitting=fitting, block_steps=2)
        assert chosen == min(fitting, 32)


def test_walks_of_documents() -> None:
    """The longest document comes last; of the others the host knows the tiles of all alone."""
    assert Walks(3, 3, 3, 7).blocks() == [2, 1, 2, 1, 3, 2, 1]
    assert Walks(2, 4).blocks() == [4, 3]
    # more documents than tiles: none is empty
    assert Walks(1, 1, 4, 2).blocks() == [1, 1, 1, 1]
    for walks in (Walks(3, 3, 3, 7), Walks(2, 4), Walks(1, 1, 4, 2), Walks(5, 5, 0, 5)):
        assert walks.number == len(walks.blocks())


def test_more_keys_than_queries_leave_walks_empty() -> None:
    """Walks past the diagonal had less than no blocks, and a call of 64 queries on 448 keys had no
    steps at all: ZeroDivisionError.
    """
    assert Walks(3, 1).blocks() == [1, 0, 0]
    for tiles in range(1, 20):
        for longest in range(1, 20):
            walks = Walks(tiles, longest)
            assert 1 <= heads_at_a_time(walks, heads=4, fitting=1, block_steps=1) <= 4


def test_causal_keys_behind_the_queries_are_counted_as_no_walks(monkeypatch) -> None:
    """64 queries on 448 keys divided by their zero steps, where a GPU counts multiprocessors."""
    monkeypatch.setattr(launch, "num_multiprocessors", lambda _: MULTIPROCESSORS)
    q, k = torch.randn(1, 2, 64, 16, requires_grad=True), torch.randn(1, 2, 448, 16)
    results = [
        flash_attention(q, k, k, is_causal=True, backend=backend)
        for backend in ("triton", "reference")
    ]
    grad, expected = (torch.autograd.grad(x.square().sum(), q)[0] for x in results)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [1, 4])
def test_packed_documents_of_few_heads_are_taken_together(group: int) -> None:
    """35 documents, the longest of 24 tiles: the last one's walks would start late."""
    walks = Walks(24, 24, 35, 128)
    chosen = heads_at_a_time(walks, heads=8, fitting=10 // group, block_steps=2 * group)
    assert chosen == 8


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("group", [1, 3])
def test_the_choice_is_a_number_of_heads(heads: int, group: int) -> None:
    for tiles in (1, 2, 5, 33):
        for fitting in (0, 1, 5, 100):
            chosen = heads_at_a_time(
                Walks(tiles, tiles), heads=heads, fitting=fitting, block_steps=1.5, group=group
            )
            assert 1 <= chosen <= heads
