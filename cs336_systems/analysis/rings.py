"""Ring collectives, step by step, between simulated ranks, with a count of what each rank sends.

    results, traffic = ring_all_reduce([[1, 2, 3, 4], [10, 20, 30, 40]])     # one buffer a rank
    results == [[11, 22, 33, 44]] * 2; traffic.steps == 2; traffic.sent == [4, 4]

A buffer is a list of elements that can be added. In every step each rank sends one message to its
right neighbour and receives one from its left, all at once, so that a step takes as long as its
longest message. Sizes are in elements. The closed forms below are the handout's, for any number of
ranks; a test holds the simulation to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cs336_systems.analysis.bandwidth import bus_factor

Buffer = list[Any]


@dataclass
class Traffic:
    """Count of the steps and elements that a collective takes."""

    num_ranks: int
    steps: int = 0
    # elements that each rank sent to its right neighbour
    sent: list[int] = field(default_factory=list)
    # elements of the longest message of each step, summed: what the time is made of
    critical: int = 0

    def __post_init__(self) -> None:
        self.sent = self.sent or [0] * self.num_ranks

    def step(self, messages: Sequence[Sequence[Any]]) -> None:
        """Count one step, in which rank i sends `messages[i]`."""
        self.steps += 1
        self.critical += max(len(message) for message in messages)
        for rank, message in enumerate(messages):
            self.sent[rank] += len(message)

    def seconds(self, bytes_per_s: float, bytes_per_element: float = 1) -> float:
        """Return the time in seconds over links of `bytes_per_s`.

        Each step takes as long as its longest message.
        """
        return self.critical * bytes_per_element / bytes_per_s


def chunk_bounds(length: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return start and end of each rank's chunk of a buffer of `length` elements.

    Chunks are as even as can be: the first `length % num_ranks` are one element longer.
    """
    short, longer = divmod(length, num_ranks)
    starts = [rank * short + min(rank, longer) for rank in range(num_ranks + 1)]
    return list(zip(starts[:-1], starts[1:]))


def ring_reduce_scatter(buffers: Sequence[Sequence[Any]]) -> tuple[list[Buffer], Traffic]:
    """Return each rank's result, chunk i of the sum of all buffers for rank i, and the traffic.

    In step t rank i sends its partial sum of chunk i - t and adds what it receives to its own chunk
    i - t - 1.
    """
    num_ranks, length = _check(buffers)
    bounds = chunk_bounds(length, num_ranks)
    # [rank][chunk]
    partial = [[list(buffer[start:end]) for start, end in bounds] for buffer in buffers]
    traffic = Traffic(num_ranks)
    for t in range(1, num_ranks):
        messages = [partial[rank][(rank - t) % num_ranks] for rank in range(num_ranks)]
        traffic.step(messages)
        for rank in range(num_ranks):
            chunk = (rank - t - 1) % num_ranks
            partial[rank][chunk] = _add(partial[rank][chunk], messages[rank - 1])
    return [partial[rank][rank] for rank in range(num_ranks)], traffic


def ring_all_gather(chunks: Sequence[Sequence[Any]]) -> tuple[list[Buffer], Traffic]:
    """Return each rank's result, the chunks of all ranks joined in their order, and the traffic.

    Chunks may differ in length by one.
    """
    num_ranks = len(chunks)
    held: list[dict[int, Buffer]] = [{rank: list(chunk)} for rank, chunk in enumerate(chunks)]
    traffic = Traffic(num_ranks)
    for t in range(1, num_ranks):
        messages = [held[rank][(rank - t + 1) % num_ranks] for rank in range(num_ranks)]
        traffic.step(messages)
        for rank in range(num_ranks):
            held[rank][(rank - t) % num_ranks] = messages[rank - 1]
    return [
        [element for chunk in range(num_ranks) for element in own[chunk]] for own in held
    ], traffic


def ring_all_reduce(buffers: Sequence[Sequence[Any]]) -> tuple[list[Buffer], Traffic]:
    """Return each rank's result, the sum of all buffers, and the traffic.

    A reduce-scatter, then an all-gather of the summed chunks.
    """
    chunks, scattered = ring_reduce_scatter(buffers)
    results, gathered = ring_all_gather(chunks)
    sent = [first + second for first, second in zip(scattered.sent, gathered.sent)]
    steps, critical = scattered.steps + gathered.steps, scattered.critical + gathered.critical
    return results, Traffic(len(buffers), steps=steps, sent=sent, critical=critical)


def alternate_ring_all_reduce(buffers: Sequence[Sequence[Any]]) -> tuple[list[Buffer], Traffic]:
    """Return the results of `ring_all_reduce` by passing whole buffers around, and the traffic.

    Each rank sends N - 1 times a buffer's size instead of 2(N - 1)/N times. In step t rank i sends
    the buffer of rank i - t + 1, which it received in the step before, and adds rank i - t's. Half
    the steps, so the better of the two when latency outweighs size; at N = 2 both send the same.
    """
    num_ranks, _ = _check(buffers)
    sums = [list(buffer) for buffer in buffers]
    passing = [list(buffer) for buffer in buffers]
    traffic = Traffic(num_ranks)
    for _ in range(1, num_ranks):
        traffic.step(passing)
        passing = [passing[rank - 1] for rank in range(num_ranks)]
        sums = [_add(own, received) for own, received in zip(sums, passing)]
    return sums, traffic


# Closed forms: seconds for a full buffer of `size_bytes`, each rank sending `bytes_per_s`


def all_gather_seconds(size_bytes: float, num_ranks: int, bytes_per_s: float) -> float:
    """Return the seconds of an all-gather, or of a reduce-scatter: (N - 1)/N · S/W."""
    return bus_factor("all_gather", num_ranks) * size_bytes / bytes_per_s


def all_reduce_seconds(size_bytes: float, num_ranks: int, bytes_per_s: float) -> float:
    """Return the seconds of an all-reduce: 2 (N - 1)/N · S/W."""
    return bus_factor("all_reduce", num_ranks) * size_bytes / bytes_per_s


def alternate_all_reduce_seconds(size_bytes: float, num_ranks: int, bytes_per_s: float) -> float:
    """Return the seconds of the alternate all-reduce: (N - 1) · S/W.

    That is N/2 times as long as `all_reduce_seconds`.
    """
    return (num_ranks - 1) * size_bytes / bytes_per_s


def _check(buffers: Sequence[Sequence[Any]]) -> tuple[int, int]:
    """Return the number of buffers and their length; ValueError unless all have the same length."""
    lengths = sorted({len(buffer) for buffer in buffers})
    if len(lengths) != 1:
        raise ValueError(f"buffers must be one or more of the same length, got lengths {lengths}")
    return len(buffers), lengths[0]


def _add(left: Sequence[Any], right: Sequence[Any]) -> Buffer:
    """Return the sum of two buffers, element by element."""
    return [one + other for one, other in zip(left, right)]
