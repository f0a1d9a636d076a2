"""Attention, stage by stage: reference, compiled, tiled, triton, hopper. `flash_attention` is the
public entry.
"""

from cs336_systems.attention.api import flash_attention
from cs336_systems.attention.choose import explain_backend
from cs336_systems.attention.masks import BlockMask
from cs336_systems.attention.reference import attention_reference
from cs336_systems.attention.tiled import FlashAttentionPyTorch
from cs336_systems.attention.tiles import AttentionConfig, KernelConfig, select_config
from cs336_systems.attention.varlen import flash_attention_varlen

__all__ = [
    "AttentionConfig",
    "BlockMask",
    "FlashAttentionPyTorch",
    "FlashAttentionTriton",
    "KernelConfig",
    "attention_reference",
    "explain_backend",
    "flash_attention",
    "flash_attention_varlen",
    "select_config",
]


def __getattr__(name: str) -> object:
    # Loads Triton, so only on demand: `from cs336_systems.attention import FlashAttentionTriton`.
    if name == "FlashAttentionTriton":
        from cs336_systems.attention.triton.passes import FlashAttentionTriton

        return FlashAttentionTriton
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
