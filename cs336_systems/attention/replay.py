"""Replay of attention calls: the first calls launch through Triton, later ones by the CUDA driver.

    passes = replayed(operator, q, k, v, call)  # remembered for calls of equal shapes and options
    output, lse = passes.forward(q, k, v, call)

Short attention calls wait for the host: Triton's own launch looks at every argument in Python and
encodes each TMA descriptor anew. That takes 12 to 29 µs a kernel on an H200's host, where the
driver needs 5.
  1. run      The first two calls run the function.
  2. record   During the second, `empty` and `launch` (`triton/launch.py`) note each allocation and
              each launch.
  3. bind     Each kernel's parameters are laid out in a block of memory, as its PTX declares them.
              A descriptor takes 128 bytes of tensor map, its shape in 32 bits and its strides in
              64; other parameters are an address or a number.
  4. replay   Every later call allocates, writes the new addresses into the blocks and calls
              `cuLaunchKernelEx`; in C++ where `attention/native` has been built.
A call is replayed only if it does nothing but launch kernels: every tensor that a kernel touches is
one of its tensors or came from `empty`, and so did every result. A function that copies an input or
fills a result always runs itself. So does every call while a profiler has hooks on Triton's
launches or the stages of calls are timed.

Nothing here imports Triton before a kernel is launched.

Sources: CUDA Driver API, cuLaunchKernelEx, cuTensorMapReplaceAddress;
triton/backends/nvidia/driver.py.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.attention import native
from cs336_systems.attention.call import Call, Passes, Saved
from cs336_systems.measure.stages import stages_are_timed

MOST_REMEMBERED = 4096  # kinds of calls; one more clears the memory
# How often a call that cannot be bound is recorded at most. Most such calls never can be; a few
# cannot only while two arguments lie at one address, which may change.
MOST_RECORDINGS = 3
POINTER_ALIGNMENT_BYTES = 16  # Triton compiles other code for pointers that this does not divide

# Bytes that each parameter of a block gets: those of a tensor map, whose address must be a multiple
# of 64.
PARAMETER_BYTES = 128
NUMBERS = {"i32": "u32", "i64": "u64", "fp32": "f32"}  # Triton's kinds and those of PTX
STORED: dict[str, Any] = {"u32": ctypes.c_int32, "u64": ctypes.c_int64, "f32": ctypes.c_float}
# Triton's numbers of element types, where they differ from the driver's (cuda.h,
# CUtensorMapDataType): float64, float32, bfloat16.
DRIVER_ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}
# cuda.h: CUtensorMapInterleave, CUtensorMapL2promotion and CUtensorMapFloatOOBfill, with the values
# that Triton encodes into its descriptors.
NO_INTERLEAVE, PROMOTE_TO_128_BYTES, FILL_WITH_ZEROS = 0, 2, 0

Results = tuple[Tensor, ...]


class Launched(NamedTuple):
    """One launch that Triton has made, `compiled[grid](*arguments)`.

    `arguments` end with the last run-time argument.
    """

    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class Recording(NamedTuple):
    """The tensors that one call has allocated by `empty`, and the kernels it has launched.

    A launch is None if nothing was compiled for it, as in Triton's interpreter.
    """

    buffers: list[Tensor]
    launches: list[Launched | None]


class _Thread(threading.local):
    """State of one thread."""

    recording: Recording | None = None  # of the call that is being recorded
    has_context = False  # whether this thread is known to have a CUDA context


thread = _Thread()


# The calls that are remembered

_remembered: dict[Any, Replays] = {}


def replayed(passes: Passes, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Passes:
    """Return `passes` with replay: a forward and a backward shared by all calls like this one.

    Calls are alike if they differ in the tensors' values and addresses alone: shapes, strides,
    dtypes, device and options are equal. The tensors must be checked and plain. Not for calls with
    hooks on saved tensors, which may give back other tensors.
    """
    told: Any = call
    if call.lists is not None or call.documents is not None:
        tensors = _tensors_of(call)
        ids = [*map(id, tensors)]
        # which tensors are one and the same, as boundaries of queries and keys may be
        shared = () if len({*ids}) == len(ids) else tuple(map(ids.index, ids))
        told = (call[:4], shared, *[x.shape for x in tensors])
        if call.documents is not None:
            told += call.documents[2:]

    facts = (passes, q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), v.stride(), told)
    known = _remembered.get(facts)
    if known is None:
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()
        known = _remembered[facts] = Replays(passes)
    return known


def _tensors_of(call: Call) -> tuple[Tensor, ...]:
    """Return the tensors of `call` that kernels read: its lists or its documents' boundaries."""
    return call.lists or (call.documents or ())[:2]


