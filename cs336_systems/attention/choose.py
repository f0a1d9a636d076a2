"""Attention's back ends: which run on this machine, and which one `auto` takes.

A block mask that is dense, or long documents, has left for these kernels before (`api.py`).

available_backends()     # {"triton": "ok", "compiled": "no C++ compiler", ...}
explain_backend(q, k)    # ("hopper", "hopper is the fastest of ours at head_dim 64 from ...")
refuse_hopper(q)         # ValueError with the reason if the Hopper kernels cannot attend q
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
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

# Which back ends run on this machine

BACKENDS = ("reference", "compiled", "tiled", "triton_first", "triton", "hopper")
INTERPRETER_HINT = (
    "set TRITON_INTERPRET=1 before the first import of triton kernels "
    "to run them on the CPU interpreter"
)
INTERPRETER_BFLOAT16 = (
    "Triton's CPU interpreter computes wrong bfloat16 products; use float32 or float16 there"
)
# The first GPUs with bfloat16 and asynchronous copies, which the kernels are written for.
MIN_TRITON_CAPABILITY = (8, 0)
# sm_90a has instructions (wgmma, setmaxnreg) that neither older nor newer GPUs run.
HOPPER_CAPABILITY = (9, 0)
# Versions from the first to below the second: older Gluons launch partitions in another way, and
# 3.8 has renamed copies by TMA.
HOPPER_TRITON = ((3, 6), (3, 8))
HOPPER_KERNELS = "cs336_systems.attention.hopper.entry"
MIN_COMPILE_CAPABILITY = (7, 0)  # torch.compile's own bound on CUDA
NO_C_COMPILER = "no C compiler, which triton needs to build its launchers"


def available_backends(info: DeviceInfo | None = None) -> dict[str, str]:
    """Return for each attention back end "ok", or the reason why it does not run on a device.

    `info` describes the device; by default it is that of `get_device_info()`. Packages and
    compilers are looked for without importing or running them. Only on a GPU that could run the
    Hopper kernels are these imported, to see whether Triton has the Gluon features they use.
    """
    info = get_device_info() if info is None else info
    capability = info.compute_capability
    triton = _triton_reason(info)

    # torch.compile
    compiled = None
    if info.kind == "cpu":
        compiled = None if has_cxx_compiler() else "no C++ compiler"
    elif importlib.util.find_spec("triton") is None:
        compiled = "torch.compile needs triton on a GPU, and it is not installed"
    elif capability is not None and capability < MIN_COMPILE_CAPABILITY:
        compiled = (
            "torch.compile needs compute capability 7.0 or higher, "
            f"{info.name} has {dotted(capability)}"
        )
    elif not has_c_compiler():
        compiled = NO_C_COMPILER

    # the Hopper kernels
    if capability != HOPPER_CAPABILITY:
        has = "is no NVIDIA GPU" if capability is None else f"has {dotted(capability)}"
        hopper: str | None = (
            f"hopper kernels need a GPU of compute capability 9.0 (H100, H200), {info.name} {has}"
        )
    elif interpreter_is_on():
        hopper = "hopper kernels have no interpreter; run without TRITON_INTERPRET"
    else:
        hopper = triton or _gluon_reason()

    reasons = {
        "reference": None,
        "compiled": compiled,
        "tiled": None,
        "triton_first": triton,
        "triton": triton,
        "hopper": hopper,
    }
    return {name: reason or "ok" for name, reason in reasons.items()}


def _triton_reason(info: DeviceInfo) -> str | None:
    """Return why Triton kernels do not run on a device; None if they do, or are interpreted."""
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
    return None if has_c_compiler() else NO_C_COMPILER


def _gluon_reason() -> str | None:
    """Return why the installed Triton cannot compile the Hopper kernels, by importing them.

    None if it can.
    """
    try:
        version = importlib.import_module("triton").__version__
        lowest, end = HOPPER_TRITON
        if not lowest <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < end:
            return (
                f"hopper kernels need triton from {dotted(lowest)} to below {dotted(end)}, "
                f"this is {version}"
            )
        importlib.import_module(HOPPER_KERNELS)
    except (ImportError, AttributeError) as error:
        return f"the Gluon of this triton lacks what the hopper kernels are written in ({error})"
    return None


# Which back end to take

# Above this size of one head's score matrix, `auto` takes `tiled` in place of `reference`. The
# backward of plain attention holds three such copies for every head and sequence of the batch: at
# 64 MiB (4096² in float32), 3 GiB for 16 heads. Below it the copies are affordable, and two large
# matmuls beat a Python loop over tiles.
MAX_REFERENCE_SCORE_BYTES = 64 * 2**20
# All keys (or the causal ones), the tiles of a block mask, or packed documents.
AttentionLayout = Literal["dense", "block_mask", "packed"]
LAYOUT_WORDS = {
    "dense": "",
    "block_mask": " under a block mask",
    "packed": " over packed documents",
}
# is_causal -> (tokens, queries in all heads) from which on hopper was measured to be at least 1.18
# times as fast as triton although it divides no work among idle multiprocessors. Additions in a
# fixed order take up to 16 % of that.
UNDIVIDED_FROM = {False: (1024, 16384), True: (2048, 65536)}
# The largest head dim whose work hopper divides; wider heads are always added in one order.
DIVIDED_HEAD_DIM = 128
# Head dims, in columns of 16 bits, that TMA reads in place. hopper first copies inputs of others,
# which has not been timed.
TMA_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The inputs that the kernels of a back end take."""

    dtypes: tuple[str, ...]
    head_dim: int  # the largest
    masked_head_dim: int  # the largest under a block mask
    block_size: tuple[int, int]  # the smallest tiles of a block mask: query rows, key columns


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
    """Return the (name, reason) of the attention back end for these inputs.

    A pure function of its arguments. A back end requested by name is returned, or refused with a
    ValueError that says why; no other is tried. `auto` takes hopper where `hopper_from` says so,
    else triton on CUDA. On other devices, and for inputs that triton does not take (float64,
    head_dim over 256), it takes tiled where one head's score matrix exceeds 64 MiB, else reference.
    It never takes compiled, which compiles again for new shapes.

    Args:
        device_kind: torch's device type of the inputs. On devices other than cuda, triton is taken
            by name only.
        dtype, head_dim, seqlen_q, seqlen_k: of the inputs; a length may be 0.
        batch_heads: number of query heads in the whole batch.
        requested: "auto" or the name of a back end.
        layout, is_causal: what the call attends over; a call with a block mask is not causal.
        block_size: of a block mask. Kernels are refused for tiles smaller than they take.
        longest: queries and keys of the longest packed document; seqlen_q and seqlen_k are then the
            totals.
        deterministic: whether gradients must be bit-reproducible. hopper then needs more queries
            to be faster.
        available: `available_backends` of the inputs' device.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if requested not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {requested!r}")
    # refusal(name): why the back end cannot serve these inputs; None if it can
    refusal = partial(
        _refusal,
        available=available,
        device_kind=device_kind,
        dtype=dtype,
        head_dim=head_dim,
        layout=layout,
        block_size=block_size,
    )

    if requested != "auto":
        if (why := refusal(requested)) is not None:
            raise ValueError(f"backend {requested!r} cannot be used: {why}")
        return requested, f"{requested} was asked for"

    # hopper, where it was measured to be the fastest
    by_name = ""  # what to add to the reason for triton
    if refusal("hopper") is None:
        limits = hopper_from(layout, is_causal, head_dim, deterministic)
        by_name = "; hopper has not been measured to be faster there"
        if limits is not None:
            tokens, queries = limits
            if min(longest or (seqlen_q, seqlen_k)) >= tokens and batch_heads * seqlen_q >= queries:
                where = f"head_dim {head_dim}{LAYOUT_WORDS[layout]} from {tokens} tokens"
                return (
                    "hopper",
                    f"hopper is the fastest of ours at {where} and {queries} queries "
                    "in all heads on",
                )
            by_name = (
                f"; hopper is faster from {tokens} tokens and {queries} queries in all heads on"
            )
            if limits != hopper_from(layout, is_causal, head_dim):
                by_name += ", where deterministic=True divides no work"

    # triton on CUDA
    why_not_triton = (
        refusal("triton") if device_kind == "cuda" else f"the inputs are on {device_kind}"
    )
    if why_not_triton is None:
        return "triton", f"triton serves {dtype} with head_dim {head_dim} on this GPU{by_name}"

    # plain PyTorch, in tiles where the scores are large
    score_bytes = seqlen_q * seqlen_k * BYTES_PER_ELEMENT[dtype]
    limit = f"{MAX_REFERENCE_SCORE_BYTES / 2**20:g} MiB"
    size = "one head's score matrix"
    # under torch.compile a number in the text would be a constant, and each length compiled anew
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
    """Return (tokens, queries in all heads) from which on hopper is faster than triton.

    None if hopper is not known to be faster at any size. The numbers come from HOPPER_FROM, which
    is made from measurements. For few queries these were measured with the work divided among
    multiprocessors. Head dims between the measured ones divide less of it and `deterministic`
    backwards none, so both also need the sizes of UNDIVIDED_FROM.
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
    """Return why a back end cannot serve these inputs; None if it can."""
    state = available.get(name, "it is not among the available back ends")
    if state != "ok":
        return state
    if name not in LIMITS:
        return None

    # the first kernel itself refuses the lengths and head dims that it does not take
    if name == "triton_first" and layout != "dense":
        return (
            "the first kernel takes neither block masks nor packed documents; backend 'triton' does"
        )
    limits, kernels = LIMITS[name], "hopper" if name == "hopper" else "triton"
    if block_size is not None and (
        block_size[0] < limits.block_size[0] or block_size[1] < limits.block_size[1]
    ):
        return (
            f"{kernels} walks lists of tiles of at least {limits.block_size}, "
            f"and the mask's are {block_size}"
        )
    if dtype not in limits.dtypes:
        return f"{kernels} takes {', '.join(limits.dtypes)}, not {dtype}"
    most = limits.head_dim if block_size is None else limits.masked_head_dim
    if head_dim > most:
        where = LAYOUT_WORDS[layout] if most < limits.head_dim else ""
        return f"{kernels} takes a head_dim of at most {most}{where}, not {head_dim}"
    return INTERPRETER_BFLOAT16 if device_kind != "cuda" and dtype == "bfloat16" else None


