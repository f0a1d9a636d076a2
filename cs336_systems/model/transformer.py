"""The Transformer language model of CS336 assignment 1: pre-norm blocks, RoPE, SwiGLU, untied head.

    model = TransformerLM.from_config(MODEL_SIZES["small"], attention="triton")
    logits = model(tokens)  # (batch, seq) -> (batch, seq, vocab)

The attention inside is chosen by name, so that one model measures every stage of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cs336_systems.config import ATTENTION_NAMES, ModelConfig
from cs336_systems.model.layers import Embedding, Linear, RMSNorm, RotaryEmbedding, SwiGLU

CONSTRUCTOR_ARGUMENTS = (
    "vocab_size",
    "context_length",
    "d_model",
    "num_layers",
    "num_heads",
    "d_ff",
    "rope_theta",
)
# (blocks, residual stream) -> residual stream
BlockRunner = Callable[[Sequence[nn.Module], Tensor], Tensor]


def causal_attention(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch heads seq head_dim"],
    v: Float[Tensor, "batch heads seq head_dim"],
    name: str | Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Return causal attention of q, k and v by the implementation `name`.

    `name` is one of `ATTENTION_NAMES`, or a function of (q, k, v). The package's back ends refuse a
    machine or dtype that they do not support, as `flash_attention` does.
    """
    if not isinstance(name, str):
        return name(q, k, v)
    if name == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    from cs336_systems.attention import flash_attention

    attended = flash_attention(q, k, v, is_causal=True, backend=name)
    assert isinstance(attended, Tensor)  # a pair only where the log-sum-exp is asked for
    return attended


class CausalMultiHeadSelfAttention(nn.Module):
    """Causal multi-head self-attention with rotary positions.

    `rope` is shared by the layers of a model. `attention` is one of `ATTENTION_NAMES`; another name
    raises ValueError.
    """

    def __init__(
        self, d_model: int, num_heads: int, rope: RotaryEmbedding, *, attention: str = "reference"
    ) -> None:
        super().__init__()
        if attention not in ATTENTION_NAMES:
            raise ValueError(
                f"attention must be one of {', '.join(ATTENTION_NAMES)}, got {attention!r}"
            )
        self.num_heads = num_heads
        self.attention: str | Callable[[Tensor, Tensor, Tensor], Tensor] = attention
        self.rope = rope
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, d_model)
        self.v_proj = Linear(d_model, d_model)
        self.output_proj = Linear(d_model, d_model)

    def _split_heads(
        self, x: Float[Tensor, "batch seq d_model"]
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Return `x` with d_model split into heads of head_dim consecutive elements."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        q = self.rope(self._split_heads(self.q_proj(x)))
        k = self.rope(self._split_heads(self.k_proj(x)))
        v = self._split_heads(self.v_proj(x))
        attended = causal_attention(q, k, v, self.attention)
        return self.output_proj(attended.transpose(1, 2).flatten(-2))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, attention={self.attention!r}"


class TransformerBlock(nn.Module):
    """Pre-norm block: `x + attn(ln1(x))`, then `x + ffn(ln2(x))`."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        rope: RotaryEmbedding,
        *,
        attention: str = "reference",
    ) -> None:
        super().__init__()
        # In the course's order, so that optimizer states, which go by position, interchange, too.
        self.attn = CausalMultiHeadSelfAttention(d_model, num_heads, rope, attention=attention)
        self.ffn = SwiGLU(d_model, d_ff)
        self.ln1 = RMSNorm(d_model)
        self.ln2 = RMSNorm(d_model)

    def forward(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


def run_in_order(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return `x` after all `blocks`, one after the other.

    `model/checkpointing.py` has other ways to run them.
    """
    for block in blocks:
        x = block(x)
    return x


class TransformerLM(nn.Module):
    """Decoder-only language model over `vocab_size` tokens.

    Arguments are those of `ModelConfig`, which checks them (ValueError names the field), and
    `attention`, one of `ATTENTION_NAMES`. Parameters are float32 unless the default dtype says
    otherwise, on the ambient device.
    """

    head_class: type[Linear] = Linear

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float = 10_000.0,
        *,
        attention: str = "reference",
    ) -> None:
        super().__init__()
        config = ModelConfig(
            name=type(self).__name__,
            d_model=d_model,
            d_ff=d_ff,
            num_layers=num_layers,
            num_heads=num_heads,
            vocab_size=vocab_size,
            context_length=context_length,
            rope_theta=rope_theta,
        )
        self.vocab_size = vocab_size
        self.context_length = context_length
        rope = RotaryEmbedding(context_length, config.head_dim, rope_theta)
        self.run_blocks: BlockRunner = run_in_order
        self.token_embeddings = Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(
            TransformerBlock(d_model, num_heads, d_ff, rope, attention=attention)
            for _ in range(num_layers)
        )
        self.ln_final = RMSNorm(d_model)
        self.lm_head = self.head_class(d_model, vocab_size)

    @classmethod
    def from_config(cls, config: ModelConfig, attention: str = "reference") -> TransformerLM:
        """Return a model of `config`'s shape with the attention called `attention`."""
        return cls(
            **{name: getattr(config, name) for name in CONSTRUCTOR_ARGUMENTS}, attention=attention
        )

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Return the logits of the next token at every position.

        Raises ValueError if tokens are not (batch, seq), not int32 or int64, or longer than the
        context.
        """
        return self.lm_head(self.hidden(tokens))

    def hidden(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_model"]:
        """Return the head's input, the last block's output normalized; ValueError as `forward`."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens must have shape (batch, seq), got {tuple(tokens.shape)}")
        if tokens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"tokens must be int32 or int64, got {tokens.dtype}")
        if tokens.shape[1] > self.context_length:
            raise ValueError(
                f"tokens must have at most context_length={self.context_length} positions, "
                f"got {tokens.shape[1]}"
            )
        # Nested, so that no name here keeps the first residual stream alive while the blocks run.
        x = self.run_blocks(self.layers, self.token_embeddings(tokens))  # type: ignore[arg-type]
        return self.ln_final(x)
