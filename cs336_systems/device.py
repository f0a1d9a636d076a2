"""The machine: what it is, what it could reach, which attention back ends run on it and which one to take.

Facts are read from the driver and the operating system when asked, never on import. Usage:

    info = get_device_info()                          # the first facts of every record
    available_backends(info)                          # {"triton": "ok", "compiled": "no C++ compiler", ...}
    model_flops_utilization(flops, seconds, device_peak(info), "bfloat16")    # None on a GPU without a known peak
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cs336_systems.config import BYTES_PER_ELEMENT, DTYPES, DTypeName

CPUINFO = Path("/proc/cpuinfo")
NVIDIA_SMI_TIMEOUT_S = 10


def _dotted(compute_capability: tuple[int, int]) -> str:
    return "{}.{}".format(*compute_capability)


# Facts


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """What the driver or the operating system says of one device; None where it says nothing. No host names."""

    name: str  # e.g. "NVIDIA H200", "AMD EPYC"
    kind: Literal["cpu", "cuda"]
    compute_capability: tuple[int, int] | None = None  # NVIDIA GPUs only
    memory_bytes: int  # of the GPU, or of the host
    num_multiprocessors: int | None = None
    driver: str | None = None  # NVIDIA driver version
    max_sm_clock_mhz: int | None = None
    num_cores: int | None = None  # CPU cores that this process may use

    @property
    def slug(self) -> str:
        """Folder name: `nvidia-h200`, `cpu-amd-epyc-2-cores`."""
        if self.kind == "cuda":
            return slugify(self.name)
        name = re.sub(r"\((r|tm)\)", " ", self.name, flags=re.IGNORECASE)
        cores = "" if self.num_cores is None else f"{self.num_cores} cores"
        return slugify(f"cpu {name} {cores}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, for records; the compute capability as "9.0"."""
        fields = asdict(self)
        if self.compute_capability is not None:
            fields["compute_capability"] = _dotted(self.compute_capability)
        return fields