def forget() -> None:
    """Drop all remembered calls: the next ones run and are recorded again."""
    _remembered.clear()


class Replays:
    """The replayed forward and backward of calls that differ in values and addresses alone."""

    def __init__(self, passes: Passes) -> None:
        self._passes, self._forward = passes, Replay()
        self._backwards: dict[Any, Replay] = {}  # by the strides of the upstream gradients

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return (output, lse), replayed from the third call on."""
        # lists and documents are one object only if both are None, in a dense call
        tensors = (q, k, v) if call.lists is call.documents else (q, k, v, *_tensors_of(call))
        return self._forward(  # type: ignore[return-value]
            tensors, lambda: self._passes.forward(q, k, v, call)
        )

    def backward(self, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, replayed from the third call of these strides on."""
        grad_lse = saved.grad_lse
        key = saved.grad_output.stride(), None if grad_lse is None else grad_lse.stride()
        if (replay := self._backwards.get(key)) is None:
            replay = self._backwards[key] = Replay()
        tensors = (*saved, *_tensors_of(call))
        return replay(  # type: ignore[return-value]
            tensors, lambda: self._passes.backward(saved, call)
        )


# One pass


class Replay:
    """One pass of calls that are alike: `replay(tensors, run)` returns the results of `run()`.

    `run()` is one call with these `tensors`. From the third time on its launches are repeated
    without it, as the module's docstring tells. All calls of one Replay have the same shapes,
    strides, dtypes, device and other arguments.
    """

    def __init__(self) -> None:
        self._recordings_left = MOST_RECORDINGS
        # A shape that comes once, as each step of generation has, is not recorded.
        self._runs = 0
        # Picks the tensors that are not None.
        self._given: Callable[[tuple[Any, ...]], tuple[Tensor, ...]]
        # Arguments of `new_empty_strided` for each buffer: results first, then scratch memory.
        self._buffers: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._num_results = 0
        self._kernels: list[_BoundKernel] = []
        self._launches: list[Callable[[], int]] = []
        # The replay in C++: returns the results, or None where it cannot replay.
        self._plug_in: Callable[[tuple[Any, ...]], tuple[Tensor, ...] | None] | None = None
        self._addresses: list[int] = []  # of the tensors that the blocks now hold
        self._words: Any = None  # the same, in the memory that kernels' parameters point to
        self._stream = 0
        self._lock = threading.Lock()  # the blocks serve one call at a time

    def __call__(self, tensors: tuple[Tensor | None, ...], run: Callable[[], Results]) -> Results:
        """Return the results of `run()`, by a replay if this pass is bound and not watched."""
        if not self._launches:
            return self._run_and_record(tensors, run)

        first: Any = tensors[0]
        device = first.get_device()
        if torch._C._cuda_getDevice() != device or _somebody_watches():
            return run()
        have_context(device)
        if self._plug_in is not None:
            results = self._plug_in(tensors)
            return run() if results is None else results

        buffers = [first.new_empty_strided(*shape, **dtype) for shape, dtype in self._buffers]
        addresses = [x.data_ptr() for x in (*self._given(tensors), *buffers)]
        stream = torch._C._cuda_getCurrentRawStream(device)
        with self._lock:
            # write other addresses into the blocks
            if addresses != self._addresses or stream != self._stream:
                for address in addresses:
                    if address % POINTER_ALIGNMENT_BYTES:
                        return run()
                self._words[:] = self._addresses = addresses
                self._stream = stream
                for kernel in self._kernels:
                    kernel.follow(addresses, stream)

            for launch_again in self._launches:
                if launch_again():  # the driver has refused: Triton's own launch reports why
                    return run()
        return tuple(buffers[: self._num_results])

    def _run_and_record(
        self, tensors: tuple[Tensor | None, ...], run: Callable[[], Results]
    ) -> Results:
        """Return `run()`; from the second time on also record it and try to bind its kernels."""
        first: Any = tensors[0]
        if not first.is_cuda or not self._recordings_left:
            return run()
        given = [x for x in tensors if x is not None]
        aligned = all(x.data_ptr() % POINTER_ALIGNMENT_BYTES == 0 for x in given)
        if not aligned or _somebody_watches():
            return run()
        self._runs += 1
        if self._runs == 1:
            return run()

        self._recordings_left -= 1
        with recorded() as recording:
            results = run()

        # The results come first among the buffers, in their order; the others are scratch memory.
        made = {id(x) for x in recording.buffers}
        if all(id(x) in made for x in results):
            buffers = [
                *results,
                *(x for x in recording.buffers if all(x is not result for result in results)),
            ]
            words = (ctypes.c_uint64 * (len(given) + len(buffers)))()
            kernels = [bind(launched, [*given, *buffers], words) for launched in recording.launches]

            # another thread may have bound this call meanwhile
            with self._lock:
                if not self._launches and all(kernels):
                    places = [place for place, x in enumerate(tensors) if x is not None]
                    self._given = itemgetter(*places)
                    self._num_results = len(results)
                    dtypes = [{} if x.dtype == first.dtype else {"dtype": x.dtype} for x in buffers]
                    self._buffers = [
                        ((tuple(x.shape), x.stride()), dtype) for x, dtype in zip(buffers, dtypes)
                    ]
                    self._kernels = [kernel for kernel in kernels if kernel is not None]
                    self._words = words

                    if (library := native.load()) is not None:
                        self._plug_in = library.Replay(
                            first.get_device(),
                            places,
                            [(list(x.shape), x.stride(), x.dtype) for x in buffers],
                            len(results),
                            ctypes.addressof(words),
                            [kernel.places for kernel in self._kernels],
                            _address_of(cuda_driver().cuTensorMapReplaceAddress),
                            _address_of(cuda_driver().cuLaunchKernelEx),
                        )
                    # last: with launches set, other threads replay
                    self._launches = [kernel.launch for kernel in self._kernels]
        return results


