"""Fully sharded data parallelism (ZeRO stage 3): each rank keeps its rows of every weight, and
gathers what it uses.

    model = FSDP(TransformerLM.from_config(config), compute_dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-3)        # after wrapping: it sees the shards
    loss(model(tokens)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

The life of a weight, whose words the code repeats; `plan.py` says which weights make a unit:

- rest (`plan.py`): this rank holds its rows, in float32, the master weights;
- gather (`unit.py`): all ranks send their rows, in the compute dtype, into the whole weight. It
  starts when the unit two before has completed, so that it runs beside the unit in between;
- use (here, `unit_call.py`): the module sees the whole weight in its forward, and once more in its
  backward, which begins where autograd asks for what the forward has saved;
- free (`unit.py`): the whole gives its memory back after each use, and all do when a forward
  begins, since the optimizer may have changed the rows, and when a backward ends. A unit's wholes
  and the next one's are all there is;
- reduce (`reduce.py`): the gradient of the whole is averaged over ranks; each keeps the part of its
  rows, in float32.

Replicated parameters (norms) keep whole gradients, which `finish_gradient_synchronization` averages
in one message. Every rank must run the same modules in the same order, which `agreement.py`
compares. Backwards under `no_sync` put the gradients of sharded weights aside, whole, in no
`.grad`: the wrapper's `zero_grad` drops them, an optimizer's does not. Which weights are trained is
what they say when they are wrapped.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch.compiler.disable loads the compiler at once
from torch._compile import _disable_dynamo as uncompiled
from torch.nn.parallel import DistributedDataParallel

from cs336_systems.distributed.collectives import (
    as_group,
    broadcast_from_first,
    check_same_shapes,
    clip_shards,
)
from cs336_systems.distributed.ddp import (
    Accumulating,
    call_at_each_gradient,
    check_members,
    check_unwrapped,
    dense_gradient,
    watch_steps,
)
from cs336_systems.distributed.fsdp import engine
from cs336_systems.distributed.fsdp.plan import (
    Granularity,
    ShardedWeight,
    UnitPlan,
    materialize,
    plan_units,
    whole_of,
)
from cs336_systems.distributed.fsdp.reduce import average_replicated
from cs336_systems.distributed.fsdp.unit import ExecutionOrder, State, Unit, Window, gather_copy
from cs336_systems.distributed.fsdp.unit_call import Call, explain, explain_dtypes, version


class FSDP(nn.Module, Accumulating):
    """`module` with its weights sharded over `process_group`: each rank keeps its rows, and gathers
    what it uses.

    Args:
        module: whole on every rank, rank 0's values count; or built on the meta device, then drawn
        on rank 0 by each
            module's `reset_parameters`, one after the other, so that no rank ever holds the whole
            model.
        compute_dtype: of gathered weights, and so of messages and matmuls. None: that of the
        parameters. A unit gets
            its floating-point arguments in it, those in tuples too; what lists, dictionaries and
            objects hold stays.
        reduce_dtype: in which gradients are averaged. None: the dtype that they are computed in.
        granularity: what is gathered in one message: "block", all weights of a member of an
        outermost nn.ModuleList,
            or "layer", those of one Linear or Embedding, as the handout has it.
        device: where the shards go. None: where the parameters are; for a meta module the GPU if
        there is one. process_group: None: all ranks.

    Construction raises ValueError naming the argument, a wrapper in the module, a parameter of
    which ranks hold other shapes or one with gradient hooks. A step raises RuntimeError naming a
    unit that only some ranks run, that writes into an argument which was cast, or whose gradients
    shall have a graph; and a parameter that was replaced, tied, added to a module with sharded
    ones, cast or moved after wrapping, that a forward or a step before the backward changes, or
    that has hooks. It raises TypeError for a sparse gradient, a copy of the wrapper and a generator
    as output; ValueError for an optimizer that was built before, or does not update row by row.
    Gradients by torch.func inside of a unit are refused by PyTorch.
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
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
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
        self.fixed = [
            (weight.name, weight.shard, weight.whole.requires_grad)
            for weight in self.weights.values()
        ]
        self._replicated = [
            one for name, one in module.named_parameters() if name not in self.weights
        ]
        # With the wholes, which modules show after a backward that raised.
        self._members = {*module.parameters(), *(weight.whole for weight in self.weights.values())}
        self._registrations = -1  # that were counted when all members were known
        self._forward_order, self._backward_order = ExecutionOrder(), ExecutionOrder()
        self._calls: list[Call] = []  # forwards of entries under way, one in another
        self._clock = 0  # counts beginnings and ends of calls
        # under way: the engine's, and in it those of reentrant checkpoints
        self._backwards: list[int] = []
        self._float16 = False  # whether gradients may overflow
        for unit in self.units:
            # around the hooks of others, which may compute with the weights (weight_norm)
            for entry in unit.entries:
                entry.register_forward_pre_hook(
                    partial(self._before_forward, unit), with_kwargs=True, prepend=True
                )
                entry.register_forward_hook(
                    partial(self._after_forward, unit), with_kwargs=True, always_call=True
                )
        self._trained = [(unit, weight) for unit in self.units for weight in unit.trainable]
        call_at_each_gradient(
            self, [weight.whole for _, weight in self._trained], FSDP._gradient_arrived
        )
        call_at_each_gradient(
            self, [one for one in self._replicated if one.requires_grad], FSDP._arrive
        )
        watch_steps()

    # Construction

    def _build_units(self, plans: list[UnitPlan]) -> list[Unit]:
        """Shard one weight after the other: each is made real, sent by rank 0, cut and freed before
        the next.
        """
        # while nothing else has memory yet
        units = [Unit(plan, self._window, self.compute_dtype) for plan in plans]
        for plan in plans:
            for _, parameter, _ in plan.parameters:
                parameter.is_cut = True  # type: ignore[attr-defined] # for an optimizer that has it already
            # but for the modules, the last reference to the whole parameters
            plan.parameters.clear()
        homes = {home for unit in units for weight in unit.weights for home in weight.homes}
        # by the last module that holds it
        ends_with: dict[nn.Module, list[ShardedWeight]] = defaultdict(list)
        for weight in (weight for unit in units for weight in unit.weights):
            ends_with[weight.homes[-1][0]].append(weight)
        # In the order of modules(), so that a seeded generator draws what it would draw in the
        # constructor.
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
        paths = {inner: path for path, inner in self.module.named_modules()}
        for unit in units:
            unit.come_to_rest(paths)
        return units

    def _from_rank_0(self, tensor: Any) -> Tensor:
        """`tensor` with rank 0's values, on this rank's device."""
        values = tensor.detach().to(self.device)
        broadcast_from_first(values, self.group)
        return values

    def __getstate__(self) -> NoReturn:
        """Of deepcopy, AveragedModel and pickle; TypeError, since shards belong to their process
        group and units.
        """
        raise TypeError(
            "FSDP cannot be copied or pickled: keep copies of its parameters() for their average, and load "
            "gather_full_params() into another FSDP, or save_checkpoint, for a second model"
        )

    # Forward

    # the units' states change all the time; modules within are compiled
    @uncompiled(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        if self._is_running():  # a checkpoint around the model computes it again
            return self.module(*inputs, **kwargs)
        try:
            self._begin_forward()
            output = self.module(*inputs, **kwargs)
            if isinstance(output, Iterator | Awaitable):
                kind = type(output).__name__
                raise TypeError(
                    f"forward must return what it has computed, got a {kind}, which computes later"
                )
            return output
        except BaseException as error:  # what catches the error (a bad batch, no memory) may go on
            self._free_after(error)
            raise
        finally:
            self._end_forward()

    @uncompiled
    def _is_running(self) -> bool:
        return self._window.in_forward or self._window.in_backward

    @uncompiled
    def _begin_forward(self) -> None:
        self._forget_backward()
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._float16 = torch.float16 in (self.compute_dtype, autocast)
        self._end_calls()
        for unit in self.units:
            unit.free()
        self._window.in_forward = True
        for unit in self._forward_order.begin():
            unit.gather()

    @uncompiled
    def _free_after(self, error: BaseException) -> None:
        for unit in self.units:
            # of a rank that is gone: the forward's own error is to be told
            with suppress(RuntimeError):
                unit.free()
        explain_dtypes(error, self.module, self.compute_dtype)

    @uncompiled
    def _end_forward(self) -> None:
        self._window.in_forward = False
        self._end_calls()

    def _end_calls(self) -> None:
        """Of an error that calls no hooks, as KeyboardInterrupt: autograd saves as it did before."""
        while self._calls:
            self._calls.pop().stop_saving()

    def _forget_backward(self) -> None:
        """After a backward that raised: come to rest, drop the gradients that wait for the rest of
        their unit's.
        """
        if not self._backwards:
            return
        self._backwards.clear()
        for unit in self.units:
            unit.free()
            for weight in unit.weights:
                weight.whole.grad = None

    @uncompiled
    def _before_forward(
        self, unit: Unit, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Gather, and let the modules see the wholes."""
        if self._window.in_forward:
            self._forward_order.visit(unit)
        elif not self._window.in_backward and unit.state is State.GATHERED:
            unit.free()  # an entry is called directly, perhaps after the optimizer's step
        self._window.make_room(unit)
        unit.wait()
        self._clock += 1
        # BACKWARD in a recomputation
        call = Call(unit, self._before_backward, unit.state, self._clock)
        for weight in unit.trainable:
            # which may be frozen for a while
            if weight.whole.requires_grad != weight.shard.requires_grad:
                weight.whole.requires_grad = weight.shard.requires_grad
        unit.become(State.FORWARD)
        if self.compute_dtype is not None:
            args = call.cast(args, self.compute_dtype)
            kwargs = {name: call.cast(value, self.compute_dtype) for name, value in kwargs.items()}
        self._calls.append(call)
        call.start(args, kwargs)
        return args, kwargs

    @uncompiled
    def _after_forward(
        self,
        unit: Unit,
        entry: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Look at what comes out; then free, and gather ahead. It comes after an error as well."""
        if not self._calls or self._calls[-1].unit is not unit:
            return output  # the hook before has raised
        call = self._calls.pop()
        call.stop_saving()
        self._clock += 1
        call.ended = self._clock
        unit.become(call.state_before)
        if output is None:  # after an error
            explain(sys.exception(), unit)
        if any(map(version, call.casts)):
            raise RuntimeError(
                f"{unit.name!r} must not write into its arguments unless they are {self.compute_dtype}"
            )
        output = call.end(output)
        in_forward = self._window.in_forward
        if self._window.in_backward and not in_forward:
            return output  # recomputed: its backward comes soon
        order = self._forward_order
        if in_forward and call.has_saved and self.module.training and order.ends_with(unit):
            return output  # the backward begins here, at once: gathering again would be waiting
        if unit.state is State.GATHERED:
            unit.free()
        if in_forward and output is not None:  # None after an error
            self._window.gather_ahead(order.ahead(unit))
        return output

    # Backward

    def _before_backward(self, call: Call) -> None:
        """The backward comes to what a call of the unit has saved: gather.

        The engine runs nodes in the reverse order of their making. So the units that began after
        that call are done with: free, and gather ahead.
        """
        unit = call.unit
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True is not supported: {unit.name!r} is freed before a second backward"
            )
        order, backward = self._backward_order, engine.current_backward()
        if backward not in self._backwards:
            self._backwards.append(backward)
            engine.call_at_end_of_backward(partial(self._end_backward, backward))
            if len(self._backwards) == 1:
                for first in order.begin(default=reversed(self._forward_order.seen)):
                    self._window.gather_ahead(first)
        for other in list(self._window.gathered):
            if other.state is State.BACKWARD and other.began > call.ended and other is not unit:
                other.free()
                self._window.gather_ahead(order.ahead(other))
        self._window.make_room(unit)
        order.visit(unit)
        unit.began, unit.backward = call.began, backward
        unit.wait()
        if unit.state is State.GATHERED:  # while a forward runs the wholes are shown already
            unit.become(State.BACKWARD)

    def _gradient_arrived(self, index: int) -> None:
        """Reduce once the last gradient of the unit is there."""
        unit, weight = self._trained[index]
        # frozen for this backward, as a discriminator in its generator's step
        if not weight.shard.requires_grad:
            weight.whole.grad = None
            return
        self._arrive(index)
        dense_gradient(weight.whole)
        if not self.sends:
            self._window.reducer.accumulate(weight)
            return
        if len(unit.arrived) == len(unit.trainable):
            self._reduce(unit)

    @engine.unseen_by_checkpoints
    def _reduce(self, unit: Unit) -> None:
        # In the order of the unit, which all ranks share, not of arrival.
        ready = [
            weight.whole.grad is not None or weight.accumulated is not None
            for weight in unit.weights
        ]
        if any(ready):
            bits = sum(is_ready << place for place, is_ready in enumerate(ready))
            self._window.agreement.send("reduces", unit.index, bits)
            weights = [weight for weight, is_ready in zip(unit.weights, ready) if is_ready]
            with self._window.agreement:
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
        self._registrations = check_members(self.module, self._members, self._registrations)
        for unit in self.units:
            # of a forward after the backward: a step will change the rows
            if unit.state is State.GATHERED:
                unit.free()
            if not unit.arrived:  # else a backward has raised
                self._reduce(unit)
            for weight in unit.trainable:
                if weight.shard._backward_hooks or weight.shard._post_accumulate_grad_hooks:
                    raise RuntimeError(
                        f"parameter {weight.name!r} must have no gradient hooks: FSDP never calls them"
                    )
        self._window.reducer.wait()
        self._window.agreement.end_step()
        if self._window.num_ranks == 1:
            return
        with self._window.agreement:
            average_replicated(self._replicated, self.group)
        # torch.amp.GradScaler decides from its own rank's gradients: let all see an overflow
        if self._float16:
            self.clip_grad_norm_(math.inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients: those of the parameters, what `no_sync` put aside, and what a failed
        backward left.
        """
        self._forget_backward()
        for weight in self.weights.values():
            weight.accumulated = None
        self.unfinished.discard(self)
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, eps: float = 1e-6) -> Tensor:
        """As `clip_shards`, after `finish_gradient_synchronization`; RuntimeError where gradients
        wait for that.
        """
        if any(weight.accumulated is not None for weight in self.weights.values()):
            raise RuntimeError(
                "gradients wait that no_sync put aside: call finish_gradient_synchronization() first"
            )
        shards = [weight.shard for weight in self.weights.values()]
        sharded, whole = (
            [one.grad for one in parameters if one.grad is not None and one.numel()]
            for parameters in (shards, self._replicated)
        )
        return clip_shards(sharded, whole, max_norm, self.group, self.device, eps)

    # Whole parameters

    def gather_full_params(self) -> dict[str, Tensor]:
        """As the function of that name, of the unwrapped module."""
        return gather_full_params(self.module)

    def load_full_params(self, full: dict[str, Tensor]) -> None:
        """As the function of that name, of the unwrapped module."""
        load_full_params(self.module, full)

    def gathered_units(self) -> list[str]:
        """Names of the units whose wholes have memory now."""
        return [unit.name for unit in self.units if unit.state is not State.REST]


# Whole parameters, of any module that holds wrapped ones, is held by one, or both


def plain_name(handle: nn.Module, name: str) -> str:
    """`name` in `handle` without what wrappers (FSDP, the DDPs, torch.compile) add: that of the
    unwrapped model.
    """
    kept, at = [], handle
    for part in name.split("."):
        is_wrapped = part == "module" and isinstance(at, Accumulating | DistributedDataParallel)
        if not is_wrapped and part != "_orig_mod":
            kept.append(part)
        at = getattr(at, part, None)  # type: ignore[assignment]
    return ".".join(kept)


@torch.no_grad()
def gather_full_params(handle: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters, in their master dtype, by their names in the unwrapped model;
    collective.
    """
    full = {}
    for name, parameter in handle.named_parameters():
        weight = whole_of(parameter)
        copy = (
            parameter.detach().clone() if weight is None else gather_copy(weight, parameter.dtype)
        )
        full[plain_name(handle, name)] = copy
    return full


@torch.no_grad()
def load_full_params(handle: nn.Module, full: dict[str, Tensor]) -> None:
    """Take this rank's rows from whole parameters by name. ValueError naming one that is missing or
    misshapen.
    """
    for path, parameter in handle.named_parameters():
        name, weight = plain_name(handle, path), whole_of(parameter)
        shape = parameter.shape if weight is None else weight.shape
        if name not in full or full[name].shape != shape:
            got = f"got {tuple(full[name].shape)}" if name in full else "it is missing"
            raise ValueError(f"full must hold {name!r} of shape {tuple(shape)}, {got}")
        parameter.copy_(full[name] if weight is None else full[name][weight.rows])
