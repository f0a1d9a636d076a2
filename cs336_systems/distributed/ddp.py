"""What the four data-parallel wrappers share: one start for all ranks, gradient accumulation, unused parameters.

    model = OverlapDDP(model)                       # every rank now has rank 0's parameters and buffers
    with model.no_sync():                           # gradients pile up on each rank, nothing is sent
        loss(model(first_part)).backward()
    loss(model(second_part)).backward()
    model.finish_gradient_synchronization()         # .grad is now the mean over the ranks, on every rank
    clip_gradients(model.parameters(), 1.0)         # equal on all ranks, since the gradients are
    optimizer.step()

The loss is a mean over a rank's own batch, so that the mean of gradients is that of one process with the whole batch.

Ranks must issue the same collectives in the same order, or they hang. So a parameter without a gradient on one rank
takes part with zeros, and a vote at the end of each step finds those without one on any rank: their .grad stays None,
as in one process, and an optimizer with momentum or decay leaves them alone. Buffers are made equal at construction
only: running statistics then follow each rank's own data.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.distributed.collectives import (
    Group,
    all_reduce_max,
    broadcast_from_first,
    broadcast_parameters,
    check_same_shapes,
)


class DataParallel(nn.Module, ABC):
    """Base of the wrappers around `module`, the same on every rank of `group` but for its values.

    A subclass says in `_synchronize` how gradients become means. Parameters that are trainable at construction are
    synchronised, each once however many modules share it; freezing or replacing them later is not supported. Raises
    TypeError if `module` is no module, ValueError on all ranks if theirs differ and on a rank that is not of `group`,
    RuntimeError without a process group.
    """

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        check_same_shapes([*module.named_parameters(), *module.named_buffers()], group)
        broadcast_parameters(module, group)
        self.module = module
        self.group = group
        self.trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.sends = True  # False within no_sync
        # This rank's vote where every parameter has a gradient, made once: no copy from the host in a step.
        device = self.trainable[0].device if self.trainable else torch.device("cpu")
        self._all_used = torch.ones(len(self.trainable), dtype=torch.uint8, device=device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate; the first one outside is synchronised with all that they left."""
        before, self.sends = self.sends, False
        try:
            yield
        finally:
            self.sends = before

    def finish_gradient_synchronization(self) -> None:
        """Call after backward, before gradients are read: afterwards each is the mean over the ranks.

        Waits on the device, not on the host, unless this rank has a parameter without a gradient. Raises RuntimeError
        within `no_sync`, TypeError for a sparse gradient.
        """
        if not self.sends:
            raise RuntimeError("finish_gradient_synchronization() must be called outside of no_sync()")
        unused = [index for index, parameter in enumerate(self.trainable) if parameter.grad is None]
        for index in unused:
            self.trainable[index].grad = torch.zeros_like(self.trainable[index])
        self._synchronize()
        self._forget_unused(unused)

    @abstractmethod
    def _synchronize(self) -> None:
        """Make every gradient of `trainable` the mean over the ranks; all of them are there."""

    def _forget_unused(self, unused: list[int]) -> None:
        """Take the zeros back from those parameters of `unused` that no rank has a gradient for."""
        votes = self._all_used
        if unused:
            votes = votes.clone()
            votes[unused] = 0
        all_reduce_max(votes, self.group)
        if unused:
            used = votes.tolist()
            for index in unused:
                if not used[index]:
                    self.trainable[index].grad = None


class ReactingDataParallel(DataParallel):
    """Base of the wrappers that act on each gradient as soon as the backward has made it.

    A backward raises RuntimeError where a parameter was written between the last one and its synchronisation, as by an
    optimizer's step: each rank has then stepped by its own gradients. What writes through `.data` goes unseen.
    """

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        super().__init__(module, group)
        self._versions: dict[int, int] = {}  # of parameters when their gradients arrived, until these are synchronised

    def finish_gradient_synchronization(self) -> None:
        """As `DataParallel.finish_gradient_synchronization`; parameters may be written again."""
        super().finish_gradient_synchronization()
        self._versions.clear()

    def _react_to_gradients(self) -> None:
        """Have `_react` called from now on.

        The parameters hold the wrapper weakly: they outlive it, and a cycle through autograd's hooks would keep wrapper
        and model alive for good.
        """
        itself = weakref.ref(self)

        def make_hook(index: int) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                if (alive := itself()) is not None:
                    alive._check_unwritten(index, parameter)
                    alive._react(index, dense_gradient(parameter))

            return hook

        for index, parameter in enumerate(self.trainable):
            parameter.register_post_accumulate_grad_hook(make_hook(index))

    def _check_unwritten(self, index: int, parameter: Tensor) -> None:
        """RuntimeError if `parameter` was written when its last gradient had arrived and was not synchronised."""
        version = parameter._version
        if self._versions.get(index, version) != version:
            raise RuntimeError(
                "finish_gradient_synchronization() was not called between the last backward and the optimizer's step: "
                "call it after each backward, or run all but the last of them under no_sync()"
            )
        if self.sends:
            self._versions[index] = version

    @abstractmethod
    def _react(self, index: int, gradient: Tensor) -> None:
        """What to do in the backward when the gradient of parameter `index` of `trainable` was accumulated."""


