"""Checks of section 5: data parallelism behind `get_ddp` and `get_ddp_bucketed`.

In 2025 `get_ddp` was called `get_ddp_individual_parameters`. The checks run two ranks on gloo and
the CPU. Each rank trains on its half of a batch and must end where one process ends with the whole
batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from cs336_systems.grading.counting import AWAITED, SENT
from cs336_systems.grading.reference_training import (
    STEPS,
    Stack,
    Toy,
    assert_like_one_process,
    equal_on_all_ranks,
    part,
    regression_batch,
    seeded,
    squared_error,
)
from cs336_systems.grading.registry import Adapters, NotImplementedYet, check

OVERLAP, BUCKETED = "ddp_overlap_individual_parameters", "ddp_overlap_bucketed"
BOUND = 1e-6  # largest error of a parameter after training in float32
FLAGS = 1000  # bytes: a smaller message carries no gradient of `Stack`


class Wrapped:
    """A wrapped model together with the adapters that its training step must call.

    `bucket_size_mb` is passed on to `get_ddp_bucketed`; "individual" stands for the wrapper without
    buckets.
    """

    def __init__(
        self, adapters: Adapters, module: nn.Module, bucket_size_mb: float | None | str
    ) -> None:
        self._adapters = adapters
        self._is_bucketed = bucket_size_mb != "individual"
        if self._is_bucketed:
            self.model = adapters.call("get_ddp_bucketed", module, bucket_size_mb=bucket_size_mb)
            self._after = "ddp_bucketed_on_after_backward"
            return
        # The editions have two names for this adapter. If both are missing, the error names the
        # one that the file defines.
        try:
            self.model = adapters.call("get_ddp", module)
            self._after = "ddp_on_after_backward"
        except NotImplementedYet as missing:
            try:
                self.model = adapters.call("get_ddp_individual_parameters", module)
            except NotImplementedYet as other:
                has_get_ddp = hasattr(adapters.module, "get_ddp")
                has_other = hasattr(adapters.module, "get_ddp_individual_parameters")
                raise (other if has_other and not has_get_ddp else missing) from None
            self._after = "ddp_individual_parameters_on_after_backward"

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wrap one training step with SGD: the `with` block runs the forward and the backward.

        The optional adapter before the batch, the adapter after the backward and the optimizer's
        step are called around it.
        """
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        optimizer.zero_grad(set_to_none=True)
        if self._is_bucketed:
            with suppress(NotImplementedYet):
                self._adapters.call(
                    "ddp_bucketed_on_train_batch_start", ddp_model=self.model, optimizer=optimizer
                )
        yield
        with suppress(NotImplementedYet):
            self._adapters.call(self._after, self.model, optimizer)
        optimizer.step()


def check_both(function: Callable[..., None]) -> None:
    """Register a check of both DDP wrappers; the bucket size is the function's last argument."""

    def overlapped(adapters: Adapters, rank: int, num_ranks: int) -> None:
        function(adapters, rank, num_ranks, "individual")

    def bucketed(adapters: Adapters, rank: int, num_ranks: int) -> None:
        for bucket_size_mb in (0.0001, 0.002, 1.0):  # a bucket per tensor, several, a single one
            function(adapters, rank, num_ranks, bucket_size_mb)

    for problem, one in ((OVERLAP, overlapped), (BUCKETED, bucketed)):
        one.__doc__ = function.__doc__
        check(problem, function.__name__, num_ranks=2)(one)


@check_both
def broadcasts_the_parameters(adapters: Adapters, rank: int, num_ranks: int, size: Any) -> None:
    """After wrapping every rank has rank 0's parameters, frozen ones too, in the model's names and
    order.
    """
    module: Any = seeded(Toy, seed=rank)
    with torch.no_grad():
        module.fixed.fill_(2.0 + rank)
    names, state = [name for name, _ in module.named_parameters()], list(module.state_dict())
    model = Wrapped(adapters, module, size).model

    assert model.module is module, "the wrapper's `module` is not the model"
    ours = [name for name, _ in model.named_parameters()]
    assert len(ours) == len(names), (
        f"the wrapper has {len(ours)} parameters, the model {len(names)}"
    )
    for wrapped, name in zip(ours, names):
        assert name in wrapped, f"{wrapped} stands in the place of {name}"
    assert list(module.state_dict()) == state, "the names of `.module.state_dict()` have changed"

    first = dict(seeded(Toy, seed=0).named_parameters())
    wrong = [
        name for name, tensor in module.named_parameters() if not torch.equal(tensor, first[name])
    ]
    assert not wrong, f"not rank 0's after wrapping: {', '.join(wrong)}"


