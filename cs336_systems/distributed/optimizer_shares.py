"""The base class of ShardedOptimizer and Zero1Optimizer.

Both look like one optimizer over all parameters, and wrap one over the share that this rank
updates.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import Group, num_ranks, rank_in


class OptimizerOfShares(torch.optim.Optimizer):
    """Base of the optimizers that share the update out over the ranks.

    `param_groups` holds all parameters. `local` is the wrapped optimizer over this rank's share,
    and `state` is that of `local`. Raises TypeError if `optimizer_cls` needs a closure, and as
    `as_group` does.
    """

    local: torch.optim.Optimizer

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[torch.optim.Optimizer],
        group: Group,
        kwargs: dict[str, Any],
    ) -> None:
        guards.check_no_search(optimizer_cls)
        self.process_group = group
        self.rank, self.num_ranks = rank_in(group), num_ranks(group)
        super().__init__(params, kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch's optimizers do; a tensor listed twice (a tied weight) counts once.

        Names of parameters are dropped. Raises ValueError for parameters that FSDP has cut.
        """
        members = param_group["params"]
        if not isinstance(members, Tensor):
            members = list(
                dict.fromkeys(one[1] if isinstance(one, tuple) else one for one in members)
            )
            if any(hasattr(one, "is_rows") for one in members):
                raise ValueError(
                    f"FSDP has cut the parameters into rows: do without {type(self).__name__}"
                )
        super().add_param_group({**param_group, "params": members})

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in the order in which state dicts number them."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _take_settings(self) -> None:
        """Copy defaults, state and hyper-parameters from `local`, which has filled in or loaded."""
        self.defaults, self.state = self.local.defaults, self.local.state
        for group, own in zip(self.param_groups, self.local.param_groups):
            group.update(hyperparameters(own))

    def _give_settings(self) -> None:
        """Copy hyper-parameters into `local`: a schedule may have changed the learning rate."""
        for group, own in zip(self.param_groups, self.local.param_groups):
            own.update(hyperparameters(group))

    # State dicts, in the format of `optimizer_cls` over all parameters

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, on CPU, on every rank; collective.

        It has the format of `optimizer_cls` over all parameters.
        """
        states = self.all_states()
        full = {place: states[one] for place, one in enumerate(self.parameters) if one in states}
        groups, places = [], iter(range(len(self.parameters)))
        for group in self.param_groups:
            groups.append(
                {**hyperparameters(group), "params": [*islice(places, len(group["params"]))]}
            )
        return {"state": full, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's share of a `state_dict`, which any number of ranks may have saved.

        Raises ValueError if its groups have other numbers of parameters.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        sizes, expected = (
            [len(group["params"]) for group in some] for some in (groups, self.param_groups)
        )
        if sizes != expected:
            raise ValueError(f"state_dict must have groups of {expected} parameters, got {sizes}")

        own_groups = self.local.state_dict()["param_groups"]
        for own, saved in zip(own_groups, groups):
            own.update(hyperparameters(saved))
        own_states = self.own_states(
            {one: states.get(place, {}) for place, one in enumerate(self.parameters)}
        )
        self.local.load_state_dict({"state": own_states, "param_groups": own_groups})
        self._take_settings()

    @abstractmethod
    def all_states(self) -> dict[Tensor, dict[str, Any]]:
        """Return the states of all parameters that have one, on CPU; collective."""

    @abstractmethod
    def own_states(self, states: dict[Tensor, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return this rank's share of `states`, by the index of the parameter in `local`."""


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters and their names."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
