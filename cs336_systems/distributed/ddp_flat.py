"""Data parallelism, second stage: after the backward, all-reduce the gradients as one long vector.

A step pays one latency instead of hundreds, and the message is long enough for the link's full
bandwidth. In exchange every gradient is copied twice and needs its memory twice, and communication
still does not overlap with the backward.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import Group, all_reduce_mean
from cs336_systems.distributed.ddp import DataParallel


class FlatDDP(DataParallel):
    """Average gradients after the backward by one all-reduce per dtype and device."""

    def _synchronize(self) -> None:
        """Average the gradients of all parameters that have elements."""
        average_flat(
            [guards.dense_gradient(parameter) for parameter in self.trainable if parameter.numel()],
            self.group,
        )


def average_flat(gradients: list[Tensor], group: Group) -> None:
    """Replace each gradient by its mean over the ranks, with one message per dtype and device.

    Every rank must pass the gradients in the same order.
    """
    together = defaultdict(list)
    for gradient in gradients:
        together[gradient.dtype, gradient.device].append(gradient)

    # copy into one vector, average it, copy back
    for alike in together.values():
        flat = _flatten_dense_tensors(alike)
        all_reduce_mean(flat, group)
        torch._foreach_copy_(alike, _unflatten_dense_tensors(flat, alike))
