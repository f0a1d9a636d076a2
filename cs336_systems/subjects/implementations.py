"""Register the attention implementations that benchmarks compare: our stages and the peers.

`build(name, shape, device)` returns a `Built` for attention without a mask or causal,
`build_case(name, case, run)` one for a case that may have a mask; both raise `Unsupported` with the
reason if the implementation does not run it. A new peer is an entry of REGISTRY.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from torch.nn.attention import SDPBackend

from cs336_systems.bench.spec import Unsupported
from cs336_systems.config import AttentionShape, MaskCase, RunConfig
from cs336_systems.device import has_cxx_compiler
from cs336_systems.subjects import attention_builders, mask_builders
from cs336_systems.subjects.attention_builders import Built


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """How an implementation of attention is built, whose it is, and what it needs to run."""

    # builder for attention without a mask or causal; None if it is only for other masks
    plain: Callable[[AttentionShape, str], Built] | None = None
    # builder for masks that dense kernels do not know; None if it has none
    masked: Callable[[MaskCase, RunConfig], Built] | None = None
    library: str = ""  # project whose kernel runs; "" if it is ours
    is_stage: bool = False  # a step in the development of ours, compared with the one before
    is_tiny: bool = False  # measured at tiny scale, unlike what compiles for seconds

    # reason for records why it does not run there, "" if it does
    no_cpu: str = ""
    no_float32: str = ""  # on a GPU
    no_cpu_masks: str = ""  # cases with a mask, be it causal, on a CPU
    no_cpu_backward: str = ""

    needs_compiler: bool = False  # a C++ compiler on a CPU
    needs_package: str = ""  # what must be installed, `module:name`
    backend: str = ""  # back end of `flash_attention` that must take the shape


# name -> implementation; ours in the order of their development
REGISTRY: dict[str, Implementation] = {
    # ours
    "eager": Implementation(
        plain=attention_builders.eager,
        masked=mask_builders.eager_masked,
        is_stage=True,
        is_tiny=True,
    ),
    "compiled": Implementation(
        plain=attention_builders.compiled, is_stage=True, needs_compiler=True
    ),
    "tiled": Implementation(
        plain=attention_builders.tiled,
        masked=mask_builders.tiled_masked,
        is_stage=True,
        is_tiny=True,
    ),
    "tiled_compiled": Implementation(
        plain=partial(attention_builders.tiled, compile_steps=True), needs_compiler=True
    ),
    "triton_first": Implementation(
        plain=partial(attention_builders.triton_or_hopper, backend="triton_first"),
        is_stage=True,
        is_tiny=True,
        backend="triton_first",
    ),
    "triton": Implementation(
        plain=partial(attention_builders.triton_or_hopper, backend="triton"),
        masked=partial(mask_builders.best_path, backend="triton"),
        is_stage=True,
        is_tiny=True,
        backend="triton",
    ),
    "hopper": Implementation(
        plain=partial(attention_builders.triton_or_hopper, backend="hopper"),
        masked=partial(mask_builders.best_path, backend="hopper"),
        is_stage=True,
        backend="hopper",
    ),
    "triton_lists": Implementation(
        masked=partial(mask_builders.lists, backend="triton"), backend="triton"
    ),
    "hopper_lists": Implementation(
        masked=partial(mask_builders.lists, backend="hopper"), backend="hopper"
    ),
    # PyTorch's
    "sdpa_mask": Implementation(masked=mask_builders.sdpa_mask, library="PyTorch"),
    "sdpa_padded": Implementation(masked=mask_builders.sdpa_padded, library="PyTorch"),
    "torch_varlen": Implementation(
        masked=mask_builders.torch_varlen,
        library="PyTorch",
        no_cpu="torch.nn.attention.varlen needs CUDA and 16 bits",
        no_float32="torch.nn.attention.varlen needs CUDA and 16 bits",
    ),
    "sdpa_flash": Implementation(
        plain=partial(attention_builders.sdpa, backend=SDPBackend.FLASH_ATTENTION),
        library="PyTorch",
        is_tiny=True,
        no_float32="sdpa_flash takes float16 and bfloat16 only",
    ),
    "sdpa_cudnn": Implementation(
        plain=partial(attention_builders.sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        library="PyTorch",
        is_tiny=True,
        no_cpu="sdpa_cudnn needs CUDA",
        no_float32="sdpa_cudnn takes float16 and bfloat16 only",
    ),
    "sdpa_efficient": Implementation(
        plain=partial(attention_builders.sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
        library="PyTorch",
        no_cpu="sdpa_efficient needs CUDA",
    ),
    "flex": Implementation(
        plain=attention_builders.flex,
        masked=mask_builders.flex_masked,
        library="PyTorch",
        no_cpu_masks="compiled FlexAttention is measured on a GPU: on CPU it compiles anew for "
        "each mask",
        no_cpu_backward="FlexAttention has no backward on a CPU",
        needs_compiler=True,
    ),
    # FlashAttention-4's
    "flex_flash": Implementation(
        plain=partial(attention_builders.flex, kernel_options={"BACKEND": "FLASH"}),
        masked=partial(mask_builders.flex_masked, kernel_options={"BACKEND": "FLASH"}),
        library="FlashAttention-4",
        no_cpu="FlashAttention-4 needs CUDA",
        no_float32="FlashAttention-4 takes float16 and bfloat16 only",
        needs_package="flash_attn.cute:flash_attn_func",
    ),
    "fa4": Implementation(
        plain=attention_builders.fa4,
        masked=mask_builders.fa4_masked,
        library="FlashAttention-4",
        no_cpu="FlashAttention-4 needs CUDA",
        no_float32="FlashAttention-4 takes float16 and bfloat16 only",
        needs_package="flash_attn.cute:flash_attn_func",
    ),
}

# names of the implementations without a mask or causal, and under other masks
IMPLEMENTATIONS = tuple(name for name, entry in REGISTRY.items() if entry.plain)
MASK_IMPLEMENTATIONS = tuple(name for name, entry in REGISTRY.items() if entry.masked)
TINY_IMPLEMENTATIONS = tuple(name for name, entry in REGISTRY.items() if entry.is_tiny)
# our implementations in the order of development, each to be compared with the one before
STAGES = tuple(name for name, entry in REGISTRY.items() if entry.is_stage)


def check_runs(name: str, shape: AttentionShape, device: str, has_mask: bool = False) -> None:
    """Raise Unsupported with the reason if the implementation `name` does not run `shape`.

    `has_mask` says that the case is one with a mask. What a builder knows of single masks is not
    checked, such as "the mask is not one of documents".
    """
    entry, on_cpu = REGISTRY[name], device == "cpu"
    if on_cpu and has_mask and entry.no_cpu_masks:
        raise Unsupported(entry.no_cpu_masks)
    if on_cpu and entry.no_cpu:
        raise Unsupported(entry.no_cpu)
    if on_cpu and entry.needs_compiler and not has_cxx_compiler():
        raise Unsupported("no C++ compiler")
    if not on_cpu and shape.dtype == "float32" and entry.no_float32:
        raise Unsupported(entry.no_float32)
    if entry.needs_package and not _is_installed(entry.needs_package):
        raise Unsupported(f"{entry.library} is not installed: pip install 'cs336-systems[peers]'")
    if entry.backend:
        attention_builders.check_backend(entry.backend, shape, device)


def _is_installed(package: str) -> bool:
    """Return whether `package`, `module:name`, can be imported."""
    module, _, name = package.partition(":")
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False


def build(name: str, shape: AttentionShape, device: str) -> Built:
    """Return the implementation `name` for `shape` on `device`.

    `name` is one of IMPLEMENTATIONS or a user's own, `package.module:Name`. Raises ValueError for
    another name, and Unsupported if the implementation does not exist for the shape or device.
    """
    if ":" in name:
        return Built(attend=attention_builders.own(name, shape.is_causal))
    entry = REGISTRY.get(name)
    if entry is None or entry.plain is None:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}"
        )
    check_runs(name, shape, device)
    built = entry.plain(shape, device)
    return replace(built, no_backward=entry.no_cpu_backward) if device == "cpu" else built


def build_case(name: str, case: Any, run: RunConfig) -> Built:
    """Return the implementation `name` for the shape and mask of `case` on the run's device.

    Raises ValueError for an unknown name, and Unsupported with the reason if the implementation
    does not exist for the case.
    """
    mask_case = mask_builders.masked_of(case)
    if mask_case is None:
        return build(name, case, run.device)
    if name in REGISTRY:
        check_runs(name, mask_case.shape, run.device, has_mask=True)
    if name in IMPLEMENTATIONS and mask_builders.is_plain(mask_case.mask):
        return build(name, mask_case.shape, run.device)
    entry = REGISTRY.get(name)
    if entry is None or entry.masked is None:
        raise ValueError(
            f"implementation must be one of {', '.join(MASK_IMPLEMENTATIONS)}, got {name!r}"
        )
    return entry.masked(mask_case, run)
