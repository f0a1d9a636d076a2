"""Kernels of one tile around instructions of `attention/hopper/builtins.py`: tests compare them
with arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cs336_systems.attention.hopper.builtins import by_threads, raise_maxima, rescale_rows

ROWS, COLUMNS, SHARERS = 64, 128, 4


@gluon.jit
def raise_kernel(S_ptr, m_ptr, raised_ptr, own_ptr):
    """Of scores (64, 128) and maxima (64): those raised and each thread's own, both (64, 4)."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    own = gl.max(
        gl.max(by_threads(gl.load(S_ptr + rows[:, None] * 128 + columns[None, :])), axis=3), axis=1
    )
    threads = gl.arange(0, 4, gl.SliceLayout(0, own.type.layout))
    rows = gl.arange(0, 64, gl.SliceLayout(1, own.type.layout))
    places = rows[:, None] * 4 + threads[None, :]
    raised = raise_maxima(own, gl.load(m_ptr + rows[:, None] + threads[None, :] * 0))
    gl.store(raised_ptr + places, gl.convert_layout(raised, own.type.layout))
    gl.store(own_ptr + places, own)


@gluon.jit
def rescale_kernel(pointer):
    """Rows of (64, 128) times their factors, which lie behind them."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    pointers = pointer + rows[:, None] * 128 + columns[None, :]
    accumulator = gl.load(pointers)
    SHARED: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_threads(accumulator).type.layout))
    rows, threads = (
        gl.arange(0, 64, gl.SliceLayout(1, SHARED)),
        gl.arange(0, 4, gl.SliceLayout(0, SHARED)),
    )
    factor = gl.load(pointer + 8192 + rows[:, None] + threads[None, :] * 0)
    gl.store(pointers, rescale_rows(accumulator, factor))


def raised_maxima(scores: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """What `raise_kernel` makes of scores (64, 128) and maxima (64) on a GPU."""
    raised, own = (torch.empty(ROWS, SHARERS, device=scores.device) for _ in range(2))
    raise_kernel[(1,)](scores, maxima, raised, own, num_warps=4)
    return raised, own
