"""Data parallelism, first stage: after the backward, all-reduce the gradients one by one.

Every parameter pays the latency of a collective of its own, and the GPU computes nothing meanwhile.
When it is wrapped, `DataParallel` (ddp.py) compares the ranks' shapes and broadcasts rank 0's
parameters and buffers.
"""

from __future__ import annotations

from cs336_systems.distributed.collectives import all_reduce_mean
from cs336_systems.distributed.ddp import DataParallel, dense_gradient


class NaiveDDP(DataParallel):
    """One all-reduce a parameter, each waited for before the next begins."""

    def _synchronize(self) -> None:
        for parameter in self.trainable:
            all_reduce_mean(dense_gradient(parameter), self.group)
