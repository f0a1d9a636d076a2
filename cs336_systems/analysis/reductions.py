"""Sums over ranks in the order and dtype of a collective, element by element, in one process.

    gradients = torch.randn(8, 4096).bfloat16()     # a line a rank
    total = ring_sum(gradients)                     # bit for bit gloo's all-reduce of 8 ranks

Every addition rounds to the dtype of what is added, as on real ranks, whose messages are partial
sums. The sums differ in the number of roundings that an element goes through, and in the size of
the partial sums that are rounded:

- `ring_sum`: N - 1 roundings one after the other, of partial sums of 2, 3, ..., N ranks;
- `halving_sum`: log2 N roundings, of partial sums of 2, 4, 8, ..., N ranks;
- `message_sum`: one rounding of each rank's gradient, none of a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.analysis.rings import chunk_bounds

Gradients = Float[Tensor, "ranks n"]
# a function of two addends that returns their rounded sum
Add = Callable[[Tensor, Tensor], Tensor]

DROPPED_BITS = 16  # of float32, which bfloat16 does not have


def ring_sum(gradients: Gradients, add: Add = torch.add) -> Float[Tensor, " n"]:
    """Return the sum over ranks in the order of a ring, in the dtype of `gradients`.

    Chunk c, of as many as ranks, starts as the gradient of rank c - 1 and travels down: rank c - 2
    adds its own, and so on to rank c. That is gloo's all-reduce and reduce-scatter, bit for bit, of
    a length that is a multiple of 2 N; chunks of other lengths end a few elements elsewhere there.
    The rings of `analysis.rings` travel up; they add the same with ranks and chunks counted the
    other way round. Raises ValueError as `check` does.
    """
    num_ranks, length = check(gradients)
    # Line h of `hops` is what hop h adds: of chunk c the gradient of rank c - 1 - h.
    hops = torch.cat(
        [
            gradients[:, start:end].flip(0).roll(chunk, 0)
            for chunk, (start, end) in enumerate(chunk_bounds(length, num_ranks))
        ],
        dim=1,
    )
    total = hops[0]
    for own in hops[1:]:
        total = add(own, total)
    return total


def halving_sum(gradients: Gradients, add: Add = torch.add) -> Float[Tensor, " n"]:
    """Return the sum over ranks by recursive halving, a balanced tree, in `gradients`' dtype.

    In each step rank i of the first half adds what rank i of the second half has. Raises ValueError
    as `check` does, and if the number of ranks is no power of two.
    """
    num_ranks, _ = check(gradients)
    if num_ranks & (num_ranks - 1):
        raise ValueError(f"gradients must be of a power of two of ranks, got {num_ranks}")
    totals = gradients
    while len(totals) > 1:
        half = len(totals) // 2
        totals = add(totals[:half], totals[half:])
    return totals[0]


def message_sum(
    gradients: Gradients, message_dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, " n"]:
    """Return the float32 sum over ranks of the gradients, each rounded to `message_dtype` once.

    It is a reduce-scatter by all-to-all: every rank receives its chunk of all gradients and adds
    them itself. Rounded again, the result can be sent back in `message_dtype`. Raises ValueError as
    `check` does.
    """
    check(gradients)
    return ring_sum(gradients.to(message_dtype).to(torch.float32))


def stochastic_add(generator: torch.Generator) -> Add:
    """Return a function that adds two bfloat16 tensors and rounds their sum stochastically."""
    return lambda left, right: stochastic_round(left.float() + right.float(), generator)


def stochastic_round(
    values: Float[Tensor, "*shape"], generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """Return float32 `values` rounded to bfloat16, up or down, with the expectation of each value.

    A value between two neighbours of bfloat16 goes to the upper one with the probability of its
    distance from the lower one. A finite value beyond the largest of bfloat16 may become infinite;
    values that are not finite stay. Raises TypeError for another dtype.
    """
    if values.dtype != torch.float32:
        raise TypeError(f"values must be float32, got {values.dtype}")
    bits = values.contiguous().view(torch.int32)
    # A carry out of the dropped bits moves the rest to the next bfloat16, away from zero.
    noise = torch.randint(
        1 << DROPPED_BITS, bits.shape, generator=generator, dtype=torch.int32, device=bits.device
    )
    rounded = (bits + noise) & -(1 << DROPPED_BITS)
    kept = torch.where(values.isfinite(), rounded.view(torch.float32), values)
    return kept.to(torch.bfloat16)


def check(gradients: Gradients) -> tuple[int, int]:
    """Return the numbers of ranks and of elements of `gradients`, a line a rank.

    Raises ValueError unless it is a matrix with a line at least, and TypeError unless its dtype is
    floating point.
    """
    if gradients.ndim != 2 or not len(gradients):
        raise ValueError(
            f"gradients must have shape (ranks, n) with ranks >= 1, got {tuple(gradients.shape)}"
        )
    if not gradients.is_floating_point():
        raise TypeError(f"gradients must be floating point, got {gradients.dtype}")
    return gradients.shape[0], gradients.shape[1]
