"""A unit: weights that are gathered, used, freed and reduced together, and the one state that says what they are for.

           gather                forward                 its end
    REST ──────────▶ GATHERED ───────────▶ FORWARD ──────────────▶ GATHERED
     ▲                  │  │    backward
     └────── free ──────┘  └───────────▶ BACKWARD ── free ──▶ REST

Only what is GATHERED, ahead of its use or after it, may be freed to make room. In FORWARD and BACKWARD the unit's
modules see the whole weights; else they see the shards, which the optimizer works on.

A weight of R rows over N ranks is cut into N chunks of ceil(R / N) rows; the last chunks may be shorter or empty. In
an all-gather every rank sends a whole chunk, padded, so that the padding ends up behind row R and the whole weight is a
contiguous prefix of what arrives. The wholes of a unit lie in one piece of memory, allocated for a gather and given
back after use. The tensors stay the same objects throughout, so what autograd saved in the forward finds its values
again in the backward.

Memory and streams: every buffer is allocated while the compute stream is current. A side stream starts by waiting for
the compute stream, and the compute stream waits for the side stream before it uses, or gives up, what that touched. So
the caching allocator sees one stream only, and memory neither grows nor is handed out too early.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from cs336_systems.distributed.collectives import Work, all_gather_flat, reduce_scatter_mean_flat
from cs336_systems.distributed.fsdp.plan import Home, UnitPlan

ALIGNMENT_BYTES = 256  # of each weight in the unit's memory: what matmuls and NCCL like
PREFETCH = 2  # a unit's gather starts when the unit so many before it has completed
MAX_GATHERED = 3  # units: the current and two ahead, also where modules run in another order than expected


class State(Enum):
    """What the wholes of a unit have memory for."""

    REST = "rest"  # they have none
    GATHERED = "gathered"  # nothing now: gathered ahead, or kept for what comes next
    FORWARD = "forward"  # a forward of an entry that runs
    BACKWARD = "backward"  # between the first gradient of its outputs and the last of its inputs


IN_USE = (State.FORWARD, State.BACKWARD)


class Window:
    """What the units of one model share: their group, its streams, and which of them have memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, reduce_dtype: torch.dtype | None) -> None:
        self.group, self.device = group, device
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.lane = Lane(device)
        self.reducer = GradientReducer(group, device, reduce_dtype)
        self.units: list[Unit] = []
        self.gathered: dict[Unit, None] = {}  # in the order of gathering
        self.in_forward = False
        self._messages = self._digest = 0  # how many there were, and which

    @property
    def in_backward(self) -> bool:
        """Whether this code runs inside autograd's engine: in a hook, or in a checkpoint's recomputation."""
        return torch._C._current_graph_task_id() != -1

    def make_room(self, unit: Unit) -> None:
        """Before `unit` is gathered for use: free idle units, gathered for an order that did not come; oldest first."""
        surplus = len(self.gathered) + 1 - MAX_GATHERED
        if unit.state is State.REST and surplus > 0:
            for other in [other for other in self.gathered if other.state is State.GATHERED][:surplus]:
                other.free()

    def gather_ahead(self, unit: Unit | None) -> None:
        """Start gathering what is expected to run soon, if there is room."""
        if unit is not None and len(self.gathered) < MAX_GATHERED:
            unit.gather()

    def agree(self, action: str, unit: Unit, weights: int = 0) -> None:
        """RuntimeError naming `unit` where another rank gathers, or reduces (`weights` as bits), something else.

        The ranks compare the messages of about two steps one by one, and later, at each power of two, all there were.
        """
        if self.num_ranks == 1:
            return
        code = 2 * unit.index + (action == "reduces")
        self._digest = hash((self._digest, code, weights))
        self._messages += 1
        if self._messages > 6 * len(self.units) and self._messages & (self._messages - 1):
            return
        own = torch.tensor([code, self._digest], device=self.device)
        everyone = own.new_empty(2 * self.num_ranks)
        all_gather_flat(everyone, own, self.group)
        for rank, (code, digest) in enumerate(everyone.view(-1, 2).tolist()):
            if digest != self._digest:
                other = f"{('gathers', 'reduces')[code % 2]} {self.units[code // 2].name!r}"
                raise RuntimeError(
                    f"all ranks must run the same modules in the same order: rank {self.rank} {action} {unit.name!r}, "
                    f"rank {rank} {other}; where that is the same, it is for other weights, or came after other units"
                )


