"""Launches that cost the host one call of the CUDA driver.

    kept = KeptLaunches()                          # for calls that differ only in addresses and the stream
    kept(device, given, made, launch_all)          # the first times launch_all(), later the driver alone

Triton's launch looks at every argument in Python and has the driver encode each TMA descriptor anew. That takes tens
of microseconds, and a short call of attention waits for it longer than for the GPU. Here the block of parameters is
laid out once for the addresses and numbers in it, and a launch hands it to `cuLaunchKernelEx`. Memory that PyTorch's
allocator hands out again, as it does in every step of a training loop, finds its block again. What comes once only, as
a batch of documents does that are as many as in no other, is not laid out.

The block has the layout that the kernel's PTX declares, which is compared with what Triton passes: for a descriptor 128
bytes of tensor map, the shape in 32 bits and the strides in 64; an address; a number in 32 or 64 bits; two addresses of
scratch memory at the end. A kernel that declares anything else, or needs more than a plain launch or one that overlaps
with the kernel before, is left to Triton, and so is every launch while a profiler has hooks on them or stages are
timed. Within `launches_seen` all go through Triton too, and whoever asked is told of them: `attention/native` makes
them without Python from then on.
Sources: CUDA Driver API, cuLaunchKernelEx, CUlaunchAttribute, cuTensorMapEncodeTiled; triton/backends/nvidia/driver.py.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from cs336_systems.measure.stages import stages_are_timed

TENSOR_MAP_BYTES = 128
# Triton's numbers of element types are the driver's (cuda.h, CUtensorMapDataType) but for float64, float32, bfloat16.
DRIVER_ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}
# cuda.h: CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapFloatOOBfill as Triton encodes its descriptors.
NO_INTERLEAVE, PROMOTE_TO_128_BYTES, FILL_WITH_ZEROS = 0, 2, 0
SCRATCH = ("u64", "u64")  # addresses behind the arguments, null in kernels that are bound
BYTES = {"map": TENSOR_MAP_BYTES, "u64": 8, "u32": 4, "f32": 4}
ALIGNMENT = 64  # of a tensor map, and of all else
NUMBERS: dict[str, Any] = {
    "i32": ("u32", ctypes.c_int32), "i64": ("u64", ctypes.c_int64), "fp32": ("f32", ctypes.c_float)
}  # fmt: skip
ENTRY = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)")
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,\[]*(?:\[(\d+)\])?")

KEPT_SHAPES = 4096
KEPT_CALLS = 512  # of a shape: the layers of a model, and what the allocator gives by turns

Bound = Callable[[], int]  # launches, and returns the driver's status


class Launched(NamedTuple):
    """A launch that Triton has made: `compiled[grid](*arguments, ...)`, up to the last run-time argument."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class Seen(NamedTuple):
    """What one `KeptLaunches` has launched: on which tensors, of which those in `made` were uninitialised before."""

    given: tuple[Tensor, ...]
    made: tuple[Tensor, ...]
    launched: Sequence[Launched | None]


class Block(NamedTuple):
    """A kernel's parameters in memory."""

    memory: Any  # holds the rest
    start: int
    places: list[int]  # of each parameter; the first at `start`
    addresses: list[tuple[int, int, bool]]  # place, the address in it, whether within a tensor map

    @property
    def size(self) -> int:
        """Bytes from `start` on, in whole multiples of ALIGNMENT."""
        return len(self.memory) - ALIGNMENT


_thread = threading.local()  # `by`: who is told of its launches; `has_context`: whether it is known to have one


@contextmanager
def launches_seen() -> Iterator[list[Seen]]:
    """All that `KeptLaunches` launch within, on this thread."""
    outer, _thread.by = getattr(_thread, "by", None), []
    try:
        yield _thread.by
    finally:
        _thread.by = outer


class LaunchConfig(ctypes.Structure):
    """cuda.h's CUlaunchConfig."""

    _fields_ = [
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint), ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip


