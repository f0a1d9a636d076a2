"""A unit: weights that are gathered, used, freed and reduced together, and their one state.

           gather                forward                 its end
    REST ──────────▶ GATHERED ───────────▶ FORWARD ──────────────▶ GATHERED
     ▲                  │  │    backward
     └────── free ──────┘  └───────────▶ BACKWARD ── free ──▶ REST

`wrapper.py` decides when a unit is gathered and freed. Only a unit that is GATHERED, ahead of its
use or after it, may be freed to make room. In FORWARD and BACKWARD the unit's modules see the whole
weights; otherwise they see the shards, which the optimizer updates.

The whole weights of a unit, its wholes, lie in one piece of memory, which is allocated for a gather
and given back after use. The tensors stay the same objects throughout, so a tensor that autograd
saved in the forward has its values again in the backward.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cs336_systems.distributed.collectives import Work, wait_for
from cs336_systems.distributed.fsdp import unit_guards
from cs336_systems.distributed.fsdp.agreement import Agreement
from cs336_systems.distributed.fsdp.engine import (
    current_backward,
    storage_id,
    unseen_by_checkpoints,
)
from cs336_systems.distributed.fsdp.gather import Lane, gather_copy, gather_rows
from cs336_systems.distributed.fsdp.plan import UnitPlan
from cs336_systems.distributed.fsdp.reduce import GradientReducer
from cs336_systems.distributed.fsdp.weight import ShardedWeight, chunk_rows

ALIGNMENT_BYTES = 256  # of each weight in the unit's memory: suits matmuls and NCCL
PREFETCH = 2  # a unit's gather starts when the unit so many places before it has completed
# units with memory: the current one and two ahead, also if modules run in an unexpected order
MAX_GATHERED = 3


class State(Enum):
    """Whether the wholes of a unit have memory, and what uses them now."""

    REST = "rest"  # no memory
    GATHERED = "gathered"  # memory, not in use: gathered ahead, or kept for what comes next
    FORWARD = "forward"  # in use by the forward of one of the unit's entries
    BACKWARD = "backward"  # in use from the first need of a backward until the unit is freed


IN_USE = (State.FORWARD, State.BACKWARD)


class ExecutionOrder:
    """Predicts which unit runs next, from the order of the previous pass.

    `expected` is the order of the previous pass, empty after a wrong guess; `seen` is that of this
    pass so far. A wrong guess costs a gather that nobody uses, never a wrong result.
    """

    def __init__(self) -> None:
        self.expected: list[Unit] = []
        self.seen: list[Unit] = []
        self._places: dict[Unit, int] = {}  # the last place of each unit in `seen`

    def begin(self, default: Iterable[Unit] = ()) -> list[Unit]:
        """Begin a pass, and return the first PREFETCH units that are expected to run.

        The pass is expected to go like the previous one; the first pass like `default`.
        """
        self.expected, self.seen = self.seen or self.expected or list(default), []
        return self.expected[:PREFETCH]

    def visit(self, unit: Unit) -> None:
        """Note that `unit` runs now.

        If another unit was expected, no more guesses are made in this pass, and the ranks'
        agreement notes the surprise.
        """
        place = self._places[unit] = len(self.seen)
        self.seen.append(unit)
        if place < len(self.expected) and self.expected[place] is not unit:
            self.expected = []
            unit.window.agreement.surprise()

    def ahead(self, unit: Unit) -> Unit | None:
        """Return the unit to gather when `unit` is done; None if it has run or is unknown."""
        target = self._places[unit] + PREFETCH
        return self.expected[target] if len(self.seen) <= target < len(self.expected) else None

    def ends_with(self, unit: Unit) -> bool:
        """Return whether `unit` is among the last PREFETCH expected units.

        A backward begins with those.
        """
        return len(self.expected) - PREFETCH <= self._places[unit] < len(self.expected)


class Window:
    """Shared state of a model's units: group, streams, and which units have memory."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        device: torch.device,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.group, self.device = group, device
        self.rank, self.num_ranks = group.rank(), group.size()
        self.lane = Lane(device)
        self.reducer = GradientReducer(group, replicas, device, reduce_dtype)
        self.units: list[Unit] = []
        self.gathered: dict[Unit, None] = {}  # in the order of gathering
        self.in_forward = False
        self.agreement = Agreement(group, replicas, device)

    @property
    def in_backward(self) -> bool:
        """Whether this code runs in autograd's engine: in a hook or a recomputation."""
        return current_backward() != -1

    def make_room(self, unit: Unit) -> None:
        """Free idle units, oldest first, so that `unit` can be gathered for use.

        Idle units are surplus only when modules run in another order than expected.
        """
        surplus = len(self.gathered) + 1 - MAX_GATHERED
        if unit.state is State.REST and surplus > 0:
            for other in [other for other in self.gathered if other.state is State.GATHERED][
                :surplus
            ]:
                other.free()

    def gather_ahead(self, unit: Unit | None) -> None:
        """Start gathering `unit` ahead of its use, if there is room; None does nothing."""
        if unit is not None and len(self.gathered) < MAX_GATHERED:
            unit.gather()


