"""What a call of an operator launches, found out by making it, and then made by `native/operator.cpp`.

    calls = KeptCalls(name, python, backward)
    output, lse = calls(q, k, v, arguments)     # twice by Python, for each kind of q, k, v, then by C++

A call is made by C++ only if it has been seen to be nothing but launches: all that the kernels read are q, k, v (and in
the backward what was saved, and the gradient), all that they write was allocated for them, and Triton's launches have a
layout that `triton/launcher.py` knows. A call that copies an input, pads a gradient or splits a scale is Python's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cs336_systems.attention.native import load
from cs336_systems.attention.operator import runs_directly
from cs336_systems.attention.triton.launcher import Seen, cuda_driver, launches_seen, lay_out, somebody_watches
from cs336_systems.attention.triton.launching import POINTER_ALIGNMENT_BYTES

MAX_CALLS = 4096  # which C++ keeps for good
MAX_REFUSED = 64  # strides of gradients that are remembered, for each of them

# (sizes, strides, dtype) of a tensor; (function, grid, threads, shared bytes, overlaps with the kernel before,
# parameters, their offsets in these, addresses in these as (offset, tensor, is within a tensor map)) of a kernel.
TensorFacts = tuple[list[int], list[int], torch.dtype]
KernelFacts = tuple[int, tuple[int, int, int], int, int, bool, bytes, list[int], list[tuple[int, int, bool]]]
PassFacts = tuple[list[TensorFacts], list[TensorFacts], list[KernelFacts]]

_UNSEEN = object()
_held: set[Any] = set()  # compiled kernels whose functions C++ launches


class KeptCalls:
    """The calls of one operator: Python makes those of each kind twice, and C++ from then on those that it can.

    `python` is what makes them, differentiable, and `backward` their gradients.
    """

    def __init__(
        self,
        name: str,
        python: Callable[[Tensor, Tensor, Tensor, tuple[Any, ...]], tuple[Tensor, Tensor]],
        backward: Callable[..., tuple[Tensor, ...]],
    ) -> None:
        self._name, self._python, self._backward = name, python, backward
        self._once: set[tuple[Any, ...]] = set()  # a shape that comes once, as in generation, takes no place
        self._calls: dict[tuple[Any, ...], Any] = {}  # C++'s, or None where the call stays Python's

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """(output, lse), differentiable.

        The inputs are on a GPU and have been checked: k and v have one shape, and q's dtype and device.
        """
        if somebody_watches() or forward_ad._current_level >= 0:
            return self._python(q, k, v, arguments)
        key = (q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, arguments)
        call = self._calls.get(key, _UNSEEN)
        if call is _UNSEEN:
            return self._see(key, q, k, v, arguments)
        results = None if call is None else call(q, k, v)
        return self._python(q, k, v, arguments) if results is None else results

    def _see(
        self, key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, arguments: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        """The call by Python, after which C++ may know it, if it is no longer the first."""
        if key not in self._once:
            if len(self._once) >= MAX_CALLS:
                self._once.clear()
            self._once.add(key)
            return self._python(q, k, v, arguments)
        if len(self._calls) >= MAX_CALLS or not _are_apart(q, k, v):
            return self._python(q, k, v, arguments)
        with launches_seen() as seen:
            results = self._python(q, k, v, arguments)
        facts = pass_facts(seen, (q, k, v), results)
        call = None
        if facts is not None:
            python = _PythonBackward(self._backward, arguments)
            call = python.call = _module().Call(self._name, q.device, facts, is_watched, python)
        self._calls[key] = call
        return results


class _PythonBackward:
    """The backward of a call that C++ leaves to Python: it makes it, and tells C++ what it saw."""

    def __init__(self, backward: Callable[..., tuple[Tensor, ...]], arguments: tuple[Any, ...]) -> None:
        self._backward, self._arguments = backward, arguments
        self._refused: set[tuple[int, ...]] = set()  # strides of gradients with which it is more than launches
        self.call: Any = None  # C++'s, which has this one; set when there is one

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor | None,
        grad_lse: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        inputs = (q, k, v, output, lse, grad_output)
        plain = grad_lse is None and not torch.is_grad_enabled() and not is_watched() and runs_directly(*inputs)
        if not plain or not _are_apart(*inputs) or grad_output.stride() in self._refused:
            return list(self._backward(*inputs, grad_lse, *self._arguments))
        with launches_seen() as seen:
            grads = self._backward(*inputs, None, *self._arguments)
        facts = pass_facts(seen, inputs, grads)
        if (facts is None or not self.call.add_backward(facts)) and len(self._refused) < MAX_REFUSED:
            self._refused.add(grad_output.stride())
        return list(grads)


def is_watched() -> bool:
    """Whether a backward has to go through Python, and often through the dispatcher, for somebody to see it."""
    return somebody_watches() or forward_ad._current_level >= 0 or not runs_directly()


def pass_facts(seen: Sequence[Seen], given: Sequence[Tensor], results: Sequence[Tensor]) -> PassFacts | None:
    """What C++ has to do for `results`, which Python made of `given` in the launches `seen`; None if it cannot."""
    if len(seen) != 1:
        return None
    addresses = {x.data_ptr(): number for number, x in enumerate(given)}
    if any(x.data_ptr() not in addresses for x in seen[0].given):  # a copy of an input
        return None
    made = {x.data_ptr(): x for x in seen[0].made}
    for result in results:
        buffer = made.get(result.data_ptr())
        if buffer is None or tensor_facts(buffer) != tensor_facts(result):  # something came after the launches
            return None
    scratch = [x for address, x in made.items() if all(address != result.data_ptr() for result in results)]
    allocated = [*results, *scratch]
    if len({*addresses, *made}) != len(given) + len(allocated):
        return None
    addresses |= {x.data_ptr(): number for number, x in enumerate(allocated, len(given))}
    kernels: list[KernelFacts] = []
    for launched in seen[0].launched:
        block = None if launched is None else lay_out(launched.compiled, launched.arguments)
        if launched is None or block is None or any(address not in addresses for _, address, _ in block.addresses):
            return None
        launched.compiled._init_handles()
        _held.add(launched.compiled)
        metadata = launched.compiled.metadata
        slots = [(place - block.start, addresses[address], is_map) for place, address, is_map in block.addresses]
        kernels.append((
            launched.compiled.function, launched.grid, 32 * metadata.num_warps, metadata.shared, metadata.launch_pdl,
            ctypes.string_at(block.start, block.size), [place - block.start for place in block.places], slots,
        ))  # fmt: skip
    return [tensor_facts(x) for x in given], [tensor_facts(x) for x in allocated], kernels


def tensor_facts(x: Tensor) -> TensorFacts:
    return list(x.shape), list(x.stride()), x.dtype


def _are_apart(*tensors: Tensor) -> bool:
    """Whether an address says which of the tensors it is, and all begin where kernels want them to."""
    addresses = {x.data_ptr() for x in tensors}
    return len(addresses) == len(tensors) and not any(address % POINTER_ALIGNMENT_BYTES for address in addresses)


@cache
def _module() -> Any:
    """The C++ half, told where the driver's functions are."""
    module: Any = load()
    driver = cuda_driver()
    functions = driver.cuLaunchKernelEx, driver.cuTensorMapReplaceAddress
    module.set_driver(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))
    return module