class LaunchAttribute(ctypes.Structure):
    """cuda.h's CUlaunchAttribute: its value, here one integer, is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: may start before the kernel ahead in the stream has ended.
OVERLAPS = LaunchAttribute(id=6, value=1)


class _Layout(NamedTuple):
    """How a compiled kernel takes its parameters."""

    arguments: tuple[tuple[int, str], ...]  # place among the caller's, and kind, of those that are passed
    parameters: tuple[str, ...]  # what the PTX declares: map, u64, u32, f32


@cache
def cuda_driver() -> Any:
    """The driver's library; its functions return a CUresult."""
    return ctypes.CDLL("libcuda.so.1")


def have_context(device: int) -> None:
    """Make the CUDA context of `device` current where this thread has none: its first kernel of PyTorch's would.

    A thread that has only allocated has none, and without one the driver neither launches nor encodes a descriptor.
    """
    if getattr(_thread, "has_context", False):
        return
    driver, context, number = cuda_driver(), ctypes.c_void_p(), ctypes.c_int()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        for status in (
            driver.cuDeviceGet(ctypes.byref(number), device),
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number),
            driver.cuCtxSetCurrent(context),
        ):
            if status:  # Triton's launch says why
                return
    _thread.has_context = True


class KeptLaunches:
    """The launches of calls that differ in nothing but the addresses of their tensors and the stream."""

    def __init__(self) -> None:
        self._bound: dict[tuple[int, ...], list[Bound]] = {}
        self._came_before = False

    def __call__(
        self, device: torch.device, given: tuple[Tensor, ...], made: tuple[Tensor, ...],
        launch_all: Callable[[], Sequence[Launched | None]],
    ) -> None:  # fmt: skip
        """Launch on `device`, which is the current one, what reads `given` and writes `made`, uninitialised so far.

        `launch_all` launches through Triton and says what; None stands for what cannot be launched otherwise.
        """
        if device.type != "cuda" or somebody_watches():  # interpreted or compiled only, or each launch is to be seen
            launch_all()
            return
        if (seen := getattr(_thread, "by", None)) is not None:
            seen.append(Seen(given, made, launch_all()))
            return
        addresses = [x.data_ptr() for x in (*given, *made)]
        key = (torch._C._cuda_getCurrentRawStream(device.index), *addresses)
        bound = self._bound.get(key)
        if bound is None:
            self._launch_and_keep(key, launch_all)
            return
        for launch in bound:
            if launch():  # the driver refuses: Triton's own launches say why, and may begin once more
                self._launch_and_keep(key, launch_all)
                return

    def _launch_and_keep(self, key: tuple[int, ...], launch_all: Callable[[], Sequence[Launched | None]]) -> None:
        launched = launch_all()
        if not self._came_before:
            self._came_before = True
            return
        bound = [None if launch is None else bind(*launch, key[0]) for launch in launched]
        if len(self._bound) >= KEPT_CALLS:
            self._bound.clear()
        kept = [launch for launch in bound if launch is not None]
        if kept and len(kept) == len(bound):
            self._bound[key] = kept


def bind(compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], stream: int) -> Bound | None:
    """`compiled[grid]` on `arguments` and the CUDA stream, laid out; None where only Triton's own launch will do.

    `arguments` are the kernel's up to its last run-time one: tensors, descriptors of such, numbers. Their memory is not
    held: the launch is for whatever lies at these addresses.
    """
    block = lay_out(compiled, arguments)
    if block is None:
        return None
    pointers = (ctypes.c_void_p * len(block.places))(*block.places)
    compiled._init_handles()
    metadata = compiled.metadata
    attributes = (ctypes.addressof(OVERLAPS), 1) if metadata.launch_pdl else (None, 0)
    config = LaunchConfig(*grid, 32 * metadata.num_warps, 1, 1, metadata.shared, stream, *attributes)
    launch = partial(
        cuda_driver().cuLaunchKernelEx,
        ctypes.byref(config), ctypes.c_void_p(compiled.function), ctypes.byref(pointers), None,
    )  # fmt: skip
    launch.kept = compiled, block  # type: ignore[attr-defined]  # alive as long as the launch
    return launch


