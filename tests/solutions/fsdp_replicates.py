"""Wrong: nothing is sharded; gradients are averaged, so the training is right."""

import minimal
from minimal import *  # noqa: F403


class Replicated(minimal.DDP):
    def __init__(self, module):
        super().__init__(module)
        self.shards = {}


def get_fsdp(module, compute_dtype=None):
    return Replicated(module)


def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.finish_gradient_synchronization()
