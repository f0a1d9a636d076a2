"""What is sharded, with what, and how: the units of a model, and the rows of a weight that a rank
keeps at rest.

A module that owns a weight of two or more dimensions has its parameters sharded (a Linear's weight
and bias, an Embedding's rows); all others, norms above all, are replicated. The members of an
outermost `nn.ModuleList` that hold such weights are the blocks: with granularity "block" all
sharded weights of a block make one unit, since few large messages use a link better than many small
ones, and a block's matmuls are long enough to hide the next block's gather. With granularity
"layer", the handout's, every module is a unit of its own.

A unit is gathered when its entry, a module, is called. So containers that are never called (a
ParameterList, the inner lists of a ModuleList of ModuleLists) hand their weights, or the role of a
block, to the modules that are; and modules that share a weight are one unit with several entries.

A weight of R rows over N ranks is cut into N chunks of ceil(R / N) rows; the last chunks may be
shorter or empty. In an all-gather every rank sends a whole chunk, so that the padding ends up
behind row R and the whole weight is a contiguous prefix of what arrives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Granularity = Literal["block", "layer"]
Checkpointing = Literal["none", "reentrant", "non_reentrant"]
Home = tuple[nn.Module, str]


@dataclass(eq=False)
class UnitPlan:
    """Modules before whose forward `parameters` are gathered: (name, parameter, homes)."""

    name: str
    entries: list[nn.Module] = field(default_factory=list)
    parameters: list[tuple[str, nn.Parameter, list[Home]]] = field(default_factory=list)


def wrap_blocks(
    model: nn.Module, *, checkpointing: Checkpointing = "none", compiled: bool = False
) -> nn.Module:
    """Checkpoint, and compile, the forward of every block of `model` in place; call it before FSDP.
    Returns `model`.

    From the inside out: compile, checkpoint, shard. The compiler must see the plain forward. FSDP's
    hooks must lie outside of the checkpoint: the backward then gathers a block once, before the
    recomputation, and keeps it for the gradients that follow. Only `forward` is replaced, so that
    every module keeps its class and name.
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
    """Whether `module` itself, not a child, has a parameter of two or more dimensions."""
    return any(
        parameter is not None and parameter.ndim >= 2 for parameter in module._parameters.values()
    )


def is_callable(module: nn.Module) -> bool:
    """Whether `module` has a forward: lists and dictionaries of modules or parameters have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def find_blocks(module: nn.Module, prefix: str = "", in_list: bool = False) -> dict[str, nn.Module]:
    """The members of the outermost ModuleLists that hold weights of two or more dimensions, by
    name.

    Of a member that is never called itself (a list or dictionary in the list) the members are
    blocks.
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
    """The units of `module`, in the order of its modules.

    ValueError naming a parameter whose gradient hooks would be lost: what autograd sees is the
    gathered weight.
    """
    _require_choice("granularity", granularity, get_args(Granularity))
    modules = dict(module.named_modules())
    # of all that is in blocks; several if blocks share it
    entries_of: dict[nn.Module, dict[str, nn.Module]] = {}
    for name, block in find_blocks(module).items() if granularity == "block" else ():
        for inner in block.modules():
            entries_of.setdefault(inner, {})[name] = block
    plan_of: dict[Any, UnitPlan] = {}  # by entry and by parameter
    homes: dict[nn.Parameter, list[Home]] = {}
    for path, inner in modules.items():
        if not owns_matrix(inner):
            continue
        above = path
        while above and not is_callable(modules[above]):
            above = above.rpartition(".")[0]
        entries = entries_of.get(inner) or {above: modules[above]}
        own = {name: one for name, one in inner._parameters.items() if one is not None and one.ndim}
        # What shares an entry or a parameter is one unit: the first of those that there are, or a
        # new one.
        known = dict.fromkeys(
            plan_of[key] for key in (*entries.values(), *own.values()) if key in plan_of
        )
        plan, *others = known or [UnitPlan(next(iter(entries)) or type(inner).__name__)]
        for other in others:
            plan.entries += other.entries
            plan.parameters += other.parameters
        plan.entries += [entry for entry in entries.values() if entry not in plan.entries]
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
    """Give the meta tensors that `module` itself owns memory on `device`, and their initial values.

    ValueError naming a module that has no `reset_parameters`.
    """
    own = [*module._parameters.values(), *module._buffers.values()]
    if not any(tensor is not None and tensor.is_meta for tensor in own):
        return
    reset = getattr(module, "reset_parameters", None)
    # as RotaryEmbedding does with its tables
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
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