def hopper_refusal(q: Tensor) -> str | None:
    """Return why the Hopper kernels cannot attend q (..., head_dim) where it is; None if they can.

    They are judged for dense attention; k and v have q's dtype, device and head_dim.
    """
    if q.device.type not in ("cpu", "cuda"):
        return f"hopper kernels run on CUDA devices, and the inputs are on {q.device.type}"
    dtype = str(q.dtype).removeprefix("torch.")
    return _refusal("hopper", available_here(q.device), q.device.type, dtype, q.shape[-1])


def refuse_hopper(q: Tensor) -> None:
    """Raise ValueError with the reason if the Hopper kernels cannot attend q (..., head_dim)."""
    if (why := hopper_refusal(q)) is not None:
        raise ValueError(f"q cannot be attended by the Hopper kernels: {why}")


_available: dict[tuple[torch.device, bool], dict[str, str]] = {}


def available_here(device: torch.device) -> dict[str, str]:
    """Return `available_backends` of one of this machine's devices, from a cache.

    The cache has an entry for each device with Triton's interpreter on, and one with it off.
    """
    key = device, interpreter_is_on()
    if key not in _available:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _available[key] = available_backends(get_device_info(device.type))
    return _available[key]


# `torch.compiler.assume_constant_result` sets the same attribute. It also loads the compiler, which
# would double the time of importing this module.
available_here._dynamo_marked_constant = True  # type: ignore[attr-defined]


