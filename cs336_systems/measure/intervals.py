"""Arithmetic of time intervals: when anything ran, and for how long.

    busy = union([(0, 2), (1, 3), (5, 6)])          # [(0, 3), (5, 6)]
    length(busy)                                    # 4

An interval is (start, end) in any one unit; the lists that these functions return are sorted and
disjoint.
"""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return the times that are in any of `intervals`; pieces at most `gap` apart are joined.

    Empty intervals vanish.
    """
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end == start:
            continue
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def simplify(intervals: Iterable[Interval], most: int) -> list[Interval]:
    """Return at most `most` intervals that look the same in a figure.

    The narrowest gaps are closed first.
    """
    kept = union(intervals)
    if len(kept) <= most:
        return kept
    gaps = sorted(later[0] - earlier[1] for earlier, later in zip(kept, kept[1:]))
    return union(kept, gap=gaps[len(kept) - most - 1])
