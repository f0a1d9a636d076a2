"""Context parallelism: ranks split a sequence, and pass keys and values around a ring.

    # this rank's part of the sequence, and of the output
    q, k, v = (zigzag_split(x, rank, num_ranks, dim=-2) for x in (q, k, v))
    output = ring_attention(q, k, v, is_causal=True)

    # or a whole TransformerLM, in place
    make_whole = split_context(model, group)
    logits = model(zigzag_split(tokens, rank, num_ranks, dim=1))

Source: ring attention, arXiv:2310.01889.

`merge_attention` combines attention over each rank's keys into attention over all keys. In step s a
rank attends to the keys of rank - s, while those of the next step are on their way. The backward
goes around the ring once more; it needs the inputs, the whole output and its log-sum-exp, but
nothing of the single steps. The gradients of keys and values travel one step behind: they are on
their way while the next part is computed, which is then added to them, and reach their owner after
the last step. No rank ever holds more than two ranks' keys.

Under a causal mask the split is a zig-zag (Llama 3, arXiv:2407.21783, section 3.3.2): of 2N chunks
rank r has chunks r and 2N - 1 - r. Each step is then one call of the same area on every rank:

- keys of a lower rank: all queries to the first half of the keys;
- keys of a higher rank: the second half of the queries to all keys;
- the rank's own keys: the plain triangle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from cs336_systems.attention.api import attention_backward, flash_attention
from cs336_systems.attention.checks import DOUBLE_BACKWARD, to_autocast_dtype
from cs336_systems.distributed.collectives import Group
from cs336_systems.distributed.guards import as_group, check_same_shapes
from cs336_systems.model import CausalMultiHeadSelfAttention, RotaryEmbedding

Pair = tuple[Tensor, Tensor]
_CHECKED: WeakSet[dist.ProcessGroup] = WeakSet()  # groups whose first call had equal shapes


def merge_attention(
    output_1: Float[Tensor, "... queries head_dim"],
    lse_1: Float[Tensor, "... queries"],
    output_2: Float[Tensor, "... queries head_dim"],
    lse_2: Float[Tensor, "... queries"],
) -> Pair:
    """Return (output, log-sum-exp) over two disjoint sets of keys, given those over each set.

    Differentiable. A part without keys has output 0 and log-sum-exp -inf, and changes nothing; a
    key that is in both sets counts twice. Sums are in the log-sum-exps' dtype, which is float32 or
    wider; the output has the dtype of `output_1`. Raises ValueError if shapes do not match.
    """
    if (
        output_1.shape != output_2.shape
        or lse_1.shape != output_1.shape[:-1]
        or lse_2.shape != lse_1.shape
    ):
        shapes = ", ".join(str(tuple(one.shape)) for one in (output_1, lse_1, output_2, lse_2))
        raise ValueError(
            "outputs must have one shape and log-sum-exps that without its last dimension, "
            f"got {shapes}"
        )

    # the weight of each part; two empty parts would give -inf minus -inf, which is NaN
    largest = torch.maximum(lse_1, lse_2).detach()
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weight_1, weight_2 = torch.exp(lse_1 - largest), torch.exp(lse_2 - largest)
    total = weight_1 + weight_2
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)

    output = output_1 * (weight_1 / safe)[..., None] + output_2 * (weight_2 / safe)[..., None]
    lse = (largest + safe.log()).masked_fill(empty, -torch.inf)
    return output.to(output_1.dtype), lse


def zigzag_split(tensor: Tensor, rank: int, num_ranks: int, dim: int) -> Tensor:
    """Return chunks `rank` and 2 * num_ranks - 1 - `rank` of `tensor` along `dim`, concatenated.

    The tensor is cut into 2 * num_ranks equal chunks. Raises ValueError if that is impossible.
    """
    length = tensor.shape[dim]
    if length % (2 * num_ranks):
        raise ValueError(
            f"tensor must have a multiple of {2 * num_ranks} elements along dim {dim}, got {length}"
        )
    chunks = tensor.chunk(2 * num_ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]], dim)


def zigzag_join(parts: list[Tensor], dim: int) -> Tensor:
    """Return the whole tensor from the `zigzag_split` of each rank, given in rank order."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat(
        [first for first, _ in halves] + [second for _, second in reversed(halves)], dim
    )


