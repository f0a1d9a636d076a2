"""The life of FSDP's weights, written down as it happens: for notebooks, and to see why memory is
what it is.

events = run_ranks(record_life, 2, config, tokens)[0]       # rank 0's, of the second training step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cs336_systems.config import ModelConfig
from cs336_systems.distributed.fsdp.unit import State, Unit
from cs336_systems.distributed.fsdp.wrapper import FSDP
from cs336_systems.model.transformer import TransformerLM


@dataclass(frozen=True)
class Event:
    """One thing that happened to a unit, and what was gathered right after it."""

    what: str  # gather, forward, backward, reduce or free
    unit: str
    gathered: tuple[str, ...]  # units whose whole weights have memory
    gathered_bytes: int


WORDS = {State.FORWARD: "forward", State.BACKWARD: "backward", State.REST: "free"}


def watch(model: FSDP) -> list[Event]:
    """A list that grows with every event of `model` from now on."""
    events: list[Event] = []

    def note(what: str, unit: Unit) -> None:
        gathered = [one for one in model.units if one.state is not State.REST]
        events.append(
            Event(
                what,
                unit.name,
                tuple(one.name for one in gathered),
                sum(one._bytes for one in gathered),
            )
        )

    for unit in model.units:

        def become(state: State, unit: Unit = unit, become: Any = unit.become) -> None:
            gathers = unit.state is State.REST
            become(state)
            if gathers or state in WORDS:
                note("gather" if gathers else WORDS[state], unit)

        unit.become = become  # type: ignore[method-assign]
    reduce = model._reduce

    def reducing(unit: Unit) -> None:
        if unit.arrived:
            note("reduce", unit)
        reduce(unit)

    model._reduce = reducing  # type: ignore[method-assign]
    return events


def record_life(rank: int, num_ranks: int, config: ModelConfig, tokens: Tensor) -> list[Event]:
    """The events of the second training step of a small model, whose order the first one has
    taught.
    """
    torch.manual_seed(0)
    model = FSDP(TransformerLM.from_config(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = tokens.chunk(num_ranks)[rank]
    events = watch(model)
    for _ in range(2):
        events.clear()
        optimizer.zero_grad()
        cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten()).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    return events


def record_rows(rank: int, num_ranks: int, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of what this rank keeps of every parameter."""
    model = FSDP(TransformerLM.from_config(config))
    return {name: tuple(parameter.shape) for name, parameter in model.module.named_parameters()}
