"""How a forward and a backward launcher become one differentiable operator that torch.compile leaves whole.

`torch.library.custom_op` hides the launches (and the choice of tiles) from the compiler, `register_fake` tells it the
shapes, `register_autograd` ties the two halves together. That machinery costs the host several times the launches
themselves, so that short sequences would wait for Python: on plain tensors, with nobody watching, an
autograd.Function around the same launches takes its place, and on GPUs, where it has been built, the C++ of
`attention/native`. Under `create_graph` the backward half leaves a node, which
raises when it is differentiated: there is no double backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
)
from torch.autograd import forward_ad
from torch.nn import Parameter

from cs336_systems.attention.native import load
from cs336_systems.attention.validation import DOUBLE_BACKWARD, check_attention_inputs, layers, refuse_forward_mode

# forward(q, k, v, *extras, is_causal, scale, config) -> (output, lse)
AttentionForward = Callable[..., tuple[Tensor, Tensor]]
# backward(q, k, v, output, lse, grad_output, grad_lse or None, *extras, is_causal, scale, config) -> (dq, dk, dv)
AttentionBackward = Callable[..., tuple[Tensor, Tensor, Tensor]]
# The least normal float32: kernels take the scale in float32, where less loses its digits and in the end is 0, which
# makes NaN of a hidden score of -inf.
SMALLEST_SCALE = 2.0**-126
# Of arguments that are no tensors, which `isinstance` takes longer to tell.
PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})
# The `extras` of operators on packed documents.
VARLEN_ARGUMENTS = {
    "cu_seqlens_q": "Tensor", "cu_seqlens_k": "Tensor", "max_seqlen_q": "SymInt", "max_seqlen_k": "SymInt",
}  # fmt: skip


class AttentionOperator:
    """A forward and a backward launcher as one operator: (q, k, v, *extras, is_causal, scale, config) -> (output, lse).

    q (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim), any strides. `output` is contiguous
    in q's dtype; `lse` (batch, heads, queries) is float32, or float64 for float64 inputs, and differentiable.
    `packed`: q (total_queries, heads, head_dim), k and v (total_keys, kv_heads, head_dim), lse (heads, total_queries).
    `launches`: on a GPU both halves are launches of Triton kernels and, with few exceptions, nothing else, of tensors
    q, k and v alone: `attention/triton/calls.py` finds out which calls are, for C++ to make them.
    `extras` are further arguments without a gradient, as {name: type in PyTorch's schema language}, tensors first.
    `forward` and `backward` see non-empty inputs only: without keys or queries the results are zeros and -inf. They see
    scales from SMALLEST_SCALE on: of a lesser one, what is missing has been multiplied into q.
    Registered as `cs336_systems::<name>` and `cs336_systems::<name>_backward`.
    """

    def __init__(
        self,
        name: str,
        forward: AttentionForward,
        backward: AttentionBackward,
        *,
        extras: Mapping[str, str] | None = None,
        packed: bool = False,
        launches: bool = False,
    ) -> None:
        self._forward, self._backward, self._packed = forward, backward, packed
        extra = "".join(f", {kind} {argument}" for argument, kind in (extras or {}).items())
        options = f"{extra}, bool is_causal, float scale, str config"
        inputs = "Tensor q, Tensor k, Tensor v"
        saved = "Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse"
        self._registered: Any = torch.library.custom_op(
            f"cs336_systems::{name}", self._launch, mutates_args=(), schema=f"({inputs}{options}) -> (Tensor, Tensor)"
        )
        self._registered.register_fake(lambda q, *_: _results(q, packed))
        self._registered_backward: Any = torch.library.custom_op(
            f"cs336_systems::{name}_backward", self._launch_backward, mutates_args=(),
            schema=f"({inputs}, {saved}{options}) -> (Tensor, Tensor, Tensor)",
        )  # fmt: skip
        self._registered_backward.register_fake(lambda q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)))
        self._registered_backward.register_autograd(_refuse_double_backward)
        self._registered.register_autograd(self._differentiate, setup_context=_save)
        self._apply = _eager_function(name, self)
        self._name = name
        self._launches = launches
        self._kept: Any = None  # calls that C++ may make; loads Triton, so only where one is made

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        if not runs_directly(q, k, v, *arguments):
            _refuse_differentiating_transforms(q, k, v)
            return self._registered(q, k, v, *arguments)
        _check(q, k, v, self._packed)
        return self.run_directly(q, k, v, *arguments)

    def run_directly(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        """A call whose arguments have been checked: `runs_directly` holds, and q, k and v fit together."""
        if self._launches and q.is_cuda and load() is not None:
            if self._kept is None:
                from cs336_systems.attention.triton.calls import KeptCalls

                self._kept = KeptCalls(self._name, self._run_by_python, self.backward)
            return self._kept(q, k, v, arguments)
        return self._run_by_python(q, k, v, arguments)

    def _run_by_python(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return self._apply(q, k, v, arguments)
        return self._run(q, k, v, *arguments)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor,
        grad_lse: Tensor | None, *arguments: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, k and v; NotImplementedError where an upstream gradient carries a tangent."""
        if forward_ad._current_level >= 0:  # tangents live within a level
            refuse_forward_mode(*(grad for grad in (grad_output, grad_lse) if grad is not None))
        inputs = (q, k, v, output, lse, grad_output, grad_lse, *arguments)
        # With gradients enabled (`create_graph`) the operator leaves a node that refuses the second differentiation.
        if torch.is_grad_enabled() or not runs_directly(*inputs):
            return self._registered_backward(*inputs)
        return self._launch_backward(*inputs)

    def _launch(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        _check(q, k, v, self._packed)
        return self._run(q, k, v, *arguments)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        if q.numel() == 0 or k.numel() == 0:
            output, lse = _results(q, self._packed)
            return output.zero_(), lse.fill_(-torch.inf)
        if arguments[-2] < SMALLEST_SCALE:
            missing, *rest = _split_scale(arguments)
            return self._forward(q * missing, k, v, *rest)
        return self._forward(q, k, v, *arguments)

    def _launch_backward(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        if q.numel() == 0 or k.numel() == 0:
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        if arguments[-2] < SMALLEST_SCALE:
            missing, *rest = _split_scale(arguments)
            grad_q, grad_k, grad_v = self._backward(q * missing, k, v, *rest)
            return grad_q * missing, grad_k, grad_v
        return self._backward(q, k, v, *arguments)

    def _differentiate(
        self, ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, *tensors = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        tensor, plain = iter(tensors), iter(ctx.plain)
        arguments = [next(tensor) if is_tensor else next(plain) for is_tensor in ctx.is_tensor]
        grads = self.backward(q, k, v, output, lse, grad_output, grad_lse, *arguments)
        return *grads, *(None for _ in arguments)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    ctx.is_tensor = [isinstance(argument, Tensor) for argument in arguments]
    ctx.plain = [argument for argument in arguments if not isinstance(argument, Tensor)]
    ctx.save_for_backward(q, k, v, *output, *(_savable(x) for x in arguments if isinstance(x, Tensor)))
    ctx.set_materialize_grads(False)


def _savable(x: Tensor) -> Tensor:
    """`x`, or a copy where it is of inference mode: autograd would not save it."""
    return x.clone() if x.is_inference() else x


def _refuse_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise NotImplementedError(DOUBLE_BACKWARD)


def _eager_function(name: str, operator: AttentionOperator) -> Callable[..., tuple[Tensor, Tensor]]:
    """`operator` as `apply` of an autograd.Function on q, k, v and the tuple of the other arguments.

    It saves what the registered operator saves.
    """

    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        output, lse = operator._run(q, k, v, *arguments)
        ctx.set_materialize_grads(False)
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        ctx.save_for_backward(q, k, v, output, lse, *map(_savable, tensors))
        ctx.plain = arguments[len(tensors) :]  # tensors are the first of them, and must not be held by the context
        return output, lse

    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, *tensors = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        grads = operator.backward(q, k, v, output, lse, grad_output, grad_lse, *tensors, *ctx.plain)
        return *grads, None

    halves = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), halves)  # profilers show the name
    # Function's own `apply` adds what torch.func needs, which is not active where this is called.
    return super(torch.autograd.Function, function).apply


def _split_scale(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """(factor, *arguments) with SMALLEST_SCALE in the place of the scale, which is the product of the two."""
    *others, scale, config = arguments
    return scale / SMALLEST_SCALE, *others, SMALLEST_SCALE, config


def _refuse_differentiating_transforms(*tensors: Tensor) -> None:
    """Raise NotImplementedError where torch.func would differentiate: it has no rule for the operator, as vmap does."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    if torch.is_grad_enabled() and any(_is_differentiated(x) for x in tensors):
        raise NotImplementedError(
            "torch.func's grad, vjp, jacrev and hessian are not supported here; backend='reference' has them, "
            "and tensor.backward() and torch.autograd.grad work"
        )


def _is_differentiated(x: Tensor) -> bool:
    """Whether a transform of torch.func differentiates by x, within however many others that map it."""
    return any(is_gradtrackingtensor(layer) and layer.requires_grad for layer in layers(x))


def runs_directly(*arguments: Any) -> bool:
    """Whether these are plain tensors and nobody watches: no compiler, no mode, no transform of torch.func."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    for x in arguments:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            # Negated lazily (the imaginary part of a conjugate): in memory the sign is the other one. Batched the old
            # way: `torch.autograd.grad(is_grads_batched=True)` maps a backward without a transform. Wrapped: what has
            # left a transform of torch.func, which has ended.
            if x.is_meta or x.is_neg() or is_legacy_batchedtensor(x) or is_functorch_wrapped_tensor(x):
                return False
        elif kind not in PLAIN_TYPES and isinstance(x, Tensor):
            return False
    return True


def _check(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Raise what `check_attention_inputs` says of inputs that do not fit: a kernel would read past their end."""
    if q.ndim == k.ndim == (3 if packed else 4) and k.shape == v.shape and q.dtype == k.dtype == v.dtype:
        same = slice(2, None) if packed else slice(0, None, 3)  # head_dim, and the batch where there is one
        heads, kv_heads = q.shape[1], k.shape[1]
        if q.shape[same] == k.shape[same] and (heads == kv_heads or (kv_heads and heads % kv_heads == 0)):
            return
    check_attention_inputs(*(x.transpose(0, 1) if packed and x.ndim == 3 else x for x in (q, k, v)), enable_gqa=True)
    names = "(total_queries, heads, head_dim)" if packed else "(batch, heads, queries, head_dim)"
    raise ValueError(f"q must have shape {names}, got {tuple(q.shape)}")


def _results(q: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=lse_dtype)
