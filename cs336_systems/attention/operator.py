"""How a forward and a backward launcher become one differentiable operator that torch.compile leaves whole.

`torch.library.custom_op` hides the launches (and the choice of tiles) from the compiler, `register_fake` tells it the
shapes, `register_autograd` ties the two halves together. Double backward is refused by PyTorch with a message that
names the operator, since the backward half has no gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention.validation import check_attention_inputs

AttentionForward = Callable[[Tensor, Tensor, Tensor, bool, float, str], tuple[Tensor, Tensor]]
AttentionBackward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def attention_operator(name: str, forward: AttentionForward, backward: AttentionBackward) -> Any:
    """Register `cs336_systems::<name>` and return it: (q, k, v, is_causal, scale, config) -> (output, lse).

    q (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim), any strides. `output` is contiguous
    in q's dtype; `lse` (batch, heads, queries) is float32, or float64 for float64 inputs, and differentiable.
    `forward(q, k, v, is_causal, scale, config)` and `backward(q, k, v, output, lse, grad_output, grad_lse or None,
    is_causal, scale, config)` see non-empty inputs only: without keys or queries the results are zeros and -inf.
    """

    @torch.library.custom_op(f"cs336_systems::{name}", mutates_args=())
    def operator(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, config: str
    ) -> tuple[Tensor, Tensor]:
        if q.ndim != 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3] or not q.dtype == k.dtype == v.dtype:
            check_attention_inputs(q, k, v, enable_gqa=True)  # says what is wrong; a kernel would read past the end
            raise ValueError(f"q must have shape (batch, heads, queries, head_dim), got {tuple(q.shape)}")
        if q.numel() == 0 or k.numel() == 0:
            output, lse = _results(q)
            return output.zero_(), lse.fill_(-torch.inf)
        return forward(q, k, v, is_causal, scale, config)

    @operator.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, config: str) -> tuple[Tensor, Tensor]:
        return _results(q)

    @torch.library.custom_op(f"cs336_systems::{name}_backward", mutates_args=())
    def operator_backward(
        q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None,
        is_causal: bool, scale: float, config: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if q.numel() == 0 or k.numel() == 0:
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        return backward(q, k, v, output, lse, grad_output, grad_lse, is_causal, scale, config)

    @operator_backward.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None,
        is_causal: bool, scale: float, config: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.is_causal, ctx.scale, ctx.config = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        grads = operator_backward(
            q, k, v, output, lse, grad_output, grad_lse, ctx.is_causal, ctx.scale, ctx.config
        )
        return *grads, None, None, None

    operator.register_autograd(differentiate, setup_context=setup_context)
    return operator


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=lse_dtype)