def ring_attention(
    q: Float[Tensor, "... heads queries head_dim"],
    k: Float[Tensor, "... kv_heads keys head_dim"],
    v: Float[Tensor, "... kv_heads keys head_dim"],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    group: Group = None,
    backend: str = "auto",
) -> Float[Tensor, "... heads queries head_dim"]:
    """Return attention of this rank's queries over the keys of all ranks of `group`.

    Every rank must call it, with equal shapes. q, k and v are this rank's part of the sequence:
    with `is_causal`, the top-left mask of the whole sequence, its `zigzag_split`, otherwise any.
    Another split is not noticed, and gives wrong rows. `scale`, `enable_gqa` and `backend` are
    those of `flash_attention`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: on a rank that is not in `group`; with `is_causal` for an odd number of
            positions, or different numbers for q and k; on all ranks if their shapes or dtypes
            differ in the first call on a group. In a later call ranks with different shapes hang,
            or gloo ends their processes.
        NotImplementedError: when it is differentiated twice.
    """
    group = as_group(group)

    # checked in the first call only: the check is a message for which the host waits
    if not torch.compiler.is_compiling() and group not in _CHECKED:
        check_same_shapes(
            [("q", q.detach()), ("k", k.detach()), ("v", v.detach())], group, what="q, k and v"
        )
        _CHECKED.add(group)
    if is_causal and (q.shape[-2] != k.shape[-2] or q.shape[-2] % 2):
        numbers = f"{q.shape[-2]} and {k.shape[-2]}"
        raise ValueError(
            "q and k must have the same even number of positions under a causal mask, "
            f"got {numbers}"
        )

    # exactly one batch dimension
    inputs = [to_autocast_dtype(x) for x in (q, k, v)]
    if q.ndim != 4 and all(x.ndim > 2 for x in inputs):
        inputs = [x.unsqueeze(0) if x.ndim == 3 else x.flatten(0, -4) for x in inputs]
    output: Tensor = _RingAttention.apply(*inputs, is_causal, scale, enable_gqa, group, backend)
    return output.view(q.shape)


class _RingAttention(torch.autograd.Function):
    """Ring attention on tensors of four dimensions; saves the inputs, output and log-sum-exp.

    Keys and values of other ranks are not saved: they go around once more in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        group: dist.ProcessGroup,
        backend: str,
    ) -> Tensor:
        """Return attention of this rank's queries over all keys; sums are in float32 or wider."""
        attend = partial(
            flash_attention, scale=scale, enable_gqa=enable_gqa, return_lse=True, backend=backend
        )
        output = torch.zeros(
            q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
        )
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=output.dtype, device=q.device)
        kv = torch.stack([k, v])  # one message
        for step in range(group.size()):
            arriving = _pass_on(kv, group) if step + 1 < group.size() else None

            # attend to the keys at hand, and merge
            rows, keys, triangle = _visible(step, group.rank(), q.shape[-2], k.shape[-2], is_causal)
            part = attend(
                q[..., rows, :], kv[0][..., keys, :], kv[1][..., keys, :], is_causal=triangle
            )
            merged = merge_attention(
                output[..., rows, :], lse[..., rows], part[0].to(output.dtype), part[1]
            )
            output[..., rows, :], lse[..., rows] = merged

            if arriving is not None:
                kv = arriving()

        result = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.is_causal, ctx.scale, ctx.group, ctx.backend = is_causal, scale, group, backend
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        """Return the gradients of q, k and v, and None for the other arguments."""
        grads = _ring_backward(ctx, grad_output)
        inputs = [*ctx.saved_tensors[:3], grad_output]
        return *refuse_double_backward(grads, inputs), *(None,) * 5


@torch.no_grad()
def _ring_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's q, k and v, in their dtypes."""
    q, k, v, output, lse = ctx.saved_tensors
    group: dist.ProcessGroup = ctx.group
    grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    kv, returning = torch.stack([k, v]), None
    for step in range(group.size()):
        arriving = _pass_on(kv, group) if step + 1 < group.size() else None

        # the gradients of this rank's queries with the keys at hand
        rows, keys, triangle = _visible(step, group.rank(), q.shape[-2], k.shape[-2], ctx.is_causal)
        own = attention_backward(
            q[..., rows, :],
            kv[0][..., keys, :],
            kv[1][..., keys, :],
            output[..., rows, :],
            lse[..., rows],
            grad_output[..., rows, :],
            is_causal=triangle,
            scale=ctx.scale,
            backend=ctx.backend,
        )
        grad_q[..., rows, :] += own[0]

        # What earlier ranks have computed for these keys has arrived meanwhile; add this rank's.
        grad_kv = (
            torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)
            if returning is None
            else returning()
        )
        grad_kv[0][..., keys, :] += own[1]
        grad_kv[1][..., keys, :] += own[2]

        if arriving is not None:
            kv = arriving()
        returning = _pass_on(grad_kv, group)  # the last step sends them to their owner
    assert returning is not None
    grad_kv = returning()
    return grad_q.to(q.dtype), grad_kv[0].to(k.dtype), grad_kv[1].to(v.dtype)