# Rest: rows


def chunk_rows(rows: int, num_ranks: int) -> int:
    """Rows of a chunk: ceil(rows / num_ranks)."""
    return -(-rows // num_ranks)


def own_rows(rows: int, rank: int, num_ranks: int) -> slice:
    """The rows that `rank` keeps of `rows`; an empty slice where there are too few."""
    chunk = chunk_rows(rows, num_ranks)
    return slice(min(rows, rank * chunk), min(rows, (rank + 1) * chunk))


class ShardedWeight:
    """A weight, its shard and its whole; `homes` are the (module, attribute) pairs that hold it, several if tied."""

    shard: nn.Parameter  # (own rows, ...) in the dtype of the master weights; the optimizer's

    def __init__(self, name: str, like: nn.Parameter, homes: list[Home], place: Tensor, window: Window) -> None:
        self.name = name  # of its first home, as in the unwrapped module
        self.shape = like.shape  # of the whole
        self.homes = homes
        self.rows = own_rows(self.shape[0], window.rank, window.num_ranks)
        self.chunk_rows = chunk_rows(self.shape[0], window.num_ranks)  # that each rank sends
        # `.data` gives each alias of `place` a version counter of its own: gathering again, into the same memory, must
        # not look to autograd like a change of what it saved.
        self.gathered = place.data  # (N * chunk_rows, ...): the memory of `whole` and the padding behind it
        self.chunk = self.gathered[window.rank * self.chunk_rows : (window.rank + 1) * self.chunk_rows]
        self.own_place = self.gathered[self.rows]  # the shard's place in it
        # (R, ...) in the compute dtype; without memory while it is not gathered
        self.whole = nn.Parameter(place[: self.shape[0]].data, requires_grad=like.requires_grad)
        self.accumulated: Tensor | None = None  # gradient of earlier backwards under no_sync, in reduce dtype

    def keep(self, values: Tensor) -> None:
        """Take this rank's rows of whole `values`; the modules see them from now on."""
        self.shard = nn.Parameter(values[self.rows].clone(), requires_grad=self.whole.requires_grad)
        for module, attribute in self.homes:
            module._parameters[attribute] = self.shard

    def take_gradient(self) -> Tensor:
        """The whole gradient, with what was put aside before, taken off the weight."""
        gradient, aside = self.whole.grad, self.accumulated
        self.whole.grad = self.accumulated = None
        if aside is not None:
            gradient = aside if gradient is None else aside.add_(gradient)
        assert gradient is not None
        return gradient

    def gather_copy(self, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
        """A new tensor with the whole weight in `dtype`, on the current stream; collective."""
        rows = self.shard.new_empty(self.gathered.shape, dtype=dtype)
        chunk = self.shard.new_zeros(self.chunk.shape, dtype=dtype)
        chunk[: self.shard.shape[0]].copy_(self.shard.detach())
        for work in gather_rows([rows], [chunk], group):
            work.wait()
        return rows[: self.shape[0]]


class RestingParameters(dict[str, Any]):
    """The `_parameters` of a module whose unit is not in use: the shards.

    But within a pass a head that computes `F.linear(h, self.embedding.weight)` gets the whole, in a copy of its own.
    """

    def __init__(self, unit: Unit, shards: dict[str, Any]) -> None:
        super().__init__(shards)
        self.window = unit.window
        self.readers = {weight.shard: (weight, unit) for weight in unit.weights}

    def __getitem__(self, name: str) -> Any:  # of `module.weight`
        value = super().__getitem__(name)
        if value in self.readers and (self.window.in_forward or self.window.in_backward):
            return ReadOutside.apply(value, *self.readers[value])
        return value

    def items(self) -> Any:  # of `module.parameters()`
        return {name: self[name] for name in self}.items()


class ReadOutside(torch.autograd.Function):
    """From a shard to its whole, for a use outside the forwards of the unit's entries, and back with the gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: ShardedWeight, unit: Unit) -> Tensor:
        ctx.weight, ctx.unit = weight, unit
        unit.window.agree("gathers", unit)
        return weight.gather_copy(weight.whole.dtype, unit.window.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, window = ctx.weight, ctx.unit.window
        window.agree("reduces", ctx.unit)
        window.reducer.wait()  # it may be adding to the shard's gradient, as autograd will
        padded = gradient.new_zeros(weight.gathered.shape, dtype=window.reducer.reduce_dtype)
        padded[: weight.shape[0]].copy_(gradient)
        own = padded.new_empty(weight.chunk.shape)
        reduce_rows_mean([own], [padded], window.group)
        return own[: weight.shard.shape[0]].to(weight.shard.dtype), None, None


# Gather, use, free


class Unit:
    """The weights in `weights`, gathered when one of the modules in `entries` runs."""

    def __init__(self, plan: UnitPlan, window: Window, compute_dtype: torch.dtype | None) -> None:
        self.name, self.entries = plan.name, plan.entries
        self.window = window
        self.index = len(window.units)
        window.units.append(self)
        self.state = State.REST
        self.position = 0  # in the forward that runs
        self.backward_position = self.backward = 0  # in the backward that runs, and which that is
        self.began = 0  # time of the forward that BACKWARD is of
        self.arrived: list[ShardedWeight] = []  # whose gradients are complete and not yet reduced
        self._views: list[tuple[nn.Module, RestingParameters, dict[str, Any]]] = []  # of a module: at rest, in use
        self._works: list[Work] = []  # the gather under way
        # The place of the wholes. Of the parameters, which may be on the meta device, only shapes and dtypes are read.
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
            place = memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            self.weights.append(ShardedWeight(name, parameter, homes, place, window))
        self._memory = memory.untyped_storage()  # under all wholes
        self._memory.resize_(0)
        # Those that are trained, when they were wrapped: hooks wait for their gradients.
        self.trainable = [weight for weight in self.weights if weight.whole.requires_grad]

    def come_to_rest(self) -> None:
        """From now on the modules see what the state says; every weight has its shard."""
        in_use: dict[nn.Module, dict[str, Any]] = {}
        for weight in self.weights:
            for module, attribute in weight.homes:
                in_use.setdefault(module, dict(module._parameters))[attribute] = weight.whole
        for module, wholes in in_use.items():
            self._views.append((module, RestingParameters(self, module._parameters), wholes))
            vars(module)["_parameters"] = self._views[-1][1]

    def become(self, state: State) -> None:
        """Enter `state`, and show the modules the weights that go with it."""
        is_in_use = state in IN_USE
        if is_in_use != (self.state in IN_USE):
            for module, at_rest, in_use in self._views:
                vars(module)["_parameters"] = in_use if is_in_use else at_rest
        self.state = state

    @torch.no_grad()
    def gather(self) -> None:
        """Start gathering, behind what is queued now; nothing if it was started before."""
        if self.state is not State.REST:
            return
        self.window.agree("gathers", self)
        self._memory.resize_(self._bytes)
        inputs: list[Tensor] = []
        casts: list[tuple[Tensor, Tensor]] = []
        for weight in self.weights:
            inputs.append(weight.shard.detach())
            if weight.gathered.dtype != weight.shard.dtype or weight.chunk_rows != weight.shard.shape[0]:
                # One chunk in the compute dtype, made where the gather would put it: no memory of its own. What lies
                # behind the own rows is padding that nobody reads.
                casts.append((weight.own_place, weight.shard))
                inputs[-1] = weight.chunk
        with self.window.lane.after_compute():
            if casts:
                torch._foreach_copy_([place for place, _ in casts], [shard for _, shard in casts])
            self._works = gather_rows([weight.gathered for weight in self.weights], inputs, self.window.group)
            self._works.append(self.window.lane.mark())
        self.window.gathered[self] = None
        self.become(State.GATHERED)

    def wait(self) -> None:
        """Let what follows on the compute stream see the wholes."""
        self.gather()
        for work in self._works:
            work.wait()
        self._works = []

    def free(self) -> None:
        """Give the memory of the wholes back, once what is queued on the compute stream has used them.

        RuntimeError naming a weight that was changed, since the change is lost.
        """
        if self.state is State.REST:
            return
        self.wait()  # a gather that nobody used may still be writing
        self._memory.resize_(0)
        del self.window.gathered[self]
        self.become(State.REST)
        for weight in self.weights:
            if weight.whole._version:
                raise RuntimeError(f"parameter {weight.name!r} must not be changed in a forward, as max_norm does")


# Reduce


class GradientReducer:
    """Reduce-scatters the gradients of one unit after the other, on a side stream.

    A second one first lets the compute stream wait for the one before: so at most two units' whole gradients are alive.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, reduce_dtype: torch.dtype | None) -> None:
        self.group, self.lane, self.reduce_dtype = group, Lane(device), reduce_dtype
        self._under_way = Work()
        self._in_use: list[Tensor] = []

    @torch.no_grad()
    def accumulate(self, weight: ShardedWeight) -> None:
        """Put the gradient that just arrived aside, to be reduced with a later one."""
        total = weight.take_gradient()
        weight.accumulated = total.to(self.reduce_dtype or total.dtype)

    @torch.no_grad()
    def reduce(self, weights: list[ShardedWeight]) -> None:
        """Start reducing the gradients of `weights` into those of their shards, where they are added."""
        self.wait()
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        copies: list[tuple[Tensor, Tensor]] = []
        results: list[tuple[Tensor, Tensor]] = []  # where one comes out, and where it goes
        for weight in weights:
            gradient = weight.take_gradient()
            dtype = self.reduce_dtype or gradient.dtype
            is_padded = weight.gathered.shape[0] != weight.shape[0]
            if is_padded or gradient.dtype != dtype or not gradient.is_contiguous():
                padded = gradient.new_empty(weight.gathered.shape, dtype=dtype)
                # What is behind the gradient's rows is reduced into padding that nobody reads.
                copies.append((padded[: weight.shape[0]] if is_padded else padded, gradient))
                gradient = padded
            inputs.append(gradient)
            output = gradient.new_empty(weight.chunk.shape)
            outputs.append(output)
            own, place = output[: weight.shard.shape[0]], weight.shard.grad
            # The shard's gradient lies in the output itself where there is none yet and the dtype is right.
            if place is None:
                place = own if own.dtype == weight.shard.dtype else torch.empty_like(weight.shard)
            results.append((own, place))
        with self.lane.after_compute():
            if copies:
                torch._foreach_copy_([to for to, _ in copies], [source for _, source in copies])
            reduce_rows_mean(outputs, inputs, self.group)
            for weight, (own, place) in zip(weights, results):
                if weight.shard.grad is not None:
                    place.add_(own)
                elif place is not own:
                    place.copy_(own)
            self._under_way = self.lane.mark()
        for weight, (_, place) in zip(weights, results):
            weight.shard.grad = place
        self._in_use = [*inputs, *outputs, *(source for _, source in copies)]

    def wait(self) -> None:
        """Let the compute stream wait for the reduction under way, and give its buffers back."""
        self._under_way.wait()
        self._in_use = []


# Streams and collectives


class Lane:
    """A side stream of a CUDA device, of high priority; on CPU nothing but the same words."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Queue what follows on the side stream, behind all that is queued on the compute stream now."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Work:
        """What is queued on the side stream now, for the compute stream to wait for; the host goes on."""
        if self.stream is None:
            return Work()
        event = self.stream.record_event()
        return Work(finish=lambda: torch.cuda.current_stream().wait_event(event))


def gather_rows(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> list[Work]:
    """All-gather each of `inputs` into its output, N times as many rows; handles to wait for, none on NCCL.

    On NCCL the list travels as one grouped call on the current stream. The group is asked directly: torch's functions
    for it check and log each tensor of a list, on a host that has to stay ahead of the GPU.
    """
    if not _is_grouped(group):
        pairs = zip(outputs, inputs)
        return [all_gather_flat(output.view(-1), input_.view(-1), group, True) for output, input_ in pairs]
    options = AllgatherOptions()
    options.asyncOp = False  # on the current stream, mostly a side stream already
    if (work := group.allgather_into_tensor_coalesced(outputs, inputs, options)) is not None:
        work.wait()  # on the transport's own stream after all
    return []


def reduce_rows_mean(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> None:
    """Reduce-scatter each of `inputs`, as a mean, in its dtype: 1/N of its rows to each rank; on the current stream."""
    if not _is_grouped(group):
        for output, input_ in zip(outputs, inputs):
            reduce_scatter_mean_flat(output.view(-1), input_.view(-1), group)
        return
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    options.asyncOp = False
    if (work := group.reduce_scatter_tensor_coalesced(outputs, inputs, options)) is not None:
        work.wait()


def _is_grouped(group: dist.ProcessGroup) -> bool:
    return group.size() > 1 and dist.get_backend(group) == "nccl"
