"""Optimizer state sharding: every rank keeps the optimizer state of its share of the parameters,
and of no others.

    optimizer = ShardedOptimizer(model.parameters(), AdamW, lr=1e-3)    # instead of AdamW(model.parameters(), lr=1e-3)
    loss.backward()                                                     # gradients averaged over ranks by a DDP wrapper
    optimizer.step()                                                    # update the own share, then broadcast it

Phases of a step: update (the wrapped optimizer, on the parameters that this rank owns), then
broadcast (each owner sends what it updated). Owners are chosen by size: the largest parameter
first, each to the rank with the fewest bytes so far. Parameters and gradients stay whole: with
AdamW a rank saves (1 - 1/num_ranks) of the two moments, and pays with broadcasts of all parameters
on top of the all-reduce of all gradients. `zero1.py` has the variant that pays nothing (ZeRO stage
1, Rajbhandari et al., arXiv:1910.02054).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils._pytree import tree_map_only

from cs336_systems.distributed.collectives import Group, check_same_shapes
from cs336_systems.distributed.optimizer_shares import OptimizerOfShares, hyperparameters

PACKED_BYTES = 2**20  # parameters smaller than this travel together, in one message an owner


class ShardedOptimizer(OptimizerOfShares):
    """`optimizer_cls` over `params`, its state sharded over the ranks of `process_group` (None: all
    ranks).

    `params` is what torch.optim takes; `kwargs` go to `optimizer_cls`. A tensor listed twice counts
    once; one that needs no gradient is owned and never sent. All ranks must build it from the same
    parameters in the same order, and hold equal gradients when `step` is called. Learning rates are
    changed in `param_groups`, as always. `state` holds this rank's share.

    Raises TypeError if `optimizer_cls` works on all parameters at once (LBFGS), RuntimeError
    without a process group.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[torch.optim.Optimizer],
        process_group: Group = None,
        **kwargs: Any,
    ) -> None:
        self.owners: dict[Tensor, int] = {}  # rank in the group that updates each parameter
        self.bytes_owned: dict[int, int] = defaultdict(int)  # by rank
        super().__init__(params, optimizer_cls, process_group, kwargs)
        self.local = optimizer_cls([self._own_part(group) for group in self.param_groups], **kwargs)
        self._take_settings()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and share it out; also called for each group by the constructor of the base
        class.
        """
        super().add_param_group(param_group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        names = (f"parameter {index} of group {number}" for index in range(len(group["params"])))
        check_same_shapes(zip(names, group["params"]), self.process_group)
        # stable: alike on all ranks
        for parameter in sorted(group["params"], key=lambda parameter: -parameter.nbytes):
            owner = min(range(self.num_ranks), key=lambda rank: self.bytes_owned[rank])
            self.owners[parameter] = owner
            self.bytes_owned[owner] += parameter.nbytes
        if hasattr(self, "local"):
            self.local.add_param_group(self._own_part(group))
            self._take_settings()

    def _own_part(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**hyperparameters(group), "params": [*filter(self.owns, group["params"])]}

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates `parameter` and keeps its state."""
        return self.owners[parameter] == self.rank

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the own share, then exchange the updated parameters; returns what `closure`, run
        by all, returns.
        """
        self._give_settings()
        loss = self.local.step(**kwargs) if closure is None else self.local.step(closure, **kwargs)
        self._broadcast_updates()
        return loss

    @torch.no_grad()
    def _broadcast_updates(self) -> None:
        """Start all messages, then wait for all: neighbours have different owners, so that all
        links are busy.
        """
        if self.num_ranks == 1:
            return
        packed: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        messages: list[tuple[int, int, Tensor]] = []  # turn, owner, what it sends
        turns: Counter[int] = Counter()
        for parameter, owner in self.owners.items():
            if not parameter.requires_grad or parameter.numel() == 0:
                continue
            if parameter.nbytes < PACKED_BYTES or not parameter.is_contiguous():
                packed[owner, parameter.dtype, parameter.device].append(parameter.detach())
            else:
                messages.append((turns[owner], owner, parameter.detach()))
                turns[owner] += 1
        messages.sort(key=lambda message: message[:2])
        buffers = {key: _flatten_dense_tensors(tensors) for key, tensors in packed.items()}
        messages += [(0, key[0], buffer) for key, buffer in buffers.items()]
        works = [
            dist.broadcast(tensor, group_src=owner, group=self.process_group, async_op=True)
            for _, owner, tensor in messages
        ]
        for work in works:
            work.wait()
        for key, tensors in packed.items():
            if key[0] != self.rank:
                torch._foreach_copy_(tensors, _unflatten_dense_tensors(buffers[key], tensors))

    def all_states(self) -> dict[Tensor, dict[str, Any]]:
        parameters = self.parameters
        places = {parameter: place for place, parameter in enumerate(parameters)}
        own = {
            places[parameter]: tree_map_only(Tensor, Tensor.cpu, state)
            for parameter, state in self.state.items()
        }
        everyone: list[Any] = [own] * self.num_ranks
        if self.num_ranks > 1:
            dist.all_gather_object(everyone, own, group=self.process_group)
        return {parameters[place]: state for states in everyone for place, state in states.items()}

    def own_states(self, states: dict[Tensor, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {
            place: states[one]
            for place, one in enumerate(filter(self.owns, self.parameters))
            if states[one]
        }
