"""Descriptors with which Hopper's copy engine (TMA) reads a tile in one instruction, and who may have them.

A thread then computes no addresses and holds none in registers, and rows or columns past the end arrive as zeros.
The engine wants rows that are contiguous and start at multiples of 16 bytes; other inputs take the pointer kernels.
"""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.tiles import KernelConfig, head_tile
from cs336_systems.attention.tiles.config import TMA_ALIGNMENT_BYTES, tma_reads_rows

QUERY_OPERANDS = ("q", "grad_output")


def describable(*tensors: Tensor) -> bool:
    """Whether TMA can read all of these (batch, heads, rows, head_dim) tensors as they are."""
    return all(_is_describable(x) for x in tensors)


def rows_are_aligned(x: Tensor) -> bool:
    """Whether TMA can read a contiguous copy of x."""
    return tma_reads_rows(x.shape[-1], x.element_size())


def described(config: KernelConfig, **operands: Tensor) -> list[Tensor | TensorDescriptor]:
    """`operands` as a kernel under `config` takes them: themselves, or descriptors of tiles where the config says TMA.

    ValueError naming the operand that TMA cannot read.
    """
    if not config.tma:
        return list(operands.values())
    for name, x in operands.items():
        if not _is_describable(x):
            raise ValueError(
                f"{config.name} reads tiles by TMA, which needs {name} with contiguous rows at multiples of "
                f"{TMA_ALIGNMENT_BYTES} bytes, got strides {tuple(x.stride())} of {x.element_size()} bytes"
            )
    return [
        _describe(x, config.query_tile if name in QUERY_OPERANDS else config.key_tile) for name, x in operands.items()
    ]


def _is_describable(x: Tensor) -> bool:
    if x.data_ptr() % TMA_ALIGNMENT_BYTES:
        return False
    if x.is_contiguous():
        return rows_are_aligned(x)
    *strides, last = x.stride()
    if last != 1:
        return False
    width = x.element_size()
    for size, stride in zip(x.shape, strides):
        if size > 1 and (stride <= 0 or stride * width % TMA_ALIGNMENT_BYTES):
            return False
    return True


def _describe(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows of x.

    Past the constructor, whose assertions repeat `_is_describable` and would be a third of the host's time in a call.
    """
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = x, list(x.shape), _strides(x)
    descriptor.block_shape = [1, 1, rows, head_tile(x.shape[-1])]
    return descriptor


def _strides(x: Tensor) -> list[int]:
    """x's strides; that of a dimension of one element is any number, and the descriptor wants an aligned one."""
    aligned = TMA_ALIGNMENT_BYTES // x.element_size()
    return [stride if size > 1 else aligned for stride, size in zip(x.stride()[:-1], x.shape[:-1])] + [1]
