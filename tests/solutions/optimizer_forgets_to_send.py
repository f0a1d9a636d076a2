"""Wrong: a rank steps its own parameters and does not send them to the others."""

import minimal
from minimal import *  # noqa: F403


class Silent(minimal.ShardedOptimizer):
    def step(self, closure=None, **kwargs):
        if self.inner is not None:
            self.inner.step(closure, **kwargs)


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return Silent(params, optimizer_cls, **kwargs)
