"""Data parallelism, fourth stage: all-reduce buckets of gradients while the backward runs.

Buckets lie between one collective per parameter, whose latencies add up, and one collective for
all, which overlaps with nothing. They are filled in the reverse order of parameters, which is about
the order in which a backward makes their gradients. New gradients are copied into their bucket and
are views of it from then on: this costs one copy a step, and no copy back after the all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import Group, Means
from cs336_systems.distributed.ddp import DataParallel, SendQueue

BYTES_PER_MB = 2**20  # as torch's DistributedDataParallel counts its bucket_cap_mb
ALIGNMENT_BYTES = 16  # of each view: the width of a GPU's vector loads


class BucketedDDP(DataParallel):
    """Average gradients during the backward by one asynchronous all-reduce per bucket.

    Args:
        bucket_size_mb: largest size of a bucket, in MiB. A larger parameter has a bucket of its
            own. None: no limit, so one bucket. A bucket never mixes dtypes or devices.

    Buckets stay allocated when `zero_grad` sets gradients to None: new gradients are copied into
    their places, all of a bucket at once when the last one has arrived, which costs less than
    clearing the bucket and adding to it.
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
        self._means = Means(group)

    def _arrive(self, index: int) -> None:
        """Fill and send the buckets whose turn it is, now that gradient `index` is there.

        `index` counts the trainable parameters from the last one.
        """
        self.note_unaveraged()
        if self.sends:
            self._queue.arrive(index, self._send)

    def _send(self, message: int) -> None:
        """Move the gradients of one bucket into it, and start its all-reduce."""
        self.buckets[message].take_gradients(self.names)
        self._means.start(self.buckets[message].flat)

    def _synchronize(self) -> None:
        """Send the buckets that are unsent, wait for all of them, and begin a new step."""
        self._queue.finish(self._send)
        self._means.wait()
        self._queue.begin()

    def _moved(self) -> Tensor | None:
        """Return a parameter whose gradient is not the tensor that was sent; None if all are."""
        for number in self._queue.sent:
            if (parameter := self.buckets[number].moved()) is not None:
                return parameter
        return None


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

    def moved(self) -> Tensor | None:
        """Return a parameter whose gradient does not lie in the bucket; None if all do."""
        start, itemsize = self.flat.data_ptr(), self.flat.itemsize
        for parameter, offset in zip(self.parameters, self.offsets):
            place, gradient = start + offset * itemsize, parameter.grad
            if gradient is None or (gradient.numel() and gradient.data_ptr() != place):
                return parameter
        return None

    def take_gradients(self, names: dict[Tensor, str]) -> None:
        """Make the gradients of all parameters views of the bucket, copying those that are none.

        Raises RuntimeError naming a parameter if the bucket no longer holds it: `Module.to` and the
        like give a parameter and its gradient new memory. Raises as `dense_gradient` does.
        """
        start, itemsize = self.flat.data_ptr(), self.flat.itemsize
        new: list[tuple[Tensor, Tensor, Tensor]] = []
        for parameter, view, offset in zip(self.parameters, self.views, self.offsets):
            is_taken = parameter.grad is view
            # The address is that in `flat`: a copy of the bucket lies elsewhere. Tensors without
            # elements have no address.
            if is_taken and (view.data_ptr() == start + offset * itemsize or not view.numel()):
                continue
            gradient = guards.dense_gradient(parameter)
            if is_taken or gradient.dtype != self.flat.dtype or gradient.device != self.flat.device:
                guards.refuse_moved(names[parameter])
            new.append((parameter, view, gradient))
        if new:
            torch._foreach_copy_([view for _, view, _ in new], [one for _, _, one in new])
        for parameter, view, _ in new:
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
