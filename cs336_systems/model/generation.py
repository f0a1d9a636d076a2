"""Sampling text from a language model.

generate(model, prompt, 100, temperature=0.8, top_p=0.95)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cs336_systems.config import FieldError


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_tokens: Int[Tensor, " prompt"],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float | None = None,
    eos_token: int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " new"]:
    """Return at most `max_new_tokens` tokens sampled after `prompt_tokens`, without the prompt.

    `model` is a TransformerLM, or a wrapper with one in `.module` whose ranks all call this. The
    logits are divided by `temperature`; 0 takes the most likely token, as does a temperature too
    small for their dtype to divide by. `top_p` then keeps the smallest set of most likely tokens
    whose probabilities reach it, at least one (nucleus sampling, Holtzman et al.,
    arXiv:1904.09751). Generation ends after `eos_token`, which is then the last token returned.
    `generator` must be on the model's device. The model sees the last `context_length` tokens, and
    the whole of them at every step: there is no key-value cache. Raises ValueError on arguments out
    of range, TypeError if the prompt is not a tensor.
    """
    sizes: Any = getattr(model, "module", model)
    if not isinstance(prompt_tokens, Tensor):
        raise TypeError(f"prompt_tokens must be a tensor, got {type(prompt_tokens).__name__}")
    if prompt_tokens.ndim != 1 or prompt_tokens.numel() == 0:
        raise ValueError(
            f"prompt_tokens must have shape (tokens,), at least one, "
            f"got {tuple(prompt_tokens.shape)}"
        )
    if prompt_tokens.min() < 0 or prompt_tokens.max() >= sizes.vocab_size:
        raise ValueError(
            f"prompt_tokens must be in [0, {sizes.vocab_size}), "
            f"got {int(prompt_tokens.min())} to {int(prompt_tokens.max())}"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise FieldError("temperature", f"must be finite and not negative, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise FieldError("top_p", f"must be in (0, 1], got {top_p}")

    tokens = prompt_tokens
    for _ in range(max_new_tokens):
        logits = model(tokens[-sizes.context_length :].unsqueeze(0))[0, -1]
        next_token = _sample(logits, temperature, top_p, generator)
        tokens = torch.cat((tokens, next_token.to(tokens.dtype)))
        if eos_token is not None and next_token.item() == eos_token:
            break
    return tokens[prompt_tokens.numel() :]


def _sample(
    logits: Float[Tensor, " vocab"],
    temperature: float,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Int[Tensor, " 1"]:
    """Return one token, shape (1,), drawn from the `logits` of one position; see `generate`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Below the smallest normal number the division may be by 0, or a product with an infinite
    # inverse: 0/0 is NaN.
    if temperature < torch.finfo(wide.dtype).tiny:
        return wide.argmax(dim=-1, keepdim=True)
    # The largest logit is subtracted before the division, which a small temperature would overflow.
    probabilities = torch.softmax((wide - wide.max()) / temperature, dim=-1)
    if top_p is None:
        return torch.multinomial(probabilities, 1, generator=generator)
    ordered, order = probabilities.sort(descending=True)
    # 0 for the most likely token, which therefore always stays
    mass_before = ordered.cumsum(dim=-1) - ordered
    nucleus = ordered.masked_fill(mass_before >= top_p, 0.0)
    return order[torch.multinomial(nucleus, 1, generator=generator)]
