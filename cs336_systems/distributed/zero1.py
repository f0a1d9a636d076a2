"""ZeRO stage 1: reduce-scatter gradients, update a slice on each rank, all-gather parameters.

    optimizer = Zero1Optimizer(model.parameters(), AdamW, lr=1e-3)  # of a plain model, no DDP
    loss.backward()                                                 # hooks reduce the buckets
    optimizer.step()
    optimizer.zero_grad()

Parameters live in flat buckets. Each bucket is cut into equal slices, one for each rank. The phases
of a step are

- reduce: each bucket of gradients, when it is full, while the backward goes on;
- update: the wrapped optimizer works on this rank's slices, in float32 or float64;
- gather: the slices of all ranks go back into the flat parameters, in place.

The bytes sent are those of one all-reduce; `ShardedOptimizer` behind a DDP wrapper sends half as
much again (Rajbhandari et al., arXiv:1910.02054, section 7.2.1).

A slice has no shapes, so the wrapped optimizer must work element by element, as SGD, Adam and AdamW
do. Parameters below float32 get a master slice in float32. A parameter that a step does not use
counts as having a gradient of zeros, so momentum and weight decay go on moving it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.distributed import guards
from cs336_systems.distributed.collectives import (
    Group,
    Work,
    all_gather_flat,
    broadcast_from_first,
    clip_shards,
    reduce_scatter_mean_flat,
    wait_for,
)
from cs336_systems.distributed.ddp import (
    Accumulating,
    SendQueue,
    call_at_each_gradient,
)
from cs336_systems.distributed.ddp_bucketed import BYTES_PER_MB, Bucket, plan_buckets
from cs336_systems.distributed.optimizer_shares import OptimizerOfShares, hyperparameters

ALIGNMENT = 64  # a rank's slice is a multiple of so many elements
# key in an optimizer's state of the float32 values of a parameter below float32
MASTER = "master"


class Zero1Optimizer(OptimizerOfShares, Accumulating):
    """Averages gradients and updates parameters, with optimizer state for this rank's slices only.

    Args:
        params: parameters or groups as torch.optim takes them; rank 0's values are sent to all.
        optimizer_cls: an optimizer that works element by element.
        bucket_size_mb: largest size of a bucket of parameters, in MiB; a larger parameter has a
            bucket of its own.
        process_group: the ranks that share the work. None: all ranks.
        kwargs: arguments of `optimizer_cls`.

    The parameters' memory is replaced by views of the buckets, so build the optimizer after the
    model is on its device. float16 needs the LossScaler of `loss_scale.py`.

    Raises:
        ValueError: the optimizer is not elementwise, or the parameters differ between ranks or
            belong to a DDP wrapper.
        RuntimeError: there is no process group; a second backward came before `step` outside of
            `no_sync`; a parameter got other memory; a gradient was changed after it was averaged;
            a group was added later.
        TypeError: by `step` of torch.amp.GradScaler.

    The optimizer cannot notice changes of gradients that bypass autograd, by `.grad.data` or by
    `unscale_` of torch.amp.GradScaler before a plain `step`: the update ignores them.
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

        # check that the slices can be updated, and that all ranks have the same parameters
        guards.check_elementwise(optimizer_cls, kwargs, rows=False)
        guards.check_not_averaged(self.parameters)
        if any(hasattr(parameter, "is_part") for parameter in self.parameters):
            raise ValueError("Zero1Optimizer would mix the parts that tensor parallelism has cut")
        names = {parameter: str(place) for place, parameter in enumerate(self.parameters)}
        guards.check_same_shapes([(name, one) for one, name in names.items()], process_group)
        self.watch = guards.Watch((name, one) for one, name in names.items())

        # frozen parameters are in no bucket, so they are broadcast here
        for parameter in self.parameters:
            if not parameter.requires_grad:
                broadcast_from_first(parameter, process_group)

        # lay out the buckets of each group, and build the optimizer over this rank's slices
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

        # A backward mixes the groups (with decay, without), so the queue learns the order of the
        # buckets in the first step.
        self._queue = SendQueue(
            [bucket.parameters for bucket in self.buckets], names, process_group
        )
        self._under_way: list[Work] = []
        call_at_each_gradient(self, self._queue.parameters, Zero1Optimizer._gradient_arrived)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the constructor calls this, and later calls raise RuntimeError.

        The buckets are laid out once, by the constructor.
        """
        if hasattr(self, "local"):
            raise RuntimeError(
                "Zero1Optimizer cannot add a group: its buckets are laid out; build it anew"
            )
        super().add_param_group(param_group)

    # Reduce

    def _gradient_arrived(self, index: int) -> None:
        """Reduce the full buckets whose turn it is, now that gradient `index` is there.

        `index` counts the parameters of all buckets, one bucket after the other.
        """
        if self.sends:
            self._queue.arrive(index, self._send)

    def _send(self, message: int) -> None:
        """Start averaging one bucket."""
        self._under_way.append(self.buckets[message].reduce(self._queue.names))

    def _synchronize(self) -> None:
        """Send the buckets that the backward has not filled, and wait for all."""
        self._queue.finish(self._send)
        wait_for(self._under_way)

    def averaged_gradients(self) -> list[Tensor]:
        """Finish averaging, and return this rank's slice of each bucket's mean gradient.

        The update uses these tensors, in float32 or float64.
        """
        self.finish_gradient_synchronization()
        return [bucket.gradient for bucket in self.buckets]

    def clip_grad_norm_(self, max_norm: float, eps: float = 1e-6) -> Tensor:
        """Clip the averaged gradients as `clip_shards` does; return the whole model's norm."""
        slices = self.averaged_gradients()
        parts = [(slices, [self.process_group])]
        return clip_shards(parts, max_norm, self.parameters[0].device, eps)

    # Update and gather

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update this rank's slices, then gather the slices of all ranks into the parameters.

        Raises TypeError for a closure, which would run a backward inside the step, and RuntimeError
        if a gradient was replaced after the backward or changed after it was averaged.
        """
        if closure is not None:
            raise TypeError("Zero1Optimizer.step() takes no closure: run backward before it")

        # reduce: what is still under way
        self.finish_gradient_synchronization()
        self._give_settings()

        # update: the own slices
        for bucket in self.buckets:
            replaced = any(
                one.grad is not view for one, view in zip(bucket.parameters, bucket.views)
            )
            if replaced or bucket.flat._version != bucket.version:
                how = "replaced after the backward" if replaced else "changed after it was averaged"
                raise RuntimeError(
                    f"a gradient was {how}, which the update does not see: "
                    "use clip_grad_norm_ and zero_grad of the optimizer"
                )
            bucket.follow_parameters()
        self.local.step()

        # gather: all slices, into the parameters
        wait_for([bucket.gather() for bucket in self.buckets])

        # The gather writes the flat tensors, so autograd does not see that parameters have changed.
        # A backward whose forward was before this step must raise, as in one process.
        torch.autograd.graph.increment_version(self._queue.parameters)
        self._queue.begin()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those of a backward that no step has used.

        After such a backward (the loss scale overflowed) all ranks must call it.
        """
        if self._queue.is_begun:
            # Unused parameters keep buckets waiting here that another rank may have sent.
            self._queue.finish(self._send)
            wait_for(self._under_way)
            self._queue.begin()
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise TypeError when torch.amp.GradScaler reads this property in its `step`.

        GradScaler reads the parameters' gradients, which here are this rank's own, not the means.
        """
        raise TypeError(
            "Zero1Optimizer needs LossScaler of cs336_systems.distributed.loss_scale, "
            "not torch's own"
        )

    # State

    @torch.no_grad()
    def all_states(self) -> dict[Tensor, dict[str, Any]]:
        """Return the states of all parameters in their shapes, on CPU; collective.

        A parameter below float32 has one more entry, its float32 values, under the key MASTER.
        """
        states: dict[Tensor, dict[str, Any]] = {}
        for bucket in self.buckets:
            masters = {MASTER: bucket.master} if bucket.is_low else {}
            for name, value in {**self.state.get(bucket.master, {}), **masters}.items():
                # a state of the slice's shape is cut into parameters; a counter is the same for all
                pieces = [value] * len(bucket.parameters)
                if isinstance(value, Tensor) and value.shape == bucket.master.shape:
                    whole = value.new_empty(self.num_ranks * value.numel())
                    all_gather_flat(whole, value, self.process_group)
                    pieces = bucket.views_of(whole.cpu())

                # cloned, so that a view does not keep the whole bucket alive
                for parameter, piece in zip(bucket.parameters, pieces):
                    kept = piece.clone() if isinstance(piece, Tensor) else piece
                    states.setdefault(parameter, {})[name] = kept
        return states

    @torch.no_grad()
    def own_states(self, states: dict[Tensor, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return this rank's slices of the parameters' `states`, by the number of the bucket."""
        sliced = [
            bucket.slices_of([states[parameter] for parameter in bucket.parameters])
            for bucket in self.buckets
        ]
        return {place: slices for place, slices in enumerate(sliced) if slices}


