"""The plan of FSDP: which weights make a unit, found by a walk over the modules.

A module that owns a weight of two or more dimensions has its parameters sharded (a Linear's weight
and bias, an Embedding's rows). All others, norms above all, are replicated. The members of an
outermost `nn.ModuleList` that hold such weights are the blocks. With granularity "block" all
sharded weights of a block make one unit: few large messages use a link better than many small ones,
and a block's matmuls are long enough to hide the next block's gather. With granularity "layer",
that of the handout, every module is a unit of its own.

A unit is gathered when its entry, a module, is called. Some containers are never called (a
ParameterList, the inner lists of a ModuleList of ModuleLists). The weights of such a container
belong to the next module above it that is called, and the members of such a list are the blocks in
its place. Modules that share a weight are one unit with several entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.distributed.fsdp.weight import Home

Granularity = Literal["block", "layer"]
Checkpointing = Literal["none", "reentrant", "non_reentrant"]


@dataclass(eq=False)
class UnitPlan:
    """The plan of one unit: its parameters, gathered before the forward of any of its entries.

    `parameters` holds (name, parameter, homes); a tied parameter has several homes.
    """

    name: str
    entries: list[nn.Module] = field(default_factory=list)
    parameters: list[tuple[str, nn.Parameter, list[Home]]] = field(default_factory=list)


def wrap_blocks(
    model: nn.Module, *, checkpointing: Checkpointing = "none", compiled: bool = False
) -> nn.Module:
    """Compile and checkpoint the forward of every block of `model` in place; return `model`.

    Call it before FSDP. The order is, from the inside out: compile, checkpoint, shard. The compiler
    must see the plain forward. FSDP's hooks must lie outside of the checkpoint: the backward then
    gathers a block once, before the recomputation, and keeps it for the gradients that follow. Only
    `forward` is replaced, so every module keeps its class and name. Raises ValueError for an
    unknown `checkpointing`, and if `model` has no blocks.
    """
    _require_choice("checkpointing", checkpointing, get_args(Checkpointing))
    blocks = find_blocks(model)
    if not blocks:
        raise ValueError("model must hold its blocks in an nn.ModuleList, found none with weights")
    for block in blocks.values():
        forward: Callable[..., Any] = block.forward
        if compiled:
            forward = torch.compile(forward)
        if checkpointing != "none":
            forward = partial(checkpoint, forward, use_reentrant=checkpointing == "reentrant")
        block.forward = forward
    return model


def owns_matrix(module: nn.Module) -> bool:
    """Return whether `module` itself, not a child, has a parameter of two or more dimensions."""
    return any(
        parameter is not None and parameter.ndim >= 2 for parameter in module._parameters.values()
    )


def is_callable(module: nn.Module) -> bool:
    """Return whether `module` has a forward; lists and dictionaries of modules have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def find_blocks(module: nn.Module, prefix: str = "", in_list: bool = False) -> dict[str, nn.Module]:
    """Return the blocks of `module` by name: members of its outermost ModuleLists with matrices.

    A member counts if it holds a weight of two or more dimensions. If a member is never called
    itself (a list or dictionary in the list), its own members are blocks. `prefix` and `in_list`
    are for the recursion.
    """
    blocks: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not (in_list and is_callable(child)):
            blocks |= find_blocks(child, f"{path}.", in_list or isinstance(child, nn.ModuleList))
        elif any(map(owns_matrix, child.modules())):
            blocks[path] = child
    return blocks


def plan_units(module: nn.Module, granularity: Granularity) -> list[UnitPlan]:
    """Return the plans of the units of `module`, in the order of its modules.

    Raises ValueError for an unknown `granularity`, and naming a parameter with gradient hooks: they
    would be lost, since autograd sees the gathered weight.
    """
    _require_choice("granularity", granularity, get_args(Granularity))
    modules = dict(module.named_modules())

    # the blocks that each module lies in, several if blocks share it
    entries_of: dict[nn.Module, dict[str, nn.Module]] = {}
    for name, block in find_blocks(module).items() if granularity == "block" else ():
        for inner in block.modules():
            entries_of.setdefault(inner, {})[name] = block

    plan_of: dict[Any, UnitPlan] = {}  # by entry and by parameter
    homes: dict[nn.Parameter, list[Home]] = {}
    for path, inner in modules.items():
        if not owns_matrix(inner):
            continue

        # the entries: the module's blocks, else the nearest module that is called, from it upwards
        above = path
        while above and not is_callable(modules[above]):
            above = above.rpartition(".")[0]
        entries = entries_of.get(inner) or {above: modules[above]}
        own = {name: one for name, one in inner._parameters.items() if one is not None and one.ndim}

        # Plans that share an entry or a parameter with this module are merged into the first.
        known = dict.fromkeys(
            plan_of[key] for key in (*entries.values(), *own.values()) if key in plan_of
        )
        plan, *others = known or [UnitPlan(next(iter(entries)) or type(inner).__name__)]
        for other in others:
            plan.entries += other.entries
            plan.parameters += other.parameters
        plan.entries += [entry for entry in entries.values() if entry not in plan.entries]

        # add the parameters that are new, and a home of each
        for attribute, parameter in own.items():
            full_name = f"{path}.{attribute}" if path else attribute
            if parameter not in homes:
                plan.parameters.append((full_name, parameter, homes.setdefault(parameter, [])))
            homes[parameter].append((inner, attribute))
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise ValueError(
                    f"parameter {full_name!r} must have no gradient hooks: FSDP would drop them"
                )
        plan_of |= dict.fromkeys(
            [*plan.entries, *(parameter for _, parameter, _ in plan.parameters)], plan
        )
    return list(dict.fromkeys(plan_of.values()))


def materialize(module: nn.Module, name: str, device: torch.device) -> None:
    """Give the meta tensors of `module` itself memory on `device`, and their initial values.

    Does nothing if it owns no meta tensor; children are left alone. Raises ValueError naming a
    module that has neither `reset_parameters` nor an `_apply` of its own that fills its tensors.
    """
    own = [*module._parameters.values(), *module._buffers.values()]
    if not any(tensor is not None and tensor.is_meta for tensor in own):
        return
    reset = getattr(module, "reset_parameters", None)
    # such as RotaryEmbedding, which computes its tables in _apply
    rebuilds = type(module)._apply is not nn.Module._apply
    if reset is None and not rebuilds:
        path = name or type(module).__name__
        raise ValueError(
            f"module {path!r} was built on the meta device and has no reset_parameters to fill it"
        )
    module.to_empty(device=device, recurse=False)
    if reset is not None:
        reset()


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError naming the argument `name` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