@check_both
def equals_one_process(adapters: Adapters, rank: int, num_ranks: int, size: Any) -> None:
    """Training on halves of a batch ends where one process ends with the whole batch, on every
    rank.
    """
    train_like_one_process(adapters, rank, num_ranks, size)


def train_like_one_process(adapters: Adapters, rank: int, num_ranks: int, size: Any) -> None:
    """Assert that a few wrapped steps give the parameters of one process, on every rank."""
    single, wrapped = seeded(Toy), Wrapped(adapters, seeded(Toy, seed=rank), size)
    start = deepcopy(dict(single.named_parameters()))
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(STEPS):
        batch = regression_batch(step)
        optimizer.zero_grad()
        squared_error(single, batch).backward()
        optimizer.step()
        with wrapped.step():
            squared_error(wrapped.model, part(batch, rank, num_ranks)).backward()
        expected = dict(single.named_parameters())
        found = dict(wrapped.model.module.named_parameters())
        assert_like_one_process(found, expected, start, step, num_ranks, BOUND)
    for name, parameter in wrapped.model.module.named_parameters():
        assert equal_on_all_ranks(parameter.detach()), (
            f"{name} differs between the ranks after training"
        )


def gradients_sent() -> list[int]:
    """Return the sizes in bytes of the messages so far that may carry gradients."""
    gradients = [message for message in SENT if message.kind != "broadcast"]
    return [message.nbytes for message in gradients if message.nbytes >= FLAGS]


def messages_of_a_step(wrapped: Wrapped, rank: int) -> tuple[list[int], int, bool]:
    """Run two steps and return what the second one sent, and when.

    The result is the sizes in bytes of its messages, how many of them had been sent when the last
    gradient was computed, and whether every message had been awaited by then.
    """
    gone, blocks = 0, False
    for step in range(2):  # a wrapper may learn the order of gradients in the first step
        x, y = regression_batch(10 * step + rank, 100, 100)
        # The gradient of the input is computed with that of the first layer, which is the last.
        x.requires_grad_()

        def note(gradient: torch.Tensor) -> None:
            nonlocal gone, blocks
            gone = len(gradients_sent())
            blocks = len(AWAITED) >= len(SENT)

        x.register_hook(note)
        with wrapped.step():
            SENT.clear()
            AWAITED.clear()
            squared_error(wrapped.model, (x, y)).backward()
        sent = gradients_sent()
    return sent, gone, blocks


def assert_overlap(wrapped: Wrapped, rank: int, what: str) -> None:
    """Assert that a step sends gradients during its backward, and without waiting for each."""
    sent, gone, blocks = messages_of_a_step(wrapped, rank)
    assert sent, "no gradient is sent"
    assert gone, f"none of {len(sent)} {what} is sent before the backward has ended"
    assert not blocks, (
        f"the backward waits for each of the {what}: pass async_op=True, wait when it has ended"
    )


@check(OVERLAP, num_ranks=2)
def overlaps_the_backward(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Gradients are sent while the backward still runs, which does not wait for them."""
    assert_overlap(Wrapped(adapters, seeded(Stack), "individual"), rank, "messages")


@check(BUCKETED, num_ranks=2)
def overlaps_the_backward_bucket_by_bucket(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """A bucket is sent when its gradients are there, while the backward still runs, which does not
    wait for it.
    """
    assert_overlap(Wrapped(adapters, seeded(Stack), 0.1), rank, "buckets")


@check(BUCKETED, num_ranks=2)
def sends_fewer_messages_than_gradients(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Gradients that fit into one bucket are one message; the payload is still all of them."""
    for size, most in ((1.0, 2), (0.1, 6)):
        sent, *_ = messages_of_a_step(Wrapped(adapters, seeded(Stack), size), rank)
        what = f"8 gradients of 0.04 MB with bucket_size_mb={size}"
        assert len(sent) <= most, (
            f"{what} are {len(sent)} messages a step, at most {most} are needed"
        )
        assert sum(sent) >= 8 * 40_000, f"{what} are {sum(sent)} bytes, less than all of them"


@check(BUCKETED, num_ranks=2)
def keeps_to_the_bucket_size(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """No message is larger than `bucket_size_mb`, one large gradient excepted."""
    for size, largest in ((0.1, 104_858), (0.0001, 40_000)):
        sent, *_ = messages_of_a_step(Wrapped(adapters, seeded(Stack), size), rank)
        what = f"with bucket_size_mb={size} and gradients of 40,000 bytes"
        assert sent, f"{what} no message is sent in step 2"
        assert max(sent) <= largest, f"{what} a message of {max(sent)} bytes is sent"


@check(BUCKETED, num_ranks=2, beyond=True)
def takes_no_bucket_size(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """`bucket_size_mb=None`, of which only the adapter's docstring speaks: training as one
    process.
    """
    train_like_one_process(adapters, rank, num_ranks, None)
