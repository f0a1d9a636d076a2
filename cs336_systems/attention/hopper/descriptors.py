"""What the copy engine (TMA) is told about a tensor.

The Hopper kernels read and write (batch, heads, rows, head_dim) tensors through descriptors of rank
4. The engine then counts rows within a head: rows past the end arrive as zeros and are not written,
and nothing runs over into the next head. Columns past head_dim are treated alike, so a head of 40
or 90 columns takes the kernels for 64 or 96.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336_systems.attention.tiles.kernel_config import TMA_ALIGNMENT_BYTES, head_tile
from cs336_systems.attention.triton.launch import describable, described_strides, rows_are_aligned

ROWS_OF_DOCUMENTS = 2**30  # length of the rows' dimension, see `document_descriptor`
ELEMENT_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def readable(x: Tensor) -> Tensor:
    """Return x if TMA can read it, else a contiguous copy with head_dim padded to whole 16 bytes.

    The padding is zeros. Expanded dimensions (stride 0, such as the gradient of a sum) and
    transposed ones are what is copied.
    """
    if describable(x) and rows_are_aligned(x):  # results are contiguous, whatever rows x lies in
        return x
    width = padded_width(x)
    if width == x.shape[-1]:
        return x.clone(memory_format=torch.contiguous_format)
    padded = x.new_zeros((*x.shape[:-1], width))
    padded[..., : x.shape[-1]] = x
    return padded


def padded_width(x: Tensor) -> int:
    """Return x's head_dim, rounded up so that a row has a multiple of 16 bytes."""
    step = TMA_ALIGNMENT_BYTES // x.element_size()
    return -(-x.shape[-1] // step) * step


def tile_descriptor(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Return the descriptor by which TMA moves (rows, columns) tiles of x.

    x is (batch, heads, rows, head_dim); `columns` is x's head tile by default. Tiles lie in shared
    memory in the widest swizzle that their rows allow, which is what wgmma reads.
    """
    block = [1, 1, rows, head_tile(x.shape[-1]) if columns is None else columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENT_TYPES[x.dtype])
    return TensorDescriptor(
        x, list(x.shape), described_strides(x.shape, x.stride(), x.element_size()), block, layout
    )


def words_descriptor(words: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the descriptor by which TMA copies (rows, columns) pieces of a mask's bits.

    `words` (rows of all patterns, words) is int32 and contiguous.
    """
    if words.data_ptr() % TMA_ALIGNMENT_BYTES:
        words = words.clone()
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.int32)
    return TensorDescriptor(words, list(words.shape), list(words.stride()), block, layout)


def document_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Return the descriptor by which TMA moves (rows, head_dim) tiles of packed documents.

    x is (total, heads, head_dim). Row r of the document of n rows from row f on is at [N, f + n,
    head, N - n + r, 0]. N, ROWS_OF_DOCUMENTS, is the length of the fourth dimension: rows past the
    document's end are past the dimension's, so they arrive as zeros and are not written. N times
    the first stride, in bytes, is a multiple of 2^64 less N rows, and addresses are counted modulo
    2^64. Source: `triton.tools.ragged_tma`.
    """
    block = [1, 1, 1, rows, head_tile(x.shape[-1])]
    total, heads, head_dim = x.shape
    row, head, _ = described_strides((total, heads, head_dim), x.stride(), x.element_size())
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENT_TYPES[x.dtype])
    shape = [
        2 * ROWS_OF_DOCUMENTS - 1,
        2 * ROWS_OF_DOCUMENTS - 1,
        heads,
        ROWS_OF_DOCUMENTS,
        head_dim,
    ]
    return TensorDescriptor(x, shape, [2**34 - row, row, head, row, 1], block, layout)
