"""Training of a small byte-level model with simulated ranks, whose gradients are reduced as told.

    exact = train(lambda gradients: gradients.sum(0), num_ranks=64, steps=100)
    ring = train(lambda gradients: ring_sum(gradients.bfloat16()), num_ranks=64, steps=100)

The model predicts the next byte of Alice's Adventures in Wonderland from the four before it. All
but the reduction is in float64, so that two runs differ by nothing else. It also makes a run's
digits the same on other machines, whose matmuls add in another order: an error of 10⁻¹⁶ seldom
changes what a sum rounds to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from cs336_systems.training.corpus import Corpus
from cs336_systems.training.hyperparameters import NUM_BYTES

# from the gradients of all ranks, a line a rank in float64, to their sum in any dtype
Reduce = Callable[[Float[Tensor, "ranks n"]], Float[Tensor, " n"]]

WINDOW = 4  # bytes that a prediction sees
D_BYTE, D_HIDDEN = 8, 16
SHAPES = ((NUM_BYTES, D_BYTE), (WINDOW * D_BYTE, D_HIDDEN), (D_HIDDEN, NUM_BYTES))
BATCH = 128  # predictions a step, over all ranks
LEARNING_RATE, FINAL_SHARE, WARMUP_STEPS = 1e-2, 0.1, 10
LOOK_EVERY = 10  # steps from one look at the agreement to the next


@dataclass(kw_only=True)
class ReducedRun:
    """Losses, weights and gradients of a run."""

    losses: list[float] = field(default_factory=list)  # of each step, nats a byte
    weights: Float[Tensor, " n"]  # when all steps are done
    # of every tenth step, how much the ranks agree: the norm of the mean gradient over that of a rank's
    # deviation from it, both estimated without bias
    agreement: list[float] = field(default_factory=list)


def train(reduce: Reduce, *, num_ranks: int, steps: int, data_seed: int = 0) -> ReducedRun:
    """Return the run of `steps` AdamW steps in which `reduce` sums the ranks' gradients.

    Runs start from the same weights; `data_seed` draws the batches. Raises ValueError unless
    `num_ranks`, of at least 2, divides BATCH.
    """
    if num_ranks < 2 or BATCH % num_ranks:
        raise ValueError(f"num_ranks must be 2 or more and divide {BATCH}, got {num_ranks}")
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    scales = (1.0, SHAPES[1][0] ** -0.5, SHAPES[2][0] ** -0.5)
    weights = torch.cat([scale * one.flatten() for scale, one in zip(scales, matrices)])
    run = ReducedRun(weights=weights)
    optimizer = torch.optim.AdamW([weights], lr=LEARNING_RATE, betas=(0.9, 0.95))

    text = Corpus.load().training.long()
    generator.manual_seed(1 + data_seed)
    for step in range(steps):
        starts = torch.randint(
            len(text) - WINDOW, (num_ranks, BATCH // num_ranks, 1), generator=generator
        )
        windows = text[starts + torch.arange(WINDOW + 1)]
        loss, gradients = rank_gradients(weights, windows)
        weights.grad = reduce(gradients).double() / num_ranks
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        optimizer.param_groups[0]["lr"] = (
            LEARNING_RATE * warmup * (1 - (1 - FINAL_SHARE) * step / steps)
        )
        optimizer.step()
        run.losses.append(loss)
        if step % LOOK_EVERY == 0:
            run.agreement.append(agreement(gradients))
    return run


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute with one thread: tensors are small, and threads would wait for others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rank_gradients(
    weights: Float[Tensor, " n"], windows: Int[Tensor, "ranks batch window"]
) -> tuple[float, Float[Tensor, "ranks n"]]:
    """Return the mean loss over all ranks, and each rank's gradient of its own mean loss."""
    num_ranks, batch, _ = windows.shape
    # a copy of the weights for each rank, so that one backward gives all gradients apart
    copies = weights.expand(num_ranks, -1).clone().requires_grad_()
    sizes = [math.prod(shape) for shape in SHAPES]
    table, hidden, output = (
        part.view(num_ranks, *shape) for part, shape in zip(copies.split(sizes, 1), SHAPES)
    )
    seen, following = windows[..., :WINDOW].flatten(1), windows[..., WINDOW]
    rows = table.gather(1, seen[..., None].expand(-1, -1, D_BYTE))
    logits = torch.tanh(rows.view(num_ranks, batch, -1) @ hidden) @ output
    losses = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
    losses.view(num_ranks, batch).mean(1).sum().backward()
    assert copies.grad is not None
    return float(losses.detach().mean()), copies.grad


def agreement(gradients: Float[Tensor, "ranks n"]) -> float:
    """Return the norm of the expected gradient over that of a rank's deviation from it.

    The mean over N ranks holds 1/N of the variance of one; that is taken off. 0 if the variance is
    more than all of it, infinite if the ranks do not differ.
    """
    mean = gradients.mean(0)
    variance = float((gradients - mean).square().sum()) / (len(gradients) - 1)
    if not variance:
        return math.inf
    return math.sqrt(max(0.0, float(mean.square().sum()) / variance - 1 / len(gradients)))
