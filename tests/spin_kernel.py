"""A kernel that lasts as long as it is told, by the GPU's own clock of nanoseconds, at whatever frequency it runs."""

from __future__ import annotations

import triton
from triton.language.extra.cuda import globaltimer


@triton.jit
def spin_kernel(nanoseconds):
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()


def spin(milliseconds: float) -> None:
    """Occupy the current stream of the current GPU for so long."""
    spin_kernel[(1,)](round(milliseconds * 1e6), num_warps=1)
