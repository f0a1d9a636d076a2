"""Data parallelism, third stage: all-reduce each gradient as soon as the backward has made it.

The backward goes from the last layer to the first, so while it computes the gradients of layer i, those of layer i + 1
are on their way. What cannot be hidden is the communication of the gradients that come last.
"""

from __future__ import annotations

from torch import nn

from cs336_systems.distributed.collectives import Group, MeansUnderWay
from cs336_systems.distributed.ddp import DataParallel, arrived_twice, call_at_each_gradient, dense_gradient


class OverlapDDP(DataParallel):
    """One asynchronous all-reduce a parameter, in place, started by a hook on its gradient.

    Every rank starts them in the reverse order of parameters, about that in which a backward makes the gradients: one
    that is early waits for those before it in that order.
    """

    def __init__(self, module: nn.Module, group: Group = None, *, find_unused_parameters: bool = False) -> None:
        super().__init__(module, group, find_unused_parameters=find_unused_parameters)
        self._under_way = MeansUnderWay(group)
        self._end_step()
        call_at_each_gradient(self, OverlapDDP._arrive)

    def _arrive(self, index: int) -> None:
        """The backward has accumulated the gradient of parameter `index`: send what is next, as far as it is there."""
        if not self.sends:
            return
        if self._has_arrived[index]:
            raise arrived_twice(self.names[index])
        self._has_arrived[index] = True
        while self._next >= 0 and self._has_arrived[self._next]:
            self._under_way.start(dense_gradient(self.trainable[self._next]))
            self._next -= 1

    def _synchronize(self) -> None:
        for index in range(self._next, -1, -1):  # those that this backward has not reached, and those behind them
            self._under_way.start(dense_gradient(self.trainable[index]))
        self._end_step()

    def _end_step(self) -> None:
        self._under_way.wait()
        self._has_arrived = [False] * len(self.trainable)
        self._next = len(self.trainable) - 1  # the parameter whose gradient is sent next
