"""Count what a rank sends: every collective that runs inside a block, whoever starts it.

    with MessageCounter() as sent:
        loss(model(tokens)).backward()
    sent.bytes(group)       # that this rank sends in rings over `group`

The counter is a dispatch mode: the methods of a process group are operators of PyTorch ("c10d"),
which it sees whether a wrapper, a user or torch itself calls them. A world of `fake_ranks` sends
nothing, so that one process counts for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.analysis.bandwidth import bus_factor

# Operators by name: the kind, and which argument is the whole buffer: what an all-reduce reduces, an
# all-gather ends with, a reduce-scatter begins with.
OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
}

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
SILENT = ("barrier", "monitored_barrier_", "wait_tensor")


@dataclass(frozen=True, kw_only=True)
class Message:
    """A collective that this rank has started."""

    kind: str
    size_bytes: int  # of the whole buffer
    bytes_sent: float  # by this rank in a ring; of a broadcast the mean over the ranks
    group: dist.ProcessGroup


class MessageCounter(TorchDispatchMode):
    """Records the collectives inside of the block, in order, in `messages`.

    Raises NotImplementedError at other operators of a process group, whose bytes it does not know:
    point-to-point ones, and the functional collectives of DTensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record `func` if it is a collective, and call it."""
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name in OPERATORS:
            kind, place = OPERATORS[name]
            boxed = next(one for one in args if isinstance(one, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            tensors = [one for one in tree_leaves(args[place]) if isinstance(one, Tensor)]
            size = sum(one.nbytes for one in tensors)
            sent = bus_factor(kind, group.size()) * size
            if kind == "broadcast":  # the last rank of the chain sends nothing
                sent *= 1 - 1 / group.size()
            if kind == "all_to_all" and args[4]:  # sizes of what goes to each rank
                sent = size * (1 - args[4][group.rank()] / max(1, sum(args[4])))
            self.messages.append(Message(kind=kind, size_bytes=size, bytes_sent=sent, group=group))
        elif func.namespace in NAMESPACES and name.rpartition("::")[2] not in SILENT:
            raise NotImplementedError(f"MessageCounter does not know the bytes of {name}")
        return func(*args, **(kwargs or {}))

    def over(self, group: dist.ProcessGroup) -> list[Message]:
        """Return the messages over the ranks of `group`."""
        return [one for one in self.messages if one.group.group_name == group.group_name]

    def bytes(self, group: dist.ProcessGroup) -> float:
        """Return the bytes that this rank has sent over `group`, in rings."""
        return sum(message.bytes_sent for message in self.over(group))


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[None]:
    """Be rank 0 of `num_ranks` ranks in this block, of which the others do not exist.

    Collectives return at once, and leave in their outputs whatever is there. Raises RuntimeError if
    there is a default process group.
    """
    if dist.is_initialized():
        raise RuntimeError("fake ranks need a process without a default process group")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
