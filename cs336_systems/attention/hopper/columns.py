"""Matmuls over the columns of heads: 32, 64, 128 or 256 at once, or 96 in parts of 64 and 32.

Shapes are powers of two. At head dims from 65 to 96 tiles have 128 columns, of which TMA fills the
last with zeros. The scores leave out 32 of them. In the backward dP, dK and dV do too, and the sums
are tuples of their parts by columns: one part, or of 96 columns two. The forward's P V has all 128
columns: in parts it took longer (docs/log.md). At head dims up to 32 both products of the forward
have 32 columns, the first of a tile of 64.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from cs336_systems.attention.hopper.builtins import mma_layout

ROWS = gl.constexpr(64)  # of a warp group's product


@gluon.jit
def in_parts(tile, COLUMNS: gl.constexpr):
    """Return a tile of shared memory as a tuple of parts by columns: two of 96, else one."""
    if COLUMNS == 32:
        return (tile.slice(0, 32, dim=1),)
    elif COLUMNS == 96:
        return tile.slice(0, 64, dim=1), tile.slice(64, 32, dim=1)
    else:
        return (tile,)


@gluon.jit
def first_columns(tile, COLUMNS: gl.constexpr):
    """Return the first COLUMNS columns of a tile of shared memory."""
    if tile.shape[1] == COLUMNS:
        return tile
    else:
        return tile.slice(0, COLUMNS, dim=1)


@gluon.jit
def load_parts(parts, LAYOUT: gl.constexpr):
    """Return the parts of a tile of shared memory in registers, in LAYOUT."""
    if len(parts) == 2:
        return parts[0].load(LAYOUT), parts[1].load(LAYOUT)
    else:
        return (parts[0].load(LAYOUT),)


@gluon.jit
def over_columns(A, B, COLUMNS: gl.constexpr):
    """Return A Bᵀ (ROWS, rows of B) in flight; A is a tuple of parts, B a tile of shared memory."""
    KEYS: gl.constexpr = B.shape[0]
    zeros = gl.zeros([ROWS, KEYS], gl.float32, mma_layout(KEYS))  # only the layout is used
    B = in_parts(B, COLUMNS)
    AB = warpgroup_mma(A[0], B[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    if COLUMNS == 96:
        return warpgroup_mma(A[1], B[1].permute((1, 0)), AB, is_async=True)
    else:
        return AB


@gluon.jit
def zero_sums(COLUMNS: gl.constexpr):
    """Return sums of zero (ROWS, COLUMNS), as a tuple of parts by columns."""
    if COLUMNS == 96:
        left = gl.zeros([ROWS, 64], gl.float32, mma_layout(64))
        return left, gl.zeros([ROWS, 32], gl.float32, mma_layout(32))
    else:
        return (gl.zeros([ROWS, COLUMNS], gl.float32, mma_layout(COLUMNS)),)


@gluon.jit
def _as_operand(A, sums):
    """Return A in registers as the left operand of a product that is added to `sums`."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums.type.layout, k_width=2)
    return gl.convert_layout(A, LAYOUT)


@gluon.jit
def add_product(sums, A, B, COLUMNS: gl.constexpr):
    """Return `sums` + A B in flight; A is in registers, B a tile of shared memory."""
    B = in_parts(B, COLUMNS)
    left = warpgroup_mma(_as_operand(A, sums[0]), B[0], sums[0], is_async=True)
    if COLUMNS == 96:
        return left, warpgroup_mma(_as_operand(A, sums[1]), B[1], sums[1], is_async=True)
    else:
        return (left,)


@gluon.jit
def await_sums(sums, PENDING: gl.constexpr):
    """Wait until at most PENDING matmuls are in flight, then return `sums`."""
    if len(sums) == 2:
        return warpgroup_mma_wait(PENDING, [sums[0], sums[1]])
    else:
        return (warpgroup_mma_wait(PENDING, [sums[0]]),)


@gluon.jit
def store_sums(tile, sums, scale):
    """Store `scale` times `sums` in a tile of shared memory, in the tile's dtype."""
    if len(sums) == 2:
        tile.slice(0, 64, dim=1).store((sums[0] * scale).to(tile.dtype))
        tile.slice(64, 32, dim=1).store((sums[1] * scale).to(tile.dtype))
    else:
        tile.store((sums[0] * scale).to(tile.dtype))
