"""A sharded weight at rest: which rows of it each rank keeps, and where the whole has its place.

A weight of R rows over N ranks is cut into N chunks of ceil(R / N) rows; the last chunks may be
shorter or empty. In an all-gather every rank sends a whole chunk, so the padding ends up behind row
R, and the whole weight is a contiguous prefix of what arrives.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor, nn

Home = tuple[nn.Module, str]  # a module that holds a weight, and the attribute


def chunk_rows(rows: int, num_ranks: int) -> int:
    """Return the rows of a chunk: ceil(rows / num_ranks)."""
    return -(-rows // num_ranks)


def own_rows(rows: int, rank: int, num_ranks: int) -> slice:
    """Return the slice of `rows` rows that `rank` keeps; empty if there are too few rows."""
    chunk = chunk_rows(rows, num_ranks)
    return slice(min(rows, rank * chunk), min(rows, (rank + 1) * chunk))


class ShardedWeight:
    """A sharded weight: `shard`, this rank's rows, and `whole`, which has memory while gathered.

    Args:
        name: the weight's name in the unwrapped module, that of its first home.
        like: the parameter before sharding; only its shape and `requires_grad` are read.
        homes: the (module, attribute) pairs that hold the weight, several if it is tied.
        place: (N * chunk rows, ...) view of the unit's memory, in the compute dtype.
        group: the N ranks that share the weight.
    """

    # (own rows, ...) in the dtype of the master weights; the parameter that the optimizer updates
    shard: nn.Parameter

    def __init__(
        self,
        name: str,
        like: nn.Parameter,
        homes: list[Home],
        place: Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        self.group = group
        rank, num_ranks = group.rank(), group.size()
        self.name = name
        self.shape = like.shape  # of the whole
        self.homes = homes
        self.rows = own_rows(len(like), rank, num_ranks)

        # `.data` gives each alias of `place` a version counter of its own: a second gather into the
        # same memory must not look to autograd like a change of what it saved.
        # gathered is (N * chunk rows, ...): the memory of `whole`, and padding behind it
        self.gathered = place.data
        chunk = chunk_rows(len(like), num_ranks)
        # this rank's part of `gathered`, with its padding: what it sends
        self.chunk = self.gathered[rank * chunk : (rank + 1) * chunk]
        # (R, ...) in the compute dtype; without memory while it is not gathered
        self.whole = nn.Parameter(place[: self.shape[0]].data, requires_grad=like.requires_grad)

        # sum of the gradients of earlier backwards under no_sync, in the reduce dtype
        self.accumulated: Tensor | None = None

    def keep(self, values: Tensor) -> None:
        """Make this rank's rows of the whole `values` the shard, and show it in all homes."""
        # contiguous, since those of channels-last convolutions are not
        rows = values[self.rows].clone(memory_format=torch.contiguous_format)
        self.shard = nn.Parameter(rows, requires_grad=self.whole.requires_grad)
        self.as_kept = (rows.dtype, rows.device, rows.shape)
        # `whole_of` reads this, whichever handle of the model the shard was found by. Weak, since a
        # cycle would keep both alive.
        self.shard.is_rows = weakref.ref(self)  # type: ignore[attr-defined]
        for module, attribute in self.homes:
            module._parameters[attribute] = self.shard

    def take_gradient(self) -> Tensor:
        """Return the whole gradient plus what was put aside before, and clear both."""
        gradient, aside = self.whole.grad, self.accumulated
        self.whole.grad = self.accumulated = None
        if aside is not None:
            gradient = aside if gradient is None else aside.add_(gradient)
        assert gradient is not None
        return gradient


def whole_of(parameter: Tensor) -> ShardedWeight | None:
    """Return the sharded weight that `parameter` is the shard of; None if `parameter` is whole.

    Raises RuntimeError if the weight is gone with its FSDP module, so that the whole is unknown.
    """
    if not hasattr(parameter, "is_rows"):
        return None
    weight = parameter.is_rows()
    if weight is None:
        shape = tuple(parameter.shape)
        raise RuntimeError(
            f"a parameter of shape {shape} is a rank's rows of a weight whose FSDP module is gone"
        )
    return weight
