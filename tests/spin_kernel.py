"""Kernels that last as long as they are told, by the GPU's own clock of nanoseconds, at whatever
frequency it runs.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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


@gluon.jit
def hold_kernel(nanoseconds, ends_ptr):
    """128 KiB of shared memory, of which a multiprocessor has no second one, nor that of a large
    kernel's program.
    """
    shared = gl.allocate_shared_memory(gl.int64, [512, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, LAYOUT)
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()
        shared.index(511).store(now + lanes.to(gl.int64))
    gl.store(ends_ptr + gl.program_id(0) * 32 + lanes, shared.index(511).load(LAYOUT))


def hold_multiprocessors(number: int, milliseconds: float) -> None:
    """Keep large programs from so many multiprocessors of the current GPU for so long, on the
    current stream.
    """
    ends = torch.empty(number * 32, dtype=torch.int64, device="cuda")
    hold_kernel[(number,)](round(milliseconds * 1e6), ends, num_warps=1)
