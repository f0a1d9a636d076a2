"""Optimizer state sharding: every rank keeps the optimizer state of its share of the parameters, and of no others.

    optimizer = ShardedOptimizer(model.parameters(), AdamW, lr=1e-3)    # instead of AdamW(model.parameters(), lr=1e-3)
    loss.backward()                                                     # gradients averaged over ranks by a DDP wrapper
    optimizer.step()                                                    # update the own share, then broadcast it

Phases of a step: update (the wrapped optimizer, on the parameters that this rank owns), then broadcast (each owner
sends what it updated). Owners are chosen by size: the largest parameter first, each to the rank with the fewest bytes
so far, so that memory and work are balanced. Parameters and gradients stay whole on every rank: with AdamW a rank
saves (1 - 1/num_ranks) of the two moments, and pays with broadcasts of all parameters on top of the all-reduce of all
gradients. `zero1.py` has the variant that pays nothing (ZeRO stage 1, Rajbhandari et al., arXiv:1910.02054).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.collectives import check_same_shapes, num_ranks, rank_in

PACKED_BYTES = 2**20  # parameters smaller than this travel together, in one message an owner


class ShardedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls` over `params`, its state sharded over the ranks of `process_group` (None: all ranks).

    `params` is what torch.optim takes: an iterable of tensors, of (name, tensor) pairs or of groups; `kwargs` go to
    `optimizer_cls`. A tensor listed twice counts once; one that needs no gradient is owned and never sent. All ranks
    must build it from the same parameters in the same order, and hold equal gradients when `step` is called. Learning
    rates are changed where they always are, in `param_groups`. `state` holds this rank's share.

    Raises TypeError if `optimizer_cls` is no torch optimizer, and RuntimeError where there is no process group.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
            raise TypeError(f"optimizer_cls must be a subclass of torch.optim.Optimizer, got {optimizer_cls!r}")
        self.process_group = process_group
        self.rank, self.num_ranks = rank_in(process_group), num_ranks(process_group)
        self.owners: dict[Tensor, int] = {}  # rank in the group that updates each parameter
        self.bytes_owned = [0] * self.num_ranks  # by rank
        self._local: torch.optim.Optimizer | None = None
        super().__init__(unique_groups(params), kwargs)
        self._local = optimizer_cls([self._own_part(group) for group in self.param_groups], **kwargs)
        self.defaults = self._local.defaults
        self.state = self._local.state
        for group, own in zip(self.param_groups, self._local.param_groups):
            group.update(hyperparameters(own))  # what optimizer_cls filled in, for schedulers to find

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and share it out; also called for each group by the constructor of the base class."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        number = len(self.param_groups) - 1
        names = (f"parameter {index} of group {number}" for index in range(len(group["params"])))
        check_same_shapes(zip(names, group["params"]), self.process_group)
        self._assign_owners(group["params"])
        if self._local is not None:
            self._local.add_param_group(self._own_part(group))
            group.update(hyperparameters(self._local.param_groups[-1]))

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the own share, then exchange the updated parameters; returns what `closure`, run by all, returns."""
        local = self._local
        assert local is not None
        for group, own in zip(self.param_groups, local.param_groups):
            own.update(hyperparameters(group))  # a learning rate may have been changed
        # update
        loss = local.step(**kwargs) if closure is None else local.step(closure, **kwargs)
        # broadcast
        self._broadcast_updates()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This rank's share: the state of the parameters it owns, by their place among all parameters."""
        state_dict = self._in_places(dict(self.state))
        return state_dict | {"shard": {"rank": self.rank, "num_ranks": self.num_ranks}}

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """The state of all parameters, on every rank, on CPU, as `optimizer_cls` itself would give it; collective."""
        full: dict[Tensor, dict[str, Any]] = {}
        for parameter, owner in self.owners.items():
            state = self.state.get(parameter, {}) if owner == self.rank else {}
            layout = [{name: _describe(value) for name, value in state.items()}]
            root = _global_rank(self.process_group, owner)
            dist.broadcast_object_list(layout, src=root, group=self.process_group, device=parameter.device)
            whole: dict[str, Any] = {}
            for name, (shape, content) in layout[0].items():
                if shape is None:
                    whole[name] = content
                    continue
                on_device = torch.empty(shape, dtype=content, device=parameter.device)
                if owner == self.rank:
                    on_device.copy_(state[name])
                dist.broadcast(on_device, src=root, group=self.process_group)
                whole[name] = on_device.cpu()
            if whole:
                full[parameter] = whole
        return self._in_places(full)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's share, from a `state_dict` of the same rank or from a full one of any number of ranks.

        Raises ValueError if it is the share of another rank or number of ranks, or if its groups are of other sizes.
        """
        shard = state_dict.get("shard", {"rank": self.rank, "num_ranks": self.num_ranks})
        if shard != {"rank": self.rank, "num_ranks": self.num_ranks}:
            raise ValueError(
                f"state_dict must be full or the share of rank {self.rank} of {self.num_ranks}, "
                f"got that of rank {shard['rank']} of {shard['num_ranks']}"
            )
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        expected = [len(group["params"]) for group in self.param_groups]
        if sizes != expected:
            raise ValueError(f"state_dict must have groups of {expected} parameters, got {sizes}")
        local = self._local
        assert local is not None
        places = self._places()
        local_places = [parameter for group in local.param_groups for parameter in group["params"]]
        groups, first = [], 0
        for group, saved in zip(local.param_groups, state_dict["param_groups"]):
            count = len(group["params"])
            groups.append({**saved, "params": list(range(first, first + count))})
            first += count
        state = {
            index: state_dict["state"][places[parameter]]
            for index, parameter in enumerate(local_places)
            if places[parameter] in state_dict["state"]
        }
        local.load_state_dict({"state": state, "param_groups": groups})
        self.state = local.state  # the wrapped optimizer made a new one
        for group, own in zip(self.param_groups, local.param_groups):
            group.update(hyperparameters(own))

    def _assign_owners(self, parameters: list[Tensor]) -> None:
        for parameter in sorted(parameters, key=lambda parameter: -parameter.nbytes):  # stable: the same on all ranks
            owner = min(range(self.num_ranks), key=lambda rank: self.bytes_owned[rank])
            self.owners[parameter] = owner
            self.bytes_owned[owner] += parameter.nbytes

    def _own_part(self, group: dict[str, Any]) -> dict[str, Any]:
        own = [parameter for parameter in group["params"] if self.owners[parameter] == self.rank]
        return {**hyperparameters(group), "params": own}

    @torch.no_grad()
    def _broadcast_updates(self) -> None:
        """Start all messages, then wait for all: neighbours have different owners, so that all links are busy."""
        if self.num_ranks == 1:
            return
        packed: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        large: dict[int, list[Tensor]] = defaultdict(list)
        for parameter, owner in self.owners.items():
            if not parameter.requires_grad or parameter.numel() == 0:
                continue
            if parameter.nbytes < PACKED_BYTES or not parameter.is_contiguous():
                packed[owner, parameter.dtype, parameter.device].append(parameter.detach())
            else:
                large[owner].append(parameter.detach())
        works = []
        for turn in zip_longest(*(large[owner] for owner in sorted(large))):
            for owner, tensor in zip(sorted(large), turn):
                if tensor is not None:
                    works.append(self._broadcast(tensor, owner))
        buffers = {key: torch.cat([tensor.reshape(-1) for tensor in tensors]) for key, tensors in packed.items()}
        works += [self._broadcast(buffer, owner) for (owner, _, _), buffer in buffers.items()]
        for work in works:
            work.wait()
        for key, tensors in packed.items():
            if key[0] != self.rank:
                pieces = buffers[key].split([tensor.numel() for tensor in tensors])
                torch._foreach_copy_(tensors, [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors)])

    def _broadcast(self, tensor: Tensor, owner: int) -> Any:
        source = _global_rank(self.process_group, owner)
        return dist.broadcast(tensor, src=source, group=self.process_group, async_op=True)

    def _places(self) -> dict[Tensor, int]:
        """Place of each parameter among all, as a state dict numbers them."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return {parameter: place for place, parameter in enumerate(parameters)}

    def _in_places(self, state: dict[Tensor, dict[str, Any]]) -> dict[str, Any]:
        places = self._places()
        groups = [
            {**hyperparameters(group), "params": [places[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        numbered = {places[parameter]: dict(values) for parameter, values in state.items()}
        return {"state": dict(sorted(numbered.items())), "param_groups": groups}


def _global_rank(group: dist.ProcessGroup | None, rank_in_group: int) -> int:
    return rank_in_group if group is None else dist.get_global_rank(group, rank_in_group)


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def unique_groups(params: Any) -> list[dict[str, Any]]:
    """`params` as groups, a tensor that stands twice in one of them (a tied weight) kept once."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of tensors or groups, got a tensor")
    entries = list(params)
    if not entries or not isinstance(entries[0], dict):
        entries = [{"params": entries}]
    groups = []
    for entry in entries:
        members = entry["params"]
        members = [members] if isinstance(members, Tensor) else list(_tensors(members))
        groups.append({**entry, "params": list(dict.fromkeys(members))})
    return groups


def _tensors(members: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors of `members`, which may be (name, tensor) pairs."""
    for member in members:
        yield member[1] if isinstance(member, tuple) else member


def _describe(value: Any) -> tuple[torch.Size | None, Any]:
    """(shape, dtype) of a tensor, (None, value) of anything else."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else (None, value)
