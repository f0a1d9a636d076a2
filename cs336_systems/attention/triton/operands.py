"""What launchers give a kernel: tensors or descriptors of them, a grid, and compile-time options.

With a descriptor Hopper's copy engine (TMA) reads a tile in one instruction: a thread computes no addresses and holds
none in registers, and rows or columns past the end arrive as zeros. The engine wants rows that are contiguous and start
at multiples of 16 bytes; other inputs take the pointer kernels.

Packed documents, (rows, heads, head_dim), are described as if a sequence began at each row: batch element r is the
tensor from row r on. So a kernel reads a document as it reads any sequence, with its first row for the batch element.
The engine knows the ends of neither the document nor, but for r = 0, the tensor: it may be asked for whole tiles of a
document alone, and those that its end cuts are read by pointers.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.masks.tiles import TileLists
from cs336_systems.attention.tiles import KernelConfig, head_tile
from cs336_systems.attention.tiles.config import TMA_ALIGNMENT_BYTES, tma_reads_rows
from cs336_systems.attention.triton.launch import empty, empty_like
from cs336_systems.attention.triton.steps import Tiles

# Shapes of what launchers take and return; values have the shape of keys.
Queries = Float[Tensor, "batch heads queries head_dim"]
Keys = Float[Tensor, "batch kv_heads keys head_dim"]
Rows = Float[Tensor, "batch heads queries"]  # a number for each query: L, delta
PackedQueries = Float[Tensor, "total_queries heads head_dim"]
PackedKeys = Float[Tensor, "total_keys kv_heads head_dim"]
PackedRows = Float[Tensor, "heads total_queries"]
Boundaries = Int[Tensor, " documents_plus_1"]

QUERY_OPERANDS = ("q", "grad_output")
MAX_GROUPED_ROWS = 64  # of a tile of 16-bit elements on sm_90; smaller ones take two or four
MAX_COLUMN_OFFSET = 2**31


# Descriptors


def describable(*tensors: Tensor) -> bool:
    """Whether TMA can read all of these (batch, heads, rows, head_dim) or packed tensors as they are."""
    return all(_is_describable(x) for x in tensors)


def _is_describable(x: Tensor) -> bool:
    if x.data_ptr() % TMA_ALIGNMENT_BYTES:
        return False
    if x.is_contiguous():
        return rows_are_aligned(x)
    width = x.element_size()
    return x.stride(-1) == 1 and all(
        size == 1 or (stride > 0 and stride * width % TMA_ALIGNMENT_BYTES == 0)
        for size, stride in zip(x.shape[:-1], x.stride())
    )


def rows_are_aligned(x: Tensor) -> bool:
    """Whether TMA can read a contiguous copy of x."""
    return tma_reads_rows(x.shape[-1], x.element_size())


def described(config: KernelConfig, *, packed: bool = False, **operands: Tensor) -> list[Tensor | TensorDescriptor]:
    """`operands` as a kernel under `config` takes them: themselves, or descriptors of tiles where the config says TMA.

    `packed`: of (rows, heads, head_dim) tensors batch element r begins at row r. ValueError naming the operand that TMA
    cannot read.
    """
    if not config.tma:
        return list(operands.values())
    found: list[Tensor | TensorDescriptor] = []
    for name, x in operands.items():
        if not _is_describable(x):
            raise ValueError(
                f"{config.name} reads tiles by TMA, which needs {name} with contiguous rows at multiples of "
                f"{TMA_ALIGNMENT_BYTES} bytes, got strides {tuple(x.stride())} of {x.element_size()} bytes"
            )
        shape, strides = tuple(x.shape), x.stride()
        if packed:
            shape, strides = (shape[0], shape[1], shape[0], shape[2]), (strides[0], strides[1], strides[0], strides[2])
        rows = config.query_tile if name in QUERY_OPERANDS else config.key_tile
        block = [1, 1, rows, head_tile(shape[-1])]
        found.append(TensorDescriptor(x, list(shape), described_strides(shape, strides, x.element_size()), block))
    return found


def described_strides(shape: tuple[int, ...], strides: tuple[int, ...], bytes_per_element: int) -> list[int]:
    """A tensor's strides; that of a dimension of one element is any number, and descriptors want an aligned one."""
    aligned = TMA_ALIGNMENT_BYTES // bytes_per_element
    return [stride if size > 1 else aligned for stride, size in zip(strides[:-1], shape)] + [1]


# Grids and compile-time options


def num_tiles(rows: int, tile: int) -> int:
    """`rows` over `tile`, rounded up."""
    return -(-rows // tile)


def grid_of(config: KernelConfig, q: Tensor, k: Tensor) -> tuple[int]:
    """A program for each tile of each head: of queries, or under a dkdv configuration of keys and their heads."""
    x, tile = (k, config.key_tile) if config.kernel == "dkdv" else (q, config.query_tile)
    batch, heads, rows, _ = x.shape
    return (num_tiles(rows, tile) * batch * heads,)


def tile_options(config: KernelConfig, head_dim: int, lists: TileLists | None = None) -> dict[str, Any]:
    """What a kernel is told of its configuration, and of the tiles of a block mask."""
    block_size, stages = (0, 0), config.num_stages
    if lists is not None:
        # A tile's address hangs on a load of its index, and Triton spreads the two loads over its stages: it takes
        # these many for as many tiles in flight as the dense kernels have with config.num_stages.
        block_size, stages = lists.block_size, 2 * stages - 1
    tiles = Tiles(
        D=head_dim, D_TILE=head_tile(head_dim), Q_TILE_SIZE=config.query_tile, K_TILE_SIZE=config.key_tile,
        PRECISION=config.precision, Q_BLOCK=block_size[0], K_BLOCK=block_size[1],
    )  # fmt: skip
    return {"TILES": tiles, "num_warps": config.num_warps, "num_stages": stages}


# Memory


def empty_results(q: Queries) -> tuple[Queries, Rows]:
    """Where a forward of q writes: contiguous O in q's dtype, and L in float32."""
    return empty_like(q), empty(q.shape[:3], torch.float32, q.device)


def within_reach(x: Any) -> Any:
    """`x`, or a contiguous copy of a tensor whose columns are too far apart: kernels count those in 32 bits."""
    if isinstance(x, Tensor) and x.ndim and (x.shape[-1] - 1) * x.stride(-1) >= MAX_COLUMN_OFFSET:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def rows_of_groups(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """q (batch, heads, queries, head_dim) as a forward without a mask reads it: few queries together in tiles.

    Query heads that share a key head are then rows of one, (batch, kv_heads, group * queries, head_dim), a view: their
    programs would read the same keys each and leave the rest of their tile empty, as where one token is generated. Else
    q itself. O and L are contiguous, so their memory is the same either way.
    """
    batch, heads, queries, head_dim = q.shape
    kv_heads = k.shape[1]
    if heads == kv_heads or is_causal or heads // kv_heads * queries > MAX_GROUPED_ROWS:
        return q
    stride_b, stride_h, stride_s, stride_d = q.stride()
    if queries > 1 and stride_h != queries * stride_s:
        return q
    group = heads // kv_heads
    row_stride = stride_h if queries == 1 else stride_s
    size = (batch, kv_heads, group * queries, head_dim)
    return q.as_strided(size, (stride_b, stride_h * group, row_stride, stride_d))


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 0 of what is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
