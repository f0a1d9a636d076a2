"""FSDP's two collectives, on lists of tensors, and the side streams that they run on.

On NCCL the tensors of a list travel as one grouped call, each straight into its place: no flat buffer, no copies. On
other back ends they travel one by one. The group is asked directly: torch's functions for it look up, check and log
each tensor of a list, on a host that has to stay ahead of the GPU.

Memory and streams: every buffer is allocated while the compute stream is current. A side stream starts by waiting for
the compute stream, and the compute stream waits for the side stream before it uses, or gives up, what that touched. So
the caching allocator sees one stream only, and memory neither grows nor is handed out too early.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from cs336_systems.distributed.collectives import Work, all_gather_flat, reduce_scatter_mean_flat


class Lane:
    """A side stream of a CUDA device, of high priority; on CPU nothing but the same words."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Queue what follows on the side stream, behind all that is queued on the compute stream now."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """A point on the side stream for the compute stream to wait for."""
        return None if self.stream is None else self.stream.record_event()


def wait_for(event: torch.cuda.Event | None) -> None:
    """Let the compute stream wait for `event`; the host goes on."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def gather_rows(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> list[Work]:
    """All-gather each of `inputs` into its output, N times as many rows; handles to wait for, none on NCCL.

    On CUDA the work is ordered on the current stream.
    """
    if not _is_grouped(group):
        pairs = zip(outputs, inputs)
        return [all_gather_flat(output.view(-1), input_.view(-1), group, True) for output, input_ in pairs]
    options = AllgatherOptions()
    options.asyncOp = False  # on the current stream, mostly a side stream already
    _order_on_stream(group.allgather_into_tensor_coalesced(outputs, inputs, options))
    return []


def reduce_rows_mean(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> None:
    """Reduce-scatter each of `inputs`: its rows averaged over ranks, 1/N of them to each rank, in the inputs' dtype.

    On CUDA the work is ordered on the current stream.
    """
    if not _is_grouped(group):
        for output, input_ in zip(outputs, inputs):
            reduce_scatter_mean_flat(output.view(-1), input_.view(-1), group)
        return
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    options.asyncOp = False
    _order_on_stream(group.reduce_scatter_tensor_coalesced(outputs, inputs, options))


def _order_on_stream(work: dist.Work | None) -> None:
    """Let the current stream wait for `work`, if the transport did not use that stream."""
    if work is not None:
        work.wait()


def _is_grouped(group: dist.ProcessGroup) -> bool:
    return group.size() > 1 and dist.get_backend(group) == "nccl"
