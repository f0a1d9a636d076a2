"""The base class of the four data-parallel wrappers: broadcast, hooks, and the end of a step.

    model = OverlapDDP(model)                # every rank now has rank 0's parameters and buffers
    with model.no_sync():                    # gradients add up on each rank, nothing is sent
        loss(model(first_part)).backward()
    loss(model(second_part)).backward()
    model.finish_gradient_synchronization()  # .grad is now the mean over the ranks, on every rank
    clip_gradients(model.parameters(), 1.0)  # equal on all ranks, since the gradients are
    optimizer.step()

The loss is a mean over a rank's own batch, so the mean of the gradients is that of one process with
the whole batch. Ranks must issue the same collectives in the same order, or they hang. So all ranks
use one order, and each parameter takes part in each step. Buffers are made equal at construction
only. `guards.py` has the checks.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import (
    Group,
    broadcast_from_first,
    broadcast_parameters,
)


class Accumulating(guards.Guarded):
    """Base of all that averages a backward's gradients over the ranks, except within `no_sync`.

    The DDP wrappers, FSDP and Zero1Optimizer derive from it.
    """

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside this block only accumulate gradients on their rank.

        The first backward outside of the block is averaged together with what they accumulated.
        """
        before, self.sends = self.sends, False
        try:
            yield
        finally:
            self.sends = before

    def finish_gradient_synchronization(self) -> None:
        """Finish averaging: afterwards each `.grad` is the mean over the ranks.

        Call it after the backward, before gradients are read. With FSDP `.grad` is the mean for
        this rank's rows; with Zero1Optimizer `averaged_gradients` returns the means. On NCCL the
        device waits, not the host. Raises RuntimeError within `no_sync`, for a wrapper whose module
        was wrapped again, for a parameter that was frozen or made trainable after wrapping, and for
        a parameter without a gradient where all must have one; TypeError for a sparse gradient.
        """
        with self.guarded_step():
            self._synchronize()

    @abstractmethod
    def _synchronize(self) -> None:
        """Send the gradients that this step's backward has not sent, and wait for all messages."""


class DataParallel(guards.GuardedReplica, Accumulating):
    """Base of the data-parallel wrappers: one replica of `module` on each rank of `group`.

    The constructor gives every rank rank 0's parameters and buffers; names, shapes and dtypes must
    be equal before. Parameters that are trainable at construction are synchronised. A parameter
    that is frozen, made trainable, added or replaced later raises an error.

    With `find_unused_parameters` a step may leave parameters without a gradient, among them such as
    were frozen after wrapping. Ranks then vote at the end of the step, which costs a message and
    makes the host wait. A parameter that no rank has used keeps no gradient, as in one process.
    Without the option such a step raises RuntimeError.

    A module that is wrapped again belongs to its latest wrapper; earlier wrappers send nothing.
    Raises ValueError on all ranks if their modules differ, on a rank that is not in `group`, and
    for a module with `max_norm` or a wrapper in it; RuntimeError without a process group, and
    before an optimizer's step with gradients that were not averaged.
    """

    def __init__(
        self, module: nn.Module, group: Group = None, *, find_unused_parameters: bool = False
    ) -> None:
        super().__init__()
        guards.check_before_wrapping(module, group)
        broadcast_parameters(module, group)

        self.module, self.group = module, group
        self.find_unused_parameters = find_unused_parameters
        self.names = {one: name for name, one in module.named_parameters() if one.requires_grad}
        self.trainable = [*self.names]
        self._register_hooks()
        self.watch_over(module)

    def _register_hooks(self) -> None:
        """Call `_arrive` at each gradient, with an index that counts from the last parameter."""
        call_at_each_gradient(self, self.trainable[::-1], type(self)._arrive)

    def _arrive(self, index: int) -> None:
        """Note that a backward has accumulated gradient `index`, which is not averaged yet."""
        self.note_unaveraged()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's output."""
        return self.module(*args, **kwargs)


def call_at_each_gradient(
    owner: Any, parameters: list[Any], react: Callable[[Any, int], None]
) -> None:
    """Call `react(owner, index)` whenever a backward has accumulated `parameters[index].grad`.

    The hooks hold the owner weakly, since a cycle through autograd's hooks would keep owner and
    model alive for good. They are removed when the owner is collected.
    """
    itself = weakref.ref(owner)

    def hook(index: int, _: Tensor) -> None:
        """Call `react` unless the owner is gone; torch passes the parameter, not the gradient."""
        if (alive := itself()) is not None:
            react(alive, index)

    for index, parameter in enumerate(parameters):
        handle = parameter.register_post_accumulate_grad_hook(partial(hook, index))
        weakref.finalize(owner, handle.remove).atexit = False


class SendQueue:
    """Sends messages in the same order on every rank, each as soon as it is complete and its turn.

    Args:
        messages: the parameters whose gradients each message carries.
        names: the parameters' names, for errors.
        group: the process group.

    A message is complete when all its gradients have arrived. The first step sends the messages in
    the given order; later steps use the order in which rank 0's messages were complete in the
    first step.

    `arrive` runs between two kernels of a backward, and the host must stay ahead of the GPU: it
    allocates nothing that the garbage collector counts.
    """

    def __init__(
        self, messages: Sequence[Sequence[Tensor]], names: dict[Tensor, str], group: Group
    ) -> None:
        self.parameters = [parameter for message in messages for parameter in message]
        self.messages, self.names, self.group = messages, names, group
        # of each of `parameters`
        self.message_of = [number for number, message in enumerate(messages) for _ in message]
        self.order, self.is_learned = [*range(len(messages))], False
        self.begin()

    def begin(self) -> None:
        """Begin a new step, and expect every gradient anew."""
        self.arrived = [False] * len(self.parameters)
        self.missing = [*map(len, self.messages)]  # how many gradients each message still waits for
        self.complete: list[int] = []  # messages, in the order in which they became complete
        self.num_sent = 0  # messages, the first ones of `order`

    def arrive(self, index: int, send: Callable[[int], object]) -> None:
        """Note that the gradient of `parameters[index]` is there, and send the messages now due.

        `send(message)` starts a message. Raises RuntimeError naming the parameter if its gradient
        arrives a second time in a step: it would be added to a sum that may be under way.
        """
        if self.arrived[index]:
            guards.refuse_second_gradient(self.names[self.parameters[index]])

        # the message is complete with its last gradient
        self.arrived[index] = True
        message, missing = self.message_of[index], self.missing
        missing[message] -= 1
        if missing[message]:
            return
        if not self.is_learned:
            self.complete.append(message)

        # send in the order that all ranks share, up to the first message that is not complete
        order = self.order
        while self.num_sent < len(order) and not missing[order[self.num_sent]]:
            send(order[self.num_sent])
            self.num_sent += 1

    def finish(self, send: Callable[[int], object]) -> None:
        """Send all messages not sent yet, complete or not.

        The first step also broadcasts the order of rank 0, which all later steps use.
        """
        while self.num_sent < len(self.order):
            send(self.order[self.num_sent])
            self.num_sent += 1

        # learn the order, once
        if not self.is_learned:
            device = self.parameters[0].device if self.parameters else "cpu"
            order = torch.tensor([*dict.fromkeys([*self.complete, *self.order])], device=device)
            broadcast_from_first(order, self.group)
            self.order, self.is_learned = order.tolist(), True

    @property
    def is_begun(self) -> bool:
        """Return whether a gradient has arrived or a message was sent in this step."""
        return self.num_sent > 0 or any(self.arrived)

    @property
    def sent(self) -> list[int]:
        """Return the messages that this step has sent, in order."""
        return self.order[: self.num_sent]
