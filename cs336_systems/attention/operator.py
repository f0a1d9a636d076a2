"""How a forward and a backward launcher become one differentiable operator that torch.compile leaves whole.

`torch.library.custom_op` hides the launches (and the choice of tiles) from the compiler, `register_fake` tells it the
shapes, `register_autograd` ties the two halves together. Double backward is refused by PyTorch with a message that
names the operator, since the backward half has no gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention.validation import check_attention_inputs

# forward(q, k, v, *extras, is_causal, scale, config) -> (output, lse)
AttentionForward = Callable[..., tuple[Tensor, Tensor]]
# backward(q, k, v, output, lse, grad_output, grad_lse or None, *extras, is_causal, scale, config) -> (dq, dk, dv)
AttentionBackward = Callable[..., tuple[Tensor, Tensor, Tensor]]
# The `extras` of operators on packed documents.
VARLEN_ARGUMENTS = {
    "cu_seqlens_q": "Tensor", "cu_seqlens_k": "Tensor", "max_seqlen_q": "SymInt", "max_seqlen_k": "SymInt",
}  # fmt: skip


def attention_operator(
    name: str,
    forward: AttentionForward,
    backward: AttentionBackward,
    *,
    extras: Mapping[str, str] | None = None,
    packed: bool = False,
) -> Any:
    """Register `cs336_systems::<name>` and return it: (q, k, v, *extras, is_causal, scale, config) -> (output, lse).

    q (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim), any strides. `output` is contiguous
    in q's dtype; `lse` (batch, heads, queries) is float32, or float64 for float64 inputs, and differentiable.
    `packed`: q (total_queries, heads, head_dim), k and v (total_keys, kv_heads, head_dim), lse (heads, total_queries).
    `extras` are further arguments without a gradient, as {name: type in PyTorch's schema language}.
    `forward` and `backward` see non-empty inputs only: without keys or queries the results are zeros and -inf.
    """
    extra = "".join(f", {kind} {argument}" for argument, kind in (extras or {}).items())
    options = f"{extra}, bool is_causal, float scale, str config"
    inputs = "Tensor q, Tensor k, Tensor v"
    saved = "Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse"

    def operator(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        _check(q, k, v, packed)
        if q.numel() == 0 or k.numel() == 0:
            output, lse = _results(q, packed)
            return output.zero_(), lse.fill_(-torch.inf)
        return forward(q, k, v, *arguments)

    def operator_backward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        if q.numel() == 0 or k.numel() == 0:
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        return backward(q, k, v, *arguments)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *arguments = inputs
        ctx.is_tensor = [isinstance(argument, Tensor) for argument in arguments]
        ctx.plain = [argument for argument in arguments if not isinstance(argument, Tensor)]
        ctx.save_for_backward(q, k, v, *output, *(x for x in arguments if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, *tensors = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        tensor, plain = iter(tensors), iter(ctx.plain)
        arguments = [next(tensor) if is_tensor else next(plain) for is_tensor in ctx.is_tensor]
        grads = registered_backward(q, k, v, output, lse, grad_output, grad_lse, *arguments)
        return *grads, *(None for _ in arguments)

    registered: Any = torch.library.custom_op(
        f"cs336_systems::{name}", operator, mutates_args=(), schema=f"({inputs}{options}) -> (Tensor, Tensor)"
    )
    registered.register_fake(lambda q, *_: _results(q, packed))
    registered_backward: Any = torch.library.custom_op(
        f"cs336_systems::{name}_backward", operator_backward, mutates_args=(),
        schema=f"({inputs}, {saved}{options}) -> (Tensor, Tensor, Tensor)",
    )  # fmt: skip
    registered_backward.register_fake(lambda q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)))
    registered.register_autograd(differentiate, setup_context=setup_context)
    return registered


def _check(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Raise what `check_attention_inputs` says of inputs that do not fit: a kernel would read past their end."""
    if q.ndim == k.ndim == (3 if packed else 4) and k.shape == v.shape and q.dtype == k.dtype == v.dtype:
        same = slice(2, None) if packed else slice(0, None, 3)  # head_dim, and the batch where there is one
        if q.shape[same] == k.shape[same] and k.shape[1] and q.shape[1] % k.shape[1] == 0:
            return
    check_attention_inputs(*(x.transpose(0, 1) if packed and x.ndim == 3 else x for x in (q, k, v)), enable_gqa=True)
    names = "(total_queries, heads, head_dim)" if packed else "(batch, heads, queries, head_dim)"
    raise ValueError(f"q must have shape {names}, got {tuple(q.shape)}")


def _results(q: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=lse_dtype)
