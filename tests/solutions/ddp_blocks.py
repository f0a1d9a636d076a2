"""Wrong: each hook waits for its all-reduce, so that the backward stands still meanwhile."""

import minimal
import torch.distributed as dist
from minimal import *  # noqa: F403


class Blocking(minimal.DDP):
    def reduce(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def finish_gradient_synchronization(self):
        pass


def get_ddp(module):
    return Blocking(module)
