"""Cross-entropy of next-token logits: `cross_entropy(model(tokens), next_tokens).backward()`."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def cross_entropy(
    logits: Float[Tensor, "*batch vocab"], targets: Int[Tensor, "*batch"]
) -> Float[Tensor, ""]:
    """Return the mean over all positions of `logsumexp(logits) - logits[target]`, in nats.

    Low-precision logits are converted to float32 first; float64 stays. The log-sum-exp subtracts
    the largest logit, so logits of any finite size neither overflow nor vanish. Every position
    counts: there is no ignored target.

    Targets outside [0, vocab) are not looked for here, which would wait for the GPU: PyTorch's
    gather raises RuntimeError on the CPU, and on a GPU stops with a device-side assertion, after
    which the process cannot use the GPU any more. Raises TypeError if logits are not a real
    floating-point tensor, and ValueError if the leading shapes differ, targets are not integers, or
    there are none.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits must be a real floating-point tensor, got {got}")
    check_targets(targets, logits, "logits")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_logits = wide.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return (wide.logsumexp(dim=-1) - target_logits).mean()


def check_targets(targets: Tensor, vectors: Tensor, name: str) -> None:
    """Raise ValueError unless `targets` are integers, at least one, and one for each of `vectors`.

    `name` is what the messages call the argument `vectors`.
    """
    if targets.dtype not in INTEGER_DTYPES:
        raise ValueError(f"targets must be integers, got {targets.dtype}")
    if vectors.ndim == 0 or targets.shape != vectors.shape[:-1]:
        raise ValueError(
            f"targets must have the shape of {name} without its last dimension, "
            f"got targets {tuple(targets.shape)} and {name} {tuple(vectors.shape)}"
        )
    if targets.numel() == 0:
        raise ValueError(f"targets must not be empty, got shape {tuple(targets.shape)}")
