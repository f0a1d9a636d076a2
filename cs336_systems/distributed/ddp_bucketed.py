"""Data parallelism, fourth stage: all-reduce buckets of gradients while the backward runs.

Buckets lie between one collective per parameter, whose latencies add up, and one collective for
all, which overlaps with nothing. They are filled in the reverse order of parameters, which is about
the order in which a backward makes their gradients. A new gradient is copied into its bucket and is
a view of it from then on: this costs one copy a step, and no copy back after the all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor, nn

from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import Group, Work, all_reduce_mean
from cs336_systems.distributed.ddp import DataParallel, SendQueue

BYTES_PER_MB = 2**20  # as torch's DistributedDataParallel counts its bucket_cap_mb
ALIGNMENT_BYTES = 16  # of each view: the width of a GPU's vector loads


class BucketedDDP(DataParallel):
    """Average gradients during the backward by one asynchronous all-reduce per bucket.

    Args:
        bucket_size_mb: largest size of a bucket, in MiB. A larger parameter has a bucket of its
            own. None: no limit, so one bucket. A bucket never mixes dtypes or devices.

    Buckets stay allocated when `zero_grad` sets gradients to None: a new gradient is copied into
    its place when it arrives, which costs less than clearing the bucket and adding to it.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        group: Group = None,
        *,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__(module, group, find_unused_parameters=find_unused_parameters)
        limit = math.inf if bucket_size_mb is None else bucket_size_mb * BYTES_PER_MB
        plan = plan_buckets(self.trainable, limit)
        self.buckets = [Bucket([self.trainable[index] for index in indices]) for indices in plan]
        self._queue = SendQueue([bucket.parameters for bucket in self.buckets], self.names, group)
        self.sent = self._queue.sent

    def _arrive(self, index: int) -> None:
        """Move gradient `index` into its bucket, and send the full buckets whose turn it is.

        `index` counts the trainable parameters from the last one.
        """
        guards.unaveraged.add(self)
        self._take_gradient(index)
        if self.sends:
            self._queue.arrive(index, self._send)

    def _take_gradient(self, index: int) -> None:
        """Make gradient `index`, counted from the last parameter, a view of its bucket."""
        number, place = self._queue.places[index]
        self.buckets[number].take_gradient(place, self.names[self._queue.parameters[index]])

    def _send(self, message: int) -> Work:
        """Start the all-reduce of one bucket; return the handle to wait for."""
        return all_reduce_mean(self.buckets[message].flat, self.group, async_op=True)

    def _synchronize(self) -> None:
        """Send the buckets that are unsent, wait for all of them, and begin a new step."""
        # gradients that no backward of this step has brought
        for index in range(len(self._queue.places)):
            self._take_gradient(index)
        self._queue.finish(self._send)
        self._queue.begin()


class Bucket:
    """Holds the gradients of some parameters as views of one flat tensor, which is averaged.

    The length of `flat` is rounded up to a multiple of `multiple` elements.
    """

    def __init__(self, parameters: list[Tensor], multiple: int = 1) -> None:
        self.parameters = parameters
        *self.offsets, length = accumulate(map(aligned_size, parameters), initial=0)
        self.flat = parameters[0].detach().new_zeros(-(-length // multiple) * multiple)
        self.views = self.views_of(self.flat)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return a view of `flat` for each parameter: its place in the bucket, in its shape."""
        places = zip(self.offsets, self.parameters)
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in places
        ]

    def take_gradient(self, place: int, name: str) -> None:
        """Make the gradient of the parameter at `place` a view of the bucket, copying it if needed.

        Raises RuntimeError naming the parameter if the bucket no longer holds it: `Module.to` and
        the like give a parameter and its gradient new memory. Raises as `dense_gradient` does.
        """
        parameter, view = self.parameters[place], self.views[place]
        is_taken = parameter.grad is view

        # The address is that in `flat`: a copy of the bucket lies elsewhere. Tensors without
        # elements have no address.
        address = self.flat.data_ptr() + self.offsets[place] * view.itemsize
        if is_taken and (not view.numel() or view.data_ptr() == address):
            return

        gradient = guards.dense_gradient(parameter)
        if is_taken or gradient.dtype != self.flat.dtype or gradient.device != self.flat.device:
            guards.refuse_moved(name)
        view.copy_(gradient)
        parameter.grad = view


def plan_buckets(parameters: Sequence[Tensor], limit_bytes: float) -> list[list[int]]:
    """Return the indices into `parameters` that each bucket holds, in reverse order.

    A bucket holds consecutive parameters of one dtype and device, and at most `limit_bytes` bytes
    with alignment; a parameter larger than that has a bucket of its own.
    """
    buckets: list[list[int]] = []
    used_bytes, kind = math.inf, None
    for index, parameter in reversed([*enumerate(parameters)]):
        size = aligned_size(parameter) * parameter.element_size()
        if used_bytes + size > limit_bytes or kind != (parameter.dtype, parameter.device):
            buckets.append([])
            used_bytes, kind = 0, (parameter.dtype, parameter.device)
        buckets[-1].append(index)
        used_bytes += size
    return buckets


def aligned_size(parameter: Tensor) -> int:
    """Return how many elements `parameter` takes in a bucket, with padding that aligns the next."""
    step = max(1, ALIGNMENT_BYTES // parameter.element_size())
    return -(-parameter.numel() // step) * step
