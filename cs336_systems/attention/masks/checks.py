"""What the arguments of a mask's constructors must be; every message names the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cs336_systems.attention.masks.tiles import MAX_BLOCK, MIN_BLOCK, BlockSize, num_blocks

Device = torch.device | str
FLOATING_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # torch computes with no others
MOST = 2**31 - 1  # tokens, batch entries or heads: kernels number them in 32 bits


def check_block_size(block_size: int | BlockSize) -> BlockSize:
    """(query_block, key_block), powers of two from MIN_BLOCK to MAX_BLOCK; one int is both."""
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    if len(sizes) != 2 or not whole or any(not MIN_BLOCK <= n <= MAX_BLOCK or n & (n - 1) for n in sizes):
        raise ValueError(
            f"block_size must be a power of two from {MIN_BLOCK} to {MAX_BLOCK}, or two of them, got {block_size!r}"
        )
    return sizes[0], sizes[1]


def check_tensor(
    name: str, tensor: Tensor, shapes: dict[int, str] | None = None, dtypes: tuple[torch.dtype, ...] = FLOATING_DTYPES
) -> Tensor:
    """`tensor` if it is dense, of one of `dtypes` and one of `shapes` (dimensions: how to write them)."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be a tensor of {wanted}, got {kind_of(tensor)}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind_found = "a nested one" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} must be a dense strided tensor, got {kind_found}")
    if shapes is not None and tensor.ndim not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(shapes.values())}, got {tuple(tensor.shape)}")
    return tensor


def check_seqlens(seqlen_q: int, seqlen_k: int | None) -> tuple[int, int]:
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    return check_count("seqlen_q", seqlen_q), check_count("seqlen_k", seqlen_k)


def check_lengths(tiles: Tensor, block_size: BlockSize, seq_lengths: tuple[int, int] | None) -> tuple[int, int]:
    """`seq_lengths`, or those of whole tiles; they must be cut into as many tiles as `tiles` has."""
    shape = tuple(tiles.shape[-2:])
    if seq_lengths is None:
        return shape[0] * block_size[0], shape[1] * block_size[1]
    if not isinstance(seq_lengths, tuple) or len(seq_lengths) != 2:
        raise TypeError(f"seq_lengths must be a tuple of queries and keys, got {seq_lengths!r}")
    lengths = check_count("seq_lengths", seq_lengths[0]), check_count("seq_lengths", seq_lengths[1])
    wanted = tuple(map(num_blocks, lengths, block_size))
    if wanted != shape:
        raise ValueError(f"seq_lengths {lengths} are {wanted} tiles of {block_size}, got {shape} tiles")
    return lengths


def check_count(name: str, value: int, least: int = 0, most: int | None = MOST) -> int:
    """`value` if it is an int from `least` to `most`; of what may be more than there are, `most` is None."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < least:
        raise ValueError(f"{name} must be an int from {least} on, got {brief(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {brief(value)}")
    return value


def check_document_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """The lengths as a list of ints."""
    if isinstance(lengths, Tensor):
        lengths = check_tensor("lengths", lengths, {1: "(documents,)"}, (torch.int32, torch.int64)).tolist()
    if not isinstance(lengths, Sequence) or isinstance(lengths, str):
        raise TypeError(f"lengths must be a sequence of ints, got {kind_of(lengths)}")
    found = [check_count("lengths", length) for length in lengths]
    check_count("the sum of lengths", sum(found))
    return found


def check_draw(density: float, seed: int, batch: int, heads: int) -> None:
    """What a random mask is drawn with."""
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 <= density <= 1:
        raise ValueError(f"density must be between 0 and 1, got {density!r}")
    check_count("seed", seed, -(2**63), 2**63 - 1)
    check_count("batch", batch, 1)
    check_count("heads", heads, 1)


def check_flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return value


def has_values(tensor: Tensor) -> bool:
    """Whether the host can look at `tensor` for nothing: it is on the CPU, real, and nobody traces."""
    if not tensor.is_cpu or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return type(tensor) is Tensor and not torch._C._len_torch_dispatch_stack()


def brief(value: object) -> str:
    """`value` for a message; of a very large integer how large it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def kind_of(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
