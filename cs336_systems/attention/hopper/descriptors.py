"""What the copy engine (TMA) is told about a tensor.

Kernels here read and write (batch, heads, rows, head_dim) tensors through descriptors of rank 4. The engine then counts
rows within a head: rows past the end arrive as zeros and are not written, and nothing runs over into the next head.
Columns past head_dim are treated alike, so a head of 40 or 96 takes the kernels for 64 or 128.

A descriptor says nothing but address, shape, strides and tile: it holds no tensor's memory.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336_systems.attention.tiles.config import TMA_ALIGNMENT_BYTES, head_tile, tma_reads_rows
from cs336_systems.attention.triton.descriptors import described_strides, strides_are_describable
from cs336_systems.attention.triton.launcher import KEPT_SHAPES

ELEMENT_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def readable(x: Tensor) -> Tensor:
    """x if TMA can read it, else a contiguous copy with head_dim padded by zeros to rows of whole 16 bytes.

    Expanded dimensions (stride 0, such as the gradient of a sum) and transposed ones are what is copied.
    """
    if x.data_ptr() % TMA_ALIGNMENT_BYTES == 0 and strides_are_readable(x.shape, x.stride(), x.dtype):
        return x
    width = padded_width(x)
    if width == x.shape[-1]:
        return x.clone(memory_format=torch.contiguous_format)
    padded = x.new_zeros((*x.shape[:-1], width))
    padded[..., : x.shape[-1]] = x
    return padded


@lru_cache(maxsize=KEPT_SHAPES)
def strides_are_readable(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether TMA can read such a tensor where it starts at a multiple of 16 bytes, and write a contiguous one."""
    width = dtype.itemsize
    return tma_reads_rows(shape[-1], width) and strides_are_describable(shape, strides, width)


def padded_width(x: Tensor) -> int:
    """x's head_dim, up to the next multiple that makes rows of whole 16 bytes."""
    step = TMA_ALIGNMENT_BYTES // x.element_size()
    return -(-x.shape[-1] // step) * step


def tile_descriptor(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """How TMA moves (rows, columns) tiles of x (batch, heads, rows, head_dim); columns: x's head tile by default.

    Tiles lie in shared memory in the widest swizzle that their rows allow, which is what wgmma reads.
    """
    columns = head_tile(x.shape[-1]) if columns is None else columns
    return _descriptor(x.data_ptr(), x.dtype, x.shape, x.stride(), rows, columns)


class _Address(NamedTuple):
    """What a descriptor wants of a tensor, without its memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, columns: int
) -> TensorDescriptor:
    return TensorDescriptor(
        _Address(address, dtype), list(shape), described_strides(shape, strides, dtype.itemsize),
        [1, 1, rows, columns], tile_layout(dtype, rows, columns),
    )  # fmt: skip


@cache
def tile_layout(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], ELEMENT_TYPES[dtype])
