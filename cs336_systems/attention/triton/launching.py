"""Around a launch: what all launchers pass; say which configuration runs; go to a smaller one where it does not fit.

`CS336_ATTN_LOG=1`, read once a process, prints a line on stderr before the launch, each distinct line once:

    attention: kernel=dq head_dim=64 dtype=float16 seqlen_q=4096 seqlen_k=4096 arch=sm_90 config=sm90_dq_128x64_w8_s3
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

from cs336_systems.attention.tiles import KernelConfig, head_tile, smaller_config
from cs336_systems.attention.triton.launcher import KEPT_SHAPES, KeptLaunches, Launched, have_context
from cs336_systems.device import interpreter_is_on
from cs336_systems.measure.stages import stages_are_timed

LOG_SWITCH = "CS336_ATTN_LOG"
POINTER_ALIGNMENT_BYTES = 16  # Triton loads four words at a time from such a pointer
MAX_GROUPED_ROWS = 64  # of a tile of 16-bit elements on sm_90; smaller ones take two or four
OVERLAPPING = 90  # from this architecture on, sm_90, a kernel may start while the one before it ends
MAX_COLUMN_OFFSET = 2**31
MAX_COMPILED = 4096  # launches that differ in shapes or options and are remembered
_compiled: dict[tuple[Hashable, ...], tuple[Any, list[Hashable]]] = {}  # the kernel and its compile-time constants

Result = TypeVar("Result")
Fit = tuple[KernelConfig, int, int, int | None]  # configuration, head dim, bytes per element, device
_smaller: dict[Fit, KernelConfig] = {}  # what runs in the place of what did not fit


@cache
def tile_options(config: KernelConfig) -> dict[str, int | str]:
    """What a kernel is told of its configuration."""
    return {
        "Q_TILE_SIZE": config.query_tile, "K_TILE_SIZE": config.key_tile, "PRECISION": config.precision,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


@cache
def head_options(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """What a kernel is told of its heads."""
    return {"GROUP": heads // kv_heads, "D": head_dim, "D_TILE": head_tile(head_dim)}


def overlap_options(device: torch.device, *, follows: bool = False) -> dict[str, int | str]:
    """What is said of overlapping to a kernel on `device`, the first of a call or one that `follows` another.

    Those that follow are launched while the one before still runs, and wait for it by `await_previous`: between the two
    comes nothing else. Nothing overlaps while stages are timed, since events lie between them.
    """
    overlaps = not interpreter_is_on() and not stages_are_timed() and _can_overlap(device)
    return {"OVERLAP": overlaps, "launch_pdl": True} if overlaps and follows else {"OVERLAP": overlaps}


def _can_overlap(device: torch.device) -> bool:
    if device.type == "cuda":
        return _gpu_can_overlap(device)
    target = driver.active.get_current_target()  # of tensors without storage, for which kernels are compiled only
    return target.backend == "cuda" and target.arch >= OVERLAPPING


@cache
def _gpu_can_overlap(device: torch.device) -> bool:
    major, minor = torch.cuda.get_device_capability(device)
    return torch.version.hip is None and 10 * major + minor >= OVERLAPPING


def launch(
    kernel: Any, grid: tuple[int], tensors: Sequence[Any], numbers: tuple[float, ...], options: Mapping[str, Hashable]
) -> Launched | None:
    """`kernel[grid](*tensors, *numbers, **options)`, at a third of the host's time from the second time on.

    `tensors`, of which the last is one, may be descriptors of such, Triton's or Gluon's. Returns what was launched;
    None in the interpreter, and where somebody watches the compilation and stops there.

    Triton compiles a kernel anew for other dtypes and tiles of descriptors, for pointers that 16 bytes do not divide,
    for numbers that are 1 or that 16 does not divide, and classifies every argument of every launch to find out. Here
    what was compiled is found by the dtypes, the tiles, the pointers' remainders and the integers themselves, which say
    more than their classes.
    """
    arrays = [x if isinstance(x, Tensor) else x.base for x in tensors]
    key = (
        kernel.fn, arrays[-1].get_device(), tuple([x.dtype for x in arrays]),
        tuple([tuple(x.block_shape) for x in tensors if not isinstance(x, Tensor)]),
        tuple([x.data_ptr() % POINTER_ALIGNMENT_BYTES for x in arrays]),
        tuple([x for x in numbers if type(x) is int]), tuple(options.values()),
    )  # fmt: skip
    known = _compiled.get(key)
    if known is not None:
        compiled, constants = known
        compiled[*grid, 1, 1](*tensors, *numbers, *constants)
        return Launched(compiled, (*grid, 1, 1), (*tensors, *numbers))
    compiled = kernel[grid](*tensors, *numbers, **options)
    if compiled is None:
        return None
    if len(_compiled) >= MAX_COMPILED:
        _compiled.clear()
    constants = [options[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]]
    _compiled[key] = compiled, constants
    return Launched(compiled, (*grid, 1, 1), (*tensors, *numbers))


@lru_cache(maxsize=KEPT_SHAPES)
def kept_launches(*facts: Any) -> KeptLaunches:
    """The launches of calls with these facts: shapes, strides, options, all but the addresses."""
    return KeptLaunches()


def grid_of(config: KernelConfig, q: Tensor, k: Tensor) -> tuple[int]:
    """A program for each tile of each head: of queries, or under a dkdv configuration of keys and their heads."""
    x, tile = (k, config.key_tile) if config.kernel == "dkdv" else (q, config.query_tile)
    batch, heads, rows, _ = x.shape
    return (num_tiles(rows, tile) * batch * heads,)


def within_reach(x: Any) -> Any:
    """`x`, or a contiguous copy of a tensor whose columns are too far apart: kernels count those in 32 bits."""
    if isinstance(x, Tensor) and x.ndim and (x.shape[-1] - 1) * x.stride(-1) >= MAX_COLUMN_OFFSET:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def num_tiles(rows: int, tile: int) -> int:
    """`rows` over `tile`, rounded up. Triton's cdiv, which kernels can call too, takes the host ten times as long."""
    return -(-rows // tile)


def contiguous_like(x: Tensor) -> Tensor:
    """An uninitialised tensor of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Where a forward of q (batch, heads, queries, head_dim) writes: contiguous O in q's dtype, and L in float32."""
    return contiguous_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def rows_of_groups(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """q (batch, heads, queries, head_dim) as a forward without a mask reads it: few queries together in tiles.

    Query heads that share a key head are then rows of one, (batch, kv_heads, group * queries, head_dim), a view: their
    programs would read the same keys each and leave the rest of their tile empty, as where one token is generated. Else
    q itself. O and L are contiguous, so their memory is the same either way.
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


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 0 of what is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current CUDA device, which need not be x's, in a context that this thread has."""
    if not x.is_cuda:
        return nullcontext()
    if x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    have_context(x.device.index)
    return nullcontext()


def launch_fitting(
    launch: Callable[..., Result],
    configs: tuple[KernelConfig, ...],
    q: Tensor,
    *,
    seqlen_q: int,
    seqlen_k: int,
    name: Callable[[KernelConfig], str] = lambda config: config.name,
) -> Result:
    """`launch(*configs)`, with smaller configurations where Triton finds that these do not fit the GPU.

    `q` has its head dim last; `name` is what the log calls a configuration. A launch of several kernels does not say
    which one failed: the one with the largest tiles is made smaller. Each step is one warning, the first time; later
    calls start from what fitted. Raises Triton's OutOfResources when nothing smaller is left.
    """
    head_dim, bytes_per_element = q.shape[-1], q.element_size()

    def fit(config: KernelConfig) -> Fit:
        return config, head_dim, bytes_per_element, q.device.index

    def resolve(config: KernelConfig) -> KernelConfig:
        while fit(config) in _smaller:
            config = _smaller[fit(config)]
        return config

    while True:
        configs = tuple(resolve(config) for config in configs)
        if _log_is_on():
            for config in configs:
                _log_launch(config.kernel, name(config), q, seqlen_q, seqlen_k)
        try:
            return launch(*configs)
        except OutOfResources as error:
            steps = {config: smaller_config(config, bytes_per_element) for config in configs}
            possible = {config: smaller for config, smaller in steps.items() if smaller is not None}
            if not possible:
                raise
            config = max(possible, key=lambda config: config.shared_memory_bytes(head_dim, bytes_per_element))
            _smaller[fit(config)] = possible[config]
            message = f"{config.name} does not fit this GPU ({error}): using {possible[config].name}"
            warnings.warn(message, stacklevel=2)


def _log_launch(kernel: str, config: str, q: Tensor, seqlen_q: int, seqlen_k: int) -> None:
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(q.device)) if q.is_cuda else "interpreter"
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
