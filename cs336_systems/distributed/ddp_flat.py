"""Data parallelism, second stage: after the backward, all-reduce the gradients as one long vector.

One latency instead of hundreds, and a message long enough for the link's full bandwidth; in
exchange every gradient is copied twice and needs its memory twice, and still nothing overlaps.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from cs336_systems.distributed.collectives import Group, all_reduce_mean
from cs336_systems.distributed.ddp import DataParallel, dense_gradient


class FlatDDP(DataParallel):
    """One all-reduce for all parameters of a dtype (and device)."""

    def _synchronize(self) -> None:
        average_flat(
            [dense_gradient(parameter) for parameter in self.trainable if parameter.numel()],
            self.group,
        )


def average_flat(gradients: list[Tensor], group: Group) -> None:
    """Replace gradients, in the same order on every rank, by their means: a message a dtype and
    device.
    """
    together = defaultdict(list)
    for gradient in gradients:
        together[gradient.dtype, gradient.device].append(gradient)
    for alike in together.values():
        flat = _flatten_dense_tensors(alike)
        all_reduce_mean(flat, group)
        torch._foreach_copy_(alike, _unflatten_dense_tensors(flat, alike))
