"""Which walks of the Hopper backward are divided among programs, and how finely, on plain numbers.

No GPU and no Triton are needed. (The forward's walks are divided by `schedule.plan_forward`.)

A program has a multiprocessor to itself, and a walk is one program's. So a call of few tiles of
keys leaves multiprocessors idle, a causal one also while its longest walk ends. Without a mask,
where walks are equally long, the last round of programs takes as long as any, even if it has four
programs. Parts of walks end sooner. But each program takes time to start, and the sums of parts go
through memory to a kernel that joins them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

MULTIPROCESSORS = 132  # of an H100; assumed where kernels are compiled without a GPU
# The most rounds of programs that have parts, as each program's sums take up to 128 KiB. Causal
# calls of more rounds need no parts: their longest walks, which start first, end with the others.
MAX_ROUNDS = 4
# In steps: what a program takes beside its steps; what the kernel that joins takes, and a part's
# sums to memory and back, both at 64 columns. Fitted to 18 calls without a mask of 1 to 64 heads on
# an H100, triton 3.6.0, 2026-11-26. Of the measured calls that these numbers divide, causal ones
# too, none was slower than with whole walks.
START_STEPS, JOIN_STEPS, PART_STEPS = 4, 1, 1 / 40
LEAST_GAIN = 2  # steps, since one or two more launches take the host 5 µs each


def parts_before(length, share):
    """Return how many parts, of at most `share` blocks, walks of 1, 2, ... length - 1 blocks have.

    Kernels compute it too.
    """
    parts = (length + share - 1) // share
    return share * (parts * (parts - 1) // 2) + (length - 1 - (parts - 1) * share) * parts


class Division(NamedTuple):
    """How the walks of all heads are divided among programs."""

    whole: int  # tiles of keys, the first ones, whose walks are not divided
    # parts of each other tile's walks; if causal, the most blocks of queries that a part has
    share: int
    programs: int  # programs that have parts; 0 where no walk is divided


@lru_cache(maxsize=4096)
def divide_walks(
    *,
    key_tiles: int,
    batch_heads: int,
    steps: int,
    group: int,
    head_tile: int,
    is_causal: bool,
    num_multiprocessors: int,
) -> Division:
    """Return the division of walks that is estimated to end soonest.

    A tile of keys has `group` walks, and `batch_heads` key heads have `key_tiles` tiles each.
    Without a mask every walk has `steps`; causal walks have 1, 2, ... `key_tiles` blocks of
    queries, and the longest `steps`. `num_multiprocessors` is 0 where there is no GPU.
    """
    places = num_multiprocessors or MULTIPROCESSORS
    if is_causal:
        divisions = _causal_divisions(key_tiles, batch_heads, group * steps // key_tiles, places)
    else:
        divisions = _full_divisions(key_tiles * batch_heads, steps, group, places)

    def time_of(estimate: tuple[Division, float]) -> float:
        """Return a division's estimated time with that of joining its parts, in steps."""
        division, time = estimate
        return time + (JOIN_STEPS + division.programs * PART_STEPS) * head_tile / 64 * (
            division.programs > 0
        )

    undivided = next(divisions)  # both iterators yield it first
    fastest = min(divisions, key=time_of, default=undivided)
    return (fastest if time_of(fastest) + LEAST_GAIN < time_of(undivided) else undivided)[0]


def _full_divisions(
    tiles: int, steps: int, group: int, places: int
) -> Iterator[tuple[Division, float]]:
    """Yield (division, steps of the last round) for calls without a mask, undivided first.

    The tiles of the last round are divided into 2, 3, ... parts.
    """
    last = tiles % places
    yield Division(tiles, 1, 0), group * steps + START_STEPS
    if last:
        for parts in range(2, min(steps, MAX_ROUNDS * places // last) + 1):
            rounds = -(-last * parts // places)
            yield (
                Division(tiles - last, parts, last * parts),
                rounds * (group * -(-steps // parts) + START_STEPS),
            )


def _causal_divisions(
    key_tiles: int, batch_heads: int, block: int, places: int
) -> Iterator[tuple[Division, float]]:
    """Yield (division, steps of the call) for causal calls, undivided first.

    All tiles are divided, into parts of at most 1, 2, ... blocks of `block` steps.
    """
    tiles = key_tiles * batch_heads
    work = tiles * block * (key_tiles + 1) / 2
    yield (
        Division(tiles, 1, 0),
        max(block * key_tiles + START_STEPS, (work + tiles * START_STEPS) / places),
    )
    for size in range(1, key_tiles) if tiles <= MAX_ROUNDS * places else ():
        programs = batch_heads * parts_before(key_tiles + 1, size)
        longest, busy = block * size, (work + programs * START_STEPS) / places
        if programs <= MAX_ROUNDS * places:
            yield (
                Division(0, size, programs),
                longest + START_STEPS if programs <= places else busy + longest / 2,
            )
