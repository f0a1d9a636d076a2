"""Data parallelism, third stage: all-reduce each gradient as soon as the backward has made it.

The backward goes from the last layer to the first, so while it computes the gradients of layer i,
those of layer i + 1 are on their way. What cannot be hidden is the communication of the gradients
that come last.
"""

from __future__ import annotations

from torch import nn

from cs336_systems.distributed.collectives import Group, Work, all_reduce_mean
from cs336_systems.distributed.ddp import DataParallel, SendQueue, dense_gradient


class OverlapDDP(DataParallel):
    """One asynchronous all-reduce a parameter, in place, started by a hook on its gradient.

    Every rank starts them in one order, and a gradient that is early waits for those before it: in
    the first step the reverse order of parameters, from then on that in which rank 0's gradients
    came in the first.
    """

    def __init__(
        self, module: nn.Module, group: Group = None, *, find_unused_parameters: bool = False
    ) -> None:
        super().__init__(module, group, find_unused_parameters=find_unused_parameters)
        self._queue = SendQueue(
            [[parameter] for parameter in reversed(self.trainable)], self.names, group
        )

    def _arrive(self, index: int) -> None:
        """Send what is next, as far as it is there."""
        super()._arrive(index)
        if self.sends:
            self._queue.arrive(index, self._send)

    def _send(self, message: int) -> Work:
        return all_reduce_mean(
            dense_gradient(self._queue.parameters[message]), self.group, async_op=True
        )

    def _check_sent(self) -> None:
        self._queue.check_sent()

    def _synchronize(self) -> None:
        # those that this backward has not reached, and those behind them
        self._queue.finish(self._send)
        self._queue.begin()
