"""Tensor parallelism: ranks split the matrices of attention and feed-forward layers (Megatron-LM).

    apply_tensor_parallel(model, group)     # in place, before any wrapper and any optimizer
    loss(model(tokens)).backward()          # every rank: the whole batch, the whole loss

In the feed-forward layer y = W2 (silu(W1 x) * W3 x) rank i of N has d_ff / N rows of W1 and W3 and
the same columns of W2. Attention is cut by heads: rank i has the rows of num_heads / N heads of Q,
K and V, and the same columns of the output projection.

    z_i = silu(W1_i x) * W3_i x                  dz_i = W2_iᵀ dy
    y   = sum over i of W2_i z_i                 dx   = sum over i of W1_iᵀ dx1_i + W3_iᵀ dx3_i

So a layer sends two messages: an all-reduce of y in the forward and one of dx in the backward
(Shoeybi et al., arXiv:1909.08053, whose g and f are `leave` and `enter` here). In between
everything has 1/N of the size and of the FLOPs. Embedding, norms and head are whole on every rank,
which computes them alike.

With sequence parallelism (Korthikanti et al., arXiv:2205.05198) each rank also keeps 1/N of the
positions between the layers: an all-gather enters a layer and a reduce-scatter leaves it, which
together send what the all-reduce does. Norms see a rank's own positions only, so their gradients
are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cs336_systems.attention.checks import to_autocast_dtype
from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import (
    Group,
    all_gather_flat,
    broadcast_parameters,
    clip_shards,
    reduce_scatter_flat,
)
from cs336_systems.model import (
    CausalMultiHeadSelfAttention,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerLM,
)

# Messages: functions of (tensor, group). Those along the sequence cut or join dimension -2.


def same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x`: nothing is sent."""
    return x.view_as(x)


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over the ranks: an all-reduce."""
    x = x.clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


def own_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's positions of `x`: nothing is sent."""
    return cut(x, -2, group)


def all_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the positions of all ranks: an all-gather."""
    return join(x, -2, group)


def total_of_own_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's positions of the sum of `x` over the ranks: a reduce-scatter."""
    x = x.movedim(-2, 0).contiguous()
    own = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    reduce_scatter_flat(own.view(-1), x.view(-1), group)
    return own.movedim(0, -2)


class Send(torch.autograd.Function):
    """Sends one message in the forward, and another, its transpose, in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, there: Any, back: Any) -> Any:
        """Return `there(x, group)`."""
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return `back(grad, group)`, and None for the other arguments."""
        return ctx.back(grad, ctx.group), None, None, None


