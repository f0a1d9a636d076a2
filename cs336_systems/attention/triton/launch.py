"""How a kernel is launched: what it is given, and every launch and allocation, so that a call can
be replayed.

    output, lse = empty_results(q)              # memory that a replay allocates again
    launch(kernel, grid, (*described(config, q=q, k=k, v=v), output, lse), numbers, options)

With a descriptor Hopper's copy engine (TMA) reads a tile in one instruction: a thread computes no
addresses and holds none in registers, and rows or columns past the end arrive as zeros. The engine
wants rows that are contiguous and start at multiples of 16 bytes; other inputs take the pointer
kernels.

Packed documents, (rows, heads, head_dim), are described as if a sequence began at each row: batch
element r is the tensor from row r on. So a kernel reads a document as it reads any sequence, with
its first row for the batch element. The engine knows the ends of neither the document nor, but for
r = 0, the tensor: it may be asked for whole tiles of a document alone, and those that its end cuts
are read by pointers.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.choose import INTERPRETER_BFLOAT16, INTERPRETER_HINT
from cs336_systems.attention.masks.tiles import TileLists
from cs336_systems.attention.replay import Launched, have_context, thread
from cs336_systems.attention.tiles import KernelConfig, head_tile, smaller_config
from cs336_systems.attention.tiles.choice import Walks, heads_at_a_time
from cs336_systems.attention.tiles.kernel_config import (
    L2_SHARE_BYTES,
    TMA_ALIGNMENT_BYTES,
    tma_reads_rows,
)
from cs336_systems.attention.triton.steps import Tiles
from cs336_systems.measure.stages import stages_are_timed

# Shapes of what launchers take and return; values have the shape of keys.
Queries = Float[Tensor, "batch heads queries head_dim"]
Keys = Float[Tensor, "batch kv_heads keys head_dim"]
Rows = Float[Tensor, "batch heads queries"]  # a number for each query: L, delta
PackedQueries = Float[Tensor, "total_queries heads head_dim"]
PackedKeys = Float[Tensor, "total_keys kv_heads head_dim"]
PackedRows = Float[Tensor, "heads total_queries"]
Boundaries = Int[Tensor, " documents_plus_1"]

QUERY_OPERANDS = ("q", "grad_output")
MAX_GROUPED_ROWS = 64  # of a tile of 16-bit elements on sm_90; smaller ones take two or four
MAX_COLUMN_OFFSET = 2**31
# What `heads_together` assumes of any configuration: programs that a multiprocessor holds, and the
# steps that one takes beside its own. With these numbers it takes, of 18 kernels on an H200 (triton
# 3.6.0, 2026-11-29), as many heads as were measured to be fastest, or within 1 % of it.
RESIDENT, START_STEPS = 2, 2


LOG_SWITCH = "CS336_ATTN_LOG"
# the first architecture, sm_90, on which a kernel may start while the one before it ends
OVERLAPS_FROM = 90
Results = TypeVar("Results")
_interpreting = threading.RLock()  # Triton's interpreter keeps the program that it is at in globals


# Descriptors


def describable(*tensors: Tensor) -> bool:
    """Whether TMA can read all of these (batch, heads, rows, head_dim) or packed tensors as they
    are.
    """
    for x in tensors:
        if x.data_ptr() % TMA_ALIGNMENT_BYTES:
            return False
        width = x.element_size()
        if x.is_contiguous():
            if x.shape[-1] * width % TMA_ALIGNMENT_BYTES:
                return False
            continue
        if x.stride(-1) != 1:
            return False
        for size, stride in zip(x.shape[:-1], x.stride()):
            if size != 1 and (stride <= 0 or stride * width % TMA_ALIGNMENT_BYTES):
                return False
    return True


def rows_are_aligned(x: Tensor) -> bool:
    """Whether TMA can read a contiguous copy of x."""
    return tma_reads_rows(x.shape[-1], x.element_size())


def described(
    config: KernelConfig, *, packed: bool = False, **operands: Tensor
) -> list[Tensor | TensorDescriptor]:
    """`operands` as a kernel under `config` takes them: themselves, or descriptors of tiles where
    the config says TMA.

    `packed`: of (rows, heads, head_dim) tensors batch element r begins at row r. ValueError naming
    the operand that TMA cannot read.
    """
    if not config.tma:
        return list(operands.values())
    found: list[Tensor | TensorDescriptor] = []
    for name, x in operands.items():
        if not describable(x):
            raise ValueError(
                f"{config.name} reads tiles by TMA, which needs {name} with contiguous rows at multiples of "
                f"{TMA_ALIGNMENT_BYTES} bytes, got strides {tuple(x.stride())} of {x.element_size()} bytes"
            )
        shape, strides = tuple(x.shape), x.stride()
        if packed:
            shape, strides = (
                (shape[0], shape[1], shape[0], shape[2]),
                (strides[0], strides[1], strides[0], strides[2]),
            )
        rows = config.query_tile if name in QUERY_OPERANDS else config.key_tile
        block = [1, 1, rows, head_tile(shape[-1])]
        found.append(
            TensorDescriptor(
                x, list(shape), described_strides(shape, strides, x.element_size()), block
            )
        )
    return found


def described_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], bytes_per_element: int
) -> list[int]:
    """A tensor's strides; that of a dimension of one element is any number, and descriptors want an
    aligned one.
    """
    aligned = TMA_ALIGNMENT_BYTES // bytes_per_element
    return [stride if size > 1 else aligned for stride, size in zip(strides[:-1], shape)] + [1]


# Grids and compile-time options


def num_tiles(rows: int, tile: int) -> int:
    """`rows` over `tile`, rounded up."""
    return -(-rows // tile)


def heads_together(
    batch_heads: int,
    streamed: Tensor,
    group: int = 1,
    share: int = L2_SHARE_BYTES,
    *,
    walks: Walks | None = None,
    block_steps: float = 1,
) -> int:
    """Return how many heads `tile_of_program` takes at a time, a power of two.

    Their programs read the rows of two tensors. `streamed` (..., rows, head_dim) is one of the two,
    of which a program reads `group` heads, and `share` bytes of the L2 cache are for all of them.
    It is for tiles of unequal length: of equal ones, one head after the other is faster. `walks`,
    of `block_steps` steps a block, are those of one head of a causal call: more heads than fit in
    the cache are taken where the call then ends sooner. A power of two, since Triton compiles a
    kernel anew for 1 and for multiples of 16.
    """
    head_bytes = 2 * streamed.shape[-2] * streamed.shape[-1] * streamed.element_size() * group
    together = min(batch_heads, max(1, share // head_bytes))
    multiprocessors = num_multiprocessors(streamed.device)
    if walks is not None and multiprocessors:
        together = heads_at_a_time(
            walks,
            heads=batch_heads,
            fitting=2 ** (together.bit_length() - 1),
            block_steps=block_steps,
            start_steps=START_STEPS,
            places=RESIDENT * multiprocessors,
        )
    return 2 ** (together.bit_length() - 1)


def tile_options(
    config: KernelConfig, head_dim: int, lists: TileLists | None = None
) -> dict[str, Any]:
    """What a kernel is told of its configuration, and of the tiles of a block mask."""
    block_size, stages = (0, 0), config.num_stages
    if lists is not None:
        # A tile's address hangs on a load of its index, and Triton spreads the two loads over its
        # stages: it takes these many for as many tiles in flight as the dense kernels have with
        # config.num_stages.
        block_size, stages = lists.block_size, 2 * stages - 1
    tiles = Tiles(
        D=head_dim, D_TILE=head_tile(head_dim), Q_TILE_SIZE=config.query_tile, K_TILE_SIZE=config.key_tile,
        PRECISION=config.precision, Q_BLOCK=block_size[0], K_BLOCK=block_size[1],
    )  # fmt: skip
    return {"TILES": tiles, "num_warps": config.num_warps, "num_stages": stages}


# Memory


def empty_results(q: Queries) -> tuple[Queries, Rows]:
    """Where a forward of q writes: contiguous O in q's dtype, and L in float32."""
    output = empty(q.shape, q.dtype, q.device)
    return output, empty(q.shape[:3], torch.float32, q.device)


