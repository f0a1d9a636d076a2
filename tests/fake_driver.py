"""A CUDA driver of Python, whose kernels are functions of tensors in the memory of the CPU.

    machine = Machine()
    x - y, x + 2 * y == machine.combine(x, y)        # by two launches, which it counts

It reads the blocks of parameters that it is given, and the numbers in them must be those of `Machine.launch`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention.triton.launch import empty_like, launch

SHAPE = (2, 3, 20, 16)
NUMBERS = (-3, 2**40, 0.125)
META = {"swizzle": 3, "elem_size": 4, "elem_type": 9, "block_size": [1, 64], "fp4_padded": False}


class OnGpu(Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True

    def get_device(self) -> int:
        return 0


def on_gpu(x: Tensor) -> Tensor:
    return x.as_subclass(OnGpu)


class Compiled(SimpleNamespace):
    __hash__ = object.__hash__


class Kernel:
    """In the place of a Triton kernel a function of float32 tensors: the first comes by a descriptor."""

    def __init__(self, machine: Machine, function: Callable[..., None]) -> None:
        self.machine, self.function = machine, function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        return self.run

    def run(self, descriptor: Any, *arguments: Any) -> Compiled:
        machine, operands = self.machine, [descriptor.base, *arguments[:-4]]
        machine.by_triton += 1
        self.function(*operands)
        machine.kernels.append((self.function, [tuple(x.shape) for x in operands]))
        pointers = {f"p{i}": "*fp32" for i in range(len(operands) - 1)}
        numbers = {"one": "constexpr", "n": "i32", "far": "i64", "scale": "fp32"}
        kinds = [".b8 a[128]", ".u32 a", ".u32 a", ".u64 a", ".u64 a"]
        kinds += [".u64 .ptr .global .align 1 a"] * len(pointers) + [".u32 a", ".u64 a", ".f32 a", ".u64 a", ".u64 a"]
        metadata = {
            "num_ctas": 1, "num_warps": 4, "shared": 1024, "launch_cooperative_grid": False, "launch_pdl": False,
            "global_scratch_size": 0, "profile_scratch_size": 0, "tensordesc_meta": [META],
        } | machine.metadata  # fmt: skip
        ptx = ".entry f(" + ", ".join(f".param .align 64 {kind}" for kind in kinds) + ")"
        return Compiled(
            metadata=SimpleNamespace(**metadata), function=len(machine.kernels) - 1, _init_handles=lambda: None,
            src=SimpleNamespace(signature={"x": "tensordesc<fp32[1, 64]>"} | pointers | numbers | machine.signature),
            asm={"ptx": ptx.replace(*machine.ptx)},
        )  # fmt: skip


class Machine:
    """The driver, and how often kernels were launched by it and by Triton."""

    def __init__(self) -> None:
        self.kernels: list[tuple[Callable[..., None], list[tuple[int, ...]]]] = []
        self.by_triton = self.by_driver = self.status = self.map_status = self.stream = 0
        self.metadata, self.signature, self.descriptor, self.ptx = {}, {}, {}, ("", "")  # what kernels have otherwise
        self.maps: list[Any] = []
        self.configs: list[Any] = []
        self.context: int | None = 5  # that threads have
        self.contexts: list[int] = []  # that they are given

    def cuTensorMapEncodeTiled(self, place, element, rank, address, sizes, strides, box, steps, *options):  # noqa: N802
        self.maps.append((element, rank, [*sizes], strides[0], [*box], [*steps], options))
        ctypes.memmove(place, b"a tmap: ", 8)
        self.cuTensorMapReplaceAddress(place.value, address.value)
        return self.map_status

    def cuTensorMapReplaceAddress(self, place, address):  # noqa: N802
        assert place % 64 == 0 and ctypes.string_at(place, 8) == b"a tmap: "
        ctypes.c_uint64.from_address(place + 8).value = address

    def cuLaunchKernelEx(self, config, function, parameters, extra):  # noqa: N802
        if self.status:
            return self.status
        config, places, (run, shapes) = config._obj, [*parameters._obj], self.kernels[function.value]
        size = 72  # of an attribute in cuda.h, with its value from the eighth byte on
        starts = [config.attributes + size * number for number in range(config.num_attributes)]
        attributes = [tuple(ctypes.c_int.from_address(x + at).value for at in (0, 8)) for x in starts]
        grid = config.grid_x, config.grid_y, config.grid_z
        self.configs.append((grid, config.block_x, config.shared_bytes, config.stream, attributes))
        kinds = [*"iiqq", *"q" * (len(shapes) - 1), *"iqfqq"]
        c_types = {"i": ctypes.c_int32, "q": ctypes.c_int64, "f": ctypes.c_float}
        values = [c_types[kind].from_address(x).value for kind, x in zip(kinds, places[1:], strict=True)]
        assert extra is None and values[:4] == [3, 64, 80, 1] and (*values[-5:],) == (*NUMBERS, 0, 0)
        operands = []
        for address, shape in zip([ctypes.c_int64.from_address(places[0] + 8).value, *values[4:-5]], shapes):
            memory = (ctypes.c_float * torch.Size(shape).numel()).from_address(address)
            operands.append(torch.frombuffer(memory, dtype=torch.float32).view(shape))
        self.by_driver += 1
        run(*operands)
        return 0

    def cuCtxGetCurrent(self, context):  # noqa: N802
        context._obj.value = self.context

    def cuDeviceGet(self, number, ordinal):  # noqa: N802
        number._obj.value = ordinal + 10

    def cuDevicePrimaryCtxRetain(self, context, number):  # noqa: N802
        context._obj.value = number.value + 100

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.contexts.append(context.value)

    def launch(self, function: Callable[..., None], x: Tensor, *others: Tensor) -> None:
        given = {"base": x, "shape": [3, 64], "strides": [80, 1], "padding": "zero"} | self.descriptor
        launch(Kernel(self, function), (4,), (SimpleNamespace(**given), *others), (1, *NUMBERS), {})

    def combine(self, x: Tensor, y: Tensor, option: str = "") -> tuple[Tensor, Tensor]:
        """(x - y, x + 2 y), by two kernels and memory of which one is scratch."""
        scratch, plus, minus = (empty_like(x) for _ in range(3))
        minus = torch.zeros(SHAPE) if option == "fills" else minus
        x = x.clone() if option == "copies" else x
        self.launch(lambda y, scratch: scratch.copy_(2 * y), y, scratch)
        self.launch(lambda x, y, scratch, a, b: (a.copy_(x - y), b.copy_(x + scratch)), x, y, scratch, minus, plus)
        return (minus + 0 if option == "adds" else minus), plus
