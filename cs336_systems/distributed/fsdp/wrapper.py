"""Fully sharded data parallelism (ZeRO stage 3): each rank keeps its rows of every weight, and gathers what it uses.

    model = FSDP(TransformerLM.from_config(config), compute_dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-3)        # after wrapping: it sees the shards
    loss(model(tokens)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

The life of a weight, whose words the code repeats; `plan.py` says which weights make a unit:

- rest (`plan.py`): this rank holds its rows, in float32, the master weights;
- gather (`unit.py`): all ranks send their rows, in the compute dtype, into the whole weight. It starts when the unit
  two before has completed, so that it runs beside the unit in between;
- use (here): the module sees the whole weight in its forward, and once more in its backward;
- free (`unit.py`): the whole gives its memory back after each use, and all do when a forward begins, since the
  optimizer may have changed the rows, and when a backward ends. A unit's wholes and the next one's are all there is;
- reduce (`reduce.py`): the gradient of the whole is averaged over ranks; each keeps the part of its rows, in float32.

Replicated parameters (norms) keep whole gradients, which `finish_gradient_synchronization` averages in one message.
Every rank must run the same modules in the same order; the first steps check it. Backwards under `no_sync` put the
gradients of sharded weights aside, whole, in no `.grad`: the wrapper's `zero_grad` drops them, an optimizer's does not.
Which weights are trained is what they say when they are wrapped.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.collectives import as_group, broadcast_from_first, check_same_shapes, clip_shards
from cs336_systems.distributed.ddp import (
    Accumulating,
    call_at_each_gradient,
    check_unwrapped,
    dense_gradient,
    watch_steps,
)
from cs336_systems.distributed.fsdp.plan import Granularity, ShardedWeight, UnitPlan, materialize, plan_units
from cs336_systems.distributed.fsdp.reduce import average_replicated
from cs336_systems.distributed.fsdp.unit import ExecutionOrder, State, Unit, Window, gather_copy


class FSDP(nn.Module, Accumulating):
    """`module` with its weights sharded over `process_group`: each rank keeps its rows, and gathers what it uses.

    Args:
        module: whole on every rank, rank 0's values count; or built on the meta device, then drawn on rank 0 by each
            module's `reset_parameters`, one after the other, so that no rank ever holds the whole model.
        compute_dtype: of gathered weights, and so of messages and matmuls. None: that of the parameters. A unit gets
            its floating-point arguments in it, those in tuples too; what lists, dictionaries and objects hold stays.
        reduce_dtype: in which gradients are averaged. None: the dtype that they are computed in.
        granularity: what is gathered in one message: "block", all weights of a member of an outermost nn.ModuleList,
            or "layer", those of one Linear or Embedding, as the handout has it.
        device: where the shards go. None: where the parameters are; for a meta module the GPU if there is one.
        process_group: None: all ranks.

    Construction raises ValueError naming the argument, a wrapper in the module, a parameter of which ranks hold other
    shapes or one with gradient hooks. A step raises RuntimeError naming a unit that only some ranks run, that writes
    into an argument which was cast, or whose gradients shall have a graph, and a parameter that a forward changes or
    that has hooks; TypeError for a sparse gradient; ValueError for an optimizer that was built before, or does not
    update row by row.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        granularity: Granularity = "block",
        device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        check_unwrapped(module)
        for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point dtype, got {dtype!r}")
        plans = plan_units(module, granularity)
        self.group = group = as_group(process_group)
        self.device = torch.device(device or next(module.parameters(), torch.empty(0)).device)
        if self.device.type == "meta":
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.compute_dtype = compute_dtype
        check_same_shapes(module.named_parameters(), group)
        self.module = module
        self._window = Window(group, self.device, reduce_dtype)
        self.units = self._build_units(plans)
        self.weights = {weight.name: weight for unit in self.units for weight in unit.weights}
        self.fixed = [(weight.name, weight.shard, weight.whole.requires_grad) for weight in self.weights.values()]
        self._replicated = [one for name, one in module.named_parameters() if name not in self.weights]
        self._forward_order, self._backward_order = ExecutionOrder(), ExecutionOrder()
        self._calls: list[_Call] = []  # forwards of entries under way, one in another
        self._clock = 0  # counts beginnings and ends of calls
        self._backwards: list[int] = []  # under way: the engine's, and in it those of reentrant checkpoints
        self._float16 = False  # whether gradients may overflow
        entries = {entry for unit in self.units for entry in unit.entries}
        self._places = {entry: _places_of_attributes(entry, entries) for entry in entries}
        for unit in self.units:
            for entry in unit.entries:  # around the hooks of others, which may compute with the weights (weight_norm)
                entry.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True, prepend=True)
                entry.register_forward_hook(partial(self._after_forward, unit), with_kwargs=True, always_call=True)
        self._trained = [(unit, weight) for unit in self.units for weight in unit.trainable]
        call_at_each_gradient(self, [weight.whole for _, weight in self._trained], FSDP._gradient_arrived)
        call_at_each_gradient(self, [one for one in self._replicated if one.requires_grad], FSDP._arrive)
        watch_steps()

    # Construction

    def _build_units(self, plans: list[UnitPlan]) -> list[Unit]:
        """Shard one weight after the other: each is made real, sent by rank 0, cut and freed before the next."""
        units = [Unit(plan, self._window, self.compute_dtype) for plan in plans]  # while nothing else has memory yet
        for plan in plans:
            for _, parameter, _ in plan.parameters:
                parameter.is_cut = True  # type: ignore[attr-defined] # for an optimizer that has it already
            plan.parameters.clear()  # but for the modules, the last reference to the whole parameters
        homes = {home for unit in units for weight in unit.weights for home in weight.homes}
        ends_with: dict[nn.Module, list[ShardedWeight]] = defaultdict(list)  # by the last module that holds it
        for weight in (weight for unit in units for weight in unit.weights):
            ends_with[weight.homes[-1][0]].append(weight)
        # In the order of modules(), so that a seeded generator draws what it would draw in the constructor.
        for path, inner in list(self.module.named_modules()):
            materialize(inner, path, self.device)
            for name, parameter in inner._parameters.items():
                if parameter is not None and (inner, name) not in homes:
                    parameter.data = self._from_rank_0(parameter)
            for name, buffer in inner._buffers.items():
                if buffer is not None:
                    inner._buffers[name] = self._from_rank_0(buffer)
            for weight in ends_with[inner]:
                module, attribute = weight.homes[0]  # materialising may have replaced the parameter
                weight.keep(self._from_rank_0(module._parameters[attribute]))
        for unit in units:
            unit.come_to_rest()
        return units

    def _from_rank_0(self, tensor: Any) -> Tensor:
        """`tensor` with rank 0's values, on this rank's device."""
        values = tensor.detach().to(self.device)
        broadcast_from_first(values, self.group)
        return values

    # Forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        if self._window.in_forward or self._window.in_backward:  # of a checkpoint around the model
            return self.module(*inputs, **kwargs)
        self._forget_backward()
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._float16 = torch.float16 in (self.compute_dtype, autocast)
        self._calls.clear()
        try:
            for unit in self.units:
                unit.free()
            self._window.in_forward = True
            for unit in self._forward_order.begin():
                unit.gather()
            return self.module(*inputs, **kwargs)
        except BaseException:  # what catches the error (a bad batch, no memory) may go on
            for unit in self.units:
                with suppress(RuntimeError):  # of a rank that is gone: the forward's own error is to be told
                    unit.free()
            raise
        finally:
            self._window.in_forward = False

    def _forget_backward(self) -> None:
        """After a backward that raised: come to rest, drop the gradients that wait for the rest of their unit's."""
        if not self._backwards:
            return
        self._backwards.clear()
        for unit in self.units:
            unit.free()
            for weight in unit.weights:
                weight.whole.grad = None

    def _before_forward(self, unit: Unit, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather, and let the modules see the wholes."""
        if self._window.in_forward:
            self._forward_order.visit(unit)
        elif not self._window.in_backward and unit.state is State.GATHERED:
            unit.free()  # an entry is called directly, perhaps after the optimizer's step
        self._window.make_room(unit)
        unit.wait()
        self._clock += 1
        call = _Call(unit, state_before=unit.state, began=self._clock, casts=[])  # BACKWARD in a recomputation
        self._calls.append(call)
        for weight in unit.trainable:
            if weight.whole.requires_grad != weight.shard.requires_grad:  # which may be frozen for a while
                weight.whole.requires_grad = weight.shard.requires_grad
        unit.become(State.FORWARD)
        if self.compute_dtype is not None:
            args = call.cast(args, self.compute_dtype)
            kwargs = {name: call.cast(value, self.compute_dtype) for name, value in kwargs.items()}
        if torch.is_grad_enabled():
            given = _tensors_in([*args, *kwargs.values(), *_attributes(self._places[entry])])
            call.given = {id(tensor): (weakref.ref(tensor), _version(tensor)) for tensor in given}
        return args, kwargs

    def _after_forward(
        self, unit: Unit, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Ask to be told when the backward comes here; free, and gather ahead. It comes after an error as well."""
        if not self._calls or self._calls[-1].unit is not unit:
            return  # the hook before has raised
        call = self._calls.pop()
        self._clock += 1
        unit.become(call.state_before)
        if any(map(_version, call.casts)):
            raise RuntimeError(f"{unit.name!r} must not write into its arguments unless they are {self.compute_dtype}")
        outputs: list[Tensor] = []
        # What the module has put into a container or an attribute, or changed in place, is output as well.
        if torch.is_grad_enabled():
            made = _tensors_in([output, *args, *kwargs.values(), *_attributes(self._places[entry])])
            outputs = [one for one in made if one.requires_grad and not call.was_given(one)]
            _on_first_gradient(outputs, partial(self._before_backward, unit, call.began, self._clock))
        in_forward = self._window.in_forward
        if self._window.in_backward and not in_forward:
            return  # recomputed: its backward comes soon
        order = self._forward_order
        if in_forward and outputs and self.module.training and order.ends_with(unit):
            return  # the backward begins here, at once: gathering again would be waiting
        if unit.state is State.GATHERED:
            unit.free()
        if in_forward and output is not None:  # None after an error
            self._window.gather_ahead(order.ahead(unit))

    # Backward

    def _before_backward(self, unit: Unit, began: int, ended: int) -> None:
        """The backward comes to what a call of the unit has made, between two times of the clock: gather.

        The engine runs nodes in the reverse order of their making. So the units that began after that call are done
        with: free, and gather ahead.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(f"create_graph=True is not supported: {unit.name!r} is freed before a second backward")
        order, backward = self._backward_order, torch._C._current_graph_task_id()
        if backward not in self._backwards:
            self._backwards.append(backward)
            # The engine's own queue: DDP and torch's FSDP use it as well, and there is no public one.
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, backward))
            if len(self._backwards) == 1:
                for first in order.begin(default=reversed(self._forward_order.seen)):
                    self._window.gather_ahead(first)
        for other in list(self._window.gathered):
            if other.state is State.BACKWARD and other.began > ended and other is not unit:
                other.free()
                self._window.gather_ahead(order.ahead(other))
        self._window.make_room(unit)
        order.visit(unit)
        unit.began, unit.backward = began, backward
        unit.wait()
        if unit.state is State.GATHERED:  # while a forward runs the wholes are shown already
            unit.become(State.BACKWARD)

    def _gradient_arrived(self, index: int) -> None:
        """Reduce once the last gradient of the unit is there."""
        unit, weight = self._trained[index]
        if not weight.shard.requires_grad:  # frozen for this backward, as a discriminator in its generator's step
            weight.whole.grad = None
            return
        self._arrive(index)
        dense_gradient(weight.whole)
        if not self.sends:
            self._window.reducer.accumulate(weight)
            return
        if len(unit.arrived) == len(unit.trainable):
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        # In the order of the unit, which all ranks share, not of arrival.
        ready = [weight.whole.grad is not None or weight.accumulated is not None for weight in unit.weights]
        if any(ready):
            self._window.agree("reduces", unit, sum(is_ready << place for place, is_ready in enumerate(ready)))
            weights = [weight for weight, is_ready in zip(unit.weights, ready) if is_ready]
            self._window.reducer.reduce({weight: weight.take_gradient() for weight in weights})

    def _waiting(self) -> set[Tensor]:
        aside = {weight.shard for weight in self.weights.values() if weight.accumulated is not None}
        shards = (weight.shard for weight in self.weights.values())
        return aside | {one for one in (*shards, *self._replicated) if one.grad is not None}

    def _end_backward(self, backward: int) -> None:
        """Leave nothing gathered; reduce what the unused weights of a unit kept waiting."""
        self._backwards.remove(backward)
        for unit in self.units:
            if self._backwards:  # it was a reentrant checkpoint's
                is_over = unit.state is State.BACKWARD and unit.backward == backward
            else:  # one within a forward, as torch.autograd.grad's, leaves what that uses
                is_over = not (self._window.in_forward and unit.state is State.FORWARD)
                if self.sends:
                    self._reduce(unit)
            if is_over:
                unit.free()

    def _finish(self) -> None:
        for unit in self.units:
            if not unit.arrived:  # else a backward has raised
                self._reduce(unit)
            for weight in unit.trainable:
                if weight.shard._backward_hooks or weight.shard._post_accumulate_grad_hooks:
                    raise RuntimeError(f"parameter {weight.name!r} must have no gradient hooks: FSDP never calls them")
        self._window.reducer.wait()
        if self._window.num_ranks == 1:
            return
        average_replicated(self._replicated, self.group)
        if self._float16:  # torch.amp.GradScaler decides from its own rank's gradients: let all see an overflow
            self.clip_grad_norm_(math.inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients: those of the parameters, what `no_sync` put aside, and what a failed backward left."""
        self._forget_backward()
        for weight in self.weights.values():
            weight.accumulated = None
        self.unfinished.discard(self)
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, eps: float = 1e-6) -> Tensor:
        """As `clip_shards`, after `finish_gradient_synchronization`; RuntimeError where gradients wait for that."""
        if any(weight.accumulated is not None for weight in self.weights.values()):
            raise RuntimeError("gradients wait that no_sync put aside: call finish_gradient_synchronization() first")
        shards = [weight.shard for weight in self.weights.values()]
        sharded, whole = (
            [one.grad for one in parameters if one.grad is not None and one.numel()]
            for parameters in (shards, self._replicated)
        )
        return clip_shards(sharded, whole, max_norm, self.group, self.device, eps)

    # Whole parameters

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Copies of the whole parameters, in their master dtype, by their names in the unwrapped module; collective."""
        full = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        return full | {name: gather_copy(one, one.shard.dtype, self.group) for name, one in self.weights.items()}

    @torch.no_grad()
    def load_full_params(self, full: dict[str, Tensor]) -> None:
        """Take this rank's rows from whole parameters by name. ValueError naming one that is missing or misshapen."""
        for name, parameter in self.module.named_parameters():
            weight = self.weights.get(name)
            shape = parameter.shape if weight is None else weight.shape
            if name not in full or full[name].shape != shape:
                got = f"got {tuple(full[name].shape)}" if name in full else "it is missing"
                raise ValueError(f"full must hold {name!r} of shape {tuple(shape)}, {got}")
            parameter.copy_(full[name] if weight is None else full[name][weight.rows])

    def gathered_units(self) -> list[str]:
        """Names of the units whose wholes have memory now."""
        return [unit.name for unit in self.units if unit.state is not State.REST]


