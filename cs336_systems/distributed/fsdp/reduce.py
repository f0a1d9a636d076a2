"""The reduce phase of FSDP, from whole gradients to the mean gradients of each rank's rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ReduceScatterOptions

from cs336_systems.distributed.collectives import (
    Work,
    all_reduce_mean,
    on_nccl,
    reduce_scatter_mean_flat,
    wait_for,
)
from cs336_systems.distributed.ddp_flat import average_flat
from cs336_systems.distributed.fsdp.engine import unseen_by_checkpoints
from cs336_systems.distributed.fsdp.gather import Lane
from cs336_systems.distributed.fsdp.weight import ShardedWeight


class GradientReducer:
    """Reduce-scatters the gradients of one unit after the other, on a side stream.

    Each reduction first makes the compute stream wait for the previous one, so the whole gradients
    of at most two units are alive. `reduce_dtype` None: the dtype of the gradients. With `replicas`
    the means of this rank's rows are then averaged over the replicas of the model (HSDP).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        device: torch.device,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.group, self.replicas = group, replicas
        self.lane, self.reduce_dtype = Lane(device), reduce_dtype
        self._under_way = Work()
        self._in_use: list[Tensor] = []

    @unseen_by_checkpoints
    @torch.no_grad()
    def accumulate(self, weight: ShardedWeight) -> None:
        """Add the gradient that just arrived to `weight.accumulated`, to be reduced later."""
        total = weight.take_gradient()
        weight.accumulated = total.to(self.reduce_dtype or total.dtype)

    @torch.no_grad()
    def reduce(self, gradients: dict[ShardedWeight, Tensor]) -> None:
        """Start averaging whole gradients, and add each rank's rows to the gradients of its shards.

        `wait` makes the compute stream wait for the result.
        """
        self.wait()

        # allocate, on the compute stream
        inputs: list[Tensor] = []  # what is sent
        outputs: list[Tensor] = []  # what arrives: a chunk of each
        padded: list[Tensor] = []  # places to which gradients are copied before they are sent
        sources: list[Tensor] = []  # those gradients
        results: list[tuple[Tensor, Tensor]] = []  # (own rows in an output, gradient of the shard)
        for weight, gradient in gradients.items():
            # send the gradient itself, or a copy that is padded, cast or contiguous
            dtype = self.reduce_dtype or gradient.dtype
            is_padded = len(weight.gathered) != len(gradient)
            if is_padded or gradient.dtype != dtype or not gradient.is_contiguous():
                inputs.append(gradient.new_empty(weight.gathered.shape, dtype=dtype))
                # What lies behind the gradient's rows is reduced into padding that is never read.
                padded.append(inputs[-1][: len(gradient)] if is_padded else inputs[-1])
                sources.append(gradient)
            else:
                inputs.append(gradient)
            outputs.append(inputs[-1].new_empty(weight.chunk.shape))
            own, place = outputs[-1][: len(weight.shard)], weight.shard.grad
            # A shard without a gradient takes the output itself as its gradient if the dtype fits.
            if place is None:
                place = own if own.dtype == weight.shard.dtype else torch.empty_like(weight.shard)
            results.append((own, place))

        # copy, send and add, on the side stream
        with self.lane.after_compute():
            if padded:
                torch._foreach_copy_(padded, sources)
            reduce_rows_mean(outputs, inputs, self.group)
            if self.replicas is not None:
                wait_for([all_reduce_mean(one, self.replicas, async_op=True) for one in outputs])
            for weight, (own, place) in zip(gradients, results):
                if weight.shard.grad is not None:
                    place.add_(own)
                elif place is not own:
                    place.copy_(own)
            self._under_way = self.lane.mark()

        # Buffers stay alive until the compute stream has waited.
        for weight, (_, place) in zip(gradients, results):
            weight.shard.grad = place
        self._in_use = [*inputs, *outputs, *sources]

    def wait(self) -> None:
        """Make the compute stream wait for the reduction under way, then free its buffers."""
        self._under_way.wait()
        self._in_use = []


@torch.no_grad()
def average_replicated(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of parameters that ranks keep whole, in one message.

    A rank without a gradient counts as having one of zeros. A gradient that no rank has stays None.
    """
    trained = [
        parameter for parameter in parameters if parameter.requires_grad and parameter.numel()
    ]
    if not trained:
        return
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
    # shares: 1 for a parameter that has a gradient here; after the mean, > 0 if any rank has one
    shares = torch.tensor(
        [float(one.grad is not None) for one in trained], device=trained[0].device
    )
    average_flat([*gradients, shares], group)
    for parameter, gradient, share in zip(trained, gradients, shares):
        if parameter.grad is None and share > 0:  # unused on this rank only
            parameter.grad = gradient


def reduce_rows_mean(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> None:
    """Reduce-scatter each input as a mean over the N ranks into its output, 1/N of the rows.

    The mean is taken in the input's dtype, on the current stream; on NCCL in one grouped call.
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