# Rest


def chunk_rows(rows: int, num_ranks: int) -> int:
    """Rows of a chunk: ceil(rows / num_ranks)."""
    return -(-rows // num_ranks)


def own_rows(rows: int, rank: int, num_ranks: int) -> slice:
    """The rows that `rank` keeps of `rows`; an empty slice where there are too few."""
    chunk = chunk_rows(rows, num_ranks)
    return slice(min(rows, rank * chunk), min(rows, (rank + 1) * chunk))


class ShardedWeight:
    """A weight, its shard and its whole; `homes` are the (module, attribute) pairs that hold it,
    several if tied.
    """

    shard: nn.Parameter  # (own rows, ...) in the dtype of the master weights; the optimizer's

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
        self.name = name  # of its first home, as in the unwrapped module
        self.shape = like.shape  # of the whole
        self.homes = homes
        self.rows = own_rows(len(like), rank, num_ranks)
        # `.data` gives each alias of `place` a version counter of its own: gathering again, into
        # the same memory, must not look to autograd like a change of what it saved.
        # (N * chunk, ...): the memory of `whole` and the padding behind it
        self.gathered = place.data
        chunk = chunk_rows(len(like), num_ranks)
        # that, and padding: what this rank sends
        self.chunk = self.gathered[rank * chunk : (rank + 1) * chunk]
        # (R, ...) in the compute dtype; without memory while it is not gathered
        self.whole = nn.Parameter(place[: self.shape[0]].data, requires_grad=like.requires_grad)
        # gradient of earlier backwards under no_sync, in reduce dtype
        self.accumulated: Tensor | None = None

    def keep(self, values: Tensor) -> None:
        """Take this rank's rows of whole `values`; the modules see them from now on."""
        # also of channels-last convolutions
        rows = values[self.rows].clone(memory_format=torch.contiguous_format)
        self.shard = nn.Parameter(rows, requires_grad=self.whole.requires_grad)
        self._as_kept = (rows.dtype, rows.device, rows.shape)
        # For all who meet it, by whatever handle of the model: `whole_of` reads it. A cycle would
        # keep both.
        self.shard.is_rows = weakref.ref(self)  # type: ignore[attr-defined]
        for module, attribute in self.homes:
            module._parameters[attribute] = self.shard

    def check_shard(self) -> None:
        """RuntimeError if the shard has another dtype, device or shape than when it was made."""
        now = (self.shard.dtype, self.shard.device, self.shard.shape)
        if now != self._as_kept:
            before, after = (
                f"{dtype} {tuple(shape)} on {device}"
                for dtype, device, shape in (self._as_kept, now)
            )
            raise RuntimeError(
                f"parameter {self.name!r} must not be cast, moved or reshaped once FSDP has wrapped it: its rows were "
                f"{before} and are {after}; do that before, or choose compute_dtype"
            )

    def take_gradient(self) -> Tensor:
        """The whole gradient, with what was put aside before, taken off the weight."""
        gradient, aside = self.whole.grad, self.accumulated
        self.whole.grad = self.accumulated = None
        if aside is not None:
            gradient = aside if gradient is None else aside.add_(gradient)
        assert gradient is not None
        return gradient


def whole_of(parameter: Tensor) -> ShardedWeight | None:
    """The weight of which FSDP has made `parameter` this rank's rows; None for one that is whole.

    RuntimeError for rows of a weight that is gone: nobody knows of which whole they are.
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
