"""A unit: weights that are gathered, used, freed and reduced together.

The wholes of a unit's weights lie in one piece of memory, which is allocated for a gather and given back after use. The
tensors stay the same objects throughout, so what autograd saved in the forward finds its values again in the backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.collectives import Work
from cs336_systems.distributed.fsdp.communication import Lane, gather_rows, reduce_rows_mean, wait_for
from cs336_systems.distributed.fsdp.weights import ShardedWeight, chunk_rows, own_rows

ALIGNMENT_BYTES = 256  # of each weight in the unit's memory: what matmuls and NCCL like


class Unit:
    """The weights in `weights`, gathered when one of the modules in `entries` runs.

    `gathered` holds, in the order of gathering, those of a model's units whose wholes have memory; they all share it.
    """

    def __init__(
        self,
        name: str,
        entries: list[nn.Module],
        group: dist.ProcessGroup,
        device: torch.device,
        gather_lane: Lane,
        gathered: dict[Unit, None],
    ) -> None:
        self.name = name
        self.entries = entries
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.device = device
        self.gather_lane = gather_lane
        self.gathered = gathered
        self.weights: list[ShardedWeight] = []
        self.trainable: list[ShardedWeight] = []  # of these, when they were wrapped: hooks wait for their gradients
        self.position = 0  # in the forward that runs
        self.backward_position = 0
        self.running = 0  # forwards of entries under way, one in another
        self.in_backward = False  # between the first gradient of its output and the last of its inputs
        self.frees_on_inputs = False  # whether a gradient of its inputs will say that the backward is done
        self.arrived: list[ShardedWeight] = []  # whose gradients are complete and not yet reduced
        self._memory: Any = None  # storage under all wholes
        self._bytes = 0
        self._event: torch.cuda.Event | None = None  # end of the gather on its stream
        self._works: list[Work] = []  # the same on CPU

    # Construction

    def lay_out(
        self, parameters: list[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]], compute_dtype: torch.dtype | None
    ) -> None:
        """Make the place for the wholes of each (name, parameter, homes), and give its memory back at once.

        Of the parameters, which may be on the meta device, only shapes and dtypes are read.
        """
        offsets, self._bytes = [], 0
        for _, parameter, _ in parameters:
            dtype = compute_dtype or parameter.dtype
            offsets.append(self._bytes)
            rows = self.num_ranks * chunk_rows(parameter.shape[0], self.num_ranks)
            num_bytes = rows * math.prod(parameter.shape[1:]) * dtype.itemsize
            self._bytes += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        memory = torch.empty(self._bytes, dtype=torch.uint8, device=self.device)
        self._memory = memory.untyped_storage()
        for offset, (name, parameter, homes) in zip(offsets, parameters):
            chunk = chunk_rows(parameter.shape[0], self.num_ranks)
            shape = (self.num_ranks * chunk, *parameter.shape[1:])
            dtype = compute_dtype or parameter.dtype
            place = memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            # `.data` gives each alias a version counter of its own: gathering again, into the same memory, must not
            # look to autograd like a change of what it saved.
            gathered = place.data
            own = own_rows(parameter.shape[0], self.rank, self.num_ranks)
            weight = ShardedWeight(
                name=name,
                shape=parameter.shape,
                homes=homes,
                chunk_rows=chunk,
                whole=nn.Parameter(place[: parameter.shape[0]].data, requires_grad=parameter.requires_grad),
                gathered=gathered,
                chunk=gathered[self.rank * chunk : (self.rank + 1) * chunk],
                own_place=gathered[own],
            )
            self.weights.append(weight)
            if parameter.requires_grad:
                self.trainable.append(weight)
        self._memory.resize_(0)

    @property
    def is_gathered(self) -> bool:
        """Whether the wholes have memory: the gather is done or under way."""
        return self in self.gathered

    @property
    def is_in_use(self) -> bool:
        """Whether a forward of it runs, or its backward."""
        return self.running > 0 or self.in_backward

    # The life of the wholes

    @torch.no_grad()
    def gather(self) -> None:
        """Start gathering, behind what is queued now; nothing if it was started before."""
        if self.is_gathered:
            return
        self._memory.resize_(self._bytes)
        self.gathered[self] = None
        inputs: list[Tensor] = []
        copied: list[Tensor] = []
        places: list[Tensor] = []
        for weight in self.weights:
            if weight.gathered.dtype != weight.shard.dtype or weight.chunk_rows != weight.shard.shape[0]:
                # One chunk in the compute dtype, made where the gather would put it: no memory of its own. What lies
                # behind the own rows is padding that nobody reads.
                copied.append(weight.shard)
                places.append(weight.own_place)
                inputs.append(weight.chunk)
            else:
                inputs.append(weight.shard.detach())
        with self.gather_lane.after_compute():
            if copied:
                torch._foreach_copy_(places, copied)
            self._works = gather_rows([weight.gathered for weight in self.weights], inputs, self.group)
            self._event = self.gather_lane.mark()

    def wait(self) -> None:
        """Let what follows on the compute stream see the wholes."""
        self.gather()
        for work in self._works:
            work.wait()
        wait_for(self._event)
        self._works, self._event = [], None

    def show_wholes(self) -> None:
        for weight in self.weights:
            weight.show_whole()

    def show_shards(self) -> None:
        for weight in self.weights:
            weight.show_shard()

    def free(self) -> None:
        """Give the memory of the wholes back, once what is queued on the compute stream has used them."""
        if not self.is_gathered:
            return
        self.wait()  # a gather that nobody used may still be writing
        self.show_shards()
        self._memory.resize_(0)
        del self.gathered[self]

    def gather_full(self) -> dict[str, Tensor]:
        """New tensors with the master weights, whole; collective."""
        full: dict[str, Tensor] = {}
        for weight in self.weights:
            shard = weight.shard.detach()
            chunk = shard.new_zeros((weight.chunk_rows, *shard.shape[1:]))
            chunk[: shard.shape[0]].copy_(shard)
            rows = shard.new_empty((self.num_ranks * weight.chunk_rows, *shard.shape[1:]))
            for work in gather_rows([rows], [chunk], self.group):
                work.wait()
            full[weight.name] = rows[: weight.shape[0]]
        return full


class GradientReducer:
    """Reduce-scatters the gradients of one unit after the other, on a side stream, at most one in flight.

    A second one first lets the compute stream wait for the one before: so at most two units' whole gradients are alive.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, reduce_dtype: torch.dtype | None) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.lane = Lane(device)
        self.reduce_dtype = reduce_dtype
        self._event: torch.cuda.Event | None = None
        self._in_use: list[Tensor] = []

    @torch.no_grad()
    def accumulate(self, weight: ShardedWeight) -> None:
        """Put the gradient that just arrived aside, to be reduced with a later one."""
        gradient = weight.whole.grad
        assert gradient is not None
        weight.whole.grad = None
        if weight.accumulated is None:
            weight.accumulated = gradient.to(self.reduce_dtype or gradient.dtype)
        else:
            weight.accumulated += gradient

    @torch.no_grad()
    def reduce(self, weights: list[ShardedWeight]) -> None:
        """Start reducing the gradients of `weights` into those of their shards, where they are added."""
        self.wait()
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for weight in weights:
            gradient = self._take_gradient(weight)
            dtype = self.reduce_dtype or gradient.dtype
            if weight.padded or gradient.dtype != dtype or not gradient.is_contiguous():
                padded = gradient.new_empty(weight.gathered.shape, dtype=dtype)
                # What is behind the gradient's rows is reduced into padding that nobody reads.
                copies.append((padded[: weight.shape[0]] if weight.padded else padded, gradient))
                self._in_use.append(gradient)
                gradient = padded
            inputs.append(gradient)
            outputs.append(gradient.new_empty((weight.chunk_rows, *weight.shape[1:])))
        owns = [
            output if weight.shard.shape[0] == weight.chunk_rows else output[: weight.shard.shape[0]]
            for weight, output in zip(weights, outputs)
        ]
        # The shard's gradient lies in the output itself where there is none yet and the dtype is right.
        targets = [_gradient_place(weight.shard, own) for weight, own in zip(weights, owns)]
        with self.lane.after_compute():
            if copies:
                torch._foreach_copy_([to for to, _ in copies], [source for _, source in copies])
            reduce_rows_mean(outputs, inputs, self.group)
            for weight, own, target in zip(weights, owns, targets):
                if weight.shard.grad is not None:
                    target.add_(own)
                elif target is not own:
                    target.copy_(own)
            self._event = self.lane.mark()
        for weight, target in zip(weights, targets):
            weight.shard.grad = target
        self._in_use += [*inputs, *outputs]

    def wait(self) -> None:
        """Let the compute stream wait for the reduction under way, and give its buffers back."""
        wait_for(self._event)
        self._event, self._in_use = None, []

    def _take_gradient(self, weight: ShardedWeight) -> Tensor:
        """The whole gradient, with what was put aside before, taken off the weight."""
        gradient, aside = weight.whole.grad, weight.accumulated
        weight.whole.grad, weight.accumulated = None, None
        if gradient is None:
            assert aside is not None
            return aside
        return gradient if aside is None else aside.add_(gradient)


def _gradient_place(shard: nn.Parameter, own: Tensor) -> Tensor:
    if shard.grad is not None:
        return shard.grad
    return own if own.dtype == shard.dtype else torch.empty_like(shard)
