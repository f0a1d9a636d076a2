"""Layers of the Transformer language model: Linear, Embedding, RMSNorm, RotaryEmbedding, SwiGLU.

CS336 assignment 1's layers, with its parameter names, so that state dicts interchange. Constructors
name no device: `with torch.device("cuda"): Linear(512, 2048)` draws the weights on the GPU, and
"meta" draws nothing. After `to_empty`, call `reset_parameters` on every layer that has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

INIT_CUTOFF = 3.0  # truncated normals end at this many standard deviations


def _truncated_normal_(weight: Tensor, std: float) -> None:
    """Draw `weight` in place from a normal of `std`, cut off at INIT_CUTOFF standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-INIT_CUTOFF * std, b=INIT_CUTOFF * std)


class Linear(nn.Module):
    """Linear layer `x @ weight.T` without bias; `weight` is (out_features, in_features)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a truncated normal of variance 2 / (in + out)."""
        _truncated_normal_(self.weight, math.sqrt(2.0 / sum(self.weight.shape)))

    def forward(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        return F.linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


class Embedding(nn.Module):
    """Table of vectors: maps tokens to rows of `weight` (vocab_size, d_model)."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a truncated normal of variance 1."""
        _truncated_normal_(self.weight, 1.0)

    def forward(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        return F.embedding(tokens, self.weight)

    def extra_repr(self) -> str:
        return f"vocab_size={self.weight.shape[0]}, d_model={self.weight.shape[1]}"


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension: `x / sqrt(mean(x²) + eps) * weight`.

    Computed in float32 (float64 for float64 input) and returned in the input's dtype (Zhang and
    Sennrich, arXiv:1910.07467).
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (self.weight * (wide * inverse_rms)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"d_model={self.weight.shape[0]}, eps={self.eps}"


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of positions 0, 1, ... (Su et al., arXiv:2104.09864).

    Pair i of position p, (x[2i], x[2i+1]), is rotated by the angle p · theta^(-2i/head_dim). The
    output holds first the rotated even elements, then the rotated odd ones: not interleaved again,
    as in the 2026 edition. Queries and keys are permuted alike, so their dot products do not see
    the order.

    The tables `cos` and `sin`, (context_length, head_dim / 2), are not in the state dict. Their
    angles are computed in float64 and they are stored in float32 at least: they are computed anew
    whenever the module is moved or cast, so `.to(torch.bfloat16)` does not round them and
    `to_empty` does not leave them uninitialised.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context_length: int, head_dim: int, theta: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even (RoPE rotates pairs), got {head_dim}")
        self.context_length = context_length
        self.head_dim = head_dim
        self.theta = theta
        cos, sin = self._tables(device=None, dtype=torch.float32)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self, device: torch.device | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles, each (context_length, head_dim / 2)."""
        # float32 angles would be off by 1e-3 radians at position 32768.
        exponents = (
            torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float64) / self.head_dim
        )
        positions = torch.arange(self.context_length, device=device, dtype=torch.float64)
        angles = torch.outer(positions, self.theta**-exponents)  # (context_length, head_dim / 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RotaryEmbedding:
        """Move or cast the module, and compute its tables anew.

        Every move and cast of a module (`to`, `cuda`, `half`, `to_empty`) comes through here.
        """
        super()._apply(fn, recurse)
        dtype = torch.promote_types(self.cos.dtype, torch.float32)
        self.cos, self.sin = self._tables(self.cos.device, dtype)
        return self

    def forward(self, x: Float[Tensor, "... seq head_dim"]) -> Float[Tensor, "... seq head_dim"]:
        """Return `x` with position i of the sequence rotated by i's angles, in the dtype of `x`.

        The rotation is computed in float32 at least. Raises ValueError if seq exceeds the context
        length.
        """
        seq = x.shape[-2]
        if seq > self.context_length:
            raise ValueError(
                f"sequence of {seq} positions is longer than context_length={self.context_length}"
            )
        return self.rotate(x, self.cos[:seq], self.sin[:seq])

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return `x` with each position rotated by the angles in its row of the tables.

        `x` is (..., seq, head_dim); `cos` and `sin` are (seq, head_dim / 2). The result has the
        dtype of `x`.
        """
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"context_length={self.context_length}, head_dim={self.head_dim}, theta={self.theta}"


class SwiGLU(nn.Module):
    """Gated feed-forward layer `w2(silu(w1 x) * w3 x)` (Shazeer, arXiv:2002.05202)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
