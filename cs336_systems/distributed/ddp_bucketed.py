"""Data parallelism, fourth stage: gradients live in buckets, and a full bucket is all-reduced while the backward runs.

Between one collective a parameter, whose latencies add up, and one for all, which overlaps with nothing. Buckets are
filled in the reverse order of parameters, about the order in which a backward makes their gradients. A gradient is a
view of its bucket, so that nothing is gathered before the all-reduce or copied back behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor, nn

from cs336_systems.distributed.collectives import Group, MeansUnderWay
from cs336_systems.distributed.ddp import (
    DataParallel,
    agree_on_order,
    arrived_twice,
    call_at_each_gradient,
    dense_gradient,
)

BYTES_PER_MB = 2**20  # as torch's DistributedDataParallel counts its bucket_cap_mb
ALIGNMENT_BYTES = 16  # of each view: the width of a GPU's vector loads


class BucketedDDP(DataParallel):
    """Asynchronous all-reduces of buckets of at most `bucket_size_mb` MiB; None puts everything into one.

    A parameter larger than that has a bucket of its own, and dtypes do not mix. Buckets are sent in the order in which
    they were laid out, from the second step on in that in which rank 0's became full in the first. They stay allocated
    when `zero_grad` sets gradients to None: a new gradient is copied into its place when it arrives, which costs less
    than clearing the bucket and adding to it. Raises ValueError for a size that is not positive and finite.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        group: Group = None,
        *,
        find_unused_parameters: bool = False,
    ) -> None:
        if bucket_size_mb is not None and not (bucket_size_mb > 0 and math.isfinite(bucket_size_mb)):
            raise ValueError(f"bucket_size_mb must be positive and finite, or None, got {bucket_size_mb}")
        super().__init__(module, group, find_unused_parameters=find_unused_parameters)
        limit = math.inf if bucket_size_mb is None else bucket_size_mb * BYTES_PER_MB
        self.buckets = plan_buckets(self.trainable, limit)
        self._flat: list[Tensor] = []  # a bucket's memory
        self._views: dict[int, Tensor] = {}  # a parameter's place in it
        self._bucket_of: dict[int, int] = {}
        for number, bucket in enumerate(self.buckets):
            sizes = [aligned_size(self.trainable[index]) for index in bucket]
            flat = self.trainable[bucket[0]].new_zeros(sum(sizes)).detach()
            for index, offset in zip(bucket, accumulate(sizes, initial=0)):
                parameter = self.trainable[index]
                self._views[index] = flat[offset : offset + parameter.numel()].view(parameter.shape)
                self._bucket_of[index] = number
            self._flat.append(flat)
        self._under_way = MeansUnderWay(group)
        self._order = list(range(len(self.buckets)))
        self._became_full: list[int] | None = []  # in the first step, in their order
        self._end_step()
        call_at_each_gradient(self, self.trainable, BucketedDDP._arrive)

    def _arrive(self, index: int) -> None:
        """The backward has accumulated the gradient of parameter `index`: into its bucket, and send what is full."""
        self._move_in(index)
        if not self.sends:
            return
        missing = self._missing[self._bucket_of[index]]
        if index not in missing:
            raise arrived_twice(self.names[index])
        missing.remove(index)
        if not missing and self._became_full is not None:
            self._became_full.append(self._bucket_of[index])
        while self._sent < len(self._order) and not self._missing[self._order[self._sent]]:
            self._under_way.start(self._flat[self._order[self._sent]])
            self._sent += 1

    def _move_in(self, index: int) -> None:
        """Let the gradient of parameter `index` be the view of its bucket."""
        parameter, view = self.trainable[index], self._views[index]
        if parameter.grad is not view:
            view.copy_(dense_gradient(parameter))
            parameter.grad = view

    def _synchronize(self) -> None:
        for index in range(len(self.trainable)):
            self._move_in(index)  # where no backward of this step has
        for bucket in self._order[self._sent :]:
            self._under_way.start(self._flat[bucket])
        if self._became_full is not None and self.buckets:
            self._order = agree_on_order(self._became_full, self._order, self._flat[0].device, self.group)
            self._became_full = None
        self._end_step()

    def _end_step(self) -> None:
        self._under_way.wait()
        if self._became_full is not None:
            self._became_full = []
        self._missing = [set(bucket) for bucket in self.buckets]  # whose gradients have not arrived
        self._sent = 0  # buckets, in their order


def plan_buckets(parameters: Sequence[Tensor], limit_bytes: float) -> list[list[int]]:
    """Places of consecutive parameters in reverse order, in buckets of one dtype and device within `limit_bytes`."""
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
