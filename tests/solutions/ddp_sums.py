"""Wrong: gradients are summed over the ranks and not averaged."""

import minimal
from minimal import *  # noqa: F403


class Summing(minimal.DDP):
    def finish_gradient_synchronization(self):
        for work, _ in self.works:
            work.wait()
        self.works.clear()


def get_ddp(module):
    return Summing(module)
