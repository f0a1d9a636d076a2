"""Data parallelism, first stage: after the backward, all-reduce the gradients one by one.

Every parameter pays the latency of its own collective, and the GPU computes nothing meanwhile. The
base class `DataParallel` (ddp.py) compares the ranks' shapes and broadcasts rank 0's parameters and
buffers when a module is wrapped.
"""

from __future__ import annotations

from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import all_reduce_mean
from cs336_systems.distributed.ddp import DataParallel


class NaiveDDP(DataParallel):
    """Average gradients after the backward by one all-reduce per parameter, one after the other."""

    def _synchronize(self) -> None:
        """All-reduce each gradient in place, and wait for it before the next one starts."""
        for parameter in self.trainable:
            all_reduce_mean(guards.dense_gradient(parameter), self.group)
