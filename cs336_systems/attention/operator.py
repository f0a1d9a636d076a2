"""FlashAttention's autograd rule, written once for every back end that recomputes its probabilities.

    attend = AttentionOperator("tiled_attention", forward, backward)
    output, lse = attend(q, k, v, is_causal, scale, config)

Forward: save q, k, v, O and L. Backward: recompute P = exp(S - L) and from it the gradients of q, k and v; see
`tiled.py` for the formulas. Two ways lead to the launches:
  plain       an autograd.Function around them, which costs the host least, with replays
  watched     two registered operators, for torch.compile, which leaves them whole, and for vmap, dispatch modes, fake
              tensors and subclasses, which want to see one operation
There is no double backward: under `create_graph` the backward leaves a node that raises when it is differentiated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cs336_systems.attention.validation import (
    DOUBLE_BACKWARD,
    are_plain,
    check_attention_inputs,
    has_hooks,
    refuse_differentiating_transforms,
    refuse_forward_mode,
)

# What has an operator's `forward` and `backward`: itself, or replays of them.
Passes = Any


class AttentionOperator:
    """A forward and a backward as one operation: (q, k, v, *extras, is_causal, scale, config) -> (output, lse).

    q (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim), any strides. `output` is contiguous
    in q's dtype; `lse` (batch, heads, queries) is float32, or float64 for float64 inputs, and differentiable.
    `packed`: q (total_queries, heads, head_dim), k and v (total_keys, kv_heads, head_dim), lse (heads, total_queries).
    `extras` are further arguments without a gradient in PyTorch's schema language, tensors first.
    `run_forward(q, k, v, *extras, is_causal, scale, config)` returns (output, lse), and `run_backward(q, k, v,
    output, lse, grad_output, grad_lse or None, *extras, is_causal, scale, config)` the gradients of q, k and v. They
    see non-empty inputs only. `replays(forward, backward)` makes both `Passes` for plain calls of the same facts.
    Registered as `cs336_systems::<name>` and `cs336_systems::<name>_backward`.
    """

    def __init__(
        self, name: str, run_forward: Callable[..., Any], run_backward: Callable[..., Any], *,
        extras: tuple[str, ...] = (), packed: bool = False, replays: Callable[..., Passes] | None = None,
    ) -> None:  # fmt: skip
        self._forward, self._backward, self._packed, self._replays = run_forward, run_backward, packed, replays
        self._num_tensors = sum(extra.startswith("Tensor") for extra in extras)
        self._counted = (name, extras, packed)
        self._is_counted = False
        rest = "".join(f", {extra}" for extra in (*extras, "bool is_causal", "float scale", "str config"))
        inputs = "Tensor q, Tensor k, Tensor v"
        saved = "Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse"
        self._registered: Any = torch.library.custom_op(
            f"cs336_systems::{name}", self._checked_forward, mutates_args=(),
            schema=f"({inputs}{rest}) -> (Tensor, Tensor)",
        )  # fmt: skip
        self._registered.register_fake(self._fake_forward)
        self._registered.register_autograd(self._differentiate, setup_context=self._save)
        self._registered_backward: Any = torch.library.custom_op(
            f"cs336_systems::{name}_backward", self._checked_backward, mutates_args=(),
            schema=f"({inputs}, {saved}{rest}) -> (Tensor, Tensor, Tensor)",
        )  # fmt: skip
        self._registered_backward.register_fake(lambda q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)))
        self._registered_backward.register_autograd(_refuse_double_backward)

        def run_plain(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
            *given, ctx.passes = arguments
            results = ctx.passes.forward(q, k, v, *given)
            self._save(ctx, (q, k, v, *given), results)
            return results

        halves = {"forward": staticmethod(run_plain), "backward": staticmethod(self._differentiate)}
        function: Any = type(name, (torch.autograd.Function,), halves)  # profilers show the name
        # That of Function's base: its own adds what torch.func needs, which is not active where this is called.
        above: Any = super(torch.autograd.Function, function)
        self.apply: Callable[..., tuple[Tensor, Tensor]] = above.apply  # (q, k, v, ..., passes), which `are_plain`

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        """(output, lse), differentiable; the inputs fit together."""
        if not are_plain(q, k, v, *arguments):
            refuse_differentiating_transforms(q, k, v)
            if not torch.compiler.is_compiling():
                self._tell_counters()
            return self._registered(q, k, v, *arguments)
        if has_hooks():
            return self.apply(q, k, v, *arguments, self)
        first_places: dict[int, int] = {}  # of tensors that are several arguments
        facts = [
            (x.shape, x.stride(), x.dtype, first_places.setdefault(id(x), place)) if isinstance(x, Tensor) else x
            for place, x in enumerate((q, k, v, *arguments))
        ]
        return self.apply(q, k, v, *arguments, _passes_of(self, q.device, tuple(facts)))

    def _fake_forward(self, q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        self._tell_counters()
        return _empty_results(q, self._packed)

    def _tell_counters(self) -> None:
        """Have torch's FlopCounterMode know this operator, once its module, which takes a second, is imported.

        Whoever counts has imported it, and is seen here: a counter is a mode, and tracing for the compiler runs fakes.
        """
        if not self._is_counted and "torch.utils.flop_counter" in sys.modules:
            from cs336_systems.attention.flops import count_flops

            count_flops(*self._counted)
            self._is_counted = True

    def passes(self) -> Passes:
        """`forward` and `backward` for plain calls that have the same shapes, strides, dtypes, device and arguments.

        Not where hooks on saved tensors are set, which may return others.
        """
        return self if self._replays is None else self._replays(self.forward, self.backward)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        if q.numel() == 0 or k.numel() == 0:
            output, lse = _empty_results(q, self._packed)
            return output.zero_(), lse.fill_(-torch.inf)
        return self._forward(q, k, v, *arguments)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        if q.numel() == 0 or k.numel() == 0:
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        return self._backward(q, k, v, *arguments)

    def gradients(
        self, saved: tuple[Tensor, ...], grad_output: Tensor, grad_lse: Tensor | None, *arguments: Any,
        passes: Passes = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Of q, k and v. With `create_graph` the registered operator leaves a node that refuses a second derivative."""
        if forward_ad._current_level >= 0:  # tangents live within a level
            refuse_forward_mode(grad_output, *(() if grad_lse is None else (grad_lse,)))
        watched = torch.is_grad_enabled() or not are_plain(grad_output, grad_lse)
        run = self._registered_backward if watched else (passes or self).backward
        return run(*saved, grad_output, grad_lse, *arguments)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # PyTorch's names
        end = 3 + self._num_tensors
        tensors = inputs[:3]
        if self._num_tensors:  # those of inference mode cannot be saved
            tensors += tuple(x.clone() if x is not None and x.is_inference() else x for x in inputs[3:end])
        ctx.save_for_backward(*tensors, *output)
        ctx.rest = inputs[end:]
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, *tensors, output, lse = ctx.saved_tensors
        grads = self.gradients(
            (q, k, v, output, lse), torch.zeros_like(output) if grad_output is None else grad_output, grad_lse,
            *tensors, *ctx.rest, passes=getattr(ctx, "passes", None),
        )  # fmt: skip
        return *grads, *(None,) * (len(ctx.needs_input_grad) - 3)

    def _checked_forward(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Of inputs that nobody has checked, kernels would read past the end."""
        check_attention_inputs(q, k, v, enable_gqa=True, packed=self._packed)
        if not self._packed and q.ndim != 4:
            raise ValueError(f"q must have shape (batch, heads, queries, head_dim), got {tuple(q.shape)}")
        return self.forward(q, k, v, *arguments)

    def _checked_backward(
        self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor,
        grad_lse: Tensor | None, *arguments: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self.check_backward((q, k, v), output, lse, grad_output, grad_lse)
        return self.backward(q, k, v, output.contiguous(), lse.contiguous(), grad_output, grad_lse, *arguments)

    def check_backward(
        self, inputs: tuple[Tensor, ...], output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
    ) -> None:
        """Raise ValueError unless what a backward of q, k, v is given is of the forward's shapes: kernels read it."""
        q, k, v = inputs
        check_attention_inputs(q, k, v, enable_gqa=True, packed=self._packed)
        if not self._packed and q.ndim != 4:
            raise ValueError(f"q must have shape (batch, heads, queries, head_dim), got {tuple(q.shape)}")
        lse_shape = (q.shape[1], q.shape[0]) if self._packed else tuple(q.shape[:-1])
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        for name, x, shape, dtype in (
            ("output", output, tuple(q.shape), q.dtype),
            ("lse", lse, lse_shape, lse_dtype),
            ("grad_output", grad_output, tuple(q.shape), q.dtype),
            ("grad_lse", grad_lse, lse_shape, lse_dtype),
        ):
            if x is None:
                continue
            if tuple(x.shape) != shape or x.dtype != dtype or x.device != q.device:
                raise ValueError(
                    f"{name} must be {dtype} of shape {shape} on {q.device}, "
                    f"got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
                )


def _refuse_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise NotImplementedError(DOUBLE_BACKWARD)


@lru_cache(maxsize=4096)
def _passes_of(operator: AttentionOperator, device: torch.device, facts: tuple[Any, ...]) -> Passes:
    return operator.passes()


def _empty_results(q: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=lse_dtype)
