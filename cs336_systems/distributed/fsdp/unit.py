"""A unit: weights that are gathered, used, freed and reduced together, and the one state that says
what they are for.

           gather                forward                 its end
    REST ──────────▶ GATHERED ───────────▶ FORWARD ──────────────▶ GATHERED
     ▲                  │  │    backward
     └────── free ──────┘  └───────────▶ BACKWARD ── free ──▶ REST

When a unit is gathered and freed, `wrapper.py` decides. Only what is GATHERED, ahead of its use or
after it, may be freed to make room. In FORWARD and BACKWARD the unit's modules see the whole
weights; else they see the shards, which the optimizer works on.

The wholes of a unit lie in one piece of memory, allocated for a gather and given back after use.
The tensors stay the same objects throughout, so what autograd saved in the forward finds its values
again in the backward.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from enum import Enum
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cs336_systems.distributed.collectives import Work, wait_for
from cs336_systems.distributed.fsdp.agreement import Agreement
from cs336_systems.distributed.fsdp.engine import (
    current_backward,
    storage_id,
    unseen_by_checkpoints,
)
from cs336_systems.distributed.fsdp.plan import ShardedWeight, UnitPlan, chunk_rows
from cs336_systems.distributed.fsdp.reduce import GradientReducer, Lane, gather_rows

ALIGNMENT_BYTES = 256  # of each weight in the unit's memory: what matmuls and NCCL like
PREFETCH = 2  # a unit's gather starts when the unit so many before it has completed
# units: the current and two ahead, also where modules run in another order than expected
MAX_GATHERED = 3


class State(Enum):
    """What the wholes of a unit have memory for."""

    REST = "rest"  # they have none
    GATHERED = "gathered"  # nothing now: gathered ahead, or kept for what comes next
    FORWARD = "forward"  # a forward of an entry that runs
    BACKWARD = "backward"  # between the first gradient of its outputs and the last of its inputs


IN_USE = (State.FORWARD, State.BACKWARD)


class ExecutionOrder:
    """The units in the order of the pass before (`expected`) and of this one (`seen`), to gather
    the next ones ahead.

    A wrong guess costs a gather that nobody uses, never a wrong result.
    """

    def __init__(self) -> None:
        self.expected: list[Unit] = []
        self.seen: list[Unit] = []
        self._places: dict[Unit, int] = {}  # the last one of each in `seen`

    def begin(self, default: Iterable[Unit] = ()) -> list[Unit]:
        """Start a pass, which will go like the one before, the first one like `default`; what it
        begins with.
        """
        self.expected, self.seen = self.seen or self.expected or list(default), []
        return self.expected[:PREFETCH]

    def visit(self, unit: Unit) -> None:
        """Note that `unit` runs now. A surprise ends all guesses of this pass, and is told to the
        ranks' agreement.
        """
        place = self._places[unit] = len(self.seen)
        self.seen.append(unit)
        if place < len(self.expected) and self.expected[place] is not unit:
            self.expected = []
            unit.window.agreement.surprise()

    def ahead(self, unit: Unit) -> Unit | None:
        """The unit that is gathered when `unit` is done; None if it has run already or is not
        known.
        """
        target = self._places[unit] + PREFETCH
        return self.expected[target] if len(self.seen) <= target < len(self.expected) else None

    def ends_with(self, unit: Unit) -> bool:
        """Whether `unit` is among the last that are expected, with which a backward begins."""
        return len(self.expected) - PREFETCH <= self._places[unit] < len(self.expected)


class Window:
    """What the units of one model share: their group, its streams, and which of them have memory."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, reduce_dtype: torch.dtype | None
    ) -> None:
        self.group, self.device = group, device
        self.rank, self.num_ranks = group.rank(), group.size()
        self.lane = Lane(device)
        self.reducer = GradientReducer(group, device, reduce_dtype)
        self.units: list[Unit] = []
        self.gathered: dict[Unit, None] = {}  # in the order of gathering
        self.in_forward = False
        self.agreement = Agreement(group, device)

    @property
    def in_backward(self) -> bool:
        """Whether this code runs inside autograd's engine: in a hook, or in a checkpoint's
        recomputation.
        """
        return current_backward() != -1

    def make_room(self, unit: Unit) -> None:
        """Before `unit` is gathered for use: free idle units, gathered for an order that did not
        come; oldest first.
        """
        surplus = len(self.gathered) + 1 - MAX_GATHERED
        if unit.state is State.REST and surplus > 0:
            for other in [other for other in self.gathered if other.state is State.GATHERED][
                :surplus
            ]:
                other.free()

    def gather_ahead(self, unit: Unit | None) -> None:
        """Start gathering what is expected to run soon, if there is room."""
        if unit is not None and len(self.gathered) < MAX_GATHERED:
            unit.gather()


