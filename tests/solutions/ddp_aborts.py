"""Wrong: the process is aborted in the backward, as by a failed assertion in C++; the rest is
graded all the same.
"""

import os

import minimal
from minimal import *  # noqa: F403


class Aborting(minimal.DDP):
    def reduce(self, parameter):
        os.abort()


def get_ddp(module):
    return Aborting(module)