@contextmanager
def recorded() -> Iterator[Recording]:
    """Yield a new Recording, which this thread's allocations and launches fill in the block."""
    outer, thread.recording = thread.recording, Recording([], [])
    try:
        yield thread.recording
    finally:
        thread.recording = outer


def _somebody_watches() -> bool:
    """Return whether a profiler has hooks on Triton's launches or the stages of calls are timed."""
    runtime = _runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return stages_are_timed() or bool(
        getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    )


@cache
def _runtime() -> Any:
    """Return Triton's runtime knobs, which hold the launch hooks."""
    from triton import knobs

    return knobs.runtime


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h; its value, here one integer, is a union of 64 bytes."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    ]


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may start before the one ahead
# of it in the stream has ended.
_OVERLAPS = _LaunchAttribute(id=6, value=1)


class _BoundKernel:
    """A compiled kernel and its block of parameters, for tensors at addresses that change.

    Args:
        launched: the recorded launch.
        memory: the block, kept alive here.
        places: address of each parameter.
        maps: (address, number of its tensor) of each tensor map in the block.
    """

    def __init__(
        self, launched: Launched, memory: Any, places: list[int], maps: list[tuple[int, int]]
    ) -> None:
        compiled, metadata = launched.compiled, launched.compiled.metadata
        compiled._init_handles()
        self._kept = compiled, memory  # must live as long as the launch
        self._maps = maps

        attributes = (ctypes.addressof(_OVERLAPS), 1) if metadata.launch_pdl else (None, 0)
        self._config = _LaunchConfig(
            *launched.grid, 32 * metadata.num_warps, 1, 1, metadata.shared, None, *attributes
        )
        self._replace_address = cuda_driver().cuTensorMapReplaceAddress
        parameters = (ctypes.c_void_p * len(places))(*places)
        stream = ctypes.addressof(self._config) + _LaunchConfig.stream.offset

        # For the C++ replay: configuration, stream in it, function, parameters, tensor maps.
        self.places = (
            ctypes.addressof(self._config),
            stream,
            compiled.function,
            ctypes.addressof(parameters),
            maps,
        )

        # Returns the driver's status: 0 if the kernel has been launched.
        self.launch: Callable[[], int] = partial(
            cuda_driver().cuLaunchKernelEx,
            ctypes.byref(self._config),
            ctypes.c_void_p(compiled.function),
            ctypes.byref(parameters),
            None,
        )

    def follow(self, addresses: list[int], stream: int) -> None:
        """Make later launches use `stream` and read tensor maps of tensors at these `addresses`."""
        for place, number in self._maps:
            self._replace_address(place, addresses[number])
        self._config.stream = stream


