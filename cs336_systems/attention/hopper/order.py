"""How many heads' tiles the programs of a causal call take at a time, on plain numbers.

No GPU and no Triton are needed. Programs take tiles in a fixed order: some heads at a time and,
among these, the longest walks first. Few heads at a time keep what their programs stream in
the L2 cache. But the longest walks of the last heads then start late, and most multiprocessors wait
while these end. With 8 key heads of 64 causal tiles each, one at a time, a call on 132
multiprocessors takes 1.23 times as long as if its steps were spread evenly; two at a time, 1.01.
"""

from __future__ import annotations

import math
from functools import lru_cache
from heapq import heapreplace
from typing import NamedTuple

from cs336_systems.attention.hopper.division import MULTIPROCESSORS, START_STEPS

# How much longer a call takes for each doubling of the heads at a time beyond those that fit in the
# L2 cache. Fitted to 13 backwards on an H200, triton 3.6.0, 2026-11-29: the order that it leads to
# is within 2 % of the fastest measured one.
COST_OF_DOUBLING = 0.02
# In rounds of programs: calls of more keep nearly all multiprocessors busy in any order; of the
# others the end is judged, since the rounds before it are full.
MOST_ROUNDS, JUDGED_ROUNDS = 24, 8


class Walks(NamedTuple):
    """The causal walks of one head's tiles, in blocks of queries or keys as long as a tile.

    Of packed documents the host knows the longest and how many tiles there are in all. The others
    are assumed to be equally long, and the longest to come last.
    """

    tiles: int  # of the head, or of its longest document
    longest: int  # blocks of the longest walk; each further one has a block less
    documents: int = 1
    all_tiles: int = 0  # of all documents

    @property
    def other_tiles(self) -> int:
        """Tiles of each document but the longest, at least 1."""
        return max(1, (self.all_tiles - self.tiles) // max(1, self.documents - 1))

    @property
    def number(self) -> int:
        """Number of walks."""
        return self.tiles + max(0, self.documents - 1) * self.other_tiles

    def blocks(self) -> list[int]:
        """Return the blocks of each walk, in the order in which programs take them."""
        other = range(self.other_tiles, 0, -1)
        return [*other] * (self.documents - 1) + [self.longest - tile for tile in range(self.tiles)]


@lru_cache(maxsize=4096)
def heads_at_a_time(
    walks: Walks,
    *,
    heads: int,
    fitting: int,
    block_steps: float,
    group: int = 1,
    start_steps: float = START_STEPS,
    places: int = MULTIPROCESSORS,
) -> int:
    """Return the number of key heads at a time with which a call is estimated to end soonest.

    `heads` key heads have the same walks, of `block_steps` steps a block and `start_steps` beside
    them, `group` times each. `fitting` of them fit in the L2 cache. `places` programs run at a
    time.
    """
    fitting = max(1, min(fitting, heads))
    if walks.number * group * heads > MOST_ROUNDS * places:
        return fitting
    steps_of_walks = [
        blocks * block_steps + start_steps for blocks in walks.blocks() for _ in range(group)
    ]

    def estimated_time(together: int) -> float:
        """Return the time over that of steps which are spread evenly, with the cache's misses."""
        widths = [min(together, heads - first) for first in range(0, heads, together)]
        judged = -(-JUDGED_ROUNDS * places // (together * len(steps_of_walks)))
        ends = [0.0] * places  # when each place is free
        for width in widths[-judged:]:
            for steps in steps_of_walks:
                for _ in range(width):
                    heapreplace(ends, ends[0] + steps)
        waiting = max(ends) - sum(ends) / places
        even = heads * sum(steps_of_walks) / places
        doublings = max(0.0, math.log2(together / fitting))
        return (1 + waiting / even) * (1 + COST_OF_DOUBLING * doublings)

    power = 2 ** int(math.log2(fitting))
    candidates = [fitting, *(power * factor for factor in (1, 2, 4, 8)), heads]
    possible = [together for together in candidates if together <= heads]
    # rounded, so that the first of equal ones is taken, whatever the last bit
    return min(possible, key=lambda together: round(estimated_time(together), 4))