@dataclass
class Ranks:
    """The ranks that share a model's matrices, and the messages among them.

    `sequence_parallel` may be switched off and on between steps: without it the model takes
    sequences of any length, for example to generate text.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool

    def send(self, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor]) -> Tensor:
        """Return `there(x)`; the backward applies `back` to its gradient."""
        sent: Tensor = Send.apply(x, self.group, there, back)
        return sent

    def enter(self, x: Tensor) -> Tensor:
        """Return a layer's input, whole on every rank (Megatron's f)."""
        x = to_autocast_dtype(x)  # before it is sent, not by the matmuls after
        if self.sequence_parallel:
            return self.send(x, all_positions, total_of_own_positions)
        return self.send(x, same, total)

    def leave(self, y: Tensor) -> Tensor:
        """Return a layer's output from this rank's term of it (Megatron's g)."""
        if self.sequence_parallel:
            return self.send(y, total_of_own_positions, all_positions)
        return self.send(y, total, same)

    def begin(self, x: Tensor) -> Tensor:
        """Return the first layer's input, with sequence parallelism this rank's positions of it."""
        return self.send(x, own_positions, all_positions) if self.sequence_parallel else x

    def end(self, x: Tensor) -> Tensor:
        """Return the last layer's output at all positions."""
        return self.send(x, all_positions, own_positions) if self.sequence_parallel else x

    def of_all_positions(self, weight: Tensor) -> Tensor:
        """Return `weight`, whose gradient becomes that of all ranks' positions."""
        return self.send(weight, same, total) if self.sequence_parallel else weight


# Layers. Parameters keep their names, so that checkpoints are those of the whole model.


class SplitLinear(Linear):
    """This rank's part of a Linear: of its outputs (`dim` 0, column-parallel in the literature,
    which multiplies from the right) or of its inputs (`dim` 1, row-parallel).
    """

    def __init__(self, whole: Linear, dim: int, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.dim, self.group = dim, group
        part = cut(whole.weight.detach(), dim, group).clone(memory_format=torch.contiguous_format)
        self.weight = nn.Parameter(part, requires_grad=whole.weight.requires_grad)
        # optimizers must update it element by element, and wrappers average it with equal parts
        self.weight.is_part = place_of(group)  # type: ignore[attr-defined]

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of the whole tensor of which this rank's part has `shape`."""
        sizes = [*shape]
        sizes[self.dim] *= self.group.size()
        return torch.Size(sizes)


class ParallelSwiGLU(SwiGLU):
    """A SwiGLU of which this rank has d_ff / N hidden units."""

    def __init__(self, whole: SwiGLU, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.ranks = ranks
        self.w1 = SplitLinear(whole.w1, 0, ranks.group)
        self.w2 = SplitLinear(whole.w2, 1, ranks.group)
        self.w3 = SplitLinear(whole.w3, 0, ranks.group)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        x = self.ranks.enter(x)
        z = F.silu(self.w1(x)) * self.w3(x)  # (..., d_ff / N)
        return self.ranks.leave(self.w2(z))


class ParallelAttention(CausalMultiHeadSelfAttention):
    """A CausalMultiHeadSelfAttention of which this rank has num_heads / N heads."""

    def __init__(self, whole: CausalMultiHeadSelfAttention, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.ranks = ranks
        self.num_heads = whole.num_heads // ranks.group.size()
        self.attention, self.rope = whole.attention, whole.rope
        self.q_proj = SplitLinear(whole.q_proj, 0, ranks.group)
        self.k_proj = SplitLinear(whole.k_proj, 0, ranks.group)
        self.v_proj = SplitLinear(whole.v_proj, 0, ranks.group)
        self.output_proj = SplitLinear(whole.output_proj, 1, ranks.group)

    def forward(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        return self.ranks.leave(super().forward(self.ranks.enter(x)))


class ParallelEmbedding(Embedding):
    """A whole Embedding, after which sequence parallelism begins."""

    def __init__(self, whole: Embedding, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.ranks, self.weight = ranks, whole.weight

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch part d_model"]:
        return self.ranks.begin(super().forward(tokens))


class ParallelNorm(RMSNorm):
    """An RMSNorm of this rank's positions; after the last one (`ends`) sequence parallelism ends.

    Its weight gets the gradient of all positions.
    """

    def __init__(self, whole: RMSNorm, ranks: Ranks, ends: bool) -> None:
        nn.Module.__init__(self)
        self.ranks, self.weight, self.eps, self.ends = ranks, whole.weight, whole.eps, ends

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = F.rms_norm(wide, wide.shape[-1:], eps=self.eps)
        y = (self.ranks.of_all_positions(self.weight) * wide).to(x.dtype)
        return self.ranks.end(y) if self.ends else y


Layer = SwiGLU | CausalMultiHeadSelfAttention


def apply_tensor_parallel(
    model: nn.Module, group: Group = None, *, sequence_parallel: bool = False
) -> Ranks:
    """Split the SwiGLU and attention layers of `model` over the ranks of `group`, in place.

    Call it on a whole model, of which rank 0's values count, before wrappers (with a group of their
    own, of the ranks that have the same parts) and before optimizers. All ranks of `group` must
    then get the same batch, and have the same loss. With `sequence_parallel` the model must be a
    TransformerLM, its input's length a multiple of N.

    Gradients are clipped by `clip_grad_norm_` here; `gather_full_params`, `load_full_params` and
    checkpoints know the parts. Raises ValueError naming a layer whose heads or d_ff are not a
    multiple of the ranks, or that would lose something: one of a class derived from ours, with
    hooks, more parameters, or a parameter that another layer shares; also for a model that has no
    such layers or is wrapped, split or on the meta device, and as `guards.check_same_shapes` does.
    A forward raises it for a sequence that `sequence_parallel` cannot cut.

    Returns the ranks, whose `sequence_parallel` may be switched.
    """
    ranks = Ranks(guards.as_group(group), sequence_parallel)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, Layer)}
    norms = {name: one for name, one in model.named_modules() if isinstance(one, RMSNorm)}
    _check(model, layers, norms if sequence_parallel else {}, ranks)
    broadcast_parameters(model, ranks.group)

    for name, layer in layers.items():
        for parameter in layer.parameters():
            # an optimizer that has it already is recognised by this
            parameter.is_cut = True  # type: ignore[attr-defined]
        _replace(
            model,
            name,
            ParallelSwiGLU(layer, ranks)
            if isinstance(layer, SwiGLU)
            else ParallelAttention(layer, ranks),
        )
    if isinstance(model, TransformerLM) and sequence_parallel:
        _replace(model, "token_embeddings", ParallelEmbedding(model.token_embeddings, ranks))
        for name, norm in norms.items():
            _replace(model, name, ParallelNorm(norm, ranks, ends=name == "ln_final"))
    guards.watch_steps()
    return ranks


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` into the place of a module of `model`, in the same mode (training or not)."""
    new.train(model.get_submodule(name).training)
    model.set_submodule(name, new)


def _check(
    model: nn.Module, layers: dict[str, Layer], norms: dict[str, RMSNorm], ranks: Ranks
) -> None:
    """Raise ValueError unless `layers` and `norms` can be replaced by this rank's parts of them."""
    guards.check_unwrapped(model)
    if ranks.sequence_parallel and not isinstance(model, TransformerLM):
        raise ValueError(f"model must be a TransformerLM for sequence_parallel, got {model}")
    if splits(model):
        raise ValueError("model must be whole, and this one is split already")
    guards.check_same_shapes(model.named_parameters(), ranks.group)
    if not layers or isinstance(model, Layer):
        raise ValueError("model must hold SwiGLU or attention layers, and this one has none")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"model must have values, and {name!r} is on the meta device")

    num_ranks = ranks.group.size()
    for name, layer in layers.items():
        if isinstance(layer, SwiGLU):
            what, size = "d_ff", len(layer.w1.weight)
        else:
            what, size = "num_heads", layer.num_heads
        if size % num_ranks:
            raise ValueError(
                f"{name!r} must have {what} a multiple of {num_ranks} ranks, got {size}"
            )

    # nothing may be lost: what is replaced is ours, plain, and in one place
    places: dict[Any, list[str]] = {}  # of modules, by their parents, and of parameters
    for path, inner in model.named_modules():
        for name, child in inner.named_children():
            places.setdefault(child, []).append(f"{path}.{name}".lstrip("."))
        for name, parameter in inner._parameters.items():
            places.setdefault(parameter, []).append(f"{path}.{name}".lstrip("."))
    for name, replaced in {**layers, **norms}.items():
        for path, inner in replaced.named_modules(prefix=name):
            _check_plain(path, inner)
            for one in (inner, *inner.parameters(recurse=False)):
                if len(places.get(one, ())) > 1 and not isinstance(one, RotaryEmbedding):
                    shared = " and ".join(places[one])
                    raise ValueError(f"{path!r} must be in one place of the model, not in {shared}")
    if norms:
        for path, inner in model.named_modules():
            if inner._parameters and type(inner) not in PLAIN:
                raise ValueError(
                    f"{path!r} has parameters that would see this rank's positions only"
                )


PLAIN = (SwiGLU, CausalMultiHeadSelfAttention, Linear, RMSNorm, Embedding, RotaryEmbedding)


def _check_plain(name: str, module: nn.Module) -> None:
    """Raise ValueError unless a part of `module` does what the whole does."""
    weights = [one for one in module._parameters if one != "weight"]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if type(module) not in PLAIN or weights or "forward" in vars(module):
        kinds = ", ".join(kind.__name__ for kind in PLAIN)
        raise ValueError(
            f"{name!r} must be one of {kinds}, as it was built: "
            f"a part of {type(module).__name__} would lose what it adds"
        )
    if any(getattr(module, kind) for kind in hooks) or any(
        one._backward_hooks or one._post_accumulate_grad_hooks
        for one in module.parameters(recurse=False)
    ):
        raise ValueError(f"{name!r} must have no hooks: its part would not have them")


# The whole model


def splits(handle: nn.Module) -> dict[str, SplitLinear]:
    """Return the split layers of any handle of the model, by the names of their weights in it."""
    found = {name: one for name, one in handle.named_modules() if isinstance(one, SplitLinear)}
    return {f"{name}.weight" if name else "weight": one for name, one in found.items()}


def place_of(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return which part of a weight this rank has, and of how many."""
    return group.rank(), group.size()


def cut(whole: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of `whole`, one of N equal ones along `dim`, as a view.

    Raises ValueError if N does not divide it.
    """
    if whole.shape[dim] % group.size():
        raise ValueError(
            f"dimension {dim} must be a multiple of {group.size()} ranks, got {whole.shape[dim]}"
        )
    return whole.chunk(group.size(), dim)[group.rank()]


def join(part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the whole tensor from each rank's part along `dim`; collective."""
    sent = part.movedim(dim, 0).contiguous()
    whole = sent.new_empty(group.size() * sent.shape[0], *sent.shape[1:])
    all_gather_flat(whole.view(-1), sent.view(-1), group)
    return whole.movedim(0, dim)


def clip_grad_norm_(model: nn.Module, max_norm: float, eps: float = 1e-6) -> Tensor:
    """Clip the gradients of a split model in place as `clip_shards` does; return the whole norm.

    For a model without wrapper or in a DDP wrapper. Collective. Raises ValueError for a whole
    model, and for one in FSDP, whose own method knows split layers too.
    """
    layers = splits(model)
    if not layers or any(hasattr(one, "is_rows") for one in model.parameters()):
        raise ValueError(
            "model must be split and not sharded: take clip_gradients for a whole one, "
            "and the method of FSDP"
        )
    parts: list[Tensor] = []
    wholes: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            (parts if name in layers else wholes).append(parameter.grad)
    group = next(iter(layers.values())).group
    device = next(model.parameters()).device
    return clip_shards([(parts, [group]), (wholes, [])], max_norm, device, eps)
