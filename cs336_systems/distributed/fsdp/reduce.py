"""Reduce: whole gradients become the mean gradients of each rank's rows; and the streams and
messages of FSDP.

Memory and streams: every buffer is allocated while the compute stream is current. A side stream
starts by waiting for the compute stream, and the compute stream waits for the side stream before it
uses, or gives up, what that touched. So the caching allocator sees one stream only, and memory
neither grows nor is handed out too early.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from cs336_systems.distributed.collectives import (
    Work,
    all_gather_flat,
    on_nccl,
    reduce_scatter_mean_flat,
)
from cs336_systems.distributed.ddp_flat import average_flat
from cs336_systems.distributed.fsdp.engine import unseen_by_checkpoints
from cs336_systems.distributed.fsdp.plan import ShardedWeight


class GradientReducer:
    """Reduce-scatters the gradients of one unit after the other, on a side stream.

    A second one first lets the compute stream wait for the one before: so at most two units' whole
    gradients are alive.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, reduce_dtype: torch.dtype | None
    ) -> None:
        self.group, self.lane, self.reduce_dtype = group, Lane(device), reduce_dtype
        self._under_way = Work()
        self._in_use: list[Tensor] = []

    @unseen_by_checkpoints
    @torch.no_grad()
    def accumulate(self, weight: ShardedWeight) -> None:
        """Put the gradient that just arrived aside, to be reduced with a later one."""
        total = weight.take_gradient()
        weight.accumulated = total.to(self.reduce_dtype or total.dtype)

    @torch.no_grad()
    def reduce(self, gradients: dict[ShardedWeight, Tensor]) -> None:
        """Start reducing whole gradients into those of the weights' shards, where they are added."""
        self.wait()
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        padded: list[Tensor] = []  # what is copied: where to, and from where
        sources: list[Tensor] = []
        results: list[tuple[Tensor, Tensor]] = []  # where one comes out, and where it goes
        for weight, gradient in gradients.items():
            dtype = self.reduce_dtype or gradient.dtype
            is_padded = len(weight.gathered) != len(gradient)
            if is_padded or gradient.dtype != dtype or not gradient.is_contiguous():
                inputs.append(gradient.new_empty(weight.gathered.shape, dtype=dtype))
                # What is behind the gradient's rows is reduced into padding that nobody reads.
                padded.append(inputs[-1][: len(gradient)] if is_padded else inputs[-1])
                sources.append(gradient)
            else:
                inputs.append(gradient)
            outputs.append(inputs[-1].new_empty(weight.chunk.shape))
            own, place = outputs[-1][: len(weight.shard)], weight.shard.grad
            # The shard's gradient lies in the output itself where there is none yet and the dtype
            # is right.
            if place is None:
                place = own if own.dtype == weight.shard.dtype else torch.empty_like(weight.shard)
            results.append((own, place))
        with self.lane.after_compute():
            if padded:
                torch._foreach_copy_(padded, sources)
            reduce_rows_mean(outputs, inputs, self.group)
            for weight, (own, place) in zip(gradients, results):
                if weight.shard.grad is not None:
                    place.add_(own)
                elif place is not own:
                    place.copy_(own)
            self._under_way = self.lane.mark()
        for weight, (_, place) in zip(gradients, results):
            weight.shard.grad = place
        self._in_use = [*inputs, *outputs, *sources]

    def wait(self) -> None:
        """Let the compute stream wait for the reduction under way, and give its buffers back."""
        self._under_way.wait()
        self._in_use = []


@torch.no_grad()
def average_replicated(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of parameters that ranks keep whole; one that no rank has stays None."""
    trained = [
        parameter for parameter in parameters if parameter.requires_grad and parameter.numel()
    ]
    if not trained:
        return
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
    shares = torch.tensor(
        [float(one.grad is not None) for one in trained], device=trained[0].device
    )
    average_flat([*gradients, shares], group)
    for parameter, gradient, share in zip(trained, gradients, shares):
        if parameter.grad is None and share > 0:  # unused on this rank only
            parameter.grad = gradient


# Streams and collectives


class Lane:
    """A side stream of a CUDA device, of high priority; on CPU nothing but the same words."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Queue what follows on the side stream, behind all that is queued on the compute stream
        now.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Work:
        """What is queued on the side stream now, for the compute stream to wait for; the host goes
        on.
        """
        if self.stream is None:
            return Work()
        event = self.stream.record_event()
        return Work(finish=lambda: torch.cuda.current_stream().wait_event(event))


def gather_rows(
    outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup
) -> list[Work]:
    """All-gather each of `inputs` into its output, N times as many rows; handles to wait for, none
    on NCCL.

    On NCCL the list travels as one grouped call on the current stream. The group is asked directly:
    torch's functions for it check and log each tensor of a list, on a host that has to stay ahead
    of the GPU.
    """
    if not on_nccl(inputs[0], group) or group.size() == 1:
        pairs = zip(outputs, inputs)
        return [
            all_gather_flat(output.view(-1), input_.view(-1), group, True)
            for output, input_ in pairs
        ]
    options = AllgatherOptions()
    options.asyncOp = False  # on the current stream, mostly a side stream already
    if (work := group.allgather_into_tensor_coalesced(outputs, inputs, options)) is not None:
        work.wait()  # on the transport's own stream after all
    return []


def reduce_rows_mean(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> None:
    """Reduce-scatter each of `inputs`, as a mean, in its dtype: 1/N of its rows to each rank; on
    the current stream.
    """
    if not on_nccl(inputs[0], group) or group.size() == 1:
        for output, input_ in zip(outputs, inputs):
            reduce_scatter_mean_flat(output.view(-1), input_.view(-1), group)
        return
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    options.asyncOp = False
    if (work := group.reduce_scatter_tensor_coalesced(outputs, inputs, options)) is not None:
        work.wait()
