"""Attention's back ends: which run on this machine, and which one `auto` takes.

available_backends()                # {"triton": "ok", "compiled": "no C++ compiler", ...}
explain_backend(q, k)               # ("hopper", "hopper is the fastest of ours at head_dim 64 from ...")
refuse_hopper(q)                    # ValueError with the reason where the Hopper kernels cannot attend q
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cs336_systems.attention.hopper_table import HOPPER_FROM
from cs336_systems.attention.tiles.kernel_config import AttentionConfig
from cs336_systems.config import BYTES_PER_ELEMENT, DTYPES
from cs336_systems.device import (
    DeviceInfo,
    dotted,
    get_device_info,
    has_c_compiler,
    has_cxx_compiler,
    interpreter_is_on,
)

# Which run here

BACKENDS = ("reference", "compiled", "tiled", "triton_first", "triton", "hopper")
INTERPRETER_HINT = "set TRITON_INTERPRET=1 before the first import of triton kernels to run them on the CPU interpreter"
INTERPRETER_BFLOAT16 = (
    "Triton's CPU interpreter computes wrong bfloat16 products; use float32 or float16 there"
)
# the first with bfloat16 and asynchronous copies, which the kernels are written for
MIN_TRITON_CAPABILITY = (8, 0)
# sm_90a has instructions (wgmma, setmaxnreg) that neither older nor newer GPUs run
HOPPER_CAPABILITY = (9, 0)
# older Gluons launch partitions in another way; 3.8 has renamed copies by TMA
HOPPER_TRITON = ((3, 6), (3, 8))
HOPPER_KERNELS = "cs336_systems.attention.hopper.entry"
MIN_COMPILE_CAPABILITY = (7, 0)  # torch.compile's own bound on CUDA


def available_backends(info: DeviceInfo | None = None) -> dict[str, str]:
    """For each attention back end "ok" or the reason why it does not run on `info`'s device
    (default: the auto one).

    Looks for packages and compilers without importing or running them; only on a GPU that could run
    the Hopper kernels they are imported, to see whether Triton has what they are written in.
    """
    info = get_device_info() if info is None else info
    reasons = {
        "reference": None,
        "compiled": _compiled_reason(info),
        "tiled": None,
        "triton_first": _triton_reason(info),
        "triton": _triton_reason(info),
        "hopper": _hopper_reason(info),
    }
    return {name: reason or "ok" for name, reason in reasons.items()}


def _compiled_reason(info: DeviceInfo) -> str | None:
    if info.kind == "cpu":
        return None if has_cxx_compiler() else "no C++ compiler"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton on a GPU, and it is not installed"
    capability = info.compute_capability
    if capability is not None and capability < MIN_COMPILE_CAPABILITY:
        return f"torch.compile needs compute capability 7.0 or higher, {info.name} has {dotted(capability)}"
    return None if has_c_compiler() else "no C compiler, which triton needs to build its launchers"


def _triton_reason(info: DeviceInfo) -> str | None:
    if sys.platform != "linux":
        return f"triton kernels run on Linux, and this is {sys.platform}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreter_is_on():
        return None
    capability = info.compute_capability
    if capability is None or capability < MIN_TRITON_CAPABILITY:
        has = "is no NVIDIA GPU" if capability is None else f"has {dotted(capability)}"
        need = "triton kernels need a CUDA device of compute capability 8.0 or higher"
        return f"{need}, {info.name} {has}; {INTERPRETER_HINT}"
    return None if has_c_compiler() else "no C compiler, which triton needs to build its launchers"


def _hopper_reason(info: DeviceInfo) -> str | None:
    if info.compute_capability != HOPPER_CAPABILITY:
        capability = info.compute_capability
        has = "is no NVIDIA GPU" if capability is None else f"has {dotted(capability)}"
        return (
            f"hopper kernels need a GPU of compute capability 9.0 (H100, H200), {info.name} {has}"
        )
    if interpreter_is_on():
        return "hopper kernels have no interpreter; run without TRITON_INTERPRET"
    return _triton_reason(info) or _gluon_reason()


def _gluon_reason() -> str | None:
    """Why the installed Triton cannot compile the Hopper kernels, found by importing them."""
    try:
        version = importlib.import_module("triton").__version__
        lowest, end = HOPPER_TRITON
        if not lowest <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < end:
            return f"hopper kernels need triton from {dotted(lowest)} to below {dotted(end)}, this is {version}"
        importlib.import_module(HOPPER_KERNELS)
    except (ImportError, AttributeError) as error:
        return f"the Gluon of this triton lacks what the hopper kernels are written in ({error})"
    return None


# Which one to take

# Above this size of one head's score matrix, plain attention gives way to tiles. Its backward holds
# three such copies for every head and sequence of the batch: at 64 MiB (4096² in float32), 3 GiB
# for 16 heads. Below it the copies are affordable, and two large matmuls beat a Python loop over
# tiles.
MAX_REFERENCE_SCORE_BYTES = 64 * 2**20
AttentionLayout = Literal["dense", "block_mask", "packed"]  # what attention runs over
LAYOUT_WORDS = {
    "dense": "",
    "block_mask": " under a block mask",
    "packed": " over packed documents",
}
# (tokens, queries in all heads) from which on hopper was measured to be at least 1.18 times as fast
# where no work is divided among idle multiprocessors, by is_causal; additions in a fixed order take
# up to 16 % of that.
UNDIVIDED_FROM = {False: (1024, 16384), True: (2048, 65536)}
DIVIDED_HEAD_DIM = 128  # at most: wider heads have nothing divided, and one order of additions
# of columns of 16 bits; hopper copies inputs of other head dims first, which has not been timed
TMA_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the kernels of a back end take, where they run."""

    dtypes: tuple[str, ...]
    head_dim: int  # at most
    masked_head_dim: int  # at most, under a block mask
    block_size: tuple[int, int]  # of a mask's tiles, at least


