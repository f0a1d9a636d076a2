"""Choosing a row of the tile tables."""

from __future__ import annotations

import warnings
from functools import cache

from cs336_systems.attention.tiles.config import KERNELS, MAX_HEAD_DIM, KernelConfig, head_tile
from cs336_systems.attention.tiles.tables import TABLES
from cs336_systems.config import BYTES_PER_ELEMENT

TARGET_OF_CAPABILITY = {(8, 0): "sm80", (8, 6): "sm86", (8, 7): "sm86", (8, 9): "sm89", (9, 0): "sm90"}


def select_config(
    kernel: str,
    *,
    capability: tuple[int, int] | None,
    head_dim: int,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    dtype: str,
    is_causal: bool = False,
    tma: bool = False,
) -> KernelConfig:
    """The configuration of `kernel` (forward, dkdv or dq); a pure function of its arguments.

    `capability` is the GPU's compute capability, None for the interpreter. A GPU without a table gets the portable
    one, with one warning. `tma` says that Hopper's copy engine can read the inputs. It, batch, heads, lengths and mask
    decide where a row has exceptions for them (`tables.Only`).
    ValueError for an unknown kernel, a head_dim over 256, a negative size or a dtype that Triton's dots do not take.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    pair = isinstance(capability, tuple) and len(capability) == 2 and all(isinstance(x, int) for x in capability)
    if capability is not None and not pair:
        raise TypeError(f"capability must be a tuple of two ints like (9, 0), or None, got {capability!r}")
    for name, size in (("batch", batch), ("heads", heads), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be between 1 and {MAX_HEAD_DIM}, got {head_dim}")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype!r}")
    row = TABLES[target_of(capability)][kernel, BYTES_PER_ELEMENT[dtype], head_tile(head_dim)]
    return row.choose(batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, tma=tma)


@cache
def target_of(capability: tuple[int, int] | None) -> str:
    """The table for a GPU of this compute capability: portable for None and, with a warning, for what has none."""
    if capability is None:
        return "portable"
    if capability in TARGET_OF_CAPABILITY:
        return TARGET_OF_CAPABILITY[capability]
    if capability[0] == 10:
        return "sm100"
    warnings.warn(
        f"no tile table for compute capability {capability[0]}.{capability[1]}: using the portable one", stacklevel=3
    )
    return "portable"