def within_reach(x: Any) -> Any:
    """`x`, or a contiguous copy of a tensor whose columns are too far apart: kernels count those in
    32 bits.
    """
    if isinstance(x, Tensor) and x.ndim and (x.shape[-1] - 1) * x.stride(-1) >= MAX_COLUMN_OFFSET:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def rows_of_groups(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """q (batch, heads, queries, head_dim) as a forward without a mask reads it: few queries
    together in tiles.

    Query heads that share a key head are then rows of one, (batch, kv_heads, group * queries,
    head_dim), a view: their programs would read the same keys each and leave the rest of their tile
    empty, as where one token is generated. Else q itself. O and L are contiguous, so their memory
    is the same either way.
    """
    batch, heads, queries, head_dim = q.shape
    kv_heads = k.shape[1]
    if heads == kv_heads or is_causal or heads // kv_heads * queries > MAX_GROUPED_ROWS:
        return q
    stride_b, stride_h, stride_s, stride_d = q.stride()
    if queries > 1 and stride_h != queries * stride_s:
        return q
    group = heads // kv_heads
    row_stride = stride_h if queries == 1 else stride_s
    size = (batch, kv_heads, group * queries, head_dim)
    return q.as_strided(size, (stride_b, stride_h * group, row_stride, stride_d))


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 0 of what is none."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 0
    )


# Launching


