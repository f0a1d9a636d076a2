"""Rest: the rows of a weight that this rank keeps, and their place in the whole.

A weight of R rows over N ranks is cut into N chunks of ceil(R / N) rows; the last chunks may be shorter or empty. In
an all-gather every rank sends a whole chunk, padded, so that the padding ends up behind row R and the whole weight is a
contiguous prefix of what arrives.
"""

from __future__ import annotations

from torch import Tensor, nn

from cs336_systems.distributed.fsdp.plan import Home


def chunk_rows(rows: int, num_ranks: int) -> int:
    """Rows of a chunk: ceil(rows / num_ranks)."""
    return -(-rows // num_ranks)


def own_rows(rows: int, rank: int, num_ranks: int) -> slice:
    """The rows that `rank` keeps of `rows`; an empty slice where there are too few."""
    chunk = chunk_rows(rows, num_ranks)
    return slice(min(rows, rank * chunk), min(rows, (rank + 1) * chunk))


class ShardedWeight:
    """A weight, its shard and its whole; `homes` are the (module, attribute) pairs that hold it, several if tied."""

    shard: nn.Parameter  # (own rows, ...) in the dtype of the master weights; the optimizer's

    def __init__(
        self, name: str, like: nn.Parameter, homes: list[Home], place: Tensor, rank: int, num_ranks: int
    ) -> None:
        self.name = name  # of its first home, as in the unwrapped module
        self.shape = like.shape  # of the whole
        self.homes = homes
        self.rows = own_rows(self.shape[0], rank, num_ranks)
        self.chunk_rows = chunk_rows(self.shape[0], num_ranks)  # that each rank sends
        # `.data` gives each alias of `place` a version counter of its own: gathering again, into the same memory, must
        # not look to autograd like a change of what it saved.
        self.gathered = place.data  # (N * chunk_rows, ...): the memory of `whole` and the padding behind it
        self.chunk = self.gathered[rank * self.chunk_rows : (rank + 1) * self.chunk_rows]
        self.own_place = self.gathered[self.rows]  # the shard's place in it
        # (R, ...) in the compute dtype; without memory while it is not gathered
        self.whole = nn.Parameter(place[: self.shape[0]].data, requires_grad=like.requires_grad)
        self.accumulated: Tensor | None = None  # gradient of earlier backwards under no_sync, in reduce dtype

    def keep(self, values: Tensor) -> None:
        """Take this rank's rows of whole `values`; the modules see them from now on."""
        self.shard = nn.Parameter(values[self.rows].clone(), requires_grad=self.whole.requires_grad)
        self.shard.is_rows = True  # type: ignore[attr-defined] # for `check_optimizer`
        for module, attribute in self.homes:
            module._parameters[attribute] = self.shard

    def take_gradient(self) -> Tensor:
        """The whole gradient, with what was put aside before, taken off the weight."""
        gradient, aside = self.whole.grad, self.accumulated
        self.whole.grad = self.accumulated = None
        if aside is not None:
            gradient = aside if gradient is None else aside.add_(gradient)
        assert gradient is not None
        return gradient
