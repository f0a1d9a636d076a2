"""What the copy engine (TMA) is told about a tensor, and launches that do not pay for telling it twice.

Kernels here read and write (batch, heads, rows, head_dim) tensors through descriptors of rank 4. The engine then counts
rows within a head: rows past the end arrive as zeros and are not written, and nothing runs over into the next head.
Columns past head_dim are treated alike, so a head of 40 or 96 takes the kernels for 64 or 128.

A descriptor says nothing but address, shape, strides and tile. It is kept under these, without the tensor, whose
memory it must not hold; memory that the allocator hands out again finds it again. `CachedKernel` keeps compiled
kernels likewise. To build four descriptors and bind the arguments takes Triton longer than a short call may take.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from cs336_systems.attention.tiles.config import TMA_ALIGNMENT_BYTES, head_tile
from cs336_systems.attention.triton.descriptors import describable

ELEMENT_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
# A call of forward and backward has about 15; a model's layers have addresses of their own.
KEPT_DESCRIPTORS = 8192


def readable(x: Tensor) -> Tensor:
    """x if TMA can read it, else a contiguous copy with head_dim padded by zeros to rows of whole 16 bytes.

    Expanded dimensions (stride 0, such as the gradient of a sum) and transposed ones are what is copied.
    """
    if x.data_ptr() % TMA_ALIGNMENT_BYTES == 0 and _strides_are_readable(x.shape, x.stride(), x.dtype):
        return x
    width = padded_width(x)
    if width == x.shape[-1]:
        return x.clone(memory_format=torch.contiguous_format)
    padded = x.new_zeros((*x.shape[:-1], width))
    padded[..., : x.shape[-1]] = x
    return padded


@lru_cache(maxsize=KEPT_DESCRIPTORS)
def _strides_are_readable(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    return describable(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))


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


@lru_cache(maxsize=KEPT_DESCRIPTORS)
def input_descriptors(
    q_address: int, k_address: int, v_address: int,
    q_shape: tuple[int, ...], k_shape: tuple[int, ...],
    q_strides: tuple[int, ...], k_strides: tuple[int, ...], v_strides: tuple[int, ...],
    dtype: torch.dtype, query_rows: int, key_rows: int,
) -> tuple[TensorDescriptor, ...] | None:  # fmt: skip
    """The descriptors of q, k and v, found in one step; None if TMA cannot read one of them as it is."""
    columns = head_tile(q_shape[-1])
    operands = (
        (q_address, q_shape, q_strides, query_rows),
        (k_address, k_shape, k_strides, key_rows),
        (v_address, k_shape, v_strides, key_rows),
    )
    if any(address % TMA_ALIGNMENT_BYTES for address, *_ in operands):
        return None
    if not all(_strides_are_readable(shape, strides, dtype) for _, shape, strides, _ in operands):
        return None
    return tuple(
        _descriptor(address, dtype, shape, strides, rows, columns) for address, shape, strides, rows in operands
    )


class _Address(NamedTuple):
    """What a descriptor wants of a tensor, without its memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=KEPT_DESCRIPTORS)
def _descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, columns: int
) -> TensorDescriptor:
    # A dimension of one element may have any stride, and TMA wants an aligned one.
    aligned = TMA_ALIGNMENT_BYTES // dtype.itemsize
    strides = (*(stride if size > 1 else aligned for stride, size in zip(strides[:-1], shape)), 1)
    return TensorDescriptor(
        _Address(address, dtype), list(shape), list(strides), [1, 1, rows, columns], tile_layout(dtype, rows, columns)
    )


@cache
def tile_layout(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], ELEMENT_TYPES[dtype])


class CachedKernel:
    """A Gluon kernel that finds its compiled form by what the caller says of it, and not by inspecting all arguments.

    The kernel must not specialise on its numbers (`do_not_specialize`), integers must fit 32 bits, and tensors passed
    as pointers must start at multiples of 16 bytes, as those do that PyTorch allocates.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: tuple[Hashable, ...],
        dtype: torch.dtype, num_warps: int = 4,
    ) -> None:  # fmt: skip
        """`kernel[grid](*arguments, *constants)` on the current device and stream; descriptors are of `dtype`."""
        # The tiles of the descriptors are types of the kernel, as constants are: another tile is another kernel.
        tiles = tuple([tuple(x.block_shape) for x in arguments if type(x) is TensorDescriptor])
        key = (driver.active.get_current_device(), dtype, num_warps, constants, tiles)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._kernel.warmup(*arguments, *constants, grid=grid, num_warps=num_warps)
            if compiled is None:  # somebody watches the compilation and stops there
                return
            self._compiled[key] = compiled
        compiled[grid](*arguments, *constants)
