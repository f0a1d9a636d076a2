"""Data parallelism, fourth stage: gradients live in buckets, and a full bucket is all-reduced while
the backward runs.

Between one collective a parameter, whose latencies add up, and one for all, which overlaps with
nothing. Buckets are filled in the reverse order of parameters, about the order in which a backward
makes their gradients. A new gradient is copied into its bucket and is a view of it from then on:
one copy a step, and none back behind the all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor, nn

from cs336_systems.distributed.collectives import Group, Work, all_reduce_mean
from cs336_systems.distributed.ddp import DataParallel, SendQueue, dense_gradient

BYTES_PER_MB = 2**20  # as torch's DistributedDataParallel counts its bucket_cap_mb
ALIGNMENT_BYTES = 16  # of each view: the width of a GPU's vector loads


class BucketedDDP(DataParallel):
    """Asynchronous all-reduces of buckets of at most `bucket_size_mb` MiB; None puts everything
    into one.

    A parameter larger than that has a bucket of its own, and dtypes do not mix. Buckets stay
    allocated when `zero_grad` sets gradients to None: a new gradient is copied into its place when
    it arrives, which costs less than clearing the bucket and adding to it.
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

    def _arrive(self, index: int) -> None:
        """Take the gradient into its bucket, and send what is full."""
        super()._arrive(index)
        self._take_gradient(index)
        if self.sends:
            self._queue.arrive(index, self._send)

    def _take_gradient(self, index: int) -> None:
        number, place = self._queue.places[index]
        self.buckets[number].take_gradient(place, self.names[self._queue.parameters[index]])

    def _send(self, message: int) -> Work:
        return all_reduce_mean(self.buckets[message].flat, self.group, async_op=True)

    def _check_sent(self) -> None:
        self._queue.check_sent()

    def _synchronize(self) -> None:
        for index in range(len(self._queue.places)):
            self._take_gradient(index)  # where no backward of this step has
        self._queue.finish(self._send)
        self._queue.begin()


class Bucket:
    """Parameters whose gradients are views of one flat tensor, in which they are averaged."""

    def __init__(self, parameters: list[Tensor], multiple: int = 1) -> None:
        self.parameters = parameters
        *self.offsets, length = accumulate(map(aligned_size, parameters), initial=0)
        self.flat = parameters[0].detach().new_zeros(-(-length // multiple) * multiple)
        self.views = self.views_of(self.flat)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in `flat`, in their shapes."""
        places = zip(self.offsets, self.parameters)
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in places
        ]

    def take_gradient(self, place: int, name: str) -> None:
        """Let the gradient of a parameter be its view; one that was made elsewhere is copied into
        it.

        RuntimeError naming one that the bucket does not hold any more: `Module.to` and its like
        give a parameter, and the gradient that it has, memory of their own.
        """
        parameter, view = self.parameters[place], self.views[place]
        is_taken = parameter.grad is view
        # Asked of `flat`, as a copy of the bucket lies elsewhere; what has no elements lies
        # nowhere.
        address = self.flat.data_ptr() + self.offsets[place] * view.itemsize
        if is_taken and (not view.numel() or view.data_ptr() == address):
            return
        gradient = dense_gradient(parameter)
        if is_taken or gradient.dtype != self.flat.dtype or gradient.device != self.flat.device:
            raise RuntimeError(
                f"parameter {name!r} was moved or cast after it was wrapped: wrap again, at the end"
            )
        view.copy_(gradient)
        parameter.grad = view


def plan_buckets(parameters: Sequence[Tensor], limit_bytes: float) -> list[list[int]]:
    """Places of consecutive parameters in reverse order, in buckets of one dtype and device within
    `limit_bytes`.
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
    """Elements that `parameter` takes in a bucket, so that the next one is aligned."""
    step = max(1, ALIGNMENT_BYTES // parameter.element_size())
    return -(-parameter.numel() // step) * step
