"""One check and one message for each way the arguments of a mask's constructor can be wrong."""

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


def check_tensor(name: str, tensor: Tensor, sides: tuple[str, str], dtype: torch.dtype | None) -> Tensor:
    """`tensor` with four dimensions, of `dtype` (None: any floating one that torch sorts)."""
    wanted = "a bool tensor" if dtype is torch.bool else "a floating tensor of 16 bits or more"
    if not isinstance(tensor, Tensor) or tensor.dtype not in (FLOATING_DTYPES if dtype is None else (dtype,)):
        raise TypeError(f"{name} must be {wanted}, got {kind_of(tensor)}")
    check_storage(name, tensor)
    if tensor.ndim not in (2, 4):
        raise ValueError(
            f"{name} must have shape ({', '.join(sides)}) or (batch or 1, heads or 1, {', '.join(sides)}), "
            f"got {tuple(tensor.shape)}"
        )
    return tensor if tensor.ndim == 4 else tensor[None, None]


def check_storage(name: str, tensor: Tensor) -> None:
    """Raise unless `tensor` is dense and has values."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} must be a dense strided tensor, got {kind}")
    if tensor.is_meta:
        raise ValueError(f"{name} must have values, got a tensor on meta; a finished mask may move .to('meta')")


def check_lengths(tiles: Tensor, block_size: BlockSize, seq_lengths: tuple[int, int] | None) -> tuple[int, int]:
    """`seq_lengths`, or those of whole tiles; they must be cut into as many tiles as `tiles` has."""
    shape = (tiles.shape[2], tiles.shape[3])
    if seq_lengths is None:
        return shape[0] * block_size[0], shape[1] * block_size[1]
    if not isinstance(seq_lengths, tuple) or len(seq_lengths) != 2:
        raise TypeError(f"seq_lengths must be a tuple of queries and keys, got {seq_lengths!r}")
    for length in seq_lengths:
        check_count("seq_lengths", length, 0)
    lengths = (seq_lengths[0], seq_lengths[1])
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


def check_count(name: str, value: int, least: int, most: int | None = MOST) -> None:
    """Raise unless `value` is an int from `least` to `most`; of what may be more than there are, `most` is None."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int from {least} on, got {brief(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {brief(value)}")


def check_document_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """The lengths as a list of ints."""
    vector = lengths.ndim == 1 if isinstance(lengths, Tensor) else isinstance(lengths, Sequence)
    if not vector or isinstance(lengths, str):
        raise TypeError(f"lengths must be a sequence of ints, got {kind_of(lengths)}")
    if isinstance(lengths, Tensor):
        check_storage("lengths", lengths)
    found = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    for length in found:
        check_count("lengths", length, 0)
    check_count("the sum of lengths", sum(found), 0)
    return found


def check_density(density: float) -> None:
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 <= density <= 1:
        raise ValueError(f"density must be between 0 and 1, got {density!r}")


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an int of 64 bits, got {brief(seed)}")


def check_device(device: Device, *, with_values: bool = True) -> torch.device:
    """`device` as a torch.device, on which tensors can be made here; ones `with_values`, as building a mask needs."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a torch.device or its name, got {device!r}") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must be one of this machine, which has {torch.cuda.device_count()} GPUs, got {found}")
    if with_values and found.type == "meta":
        raise ValueError("device must be one whose tensors have values, got meta; a finished mask may move .to('meta')")
    return found


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
