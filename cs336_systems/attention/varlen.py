"""`flash_attention_varlen`: attention over documents of different lengths, packed end to end.

    # three documents, of 1000, 0 and 17 tokens
    cu_seqlens = torch.tensor([0, 1000, 1000, 1017], dtype=torch.int32, device="cuda")
    out = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 1000, 1000, is_causal=True)

No padding is computed, and no token sees another document. Below some thousand tokens an eager call
waits for the host (`writeup/dense_masks.md`).
"""

from __future__ import annotations

import math
from typing import Never

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cs336_systems.attention.api import flash_attention, operator_of
from cs336_systems.attention.call import Call, Documents
from cs336_systems.attention.checks import (
    check_attention_inputs,
    check_documents,
    check_flags,
    refuse_keywords,
    resolve_scale,
    to_autocast_dtypes,
)
from cs336_systems.attention.choose import explain_backend
from cs336_systems.attention.tiles import AttentionConfig


def flash_attention_varlen(
    q: Float[Tensor, "total_queries heads head_dim"],
    k: Float[Tensor, "total_keys kv_heads head_dim"],
    v: Float[Tensor, "total_keys kv_heads head_dim"],
    cu_seqlens_q: Int[Tensor, " documents_plus_1"],
    cu_seqlens_k: Int[Tensor, " documents_plus_1"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    config: AttentionConfig | None = None,
    **unknown: Never,
) -> Float[Tensor, "total_queries heads head_dim"] | tuple[Tensor, Tensor]:
    """Return exact attention of each document's queries to the document's own keys.

    Arguments that are not listed are those of `flash_attention`.

    Args:
        q, k, v: packed documents, one floating dtype and device, any strides.
        cu_seqlens_q, cu_seqlens_k: int32 boundaries, rising from 0: document d has rows cu[d] to
            cu[d + 1] - 1. Lengths may be 0, and may differ between queries and keys. On a GPU the
            values are not checked, which would stall the host. Rows behind the last boundary
            belong to no document.
        max_seqlen_q, max_seqlen_k: length of the longest document. They choose tiles; results do
            not depend on them.
        is_causal: within each document query i attends keys j <= i, aligned at the top left.
        return_lse: also return the log-sum-exp, (heads, total_queries).
        deterministic: as in `flash_attention` under a block_mask.
        backend: `triton` and `hopper` run one grid over all documents. The others loop over the
            documents, which under torch.compile breaks the graph.

    Queries without keys, of an empty or of no document, have O = 0, L = -inf and no gradient. A
    document's results and gradients do not depend on its neighbours, bit for bit where gradients
    are deterministic.

    Raises:
        TypeError, ValueError: an argument is wrong or the back end cannot serve it; raised before
            anything is launched.
        NotImplementedError: torch.func differentiates `tiled`, `triton` or `hopper`, or an input of
            one of them carries a forward-mode tangent.
    """
    if unknown:
        refuse_keywords("flash_attention_varlen", unknown)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    check_flags(
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
        deterministic=deterministic,
    )
    q, k, v = to_autocast_dtypes(q, k, v)
    check_attention_inputs(q, k, v, enable_gqa=enable_gqa, packed=True)
    check_documents(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scale = resolve_scale(scale, q.shape[2])
    longest = (max_seqlen_q, max_seqlen_k)

    # `explain_backend` reads heads before tokens
    backend, _ = explain_backend(
        q.transpose(0, 1),
        k.transpose(0, 1),
        backend=backend,
        is_causal=is_causal,
        layout="packed",
        longest=longest,
        config=config,
    )

    if backend in ("triton", "hopper"):
        documents = Documents(cu_seqlens_q, cu_seqlens_k, *longest)
        names = "" if config is None else config.names
        call = Call(is_causal, scale, deterministic, names, documents=documents)
        output, lse = operator_of(backend, "packed")(q, k, v, call)
    else:
        output, lse = _each_document(q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, scale, backend)
    return (output, lse) if return_lse else output


def _each_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return (output, lse) by one `flash_attention` call a document.

    The packed kernels are tested against this loop.
    """
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    behind_q, behind_k = len(q) - sum(lengths_q), len(k) - sum(lengths_k)
    queries = q.split([*lengths_q, behind_q])
    keys, values = (x.split([*lengths_k, behind_k]) for x in (k, v))

    # Without documents, too, output and log-sum-exp depend on all inputs, with gradients of zero.
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    nothing = q[:0] + k[:0].sum() + v[:0].sum()
    outputs, lses = [nothing], [nothing.sum(-1).transpose(0, 1).to(lse_dtype)]

    for document in zip(queries[:-1], keys, values):
        output, lse = flash_attention(
            *(x.transpose(0, 1) for x in document),
            is_causal=is_causal,
            scale=scale,
            enable_gqa=True,
            return_lse=True,
            backend=backend,
        )
        outputs.append(output.transpose(0, 1))
        lses.append(lse)

    # rows behind the last boundary
    outputs.append(torch.zeros_like(queries[-1]))
    lses.append(q.new_full((q.shape[1], behind_q), -math.inf, dtype=lse_dtype))
    return torch.cat(outputs), torch.cat(lses, dim=1)
