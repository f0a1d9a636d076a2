"""What an implementation sends and what it keeps, seen from outside: no name of its own is needed."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The methods of a process group that carry gradients; every function of torch.distributed calls one of them.
CARRIERS = ("reduce", "gather", "scatter", "to_all", "alltoall", "send")


SENT: list[int] = []  # payloads in bytes of the collectives of this process, broadcasts left out, in order
AWAITED: list[int] = []  # for each wait for one of them, how many had been sent


def count_messages() -> None:
    """Note in SENT and AWAITED from now on. Called before the code under test is imported."""

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            SENT.append(sum(tensor.nbytes for tensor in tensors))
            return method(group, *args, **kwargs)

        return call

    for name, method in list(vars(dist.ProcessGroup).items()):
        if callable(method) and any(part in name for part in CARRIERS):
            setattr(dist.ProcessGroup, name, counted(method))

    wait = dist.Work.wait

    def awaited(work: Any, *args: Any) -> Any:
        AWAITED.append(len(SENT))
        return wait(work, *args)

    dist.Work.wait = awaited  # type: ignore[assignment,method-assign]


def reachable_bytes() -> int:
    """The memory under all tensors that Python objects refer to; what only autograd holds is not counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn of being looked at
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class LiveBytes(TorchDispatchMode):
    """The memory under all tensors that operators touch, those that only autograd holds included.

    A storage that was resized counts as it is.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.peak = 0
        self._note(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note((args, kwargs, result))
        self.peak = max(self.peak, self.now())
        return result

    def _note(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)

    def now(self) -> int:
        storages = [reference() for reference in self._storages.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def recording(optimizer_cls: type[torch.optim.Optimizer]) -> tuple[type[torch.optim.Optimizer], list[Any]]:
    """A subclass that notes its instances, and the list of them: whoever wraps an optimizer has to make one."""
    instances: list[Any] = []

    class Recorded(optimizer_cls):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            instances.append(self)
            super().__init__(*args, **kwargs)

    Recorded.__name__ = Recorded.__qualname__ = optimizer_cls.__name__
    return Recorded, instances


def state_elements(optimizers: list[Any]) -> int:
    """Elements of all state tensors of more than one element; one that two optimizers share counts once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // tensor.element_size()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for tensor in tree_leaves(state)
        if isinstance(tensor, Tensor) and tensor.numel() > 1
    }
    return sum(storages.values())
