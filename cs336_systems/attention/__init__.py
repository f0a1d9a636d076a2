"""Attention in stages, each a back end: reference, compiled, tiled, triton_first, triton, hopper.

    from cs336_systems.attention import flash_attention

    out = flash_attention(q, k, v, is_causal=True)

`flash_attention` is the public entry; `flash_attention_varlen` serves packed documents.
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
    # `from cs336_systems.attention import FlashAttentionTriton` loads Triton, so only on demand.
    if name == "FlashAttentionTriton":
        from cs336_systems.attention.triton.passes import FlashAttentionTriton

        return FlashAttentionTriton
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