class _FirstOrderOnly(torch.autograd.Function):
    """Makes three gradients depend on four inputs for autograd: differentiating them raises."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_q: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grad_output: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three gradients."""
        return grad_q.view_as(grad_q), grad_k.view_as(grad_k), grad_v.view_as(grad_v)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(DOUBLE_BACKWARD)


def refuse_double_backward(
    grads: tuple[Tensor, Tensor, Tensor], inputs: list[Tensor]
) -> tuple[Tensor, ...]:
    """Return `grads`; under `create_graph` differentiating them raises NotImplementedError.

    `inputs`, on which they depend, are q, k, v and the output's gradient. Without this the
    gradients would be constants for autograd, and a penalty on a gradient would silently train
    nothing.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return grads
    return _FirstOrderOnly.apply(*grads, *inputs)


def _visible(
    step: int, rank: int, num_queries: int, num_keys: int, is_causal: bool
) -> tuple[slice, slice, bool]:
    """Return (query rows, keys, whether the mask is the triangle) of this rank's `step`.

    Under a causal mask only these rows of the rank's queries see these of the keys at hand.
    """
    everything = slice(None)
    if step == 0 or not is_causal:
        return everything, everything, is_causal
    if step <= rank:  # the keys of a lower rank
        return everything, slice(0, num_keys // 2), False
    return slice(num_queries // 2, None), everything, False


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start sending `tensor` to the next rank; return a function that waits for the previous one's.

    That function returns the tensor of the previous rank, which has the same shape. With one rank
    it returns `tensor`.
    """
    sent = tensor.contiguous()
    if group.size() == 1:
        return lambda: sent
    received = torch.empty_like(sent)
    right, left = ((group.rank() + way) % group.size() for way in (1, -1))
    operations = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=right),
        dist.P2POp(dist.irecv, received, group=group, group_peer=left),
    ]
    works = dist.batch_isend_irecv(operations)

    def wait() -> Tensor:
        """Wait for both directions, and return what has arrived."""
        for work in works:
            work.wait()
        del works[:], operations[:]  # these have kept `sent` alive until it was sent
        return received

    return wait


# A whole model


class _PartRotary(nn.Module):
    """Rotary embedding of this rank's positions, which it splits off whole tables when called.

    A table of this rank's positions as a buffer would not survive: DDP and FSDP make buffers equal
    on all ranks.
    """

    def __init__(self, whole: RotaryEmbedding, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.whole, self.rank, self.num_ranks = whole, rank, num_ranks

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, of shape (..., this rank's positions, head_dim), rotated.

        Raises ValueError if it has another number of positions.
        """
        cos, sin = (
            zigzag_split(table, self.rank, self.num_ranks, 0)
            for table in (self.whole.cos, self.whole.sin)
        )
        if x.shape[-2] != len(cos):
            raise ValueError(
                f"sequence must be this rank's {len(cos)} positions, got {x.shape[-2]}"
            )
        return RotaryEmbedding.rotate(x, cos, sin)


def split_context(
    model: nn.Module, group: Group = None, backend: str = "auto"
) -> Callable[[], None]:
    """Change `model`, a TransformerLM, in place to take this rank's `zigzag_split` of the context.

    Returns a function that undoes the change. Contexts must have the model's full length. A loss is
    then a mean over the rank's tokens, and the mean of all ranks' gradients is that of the whole
    batch: wrap the model afterwards like any other. Raises ValueError if `model` has no attention
    layers; a forward raises it if the context length is not a multiple of 2 * ranks.
    """
    rank, num_ranks = as_group(group).rank(), as_group(group).size()
    layers = [inner for inner in model.modules() if isinstance(inner, CausalMultiHeadSelfAttention)]
    if not layers:
        raise ValueError(
            f"model must have CausalMultiHeadSelfAttention layers, {type(model).__name__} has none"
        )
    before, rope = layers[0].attention, layers[0].rope
    part = _PartRotary(rope, rank, num_ranks)
    for layer in layers:
        layer.rope = part  # type: ignore[assignment]
        layer.attention = partial(ring_attention, is_causal=True, group=group, backend=backend)

    def make_whole() -> None:
        """Give the layers their own rotation and attention back."""
        for layer in layers:
            layer.rope, layer.attention = rope, before

    return make_whole
