"""The Hopper stage as operators: refuse what the kernels cannot do, choose a kernel, launch.

`OPERATORS` has what `flash_attention(backend="hopper")` calls, without and with a block mask, and
what `flash_attention_varlen` calls. The backward adds dQ up in memory as its programs arrive there,
with `deterministic` each in its turn. Dense heads above 128 columns have kernels that add nothing
in memory.

Triton's kernels compute some gradients: of masks and documents with `deterministic`, of documents
at head dims above 128, and where a mask's tiles, or documents on average, have fewer rows than the
kernel's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention.call import Call, Saved
from cs336_systems.attention.choose import refuse_hopper
from cs336_systems.attention.hopper.backward import (
    KEY_TILE,
    QUERY_TILES,
    hopper_backward,
    hopper_packed_backward,
)
from cs336_systems.attention.hopper.backward_walk import QUERY_PADDING
from cs336_systems.attention.hopper.descriptors import padded_width
from cs336_systems.attention.hopper.forward import hopper_forward, hopper_packed_forward
from cs336_systems.attention.hopper.schedule import plan_forward
from cs336_systems.attention.hopper.wide_backward import WIDE_BACKWARD
from cs336_systems.attention.replay import replayed
from cs336_systems.attention.rule import AttentionOperator
from cs336_systems.attention.tiles.kernel_config import head_tile
from cs336_systems.attention.triton.launch import num_multiprocessors, on_device_of
from cs336_systems.attention.triton.passes import triton_backward


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return (O, log-sum-exp) of a call on q's device, from the Hopper kernel for its kind."""
    refuse_hopper(q)  # an operator may be called directly
    options: dict[str, Any] = {
        "is_causal": call.is_causal and call.lists is None,
        "scale": call.scale,
        "config": call.config,
    }
    with on_device_of(q):
        if call.documents is not None:
            return hopper_packed_forward(q, k, v, call.documents, **options)
        if call.lists is not None:
            return hopper_forward(q, k, v, **options, lists=call.lists)
        if call.is_causal:
            k, v = _visible(k, q), _visible(v, q)
        return hopper_forward(q, k, v, **options)


def _backward(saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from the Hopper kernels or from Triton's."""
    if _is_for_triton(saved.q, call):
        return triton_backward(saved, call)
    refuse_hopper(saved.q)
    saved = saved._replace(lse=saved.lse.contiguous())
    q, k, v = saved[:3]
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale}
    with on_device_of(q):
        if call.documents is not None:
            return hopper_packed_backward(saved, call.documents, **options)
        if call.lists is not None:
            return hopper_backward(saved, is_causal=False, scale=call.scale, lists=call.lists)
        seen_k, seen_v = (_visible(k, q), _visible(v, q)) if call.is_causal else (k, v)
        seen = saved._replace(k=seen_k, v=seen_v)
        grads = hopper_backward(seen, **options, deterministic=call.deterministic)

    # zeros for the keys that no query sees
    if seen_k is k:
        return grads
    hidden = (0, 0, 0, k.shape[2] - seen_k.shape[2])
    grad_q, grad_k, grad_v = grads
    return grad_q, torch.nn.functional.pad(grad_k, hidden), torch.nn.functional.pad(grad_v, hidden)


def _is_for_triton(q: Tensor, call: Call) -> bool:
    """Return whether Triton's kernels compute a call's gradients (see the module)."""
    tile = head_tile(q.shape[-1])
    if call.lists is not None:
        return call.deterministic or call.lists.block_size[0] % QUERY_TILES[tile] != 0
    if call.documents is not None:
        # Documents are so short that more rows would be padding than theirs.
        is_short = len(call.documents.cu_seqlens_q) * QUERY_PADDING.value > len(q)
        return call.deterministic or is_short or tile not in QUERY_TILES
    return False


def _visible(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values x without those that a causal mask hides from all queries in q.

    The kernels would multiply the hidden values by probabilities of zero, which a NaN survives.
    """
    length = q.shape[2]
    return x[:, :, :length] if x.shape[2] > length else x


def kernel_names(q: Tensor, k: Tensor, *, is_causal: bool) -> str:
    """Return the names of the forward and backward kernels that run for q and k.

    The names have the kernels' tiles and the forward's order.

    q and k are (batch, heads, seq, head_dim), on the GPU for which the forward is chosen.
    """
    batch, heads, num_queries, head_dim = q.shape
    plan = plan_forward(
        head_dim=padded_width(q), is_causal=is_causal,
        num_queries=num_queries, num_keys=k.shape[2],
        batch_heads=batch * heads, group=heads // k.shape[1],
        num_multiprocessors=num_multiprocessors(q.device),
    )  # fmt: skip
    if head_tile(head_dim) in QUERY_TILES:
        backward = f"hopper_backward_{QUERY_TILES[head_tile(head_dim)]}x{KEY_TILE.value}"
    else:
        backward = WIDE_BACKWARD
    return f"{plan.schedule.name(plan.order)} {backward}"


OPERATORS = {  # by what attention runs over
    "dense": AttentionOperator("hopper_attention", _forward, _backward, replayed=replayed),
    "block_mask": AttentionOperator(
        "hopper_listed_attention", _forward, _backward, takes="lists", replayed=replayed
    ),
    "packed": AttentionOperator(
        "hopper_packed_attention", _forward, _backward, takes="documents", replayed=replayed
    ),
}
