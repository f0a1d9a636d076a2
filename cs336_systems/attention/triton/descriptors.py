"""Descriptors with which Hopper's copy engine (TMA) reads a tile in one instruction, and who may have them.

A thread then computes no addresses and holds none in registers, and rows or columns past the end arrive as zeros.
The engine wants rows that are contiguous and start at multiples of 16 bytes; other inputs take the pointer kernels.

Packed documents, (rows, heads, head_dim), are described as if a sequence began at each row: batch element r is the
tensor from row r on. So a kernel reads a document as it reads any sequence, with its first row for the batch element.
The engine knows the ends of neither the document nor, but for r = 0, the tensor: it may be asked for whole tiles of a
document alone, and those that its end cuts are read by pointers.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.tiles import KernelConfig, head_tile
from cs336_systems.attention.tiles.config import TMA_ALIGNMENT_BYTES, tma_reads_rows
from cs336_systems.attention.triton.launcher import KEPT_SHAPES

QUERY_OPERANDS = ("q", "grad_output")


def describable(*tensors: Tensor) -> bool:
    """Whether TMA can read all of these (batch, heads, rows, head_dim) or packed tensors as they are."""
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
    _check_describable(config, operands)
    return [_describe(x, x.shape, x.stride(), _rows_of_tile(config, name)) for name, x in operands.items()]


def described_documents(config: KernelConfig, **operands: Tensor) -> list[Tensor | TensorDescriptor]:
    """`described` for packed (rows, heads, head_dim) tensors: a descriptor's batch element r begins at row r."""
    if not config.tma:
        return list(operands.values())
    _check_describable(config, operands)
    found: list[Tensor | TensorDescriptor] = []
    for name, x in operands.items():
        (rows, heads, head_dim), (stride_s, stride_h, stride_d) = x.shape, x.stride()
        strides = (stride_s, stride_h, stride_s, stride_d)
        found.append(_describe(x, (rows, heads, rows, head_dim), strides, _rows_of_tile(config, name)))
    return found


def _check_describable(config: KernelConfig, operands: dict[str, Tensor]) -> None:
    for name, x in operands.items():
        if not _is_describable(x):
            raise ValueError(
                f"{config.name} reads tiles by TMA, which needs {name} with contiguous rows at multiples of "
                f"{TMA_ALIGNMENT_BYTES} bytes, got strides {tuple(x.stride())} of {x.element_size()} bytes"
            )


def _rows_of_tile(config: KernelConfig, operand: str) -> int:
    return config.query_tile if operand in QUERY_OPERANDS else config.key_tile


def _is_describable(x: Tensor) -> bool:
    return x.data_ptr() % TMA_ALIGNMENT_BYTES == 0 and strides_are_describable(x.shape, x.stride(), x.element_size())


@lru_cache(maxsize=KEPT_SHAPES)
def strides_are_describable(shape: tuple[int, ...], strides: tuple[int, ...], bytes_per_element: int) -> bool:
    """Whether TMA can read such a tensor where it starts at a multiple of 16 bytes."""
    if torch.empty_strided(shape, strides, device="meta").is_contiguous():
        return tma_reads_rows(shape[-1], bytes_per_element)
    return strides[-1] == 1 and all(
        size == 1 or (stride > 0 and stride * bytes_per_element % TMA_ALIGNMENT_BYTES == 0)
        for size, stride in zip(shape[:-1], strides)
    )


def _describe(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows of x, seen with four dimensions.

    Past the constructor, whose assertions repeat `_is_describable` and would be a third of the host's time in a call.
    """
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape = x, list(shape)
    descriptor.strides = described_strides(shape, strides, x.element_size())
    descriptor.block_shape = [1, 1, rows, head_tile(shape[-1])]
    return descriptor


def described_strides(shape: tuple[int, ...], strides: tuple[int, ...], bytes_per_element: int) -> list[int]:
    """A tensor's strides; that of a dimension of one element is any number, and descriptors want an aligned one."""
    aligned = TMA_ALIGNMENT_BYTES // bytes_per_element
    return [stride if size > 1 else aligned for stride, size in zip(strides[:-1], shape)] + [1]
