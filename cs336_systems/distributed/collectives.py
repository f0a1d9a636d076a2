"""The few collectives that everything here uses: averages over ranks, and the two halves of a
sharded one.

    work = all_reduce_mean(gradient, group, async_op=True)
    ...                                     # compute that does not touch the gradient
    work.wait()                             # now it is the mean over the ranks of `group`

An average is a sum, then a division, in the tensor's dtype: NCCL divides inside its reduction,
elsewhere `wait` divides. `wait` on NCCL makes the current stream wait, never the host. A group of
one rank communicates nothing, and neither do tensors without elements. `group` is a process group,
or None for the default one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllreduceOptions

Group = dist.ProcessGroup | None


class Work:
    """A collective under way. `wait` returns when its result may be used on the current stream;
    again is no harm.
    """

    def __init__(
        self,
        work: dist.Work | None = None,
        finish: Callable[[], object] | None = None,
        async_op: bool = True,
    ) -> None:
        self._work = work  # None: done already
        self._finish = finish  # what turns the transport's result into the promised one
        if not async_op:
            self.wait()

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            self._finish()
        self._work = self._finish = None


def wait_for(works: list[Work]) -> None:
    """Wait for all of `works` and empty the list: what they hold of the group cannot be copied with
    a model.
    """
    while works:
        works.pop(0).wait()


def as_group(group: Group) -> dist.ProcessGroup:
    """`group`, or the default one.

    RuntimeError where there is none, ValueError on a rank that `group` is without, TypeError for
    what is no group.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise RuntimeError(
            "there is no process group: start the ranks with run_ranks, or by launch under torchrun"
        )
    if not isinstance(found, dist.ProcessGroup):
        if found != dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(f"group must be a process group or None, got {found!r}")
        raise ValueError(
            f"this process must be a member of the process group, and rank {dist.get_rank()} is none"
        )
    return found


def num_ranks(group: Group = None) -> int:
    """Ranks of `group`; raises as `as_group` does."""
    return as_group(group).size()


def rank_in(group: Group = None) -> int:
    """This process's place in `group`; raises as `as_group` does."""
    return as_group(group).rank()


def all_reduce_mean(
    tensor: Shaped[Tensor, "*shape"], group: Group = None, async_op: bool = False
) -> Work:
    """Replace `tensor` on every rank by its mean over `group`; without `async_op` that is done on
    return.

    Any strides; floating point or complex. Sums of float16 may overflow.
    """
    group = as_group(group)
    size = group.size()
    if size == 1 or not tensor.numel():
        return Work()
    target = tensor.detach()  # its storage, without a graph
    target = torch.view_as_real(target) if target.is_complex() else target
    sent = target.contiguous()  # the same order of elements on every rank, whatever the strides
    divides = on_nccl(sent, group)
    if torch.compiler.is_compiling():  # compilers know torch's functions, not a group's methods
        work = dist.all_reduce(sent, op=_mean_op(divides), group=group, async_op=True)
    else:  # past their bookkeeping: hooks call this between two launches, on a host that has to stay ahead of the GPU
        work = group.allreduce([sent], _options(divides))
    return Work(work, partial(_finish_mean, target, sent, 1 if divides else size), async_op)


@cache
def _options(divides: bool) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(_mean_op(divides))
    options.asyncOp = True  # without it NCCL works on the current stream
    return options


