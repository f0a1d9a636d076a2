"""The collectives of this package: means over ranks, all-gather, reduce-scatter and broadcast.

    work = all_reduce_mean(gradient, group, async_op=True)
    ...                                     # compute that does not touch the gradient
    work.wait()                             # now it is the mean over the ranks of `group`

A mean is a sum, then a division, in the tensor's dtype. NCCL divides inside its reduction; on other
transports `wait` divides. On NCCL `wait` makes the current stream wait, never the host. A group of
one rank communicates nothing, and neither do tensors without elements. `group` is a process group,
or None for the default one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllreduceOptions

from cs336_systems.distributed.guards import as_group

Group = dist.ProcessGroup | None


class Work:
    """Handle of a collective under way; without arguments, of one that is done already.

    Args:
        work: torch's handle. None: nothing to wait for.
        finish: called after the wait; turns what the transport delivers into the promised result.
        async_op: False: the constructor waits.
    """

    def __init__(
        self,
        work: dist.Work | None = None,
        finish: Callable[[], object] | None = None,
        async_op: bool = True,
    ) -> None:
        self._work = work
        self._finish = finish
        if not async_op:
            self.wait()

    def wait(self) -> None:
        """Return when the current stream may use the result; a second call does nothing."""
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            self._finish()
        self._work = self._finish = None


def wait_for(works: list[Work]) -> None:
    """Wait for all of `works`, and empty the list.

    A list that stayed full could not be copied with a model: its handles refer to the group.
    """
    while works:
        works.pop(0).wait()


def num_ranks(group: Group = None) -> int:
    """Return the number of ranks of `group`; raises as `guards.as_group` does."""
    return as_group(group).size()


def rank_in(group: Group = None) -> int:
    """Return this process's rank in `group`; raises as `guards.as_group` does."""
    return as_group(group).rank()


def all_reduce_mean(
    tensor: Shaped[Tensor, "*shape"], group: Group = None, async_op: bool = False
) -> Work:
    """Replace `tensor` on every rank by its mean over `group`; return the handle to wait for.

    Without `async_op` the function waits itself. `tensor` may have any strides, and is floating
    point or complex. Sums of float16 may overflow.
    """
    group = as_group(group)
    size = group.size()
    if size == 1 or not tensor.numel():
        return Work()

    target = tensor.detach()  # its storage, without a graph
    target = torch.view_as_real(target) if target.is_complex() else target
    sent = target.contiguous()  # the same order of elements on every rank, whatever the strides
    divides = on_nccl(sent, group)

    # The compiler knows torch's functions, not a group's methods. Else the method is called, which
    # has less overhead: hooks call this between two kernel launches, and the host must stay ahead
    # of the GPU.
    if torch.compiler.is_compiling():
        work = dist.all_reduce(sent, op=_mean_op(divides), group=group, async_op=True)
    else:
        work = group.allreduce([sent], _options(divides))
    return Work(work, partial(_finish_mean, target, sent, 1 if divides else size), async_op)


class Means:
    """The all-reduces of a step: `start` replaces tensors by their means, once `wait` has returned.

    `start` makes as few Python calls as it can: hooks call it between two kernel launches, and the
    host must stay ahead of the GPU. Where the transport does not divide, `wait` divides all sums at
    once.
    """

    def __init__(self, group: Group) -> None:
        self.given = group
        # found by the first `start` of a step: between steps a copy of the owner holds no group
        self.group: dist.ProcessGroup | None = None
        self.size, self.is_nccl = 1, False
        self.addresses: list[int] = []  # of the tensors that were started, in order
        self.works: list[Any] = []
        self.sums: list[Tensor] = []  # still to be divided

    def start(self, tensor: Tensor) -> None:
        """Start averaging `tensor`, as `all_reduce_mean` does."""
        if self.group is None:
            self.group = as_group(self.given)
            self.size = self.group.size()
            self.is_nccl = self.group._get_backend_name() == "nccl"
        self.addresses.append(tensor.data_ptr())
        if self.size == 1 or not tensor.numel():
            return
        if tensor.is_complex() or not tensor.is_contiguous() or torch.compiler.is_compiling():
            self.works.append(all_reduce_mean(tensor, self.group, async_op=True))
            return
        divides = self.is_nccl and tensor.is_cuda
        # another handle of the memory: `Module.to` may give a gradient new memory while it is sent
        sent = tensor.detach()
        self.works.append(self.group.allreduce([sent], _options(divides)))
        if not divides:
            self.sums.append(sent)

    @torch.no_grad()
    def wait(self) -> None:
        """Return when the current stream may use the means."""
        works, sums = self.works[:], self.sums[:]
        # emptied first: after an error another step begins anew, and a model with handles has no copy
        for under_way in (self.works, self.sums, self.addresses):
            under_way.clear()
        self.group = None
        for work in works:
            work.wait()
        if sums:
            torch._foreach_div_(sums, self.size)


@cache
def _options(divides: bool) -> AllreduceOptions:
    """Return the options of an asynchronous all-reduce: a mean if `divides`, else a sum."""
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(_mean_op(divides))
    options.asyncOp = True  # without it NCCL works on the current stream
    return options


