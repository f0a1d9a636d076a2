"""A language model's loss without all of its logits: head and cross-entropy, a chunk at a time.

    model = LossTransformer.for_loss(MODEL_SIZES["8b"], attention="triton")
    loss = model(tokens, targets)    # a scalar; no logits anywhere
    loss = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=2048)    # the function alone

The logits of T tokens over a vocabulary of V, in bfloat16 and float32, with their gradient, take 10
bytes for each of T·V elements: 46 GiB for one sequence of 32,768 tokens and 152 thousand words. But
the gradient of a mean loss is linear in the loss's own gradient, so what backward needs can be
computed where the logits are. The phases of each chunk:

- logits: one chunk's, hidden @ weight.T, in the inputs' dtype, then in float32;
- loss: log-sum-exp minus the target's logit, summed up;
- gradient: softmax minus one at the target, over T, in the place of the logits;
- products: gradient @ weight is the chunk's gradient of `hidden`, gradient.T @ hidden is added to
  that of `weight`.

Then the chunk is forgotten. Backward only multiplies both gradients by the loss's. So nothing is
computed twice: three matmuls, as without chunks, and only the gradient of `weight` is held longer
than it would be. The idea of computing gradients in the forward is that of Liger-Kernel's fused
linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cs336_systems.config import ModelConfig
from cs336_systems.model.layers import Linear
from cs336_systems.model.loss import check_targets
from cs336_systems.model.transformer import TransformerLM

CHUNK_TOKENS = 2048  # of 152 thousand words: 1.7 GiB for logits in bfloat16 and float32


def chunked_cross_entropy(
    hidden: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, "*batch"],
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    compiled: bool = False,
) -> Float[Tensor, ""]:
    """Return `cross_entropy(hidden @ weight.T, targets)` from the logits of a few tokens at a time.

    The loss is a scalar of float32 at least. It is differentiable once, in `hidden` and `weight`;
    their gradients are computed in the forward, if they will be needed. Logits are rounded to the
    inputs' dtype, as `Linear` does. The softmax is computed in float32 at least, and the gradient
    of `weight` is accumulated in it. If `compiled`, the operations between the matmuls are
    compiled, anew for each number of tokens, and read the logits three times in place of ten.
    Targets are not checked against the vocabulary: see `cross_entropy`.

    Raises TypeError if hidden and weight are not of one real floating-point dtype, or are float16,
    in which the gradients underflow before a loss scaler's factor reaches them. Raises ValueError
    naming the argument if a shape is wrong, if targets are empty or not integers, and if
    chunk_tokens is not a positive int.
    """
    _check(hidden, weight, targets, chunk_tokens)
    flat, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).long()
    loss: Tensor = _ChunkedLoss.apply(
        flat, weight, flat_targets, chunk_tokens, compiled, torch.is_grad_enabled()
    )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """The mean loss of flat tokens, whose gradients are computed in the forward.

    The phases of each chunk are those of the module's docstring.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_tokens: int,
        compiled: bool,
        differentiates: bool,
    ) -> Tensor:
        # hidden (tokens, d_model), weight (vocab, d_model), targets (tokens,)
        num_tokens = hidden.shape[0]
        wide_dtype = torch.promote_types(hidden.dtype, torch.float32)
        wants_hidden, wants_weight = (
            differentiates and wanted for wanted in ctx.needs_input_grad[:2]
        )
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=wide_dtype) if wants_weight else None
        total = torch.zeros((), dtype=wide_dtype, device=hidden.device)
        softmax = _compiled_loss_and_gradient() if compiled else _loss_and_gradient

        for start in range(0, num_tokens, chunk_tokens):
            part, own = (
                hidden[start : start + chunk_tokens],
                targets[start : start + chunk_tokens, None],
            )
            # Logits, loss, gradient
            loss, gradient = softmax(part @ weight.T, own, num_tokens)
            gradient = gradient.to(hidden.dtype)  # autocast's logits are narrower
            total += loss

            # Products
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[start : start + chunk_tokens])
            if weight_gradient is not None:
                _add_product(weight_gradient, gradient.T, part)
            del gradient

        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total / num_tokens

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        # torch's once_differentiable would not raise where the loss's gradient is a constant.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "chunked_cross_entropy can be differentiated once only: create_graph must be False"
            )
        scaled = (
            None if one is None else (one * loss_gradient).to(one.dtype)
            for one in ctx.saved_tensors
        )
        return (*scaled, None, None, None, None)


