"""The gather phase of FSDP: all ranks send their rows of a weight, on a side stream.

Memory and streams: every buffer is allocated while the compute stream is current. A side stream
starts by waiting for the compute stream. The compute stream waits for the side stream before it
uses or frees what the side stream touched. So the caching allocator sees one stream only, and
memory neither grows nor is reused too early.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from cs336_systems.distributed.collectives import Work, all_gather_flat, on_nccl, wait_for
from cs336_systems.distributed.fsdp.weight import ShardedWeight


class Lane:
    """A side stream of high priority on a CUDA device; on CPU its methods do nothing."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Make the side stream current inside this block, after work queued on the compute stream.

        The side stream waits for that work.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Work:
        """Return a handle whose `wait` makes the current stream wait for the side stream's work.

        It stands for the work queued up to now; the host does not wait.
        """
        if self.stream is None:
            return Work()
        event = self.stream.record_event()
        return Work(finish=lambda: torch.cuda.current_stream().wait_event(event))


def gather_rows(
    outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup
) -> list[Work]:
    """All-gather each input into its output, which has N times as many rows; return the handles.

    On NCCL all inputs travel in one grouped call on the current stream, and there are no handles.
    The group's method is called directly: torch's functions check and log each tensor of a list,
    which takes time on a host that must stay ahead of the GPU.
    """
    if not on_nccl(inputs[0], group) or group.size() == 1:
        pairs = zip(outputs, inputs)
        return [
            all_gather_flat(output.view(-1), input_.view(-1), group, True)
            for output, input_ in pairs
        ]
    options = AllgatherOptions()
    options.asyncOp = False  # runs on the current stream, which mostly is a side stream already
    if (work := group.allgather_into_tensor_coalesced(outputs, inputs, options)) is not None:
        work.wait()  # the transport has used its own stream after all
    return []


def gather_copy(weight: ShardedWeight, dtype: torch.dtype) -> Tensor:
    """Return a new tensor with the whole weight in `dtype`; collective, on the current stream."""
    rows = weight.shard.new_empty(weight.gathered.shape, dtype=dtype)
    chunk = weight.shard.new_zeros(weight.chunk.shape, dtype=dtype)
    chunk[: weight.shard.shape[0]].copy_(weight.shard.detach())
    wait_for(gather_rows([rows], [chunk], weight.group))
    return rows[: weight.shape[0]]
