"""One sharded weight: the rows that this rank keeps, and the whole that it borrows for a forward or backward.

A weight of R rows over N ranks is cut into N chunks of ceil(R / N) rows; the last chunks may be shorter or empty. In
an all-gather every rank sends a whole chunk, padded, so that the padding ends up behind row R and the whole weight is a
contiguous prefix of what arrives: no copy, no trimming.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class ShardedWeight:
    """A weight, its shard and its whole; `homes` are the (module, attribute) pairs that hold it, several if tied."""

    name: str  # of its first home, as in the unwrapped module
    shape: torch.Size  # of the whole
    homes: list[tuple[nn.Module, str]]
    chunk_rows: int  # rows that each rank sends
    whole: nn.Parameter  # (R, ...) in the compute dtype; without memory while it is not gathered
    gathered: Tensor  # (N * chunk_rows, ...): the memory of `whole` and the padding behind it
    chunk: Tensor  # (chunk_rows, ...): this rank's part of `gathered`
    own_place: Tensor  # (own rows, ...): the shard's place in it
    shard: nn.Parameter = field(init=False)  # (own rows, ...) in the dtype of the master weights; the optimizer's
    accumulated: Tensor | None = field(default=None)  # gradient of earlier backwards under no_sync, in reduce dtype

    @property
    def padded(self) -> bool:
        """Whether the last rows of the all-gather are padding."""
        return self.gathered.shape[0] != self.shape[0]

    def keep(self, values: Tensor, rank: int, num_ranks: int) -> None:
        """Take the rows of `rank` from whole `values`; the modules see them from now on."""
        own = values[own_rows(self.shape[0], rank, num_ranks)].clone()
        self.shard = nn.Parameter(own, requires_grad=self.whole.requires_grad)
        self.show_shard()

    def show_whole(self) -> None:
        """Let the modules see the whole weight."""
        for module, attribute in self.homes:
            module._parameters[attribute] = self.whole

    def show_shard(self) -> None:
        """Let the modules, and so `named_parameters`, see the shard."""
        for module, attribute in self.homes:
            module._parameters[attribute] = self.shard


def chunk_rows(rows: int, num_ranks: int) -> int:
    """Rows of a chunk: ceil(rows / num_ranks)."""
    return -(-rows // num_ranks)


def own_rows(rows: int, rank: int, num_ranks: int) -> slice:
    """The rows that `rank` keeps of `rows`; an empty slice where there are too few."""
    chunk = chunk_rows(rows, num_ranks)
    return slice(min(rows, rank * chunk), min(rows, (rank + 1) * chunk))