def launch(
    kernel: Any,
    grid: tuple[int],
    tensors: Sequence[Any],
    numbers: tuple[Any, ...],
    options: Mapping[str, Hashable],
) -> None:
    """`kernel[grid](*tensors, *numbers, **options)`; tensors may be descriptors, Triton's or
    Gluon's, and one of numbers a tuple of them.
    """
    compiled = kernel[grid](*tensors, *numbers, **options)
    if (record := thread.recording) is not None:  # nothing is compiled in the interpreter
        launched = (
            None if compiled is None else Launched(compiled, (*grid, 1, 1), (*tensors, *numbers))
        )
        record.launches.append(launched)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Contiguous uninitialised memory that a replay allocates again. What is filled by torch must
    come from torch.
    """
    buffer = torch.empty(shape, dtype=dtype, device=device)
    if (record := thread.recording) is not None:
        record.buffers.append(buffer)
    return buffer


def empty_like(x: Tensor) -> Tensor:
    """`empty` with x's shape, dtype and device; contiguous whatever x's strides are."""
    return empty(x.shape, x.dtype, x.device)


def launch_fitting(
    run: Callable[..., Results], configs: Mapping[str, KernelConfig], q: Tensor, *, seqlen_q: int, seqlen_k: int,
    name: Callable[[KernelConfig], str] = lambda config: config.name,
) -> Results:  # fmt: skip
    """`run(**configs)` on q's device, with smaller configurations where these do not fit the GPU.

    `q` has its head dim last; `name` is what the log calls a configuration. A launch of several
    kernels does not say which one failed: the one with the largest tiles is made smaller, with a
    warning. Raises ValueError where Triton cannot run, and its OutOfResources when nothing smaller
    is left.
    """
    if q.dtype == torch.bfloat16 and knobs.runtime.interpret:
        raise ValueError(INTERPRETER_BFLOAT16)
    if not q.is_cuda and not knobs.runtime.interpret:
        raise ValueError(
            f"q is on {q.device}, and Triton kernels run on CUDA devices; {INTERPRETER_HINT}"
        )
    # the interpreter launches on no device
    with _interpreting if knobs.runtime.interpret else on_device_of(q):
        while True:
            if _log_is_on():
                for config in configs.values():
                    log_launch(config.kernel, name(config), q, seqlen_q, seqlen_k)
            try:
                return run(**configs)
            except OutOfResources as error:
                configs = _shrink_largest(configs, q, error)
                if (record := thread.recording) is not None:
                    record.launches.clear()
                    record.buffers.clear()


def _shrink_largest(
    configs: Mapping[str, KernelConfig], q: Tensor, error: OutOfResources
) -> Mapping[str, KernelConfig]:
    smaller = {name: smaller_config(config, q.element_size()) for name, config in configs.items()}
    possible = {name: config for name, config in smaller.items() if config is not None}
    if not possible:
        raise error
    largest = max(
        possible, key=lambda name: configs[name].shared_memory_bytes(q.shape[-1], q.element_size())
    )
    old, new = configs[largest].name, possible[largest].name
    warnings.warn(f"{old} does not fit this GPU ({error}): using {new}", stacklevel=3)
    return {**configs, largest: possible[largest]}


def overlap_options(device: torch.device, *, follows: bool = False) -> dict[str, int | str]:
    """What is said of overlapping to a kernel on `device`, the first of a call or one that
    `follows` another.

    Kernels that follow start while the one before still runs, and wait for it by `await_previous`:
    between the two comes nothing else. Nothing overlaps while stages are timed, since events lie
    between them.
    """
    overlaps = not knobs.runtime.interpret and not stages_are_timed() and _can_overlap(device)
    return (
        {"OVERLAP": overlaps, "launch_pdl": True} if overlaps and follows else {"OVERLAP": overlaps}
    )


def _can_overlap(device: torch.device) -> bool:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return torch.version.hip is None and 10 * major + minor >= OVERLAPS_FROM
    # of tensors without storage, for which kernels are compiled only
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= OVERLAPS_FROM


@contextmanager
def on_device_of(x: Tensor) -> Iterator[None]:
    """Makes x's device the current CUDA device, on which Triton launches, in a context that this
    thread has.
    """
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        if x.is_cuda:
            have_context(x.device.index)
        yield


def log_launch(kernel: str, config: str, q: Tensor, seqlen_q: int, seqlen_k: int) -> None:
    """With `CS336_ATTN_LOG=1`, read once a process, a line on stderr; each distinct line once:

    attention: kernel=dq head_dim=64 dtype=float16 seqlen_q=4096 seqlen_k=4096 arch=sm_90
    config=sm90_dq_128x64_w8_s3
    """
    if not _log_is_on():
        return
    arch = (
        "sm_{}{}".format(*torch.cuda.get_device_capability(q.device))
        if q.is_cuda
        else "interpreter"
    )
    _print_once(
        f"attention: kernel={kernel} head_dim={q.shape[-1]} dtype={str(q.dtype).removeprefix('torch.')} "
        f"seqlen_q={seqlen_q} seqlen_k={seqlen_k} arch={arch} config={config}"
    )


@cache
def _log_is_on() -> bool:
    return os.environ.get(LOG_SWITCH, "") == "1"


@cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