# Gather, free


class Unit:
    """The weights in `weights`, gathered when one of the modules in `entries` runs."""

    def __init__(self, plan: UnitPlan, window: Window, compute_dtype: torch.dtype | None) -> None:
        self.name, self.entries = plan.name, plan.entries
        self.window = window
        self.index = len(window.units)
        window.units.append(self)
        window.agreement.names.append(self.name)
        self.state = State.REST
        self.backward = 0  # which one BACKWARD is for
        self.began = 0  # time of the forward that BACKWARD is of
        # of a module: at rest, in use
        self._views: list[tuple[nn.Module, RestingParameters, dict[str, Any]]] = []
        # where each weight is shown in use
        self._shown: list[tuple[dict[str, Any], str, ShardedWeight]] = []
        self._works: list[Work] = []  # the gather under way
        # The place of the wholes. Of the parameters, which may be on the meta device, only shapes
        # and dtypes are read.
        self._bytes = 0
        places: list[tuple[int, list[int], torch.dtype]] = []
        for _, parameter, _ in plan.parameters:
            dtype = compute_dtype or parameter.dtype
            rows = window.num_ranks * chunk_rows(parameter.shape[0], window.num_ranks)
            places.append((self._bytes, [rows, *parameter.shape[1:]], dtype))
            num_bytes = math.prod(places[-1][1]) * dtype.itemsize
            self._bytes += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        memory = torch.empty(self._bytes, dtype=torch.uint8, device=window.device)
        self.weights: list[ShardedWeight] = []
        for (offset, shape, dtype), (name, parameter, homes) in zip(places, plan.parameters):
            place = (
                memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            )
            self.weights.append(ShardedWeight(name, parameter, homes, place, window.group))
        self._begins = [offset for offset, _, _ in places]  # of each weight in the memory, in bytes
        self._memory = memory.untyped_storage()  # under all wholes
        self.storage_id = storage_id(memory)
        self._memory.resize_(0)
        # Those that are trained, when they were wrapped: hooks wait for their gradients.
        self.trainable = [weight for weight in self.weights if weight.whole.requires_grad]

    def versions(self) -> list[int]:
        """They rise where an optimizer changes the rows."""
        return [weight.shard._version for weight in self.weights]

    def place_of(self, tensor: Tensor) -> int:
        """The place in `weights` of the one that `tensor`, a view into the unit's memory, is of."""
        return bisect_right(self._begins, tensor.storage_offset() * tensor.itemsize) - 1

    @property
    def arrived(self) -> list[ShardedWeight]:
        """Whose gradients are complete and not yet reduced."""
        return [weight for weight in self.trainable if weight.whole.grad is not None]

    def come_to_rest(self, paths: dict[nn.Module, str]) -> None:
        """From now on the modules, of these paths, see what the state says; every weight has its
        shard.
        """
        in_use: dict[nn.Module, dict[str, Any]] = {}
        for weight in self.weights:
            for module, attribute in weight.homes:
                in_use.setdefault(module, dict(module._parameters))[attribute] = weight.whole
                self._shown.append((in_use[module], attribute, weight))
        for module, wholes in in_use.items():
            self._views.append(
                (module, RestingParameters(self, paths[module], module._parameters), wholes)
            )
            vars(module)["_parameters"] = self._views[-1][1]

    def become(self, state: State) -> None:
        """Enter `state`, and show the modules the weights that go with it; before those in use
        `wait`.
        """
        is_in_use = state in IN_USE
        if is_in_use != (self.state in IN_USE):
            for module, at_rest, in_use in self._views:
                vars(module)["_parameters"] = in_use if is_in_use else at_rest
        self.state = state

    @unseen_by_checkpoints
    @torch.no_grad()
    def gather(self) -> None:
        """Start gathering, behind what is queued now; nothing if it was started before."""
        if self.state is not State.REST:
            return
        self.window.agreement.send("gathers", self.index)
        self._memory.resize_(self._bytes)
        inputs: list[Tensor] = []
        places: list[Tensor] = []
        shards: list[Tensor] = []
        for weight in self.weights:
            shard = weight.shard.detach()
            weight.check_shard()
            inputs.append(shard)
            if (
                weight.gathered.dtype != shard.dtype
                or len(weight.chunk) != len(shard)
                or not shard.is_contiguous()
            ):
                # One chunk in the compute dtype, made where the gather would put it: no memory of
                # its own. What lies behind the own rows is padding that nobody reads.
                places.append(weight.gathered[weight.rows])
                shards.append(shard)
                inputs[-1] = weight.chunk
        with self.window.lane.after_compute():
            if places:
                torch._foreach_copy_(places, shards)
            self._works = gather_rows(
                [weight.gathered for weight in self.weights], inputs, self.window.group
            )
            self._works.append(self.window.lane.mark())
        self.window.gathered[self] = None
        self.become(State.GATHERED)

    def wait(self) -> None:
        """Let what follows on the compute stream see the wholes."""
        self.gather()
        with self.window.agreement:
            wait_for(self._works)

    def free(self) -> None:
        """Give the memory of the wholes back, once what is queued on the compute stream has used
        them.

        RuntimeError naming a weight that a forward has changed or replaced, since that is lost.
        """
        if self.state is State.REST:
            return
        self.wait()  # a gather that nobody used may still be writing
        self._memory.resize_(0)
        del self.window.gathered[self]
        self.become(State.REST)
        for weight in self.weights:
            if weight.whole._version:
                raise RuntimeError(
                    f"parameter {weight.name!r} must not be changed in a forward, as max_norm does"
                )
        for in_use, attribute, weight in self._shown:
            if in_use.get(attribute) is not weight.whole:
                raise RuntimeError(f"parameter {weight.name!r} must not be replaced in a forward")


