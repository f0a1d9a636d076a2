"""What an attention call is told beside q, k and v, as it goes from `api` to the launch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jaxtyping import Bool, Int
from torch import Tensor

from cs336_systems.attention.masks.tiles import TileLists


class Documents(NamedTuple):
    """Boundaries of packed documents, and the lengths of the longest."""

    cu_seqlens_q: Int[Tensor, " documents_plus_1"]
    cu_seqlens_k: Int[Tensor, " documents_plus_1"]
    max_seqlen_q: int
    max_seqlen_k: int


class Call(NamedTuple):
    """Checked options; nothing here has a gradient. At most one of `mask`, `lists` and `documents`
    is given.
    """

    is_causal: bool
    scale: float
    deterministic: bool = False
    config: str = ""  # `AttentionConfig.names`, a schedule of Hopper's, or the back end's choice
    mask: Bool[Tensor, "batch heads queries keys"] | None = None  # for back ends that walk no lists
    lists: TileLists | None = None  # of a block mask
    documents: Documents | None = None  # q, k and v are packed


class Saved(NamedTuple):
    """What a backward gets of its forward, and the upstream gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None = None


class Passes(Protocol):
    """A forward and a backward, as an operator has them, or replays of them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]: ...

    def backward(self, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]: ...
