"""Data parallelism, third stage: all-reduce each gradient as soon as the backward has made it.

The backward goes from the last layer to the first, so while it computes the gradients of layer i,
those of layer i + 1 are on their way. What cannot be hidden is the communication of the gradients
that come last.
"""

from __future__ import annotations

from torch import Tensor, nn

from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import Group, Means
from cs336_systems.distributed.ddp import DataParallel, SendQueue


class OverlapDDP(DataParallel):
    """Average gradients during the backward by one asynchronous all-reduce per parameter.

    A hook on each gradient starts its all-reduce, in place. All ranks start them in the same order,
    so a gradient that is early waits for those before it. The order is the reverse one of the
    parameters in the first step, and from then on that in which rank 0's gradients arrived in the
    first step.
    """

    def __init__(
        self, module: nn.Module, group: Group = None, *, find_unused_parameters: bool = False
    ) -> None:
        super().__init__(module, group, find_unused_parameters=find_unused_parameters)
        self._queue = SendQueue(
            [[parameter] for parameter in reversed(self.trainable)], self.names, group
        )
        self._means = Means(group)

    def _arrive(self, index: int) -> None:
        """Start the all-reduces whose turn it is, now that gradient `index` is there.

        `index` counts the trainable parameters from the last one.
        """
        self.note_unaveraged()
        if self.sends:
            self._queue.arrive(index, self._send)

    def _send(self, message: int) -> None:
        """Start the all-reduce of one gradient."""
        self._means.start(guards.dense_gradient(self._queue.parameters[message]))

    def _synchronize(self) -> None:
        """Send what the backward has not sent, wait for all all-reduces, and begin a new step."""
        # Unsent are gradients that this backward did not reach, and those after them in the order.
        self._queue.finish(self._send)
        self._means.wait()
        self._queue.begin()

    def _moved(self) -> Tensor | None:
        """Return a parameter whose gradient is not the tensor that was sent; None if all are."""
        for number, address in zip(self._queue.sent, self._means.addresses):
            parameter = self._queue.parameters[number]
            if parameter.grad is None or parameter.grad.data_ptr() != address:
                return parameter
        return None
