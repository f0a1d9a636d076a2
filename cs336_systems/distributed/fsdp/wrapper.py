"""Fully sharded data parallelism (ZeRO stage 3): each rank keeps its rows of every weight, and gathers what it uses.

    model = FSDP(TransformerLM.from_config(config), compute_dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-3)        # after wrapping: it sees the shards
    loss(model(tokens)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

The life of a weight, whose words the code repeats:

- rest: this rank holds its rows, in float32, the master weights;
- gather: all ranks send their rows, in the compute dtype, into the whole weight. It starts when the unit two before
  has completed, so that it runs beside the unit in between;
- use: the module sees the whole weight in its forward, and once more in its backward;
- free: the whole gives its memory back after each use. So a unit's wholes and the next one's are all there ever is;
- reduce: the gradient of the whole is averaged over ranks and each keeps the part of its rows, in float32.

Replicated parameters (norms) keep whole gradients, which `finish_gradient_synchronization` averages in one message.
Every rank must run the same modules in the same order: a module that only some run would leave the others waiting for
it, and of two of one shape, each run by some, the gradients would be mixed. A weight that no rank uses in a step keeps
no gradient, as in one process. Which weights are trained is what they say when they are wrapped.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from cs336_systems.distributed.collectives import all_reduce_mean, check_same_shapes, num_ranks, rank_in
from cs336_systems.distributed.ddp import dense_gradient
from cs336_systems.distributed.fsdp.communication import Lane
from cs336_systems.distributed.fsdp.order import ExecutionOrder
from cs336_systems.distributed.fsdp.plan import Granularity, Home, UnitPlan, materialize, plan_units
from cs336_systems.distributed.fsdp.unit import GradientReducer, Unit
from cs336_systems.distributed.fsdp.weights import ShardedWeight, own_rows

MAX_GATHERED = 3  # units: the current and two ahead, also where modules run in another order than expected


class FSDP(nn.Module):
    """`module` with its weights sharded over `process_group`; see the module's docstring.

    Args:
        module: whole on every rank, rank 0's values count; or built on the meta device, then drawn on rank 0 by each
            module's `reset_parameters`, one after the other, so that no rank ever holds the whole model.
        compute_dtype: of gathered weights, and so of messages and matmuls. None: that of the parameters.
        reduce_dtype: in which gradients are averaged. None: the dtype that they are computed in.
        granularity: "block" or "layer"; see `plan.py`.
        prefetch: a unit's gather starts when the unit so many before it has completed: 2 is the handout's, 1 overlaps
            nothing, 3 holds two units beside the current one.
        device: where the shards go. None: where the parameters are; for a meta module the GPU if there is one.
        process_group: None: all ranks.

    A forward that raises gives the gathered weights back. Raises TypeError if `module` is no module, ValueError naming
    the argument or a parameter that ranks hold in different shapes, RuntimeError where there is no process group, and
    in the backward TypeError for a sparse gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        granularity: Granularity = "block",
        prefetch: int = 2,
        device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating-point dtype, got {dtype}")
        if not 1 <= prefetch <= MAX_GATHERED:
            raise ValueError(f"prefetch must be from 1 to {MAX_GATHERED}, got {prefetch!r}")
        plans = plan_units(module, granularity)
        if not plans:
            raise ValueError("module must own a weight of two or more dimensions, found none to shard")
        self.rank, self.num_ranks = rank_in(process_group), num_ranks(process_group)
        group = process_group or dist.group.WORLD
        assert group is not None
        self.group = group
        self.device = _target_device(module, device)
        self.compute_dtype = compute_dtype
        self.prefetch = prefetch
        check_same_shapes(module.named_parameters(), group)
        self.module = module
        self._gathered: dict[Unit, None] = {}
        self.units = self._build_units(plans)
        shards = {weight.shard for unit in self.units for weight in unit.weights}
        self._replicated = [parameter for parameter in module.parameters() if parameter not in shards]
        self._reducer = GradientReducer(group, self.device, reduce_dtype)
        self._forward_order: ExecutionOrder[Unit] = ExecutionOrder()
        self._backward_order: ExecutionOrder[Unit] = ExecutionOrder()
        self._synchronize = True
        self._backward_begun = False
        self._recomputed: Unit | None = None  # gathered for a checkpoint's recomputation, not yet for its backward
        for unit in self.units:
            self._register_hooks(unit)

    # Construction

    def _build_units(self, plans: list[UnitPlan]) -> list[Unit]:
        """Shard one weight after the other; each is made real, sent by rank 0, cut and freed before the next."""
        lane = Lane(self.device)
        units = [Unit(plan.name, plan.entries, self.group, self.device, lane, self._gathered) for plan in plans]
        planned = {home for plan in plans for _, _, homes in plan.parameters for home in homes}
        for plan, unit in zip(plans, units):  # while nothing else has memory yet
            unit.lay_out(plan.parameters, self.compute_dtype)
            plan.parameters.clear()  # but for the modules, the last reference to the whole parameters
        waiting = {weight: {module for module, _ in weight.homes} for unit in units for weight in unit.weights}
        held: dict[nn.Module, list[ShardedWeight]] = defaultdict(list)
        for weight, modules in waiting.items():
            for module in modules:
                held[module].append(weight)
        # In the order of modules(), so that a seeded generator draws what it would draw in the constructor.
        for name, inner in list(self.module.named_modules()):
            materialize(inner, name, self.device)
            self._settle_replicated(inner, planned)
            for weight in held[inner]:
                waiting[weight].remove(inner)
                if not waiting[weight]:
                    weight.keep(self._from_rank_0(weight), self.rank, self.num_ranks)
        return units

    def _from_rank_0(self, weight: ShardedWeight) -> Tensor:
        """The whole weight with rank 0's values, on this rank's device."""
        module, attribute = weight.homes[0]
        current = module._parameters[attribute]  # materialising may have replaced the parameter
        assert current is not None
        values = current.detach().to(self.device).contiguous()
        self._broadcast(values)
        return values

    def _settle_replicated(self, inner: nn.Module, planned: set[Home]) -> None:
        """Move the replicated parameters and the buffers of `inner` itself, with rank 0's values."""
        for name, parameter in inner._parameters.items():
            if parameter is not None and (inner, name) not in planned:
                parameter.data = parameter.data.to(self.device)
                self._broadcast(parameter.data)
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = buffer.to(self.device)
                self._broadcast(inner._buffers[name])

    def _broadcast(self, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.numel():
            values = tensor if tensor.is_contiguous() else tensor.contiguous()
            dist.broadcast(values, src=dist.get_global_rank(self.group, 0), group=self.group)
            if values is not tensor:
                tensor.copy_(values)

    def _register_hooks(self, unit: Unit) -> None:
        for entry in unit.entries:
            entry.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
            entry.register_forward_hook(partial(self._after_forward, unit))
        for weight in unit.trainable:
            weight.whole.register_post_accumulate_grad_hook(self._gradient_hook(unit, weight))

    def _gradient_hook(self, unit: Unit, weight: ShardedWeight) -> Callable[[nn.Parameter], None]:
        """`_gradient_arrived` as a hook of `weight.whole`, holding all of them weakly.

        The weight holds its whole, and the garbage collector sees no cycle through a tensor's hooks.
        """
        find_self, find_unit, find_weight = weakref.ref(self), weakref.ref(unit), weakref.ref(weight)

        def hook(whole: nn.Parameter) -> None:
            alive, unit, weight = find_self(), find_unit(), find_weight()
            if alive is not None and unit is not None and weight is not None:
                alive._gradient_arrived(unit, weight, whole)

        return hook

    # Forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        if self._in_backward:
            return self.module(*inputs, **kwargs)
        self._begin_forward()
        try:
            return self.module(*inputs, **kwargs)
        except BaseException:
            self._give_back()
            raise

    @property
    def _in_backward(self) -> bool:
        """Whether this code runs inside autograd's engine: in a hook, or in a checkpoint's recomputation."""
        return torch._C._current_graph_task_id() != -1

    def _give_back(self) -> None:
        """Free what a forward that raised has gathered: what catches the error (a bad batch, no memory) may go on."""
        for unit in self.units:
            unit.running = 0
            unit.show_shards()
            try:
                unit.free()
            except RuntimeError:  # a rank that the gather waits for is gone: the forward's own error is to be told
                continue

    def _begin_forward(self) -> None:
        if self._backward_begun:
            self._forget_backward()
        self._recomputed = None
        self._forward_order.begin()
        ahead = self._forward_order.first(min(2, self.prefetch))
        for unit in self.units:
            unit.in_backward, unit.running = False, 0
            if unit not in ahead:
                unit.free()
        for unit in ahead:
            unit.gather()

    def _forget_backward(self) -> None:
        """After a backward that raised: drop the gradients that wait for the rest of their unit's."""
        self._backward_begun = False
        for unit in self.units:
            unit.arrived.clear()
            for weight in unit.weights:
                weight.whole.grad = None

    def _before_forward(self, unit: Unit, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather, and let the modules see the wholes."""
        if self._in_backward:
            self._keep_for_recomputation(unit)
        else:
            unit.position = self._forward_order.visit(unit)
        unit.running += 1
        self._make_room(unit)
        unit.wait()
        unit.show_wholes()
        is_plain = not kwargs and all(type(value) is Tensor for value in args)  # then there is no tree to walk through
        leaves, structure = (list(args), None) if is_plain else tree_flatten((args, kwargs))
        if torch.is_grad_enabled():
            unit.frees_on_inputs = _call_after_backward(partial(self._after_backward, unit), leaves)
        if self.compute_dtype is not None:
            leaves = [_cast(leaf, self.compute_dtype) for leaf in leaves]
        elif not (torch.is_grad_enabled() and unit.frees_on_inputs):
            return args, kwargs  # the very objects: the module may fill a container
        return (tuple(leaves), kwargs) if structure is None else tree_unflatten(leaves, structure)

    def _after_forward(self, unit: Unit, entry: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ask to be told when the backward comes here; free, and gather ahead."""
        unit.running = max(0, unit.running - 1)
        unit.show_shards()
        leaves = [output] if isinstance(output, Tensor) else tree_flatten(output)[0]
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs and torch.is_grad_enabled():
            if len(outputs) == 1:  # its own hook runs once a backward, and costs the host less
                outputs[0].register_hook(lambda _: self._before_backward(unit))
            else:
                register_multi_grad_hook(outputs, lambda _: self._before_backward(unit), mode="any")
        if self._in_backward:
            if unit.in_backward:
                unit.show_wholes()
            return
        order = self._forward_order
        if outputs and self.module.training and order.ends_within(unit.position, min(2, self.prefetch)):
            return  # the backward begins here, at once: gathering again would be waiting
        unit.free()
        self._gather_ahead(order.ahead(unit.position, self.prefetch))

    # The window

    def _make_room(self, unit: Unit) -> None:
        """Before `unit` is gathered for use: free idle units, gathered for an order that did not come; oldest first."""
        if unit.is_gathered:
            return
        surplus = len(self._gathered) + 1 - MAX_GATHERED
        if surplus > 0:
            for other in [other for other in self._gathered if not other.is_in_use][:surplus]:
                other.free()

    def _gather_ahead(self, unit: Unit | None) -> None:
        """Start gathering what is expected to run soon, if there is room."""
        if unit is not None and len(self._gathered) < MAX_GATHERED:
            unit.gather()

    # Backward

    def _before_backward(self, unit: Unit) -> None:
        """Gather, and let the modules see the wholes: a checkpoint inside the unit will run them again."""
        if not self._backward_begun:
            self._begin_backward()
        if self._recomputed is unit:
            self._recomputed = None
        unit.in_backward = True
        unit.backward_position = self._backward_order.visit(unit)
        self._make_room(unit)
        unit.wait()
        unit.show_wholes()

    def _begin_backward(self) -> None:
        self._backward_begun = True
        known = self._backward_order.seen or self._backward_order.expected
        self._backward_order.begin(known or list(reversed(self._forward_order.seen)))
        for unit in self._backward_order.first(min(2, self.prefetch)):
            self._gather_ahead(unit)
        # The engine's own queue: DDP and torch's FSDP use it as well, and there is no public one.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _keep_for_recomputation(self, unit: Unit) -> None:
        """Of units gathered only to be recomputed, keep none but `unit`."""
        previous, self._recomputed = self._recomputed, unit
        if previous is not None and previous is not unit and not previous.in_backward:
            previous.free()

    def _after_backward(self, unit: Unit) -> None:
        """The gradients of the unit's inputs are there, so its weights are not needed any more: free, gather ahead."""
        if not unit.in_backward:
            return
        unit.in_backward, unit.running = False, 0  # a checkpoint may end its recomputation before the forward does
        unit.free()
        self._gather_ahead(self._backward_order.ahead(unit.backward_position, self.prefetch))

    def _gradient_arrived(self, unit: Unit, weight: ShardedWeight, whole: nn.Parameter) -> None:
        """Reduce once the last gradient of the unit is there."""
        dense_gradient(whole)
        if not self._synchronize:
            self._reducer.accumulate(weight)
            return
        if weight not in unit.arrived:
            unit.arrived.append(weight)
        if len(unit.arrived) == len(unit.trainable):
            self._reduce(unit)
            if not unit.frees_on_inputs and len(unit.trainable) == len(unit.weights):
                self._after_backward(unit)

    def _reduce(self, unit: Unit) -> None:
        arrived, unit.arrived = unit.arrived, []
        # In the order of the unit, which all ranks share, not of arrival.
        ready = [weight for weight in unit.weights if weight in arrived or weight.accumulated is not None]
        if ready:
            self._reducer.reduce(ready)

    def _end_backward(self) -> None:
        """Reduce what the unused weights of a unit kept waiting; leave nothing gathered."""
        for unit in self.units:
            if self._synchronize:
                self._reduce(unit)
            unit.in_backward, unit.running = False, 0
            unit.free()
        self._recomputed = None
        self._backward_begun = False

    def finish_gradient_synchronization(self) -> None:
        """Wait (on a GPU: let the stream wait) for the gradients; call it after backward, before the optimizer.

        It reduces what was put aside under `no_sync`, if no backward has come since. RuntimeError within `no_sync`.
        """
        if not self._synchronize:
            raise RuntimeError("finish_gradient_synchronization() must be called outside of no_sync()")
        for unit in self.units:
            aside = [weight for weight in unit.weights if weight.accumulated is not None]
            if aside:
                self._reducer.reduce(aside)
        self._reducer.wait()
        if self.num_ranks == 1:
            return
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in self._replicated:
            if parameter.requires_grad and parameter.numel():
                by_dtype[parameter.dtype].append(parameter)
        for parameters in by_dtype.values():
            self._average_replicated(parameters)

    @torch.no_grad()
    def _average_replicated(self, parameters: list[nn.Parameter]) -> None:
        """Average whole gradients in one message; a gradient that no rank has stays None."""
        gradients = [parameter.grad for parameter in parameters]
        flags = torch.ones(len(parameters), dtype=parameters[0].dtype, device=self.device)
        pieces = []
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients)):
            if gradient is None:
                flags[index] = 0
            pieces.append(torch.zeros_like(parameter) if gradient is None else gradient)
        flat = torch.cat([*(piece.reshape(-1) for piece in pieces), flags])
        all_reduce_mean(flat, self.group)
        averages = flat[: -len(parameters)].split([parameter.numel() for parameter in parameters])
        for parameter, average, used in zip(parameters, averages, flat[-len(parameters) :]):
            if parameter.grad is not None:
                parameter.grad.copy_(average.view_as(parameter))
            elif used.item() > 0:  # unused on this rank only
                parameter.grad = average.view_as(parameter).clone()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside put the gradients of sharded weights aside, whole, for the next one outside to reduce.

        Until then no `.grad` has them. `zero_grad` of this module drops them with all others; an optimizer's does not
        know of them, and drops the replicated parameters' alone.
        """
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients: those of the parameters, what `no_sync` put aside, and what a failed backward left."""
        self._forget_backward()
        for unit in self.units:
            for weight in unit.weights:
                weight.accumulated = None
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, eps: float = 1e-6) -> Tensor:
        """Scale all gradients by min(1, max_norm / (norm + eps)); returns `norm`, the whole model's, on each rank.

        Call it after `finish_gradient_synchronization`; RuntimeError where gradients still wait for that. A norm that
        is not finite makes every gradient on every rank NaN, as `cs336_systems.model.clip_gradients` does. ValueError
        if max_norm is not positive.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        if any(weight.accumulated is not None for unit in self.units for weight in unit.weights):
            raise RuntimeError("gradients wait that no_sync put aside: call finish_gradient_synchronization() first")
        sharded = [weight.shard.grad for unit in self.units for weight in unit.weights if weight.shard.requires_grad]
        replicated = [parameter.grad for parameter in self._replicated]
        total = self._sum_of_squares([gradient for gradient in sharded if gradient is not None])
        if self.num_ranks > 1:
            dist.all_reduce(total, group=self.group)
        total += self._sum_of_squares([gradient for gradient in replicated if gradient is not None])
        norm = total.sqrt()
        scale = (max_norm / (norm + eps)).clamp(max=1.0).where(norm.isfinite(), torch.nan)
        gradients = [gradient for gradient in (*sharded, *replicated) if gradient is not None]
        if gradients:
            torch._foreach_mul_(gradients, scale.to(torch.float32))
        return norm.to(torch.float32)

    @torch.no_grad()
    def gradients_are_finite(self) -> bool:
        """Whether every gradient of every rank is finite: what a loss scaler asks, with one answer for all; collective.

        Waits for the GPU.
        """
        own = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        finite = torch.stack([torch.ones((), device=self.device), *(gradient.isfinite().all() for gradient in own)])
        smallest = finite.min()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self.group)
        return bool(smallest.item())

    def _sum_of_squares(self, gradients: list[Tensor]) -> Tensor:
        """In float64, so that squares of float32 do not overflow."""
        filled = [gradient for gradient in gradients if gradient.numel()]
        if not filled:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(torch._foreach_norm(filled, 2, torch.float64)).square().sum()

    # Whole parameters

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Copies of the whole parameters, in their master dtype, by their names in the unwrapped module; collective."""
        full: dict[str, Tensor] = {}
        for unit in self.units:
            full |= unit.gather_full()
        for name, parameter in self.module.named_parameters():
            if name not in full:
                full[name] = parameter.detach().clone()
        return {name: full[name] for name, _ in self.module.named_parameters()}

    @torch.no_grad()
    def load_full_params(self, full: dict[str, Tensor]) -> None:
        """Take this rank's rows from whole parameters by name. ValueError naming one that is missing or misshapen."""
        weights = {weight.name: weight for unit in self.units for weight in unit.weights}
        for name, parameter in self.module.named_parameters():
            shape = weights[name].shape if name in weights else parameter.shape
            if name not in full or full[name].shape != shape:
                got = f"got {tuple(full[name].shape)}" if name in full else "it is missing"
                raise ValueError(f"full must hold {name!r} of shape {tuple(shape)}, {got}")
            values = full[name]
            if name in weights:
                values = values[own_rows(shape[0], self.rank, self.num_ranks)]
            parameter.copy_(values)

    def gathered_units(self) -> list[str]:
        """Names of the units whose wholes have memory now."""
        return [unit.name for unit in self.units if unit.is_gathered]


class _AfterBackward(torch.autograd.Function):
    """Identity on several tensors that calls back when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.callback()
        return (None, *gradients)


def _call_after_backward(callback: Callable[[], None], leaves: list[Any]) -> bool:
    """Change `leaves` so that `callback` runs once its tensors' gradients are there; False if none needs one."""
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places:
        return False
    watched = _AfterBackward.apply(callback, *(leaves[place] for place in places))
    for place, tensor in zip(places, watched):
        leaves[place] = tensor
    return True


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _target_device(module: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device asked for, or that of the parameters; for meta parameters the current GPU, if any, or the CPU."""
    if device is None:
        device = next(module.parameters()).device
        if device.type == "meta":
            device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
