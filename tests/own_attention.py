"""A reader's own attention, as `run --implementation tests.own_attention:attend` takes it, and a
wrong one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


def attend_to_everything(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Wrong where the mask is causal."""
    return attend(q, k, v, False)
