"""The records that carry an attention call's options and tensors from `api` to the launch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jaxtyping import Bool, Int
from torch import Tensor

from cs336_systems.attention.masks.tiles import TileLists


class Documents(NamedTuple):
    """Boundaries of packed documents, and the lengths of the longest one.

    Document d has the rows cu_seqlens[d] to cu_seqlens[d + 1] - 1 of q, and of k and v.
    """

    cu_seqlens_q: Int[Tensor, " documents_plus_1"]
    cu_seqlens_k: Int[Tensor, " documents_plus_1"]
    max_seqlen_q: int
    max_seqlen_k: int


class Call(NamedTuple):
    """Checked options of one attention call; none of them has a gradient.

    At most one of `mask`, `lists` and `documents` is given.
    """

    is_causal: bool
    scale: float
    deterministic: bool = False
    # `AttentionConfig.names`, a schedule of the Hopper kernels, or "" for the back end's choice
    config: str = ""
    mask: Bool[Tensor, "batch heads queries keys"] | None = None  # for back ends that walk no lists
    lists: TileLists | None = None  # of a block mask
    documents: Documents | None = None  # given if q, k and v are packed


class Saved(NamedTuple):
    """Tensors that a backward needs: the forward's inputs and results, and the upstream gradients.

    `grad_lse` is None where no gradient reaches the log-sum-exp.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None = None


class Passes(Protocol):
    """A forward and a backward of attention: those of an `AttentionOperator`, or its replays."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]: ...

    def backward(self, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]: ...
