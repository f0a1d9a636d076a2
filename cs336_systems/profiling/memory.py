"""Memory of closures, in bytes: peaks read from CUDA's allocator, and what autograd keeps, on any device."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

MIB = 2**20


def release(device: str) -> None:
    """Collect garbage and give cached blocks back, so that the next case starts from what is really alive."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def peak_cuda_bytes(call: Callable[[], object]) -> int:
    """The most bytes that tensors occupied during `call`, beyond those alive before it."""
    release("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def saved_for_backward(call: Callable[[], object]) -> int:
    """Bytes of distinct storages that autograd saves during `call`, on any device; parameters and inputs included."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()  # kept alive, so that no address is handed out twice
    del result
    return sum(storages.values())
