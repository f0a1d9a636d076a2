"""Data parallelism, third stage: all-reduce each gradient as soon as the backward has made it.

The backward goes from the last layer to the first, so while it computes the gradients of layer i, those of layer i + 1
are on their way. What cannot be hidden is the communication of the gradients that come last.
"""

from __future__ import annotations

from collections import deque

from torch import nn

from cs336_systems.distributed.collectives import Group, Work, all_reduce_mean, wait_for
from cs336_systems.distributed.ddp import (
    DataParallel,
    agree_on_order,
    arrived_twice,
    call_at_each_gradient,
    dense_gradient,
)


class OverlapDDP(DataParallel):
    """One asynchronous all-reduce a parameter, in place, started by a hook on its gradient.

    Every rank starts them in one order, and a gradient that is early waits for those before it: in the first step the
    reverse order of parameters, from then on that in which rank 0's gradients came in the first.
    """

    def __init__(self, module: nn.Module, group: Group = None, *, find_unused_parameters: bool = False) -> None:
        super().__init__(module, group, find_unused_parameters=find_unused_parameters)
        self._under_way: list[Work] = []
        self._order = list(reversed(range(len(self.trainable))))
        self._is_learned = False
        self._end_step()
        call_at_each_gradient(self, self.trainable, OverlapDDP._arrive)

    def _arrive(self, index: int) -> None:
        """The backward has accumulated the gradient of parameter `index`: send what is next, as far as it is there."""
        if not self.sends:
            return
        if index in self._arrived:
            raise arrived_twice(self.names[index])
        self._arrived[index] = None
        while self._waiting and self._waiting[0] in self._arrived:
            self._send(self._waiting.popleft())

    def _send(self, index: int) -> None:
        gradient = dense_gradient(self.trainable[index])
        self._under_way.append(all_reduce_mean(gradient, self.group, async_op=True))

    def _synchronize(self) -> None:
        for index in self._waiting:  # those that this backward has not reached, and those behind them
            self._send(index)
        if not self._is_learned:
            self._order = agree_on_order(self._arrived, self.trainable, self.group)
            self._is_learned = True
        self._end_step()

    def _end_step(self) -> None:
        wait_for(self._under_way)
        self._arrived: dict[int, None] = {}  # in the order of coming
        self._waiting = deque(self._order)
