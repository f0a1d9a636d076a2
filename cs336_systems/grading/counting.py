"""Count what an implementation sends and what it keeps, without knowing any of its names."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The methods of a process group that carry tensors; every function of torch.distributed calls one.
CARRIERS = ("broadcast", "reduce", "gather", "scatter", "to_all", "alltoall", "send")


@dataclass(frozen=True)
class Message:
    """One collective that this process has started."""

    kind: str  # the process group's method, as allreduce, _allgather_base, reduce_scatter
    nbytes: int  # of all tensors in its arguments, outputs included
    dtypes: frozenset[torch.dtype]

    @property
    def carries_weights(self) -> bool:
        return "gather" in self.kind or "broadcast" in self.kind


SENT: list[Message] = []  # all messages, in order
AWAITED: list[int] = []  # for each wait for a message, how many had been sent by then
REDUCED: dict[int, weakref.ref[Any]] = {}  # storages that reductions read or wrote: gradients


def count_messages() -> None:
    """Record every collective and wait in SENT, AWAITED and REDUCED from now on.

    It patches torch.distributed, so it is called before the code under test is imported.
    """

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            SENT.append(Message(name, nbytes, frozenset(tensor.dtype for tensor in tensors)))
            if "reduce" in name:
                REDUCED.update(storages_of(tensors))
            return method(group, *args, **kwargs)

        return call

    for name, method in list(vars(dist.ProcessGroup).items()):
        if callable(method) and any(part in name for part in CARRIERS):
            setattr(dist.ProcessGroup, name, counted(name, method))

    wait = dist.Work.wait

    def awaited(work: Any, timeout: timedelta = timedelta(0)) -> Any:  # 0: no limit
        AWAITED.append(len(SENT))
        return wait(work, timeout)

    dist.Work.wait = awaited  # type: ignore[assignment,method-assign]


def storages_of(tree: Any) -> dict[int, weakref.ref[Any]]:
    """Return weak references to the storages of all tensors in `tree`, by the storage's id."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_meta]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {id(storage): weakref.ref(storage) for storage in storages}


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that tracks the memory of every tensor that an operator touches.

    The tensors `known` count from the start, and tensors that only autograd holds count as well. A
    storage that was resized counts with its present size. `peak` is in bytes; `shapes` and
    `operators` are those of all results.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._storages = storages_of(list(known))
        self.peak = 0
        self.shapes: set[tuple[int, ...]] = set()  # of the operators' results
        self.operators: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.operators.add(func.overloadpacket.__name__)
        self.shapes.update(tuple(tensor.shape) for tensor in results)
        self._storages |= storages_of((args, kwargs, results))
        self.peak = max(self.peak, self.now())
        return result

    def now(self, *, without: Iterable[weakref.ref[Any]] = ()) -> int:
        """Return the bytes of the tracked storages that are alive, except those in `without`."""
        left_out = {id(storage) for reference in without if (storage := reference()) is not None}
        self._storages = {key: ref for key, ref in self._storages.items() if ref() is not None}
        storages = [reference() for reference in self._storages.values()]
        return sum(
            storage.nbytes()
            for storage in storages
            if storage is not None and id(storage) not in left_out
        )


def recording(
    optimizer_cls: type[torch.optim.Optimizer],
) -> tuple[type[torch.optim.Optimizer], list[Any]]:
    """Return a subclass of `optimizer_cls` that records its instances, and the list of them.

    Any wrapper of an optimizer has to construct one, so its state can be found there.
    """
    instances: list[Any] = []

    class Recorded(optimizer_cls):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            instances.append(self)
            super().__init__(*args, **kwargs)

    Recorded.__name__ = Recorded.__qualname__ = optimizer_cls.__name__
    return Recorded, instances


def state_elements(optimizers: list[Any]) -> int:
    """Return the number of elements in the optimizers' state tensors of more than one element.

    A tensor that two optimizers share counts once.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        // tensor.element_size()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for tensor in tree_leaves(state)
        if isinstance(tensor, Tensor) and tensor.numel() > 1
    }
    return sum(storages.values())