def _loss_and_gradient(logits: Tensor, own: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sum of a chunk's losses, and the logits' gradient of the mean over `num_tokens`.

    The gradient is in the logits' dtype and takes their place: `logits` (tokens, vocab) are
    overwritten. `own` (tokens, 1) are the targets.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide -= wide.amax(dim=-1, keepdim=True)
    target_logits = wide.gather(-1, own)
    sums = wide.exp_().sum(dim=-1, keepdim=True)
    wide /= sums * num_tokens
    gradient = logits.copy_(wide)
    own_gradient = (target_logits.exp() / sums - 1.0) / num_tokens
    return (sums.log() - target_logits).sum(), gradient.scatter_(
        -1, own, own_gradient.to(logits.dtype)
    )


@cache
def _compiled_loss_and_gradient() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `_loss_and_gradient` under torch.compile, the same one at every call."""
    return torch.compile(_loss_and_gradient, dynamic=False)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` in place.

    On GPUs the product of bfloat16 is added unrounded, without leaving the matmul.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class LossHead(Linear):
    """Output layer of a language model that returns the loss: `head(hidden, targets)`.

    It is one module with one forward, so that a wrapper of modules (FSDP) gathers its weight once
    for all chunks, forward and backward.
    """

    chunk_tokens, compiled = CHUNK_TOKENS, False  # as `LossTransformer.for_loss` sets them

    def forward(  # type: ignore[override]
        self, hidden: Float[Tensor, "*batch d_in"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of `targets`; see `chunked_cross_entropy`."""
        return chunked_cross_entropy(
            hidden, self.weight, targets, self.chunk_tokens, compiled=self.compiled
        )


class LossTransformer(TransformerLM):
    """TransformerLM that maps tokens and targets to the loss; its parameters keep their names."""

    head_class = LossHead

    @classmethod
    def for_loss(
        cls,
        config: ModelConfig,
        *,
        attention: str = "reference",
        chunk_tokens: int = CHUNK_TOKENS,
        compiled: bool = False,
    ) -> LossTransformer:
        """Return a model of `config`'s shape, as `from_config`, with options of the chunked loss.

        See `chunked_cross_entropy` for `chunk_tokens` and `compiled`.
        """
        model = cls.from_config(config, attention=attention)
        assert isinstance(model, LossTransformer) and isinstance(model.lm_head, LossHead)
        model.lm_head.chunk_tokens, model.lm_head.compiled = chunk_tokens, compiled
        return model

    def forward(  # type: ignore[override]
        self, tokens: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of `targets` over all positions.

        Raises ValueError as TransformerLM and `chunked_cross_entropy` do.
        """
        return self.lm_head(self.hidden(tokens), targets)


def loss_bytes(
    num_tokens: int, vocab_size: int, d_model: int, chunk_tokens: int, element_bytes: int
) -> int:
    """Return the peak bytes of `chunked_cross_entropy` and its gradients, inputs not counted.

    They are a chunk's logits, the gradient of `hidden` and that of `weight`; if the inputs are
    narrower than float32, logits and the gradient of `weight` in float32, too. `element_bytes` is
    the size of an input element.
    """
    element = element_bytes + (4 if element_bytes < 4 else 0)
    chunk = min(chunk_tokens, num_tokens) * vocab_size
    return (chunk + vocab_size * d_model) * element + num_tokens * d_model * element_bytes


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> None:
    """Raise TypeError or ValueError unless the arguments fit `chunked_cross_entropy`."""
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype:
        raise TypeError(
            f"hidden and weight must be of one real floating-point dtype, "
            f"got {hidden.dtype} and {weight.dtype}"
        )
    if hidden.dtype == torch.float16:
        raise TypeError(
            "hidden must not be float16, "
            "in which gradients taken before the loss is scaled underflow"
        )
    if weight.ndim != 2 or hidden.ndim == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight must have shape (vocab, d_model) with hidden's last dimension as d_model, "
            f"got weight {tuple(weight.shape)} and hidden {tuple(hidden.shape)}"
        )
    check_targets(targets, hidden, "hidden")
    if not isinstance(chunk_tokens, int) or isinstance(chunk_tokens, bool) or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be a positive int, got {chunk_tokens!r}")