TRITON_LIMITS = Limits(
    dtypes=("float32", "float16", "bfloat16"),
    head_dim=256,  # wider tiles do not fit in shared memory
    masked_head_dim=256,
    # on sm_90 triton 3.6 can miscompile a kernel with two dots of 16 or 32 rows
    block_size=(64, 64),
)
LIMITS = {
    "triton_first": TRITON_LIMITS,
    "triton": TRITON_LIMITS,
    "hopper": Limits(
        dtypes=("float16", "bfloat16"),
        head_dim=256,  # an accumulator of a wider head does not fit in a warp group's registers
        masked_head_dim=128,  # wider heads walk tiles of 64 keys, whose bits TMA cannot copy
        block_size=(64, 128),  # whole tiles of the kernels
    ),
}


def select_backend(
    *,
    device_kind: str,
    dtype: str,
    head_dim: int,
    batch_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    requested: str = "auto",
    layout: AttentionLayout = "dense",
    is_causal: bool = False,
    block_size: tuple[int, int] | None = None,
    longest: tuple[int, int] | None = None,
    deterministic: bool = False,
    available: dict[str, str],
) -> tuple[str, str]:
    """(name, reason) of the attention back end for these inputs; a pure function of its arguments.

    A back end requested by name is returned, or refused with a ValueError that says why; nothing
    else is tried. `auto` takes hopper where `hopper_from` says so, else triton on CUDA; elsewhere,
    and for what triton does not take (float64, head_dim over 256), tiled where one head's score
    matrix exceeds 64 MiB, else reference. It never takes compiled, which compiles again for new
    shapes.

    Args:
        device_kind: torch's device type of the inputs; on others than cuda triton is taken by name
        only.
        dtype, head_dim, seqlen_q, seqlen_k: of the inputs; a length may be 0.
        batch_heads: heads that queries have in the whole batch.
        layout, is_causal: what the call attends over; a block mask is no causal one.
        block_size: of a block mask; kernels are refused for one of smaller tiles than theirs.
        longest: queries and keys of the longest of packed documents, whose totals are seqlen_q and
        seqlen_k. deterministic: whether gradients must be bit-reproducible, for which hopper needs
        more queries to be faster. available: from `available_backends`, on the inputs' device.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if requested not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {requested!r}")

    def refusal(name: str) -> str | None:
        return _refusal(name, available, device_kind, dtype, head_dim, layout, block_size)

    if requested != "auto":
        if (why := refusal(requested)) is not None:
            raise ValueError(f"backend {requested!r} cannot be used: {why}")
        return requested, f"{requested} was asked for"

    by_name = ""
    if refusal("hopper") is None:
        limits = hopper_from(layout, is_causal, head_dim, deterministic)
        by_name = "; hopper has not been measured to be faster there"
        if limits is not None:
            tokens, queries = limits
            if min(longest or (seqlen_q, seqlen_k)) >= tokens and batch_heads * seqlen_q >= queries:
                where = f"head_dim {head_dim}{LAYOUT_WORDS[layout]} from {tokens} tokens"
                return (
                    "hopper",
                    f"hopper is the fastest of ours at {where} and {queries} queries in all heads on",
                )
            by_name = (
                f"; hopper is faster from {tokens} tokens and {queries} queries in all heads on"
            )
            if limits != hopper_from(layout, is_causal, head_dim):
                by_name += ", where deterministic=True divides no work"
    why_not_triton = (
        refusal("triton") if device_kind == "cuda" else f"the inputs are on {device_kind}"
    )
    if why_not_triton is None:
        return "triton", f"triton serves {dtype} with head_dim {head_dim} on this GPU{by_name}"
    score_bytes = seqlen_q * seqlen_k * BYTES_PER_ELEMENT[dtype]
    limit = f"{MAX_REFERENCE_SCORE_BYTES / 2**20:g} MiB"
    size = "one head's score matrix"
    # a number in words would be a constant, and each length compiled anew
    if not torch.compiler.is_compiling():
        size += f" takes {score_bytes / 2**20:.1f} MiB"
    if score_bytes > MAX_REFERENCE_SCORE_BYTES:
        return (
            "tiled",
            f"tiled, not triton ({why_not_triton}); {size}, more than {limit}, too large to store",
        )
    return (
        "reference",
        f"reference, not triton ({why_not_triton}); {size}, at most {limit}, cheap to store",
    )


def hopper_from(
    layout: AttentionLayout, is_causal: bool, head_dim: int, deterministic: bool = False
) -> tuple[int, int] | None:
    """The shortest length and the fewest queries in all heads from which on hopper is faster than
    triton.

    By HOPPER_FROM, which is made from measurements; None where it is not known to be faster at any
    size. Those of few queries had their work divided: head dims between the measured ones, which
    divide less of it, and `deterministic` backwards, which divide nothing, need UNDIVIDED_FROM.
    """
    if head_dim % TMA_MULTIPLE:
        return None
    smallest = HOPPER_FROM[layout, is_causal][0][0]
    for measured, limits in HOPPER_FROM[layout, is_causal]:
        if smallest <= head_dim <= measured:
            divides = head_dim == measured and not deterministic
            if limits is None or divides or layout != "dense" or head_dim > DIVIDED_HEAD_DIM:
                return limits
            tokens, queries = UNDIVIDED_FROM[is_causal]
            return max(limits[0], tokens), max(limits[1], queries)
    return None


def _refusal(
    name: str,
    available: dict[str, str],
    device_kind: str,
    dtype: str,
    head_dim: int,
    layout: AttentionLayout = "dense",
    block_size: tuple[int, int] | None = None,
) -> str | None:
    """Why a back end cannot serve these inputs; None where it can."""
    state = available.get(name, "it is not among the available back ends")
    if state != "ok":
        return state
    if name not in LIMITS:
        return None
    # lengths and head dims are for the kernel to refuse
    if name == "triton_first" and layout != "dense":
        return (
            "the first kernel takes neither block masks nor packed documents; backend 'triton' does"
        )
    limits, kernels = LIMITS[name], "hopper" if name == "hopper" else "triton"
    if block_size is not None and (
        block_size[0] < limits.block_size[0] or block_size[1] < limits.block_size[1]
    ):
        return f"{kernels} walks lists of tiles of at least {limits.block_size}, and the mask's are {block_size}"
    if dtype not in limits.dtypes:
        return f"{kernels} takes {', '.join(limits.dtypes)}, not {dtype}"
    most = limits.head_dim if block_size is None else limits.masked_head_dim
    if head_dim > most:
        where = LAYOUT_WORDS[layout] if most < limits.head_dim else ""
        return f"{kernels} takes a head_dim of at most {most}{where}, not {head_dim}"
    return INTERPRETER_BFLOAT16 if device_kind != "cuda" and dtype == "bfloat16" else None


def hopper_refusal(q: Tensor) -> str | None:
    """Why q (..., head_dim), and what goes with it, cannot be attended by the Hopper kernels; None
    if it can.
    """
    if q.device.type not in ("cpu", "cuda"):
        return f"hopper kernels run on CUDA devices, and the inputs are on {q.device.type}"
    dtype = str(q.dtype).removeprefix("torch.")
    return _refusal("hopper", available_here(q.device), q.device.type, dtype, q.shape[-1])


def refuse_hopper(q: Tensor) -> None:
    """ValueError where the Hopper kernels cannot attend q (..., head_dim)."""
    if (why := hopper_refusal(q)) is not None:
        raise ValueError(f"q cannot be attended by the Hopper kernels: {why}")


def available_here(device: torch.device) -> dict[str, str]:
    """`available_backends` of one of this machine's devices, asked once for each state of Triton's
    interpreter.
    """
    return _asked_once(device, interpreter_is_on())


# What `torch.compiler.assume_constant_result` does, but that loads the compiler: half of the time
# of importing this.
available_here._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _asked_once(device: torch.device, interpreter: bool) -> dict[str, str]:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return available_backends(get_device_info(device.type))


# Of a call


def explain_backend(
    q: Tensor,
    k: Tensor,
    *,
    backend: str = "auto",
    is_causal: bool = False,
    layout: AttentionLayout = "dense",
    block_size: tuple[int, int] | None = None,
    longest: tuple[int, int] | None = None,
    deterministic: bool | None = None,
    config: AttentionConfig | None = None,
) -> tuple[str, str]:
    """(name, reason) of the back end that `flash_attention` uses for these inputs; ValueError if it
    refuses.

    `layout` is `block_mask` for a call with one, of this `block_size`, and `packed` for
    `flash_attention_varlen`, whose longest document has `longest` queries and keys. A `config` is
    for `triton` alone, which `auto` then takes. `deterministic` is as in `flash_attention`: `auto`
    then takes `hopper` for more queries only.
    """
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if config is not None:
        if not isinstance(config, AttentionConfig):
            raise TypeError(
                f"config must be an AttentionConfig or None, got {type(config).__name__}"
            )
        if backend not in ("auto", "triton"):
            raise ValueError(
                f"config chooses the tiles of backend 'triton', got backend {backend!r}"
            )
        backend = "triton"
    asked = Asked(
        q.device,
        q.dtype,
        q.shape,
        k.shape,
        backend,
        layout,
        is_causal,
        block_size,
        longest,
        is_deterministic(deterministic),
    )
    if torch.compiler.is_compiling():
        return _answer(asked)
    try:
        return _answer_once(asked, interpreter_is_on())
    except TypeError:  # what cannot be hashed: sizes that are symbols, a backend that is no name
        return _answer(asked)


class Asked(NamedTuple):
    """All that the choice of a back end depends on, beside what runs on the device."""

    device: torch.device
    dtype: torch.dtype
    shape_q: torch.Size
    shape_k: torch.Size
    backend: str
    layout: AttentionLayout
    is_causal: bool
    block_size: tuple[int, int] | None
    longest: tuple[int, int] | None
    deterministic: bool


@lru_cache(maxsize=4096)
def _answer_once(asked: Asked, interpreter: bool) -> tuple[str, str]:
    """`_answer`, found once for equal calls and each state of Triton's interpreter: short calls
    wait for the host.
    """
    return _answer(asked)


def _answer(asked: Asked) -> tuple[str, str]:
    if asked.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q must be on a cpu or cuda device, got {asked.device}")
    return select_backend(
        device_kind=asked.device.type,
        dtype=str(asked.dtype).removeprefix("torch."),
        head_dim=asked.shape_q[-1],
        # `numel()` would fix a batch that torch.export leaves open
        batch_heads=math.prod(asked.shape_q[:-2]),
        seqlen_q=asked.shape_q[-2],
        seqlen_k=asked.shape_k[-2],
        requested=asked.backend,
        layout=asked.layout,
        is_causal=asked.is_causal,
        block_size=asked.block_size,
        longest=asked.longest,
        deterministic=asked.deterministic,
        available=available_here(asked.device),
    )


def is_deterministic(asked: bool | None) -> bool:
    """Whether gradients must be bit-reproducible: as asked, or as PyTorch has been told."""
    return torch.are_deterministic_algorithms_enabled() if asked is None else asked
