"""ZeRO stage 1: gradients are reduce-scattered, each rank updates its slice in float32, parameters are all-gathered.

    optimizer = Zero1Optimizer(model.parameters(), AdamW, lr=1e-3)      # of a plain model: no DDP wrapper
    loss.backward()                                                     # its hooks reduce bucket after bucket
    optimizer.step()
    optimizer.zero_grad()

Parameters live in flat buckets, and each rank owns the same part of every bucket, so that the split is exact to the
element. Phases: reduce (the last bucket first, while backward goes on), update (the wrapped optimizer sees this rank's
slices, in float32 or, where the parameters are, in float64), gather (the slices of all ranks go back into the flat
parameters, in place). The bytes sent are those of one all-reduce, where `ShardedOptimizer` behind a DDP wrapper sends
half as much again (Rajbhandari et al., arXiv:1910.02054, section 7.2.1).

A slice knows no shapes, so the wrapped optimizer must work element by element, as SGD, Adam and AdamW do. Parameters
below float32 get a master slice of their own. A parameter that a step does not use counts as having a gradient of
zeros, so that momentum and weight decay go on moving it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.collectives import (
    Work,
    all_gather_flat,
    check_same_shapes,
    num_ranks,
    rank_in,
    reduce_scatter_mean_flat,
)
from cs336_systems.distributed.ddp import dense_gradient
from cs336_systems.distributed.sharded_optimizer import hyperparameters, unique_groups

BYTES_PER_MB = 10**6
ALIGNMENT = 64  # elements, of a rank's slice


class Zero1Optimizer(torch.optim.Optimizer):
    """`optimizer_cls`, an elementwise optimizer, over this rank's slices of `params`.

    Args:
        params: what torch.optim takes. Rank 0's values are sent to all. Those that need no gradient are in no bucket.
        bucket_size_mb: of the parameters of a bucket, 10⁶ bytes; a larger parameter has one of its own.
        process_group: None: all ranks.
        kwargs: for `optimizer_cls`.

    The parameters' memory is replaced by views of the buckets: build it after the model is on its device. Raises
    ValueError for a bad bucket size, parameters that differ between ranks or a closure, RuntimeError where there is no
    process group, on a second backward before `step` that is not under `no_sync`, where gradients are to be finished
    under `no_sync`, and where groups are added later.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        bucket_size_mb: float = 100.0,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be positive, got {bucket_size_mb!r}")
        self.group = process_group
        self.rank, self.num_ranks = rank_in(process_group), num_ranks(process_group)
        self._built = False
        super().__init__(unique_groups(params), kwargs)
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        check_same_shapes(((str(place), parameter) for place, parameter in enumerate(everything)), process_group)
        self._send_frozen(everything)
        self.buckets: list[Bucket] = []
        local_groups = []
        for group in self.param_groups:
            buckets = self._fill_buckets(group["params"], bucket_size_mb * BYTES_PER_MB)
            self.buckets += buckets
            local_groups.append({**hyperparameters(group), "params": [bucket.master for bucket in buckets]})
        self.local = optimizer_cls(local_groups, **kwargs)
        self.defaults = self.local.defaults
        self.state = self.local.state
        for group, own in zip(self.param_groups, self.local.param_groups):
            group.update(hyperparameters(own))
        self._synchronize = True
        # Backward finishes the last parameters first; every rank reduces in this order, whatever arrives when.
        self._reduce_order = list(reversed(self.buckets))
        self._next = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(bucket_hook(self, bucket, place))
            for bucket in self.buckets
            for place, parameter in enumerate(bucket.parameters)
        ]
        self._built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by the constructor for each group; later ones are refused, the buckets being laid out."""
        if getattr(self, "_built", False):
            raise RuntimeError("Zero1Optimizer cannot add a group: its buckets are laid out; build it anew")
        super().add_param_group(param_group)

    # Reduce

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up local gradients, for the next backward outside to reduce."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def gradient_arrived(self, bucket: Bucket, place: int) -> None:
        """Take the gradient into its bucket, and reduce the buckets that are full and whose turn it is."""
        if bucket.launched:
            raise RuntimeError("a second backward before step(): run all but the last one under no_sync()")
        bucket.take_gradient(place)
        if not self._synchronize:
            return
        bucket.arrived.add(place)
        while self._next < len(self._reduce_order) and self._reduce_order[self._next].is_full:
            self._reduce_order[self._next].reduce(self.group)
            self._next += 1

    def finish_gradient_synchronization(self) -> None:
        """Reduce the buckets that unused parameters kept waiting, and wait for all; RuntimeError within `no_sync`."""
        if not self._synchronize:
            raise RuntimeError("finish_gradient_synchronization() must be called outside of no_sync()")
        for bucket in self._reduce_order[self._next :]:
            bucket.reduce(self.group)
        self._next = len(self._reduce_order)
        for bucket in self.buckets:
            bucket.work.wait()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, eps: float = 1e-6) -> Tensor:
        """Scale the averaged gradients by min(1, max_norm / (norm + eps)); returns the whole model's `norm`."""
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        self.finish_gradient_synchronization()
        slices = [bucket.gradient for bucket in self.buckets]
        if not slices:  # every parameter is frozen
            return torch.zeros(())
        total = torch.stack(torch._foreach_norm(slices, 2, torch.float64)).square().sum()
        if self.num_ranks > 1:
            dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        scale = (max_norm / (norm + eps)).clamp(max=1.0).where(norm.isfinite(), torch.nan)
        torch._foreach_mul_(slices, scale.to(torch.float32))
        return norm.to(torch.float32)

    # Update and gather

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the own slices and gather all of them; a closure is refused, since it would run backward in here."""
        if closure is not None:
            raise ValueError("Zero1Optimizer.step takes no closure: run backward before it")
        self.finish_gradient_synchronization()
        for group, own in zip(self.param_groups, self.local.param_groups):
            own.update(hyperparameters(group))
        # update
        self.local.step()
        # gather
        for work in [bucket.gather(self.group) for bucket in self.buckets]:
            work.wait()
        self._begin()

    def skip_step(self) -> None:
        """Instead of `step`, where the gradients are of no use; every rank must call it."""
        self.finish_gradient_synchronization()
        self._begin()

    def _begin(self) -> None:
        """Be ready for the next backward."""
        for bucket in self.buckets:
            bucket.launched = False
            bucket.arrived.clear()
        self._next = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. The next ones are copied into the buckets, so that None costs less than zeros."""
        super().zero_grad(set_to_none)

    # State

    def state_dict(self) -> dict[str, Any]:
        """This rank's slices: the wrapped optimizer's state and the master slices."""
        return {
            "local": self.local.state_dict(),
            "masters": [bucket.master.detach() for bucket in self.buckets],
            "shard": {"rank": self.rank, "num_ranks": self.num_ranks},
        }

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """The state of all parameters, on every rank, on CPU, as `optimizer_cls` itself would give it; collective."""
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        places = {parameter: place for place, parameter in enumerate(everything)}
        full: dict[int, dict[str, Any]] = {}
        for bucket in self.buckets:
            for name, value in self.state.get(bucket.master, {}).items():
                if not isinstance(value, Tensor) or value.shape != bucket.master.shape:
                    pieces = [value] * len(bucket.parameters)
                else:
                    whole = value.new_empty(self.num_ranks * value.numel())
                    all_gather_flat(whole, value, self.group)
                    pieces = [piece.cpu() for piece in bucket.views_of(whole)]
                for parameter, piece in zip(bucket.parameters, pieces):
                    kept = piece.clone() if isinstance(piece, Tensor) else piece
                    full.setdefault(places[parameter], {})[name] = kept
        groups = [
            {**hyperparameters(group), "params": [places[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": dict(sorted(full.items())), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of the same rank of as many, or a full one of any number of ranks.

        After a full one the master slices are those of the parameters, as they are now. ValueError where it is another
        rank's, or its groups are of other sizes.
        """
        shard = {"rank": self.rank, "num_ranks": self.num_ranks}
        if "local" in state_dict:
            if state_dict["shard"] != shard:
                saved = state_dict["shard"]
                raise ValueError(
                    f"state_dict must be full or the slices of rank {self.rank} of {self.num_ranks}, "
                    f"got those of rank {saved['rank']} of {saved['num_ranks']}"
                )
            self.local.load_state_dict(state_dict["local"])
            for bucket, master in zip(self.buckets, state_dict["masters"]):
                bucket.master.copy_(master)
        else:
            self._load_full(state_dict)
        self.state = self.local.state
        for group, own in zip(self.param_groups, self.local.param_groups):
            group.update(hyperparameters(own))

    def _load_full(self, state_dict: dict[str, Any]) -> None:
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        expected = [len(group["params"]) for group in self.param_groups]
        if sizes != expected:
            raise ValueError(f"state_dict must have groups of {expected} parameters, got {sizes}")
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        places = {parameter: place for place, parameter in enumerate(everything)}
        state = {}
        for index, bucket in enumerate(self.buckets):
            bucket.refresh_master()
            saved = [state_dict["state"].get(places[parameter], {}) for parameter in bucket.parameters]
            names = {name for entry in saved for name in entry}
            state[index] = {name: bucket.slice_of(name, [entry.get(name) for entry in saved]) for name in sorted(names)}
        groups, first = [], 0
        for own, loaded in zip(self.local.param_groups, state_dict["param_groups"]):
            count = len(own["params"])
            groups.append({**hyperparameters(loaded), "params": list(range(first, first + count))})
            first += count
        self.local.load_state_dict({"state": {k: v for k, v in state.items() if v}, "param_groups": groups})

    @torch.no_grad()
    def _send_frozen(self, parameters: list[Tensor]) -> None:
        """Give parameters that no bucket will hold rank 0's values."""
        for parameter in parameters:
            if not parameter.requires_grad and parameter.numel() and self.num_ranks > 1:
                values = parameter.detach().contiguous()
                dist.broadcast(values, group_src=0, group=self.group)
                parameter.copy_(values)

    def _fill_buckets(self, parameters: list[Tensor], max_bytes: float) -> list[Bucket]:
        """Trainable `parameters` in order, cut where the size is reached or the dtype or device changes."""
        buckets: list[Bucket] = []
        current: list[Tensor] = []
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            alike = not current or (current[0].dtype, current[0].device) == (parameter.dtype, parameter.device)
            if current and (not alike or sum(p.nbytes for p in current) + parameter.nbytes > max_bytes):
                buckets.append(Bucket(current, self.rank, self.num_ranks, self.group))
                current = []
            current.append(parameter)
        if current:
            buckets.append(Bucket(current, self.rank, self.num_ranks, self.group))
        return buckets


class Bucket:
    """Flat parameters and gradients of some parameters, and this rank's slice of both, in float32 at least."""

    def __init__(self, parameters: list[Tensor], rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.parameters = parameters
        self.offsets = []
        length = 0
        for parameter in parameters:
            self.offsets.append(length)
            length += parameter.numel()
        unit = size * ALIGNMENT
        length = max(unit, -(-length // unit) * unit)
        self.own = slice(rank * length // size, (rank + 1) * length // size)
        self.flat = torch.zeros(length, dtype=parameters[0].dtype, device=parameters[0].device)
        self.flat_gradient = torch.zeros_like(self.flat)
        with torch.no_grad():
            for parameter, view in zip(parameters, self.views_of(self.flat)):
                view.copy_(parameter)
            if size > 1:
                dist.broadcast(self.flat, group_src=0, group=group)
            for parameter, view in zip(parameters, self.views_of(self.flat)):
                parameter.data = view
            self.gradient_views = self.views_of(self.flat_gradient)
            slice_ = self.flat[self.own]
            self.master = nn.Parameter(slice_.to(torch.promote_types(slice_.dtype, torch.float32)))
            self.gradient = torch.zeros_like(self.master)  # of the slice, averaged over ranks
        self.arrived: set[int] = set()
        self.launched = False
        self.work = Work()

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The pieces of `flat` that belong to the parameters, in their shapes."""
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.offsets, self.parameters)
        ]

    @property
    def is_full(self) -> bool:
        return len(self.arrived) == len(self.parameters)

    def take_gradient(self, place: int) -> None:
        """Let the gradient of a parameter be the view of the bucket; one that was made elsewhere is copied into it."""
        parameter, view = self.parameters[place], self.gradient_views[place]
        gradient = dense_gradient(parameter)
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view

    @torch.no_grad()
    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Start averaging; what no backward touched counts as zero."""
        for parameter, view in zip(self.parameters, self.gradient_views):
            if parameter.grad is None:
                view.zero_()
        self.launched = True
        self.work = reduce_scatter_mean_flat(self.gradient, self.flat_gradient, group, True)
        self.master.grad = self.gradient

    @torch.no_grad()
    def gather(self, group: dist.ProcessGroup | None) -> Work:
        """Start filling the parameters from all ranks' slices."""
        part = self.flat[self.own]
        if part.data_ptr() != self.master.data_ptr():
            part.copy_(self.master)
        return all_gather_flat(self.flat, part, group, True)

    def refresh_master(self) -> None:
        """The master slice anew from the parameters."""
        self.master.copy_(self.flat[self.own])

    def slice_of(self, name: str, values: list[Any]) -> Any:
        """This rank's slice of a state of all parameters: tensors in their shapes, or one scalar for all.

        Of parameters that are 0-d themselves only "step", torch's name of the counter, is taken for a scalar.
        """
        first = next(value for value in values if value is not None)
        if not isinstance(first, Tensor):
            return first
        kept = [(value, parameter) for value, parameter in zip(values, self.parameters) if value is not None]
        if not any(value.ndim for value, _ in kept) and (name == "step" or any(owner.ndim for _, owner in kept)):
            return first
        whole = torch.zeros(self.flat.shape, dtype=self.master.dtype, device=self.flat.device)
        for view, value in zip(self.views_of(whole), values):
            if value is not None:
                view.copy_(value)
        return whole[self.own].clone()


def bucket_hook(optimizer: Zero1Optimizer, bucket: Bucket, place: int) -> Callable[[Tensor], None]:
    """A hook that tells `optimizer` that a gradient has arrived; autograd hands it the parameter.

    It holds optimizer and bucket weakly: the bucket holds the parameter, and the garbage collector sees no cycle
    through a tensor's hooks.
    """
    arrived, where = weakref.WeakMethod(optimizer.gradient_arrived), weakref.ref(bucket)

    def hook(parameter: Tensor) -> None:
        alive, held = arrived(), where()
        if alive is not None and held is not None:
            alive(held, place)

    return hook