# The choice for a call


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
    """Return the (name, reason) of the back end that `flash_attention` uses for these inputs.

    Args:
        q, k: (..., heads, seq, head_dim), on a CPU or a CUDA device.
        backend: "auto" or a name, as in `flash_attention`.
        layout: "block_mask" for a call with one, "packed" for `flash_attention_varlen`.
        block_size: of the block mask.
        longest: queries and keys of the longest packed document.
        deterministic: as in `flash_attention`; `auto` then takes `hopper` for more queries only.
        config: tiles for `triton`, which `auto` then takes.

    Raises ValueError if the back end cannot serve the call, TypeError for an argument of a wrong
    type.
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
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
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
        deterministic,
    )
    if torch.compiler.is_compiling():
        return _answer(asked)
    try:
        return _answer_once(asked, interpreter_is_on())
    except TypeError:  # not hashable: symbolic sizes, or a backend that is no name
        return _answer(asked)


class Asked(NamedTuple):
    """The facts about a call on which the choice of its back end depends.

    The choice also depends on what runs on the device (`available_here`).
    """

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


def _answer(asked: Asked, interpreter: bool | None = None) -> tuple[str, str]:
    """Return the (name, reason) of `select_backend` for a call on this machine.

    `interpreter` is not read. It is a key of `_answer_once`, since the answer depends on whether
    Triton's interpreter is on.
    """
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


_answer_once = lru_cache(maxsize=4096)(_answer)  # short calls wait for the host
