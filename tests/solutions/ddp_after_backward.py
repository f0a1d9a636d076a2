"""Wrong: all gradients are sent when the backward has ended."""

import minimal
import torch.distributed as dist
from minimal import *  # noqa: F403


class Late(minimal.DDP):
    def reduce(self, parameter):
        pass

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def get_ddp(module):
    return Late(module)
