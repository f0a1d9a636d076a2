"""Data parallelism, third stage: all-reduce each gradient as soon as the backward has made it.

The backward goes from the last layer to the first, so while it computes the gradients of layer i, those of layer i + 1
are on their way. What cannot be hidden is the communication of the gradients that come last.
"""

from __future__ import annotations

from torch import nn

from cs336_systems.distributed.collectives import Group, Work, all_reduce_mean
from cs336_systems.distributed.ddp import DataParallel, LaunchOrder, dense_gradient


class OverlapDDP(DataParallel):
    """One asynchronous all-reduce a parameter, in place, started by a hook on its gradient.

    The first backward is not overlapped: see `LaunchOrder`.
    """

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        super().__init__(module, group)
        self._order = LaunchOrder(list(range(len(self.trainable))), group, self._all_used.device)
        self._handles: list[Work] = []
        self._on_each_gradient(self._react)

    def _react(self, index: int) -> None:
        if self.sends:
            self._start(self._order.arrive(index))

    def _start(self, indices: list[int]) -> None:
        for index in indices:
            gradient = dense_gradient(self.trainable[index])
            self._handles.append(all_reduce_mean(gradient, self.group, async_op=True))

    def _synchronize(self) -> None:
        self._start(self._order.finish())
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
