"""Data parallelism, fourth stage: gradients live in buckets, and a full bucket is all-reduced while the backward runs.

Between one collective a parameter, whose latencies add up, and one for all, which overlaps with nothing. Buckets are
filled in the reverse order of parameters, about the order in which a backward makes their gradients. A gradient is a
view of its bucket, so that nothing is gathered before the all-reduce or copied back behind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from cs336_systems.distributed.collectives import Group, MeansUnderWay
from cs336_systems.distributed.ddp import LaunchOrder, ReactingDataParallel, dense_gradient

BYTES_PER_MB = 2**20  # as torch's DistributedDataParallel counts its bucket_cap_mb
ALIGNMENT_BYTES = 16  # of each view: the width of a GPU's vector loads


class BucketedDDP(ReactingDataParallel):
    """Asynchronous all-reduces of buckets of at most `bucket_size_mb` MiB; None puts everything into one.

    A parameter larger than that has a bucket of its own, and dtypes do not mix. The buckets stay allocated when
    `zero_grad` sets gradients to None: a new gradient is copied into its place when it arrives, which reads and writes
    it once, less than clearing the bucket and adding to it. A gradient that is there already (`set_to_none=False`, or
    accumulation under `no_sync`) is in its place. Raises ValueError for a size that is not positive and finite.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float | None = 25.0, group: Group = None) -> None:
        if bucket_size_mb is not None and not (bucket_size_mb > 0 and math.isfinite(bucket_size_mb)):
            raise ValueError(f"bucket_size_mb must be positive and finite, or None, got {bucket_size_mb}")
        super().__init__(module, group)
        limit = math.inf if bucket_size_mb is None else bucket_size_mb * BYTES_PER_MB
        self.buckets = plan_buckets(self.trainable, limit)
        self._flat = [
            torch.zeros(bucket.num_elements, dtype=first.dtype, device=first.device)
            for bucket in self.buckets
            for first in [self.trainable[bucket.parameters[0]]]
        ]
        self._views: dict[int, Tensor] = {}  # a parameter's place in `trainable` -> its gradient's place in a bucket
        bucket_of = [0] * len(self.trainable)
        for number, (bucket, flat) in enumerate(zip(self.buckets, self._flat)):
            for index, offset in zip(bucket.parameters, bucket.offsets):
                parameter = self.trainable[index]
                self._views[index] = flat[offset : offset + parameter.numel()].view(parameter.shape)
                bucket_of[index] = number
        self._order = LaunchOrder(bucket_of, group, self._all_used.device)
        self._means = MeansUnderWay(group)
        self._react_to_gradients()

    def _react(self, index: int, gradient: Tensor) -> None:
        self._move_in(index, gradient)
        if self.sends:
            for bucket in self._order.arrive(index):
                self._means.start(self._flat[bucket])

    def _move_in(self, index: int, gradient: Tensor) -> None:
        """Let the gradient of parameter `index` be the view of its bucket."""
        view = self._views[index]
        if gradient is not view:
            view.copy_(gradient)
            self.trainable[index].grad = view

    def _synchronize(self) -> None:
        for index, parameter in enumerate(self.trainable):
            if parameter.grad is not self._views[index]:  # no backward of this step has touched it
                self._move_in(index, dense_gradient(parameter))
        for bucket in self._order.finish():
            self._means.start(self._flat[bucket])
        self._means.wait()


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Which parameters share a bucket (places in the list of parameters) and where in it each begins."""

    parameters: list[int]
    offsets: list[int]  # in elements
    num_elements: int


def plan_buckets(parameters: list[nn.Parameter], limit_bytes: float) -> list[Bucket]:
    """Consecutive parameters in reverse order, in buckets of one dtype and device and at most `limit_bytes` each."""
    plans: list[list[int]] = []
    used_bytes = 0.0
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        size = _aligned(parameter) * parameter.element_size()
        last = parameters[plans[-1][-1]] if plans else None
        fits = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if fits and used_bytes + size <= limit_bytes:
            plans[-1].append(index)
            used_bytes += size
        else:
            plans.append([index])
            used_bytes = size
    return [_lay_out(plan, parameters) for plan in plans]


def _lay_out(plan: list[int], parameters: list[nn.Parameter]) -> Bucket:
    sizes = [_aligned(parameters[index]) for index in plan]
    offsets = [0, *accumulate(sizes)]
    return Bucket(parameters=plan, offsets=offsets[:-1], num_elements=offsets[-1])


def _aligned(parameter: Tensor) -> int:
    """Elements that `parameter` takes in a bucket, so that the next one is aligned."""
    step = max(1, ALIGNMENT_BYTES // parameter.element_size())
    return -(-parameter.numel() // step) * step
