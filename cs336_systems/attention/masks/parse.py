"""Masks by name, for the command line and the records.

mask = parse_mask("random:0.1+causal", seqlen=4096)
"""

from __future__ import annotations

import math
from functools import reduce
from operator import and_
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.attention.checks import check_count
from cs336_systems.attention.masks.block_mask import DEFAULT_BLOCK, BlockMask, Device
from cs336_systems.attention.masks.grid import neighbourhood_mask
from cs336_systems.attention.masks.tiles import BlockSize, check_block_size, num_blocks

PATTERNS = (
    "full, causal, window:W, document:L,L,..., dilated:SEGMENT/RATE, grid:RADIUS, hilbert:RADIUS, "
    "random:DENSITY, tokens:DENSITY, topk:W, shared:W"
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
    """Return the mask that `pattern` names, over `seqlen` queries and keys.

    full                     every pair
    causal                   keys up to the query's own position
    window:512               the 512 most recent keys
    document:1000,24,3072    packed documents of these lengths
    dilated:2048/4           segments of 2048 tokens at rate 4
    grid:7                   neighbours of an n × n grid in both directions, row after row
    hilbert:7                the same, tokens along Hilbert's curve (n a power of two)
    random:0.1               a tenth of the tiles, at random
    tokens:0.1               a tenth of the pairs, at random
    topk:256                 of each query's visible keys the 256 of highest (random) bias
    shared:256               of all keys the 256 of highest (random) bias, the same for every query
    a+b                      the pairs that both attend

    Random patterns draw one mask for each of `heads`; the others broadcast over heads. Random
    numbers are drawn on the CPU from `seed`, so that a pattern means one mask on every device.
    ValueError for a string that is no pattern.
    """
    check_count("seqlen", seqlen, 1)
    check_count("heads", heads, 1)
    check_count("seed", seed, -(2**63), 2**63 - 1)
    if not isinstance(pattern, str):
        raise TypeError(f"mask pattern must be a string, got {pattern!r}")
    size = check_block_size(block_size)
    parts = [
        _parse_part(part.strip(), seqlen, size, heads, seed, device) for part in pattern.split("+")
    ]
    return reduce(and_, parts)


def random_bias(seqlen: int, heads: int, seed: int) -> Float[Tensor, "1 heads keys"]:
    """Return the random bias by which the patterns topk and shared choose keys, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, heads, seqlen, dtype=torch.float32, device="cpu", generator=generator)


def _parse_part(
    part: str, seqlen: int, size: BlockSize, heads: int, seed: int, device: Device
) -> BlockMask:
    """Return the mask of one pattern without +; the arguments are those of `parse_mask`."""
    name, _, argument = part.partition(":")
    kind = float if name in ("random", "tokens") else int
    try:
        numbers: list[Any] = [
            kind(text) for text in argument.split("/" if name == "dilated" else ",") if argument
        ]
    except ValueError:
        numbers, name = [], "no pattern"

    where: dict[str, Any] = {"block_size": size, "device": device}
    match name, numbers:
        case "full", []:
            tiles = torch.ones(
                *(num_blocks(seqlen, block) for block in size), dtype=torch.bool, device=device
            )
            return BlockMask.from_blocks(tiles, size, seq_lengths=(seqlen, seqlen))
        case "causal", []:
            return BlockMask.causal(seqlen, **where)
        case "window", [window]:
            return BlockMask.sliding_window(seqlen, window=window, **where)
        case "document", [_, *_]:
            if sum(numbers) != seqlen:
                raise ValueError(
                    f"the documents of {part!r} have {sum(numbers)} tokens, "
                    f"and the sequence has {seqlen}"
                )
            return BlockMask.document(numbers, **where)
        case "dilated", [segment, rate]:
            return BlockMask.dilated(seqlen, segment_length=segment, dilation_rate=rate, **where)
        case "grid" | "hilbert", [radius]:
            side = math.isqrt(seqlen)
            if side * side != seqlen or (name == "hilbert" and side & (side - 1)):
                number = "square number" if name == "grid" else "power of 4"
                raise ValueError(
                    f"{part!r} needs a {number} of tokens, and the sequence has {seqlen}"
                )
            return neighbourhood_mask(
                side, radius=radius, order="rows" if name == "grid" else "hilbert", **where
            )
        case "random" | "tokens", [density]:
            draw = BlockMask.random_blocks if name == "random" else BlockMask.random_tokens
            return draw(seqlen, density=density, seed=seed, heads=heads, **where)
        case "topk" | "shared", [num_keys]:
            bias = random_bias(seqlen, heads, seed).to(device)[:, :, None]
            return BlockMask.dynamic_topk(bias, num_keys, size, is_causal=name == "topk")
    raise ValueError(
        f"mask pattern must be one of {PATTERNS}, or several joined by +, got {part!r}"
    )