# Gather, free


class Unit:
    """A set of weights, in `weights`, gathered whenever one of the modules in `entries` runs.

    The constructor lays out the wholes in one memory and allocates it for a moment. The weights get
    their shards later, by `ShardedWeight.keep`; `come_to_rest` then completes the unit.
    """

    def __init__(self, plan: UnitPlan, window: Window, compute_dtype: torch.dtype | None) -> None:
        self.name, self.entries = plan.name, plan.entries
        self.window = window
        self.index = len(window.units)
        window.units.append(self)
        window.agreement.names.append(self.name)
        self.state = State.REST
        self.backward = 0  # in BACKWARD: the number of that backward
        self.began = 0  # in BACKWARD: when the call whose backward it is began
        # (module, its _parameters at rest, its _parameters in use)
        self._views: list[tuple[nn.Module, GatheringParameters, dict[str, Any]]] = []
        # (_parameters in use, attribute, the weight shown there)
        self._shown: list[tuple[dict[str, Any], str, ShardedWeight]] = []
        self._works: list[Work] = []  # the gather under way

        # Lay out the wholes. Only shapes and dtypes of the parameters are read, since they may be
        # on the meta device.
        self._bytes = 0
        places: list[tuple[int, list[int], torch.dtype]] = []
        for _, parameter, _ in plan.parameters:
            dtype = compute_dtype or parameter.dtype
            rows = window.num_ranks * chunk_rows(parameter.shape[0], window.num_ranks)
            places.append((self._bytes, [rows, *parameter.shape[1:]], dtype))
            num_bytes = math.prod(places[-1][1]) * dtype.itemsize
            self._bytes += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

        # make the tensors, then give their memory back
        memory = torch.empty(self._bytes, dtype=torch.uint8, device=window.device)
        self.weights: list[ShardedWeight] = []
        for (offset, shape, dtype), (name, parameter, homes) in zip(places, plan.parameters):
            place = (
                memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            )
            self.weights.append(ShardedWeight(name, parameter, homes, place, window.group))
        self._begins = [offset for offset, _, _ in places]  # of each weight, in bytes of the memory
        self._memory = memory.untyped_storage()  # shared by all wholes
        self.storage_id = storage_id(memory)
        self._memory.resize_(0)

        # Trainable at wrapping: hooks wait for the gradients of these.
        self.trainable = [weight for weight in self.weights if weight.whole.requires_grad]

    def versions(self) -> list[int]:
        """Return the version counter of each shard, which rises when an optimizer changes it."""
        return [weight.shard._version for weight in self.weights]

    def place_of(self, tensor: Tensor) -> int:
        """Return the index into `weights` of the weight that `tensor` views.

        `tensor` must be a view into the unit's memory.
        """
        return bisect_right(self._begins, tensor.storage_offset() * tensor.itemsize) - 1

    @property
    def arrived(self) -> list[ShardedWeight]:
        """The weights whose gradients are complete and not yet reduced."""
        return [weight for weight in self.trainable if weight.whole.grad is not None]

    def come_to_rest(self, paths: dict[nn.Module, str]) -> None:
        """Replace the modules' `_parameters`, so that they show shards or wholes by the state.

        `paths` are the modules' names, for errors. Every weight must have its shard by now.
        """
        in_use: dict[nn.Module, dict[str, Any]] = {}
        for weight in self.weights:
            for module, attribute in weight.homes:
                in_use.setdefault(module, dict(module._parameters))[attribute] = weight.whole
                self._shown.append((in_use[module], attribute, weight))
        for module, wholes in in_use.items():
            self._views.append(
                (module, GatheringParameters(self, paths[module], module._parameters), wholes)
            )
            vars(module)["_parameters"] = self._views[-1][1]

    def become(self, state: State) -> None:
        """Enter `state`, and show the modules their wholes if it is one of use, else the shards.

        Call `wait` before a state of use.
        """
        is_in_use = state in IN_USE
        if is_in_use != (self.state in IN_USE):
            for module, at_rest, in_use in self._views:
                vars(module)["_parameters"] = in_use if is_in_use else at_rest
        self.state = state

    @unseen_by_checkpoints
    @torch.no_grad()
    def gather(self) -> None:
        """Start gathering the wholes, after all work queued on the compute stream; collective.

        Does nothing unless the unit is at rest. `wait` waits for the gather.
        """
        if self.state is not State.REST:
            return
        self.window.agreement.send("gathers", self.index)
        self._memory.resize_(self._bytes)

        # What to send: the shard itself if it is a whole chunk in the compute dtype, else a copy,
        # made where the gather would put it, so that it needs no memory of its own. The padding
        # behind the own rows is never read.
        inputs: list[Tensor] = []
        places: list[Tensor] = []
        shards: list[Tensor] = []
        for weight in self.weights:
            shard = weight.shard.detach()
            unit_guards.check_shard(weight)
            inputs.append(shard)
            if (
                weight.gathered.dtype != shard.dtype
                or len(weight.chunk) != len(shard)
                or not shard.is_contiguous()
            ):
                places.append(weight.gathered[weight.rows])
                shards.append(shard)
                inputs[-1] = weight.chunk

        # send, on the side stream
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
        """Gather unless that has begun, and make the compute stream wait for the gather."""
        self.gather()
        with self.window.agreement:
            wait_for(self._works)

    def free(self) -> None:
        """Give the memory of the wholes back, and come to rest; nothing if the unit is at rest.

        Work queued on the compute stream still finds the values. Raises RuntimeError naming a
        weight that a forward has changed or replaced, since the change would be lost.
        """
        if self.state is State.REST:
            return
        self.wait()  # a gather that nobody used may still be writing
        self._memory.resize_(0)
        del self.window.gathered[self]
        self.become(State.REST)

        unit_guards.check_wholes(self.weights, self._shown)