def slugify(name: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`: a folder name of lower-case letters, digits and single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def resolve_device(requested: str) -> Literal["cpu", "cuda"]:
    """The device kind that `requested` (auto, cpu or cuda) means here; auto is cuda where there is a CUDA device.

    Raises ValueError for another name, and for cuda where there is none.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {requested!r}")
    if requested == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if requested == "auto":
        return "cpu"
    why = "built for CPU" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}, no driver or device"
    raise ValueError(f"--device cuda: no CUDA device is available (torch {torch.__version__}, {why})")


def get_device_info(device: str = "auto") -> DeviceInfo:
    """Facts of the current CUDA device or of the CPU; `device` as in `resolve_device`, which may raise ValueError."""
    return _cpu_info() if resolve_device(device) == "cpu" else _cuda_info()


def _cuda_info() -> DeviceInfo:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver, max_sm_clock_mhz = _query_nvidia_smi(getattr(properties, "uuid", None))
    return DeviceInfo(
        name=properties.name,
        kind="cuda",
        # AMD GPUs come under the same torch.cuda; their "capability" numbers another line of devices.
        compute_capability=None if torch.version.hip is not None else (properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        num_multiprocessors=properties.multi_processor_count,
        driver=driver,
        max_sm_clock_mhz=max_sm_clock_mhz,
    )


def _query_nvidia_smi(uuid: Any) -> tuple[str | None, int | None]:
    """Driver version and highest SM clock in MHz of the GPU `uuid`; None for what nvidia-smi does not tell.

    The GPU is named by its UUID: nvidia-smi numbers all GPUs of the host, torch those in CUDA_VISIBLE_DEVICES.
    """
    executable = shutil.which("nvidia-smi")
    if executable is None or uuid is None:
        return None, None
    command = [executable, "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader", "-i", f"GPU-{uuid}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, None
    answer = re.match(r"\s*([\d.]+)\s*,\s*(?:(\d+) MHz)?", result.stdout)  # "570.86.15, 1980 MHz", "570.86.15, [N/A]"
    if answer is None:
        return None, None
    return answer[1], int(answer[2]) if answer[2] else None


def _cpu_info() -> DeviceInfo:
    return DeviceInfo(name=_cpu_name(), kind="cpu", memory_bytes=_host_memory_bytes(), num_cores=_usable_cores())


def _cpu_name() -> str:
    """The model name of the first core, or what the platform calls its processor (macOS, ARM)."""
    if CPUINFO.exists():
        model = re.search(r"^model name[ \t]*:[ \t]*(\S.*)$", CPUINFO.read_text(errors="replace"), flags=re.MULTILINE)
        if model is not None:
            return model[1].strip()
    return platform.processor() or platform.machine() or "unknown"


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Peaks


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A GPU's rates on the vendor's paper: dense, without sparsity, at boost clock."""

    bf16_tflops: float  # tensor cores, bfloat16 or float16 inputs, float32 accumulation
    fp32_tflops: float  # outside the tensor cores (IEEE float32, not TF32)
    memory_gb_per_s: float  # 10⁹ bytes per second
    source: str
    link_gb_per_s: float | None = None  # to the other GPUs of the host, one way: half of what sheets call NVLink's rate

    def tflops(self, dtype: str) -> float | None:
        """Peak TFLOP/s of matmuls in `dtype`, None where the sheet is not kept (float64); ValueError if unknown."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        half = self.bf16_tflops
        return {"bfloat16": half, "float16": half, "float32": self.fp32_tflops}.get(dtype)


def _peak(bf16: float, fp32: float, gb_per_s: float, source: str, link: float | None = None) -> Peak:
    return Peak(bf16_tflops=bf16, fp32_tflops=fp32, memory_gb_per_s=gb_per_s, source=source, link_gb_per_s=link)


# By the driver's whole name without "NVIDIA ", so that a MIG slice or a sibling product is unknown, not mistaken. Where
# a sheet prints rates with sparsity, the dense rate is half.
PEAKS = {
    "B200": _peak(2250, 75, 7700, "NVIDIA Blackwell datasheet (HGX B200)", 900),
    "H200": _peak(989.5, 67, 4800, "NVIDIA H200 Tensor Core GPU datasheet (SXM)", 450),
    "H100 80GB HBM3": _peak(989.5, 67, 3350, "NVIDIA H100 Tensor Core GPU datasheet (SXM)", 450),
    "H100 PCIe": _peak(756.5, 51, 2000, "NVIDIA H100 Tensor Core GPU datasheet (PCIe)"),
    "A100-SXM4-40GB": _peak(312, 19.5, 1555, "NVIDIA A100 Tensor Core GPU datasheet (40GB SXM)", 300),
    "A100-SXM4-80GB": _peak(312, 19.5, 2039, "NVIDIA A100 Tensor Core GPU datasheet (80GB SXM)", 300),
    "A100-PCIE-40GB": _peak(312, 19.5, 1555, "NVIDIA A100 Tensor Core GPU datasheet (40GB PCIe)"),
    "A100 80GB PCIe": _peak(312, 19.5, 1935, "NVIDIA A100 Tensor Core GPU datasheet (80GB PCIe)"),
    "L4": _peak(121, 30.3, 300, "NVIDIA L4 Tensor Core GPU datasheet"),
    "L40S": _peak(362.05, 91.6, 864, "NVIDIA L40S datasheet"),
    "GeForce RTX 4090": _peak(165.2, 82.6, 1008, "NVIDIA Ada GPU architecture whitepaper"),
    "GeForce RTX 3090": _peak(71, 35.6, 936, "NVIDIA Ampere GA102 GPU architecture whitepaper"),
}


def device_peak(info: DeviceInfo) -> Peak | None:
    """The peak of the GPU by its exact name; None for a CPU and for any GPU that is not in the table."""
    return peak_by_name(info.name) if info.kind == "cuda" else None


def peak_by_name(name: str) -> Peak | None:
    """The peak of the GPU that is called `name`, as a record's device is; None for what is not in the table."""
    return PEAKS.get(name.removeprefix("NVIDIA "))


def model_flops_utilization(flops: float, seconds: float, peak: Peak | None, dtype: str) -> float | None:
    """Share of the peak in `dtype` that `flops` useful FLOPs in `seconds` are; None where no peak is known.

    Source: Chowdhery et al. 2022 (PaLM), section 4.1: recomputed FLOPs are not credited.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    tflops = None if peak is None else peak.tflops(dtype)
    return None if tflops is None else flops / seconds / (tflops * 1e12)


def recommended_dtype(compute_capability: tuple[int, int] | None) -> DTypeName:
    """The fastest dtype that training can trust: bfloat16 from sm_80, float16 on sm_70 and sm_75, else float32.

    None, a CPU or an AMD GPU, gets float32. Older GPUs only emulate bfloat16.
    """
    if compute_capability is None or compute_capability < (7, 0):
        return "float32"
    return "bfloat16" if compute_capability >= (8, 0) else "float16"


# Attention back ends: which run here

BACKENDS = ("reference", "compiled", "tiled", "triton", "hopper")
INTERPRETER_HINT = "set TRITON_INTERPRET=1 before the first import of triton kernels to run them on the CPU interpreter"
INTERPRETER_BFLOAT16 = "Triton's CPU interpreter computes wrong bfloat16 products; use float32 or float16 there"
MIN_TRITON_CAPABILITY = (8, 0)  # the first with bfloat16 and asynchronous copies, which the kernels are written for
HOPPER_CAPABILITY = (9, 0)  # sm_90a has instructions (wgmma, setmaxnreg) that neither older nor newer GPUs run
MIN_HOPPER_TRITON = (3, 6)  # older Gluons launch the partitions of a kernel in another way
GLUON_FOR_HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
GLUON_PIECES = ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")
MIN_COMPILE_CAPABILITY = (7, 0)  # torch.compile's own bound on CUDA


def available_backends(info: DeviceInfo | None = None) -> dict[str, str]:
    """For each attention back end "ok" or the reason why it does not run on `info`'s device (default: the auto one).

    Looks for packages and compilers without importing or running them; only on a GPU that could run the Hopper kernels
    Triton is imported, to see whether it has what they are written in.
    """
    info = get_device_info() if info is None else info
    reasons = {
        "reference": None,
        "compiled": _compiled_reason(info),
        "tiled": None,
        "triton": _triton_reason(info),
        "hopper": _hopper_reason(info),
    }
    return {name: reason or "ok" for name, reason in reasons.items()}


def has_cxx_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler for CPU code: $CXX if set, else the platform's default."""
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", default)) is not None


def _has_c_compiler() -> bool:
    """Whether Triton finds a C compiler for its launchers: $CC if set, else gcc or clang."""
    candidates = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")
    return any(shutil.which(candidate) is not None for candidate in candidates)


def _compiled_reason(info: DeviceInfo) -> str | None:
    if info.kind == "cpu":
        return None if has_cxx_compiler() else "no C++ compiler"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton on a GPU, and it is not installed"
    capability = info.compute_capability
    if capability is not None and capability < MIN_COMPILE_CAPABILITY:
        return f"torch.compile needs compute capability 7.0 or higher, {info.name} has {_dotted(capability)}"
    return None if _has_c_compiler() else "no C compiler, which triton needs to build its launchers"


def _triton_reason(info: DeviceInfo) -> str | None:
    if sys.platform != "linux":
        return f"triton kernels run on Linux, and this is {sys.platform}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreter_is_on():
        return None
    capability = info.compute_capability
    if capability is None or capability < MIN_TRITON_CAPABILITY:
        has = "is no NVIDIA GPU" if capability is None else f"has {_dotted(capability)}"
        need = "triton kernels need a CUDA device of compute capability 8.0 or higher"
        return f"{need}, {info.name} {has}; {INTERPRETER_HINT}"
    return None if _has_c_compiler() else "no C compiler, which triton needs to build its launchers"


def _hopper_reason(info: DeviceInfo) -> str | None:
    if info.compute_capability != HOPPER_CAPABILITY:
        capability = info.compute_capability
        has = "is no NVIDIA GPU" if capability is None else f"has {_dotted(capability)}"
        return f"hopper kernels need a GPU of compute capability 9.0 (H100, H200), {info.name} {has}"
    if interpreter_is_on():
        return "hopper kernels have no interpreter; run without TRITON_INTERPRET"
    return _triton_reason(info) or _gluon_reason()


def _gluon_reason() -> str | None:
    """Why the installed Triton cannot compile the Hopper kernels, found by importing what they import."""
    try:
        version = importlib.import_module("triton").__version__
        hopper = importlib.import_module(GLUON_FOR_HOPPER)
    except ImportError as error:
        return f"this triton has no Gluon for Hopper ({error})"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_HOPPER_TRITON:
        return "hopper kernels need triton {}.{} or later, this is {}".format(*MIN_HOPPER_TRITON, version)
    missing = [name for name in GLUON_PIECES if not hasattr(hopper, name)]
    return f"the Gluon of triton {version} lacks {', '.join(missing)}" if missing else None


def interpreter_is_on() -> bool:
    """Whether Triton kernels loaded from now on are interpreted: its own switch where imported, else the variable."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is not None:
        return bool(knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


# Attention back ends: which one to take

# Above this size of one head's score matrix, plain attention gives way to tiles. Its backward holds three such copies
# for every head and sequence of the batch: at 64 MiB (4096² in float32), 3 GiB for 16 heads. Below it the copies are
# affordable, and two large matmuls beat a Python loop over tiles.
MAX_REFERENCE_SCORE_BYTES = 64 * 2**20
TRITON_DTYPES = ("float32", "float16", "bfloat16")
MAX_TRITON_HEAD_DIM = 256  # wider tiles do not fit in shared memory
HOPPER_DTYPES = ("float16", "bfloat16")
MAX_HOPPER_HEAD_DIM = 128  # the accumulators of a wider head do not fit in a warp group's registers
# What attention runs over. The Hopper kernels are dense or causal: lists of tiles and packed documents are Triton's.
AttentionLayout = Literal["dense", "block_mask", "packed"]
HOPPER_LAYOUTS = {
    "block_mask": "hopper kernels walk no lists of tiles; backend 'triton' runs a block mask",
    "packed": "hopper kernels take no packed documents; backend 'triton' does",
}
# Where hopper takes the GPU less than any other of our back ends, forward and backward together: head_dim -> the
# shortest length of queries and of keys from which on `auto` takes it, and how many queries there must be in all heads
# of the batch. Fewer leave multiprocessors idle, where triton splits the keys and runs dQ beside dK/dV: in replayed
# graphs it took 0.56 to 0.97 times as long as hopper on 36 shapes of at most 16,384 queries, on six of 32,768 1.08 to
# 1.37 times (the writeup's few_queries; `attention_shapes` has the larger). Two things it is not made for: calls of one
# head that wait for the host, of which hopper's take up to a quarter less (`short_calls`), and a forward without
# gradients, in which hopper takes the GPU less from about four heads on.
HOPPER_WHERE_FASTEST: dict[int, tuple[int, int]] = {64: (512, 24576), 128: (512, 24576)}


def select_backend(
    *,
    device_kind: str,
    compute_capability: tuple[int, int] | None,
    dtype: str,
    head_dim: int,
    batch_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    requested: str = "auto",
    layout: AttentionLayout = "dense",
    available: dict[str, str],
) -> tuple[str, str]:
    """(name, reason) of the attention back end for these inputs; a pure function of its arguments.

    A back end requested by name is returned, or refused with a ValueError that says why; nothing else is tried. `auto`
    takes hopper where HOPPER_WHERE_FASTEST says so, else triton on CUDA; elsewhere, and for what triton does not take
    (float64, head_dim over 256), tiled where one head's score matrix exceeds 64 MiB, else reference. It never takes
    compiled, which compiles again for new shapes.

    Args:
        device_kind: torch's device type of the inputs; on others than cuda triton is taken by name only.
        compute_capability: of the inputs' GPU; None elsewhere.
        dtype, head_dim, seqlen_q, seqlen_k: of the inputs; a length may be 0.
        batch_heads: heads that queries have in the whole batch.
        layout: what the call attends over; hopper is refused for any but `dense`.
        available: from `available_backends`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if requested not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {requested!r}")

    def refusal(name: str) -> str | None:
        if available.get(name) != "ok":
            return available.get(name, "it is not among the available back ends")
        if name == "hopper":
            return hopper_refusal(device_kind, compute_capability, dtype, head_dim, layout)
        return _triton_refusal(device_kind, compute_capability, dtype, head_dim) if name == "triton" else None

    if requested != "auto":
        if (why := refusal(requested)) is not None:
            raise ValueError(f"backend {requested!r} cannot be used: {why}")
        return requested, f"{requested} was asked for"

    if head_dim in HOPPER_WHERE_FASTEST and refusal("hopper") is None:
        tokens, queries = HOPPER_WHERE_FASTEST[head_dim]
        if min(seqlen_q, seqlen_k) >= tokens and batch_heads * seqlen_q >= queries:
            most = "" if queries <= tokens else f" and {queries} queries in all heads"
            return "hopper", f"hopper is the fastest of ours at head_dim {head_dim} from {tokens} tokens{most} on"
    why_not_triton = refusal("triton") if device_kind == "cuda" else f"the inputs are on {device_kind}"
    if why_not_triton is None:
        return "triton", f"triton serves {dtype} with head_dim {head_dim} on this GPU"
    score_bytes = seqlen_q * seqlen_k * BYTES_PER_ELEMENT[dtype]
    limit = f"{MAX_REFERENCE_SCORE_BYTES / 2**20:g} MiB"
    size = "one head's score matrix"
    if not torch.compiler.is_compiling():  # a number in words would be a constant, and each length compiled anew
        size += f" takes {score_bytes / 2**20:.1f} MiB"
    if score_bytes > MAX_REFERENCE_SCORE_BYTES:
        return "tiled", f"tiled, not triton ({why_not_triton}); {size}, more than {limit}, too large to store"
    return "reference", f"reference, not triton ({why_not_triton}); {size}, at most {limit}, cheap to store"


def hopper_refusal(
    device_kind: str, compute_capability: tuple[int, int] | None, dtype: str, head_dim: int, layout: AttentionLayout
) -> str | None:
    """Why the Hopper kernels cannot serve these inputs, on a machine where they run; None where they can."""
    if layout in HOPPER_LAYOUTS:
        return HOPPER_LAYOUTS[layout]
    if device_kind != "cuda":
        return f"hopper kernels run on CUDA devices, and the inputs are on {device_kind}"
    is_hopper = compute_capability == HOPPER_CAPABILITY  # torch.compile of PyTorch 2.11 cannot trace != of tuples
    if not is_hopper:
        has = "unknown" if compute_capability is None else _dotted(compute_capability)
        return f"hopper needs compute capability 9.0, and the inputs' GPU has {has}"
    if dtype not in HOPPER_DTYPES:
        return f"hopper takes {' and '.join(HOPPER_DTYPES)}, not {dtype}"
    if head_dim > MAX_HOPPER_HEAD_DIM:
        return f"hopper takes a head_dim of at most {MAX_HOPPER_HEAD_DIM}, not {head_dim}"
    return None


def _triton_refusal(
    device_kind: str, compute_capability: tuple[int, int] | None, dtype: str, head_dim: int
) -> str | None:
    """Why the Triton kernels cannot serve these inputs, on a machine where they run."""
    if dtype not in TRITON_DTYPES:
        return f"triton takes {', '.join(TRITON_DTYPES)}, not {dtype}"
    if head_dim > MAX_TRITON_HEAD_DIM:
        return f"triton takes a head_dim of at most {MAX_TRITON_HEAD_DIM}, not {head_dim}"
    if device_kind != "cuda" and dtype == "bfloat16":
        return INTERPRETER_BFLOAT16
    if device_kind == "cuda" and (compute_capability is None or compute_capability < MIN_TRITON_CAPABILITY):
        has = "unknown" if compute_capability is None else _dotted(compute_capability)
        return f"triton needs compute capability 8.0 or higher, and the inputs' GPU has {has}"
    return None
