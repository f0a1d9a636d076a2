"""Masks by name, for the command line and the records: `parse_mask("random:0.1+causal", seqlen=4096)`.

full                     every pair
causal                   keys up to the query's own position
window:512               the 512 most recent keys
document:1000,24,3072    packed documents of these lengths
dilated:2048/4           segments of 2048 tokens at rate 4
random:0.1               a tenth of the tiles, at random
tokens:0.1               a tenth of the pairs, at random
topk:256                 of each query's visible keys the 256 of highest (random) bias
shared:256               of all keys the 256 of highest (random) bias, the same for every query
a+b                      what both attend
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.attention.masks.block_mask import DEFAULT_BLOCK, BlockMask
from cs336_systems.attention.masks.checks import Device, check_block_size, check_count, check_seed
from cs336_systems.attention.masks.tiles import BlockSize, num_blocks

PATTERNS = (
    "full, causal, window:W, document:L,L,..., dilated:SEGMENT/RATE, random:DENSITY, tokens:DENSITY, topk:W, shared:W"
)


def parse_mask(
    pattern: str,
    *,
    seqlen: int,
    block_size: int | BlockSize = DEFAULT_BLOCK,
    heads: int = 1,
    seed: int = 0,
    device: Device = "cpu",
) -> BlockMask:
    """The mask `pattern` (see the module's docstring) over `seqlen` queries and keys.

    `heads` masks are drawn for the random ones; the others broadcast. What is random is drawn on the CPU from `seed`,
    so that a pattern means one mask on every device. ValueError for a pattern that is none.
    """
    check_count("seqlen", seqlen, 1)
    check_count("heads", heads, 1)
    check_seed(seed)
    if not isinstance(pattern, str):
        raise TypeError(f"mask pattern must be a string, got {pattern!r}")
    size = check_block_size(block_size)
    parts = [_parse_part(part.strip(), pattern, seqlen, size, heads, seed, device) for part in pattern.split("+")]
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask


def random_bias(seqlen: int, heads: int, seed: int) -> Float[Tensor, "1 heads keys"]:
    """The bias by which topk and shared choose keys."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, heads, seqlen, dtype=torch.float32, device="cpu", generator=generator)


def _parse_part(
    part: str, pattern: str, seqlen: int, size: BlockSize, heads: int, seed: int, device: Device
) -> BlockMask:
    name, _, argument = part.partition(":")

    def numbers(kind: Callable[[str], float], separator: str, count: int | None = 1) -> list:
        try:
            found = [kind(text) for text in argument.split(separator)]
        except ValueError:
            found = []
        if not found or (count is not None and len(found) != count):
            raise ValueError(f"mask pattern must be one of {PATTERNS}, or several joined by +, got {pattern!r}")
        return found

    if name == "full" and not argument:
        shape = [num_blocks(seqlen, block) for block in size]
        return BlockMask.from_blocks(
            torch.ones(*shape, dtype=torch.bool, device=device), size, seq_lengths=(seqlen, seqlen)
        )
    if name == "causal" and not argument:
        return BlockMask.causal(seqlen, block_size=size, device=device)
    if name == "window":
        return BlockMask.sliding_window(seqlen, window=numbers(int, ",")[0], block_size=size, device=device)
    if name == "document":
        lengths = numbers(int, ",", None)
        if sum(lengths) != seqlen:
            raise ValueError(f"the documents of {part!r} have {sum(lengths)} tokens, and the sequence has {seqlen}")
        return BlockMask.document(lengths, block_size=size, device=device)
    if name == "dilated":
        segment_length, rate = numbers(int, "/", 2)
        return BlockMask.dilated(
            seqlen, segment_length=segment_length, dilation_rate=rate, block_size=size, device=device
        )
    if name == "random":
        density = numbers(float, ",")[0]
        return BlockMask.random_blocks(seqlen, density=density, seed=seed, heads=heads, block_size=size, device=device)
    if name == "tokens":
        return BlockMask.random_tokens(
            seqlen, density=numbers(float, ",")[0], seed=seed, heads=heads, block_size=size, device=device
        )
    if name in ("topk", "shared"):
        bias = random_bias(seqlen, heads, seed).to(device)[:, :, None]
        return BlockMask.dynamic_topk(bias, numbers(int, ",")[0], size, is_causal=name == "topk")
    raise ValueError(f"mask pattern must be one of {PATTERNS}, or several joined by +, got {pattern!r}")
