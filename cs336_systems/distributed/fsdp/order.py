"""The order in which units run, learnt from the previous pass, so that the next ones can be gathered ahead.

A wrong guess costs a gather that nobody uses, never a wrong result: what a unit needs is gathered when it starts, if
nobody did before. All ranks see the same order, hence issue the same collectives.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ExecutionOrder(Generic[T]):
    """Units in the order of the pass before (`expected`) and of this one (`seen`)."""

    def __init__(self) -> None:
        self.expected: list[T] = []
        self.seen: list[T] = []

    def begin(self, expected: list[T] | None = None) -> None:
        """Start a pass; without `expected` it is taken to go like the one before."""
        if expected is not None:
            self.expected = expected
        elif self.seen:
            self.expected = self.seen
        self.seen = []

    def visit(self, unit: T) -> int:
        """Note that `unit` runs now; its position in this pass. A surprise ends all guesses of this pass."""
        position = len(self.seen)
        self.seen.append(unit)
        if position < len(self.expected) and self.expected[position] != unit:
            self.expected = []
        return position

    def first(self, count: int) -> list[T]:
        """The units that the pass is expected to begin with."""
        return self.expected[:count]

    def ahead(self, position: int, distance: int) -> T | None:
        """The unit expected `distance` after `position`, unless it has run already or is not known."""
        target = position + distance
        return self.expected[target] if len(self.seen) <= target < len(self.expected) else None

    def ends_within(self, position: int, count: int) -> bool:
        """Whether `position` is among the last `count` that are expected."""
        return len(self.expected) - count <= position < len(self.expected)
