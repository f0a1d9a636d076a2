"""FlashAttention's autograd rule, once for all back ends that recompute their probabilities.

    attend = AttentionOperator("triton_attention", forward, backward)
    output, lse = attend(q, k, v, Call(is_causal=True, scale=0.125))

Forward: save q, k, v, O and L. Backward: recompute P = exp(S - L) and from it the gradients of q, k
and v; see `tiled.py` for the formulas. Two ways lead to the launches:
  plain       an autograd.Function around them, which costs the host least, on a GPU with replays
  watched     two registered operators. torch.compile leaves them whole; vmap, dispatch modes, fake
              tensors and tensor subclasses see each as one operation. Dual levels of forward-mode
              AD come here too.
A registered operator takes tensors and numbers only. This module alone flattens a `Call` into them.
There is no double backward: under `create_graph` the backward leaves a node that raises when it is
differentiated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention.call import Call, Documents, Passes, Saved
from cs336_systems.attention.checks import (
    DOUBLE_BACKWARD,
    are_plain,
    check_attention_inputs,
    has_hooks,
    refuse_differentiating_transforms,
    refuse_forward_mode,
)
from cs336_systems.attention.masks.tiles import TileLists

# Arguments between v and the options in an operator's schema, by the field of `Call` that the
# operator takes.
LISTS = ", ".join(f"Tensor {name}" for name in TileLists._fields)
SCHEMAS = {
    "": "",
    "mask": "Tensor? mask, ",
    "lists": f"{LISTS}, ",
    "documents": (
        "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    ),
}
OPTIONS = "bool is_causal, float scale, bool deterministic, str config"


class AttentionOperator:
    """A forward and a backward as one differentiable operation: (q, k, v, call) -> (output, lse).

    q is (batch, heads, queries, head_dim), k and v are (batch, kv_heads, keys, head_dim), with any
    strides. `output` is contiguous in q's dtype. `lse` (batch, heads, queries) is float32, or
    float64 for float64 inputs. Gradients flow through both.

    Args:
        name: the operators are registered as `cs336_systems::<name>` and
            `cs336_systems::<name>_backward`.
        run_forward, run_backward: the two passes; they get non-empty inputs only.
        takes: the field of `Call` that the operator needs: "" for none, "mask", "lists" or
            "documents". With "documents" q is (total_queries, heads, head_dim), k and v are
            (total_keys, kv_heads, head_dim) and lse is (heads, total_queries).
        replayed: `replayed(operator, q, k, v, call)` returns passes that repeat remembered
            launches on a GPU (`replay.py`); None where nothing is replayed.
    """

    def __init__(
        self,
        name: str,
        run_forward: Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]],
        run_backward: Callable[[Saved, Call], tuple[Tensor, Tensor, Tensor]],
        *,
        takes: str = "",
        replayed: Callable[[Passes, Tensor, Tensor, Tensor, Call], Passes] | None = None,
    ) -> None:
        self._forward, self._backward = run_forward, run_backward
        self._takes, self._packed, self._replayed = takes, takes == "documents", replayed
        self._name, self._is_counted = name, False

        # the watched way: two registered operators
        inputs, rest = "Tensor q, Tensor k, Tensor v", SCHEMAS[takes] + OPTIONS
        saved = "Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse"
        self._registered: Any = torch.library.custom_op(
            f"cs336_systems::{name}",
            self._checked_forward,
            mutates_args=(),
            schema=f"({inputs}, {rest}) -> (Tensor, Tensor)",
        )
        self._registered.register_fake(self._fake_forward)
        self._registered.register_autograd(self._differentiate, setup_context=self._save_watched)
        self._registered_backward: Any = torch.library.custom_op(
            f"cs336_systems::{name}_backward",
            self._checked_backward,
            mutates_args=(),
            schema=f"({inputs}, {saved}, {rest}) -> (Tensor, Tensor, Tensor)",
        )
        self._registered_backward.register_fake(
            lambda q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v))
        )
        self._registered_backward.register_autograd(_refuse_double_backward)

        # the plain way: an autograd.Function
        halves = {
            "forward": staticmethod(self._run_plain),
            "backward": staticmethod(self._differentiate),
        }
        function: Any = type(name, (torch.autograd.Function,), halves)  # profilers show the name
        # `apply` of Function's base class: Function's own adds the support of torch.func, which is
        # never active here.
        above: Any = super(torch.autograd.Function, function)
        # takes (q, k, v, call, passes), for tensors that `are_plain`
        self.apply: Callable[..., tuple[Tensor, Tensor]] = above.apply

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the differentiable (output, lse) of inputs that the caller has checked."""
        if not are_plain(q, k, v, *(self._tensors_of(call) if self._takes else ())):
            refuse_forward_mode(q, k, v)
            refuse_differentiating_transforms(q, k, v)
            if not torch.compiler.is_compiling():
                self._tell_counters()
            return self._registered(q, k, v, *self._flat(call))

        passes: Passes = self
        # Replays are launches by the CUDA driver. Hooks on saved tensors may give back other tensors,
        # whose addresses a replay does not know.
        if self._replayed is not None and q.is_cuda and not has_hooks():
            passes = self._replayed(self, q, k, v, call)

        if not (
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        ):
            return passes.forward(q, k, v, call)
        return self.apply(q, k, v, call, passes)

    # Passes

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return (output, lse) without a graph; 0 and -inf where q or k has no elements."""
        if q.numel() == 0 or k.numel() == 0:
            output, lse = _empty_results(q, self._packed)
            return output.zero_(), lse.fill_(-torch.inf)
        return self._forward(q, k, v, call)

    def backward(self, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v; zeros where q or k has no elements."""
        if saved.q.numel() == 0 or saved.k.numel() == 0:
            grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in saved[:3])
            return grad_q, grad_k, grad_v
        return self._backward(saved, call)

    def gradients(
        self, saved: Saved, call: Call, passes: Passes | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, by `passes` or else by the operator's own backward.

        Under `create_graph`, or for inputs that are not plain, the registered operator computes
        them. It leaves a node that raises NotImplementedError for a second derivative.
        """
        grad_output, grad_lse = saved.grad_output, saved.grad_lse
        if torch.is_grad_enabled() or not are_plain(grad_output, grad_lse):
            refuse_forward_mode(grad_output, *(() if grad_lse is None else (grad_lse,)))
            return self._registered_backward(*saved, *self._flat(call))
        return (passes or self).backward(saved, call)

    # The plain way

    def _run_plain(
        self, ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, passes: Passes
    ) -> tuple[Tensor, Tensor]:
        """Return (output, lse) and save what the backward needs: the plain Function's forward."""
        results = passes.forward(q, k, v, call)
        self._save(ctx, q, k, v, call, results)
        ctx.passes = passes
        return results

    def _save(
        self, ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, results: tuple[Tensor, Tensor]
    ) -> None:
        """Save inputs, results, the call and its tensors on `ctx`, for `_differentiate`."""
        tensors: tuple[Tensor, ...] = ()
        if self._takes:  # autograd cannot save tensors of inference mode
            tensors = tuple(x.clone() if x.is_inference() else x for x in self._tensors_of(call))
        ctx.save_for_backward(q, k, v, *results, *tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)

    def _differentiate(
        self, ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Any, ...]:
        """Return the gradients of all inputs: the backward of both ways, plain and watched."""
        q, k, v, output, lse, *tensors = ctx.saved_tensors
        call = ctx.call
        if tensors:  # as saved-tensor hooks have given them back
            call = self._call_of((*tensors, *self._flat(call)[len(tensors) :]))
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        grads = self.gradients(
            Saved(q, k, v, output, lse, grad_output, grad_lse), call, getattr(ctx, "passes", None)
        )
        return *grads, *(None,) * (len(ctx.needs_input_grad) - 3)  # q, k and v alone have gradients

    def _tensors_of(self, call: Call) -> tuple[Tensor, ...]:
        """Return the tensors of `call`: its lists, its documents' boundaries or its mask."""
        if call.lists is not None:
            return call.lists
        if call.documents is not None:
            return call.documents[:2]
        return () if call.mask is None else (call.mask,)

    # The watched way: a `Call` as a registered operator takes it

    def _flat(self, call: Call) -> tuple[Any, ...]:
        """Return `call` as the registered operators take it, behind their tensors; see SCHEMAS."""
        taken: Any = getattr(call, self._takes) if self._takes else ()
        return *((taken,) if self._takes == "mask" else taken), *call[:4]

    def _call_of(self, flat: tuple[Any, ...]) -> Call:
        """Return the `Call` that `_flat` has laid out."""
        *taken, is_causal, scale, deterministic, config = flat
        options = (is_causal, scale, deterministic, config)
        if self._takes == "mask":
            return Call(*options, mask=taken[0])
        if self._takes == "lists":
            return Call(*options, lists=TileLists(*taken))
        return Call(*options, documents=Documents(*taken) if self._packed else None)

    # `register_autograd` passes `inputs` and `output` by these names
    def _save_watched(
        self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
    ) -> None:
        """Save what the backward needs: the registered operator's setup_context."""
        q, k, v, *flat = inputs
        self._save(ctx, q, k, v, self._call_of(tuple(flat)), output)

    def _checked_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *flat: Any
    ) -> tuple[Tensor, Tensor]:
        """Return `forward` of checked inputs: anybody may call the registered operator.

        ValueError or TypeError unless q, k and v fit together: kernels would read past their ends.
        """
        check_attention_inputs(q, k, v, enable_gqa=True, packed=self._packed)
        if not self._packed and q.ndim != 4:
            raise ValueError(
                f"q must have shape (batch, heads, queries, head_dim), got {tuple(q.shape)}"
            )
        return self.forward(q, k, v, self._call_of(flat))

    def _checked_backward(self, *flat: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return `backward` of checked inputs: the seven fields of `Saved`, then a flat `Call`."""
        saved = Saved(*flat[:7])
        self.check_backward(saved)
        saved = saved._replace(output=saved.output.contiguous(), lse=saved.lse.contiguous())
        return self.backward(saved, self._call_of(flat[7:]))

    def check_backward(self, saved: Saved) -> None:
        """Raise ValueError or TypeError unless `saved` has the shapes, dtypes and device of a call.

        Kernels read these tensors without a check of their own.
        """
        q = saved.q
        check_attention_inputs(*saved[:3], enable_gqa=True, packed=self._packed)
        if not self._packed and q.ndim != 4:
            raise ValueError(
                f"q must have shape (batch, heads, queries, head_dim), got {tuple(q.shape)}"
            )
        lse_shape = (q.shape[1], q.shape[0]) if self._packed else tuple(q.shape[:-1])
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        for name, x, shape, dtype in (
            ("output", saved.output, tuple(q.shape), q.dtype),
            ("lse", saved.lse, lse_shape, lse_dtype),
            ("grad_output", saved.grad_output, tuple(q.shape), q.dtype),
            ("grad_lse", saved.grad_lse, lse_shape, lse_dtype),
        ):
            if x is None:
                continue
            if tuple(x.shape) != shape or x.dtype != dtype or x.device != q.device:
                raise ValueError(
                    f"{name} must be {dtype} of shape {shape} on {q.device}, "
                    f"got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
                )

    def _fake_forward(self, q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        self._tell_counters()
        return _empty_results(q, self._packed)

    def _tell_counters(self) -> None:
        """Register this operator's FLOPs with torch's FlopCounterMode, if that module is imported.

        Importing it takes a second, so only its users pay. Every counted call comes here first: a
        counter is a dispatch mode, and tracing for the compiler runs the fake forward.
        """
        if not self._is_counted and "torch.utils.flop_counter" in sys.modules:
            from cs336_systems.attention.flops import count_flops

            count_flops(self._name, self._call_of)
            self._is_counted = True


def _refuse_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise NotImplementedError(DOUBLE_BACKWARD)


def _empty_results(q: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """Return an uninitialised (output, lse) for queries q; `packed` if q holds packed documents."""
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=lse_dtype)
