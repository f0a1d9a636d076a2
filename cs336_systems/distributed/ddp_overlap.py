"""Data parallelism, third stage: all-reduce each gradient as soon as the backward has made it.

The backward goes from the last layer to the first, so while it computes the gradients of layer i, those of layer i + 1
are on their way. What cannot be hidden is the communication of the gradients that come last.
"""

from __future__ import annotations

from torch import Tensor, nn

from cs336_systems.distributed.collectives import Group, MeansUnderWay
from cs336_systems.distributed.ddp import LaunchOrder, ReactingDataParallel, dense_gradient


class OverlapDDP(ReactingDataParallel):
    """One asynchronous all-reduce a parameter, in place, started by a hook on its gradient.

    The first backward is not overlapped: see `LaunchOrder`.
    """

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        super().__init__(module, group)
        self._order = LaunchOrder(list(range(len(self.trainable))), group, self._all_used.device)
        self._means = MeansUnderWay(group)
        self._react_to_gradients()

    def _react(self, index: int, gradient: Tensor) -> None:
        if self.sends:
            for ready in self._order.arrive(index):
                self._means.start(gradient if ready == index else dense_gradient(self.trainable[ready]))

    def _synchronize(self) -> None:
        for index in self._order.finish():
            self._means.start(dense_gradient(self.trainable[index]))
        self._means.wait()