@torch.no_grad()
def clip_shards(
    sharded: list[Tensor],
    whole: list[Tensor],
    max_norm: float,
    group: Group,
    device: torch.device,
    eps: float = 1e-6,
) -> Tensor:
    """Scale gradients by min(1, max_norm / (norm + eps)); returns `norm`, the whole model's, in
    float32 on each rank.

    `sharded` are this rank's parts, `whole` what all ranks hold alike. A norm that is not finite
    makes every gradient on every rank NaN. ValueError if max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    sharded, whole = (
        [
            torch.view_as_real(gradient) if gradient.is_complex() else gradient
            for gradient in gradients
        ]
        for gradients in (sharded, whole)
    )
    squares = torch.zeros(2, dtype=torch.float64, device=device)  # those of float32 may overflow it
    for square, gradients in zip(squares, (sharded, whole)):
        if gradients:
            square.copy_(
                torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square().sum()
            )
    if num_ranks(group) > 1:
        dist.all_reduce(squares[0], group=group)
    norm = squares.sum().sqrt()
    scale = (max_norm / (norm + eps)).clamp(max=1.0).where(norm.isfinite(), torch.nan)
    if gradients := sharded + whole:
        torch._foreach_mul_(gradients, scale.to(torch.float32))
    return norm.to(torch.float32)


@torch.no_grad()
def broadcast_from_first(tensor: Shaped[Tensor, "*shape"], group: Group = None) -> None:
    """Replace `tensor`, of any strides, on every rank by that of rank 0 of `group`, bit for bit."""
    if num_ranks(group) == 1 or not tensor.numel():
        return
    sent = tensor.detach().contiguous()
    # As bytes: every transport takes them, and no dtype is left out.
    dist.broadcast(sent.reshape(-1).view(torch.uint8), group_src=0, group=group)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def all_gather_flat(
    output: Shaped[Tensor, " ranks*n"],
    input: Shaped[Tensor, " n"],
    group: Group = None,
    async_op: bool = False,
) -> Work:
    """Fill `output` with the ranks' `input`s, one after the other; equal sizes everywhere, any
    dtype.
    """
    group, output, input = as_group(group), output.detach(), input.detach()
    if group.size() == 1:
        output.copy_(input)
    if group.size() == 1 or not input.numel():
        return Work()
    # torch 2.13 renamed this function and reduce_scatter_tensor, and warns of the names that torch
    # 2.11 needs.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Work(gather(output, input, group=group, async_op=True), None, async_op)


def reduce_scatter_mean_flat(
    output: Shaped[Tensor, " n"],
    input: Shaped[Tensor, " ranks*n"],
    group: Group = None,
    async_op: bool = False,
) -> Work:
    """Fill `output` with this rank's part of the mean of `input`, made in the input's dtype and
    then rounded.
    """
    group, output, input = as_group(group), output.detach(), input.detach()
    size = group.size()
    if size == 1:
        output.copy_(input)
    if size == 1 or not output.numel():
        return Work()
    part = output if output.dtype == input.dtype else torch.empty_like(output, dtype=input.dtype)
    divides = on_nccl(input, group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = scatter(part, input, op=_mean_op(divides), group=group, async_op=True)
    return Work(work, partial(_finish_mean, output, part, 1 if divides else size), async_op)


def _finish_mean(output: Tensor, reduced: Tensor, divisor: int) -> None:
    if divisor > 1:
        reduced.div_(divisor)
    if reduced is not output:
        output.copy_(reduced)


def on_nccl(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether NCCL sends `tensor`; it also divides in the kernel that reduces to a mean, where
    after others we do.
    """
    return tensor.is_cuda and group._get_backend_name() == "nccl"


def _mean_op(divides: bool) -> Any:
    return dist.ReduceOp.AVG if divides else dist.ReduceOp.SUM


# Construction: every rank starts from rank 0's model


def check_same_shapes(
    named_tensors: Iterable[tuple[str, Tensor]], group: Group = None, *, what: str = "parameters"
) -> None:
    """ValueError, on every rank, naming the first tensor that has not one shape and dtype on all
    ranks of `group`.

    Ranks that differ would issue other collectives, and hang or, worse, add up tensors that do not
    belong together.
    """
    own = []
    for name, tensor in named_tensors:
        frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        own.append(
            f"{name!r} of shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}{frozen}"
        )
    everyone: list[Any] = [own] * num_ranks(group)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own, group=group)
    for rank, others in enumerate(everyone):
        for first, other in zip_longest(everyone[0], others, fillvalue="no more"):
            if first != other:
                raise ValueError(
                    f"{what} must be the same on all ranks: rank 0 has {first}, rank {rank} {other}"
                )


def broadcast_parameters(module: nn.Module, group: Group = None) -> None:
    """Give every rank the parameters and buffers of rank 0 of `group`."""
    for tensor in [*module.parameters(), *module.buffers()]:
        broadcast_from_first(tensor, group)