# A weight that is used outside the forwards of its unit: reading it gathers it


class GatheringParameters(unit_guards.FixedParameters):
    """The `_parameters` of a module whose unit is not in use: a read may run a collective.

    Outside of forwards and backwards `module.weight` is the shard. Within one, reading it gathers
    the weight from all ranks and gives a copy of the whole, so all ranks must read it. So a head
    that computes `F.linear(h, self.embedding.weight)` works. Adding, replacing and removing
    parameters raises RuntimeError.
    """

    def __init__(self, unit: Unit, path: str, shards: dict[str, Any]) -> None:
        super().__init__(path, shards)
        self.window = unit.window
        self.readers = {weight.shard: (weight, unit) for weight in unit.weights}

    def __getitem__(self, name: str) -> Any:
        """Return the shard; within a forward or backward the whole weight: then collective."""
        value = super().__getitem__(name)
        if value in self.readers and (self.window.in_forward or self.window.in_backward):
            return GatherOnRead.apply(value, *self.readers[value])
        return value

    def items(self) -> Any:
        """Return names and parameters, each read by `__getitem__`, for `module.parameters()`."""
        return {name: self[name] for name in self}.items()


class GatherOnRead(torch.autograd.Function):
    """Gathers a whole weight that is used outside its unit's forwards, and reduces its gradient.

    The gradient is added to the shard's directly, so autograd gets none.
    """

    @staticmethod
    @unseen_by_checkpoints
    def forward(ctx: Any, shard: Tensor, weight: ShardedWeight, unit: Unit) -> Tensor:
        """Return a copy of the whole weight, in the compute dtype; collective."""
        ctx.weight, ctx.unit = weight, unit
        unit.window.agreement.send("gathers", unit.index)
        with unit.window.agreement:
            return gather_copy(weight, weight.whole.dtype)

    @staticmethod
    @unseen_by_checkpoints
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Average the whole gradient, and add this rank's rows to the shard's; collective."""
        window = ctx.unit.window
        window.agreement.send("reduces", ctx.unit.index)
        with window.agreement:
            window.reducer.reduce({ctx.weight: gradient})
        window.reducer.wait()  # now, since no unit may be reduced later that would wait for it
        return None, None, None  # the reducer has added the gradient to the shard's