# What goes into a module and comes out of it


@dataclass
class _Call:
    """A forward of a unit's entry."""

    unit: Unit
    state_before: State
    began: int
    casts: list[Tensor]
    # The tensors that were there before, by id, which another may have once one is gone, with their versions.
    given: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)

    def was_given(self, tensor: Tensor) -> bool:
        """Whether it was there before the forward, as it is now."""
        before = self.given.get(id(tensor))
        return before is not None and before[0]() is tensor and before[1] == _version(tensor)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """`value` in `dtype` if it is a floating-point tensor, or a tuple with such tensors so."""
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
            value = value.to(dtype)
            self.casts.append(value)
        elif isinstance(value, tuple):
            items = [self.cast(item, dtype) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _places_of_attributes(entry: nn.Module, others: set[nn.Module]) -> list[dict[str, Any]]:
    """Where the modules of an entry keep their attributes, but for those within `others`, which are entries too."""
    found, left = [], [entry]
    while left:
        module = left.pop()
        found.append(vars(module))
        left += (inner for inner in module.children() if inner not in others)
    return found


def _attributes(places: list[dict[str, Any]]) -> list[Any]:
    """What modules keep on themselves, but for what torch does: a router's loss, say."""
    return [
        value
        for place in places
        for name, value in place.items()
        if name[0] != "_" and not isinstance(value, _HOLD_NO_TENSORS)
    ]


def _tensors_in(value: Any) -> list[Tensor]:
    """The tensors in containers, dataclasses and plain objects, in any depth."""
    found: list[Tensor] = []
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif id(value) not in seen and not isinstance(value, _HOLD_NO_TENSORS):
            seen.add(id(value))
            if isinstance(value, dict):
                left += value.values()
            elif isinstance(value, _CONTAINERS):
                left += value
            if type(value) not in _BUILT_IN:
                left += (getattr(value, name, None) for name in getattr(value, "__dataclass_fields__", ()))
                left += getattr(value, "__dict__", {}).values()
    return found


_HOLD_NO_TENSORS = (type(None), int, float, str, type, nn.Module)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_BUILT_IN = {dict, *_CONTAINERS}


def _on_first_gradient(tensors: list[Tensor], callback: Callable[[], None]) -> None:
    """Call back once a backward, before the first node that has to do with `tensors` runs.

    `register_multi_grad_hook` does the same at twice the cost, which a unit a layer feels.
    """
    called_in = -1  # backward

    def hook(_: Tensor) -> None:
        nonlocal called_in
        if called_in != (task := torch._C._current_graph_task_id()):
            called_in = task
            callback()

    for tensor in tensors:
        _ = tensor.grad_fn  # made anew where a view was written through: a hook on the old one crashes
        tensor.register_hook(hook)
        # What changes a view in place puts another node into its place, and leaves that of its base.
        if tensor._is_view() and tensor._base is not None and tensor._base.requires_grad:
            tensor._base.register_hook(hook)
