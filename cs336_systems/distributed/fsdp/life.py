"""Records of the life of FSDP's weights: when each unit is gathered, used, reduced and freed.

    events = run_ranks(record_life, 2, config, tokens)[0]   # rank 0's, of the second training step

For notebooks, and to see what memory is used for.
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
    """One step in the life of a unit, and the units that were gathered right after it."""

    what: str  # gather, forward, backward, reduce or free
    unit: str
    gathered: tuple[str, ...]  # units whose whole weights have memory
    gathered_bytes: int


WORDS = {State.FORWARD: "forward", State.BACKWARD: "backward", State.REST: "free"}


def watch(model: FSDP) -> list[Event]:
    """Return a list to which every later event of `model` is appended.

    It replaces `become` of each unit and `_reduce` of the model by versions that take notes.
    """
    events: list[Event] = []

    def note(what: str, unit: Unit) -> None:
        """Append an event of `unit`, with the units that have memory now."""
        gathered = [one for one in model.units if one.state is not State.REST]
        events.append(
            Event(
                what,
                unit.name,
                tuple(one.name for one in gathered),
                sum(one._bytes for one in gathered),
            )
        )

    # gather, forward, backward and free are changes of a unit's state
    for unit in model.units:

        def become(state: State, unit: Unit = unit, become: Any = unit.become) -> None:
            """Enter `state`, then note the event: leaving rest is a gather."""
            gathers = unit.state is State.REST
            become(state)
            if gathers or state in WORDS:
                note("gather" if gathers else WORDS[state], unit)

        unit.become = become  # type: ignore[method-assign]

    reduce = model._reduce

    def reducing(unit: Unit) -> None:
        """Note a reduction if the unit has gradients, then reduce."""
        if unit.arrived:
            note("reduce", unit)
        reduce(unit)

    model._reduce = reducing  # type: ignore[method-assign]
    return events


def record_life(rank: int, num_ranks: int, config: ModelConfig, tokens: Tensor) -> list[Event]:
    """Return the events of the second training step of a small model, on this rank.

    In the first step the wrapper learns the order of the units. `tokens` of shape (batch, sequence)
    are shared out over the ranks by rows.
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
    """Return the shape of the rows that this rank keeps of every parameter, by name."""
    model = FSDP(TransformerLM.from_config(config))
    return {name: tuple(parameter.shape) for name, parameter in model.module.named_parameters()}