def lay_out(compiled: Any, arguments: Sequence[Any]) -> Block | None:
    """The parameters with which `compiled` takes `arguments`; None where only Triton's own launch will do."""
    layout = layout_of(compiled)
    if layout is None:
        return None
    # Each parameter at a multiple of a tensor map's alignment: blocks are small.
    ends = list(accumulate(-(-BYTES[kind] // ALIGNMENT) * ALIGNMENT for kind in layout.parameters))
    memory = (ctypes.c_byte * (ends[-1] + ALIGNMENT))()
    start = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
    places = [start + end for end in (0, *ends[:-1])]
    addresses: list[tuple[int, int, bool]] = []
    maps = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    rest = iter(places)
    for index, kind in layout.arguments:
        argument, place = arguments[index], next(rest)
        if kind == "tensordesc":
            if not _encode(place, argument, next(maps)):
                return None
            addresses.append((place, argument.base.data_ptr(), True))
            for number in argument.shape:
                ctypes.c_int32.from_address(next(rest)).value = number
            for number in argument.strides:
                ctypes.c_int64.from_address(next(rest)).value = number
        elif kind == "pointer":
            ctypes.c_uint64.from_address(place).value = argument.data_ptr()
            addresses.append((place, argument.data_ptr(), False))
        else:
            NUMBERS[kind][1].from_address(place).value = argument
    return Block(memory, start, places, addresses)


def somebody_watches() -> bool:
    """Whether a profiler of Triton's wants to hear of launches, or the stages of calls are being timed."""
    runtime = knobs.runtime
    return stages_are_timed() or _is_set(runtime.launch_enter_hook) or _is_set(runtime.launch_exit_hook)


def _is_set(hook: Any) -> bool:
    return bool(getattr(hook, "calls", hook))  # a chain of hooks, which may be empty


@lru_cache(maxsize=KEPT_SHAPES)
def layout_of(compiled: Any) -> _Layout | None:
    """How `compiled` takes its parameters; None if it wants what a bound launch does not give."""
    metadata = compiled.metadata
    plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    if not plain or metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    arguments: list[tuple[int, str]] = []
    parameters: list[str] = []
    ranks = [len(x["block_size"]) for x in getattr(metadata, "tensordesc_meta", None) or ()]
    for index, kind in enumerate(compiled.src.signature.values()):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc") and ranks:
            rank = ranks.pop(0)
            arguments.append((index, "tensordesc"))
            parameters += ["map", *("u32",) * rank, *("u64",) * rank]
        elif kind.startswith("*"):
            arguments.append((index, "pointer"))
            parameters.append("u64")
        elif kind in NUMBERS:
            arguments.append((index, kind))
            parameters.append(NUMBERS[kind][0])
        else:
            return None
    parameters += SCRATCH
    return _Layout(tuple(arguments), tuple(parameters)) if parameters == list(declared(compiled)) else None


def declared(compiled: Any) -> Iterator[str]:
    """The parameters that a compiled kernel's PTX declares, as kinds of `BYTES`; others by their own names."""
    entry = ENTRY.search(compiled.asm["ptx"])
    for kind, size in PARAMETER.findall(entry[1] if entry else ""):
        yield "map" if (kind, size) == ("b8", str(TENSOR_MAP_BYTES)) else kind + size


def _encode(place: int, descriptor: Any, meta: Any) -> bool:
    """Write the tensor map of `descriptor` to the address `place`; whether the driver could."""
    if meta["fp4_padded"] or descriptor.padding != "zero" or getattr(descriptor, "round_f32_to_tf32", False):
        return False
    rank, width = len(meta["block_size"]), meta["elem_size"]
    sizes, lengths = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank  # innermost first, as all that the driver takes
    strides = sizes(*(stride * width for stride in reversed(descriptor.strides[:-1])), 0)
    status = cuda_driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), DRIVER_ELEMENT_TYPES.get(meta["elem_type"], meta["elem_type"]), rank,
        ctypes.c_void_p(descriptor.base.data_ptr()), sizes(*reversed(descriptor.shape)), strides,
        lengths(*reversed(meta["block_size"])), lengths(*(1,) * rank), NO_INTERLEAVE, meta["swizzle"],
        PROMOTE_TO_128_BYTES, FILL_WITH_ZEROS,
    )  # fmt: skip
    return status == 0
