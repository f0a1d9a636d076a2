"""What the tests grade: replace this file to grade another implementation.

The names and parameters are the course's, the union of its 2025 and 2026 editions.
"""

from __future__ import annotations

import torch


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """An autograd.Function whose `apply(q, k, v, is_causal)` is FlashAttention-2 in PyTorch operations."""
    from cs336_systems.attention import FlashAttentionPyTorch

    return FlashAttentionPyTorch


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """An autograd.Function whose `apply(q, k, v, is_causal)` is FlashAttention-2 in Triton kernels."""
    from cs336_systems.attention import FlashAttentionTriton

    return FlashAttentionTriton
