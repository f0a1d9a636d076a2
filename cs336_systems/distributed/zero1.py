"""ZeRO stage 1: gradients are reduce-scattered, each rank updates its slice in float32, parameters
are all-gathered.

    optimizer = Zero1Optimizer(model.parameters(), AdamW, lr=1e-3)      # of a plain model: no DDP wrapper
    loss.backward()                                                     # its hooks reduce bucket after bucket
    optimizer.step()
    optimizer.zero_grad()

Parameters live in flat buckets, and each rank owns the same part of every bucket. Phases: reduce
(each bucket when
it is full, while backward goes on), update (the wrapped optimizer sees this rank's slices, in
float32 or float64), gather (the slices of all ranks go back into the flat parameters, in place).
The bytes sent are those of one all-reduce, where `ShardedOptimizer` behind a DDP wrapper sends half
as much again (Rajbhandari et al., arXiv:1910.02054, section 7.2.1).

A slice knows no shapes, so the wrapped optimizer must work element by element, as SGD, Adam and
AdamW do. Parameters below float32 get a master slice of their own. A parameter that a step does not
use counts as having a gradient of zeros, so that momentum and weight decay go on moving it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.distributed.collectives import (
    Group,
    Work,
    all_gather_flat,
    broadcast_from_first,
    check_same_shapes,
    clip_shards,
    reduce_scatter_mean_flat,
    wait_for,
)
from cs336_systems.distributed.ddp import (
    Accumulating,
    DataParallel,
    SendQueue,
    call_at_each_gradient,
)
from cs336_systems.distributed.ddp_bucketed import BYTES_PER_MB, Bucket, plan_buckets
from cs336_systems.distributed.optimizer_shares import (
    OptimizerOfShares,
    check_elementwise,
    hyperparameters,
)

ALIGNMENT = 64  # elements, of a rank's slice
# name, among an optimizer's states, of the float32 values of a parameter below float32
MASTER = "master"


class Zero1Optimizer(OptimizerOfShares, Accumulating):
    """`optimizer_cls`, an elementwise optimizer, over this rank's slices of `params`.

    Args:
        params: what torch.optim takes; rank 0's values are sent to all.
        bucket_size_mb: of the parameters of a bucket, in MiB; a larger parameter has one of its
        own.
        process_group: None: all ranks.
        kwargs: for `optimizer_cls`.

    The parameters' memory is replaced by views of the buckets: build it after the model is on its
    device. Raises ValueError for an optimizer that is not elementwise, parameters that differ
    between ranks or are a DDP wrapper's; RuntimeError without a process group, on a second backward
    before `step` outside of `no_sync`, for a parameter that got other memory, a gradient that was
    changed after it was averaged, and a group added later. Changes past autograd, by `.grad.data`
    or by `unscale_` of torch.amp.GradScaler before a plain `step`, cannot be told: the update does
    not see them. float16 needs the LossScaler of `loss_scale.py`; `step` of torch.amp.GradScaler
    raises TypeError.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        bucket_size_mb: float = 100.0,
        process_group: Group = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, optimizer_cls, process_group, kwargs)
        check_elementwise(optimizer_cls, kwargs, rows=False)
        for wrapper in DataParallel.alive:
            if not set(wrapper.trainable).isdisjoint(self.parameters):
                kind = type(wrapper).__name__
                raise ValueError(
                    f"{kind} averages the gradients already: give Zero1Optimizer the plain module's parameters"
                )
        names = {parameter: str(place) for place, parameter in enumerate(self.parameters)}
        self.fixed = [
            (name, parameter, parameter.requires_grad) for parameter, name in names.items()
        ]
        check_same_shapes(((name, parameter) for name, parameter, _ in self.fixed), process_group)
        for parameter in self.parameters:
            if not parameter.requires_grad:  # in no bucket, whose values rank 0 sends
                broadcast_from_first(parameter, process_group)
        self.buckets: list[ShardedBucket] = []
        local_groups = []
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            plan = plan_buckets(trained, bucket_size_mb * BYTES_PER_MB)
            buckets = [ShardedBucket([trained[place] for place in places], self) for places in plan]
            self.buckets += buckets
            local_groups.append(
                {**hyperparameters(group), "params": [bucket.master for bucket in buckets]}
            )
        self.local = optimizer_cls(local_groups, **kwargs)
        self._take_settings()
        # Groups (decayed or not) take turns in a backward, which the queue learns in the first
        # step.
        self._queue = SendQueue(
            [bucket.parameters for bucket in self.buckets], names, process_group
        )
        call_at_each_gradient(self, self._queue.parameters, Zero1Optimizer._gradient_arrived)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by the constructor for each group; later ones are refused, the buckets being laid
        out.
        """
        if hasattr(self, "local"):
            raise RuntimeError(
                "Zero1Optimizer cannot add a group: its buckets are laid out; build it anew"
            )
        super().add_param_group(param_group)

    # Reduce

    def _gradient_arrived(self, index: int) -> None:
        """Take the gradient into its bucket, and reduce the buckets that are full and whose turn it
        is.
        """
        number, place = self._queue.places[index]
        self.buckets[number].take_gradient(place, self._queue.names[self._queue.parameters[index]])
        if self.sends:
            self._queue.arrive(index, self._send)

    def _send(self, message: int) -> Work:
        return self.buckets[message].reduce()

    def _finish(self) -> None:
        self._queue.finish(self._send)

    def averaged_gradients(self) -> list[Tensor]:
        """This rank's slices of the mean gradients: what the update will use."""
        self.finish_gradient_synchronization()
        return [bucket.gradient for bucket in self.buckets]

    def clip_grad_norm_(self, max_norm: float, eps: float = 1e-6) -> Tensor:
        """Clip the averaged gradients as `clip_shards` does; returns the whole model's norm."""
        slices = self.averaged_gradients()
        return clip_shards(slices, [], max_norm, self.process_group, self.parameters[0].device, eps)

    # Update and gather

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the own slices and gather all of them; TypeError for a closure, which would run
        backward in here.
        """
        if closure is not None:
            raise TypeError("Zero1Optimizer.step() takes no closure: run backward before it")
        self.finish_gradient_synchronization()
        self._give_settings()
        for bucket in self.buckets:
            replaced = any(
                one.grad is not view for one, view in zip(bucket.parameters, bucket.views)
            )
            if replaced or bucket.flat._version != bucket.version:
                raise RuntimeError(
                    f"a gradient was {'replaced after the backward' if replaced else 'changed after it was averaged'}, "
                    "which the update does not see: use clip_grad_norm_ and zero_grad of the optimizer"
                )
            bucket.follow_parameters()
        self.local.step()
        wait_for([bucket.gather() for bucket in self.buckets])
        # Past autograd, by the flat tensor: a backward whose forward was before this step must
        # raise as in one process.
        torch.autograd.graph.increment_version(self._queue.parameters)
        self._queue.begin()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; of a backward that no step has used (the loss scale overflowed) on
        all ranks.
        """
        if self._queue.arrived or not self._queue.waiting:
            # what unused parameters kept waiting: another rank may have sent it
            self._queue.finish(self._send)
            self._queue.begin()
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch.amp.GradScaler, which takes gradients from the parameters: there they are
        this rank's own.
        """
        raise TypeError(
            "Zero1Optimizer needs LossScaler of cs336_systems.distributed.loss_scale, not torch's own"
        )

    # State

    @torch.no_grad()
    def all_states(self) -> dict[Tensor, dict[str, Any]]:
        """A parameter below float32 has one state more, its float32 values."""
        states: dict[Tensor, dict[str, Any]] = {}
        for bucket in self.buckets:
            masters = {MASTER: bucket.master} if bucket.is_low else {}
            for name, value in {**self.state.get(bucket.master, {}), **masters}.items():
                pieces = [value] * len(bucket.parameters)
                if isinstance(value, Tensor) and value.shape == bucket.master.shape:
                    whole = value.new_empty(self.num_ranks * value.numel())
                    all_gather_flat(whole, value, self.process_group)
                    pieces = bucket.views_of(whole.cpu())
                for parameter, piece in zip(bucket.parameters, pieces):
                    # without the rest of the bucket
                    kept = piece.clone() if isinstance(piece, Tensor) else piece
                    states.setdefault(parameter, {})[name] = kept
        return states

    @torch.no_grad()
    def own_states(self, states: dict[Tensor, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        sliced = [
            bucket.slices_of([states[parameter] for parameter in bucket.parameters])
            for bucket in self.buckets
        ]
        return {place: slices for place, slices in enumerate(sliced) if slices}


class ShardedBucket(Bucket):
    """A bucket whose parameters are views of a flat tensor too, and this rank's slice of both, in
    float32 at least.
    """

    def __init__(self, parameters: list[Tensor], owner: Zero1Optimizer) -> None:
        super().__init__(parameters, multiple=owner.num_ranks * ALIGNMENT)
        self.group = owner.process_group
        self.flat_parameters = torch.zeros_like(self.flat)
        self.parameter_views = self.views_of(self.flat_parameters)
        for parameter, view in zip(parameters, self.parameter_views):
            view.copy_(parameter.detach())
            parameter.data = view
        broadcast_from_first(self.flat_parameters, self.group)
        own_length = len(self.flat) // owner.num_ranks  # equal slices, the last ones padded
        self.own = slice(owner.rank * own_length, (owner.rank + 1) * own_length)
        self.part = self.flat_parameters[self.own]
        self.is_low = torch.promote_types(self.part.dtype, torch.float32) != self.part.dtype
        self.master = nn.Parameter(self.part.float() if self.is_low else self.part)
        self.gradient = torch.zeros_like(self.master)  # of the slice, averaged over ranks

    def take_gradient(self, place: int, name: str) -> None:
        """As a bucket's; RuntimeError for a parameter that is no view of it any more."""
        parameter, view = self.parameters[place], self.parameter_views[place]
        if parameter.numel() and parameter.data_ptr() != view.data_ptr():
            shape = tuple(parameter.shape)
            raise RuntimeError(
                f"a parameter of shape {shape} was moved or cast after Zero1Optimizer was built"
            )
        super().take_gradient(place, name)

    def reduce(self) -> Work:
        """Start averaging; what no backward touched counts as zero."""
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is None:
                parameter.grad = view.zero_()
        self.master.grad, self.version = self.gradient, self.flat._version
        return reduce_scatter_mean_flat(self.gradient, self.flat, self.group, async_op=True)

    def follow_parameters(self) -> None:
        """Let the master take up what was written into parameters since the gather, as by
        `model.load_state_dict`.
        """
        if self.is_low:
            unchanged = self.part == self.master.to(self.part.dtype)
            self.master.copy_(torch.where(unchanged, self.master, self.part.to(self.master.dtype)))

    def gather(self) -> Work:
        """Start filling the parameters from all ranks' slices."""
        if self.is_low:
            self.part.copy_(self.master)
        return all_gather_flat(self.flat_parameters, self.part, self.group, async_op=True)

    def slices_of(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """This rank's slices of the states of all parameters; a counter is one for all. Takes up
        the master values.
        """
        slices: dict[str, Any] = {}
        for name in sorted({name for state in states for name in state}):
            values = {
                place: state[name]
                for place, state in enumerate(states)
                if state.get(name) is not None
            }
            slices[name] = next(iter(values.values()))
            tensors = {place: value for place, value in values.items() if isinstance(value, Tensor)}
            fits = [value.shape == self.parameters[place].shape for place, value in tensors.items()]
            if name != "step" and fits and all(fits):
                whole = self.flat_parameters if name == MASTER else torch.zeros_like(self.flat)
                whole = whole.to(self.master.dtype, copy=True)
                views = self.views_of(whole)
                for place, value in tensors.items():
                    views[place].copy_(value)
                slices[name] = whole[self.own].clone()
        if MASTER in slices:
            self.master.copy_(slices.pop(MASTER))
        return slices
