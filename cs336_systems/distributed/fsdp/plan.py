"""What is sharded, and with what: the division of a model into units, and building models too large for one device.

A module that owns a weight of two or more dimensions has its parameters sharded (a Linear's weight and bias, an
Embedding's rows); all others, norms above all, are replicated. The members of an outermost `nn.ModuleList` that hold
such weights are the blocks: with granularity "block" all sharded weights of a block make one unit, since few large
messages use a link better than many small ones, and a block's matmuls are long enough to hide the next block's gather.
With granularity "layer", the handout's, every module is a unit of its own. Modules that share a parameter are one unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

Granularity = Literal["block", "layer"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
Home = tuple[nn.Module, str]


@dataclass(eq=False)
class UnitPlan:
    """Modules before whose forward `parameters` are gathered: (name, parameter, homes)."""

    name: str
    entries: list[nn.Module] = field(default_factory=list)
    parameters: list[tuple[str, nn.Parameter, list[Home]]] = field(default_factory=list)


def owns_matrix(module: nn.Module) -> bool:
    """Whether `module` itself, not a child, has a parameter of two or more dimensions."""
    return any(parameter is not None and parameter.ndim >= 2 for parameter in module._parameters.values())


def find_blocks(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The members of the outermost ModuleLists that hold weights of two or more dimensions, by name."""
    blocks: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            for index, member in child.named_children():
                if any(map(owns_matrix, member.modules())):
                    blocks[f"{path}.{index}"] = member
        else:
            blocks |= find_blocks(child, f"{path}.")
    return blocks


def plan_units(module: nn.Module, granularity: Granularity) -> list[UnitPlan]:
    """The units of `module`, in the order of its modules."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    blocks = find_blocks(module) if granularity == "block" else {}
    block_of = {inner: (name, block) for name, block in blocks.items() for inner in block.modules()}
    plans: dict[nn.Module, UnitPlan] = {}  # by entry
    owner: dict[nn.Parameter, UnitPlan] = {}
    homes: dict[nn.Parameter, list[Home]] = {}
    for path, inner in module.named_modules():
        if not owns_matrix(inner):
            continue
        name, entry = block_of.get(inner, (path, inner))
        plan = plans.setdefault(entry, UnitPlan(name=name, entries=[entry]))
        for attribute, parameter in inner._parameters.items():
            if parameter is None or parameter.ndim == 0:
                continue
            if parameter in owner:
                homes[parameter].append((inner, attribute))
                plan = _merge(owner[parameter], plan, plans, owner)
                continue
            owner[parameter], homes[parameter] = plan, [(inner, attribute)]
            full_name = f"{path}.{attribute}" if path else attribute
            plan.parameters.append((full_name, parameter, homes[parameter]))
    return list(dict.fromkeys(plan for plan in plans.values() if plan.parameters))


def _merge(
    first: UnitPlan, second: UnitPlan, plans: dict[nn.Module, UnitPlan], owner: dict[nn.Parameter, UnitPlan]
) -> UnitPlan:
    """Make `first` and `second`, which share a parameter, one unit: `first`."""
    if first is second:
        return first
    first.entries += second.entries
    first.parameters += second.parameters
    for entry in second.entries:
        plans[entry] = first
    for _, parameter, _ in second.parameters:
        owner[parameter] = first
    return first


def materialize(module: nn.Module, name: str, device: torch.device) -> None:
    """Give the meta tensors that `module` itself owns memory on `device`, and their initial values.

    Raises ValueError naming a module that has no `reset_parameters` to draw them.
    """
    own = [*module._parameters.values(), *module._buffers.values()]
    if not any(tensor is not None and tensor.is_meta for tensor in own):
        return
    reset = getattr(module, "reset_parameters", None)
    rebuilds = type(module)._apply is not nn.Module._apply  # as RotaryEmbedding does with its tables
    if reset is None and not rebuilds:
        path = name or type(module).__name__
        raise ValueError(f"module {path!r} was built on the meta device and has no reset_parameters to fill it")
    module.to_empty(device=device, recurse=False)
    if reset is not None:
        reset()
