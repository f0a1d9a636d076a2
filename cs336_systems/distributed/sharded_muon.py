"""Muon over FSDP's shards: a matrix is orthogonalized by one rank, its owner.

    model = FSDP(TransformerLM.from_config(config))
    optimizer = ShardedMuon(muon_groups(model), lr=1e-3)

The momentum is elementwise, so each rank keeps it for its rows. Newton-Schulz is not: every element
of its result depends on the whole matrix. So a step has four phases:

- momentum: each rank, for its rows of all matrices;
- gather: an all-to-all brings the rows of each matrix to its owner, in bfloat16;
- orthogonalize: each owner, its matrices;
- scatter: a second all-to-all brings the rows of the results back.

With S bytes of all matrices in bfloat16 a rank of N sends S (N - 1) / N² twice, and computes 1/N of
the FLOPs. If every rank gathered all matrices, as for a forward, it would send N / 2 times as much
and compute N times as much. Owners are chosen by FLOPs: the most expensive matrix first, each to
the rank with the fewest so far.

Under a DDP wrapper, whose ranks have whole gradients, `ShardedOptimizer(params, Muon)` is the same
with a broadcast in place of both messages: 2 S (N - 1) / N bytes of float32 weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.fsdp.weight import ShardedWeight, own_rows, whole_of
from cs336_systems.model.muon import Muon, newton_schulz, newton_schulz_flops


class ShardedMuon(Muon):
    """Muon of matrices that FSDP has cut into rows; other groups, `use_muon=False`, as AdamW.

    Arguments are those of `Muon`. All ranks must build it from the same parameters in the same
    order, and call `step` together. Raises ValueError for a matrix that FSDP has not cut, and for
    matrices of several FSDP groups.
    """

    saved_as = "Muon"  # in checkpoints, which one process and replicas can go on with
    knows_rows = True  # for the check that an optimizer updates FSDP's rows as it would the whole

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose hyper-parameters replace the defaults."""
        super().add_param_group(param_group)
        matrices = [
            one for group in self.param_groups if group["use_muon"] for one in group["params"]
        ]
        groups = {_weight(one).group.group_name for one in matrices}
        if len(groups) > 1:
            raise ValueError(f"matrices must be of one FSDP group, got {len(groups)}")

    def whole_shape(self, matrix: Tensor) -> torch.Size:
        """Return the shape of the whole matrix whose rows the parameter holds."""
        return _weight(matrix).shape

    def orthogonalize(self, updates: list[Tensor]) -> list[Tensor]:
        """Return this rank's rows of each matrix, orthogonalized by its owner; collective."""
        if not updates:
            return []
        weights = [_weight(matrix) for matrix, _ in self._matrices]
        group = weights[0].group
        ranks = range(group.size())
        owners = choose_owners([weight.shape for weight in weights], group.size())
        mine = [place for place, owner in enumerate(owners) if owner == group.rank()]

        def rows(place: int, rank: int) -> tuple[int, int]:
            """Return the shape of the rows that `rank` has of matrix `place`."""
            own = own_rows(weights[place].shape[0], rank, group.size())
            return own.stop - own.start, weights[place].shape[1]

        # gather: to each rank the rows of its matrices; from each rank the rows of mine
        sent = [[updates[p] for p, owner in enumerate(owners) if owner == rank] for rank in ranks]
        shapes = [[rows(place, rank) for place in mine] for rank in ranks]
        arrived = exchange(sent, shapes, updates[0], group)

        # orthogonalize mine
        steps = [settings["ns_steps"] for _, settings in self._matrices]
        done = [
            newton_schulz(torch.cat(parts), steps[place])
            for place, *parts in zip(mine, *arrived, strict=True)
        ]

        # scatter: to each rank its rows of mine; from each rank my rows of its matrices
        sizes = [[shape[0] for shape in some] for some in zip(*shapes)]  # by matrix, of each rank
        cut = [matrix.split(some) for matrix, some in zip(done, sizes)]
        back = [[pieces[rank] for pieces in cut] for rank in ranks]
        theirs = [[p for p, owner in enumerate(owners) if owner == rank] for rank in ranks]
        shapes = [[rows(place, group.rank()) for place in some] for some in theirs]
        results = exchange(back, shapes, updates[0], group)
        by_place = {
            place: piece
            for places, pieces in zip(theirs, results)
            for place, piece in zip(places, pieces)
        }
        return [by_place[place] for place in range(len(updates))]


def choose_owners(shapes: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return the rank that orthogonalizes each matrix of `shapes`, balanced by FLOPs."""
    flops = [newton_schulz_flops(*shape) for shape in shapes]
    loads = [0] * num_ranks
    owners = [0] * len(shapes)
    for place in sorted(range(len(shapes)), key=lambda place: -flops[place]):
        owners[place] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[place]] += flops[place]
    return owners


def exchange(
    sent: list[list[Tensor]],
    shapes: list[list[tuple[int, int]]],
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """Send the tensors `sent[i]` to rank i, and return those of `shapes[i]` from each rank i.

    One all-to-all in the dtype of `like`; every rank must know what the others send.
    """
    flat = torch.cat([like.new_empty(0), *(one.reshape(-1) for some in sent for one in some)])
    sizes = [[rows * columns for rows, columns in some] for some in shapes]
    received = like.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        received,
        flat,
        [sum(some) for some in sizes],
        [sum(one.numel() for one in some) for some in sent],
        group=group,
    )
    places = [*accumulate((size for some in sizes for size in some), initial=0)]
    pieces = iter(zip(places, places[1:]))
    return [[received[slice(*next(pieces))].view(shape) for shape in some] for some in shapes]


def _weight(matrix: Tensor) -> ShardedWeight:
    """Return the sharded weight of a parameter; ValueError if FSDP has not cut it."""
    weight = whole_of(matrix)
    if weight is None:
        raise ValueError(
            "params must be matrices that FSDP has cut: take Muon, or ShardedOptimizer with Muon"
        )
    return weight
