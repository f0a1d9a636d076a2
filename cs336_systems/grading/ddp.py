"""Section 5: data parallelism behind `get_ddp` (2025: `get_ddp_individual_parameters`) and `get_ddp_bucketed`.

Two ranks on gloo and CPU. Each trains on its half of a batch and must end where one process ends with the whole of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from cs336_systems.grading.checks import Adapters, NotImplementedYet, check
from cs336_systems.grading.counting import AWAITED, SENT
from cs336_systems.grading.models import (
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

OVERLAP, BUCKETED = "ddp_overlap_individual_parameters", "ddp_overlap_bucketed"
BOUND = 1e-6  # of a parameter after training, in float32
FLAGS = 1000  # bytes below which a message carries no gradient of `Stack`


class Wrapped:
    """A wrapped model with the adapters that go with it."""

    def __init__(self, adapters: Adapters, module: nn.Module, bucket_size_mb: float | None | str) -> None:
        self._adapters = adapters
        self._is_bucketed = bucket_size_mb != "individual"
        if self._is_bucketed:
            self.model = adapters.call("get_ddp_bucketed", module, bucket_size_mb=bucket_size_mb)
            self._after = "ddp_bucketed_on_after_backward"
            return
        try:  # the editions' two names of one thing
            self.model = adapters.call("get_ddp", module)
            self._after = "ddp_on_after_backward"
        except NotImplementedYet as missing:
            try:
                self.model = adapters.call("get_ddp_individual_parameters", module)
            except NotImplementedYet:
                raise missing from None
            self._after = "ddp_individual_parameters_on_after_backward"

    @contextmanager
    def step(self) -> Iterator[None]:
        """The frame of a training step; the block runs forward and backward."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        optimizer.zero_grad(set_to_none=True)
        if self._is_bucketed:
            self._adapters.call("ddp_bucketed_on_train_batch_start", ddp_model=self.model, optimizer=optimizer)
        yield
        if self._is_bucketed:
            self._adapters.call(self._after, ddp_model=self.model, optimizer=optimizer)
        else:
            self._adapters.call(self._after, self.model, optimizer)
        optimizer.step()


def check_both(function: Callable[..., None]) -> None:
    """Register a check of both wrappers; it is given the bucket sizes to try."""

    def overlapped(adapters: Adapters, rank: int, num_ranks: int) -> None:
        function(adapters, rank, num_ranks, "individual")

    def bucketed(adapters: Adapters, rank: int, num_ranks: int) -> None:
        for bucket_size_mb in (0.0001, 0.002, None):  # a bucket a tensor, several, one
            function(adapters, rank, num_ranks, bucket_size_mb)

    for problem, one in ((OVERLAP, overlapped), (BUCKETED, bucketed)):
        one.__doc__ = function.__doc__
        check(problem, function.__name__, num_ranks=2)(one)


@check_both
def broadcasts_the_parameters(adapters: Adapters, rank: int, num_ranks: int, size: Any) -> None:
    """After wrapping every rank has rank 0's parameters, the frozen one too."""
    module = seeded(Toy, seed=rank)
    with torch.no_grad():
        module.fixed.fill_(2.0 + rank)
    model = Wrapped(adapters, module, size).model
    first = dict(seeded(Toy, seed=0).named_parameters())
    wrong = [name for name, parameter in model.module.named_parameters() if not torch.equal(parameter, first[name])]
    assert not wrong, f"not rank 0's after wrapping: {', '.join(wrong)}"


@check_both
def keeps_the_module(adapters: Adapters, rank: int, num_ranks: int, size: Any) -> None:
    """`.module` is the model, parameters keep names and order, a shared one stands once, `state_dict` is whole."""
    module = seeded(Toy)
    names, state = [name for name, _ in module.named_parameters()], list(module.state_dict())
    model = Wrapped(adapters, module, size).model
    assert getattr(model, "module", None) is module, "the wrapper has no attribute `module` that is the model"
    ours = [name for name, _ in model.named_parameters()]
    assert len(ours) == len(names), f"the wrapper has {len(ours)} parameters, the model {len(names)}"
    for wrapped, name in zip(ours, names):
        assert name in wrapped, f"{wrapped} stands in the place of {name}"
    assert list(model.module.state_dict()) == state, "the state_dict of `.module` has other names than the model's"


@check_both
def equals_one_process(adapters: Adapters, rank: int, num_ranks: int, size: Any) -> None:
    """Training on halves of a batch ends where one process ends with the whole batch, on every rank."""
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
        assert equal_on_all_ranks(parameter.detach()), f"{name} differs between the ranks after training"


def gradients_sent() -> list[int]:
    return [payload for payload in SENT if payload >= FLAGS]


def messages_of_a_step(wrapped: Wrapped, rank: int) -> tuple[list[int], int, bool]:
    """The payloads of the second step; how many had gone when the last gradient was there; whether each was awaited."""
    gone, blocks = 0, False
    for step in range(2):  # in the first one an order may be learned
        x, y = regression_batch(10 * step + rank, 100, 100)
        x.requires_grad_()  # its gradient comes with the first layer's, which is the last

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
    sent, gone, blocks = messages_of_a_step(wrapped, rank)
    assert sent, "no gradient is sent"
    assert gone, f"none of {len(sent)} {what} is sent before the backward has ended"
    assert not blocks, f"the backward waits for each of the {what}: pass async_op=True, wait when it has ended"


@check(OVERLAP, num_ranks=2)
def overlaps_the_backward(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Gradients are sent while the backward still runs, which does not wait for them."""
    assert_overlap(Wrapped(adapters, seeded(Stack), "individual"), rank, "messages")


@check(BUCKETED, num_ranks=2)
def overlaps_the_backward_bucket_by_bucket(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """A bucket is sent when its gradients are there, while the backward still runs, which does not wait for it."""
    assert_overlap(Wrapped(adapters, seeded(Stack), 0.1), rank, "buckets")


@check(BUCKETED, num_ranks=2)
def sends_fewer_messages_than_gradients(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Gradients that fit into one bucket are one message; the payload is still all of them."""
    for size, expected in ((1.0, 1), (0.1, 4)):
        sent, *_ = messages_of_a_step(Wrapped(adapters, seeded(Stack), size), rank)
        what = f"8 gradients of 0.04 MB with bucket_size_mb={size}"
        assert len(sent) == expected, f"{what} are {len(sent)} messages a step, not {expected}"
        assert sum(sent) >= 8 * 40_000, f"{what} are {sum(sent)} bytes, less than all of them"


@check(BUCKETED, num_ranks=2)
def keeps_to_the_bucket_size(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """No message is larger than `bucket_size_mb`, one large gradient excepted."""
    for size, largest in ((0.1, 104_858), (0.0001, 40_000)):
        sent, *_ = messages_of_a_step(Wrapped(adapters, seeded(Stack), size), rank)
        what = f"with bucket_size_mb={size} and gradients of 40,000 bytes"
        assert sent, f"{what} no message is sent in step 2"
        assert max(sent) <= largest, f"{what} a message of {max(sent)} bytes is sent"
