"""Optimizer state sharding: every rank keeps the optimizer state of its own parameters only.

    # in place of AdamW(model.parameters(), lr=1e-3)
    optimizer = ShardedOptimizer(model.parameters(), AdamW, lr=1e-3)
    loss.backward()                         # gradients are averaged over ranks by a DDP wrapper
    optimizer.step()                        # update the own share, then broadcast it

The phases of a step are update (the wrapped optimizer works on the parameters that this rank owns)
and broadcast (each owner sends what it updated). Owners are chosen by size: the largest parameter
first, each to the rank with the fewest bytes so far. Parameters and gradients stay whole. With
AdamW a rank saves (1 - 1/num_ranks) of the two moments, and pays with broadcasts of all parameters
on top of the all-reduce of all gradients. `zero1.py` has the variant that sends no more than an
all-reduce (ZeRO stage 1, Rajbhandari et al., arXiv:1910.02054).
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

from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import Group
from cs336_systems.distributed.optimizer_shares import OptimizerOfShares, hyperparameters

PACKED_BYTES = 2**20  # smaller parameters of an owner travel together, in one message per dtype


class ShardedOptimizer(OptimizerOfShares):
    """Updates this rank's share of `params` by `optimizer_cls`, and broadcasts it to all ranks.

    Args:
        params: parameters or groups as torch.optim takes them. A tensor listed twice counts once;
            one that needs no gradient is owned and never sent.
        optimizer_cls: the optimizer that makes the updates.
        process_group: the ranks that share the work. None: all ranks.
        kwargs: arguments of `optimizer_cls`.

    All ranks must build it from the same parameters in the same order, and hold equal gradients
    when `step` is called. Learning rates are changed in `param_groups`, as always. `state` holds
    this rank's share.

    Raises TypeError if `optimizer_cls` works on all parameters at once (LBFGS), ValueError if ranks
    have different parameters, RuntimeError without a process group.
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
        """Add a group, and choose an owner for each of its parameters.

        The base class's constructor calls this for each group. Raises ValueError if ranks have
        different parameters.
        """
        super().add_param_group(param_group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        names = (f"parameter {index} of group {number}" for index in range(len(group["params"])))
        guards.check_same_shapes(zip(names, group["params"]), self.process_group)

        # A stable sort, so that all ranks choose the same owners.
        for parameter in sorted(group["params"], key=lambda parameter: -parameter.nbytes):
            owner = min(range(self.num_ranks), key=lambda rank: self.bytes_owned[rank])
            self.owners[parameter] = owner
            self.bytes_owned[owner] += parameter.nbytes
        if hasattr(self, "local"):
            self.local.add_param_group(self._own_part(group))
            self._take_settings()

    def _own_part(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return `group` with only the parameters that this rank owns."""
        return {**hyperparameters(group), "params": [*filter(self.owns, group["params"])]}

    def owns(self, parameter: Tensor) -> bool:
        """Return whether this rank updates `parameter` and keeps its state."""
        return self.owners[parameter] == self.rank

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's share, broadcast it, and return the loss that `closure` returns.

        All ranks run `closure`. `kwargs` go to the wrapped optimizer's step.
        """
        self._give_settings()
        loss = self.local.step(**kwargs) if closure is None else self.local.step(closure, **kwargs)
        self._broadcast_updates()
        return loss

    @torch.no_grad()
    def _broadcast_updates(self) -> None:
        """Broadcast every parameter from its owner to all ranks, and wait.

        All messages start before the first wait. Owners alternate, so that all links are busy.
        """
        if self.num_ranks == 1:
            return

        # large parameters are messages of their own; small ones are packed by owner and dtype
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

        # broadcast, then unpack
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
        """Return the states of all parameters that have one, on CPU; collective."""
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
        """Return the `states` of the parameters that this rank owns, by their index in `local`."""
        return {
            place: states[one]
            for place, one in enumerate(filter(self.owns, self.parameters))
            if states[one]
        }