def bind(launched: Launched | None, tensors: Sequence[Tensor], words: Any) -> _BoundKernel | None:
    """Return a launch bound to `tensors`, or None if only Triton's own launch can repeat it.

    `words` has one 64-bit word for each tensor, in which a replay writes the tensor's address.
    """
    if launched is None or (parameters := parameters_of(launched)) is None:
        return None

    numbers: dict[int, int] = {}  # address -> number of its tensor
    for number, x in enumerate(tensors):
        first = numbers.setdefault(x.data_ptr(), number)
        # Of two arguments at one address, a parameter does not tell which it is. They may be one
        # tensor in every such call, as boundaries of documents are: `replayed` tells such calls
        # apart.
        if first != number and (x is not tensors[first] or x.is_floating_point()):
            return None

    memory = (ctypes.c_byte * (PARAMETER_BYTES * (len(parameters) + 1)))()
    start = -(-ctypes.addressof(memory) // PARAMETER_BYTES) * PARAMETER_BYTES
    places = [start + PARAMETER_BYTES * index for index in range(len(parameters))]
    maps: list[tuple[int, int]] = []
    for index, (kind, value) in enumerate(parameters):
        if kind in STORED:
            STORED[kind].from_address(places[index]).value = value
            continue
        address = (value[0].base if kind == "map" else value).data_ptr()
        if address not in numbers or (kind == "map" and not _encode(places[index], *value)):
            return None
        if kind == "map":
            maps.append((places[index], numbers[address]))
        else:  # the tensor's word serves all kernels of the call
            places[index] = ctypes.addressof(words) + numbers[address] * ctypes.sizeof(
                ctypes.c_uint64
            )
    return _BoundKernel(launched, memory, places, maps)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield `values` with tuples flattened, in the order in which a kernel takes them."""
    for value in values:
        yield from _flat(value) if isinstance(value, tuple) else (value,)


def parameters_of(launched: Launched) -> list[tuple[str, Any]] | None:
    """Return the (kind, value) of each parameter of a launch; None if it cannot be bound.

    Kinds are those of PTX for numbers (u32, u64, f32), `pointer` for a tensor and `map` for a
    descriptor with its metadata. They follow from Triton's signature and must agree with the
    parameters that the PTX declares. A launch with clusters, a cooperative grid or scratch memory
    cannot be bound.
    """
    compiled, metadata = launched.compiled, launched.compiled.metadata
    plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    if not plain or metadata.global_scratch_size or metadata.profile_scratch_size:
        return None

    metas = iter(getattr(metadata, "tensordesc_meta", None) or ())
    parameters: list[tuple[str, Any]] = []
    for value, kind in zip(_flat(launched.arguments), _flat(compiled.src.signature.values())):
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            parameters.append(("pointer", value))
        elif kind in NUMBERS:
            parameters.append((NUMBERS[kind], value))
        elif kind.startswith("tensordesc") and (meta := next(metas, None)) is not None:
            parameters.append(("map", (value, meta)))
            parameters += [
                *(("u32", size) for size in value.shape),
                *(("u64", stride) for stride in value.strides),
            ]
        else:
            return None

    parameters += [("u64", 0)] * 2  # addresses of scratch memory: none
    kinds = ["u64" if kind == "pointer" else kind for kind, _ in parameters]
    return parameters if kinds == [*_declared_by(compiled.asm["ptx"])] else None


def _declared_by(ptx: str) -> Iterator[str]:
    """Yield the kind of each parameter that a kernel's PTX declares, a tensor map's as `map`."""
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    declaration = r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,\[]*(?:\[(\d+)\])?"
    for kind, size in re.findall(declaration, entry[1] if entry else ""):
        yield "map" if (kind, size) == ("b8", str(PARAMETER_BYTES)) else kind + size


def _encode(place: int, descriptor: Any, meta: Any) -> bool:
    """Write the tensor map of `descriptor` to the address `place`; return whether that worked."""
    if (
        meta["fp4_padded"]
        or descriptor.padding != "zero"
        or getattr(descriptor, "round_f32_to_tf32", False)
    ):
        return False

    rank, width = len(meta["block_size"]), meta["elem_size"]
    # the driver takes dimensions innermost first
    sizes, lengths = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    strides = sizes(*(stride * width for stride in reversed(descriptor.strides[:-1])), 0)
    status = cuda_driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        DRIVER_ELEMENT_TYPES.get(meta["elem_type"], meta["elem_type"]),
        rank,
        ctypes.c_void_p(descriptor.base.data_ptr()),
        sizes(*reversed(descriptor.shape)),
        strides,
        lengths(*reversed(meta["block_size"])),
        lengths(*(1,) * rank),
        NO_INTERLEAVE,
        meta["swizzle"],
        PROMOTE_TO_128_BYTES,
        FILL_WITH_ZEROS,
    )
    return status == 0


def _address_of(function: Any) -> int:
    """Return the address of a function of the driver's library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def cuda_driver() -> Any:
    """Return the CUDA driver's library; its functions return a CUresult, 0 for success."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuTensorMapReplaceAddress.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def have_context(device: int) -> None:
    """Make the CUDA context of `device` current if this thread has none.

    The driver launches in a current context only. PyTorch makes one current at a thread's first
    kernel; a thread that has only allocated has none.
    """
    if thread.has_context:
        return
    library, context, number = cuda_driver(), ctypes.c_void_p(), ctypes.c_int()
    library.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        library.cuDeviceGet(ctypes.byref(number), device)
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
        library.cuCtxSetCurrent(context)
    thread.has_context = True
