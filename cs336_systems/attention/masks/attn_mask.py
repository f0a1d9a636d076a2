"""SDPA's bool `attn_mask` as a `BlockMask`."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool
from torch import Tensor

from cs336_systems.attention.masks.block_mask import BlockMask
from cs336_systems.attention.masks.checks import kind_of


def from_attn_mask(attn_mask: Bool[Tensor, "... queries keys"], q: Tensor, k: Tensor) -> BlockMask:
    """The tiles of `attn_mask`, True where attended, which broadcasts to (..., heads, queries, keys) of q and k.

    Its leading dimensions are all 1 or all q's. TypeError for an additive mask of floats; ValueError for other shapes.
    """
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask must be a bool tensor, True where attended, got {kind_of(attn_mask)}; "
            "additive masks are not supported"
        )
    wanted = (*q.shape[:-1], k.shape[-2])
    shape = (1,) * (len(wanted) - attn_mask.ndim) + tuple(attn_mask.shape)
    leading, heads = shape[:-3], shape[-3] if len(shape) > 2 else 1
    fits = attn_mask.ndim >= 2 and len(shape) == len(wanted)
    fits = fits and all(size in (1, most) for size, most in zip(shape, wanted))
    if not fits or leading not in ((1,) * len(leading), wanted[:-3]):
        raise ValueError(
            f"attn_mask must broadcast to (..., heads, queries, keys) = {wanted}, "
            f"its batch dimensions all 1 or all q's, got {tuple(attn_mask.shape)}"
        )
    mask = attn_mask.expand(*attn_mask.shape[:-2], *wanted[-2:])
    return BlockMask.from_dense(mask.reshape(math.prod(leading), heads, *wanted[-2:]))
