"""Launches of kernels to look at: each function has small inputs, and its page small tiles.

    cs336-systems trace cs336_systems.learning.examples:add_without_masks

`flash_forward` launches the kernel of `attention/triton/first.py` as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_systems.attention.triton.first import flash_fwd_kernel


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, length, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < length if MASKED else offsets >= 0
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, stride, num_columns, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    first = tl.program_id(0) * stride
    x = tl.load(x_ptr + first + columns, mask=inside, other=float("-inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + first + columns, numerator / tl.sum(numerator, axis=0), mask=inside)


def add(length: int = 200, *, masked: bool = True) -> torch.Tensor:
    """Return the sum of two vectors by programs of 64 elements."""
    x, y = (torch.randn(length, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    out = torch.empty(length)
    add_kernel[(triton.cdiv(length, 64),)](x, y, out, length, MASKED=masked, BLOCK=64)
    return out


def add_without_masks() -> torch.Tensor:
    """Return the sum of two vectors of 200 elements; the last program reads and stores past them."""
    return add(masked=False)


def softmax() -> torch.Tensor:
    """Return the softmax of 12 rows of 50 columns, a program a row."""
    x = torch.randn(12, 50, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    softmax_kernel[(12,)](x, out, x.stride(0), 50, BLOCK=64)
    return out


def flash_forward(
    batch: int = 2, length: int = 64, head_dim: int = 16, tile: int = 16, is_causal: bool = True
) -> torch.Tensor:
    """Return the output of FlashAttention-2's forward; with a causal mask it skips tiles of keys."""
    generator = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(batch, length, head_dim, generator=generator) for _ in range(3))
    O, L = torch.empty_like(Q), torch.empty(batch, length)
    flash_fwd_kernel[length // tile, batch](
        Q,
        K,
        V,
        O,
        L,
        *Q.stride(),
        *K.stride(),
        *V.stride(),
        *O.stride(),
        *L.stride(),
        length,
        head_dim**-0.5,
        D=head_dim,
        Q_TILE_SIZE=tile,
        K_TILE_SIZE=tile,
        IS_CAUSAL=is_causal,
    )
    return O
