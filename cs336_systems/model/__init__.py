"""The Transformer language model of CS336 assignment 1: loss, optimizer, sampling and loading."""

from cs336_systems.config import ATTENTION_NAMES
from cs336_systems.model.generation import generate
from cs336_systems.model.layers import Embedding, Linear, RMSNorm, RotaryEmbedding, SwiGLU
from cs336_systems.model.loading import build_model, load_model_class
from cs336_systems.model.loss import cross_entropy
from cs336_systems.model.optimizer import AdamW, clip_gradients
from cs336_systems.model.transformer import (
    CausalMultiHeadSelfAttention,
    TransformerBlock,
    TransformerLM,
)

__all__ = [
    "ATTENTION_NAMES",
    "AdamW",
    "CausalMultiHeadSelfAttention",
    "Embedding",
    "Linear",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "TransformerBlock",
    "TransformerLM",
    "build_model",
    "clip_gradients",
    "cross_entropy",
    "generate",
    "load_model_class",
]
