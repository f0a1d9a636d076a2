"""One check and one message for each way the arguments of a mask's constructor can be wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from cs336_systems.attention.masks.tiles import MIN_BLOCK, BlockSize, num_blocks


def check_block_size(block_size: int | BlockSize) -> BlockSize:
    """(query_block, key_block), powers of two from MIN_BLOCK on; one int is both."""
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    if len(sizes) != 2 or not whole or any(size < MIN_BLOCK or size & (size - 1) for size in sizes):
        raise ValueError(f"block_size must be a power of two from {MIN_BLOCK} on, or two of them, got {block_size!r}")
    return sizes[0], sizes[1]


def check_tensor(name: str, tensor: Tensor, sides: tuple[str, str], dtype: torch.dtype | None) -> Tensor:
    """`tensor` with four dimensions, of `dtype` (None: any floating one)."""
    wanted = "bool" if dtype is torch.bool else "floating"
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() if dtype is None else tensor.dtype == dtype):
        raise TypeError(f"{name} must be a {wanted} tensor, got {kind_of(tensor)}")
    if tensor.ndim not in (2, 4):
        raise ValueError(
            f"{name} must have shape ({', '.join(sides)}) or (batch or 1, heads or 1, {', '.join(sides)}), "
            f"got {tuple(tensor.shape)}"
        )
    return tensor if tensor.ndim == 4 else tensor[None, None]


def check_lengths(tiles: Tensor, block_size: BlockSize, seq_lengths: tuple[int, int] | None) -> tuple[int, int]:
    """`seq_lengths`, or those of whole tiles; they must be cut into as many tiles as `tiles` has."""
    shape = (tiles.shape[2], tiles.shape[3])
    if seq_lengths is None:
        return shape[0] * block_size[0], shape[1] * block_size[1]
    lengths = check_seqlens(*seq_lengths)
    if tuple(map(num_blocks, lengths, block_size)) != shape:
        raise ValueError(
            f"seq_lengths {lengths} are {tuple(map(num_blocks, lengths, block_size))} tiles of {block_size}, "
            f"got {shape} tiles"
        )
    return lengths


def check_seqlens(seqlen_q: int, seqlen_k: int | None) -> tuple[int, int]:
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    check_count("seqlen_q", seqlen_q, 0)
    check_count("seqlen_k", seqlen_k, 0)
    return seqlen_q, seqlen_k


def check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int from {least} on, got {value!r}")


def check_density(density: float) -> None:
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 <= density <= 1:
        raise ValueError(f"density must be between 0 and 1, got {density!r}")


def kind_of(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