class ShardedBucket(Bucket):
    """A bucket whose parameters, too, are views of a flat tensor, with this rank's slice of both.

    `part` is this rank's slice of the flat parameters, `master` that slice in float32 or wider,
    which the optimizer updates, and `gradient` the slice of the mean gradient in the same dtype.
    """

    def __init__(self, parameters: list[Tensor], owner: Zero1Optimizer) -> None:
        super().__init__(parameters, multiple=owner.num_ranks * ALIGNMENT)
        self.group = owner.process_group

        # move the parameters into one flat tensor
        self.flat_parameters = torch.zeros_like(self.flat)
        self.parameter_views = self.views_of(self.flat_parameters)
        for parameter, view in zip(parameters, self.parameter_views):
            view.copy_(parameter.detach())
            parameter.data = view
        broadcast_from_first(self.flat_parameters, self.group)

        # this rank's slice; all slices are equally long, and the last ones hold padding
        own_length = len(self.flat) // owner.num_ranks
        self.own = slice(owner.rank * own_length, (owner.rank + 1) * own_length)
        self.part = self.flat_parameters[self.own]
        self.is_low = torch.promote_types(self.part.dtype, torch.float32) != self.part.dtype
        self.master = nn.Parameter(self.part.float() if self.is_low else self.part)
        self.gradient = torch.zeros_like(self.master)

    def take_gradients(self, names: dict[Tensor, str]) -> None:
        """Make the gradients views of the bucket, as `Bucket.take_gradients` does.

        Raises RuntimeError if a parameter itself is no longer a view of the bucket.
        """
        for parameter, view in zip(self.parameters, self.parameter_views):
            if parameter.numel() and parameter.data_ptr() != view.data_ptr():
                shape = tuple(parameter.shape)
                raise RuntimeError(
                    f"a parameter of shape {shape} was moved or cast after Zero1Optimizer was built"
                )
        super().take_gradients(names)

    def reduce(self, names: dict[Tensor, str]) -> Work:
        """Start averaging the gradients into this rank's slice; return the handle to wait for.

        Parameters without a gradient count as having one of zeros.
        """
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is None:
                parameter.grad = view.zero_()
        self.take_gradients(names)
        self.master.grad, self.version = self.gradient, self.flat._version
        return reduce_scatter_mean_flat(self.gradient, self.flat, self.group, async_op=True)

    def follow_parameters(self) -> None:
        """Copy into the master what was written into the parameters since the last gather.

        `model.load_state_dict` writes so. Elements that still equal the rounded master keep its
        full precision. Without low-precision parameters the master is the slice itself.
        """
        if self.is_low:
            unchanged = self.part == self.master.to(self.part.dtype)
            self.master.copy_(torch.where(unchanged, self.master, self.part.to(self.master.dtype)))

    def gather(self) -> Work:
        """Start filling the parameters from all ranks' slices; return the handle to wait for."""
        if self.is_low:
            self.part.copy_(self.master)
        return all_gather_flat(self.flat_parameters, self.part, self.group, async_op=True)

    def slices_of(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's slice of each state; copy the master values into `master` instead.

        `states` holds one state for each parameter of the bucket. A state that has not the shape of
        its parameter, such as a step counter, is taken from the first parameter that has it.
        """
        slices: dict[str, Any] = {}
        for name in sorted({name for state in states for name in state}):
            # without a parameter's shape: one value for the bucket
            values = {
                place: state[name]
                for place, state in enumerate(states)
                if state.get(name) is not None
            }
            slices[name] = next(iter(values.values()))

            # of a parameter's shape: laid out as the bucket, then cut to this rank's slice
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