def dense_gradient(parameter: Tensor) -> Tensor:
    """The gradient of `parameter`, without a graph; TypeError if it is sparse, RuntimeError if there is none."""
    gradient = parameter.grad
    if gradient is None:  # dropped by zero_grad when it had arrived
        raise RuntimeError(
            f"a gradient of shape {tuple(parameter.shape)} has gone before its all-reduce: call "
            "finish_gradient_synchronization() after each backward, after one that raised as well"
        )
    if gradient.layout != torch.strided:
        raise TypeError(f"gradients must be dense, got {gradient.layout} of shape {tuple(parameter.shape)}")
    return gradient.detach() if gradient.requires_grad else gradient


class LaunchOrder:
    """Says which items' collectives may start when gradients arrive, in an order that is the same on every rank.

    An item is what one collective carries: a parameter, or a bucket of them. The first backward in which some rank has
    a gradient is a rehearsal in which nothing starts early: it counts how many times each parameter's hook runs (twice
    where two reentrantly checkpointed regions share a weight), and the order in which items were complete on rank 0
    becomes everybody's. From then on an item starts as soon as all its parameters have arrived and all items before it
    have started. A later backward may reach a weight fewer times, and its item starts at the end; not more often.
    """

    def __init__(self, item_of_parameter: list[int], group: Group, device: torch.device) -> None:
        self.item_of_parameter = item_of_parameter
        self.num_items = max(item_of_parameter, default=-1) + 1
        self.group, self.device = group, device
        self.order: list[int] | None = None  # None until rehearsed
        self.expected = [0] * len(item_of_parameter)  # arrivals of each parameter in a backward
        self.sizes = [0] * self.num_items  # parameters of each item
        for item in item_of_parameter:
            self.sizes[item] += 1
        self._begin()

    def _begin(self) -> None:
        self.arrived = [0] * len(self.item_of_parameter)
        self.missing = list(self.sizes)  # parameters of each item that have not arrived
        self.has_started = [False] * self.num_items
        self.rehearsed: dict[int, None] = {}  # items in the order of their last arrivals, until there is an order
        self.num_started = 0

    def arrive(self, parameter: int) -> list[int]:
        """The items that may start now that `parameter`'s gradient was accumulated once more.

        Raises RuntimeError if its item has started: the new gradient would be added to a sum already under way.
        """
        item = self.item_of_parameter[parameter]
        self.arrived[parameter] += 1
        if self.order is None:
            self.rehearsed.pop(item, None)
            self.rehearsed[item] = None
            return []
        if self.has_started[item]:
            raise RuntimeError(
                "a gradient arrived after its all-reduce had begun: call finish_gradient_synchronization() after each "
                "backward, or run all but the last of them under no_sync(); where reentrant checkpoints reach a weight "
                "more often than in the first backward, use NaiveDDP or FlatDDP"
            )
        if self.arrived[parameter] != self.expected[parameter]:
            return []
        self.missing[item] -= 1
        first = self.num_started
        while self.num_started < self.num_items and not self.missing[self.order[self.num_started]]:
            self.has_started[self.order[self.num_started]] = True
            self.num_started += 1
        return self.order[first : self.num_started]

    def finish(self) -> list[int]:
        """The items not started in this backward, in order; the next `arrive` belongs to another backward."""
        if self.order is None and not self._has_rehearsed():
            return list(range(self.num_items))
        if self.order is None:
            self._learn()
        assert self.order is not None
        rest = self.order[self.num_started :]
        self._begin()
        return rest

    def _has_rehearsed(self) -> bool:
        """Whether a gradient has arrived, on any rank: not where there was no backward but under no_sync."""
        has_arrived = torch.tensor([any(self.arrived)], dtype=torch.uint8, device=self.device)
        all_reduce_max(has_arrived, self.group)
        return bool(has_arrived.item())

    def _learn(self) -> None:
        self.expected = [max(1, count) for count in self.arrived]
        incomplete = {item for item, count in zip(self.item_of_parameter, self.arrived) if not count}
        own = [item for item in self.rehearsed if item not in incomplete]
        own += sorted(set(range(self.num_items)) - set(own))
        agreed = torch.tensor(own, dtype=torch.int64, device=self.device)
        broadcast_from_first(agreed, self.group)
        self.order = agreed.tolist()
