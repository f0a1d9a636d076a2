"""Fully sharded data parallelism (ZeRO stage 3): ranks keep rows of weights, and gather for use.

    model = FSDP(TransformerLM.from_config(config), compute_dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-3)        # after wrapping: it sees the shards
    loss(model(tokens)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

A unit is a set of weights that are gathered together (`plan.py`). The life of a weight has five
phases, whose names the code repeats:

- rest (`weight.py`): this rank holds its rows, the master weights, in the parameters' dtype, which
  is float32 as a rule;
- gather (`unit.py`, `gather.py`): all ranks send their rows, in the compute dtype, into the whole
  weight. A unit's gather starts when the unit two before has completed, so it runs beside the one
  in between;
- use (here, `unit_call.py`): the module sees the whole weight in its forward, and once more in its
  backward, which begins when autograd asks for a tensor that the forward has saved;
- free (`unit.py`): the whole weight gives its memory back after each use. All wholes do so when a
  forward begins, since the optimizer may have changed the rows, and when a backward ends. Normally
  only the wholes of the running unit and of the next one have memory;
- reduce (`reduce.py`): the gradient of the whole weight is averaged over the ranks; each rank keeps
  the part of its own rows, in the dtype of the master weights.

Replicated parameters (norms) keep whole gradients, which `finish_gradient_synchronization` averages
in one message. Every rank must run the same modules in the same order, which `agreement.py` checks.

With a `replicate_group` (hybrid sharding, HSDP) a model is sharded within each of several groups of
ranks, inside a node for example. What reduce has left of a gradient is then averaged over the ranks
that have the same rows in the other groups; all else stays within a group.

Backwards under `no_sync` put the gradients of sharded weights aside, whole, outside of `.grad`: the
wrapper's `zero_grad` drops them, an optimizer's does not. A weight is trained if it requires a
gradient when it is wrapped.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# not torch.compiler.disable, which loads the compiler at once
from torch._compile import _disable_dynamo as uncompiled
from torch.nn.parallel import DistributedDataParallel

from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import (
    broadcast_from_first,
    clip_shards,
)
from cs336_systems.distributed.ddp import Accumulating, call_at_each_gradient
from cs336_systems.distributed.fsdp import engine, unit_guards
from cs336_systems.distributed.fsdp.gather import gather_copy
from cs336_systems.distributed.fsdp.plan import (
    Granularity,
    UnitPlan,
    materialize,
    plan_units,
)
from cs336_systems.distributed.fsdp.reduce import average_replicated
from cs336_systems.distributed.fsdp.unit import ExecutionOrder, State, Unit, Window
from cs336_systems.distributed.fsdp.unit_call import Call
from cs336_systems.distributed.fsdp.weight import ShardedWeight, whole_of
from cs336_systems.distributed.tensor_parallel import cut, join, place_of, splits


class FSDP(unit_guards.NeverCopied, nn.Module, Accumulating):
    """Shards the weights of `module`: each rank keeps its rows, and gathers whole weights for use.

    Args:
        module: a whole module on every rank, of which rank 0's values count; or one built on the
            meta device. The latter is filled on each rank by the modules' `reset_parameters`, one
            module after the other, so that no rank ever holds the whole model; again rank 0's
            values count.
        compute_dtype: dtype of gathered weights, and so of messages and matmuls. None: that of the
            parameters. A unit's floating-point arguments are cast to it, also those in tuples;
            tensors in lists, dictionaries and objects keep their dtype.
        reduce_dtype: dtype in which gradients are averaged. None: that in which they are computed.
        granularity: what is gathered in one message: "block", all weights of a member of an
            outermost nn.ModuleList, or "layer", those of one Linear or Embedding, as in the
            handout.
        device: where the shards go. None: where the parameters are; for a module on the meta device
            the GPU if there is one, else the CPU.
        process_group: the ranks that share the weights. None: all ranks.
        replicate_group: the ranks that hold the same rows, one in each replica of the model (HSDP).
            None: there is one replica.

    Raises:
        ValueError: by the constructor, naming a bad argument, a wrapper inside the module, a
            parameter with gradient hooks or one whose shape differs between ranks; by a step, for
            an optimizer that was built before wrapping or does not update row by row.
        RuntimeError: by a step, naming a unit that only some ranks run, that writes into an
            argument which was cast, or that is differentiated with `create_graph=True`; or naming
            a parameter that was replaced, tied, cast, moved or added to a module with sharded
            weights after wrapping, that changed in a forward or between a forward and its
            backward, or that has gradient hooks.
        TypeError: for a sparse gradient, a copy of the wrapper, an iterator or awaitable as output.

    PyTorch itself raises an error for torch.func's gradients inside of a unit.
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
        replicate_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()

        # check the arguments, and plan the units
        guards.check_unwrapped(module)
        unit_guards.check_dtypes(compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
        plans = plan_units(module, granularity)
        self.group = group = guards.as_group(process_group)
        self.groups = [group]  # over whose ranks, one after the other, gradients are averaged
        if replicate_group is not None:
            self.groups.append(guards.as_group(replicate_group))
            guards.check_replicas(*self.groups)
        self.device = torch.device(device or next(module.parameters(), torch.empty(0)).device)
        if self.device.type == "meta":
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.compute_dtype = compute_dtype
        for one in self.groups:
            guards.check_same_shapes(module.named_parameters(), one)

        # shard the weights
        self.module = module
        self._window = Window(group, replicate_group, self.device, reduce_dtype)
        self.units = self._build_units(plans)
        self.weights = {weight.name: weight for unit in self.units for weight in unit.weights}
        for name in splits(module).keys() & self.weights.keys():
            shard: Any = self.weights[name].shard
            shard.is_part = place_of(splits(module)[name].group)
        self._replicated = [
            one for name, one in module.named_parameters() if name not in self.weights
        ]
        # The wholes are members too: modules show them after a backward that raised.
        self.watch = guards.Watch(
            [(weight.name, weight.shard) for weight in self.weights.values()],
            module,
            [*module.parameters(), *(weight.whole for weight in self.weights.values())],
        )

        # state of a step
        self._forward_order, self._backward_order = ExecutionOrder(), ExecutionOrder()
        self._calls: list[Call] = []  # forwards of entries under way, the innermost last
        self._clock = 0  # counts beginnings and ends of calls
        # numbers of the backwards under way: the outer one, then those of reentrant checkpoints
        self._backwards: list[int] = []
        self._float16 = False  # whether gradients may overflow

        # Register hooks. Those on forwards enclose the hooks of others, which may compute with the
        # weights (weight_norm).
        for unit in self.units:
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
        guards.watch_steps()

    # Construction

    def _build_units(self, plans: list[UnitPlan]) -> list[Unit]:
        """Return the units of `plans`, with this rank's rows of every weight as parameters.

        The weights are sharded one after the other: each is given memory, broadcast by rank 0, cut
        and freed before the next one, so that no rank ever holds the whole of a meta model.
        """
        # units first: they allocate their memory for a moment, while nothing else has any
        units = [Unit(plan, self._window, self.compute_dtype) for plan in plans]
        for plan in plans:
            for _, parameter, _ in plan.parameters:
                # an optimizer that has this parameter already is recognised by it
                parameter.is_cut = True  # type: ignore[attr-defined]
            # these are, but for the modules', the last references to the whole parameters
            plan.parameters.clear()

        # each weight under the last module that holds it: cut when that module has its values
        homes = {home for unit in units for weight in unit.weights for home in weight.homes}
        ends_with: dict[nn.Module, list[ShardedWeight]] = defaultdict(list)
        for weight in (weight for unit in units for weight in unit.weights):
            ends_with[weight.homes[-1][0]].append(weight)

        # In the order of modules(), so that a seeded generator draws the numbers that it would draw
        # in the model's constructor.
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
        """Return a detached `tensor` on this rank's device, with rank 0's values; collective."""
        values = tensor.detach().to(self.device)
        for group in self.groups:
            broadcast_from_first(values, group)
        return values

    # Forward

    # not compiled, since the units' states change all the time; the modules inside may be
    @uncompiled(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's output; after an error free all units, and raise it again.

        Raises TypeError if the output is an iterator or awaitable, which computes later.
        """
        if self._is_running():  # a checkpoint around the model recomputes this forward
            return self.module(*inputs, **kwargs)
        try:
            self._begin_forward()
            output = self.module(*inputs, **kwargs)
            unit_guards.check_output(output)
            return output
        except BaseException as error:  # the caller may catch it (a bad batch, no memory) and go on
            self._free_after(error)
            raise
        finally:
            self._end_forward()

    @uncompiled
    def _is_running(self) -> bool:
        """Return whether a forward of this wrapper or a backward is under way."""
        return self._window.in_forward or self._window.in_backward

    @uncompiled
    def _begin_forward(self) -> None:
        """Free all units, whose rows may have changed, and gather those that will run first."""
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
        """Free all units after a forward raised `error`, and add a note on dtypes if that helps."""
        for unit in self.units:
            # suppressed: if another rank is gone, the caller shall see the forward's own error
            with suppress(RuntimeError):
                unit.free()
        unit_guards.explain_dtypes(error, self.module, self.compute_dtype)

    @uncompiled
    def _end_forward(self) -> None:
        """Note that no forward is under way, and end the calls that an error has left open."""
        self._window.in_forward = False
        self._end_calls()

    def _end_calls(self) -> None:
        """Remove the saved-tensor hooks of calls that an error has left open.

        An error such as KeyboardInterrupt calls no forward hooks, which would remove them.
        """
        while self._calls:
            self._calls.pop().stop_saving()

    def _forget_backward(self) -> None:
        """Clean up after a backward that raised: free all units, drop gradients not yet reduced.

        Does nothing if no backward has raised since the last call.
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
        """Gather `unit`, show its modules the whole weights, and begin a call.

        Returns the arguments of the forward, cast to the compute dtype.
        """
        # gather
        if self._window.in_forward:
            self._forward_order.visit(unit)
        elif not self._window.in_backward and unit.state is State.GATHERED:
            unit.free()  # an entry is called directly, perhaps after the optimizer's step
        self._window.make_room(unit)
        unit.wait()

        # use (the state before is BACKWARD in a recomputation, which must not free the unit)
        self._clock += 1
        call = Call(unit, self._before_backward, unit.state, self._clock)
        for weight in unit.trainable:
            # a weight may be frozen for some forwards: the whole follows its shard
            if weight.whole.requires_grad != weight.shard.requires_grad:
                weight.whole.requires_grad = weight.shard.requires_grad
        unit.become(State.FORWARD)

        # cast the arguments, and ask the call for what autograd saves
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
        """End the call of `unit`, free it unless its backward comes next, and gather ahead.

        Returns the forward's output with copies of weights in it. torch calls this hook after an
        error as well, with None as output. Raises RuntimeError if the forward wrote into arguments
        that were cast.
        """
        if not self._calls or self._calls[-1].unit is not unit:
            return output  # _before_forward has raised, so there is no call

        # end the call
        call = self._calls.pop()
        call.stop_saving()
        self._clock += 1
        call.ended = self._clock
        unit.become(call.state_before)
        if output is None:  # after an error
            unit_guards.explain(sys.exception(), unit.name)
        unit_guards.check_casts(call.casts, unit.name, self.compute_dtype)
        output = call.end(output)

        # keep the unit gathered if its backward comes soon: after a recomputation, or where the
        # backward begins, which would have to wait for a second gather
        in_forward = self._window.in_forward
        if self._window.in_backward and not in_forward:
            return output
        order = self._forward_order
        if in_forward and call.has_saved and self.module.training and order.ends_with(unit):
            return output

        # free, and gather ahead
        if unit.state is State.GATHERED:
            unit.free()
        if in_forward and output is not None:  # None after an error
            self._window.gather_ahead(order.ahead(unit))
        return output

    # Backward

    def _before_backward(self, call: Call) -> None:
        """Gather the unit of `call`, because a backward needs what that call has saved.

        The engine runs nodes in the reverse order of their making. So units whose calls began after
        this one ended have completed their backward: they are freed, and others gathered ahead.
        Raises RuntimeError under `create_graph=True`.
        """
        unit = call.unit
        unit_guards.check_no_second_backward(unit.name)

        # the first unit of a backward: have its end noticed, and gather what it begins with
        order, backward = self._backward_order, engine.current_backward()
        if backward not in self._backwards:
            self._backwards.append(backward)
            engine.call_at_end_of_backward(partial(self._end_backward, backward))
            if len(self._backwards) == 1:
                for first in order.begin(default=reversed(self._forward_order.seen)):
                    self._window.gather_ahead(first)

        # free the units that are done
        for other in list(self._window.gathered):
            if other.state is State.BACKWARD and other.began > call.ended and other is not unit:
                other.free()
                self._window.gather_ahead(order.ahead(other))

        # gather this one
        self._window.make_room(unit)
        order.visit(unit)
        unit.began, unit.backward = call.began, backward
        unit.wait()
        if unit.state is State.GATHERED:  # not so within a forward, where the wholes are shown
            unit.become(State.BACKWARD)

    def _gradient_arrived(self, index: int) -> None:
        """Reduce the unit of weight `index` once all its gradients are there.

        `index` counts the trained weights of all units. Under `no_sync` the gradient is put aside.
        """
        unit, weight = self._trained[index]
        # frozen for this backward, as a discriminator in its generator's step
        if not weight.shard.requires_grad:
            weight.whole.grad = None
            return
        self.note_unaveraged()
        guards.dense_gradient(weight.whole)
        if not self.sends:
            self._window.reducer.accumulate(weight)
            return
        if len(unit.arrived) == len(unit.trainable):
            self._reduce(unit)

    def _arrive(self, index: int) -> None:
        """Note that a backward has accumulated the gradient of a replicated parameter."""
        self.note_unaveraged()

    @engine.unseen_by_checkpoints
    def _reduce(self, unit: Unit) -> None:
        """Start reducing the gradients that the unit's weights have now or had put aside."""
        # in the order of the unit's weights, which all ranks share, not of arrival
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
        """Return the shards and replicated parameters that have gradients, also those put aside."""
        aside = {weight.shard for weight in self.weights.values() if weight.accumulated is not None}
        shards = (weight.shard for weight in self.weights.values())
        return aside | {one for one in (*shards, *self._replicated) if one.grad is not None}

    def _end_backward(self, backward: int) -> None:
        """Free the units of a backward that has ended, and reduce what is left.

        A unit with weights that the backward did not use has gradients left to reduce.
        """
        self._backwards.remove(backward)
        for unit in self.units:
            if self._backwards:
                # the end of a reentrant checkpoint's backward: the outer one goes on
                is_over = unit.state is State.BACKWARD and unit.backward == backward
            else:
                # A backward within a forward (torch.autograd.grad) leaves the units in use there.
                is_over = not (self._window.in_forward and unit.state is State.FORWARD)
                if self.sends:
                    self._reduce(unit)
            if is_over:
                unit.free()

    def _synchronize(self) -> None:
        """Reduce what `no_sync` put aside, wait for all, and average replicated parameters."""
        for unit in self.units:
            # gathered by a forward after the backward: a step will change the rows
            if unit.state is State.GATHERED:
                unit.free()
            if not unit.arrived:  # gradients that still wait here are those of a failed backward
                self._reduce(unit)
            unit_guards.check_no_hooks(unit.trainable)

        self._window.reducer.wait()
        self._window.agreement.end_step()
        groups = [group for group in self.groups if group.size() > 1]
        if not groups:
            return
        with self._window.agreement:
            for group in groups:
                average_replicated(self._replicated, group)

        # torch.amp.GradScaler looks at its own rank's gradients only. Clipping to infinity spreads
        # an overflow: it makes the gradients of all ranks NaN.
        if self._float16:
            self.clip_grad_norm_(math.inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that `no_sync` put aside or a failed backward left."""
        self._forget_backward()
        for weight in self.weights.values():
            weight.accumulated = None
        self.forget_unaveraged()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, eps: float = 1e-6) -> Tensor:
        """Clip all gradients in place as `clip_shards` does, and return the whole model's norm.

        Call it after `finish_gradient_synchronization`; it raises RuntimeError if gradients that
        `no_sync` put aside still wait for that. Collective.
        """
        unit_guards.check_none_aside(self.weights.values())
        split = splits(self.module)
        spread: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        for name, parameter in self.module.named_parameters():
            groups = [self.group] if name in self.weights else []
            groups += [split[name].group] if name in split else []
            gradients = spread.setdefault(tuple(groups), [])
            if parameter.grad is not None and parameter.numel():
                gradients.append(parameter.grad)
        parts = [(gradients, groups) for groups, gradients in spread.items()]
        return clip_shards(parts, max_norm, self.device, eps)

    # Whole parameters

    def gather_full_params(self) -> dict[str, Tensor]:
        """Return copies of the whole parameters by their names in the module; collective."""
        return gather_full_params(self.module)

    def load_full_params(self, full: dict[str, Tensor]) -> None:
        """Load this rank's rows from whole parameters, by their names in the module."""
        load_full_params(self.module, full)

    def gathered_units(self) -> list[str]:
        """Return the names of the units whose whole weights have memory now."""
        return [unit.name for unit in self.units if unit.state is not State.REST]


# Whole parameters of any module: one that is wrapped, holds wrapped ones, or is inside of one


def plain_name(handle: nn.Module, name: str) -> str:
    """Return the name in the unwrapped model of the parameter or buffer `name` of `handle`.

    It is `name` without the parts that wrappers (FSDP, the DDPs, torch.compile) add.
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
    """Return copies of the whole parameters, by their names in the unwrapped model; collective.

    They are in the dtype of the master weights.
    """
    full, split = {}, splits(handle)
    for name, parameter in handle.named_parameters():
        weight = whole_of(parameter)
        copy = (
            parameter.detach().clone() if weight is None else gather_copy(weight, parameter.dtype)
        )
        if (layer := split.get(name)) is not None:
            copy = join(copy, layer.dim, layer.group).contiguous()
        full[plain_name(handle, name)] = copy
    return full


@torch.no_grad()
def load_full_params(handle: nn.Module, full: dict[str, Tensor]) -> None:
    """Load parameters in place from whole ones, this rank's rows where FSDP has cut them.

    `full` has the names of the unwrapped model, as from `gather_full_params`. Raises ValueError
    naming a parameter that is missing or has another shape.
    """
    split = splits(handle)
    for path, parameter in handle.named_parameters():
        name, weight, layer = plain_name(handle, path), whole_of(parameter), split.get(path)
        shape = parameter.shape if weight is None else weight.shape
        if layer is not None:
            shape = layer.whole_shape(shape)
        if name not in full or full[name].shape != shape:
            got = f"got {tuple(full[name].shape)}" if name in full else "it is missing"
            raise ValueError(f"full must hold {name!r} of shape {tuple(shape)}, {got}")
        values = full[name] if layer is None else cut(full[name], layer.dim, layer.group)
        parameter.copy_(values if weight is None else values[weight.rows])