@torch.no_grad()
def clip_shards(
    parts: Sequence[tuple[list[Tensor], Sequence[Group]]],
    max_norm: float,
    device: torch.device,
    eps: float = 1e-6,
) -> Tensor:
    """Clip gradients in place to the whole model's 2-norm, and return that norm in float32.

    Args:
        parts: lists of gradients, each with the groups over whose ranks they are spread; none for
            gradients that all ranks hold alike. All ranks give the same groups in the same order.
        max_norm: gradients are multiplied by min(1, max_norm / (norm + eps)).
        device: where the norm is computed and returned.

    A norm that is not finite makes every gradient on every rank NaN. Raises ValueError if
    `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")

    # the whole model's norm; in float64, since the squares of float32 values may overflow float32
    squares = torch.zeros(len(parts), dtype=torch.float64, device=device)
    everything: list[Tensor] = []
    for square, (gradients, groups) in zip(squares, parts):
        reals = [torch.view_as_real(one) if one.is_complex() else one for one in gradients]
        if reals:
            square.copy_(torch.stack(torch._foreach_norm(reals, 2, torch.float64)).square().sum())
        for group in groups:
            if num_ranks(group) > 1:
                dist.all_reduce(square, group=group)
        everything += reals
    norm = squares.sum().sqrt()

    # scale in place
    scale = (max_norm / (norm + eps)).clamp(max=1.0).where(norm.isfinite(), torch.nan)
    if everything:
        torch._foreach_mul_(everything, scale.to(torch.float32))
    return norm.to(torch.float32)


@torch.no_grad()
def broadcast_from_first(tensor: Shaped[Tensor, "*shape"], group: Group = None) -> None:
    """Replace `tensor` on every rank by that of rank 0 of `group`, bit for bit.

    `tensor` may have any strides and dtype.
    """
    if num_ranks(group) == 1 or not tensor.numel():
        return
    sent = tensor.detach().contiguous()
    # sent as bytes, which every transport takes whatever the dtype
    dist.broadcast(sent.reshape(-1).view(torch.uint8), group_src=0, group=group)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def all_gather_flat(
    output: Shaped[Tensor, " ranks*n"],
    input: Shaped[Tensor, " n"],
    group: Group = None,
    async_op: bool = False,
) -> Work:
    """Fill `output` with the `input` of each rank, in rank order; return the handle to wait for.

    `input` has the same size on every rank, and any dtype. Without `async_op` the function waits
    itself.
    """
    group, output, input = as_group(group), output.detach(), input.detach()
    if group.size() == 1:
        output.copy_(input)
    if group.size() == 1 or not input.numel():
        return Work()
    # torch 2.13 renamed this function and reduce_scatter_tensor, and warns about the names that
    # torch 2.11 needs.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Work(gather(output, input, group=group, async_op=True), None, async_op)


def reduce_scatter_mean_flat(
    output: Shaped[Tensor, " n"],
    input: Shaped[Tensor, " ranks*n"],
    group: Group = None,
    async_op: bool = False,
) -> Work:
    """Fill `output` with this rank's part of the mean of `input`; return the handle to wait for.

    The mean is taken in the dtype of `input`, then rounded to that of `output`. Without `async_op`
    the function waits itself.
    """
    group, output, input = as_group(group), output.detach(), input.detach()
    size = group.size()
    if size == 1:
        output.copy_(input)
    if size == 1 or not output.numel():
        return Work()
    part = output if output.dtype == input.dtype else torch.empty_like(output, dtype=input.dtype)
    divides = on_nccl(input, group)
    work = _reduce_scatter(part, input, _mean_op(divides), group)
    return Work(work, partial(_finish_mean, output, part, 1 if divides else size), async_op)


def reduce_scatter_flat(
    output: Shaped[Tensor, " n"], input: Shaped[Tensor, " ranks*n"], group: Group = None
) -> None:
    """Fill `output` with this rank's part of the sum of `input` over the ranks, in its dtype."""
    group = as_group(group)
    if group.size() == 1:
        output.copy_(input)
    elif input.numel():
        _reduce_scatter(output, input, dist.ReduceOp.SUM, group).wait()


def _reduce_scatter(output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup) -> Any:
    """Start torch's reduce-scatter, which torch 2.13 renamed; return its handle."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, input, op=op, group=group, async_op=True)


def _finish_mean(output: Tensor, reduced: Tensor, divisor: int) -> None:
    """Divide `reduced` by `divisor` in place, and copy it to `output` if that is another tensor."""
    if divisor > 1:
        reduced.div_(divisor)
    if reduced is not output:
        output.copy_(reduced)


def on_nccl(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether `group` sends `tensor` by NCCL, which can also divide while it reduces."""
    return tensor.is_cuda and group._get_backend_name() == "nccl"


def _mean_op(divides: bool) -> Any:
    """Return the reduction of a mean: AVG if the transport divides, else SUM."""
    return dist.ReduceOp.AVG if divides else dist.ReduceOp.SUM


# Construction: every rank starts from rank 0's model


def broadcast_parameters(module: nn.Module, group: Group = None) -> None:
    """Replace the parameters and buffers of `module` by those of rank 0 of `group`, in place."""
    for tensor in [*module.parameters(), *module.buffers()]:
        broadcast_from_first(tensor, group)
