"""The Hopper stage as operators: refuse what the kernels cannot do, choose a kernel, launch.

`hopper_attention(q, k, v, deterministic, is_causal, scale, config)` is what `flash_attention(backend="hopper")` calls,
with a block mask `hopper_listed_attention`, and what `flash_attention_varlen` calls `hopper_packed_attention`. The
backward adds dQ up in memory as its programs arrive there, with `deterministic` each in its turn; dense heads above 128
have kernels that add nothing in memory. It is Triton's of masks and documents with `deterministic`, of documents at
head dims above 128, and where a mask's tiles, or documents on average, are of fewer rows than the kernel's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention.backends import refuse_hopper
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
from cs336_systems.attention.masks.tiles import TileLists
from cs336_systems.attention.operator import AttentionOperator
from cs336_systems.attention.tiles.config import head_tile
from cs336_systems.attention.triton.function import (
    CU_SEQLENS,
    LISTS,
    block_sparse_backward,
    varlen_backward,
)
from cs336_systems.attention.triton.launch import Replays, on_device_of
from cs336_systems.attention.triton.operands import num_multiprocessors


def _forward(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool, is_causal: bool, scale: float, config: str
) -> tuple[Tensor, Tensor]:
    refuse_hopper(q)  # for those who call an operator itself
    if is_causal:
        k, v = _visible(k, q), _visible(v, q)
    with on_device_of(q):
        return hopper_forward(q, k, v, is_causal, scale, config)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None,
    deterministic: bool, is_causal: bool, scale: float, config: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    refuse_hopper(q)
    seen_k, seen_v = (_visible(k, q), _visible(v, q)) if is_causal else (k, v)
    with on_device_of(q):
        grad_q, grad_k, grad_v = hopper_backward(
            q, seen_k, seen_v, output, lse.contiguous(), grad_output, grad_lse, deterministic, is_causal, scale
        )
    if seen_k is not k:
        hidden = (0, 0, 0, k.shape[2] - seen_k.shape[2])
        grad_k, grad_v = (torch.nn.functional.pad(grad, hidden) for grad in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def _listed_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, _, _, scale, config = arguments
    refuse_hopper(q)
    with on_device_of(q):
        return hopper_forward(q, k, v, False, scale, config, TileLists(*tensors))


def _listed_backward(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *tensors, deterministic, _, scale, config = arguments
    lists = TileLists(*tensors)
    if deterministic or lists.block_size[0] % QUERY_TILES[head_tile(q.shape[-1])]:
        return block_sparse_backward(q, k, v, output, lse, grad_output, grad_lse, *tensors, False, scale, config)
    refuse_hopper(q)
    with on_device_of(q):
        return hopper_backward(q, k, v, output, lse.contiguous(), grad_output, grad_lse, False, False, scale, lists)


def _packed_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    deterministic: bool, is_causal: bool, scale: float, config: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_hopper(q)
    with on_device_of(q):
        return hopper_packed_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), is_causal, scale, config
        )


def _packed_backward(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    deterministic: bool, is_causal: bool, scale: float, config: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    saved = (q, k, v, output, lse.contiguous(), grad_output, grad_lse, cu_seqlens_q, cu_seqlens_k)
    is_short = len(cu_seqlens_q) * QUERY_PADDING.value > len(q)  # padding would be more than documents
    if deterministic or is_short or head_tile(q.shape[-1]) not in QUERY_TILES:
        return varlen_backward(*saved, max_seqlen_q, max_seqlen_k, is_causal, scale, config)
    refuse_hopper(q)
    with on_device_of(q):
        return hopper_packed_backward(*saved, max_seqlen_q, is_causal, scale)


def _visible(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values x without those that come after all of q's queries, which a causal mask hides.

    The kernels would multiply them by probabilities of zero, which a NaN survives.
    """
    length = q.shape[2]
    return x[:, :, :length] if x.shape[2] > length else x


def kernel_names(q: Tensor, k: Tensor, *, is_causal: bool) -> str:
    """What runs for q and k (batch, heads, seq, head_dim) on their GPU: both passes' tiles, the forward's order."""
    batch, heads, num_queries, head_dim = q.shape
    plan = plan_forward(
        head_dim=padded_width(q), is_causal=is_causal, num_queries=num_queries, num_keys=k.shape[2],
        batch_heads=batch * heads, group=heads // k.shape[1], num_multiprocessors=num_multiprocessors(q.device),
    )  # fmt: skip
    if head_tile(head_dim) in QUERY_TILES:
        backward = f"hopper_backward_{QUERY_TILES[head_tile(head_dim)]}x{KEY_TILE.value}"
    else:
        backward = WIDE_BACKWARD
    return f"{plan.schedule.name(plan.order)} {backward}"


hopper_attention = AttentionOperator(
    "hopper_attention", _forward, _backward, extras=("bool deterministic",), replays=Replays
)
hopper_listed_attention = AttentionOperator(
    "hopper_listed_attention", _listed_forward, _listed_backward, extras=(*LISTS, "bool deterministic"), replays=Replays
)
hopper_packed_attention = AttentionOperator(
    "hopper_packed_attention",
    _packed_forward,
    _packed_backward,
    extras=(*CU_SEQLENS, "bool deterministic"),
    packed=True,
    replays=Replays,
)