# A weight that is used outside the forwards of its unit


class RestingParameters(dict[str, Any]):
    """The `_parameters` of a module whose unit is not in use: the shards.

    But within a pass a head that computes `F.linear(h, self.embedding.weight)` gets the whole, in a
    copy of its own.
    """

    def __init__(self, unit: Unit, path: str, shards: dict[str, Any]) -> None:
        super().__init__(shards)
        self.path, self.window = path, unit.window
        self.readers = {weight.shard: (weight, unit) for weight in unit.weights}

    def __getitem__(self, name: str) -> Any:  # of `module.weight`
        value = super().__getitem__(name)
        if value in self.readers and (self.window.in_forward or self.window.in_backward):
            return ReadOutside.apply(value, *self.readers[value])
        return value

    def items(self) -> Any:  # of `module.parameters()`
        return {name: self[name] for name in self}.items()

    # as `module.weight = ...`, tying, functional_call do
    def __setitem__(self, name: str, value: Any) -> None:
        if value is not self.get(name):
            self._refuse(name, "replaced" if name in self else "added")

    def __delitem__(self, name: str) -> None:  # as parametrizations and weight norms do
        self._refuse(name, "removed")

    def pop(self, name: str, *default: Any) -> Any:
        self._refuse(name, "removed")

    def _refuse(self, name: str, change: str) -> NoReturn:
        path = f"{self.path}.{name}" if self.path else name
        raise RuntimeError(
            f"parameter {path!r} cannot be {change} once FSDP has wrapped its module: do that before, or give it other "
            "values by load_full_params"
        )


class ReadOutside(torch.autograd.Function):
    """From a shard to its whole, for a use outside the forwards of the unit's entries, and back
    with the gradient.
    """

    @staticmethod
    @unseen_by_checkpoints
    def forward(ctx: Any, shard: Tensor, weight: ShardedWeight, unit: Unit) -> Tensor:
        ctx.weight, ctx.unit = weight, unit
        unit.window.agreement.send("gathers", unit.index)
        with unit.window.agreement:
            return gather_copy(weight, weight.whole.dtype)

    @staticmethod
    @unseen_by_checkpoints
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        window = ctx.unit.window
        window.agreement.send("reduces", ctx.unit.index)
        with window.agreement:
            window.reducer.reduce({ctx.weight: gradient})
        window.reducer.wait()  # where no unit is reduced, nobody may wait for it later
        return None, None, None  # to the shard it is added there, on another stream


def gather_copy(weight: ShardedWeight, dtype: torch.dtype) -> Tensor:
    """A new tensor with the whole weight in `dtype`, on the current stream; collective."""
    rows = weight.shard.new_empty(weight.gathered.shape, dtype=dtype)
    chunk = weight.shard.new_zeros(weight.chunk.shape, dtype=dtype)
    chunk[: weight.shard.shape[0]].copy_(weight.shard.detach())
    wait_for(gather_rows([rows], [chunk], weight.group))
    return rows[: weight.shape[0]]
