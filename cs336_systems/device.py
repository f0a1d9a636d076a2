"""Facts about the machine: its device, the device's peak rates, compilers, Triton's interpreter.

Facts are read from the driver and the operating system when asked, never on import. Usage:

    info = get_device_info()    # the first facts of every record
    device_peak(info)           # the vendor's rates; None for a GPU that is not in the table
"""

from __future__ import annotations

import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from cs336_systems.config import DTypeName

CPUINFO = Path("/proc/cpuinfo")
NVIDIA_SMI_TIMEOUT_S = 10


def dotted(compute_capability: tuple[int, int]) -> str:
    """Return a compute capability as text: (9, 0) as "9.0"."""
    return "{}.{}".format(*compute_capability)


# Facts


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Facts that the driver or the operating system tells of one device; None if it does not.

    There is no host name among them.
    """

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
        """Return the device's name as a folder name: `nvidia-h200`, `cpu-amd-epyc-2-cores`."""
        if self.kind == "cuda":
            return slugify(self.name)
        name = re.sub(r"\((r|tm)\)", " ", self.name, flags=re.IGNORECASE)
        cores = "" if self.num_cores is None else f"{self.num_cores} cores"
        return slugify(f"cpu {name} {cores}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values for records, the compute capability as "9.0"."""
        fields = asdict(self)
        if self.compute_capability is not None:
            fields["compute_capability"] = dotted(self.compute_capability)
        return fields


def slugify(name: str) -> str:
    """Return `name` as a folder name: `NVIDIA H200` as `nvidia-h200`.

    The folder name has lower-case letters, digits and single hyphens.
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def resolve_device(requested: str) -> Literal["cpu", "cuda"]:
    """Return the device kind, "cpu" or "cuda", that `requested` (auto, cpu or cuda) means here.

    auto is cuda where there is a CUDA device. Raises ValueError for another name, and for cuda
    where there is no CUDA device.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {requested!r}")
    if requested == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if requested == "auto":
        return "cpu"
    why = (
        "built for CPU"
        if torch.version.cuda is None
        else f"built for CUDA {torch.version.cuda}, no driver or device"
    )
    raise ValueError(
        f"--device cuda: no CUDA device is available (torch {torch.__version__}, {why})"
    )


def get_device_info(device: str = "auto") -> DeviceInfo:
    """Return facts about the current CUDA device, or about the CPU.

    `device` is as in `resolve_device`, which may raise ValueError.
    """
    if resolve_device(device) == "cpu":
        # the first core's model, or the platform's name of the processor (macOS, ARM)
        text = CPUINFO.read_text(errors="replace") if CPUINFO.exists() else ""
        model = re.search(r"^model name[ \t]*:[ \t]*(\S.*)$", text, flags=re.MULTILINE)
        if model is not None:
            name = model[1].strip()
        else:
            name = platform.processor() or platform.machine() or "unknown"
        # cores that this process may use
        num_cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            num_cores = len(os.sched_getaffinity(0))
        return DeviceInfo(
            name=name,
            kind="cpu",
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            num_cores=num_cores,
        )

    # the current GPU
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver, max_sm_clock_mhz = _query_nvidia_smi(getattr(properties, "uuid", None))
    return DeviceInfo(
        name=properties.name,
        kind="cuda",
        # torch.cuda also serves AMD GPUs, whose "capability" numbers another line of devices
        compute_capability=None
        if torch.version.hip is not None
        else (properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        num_multiprocessors=properties.multi_processor_count,
        driver=driver,
        max_sm_clock_mhz=max_sm_clock_mhz,
    )


def _query_nvidia_smi(uuid: Any) -> tuple[str | None, int | None]:
    """Return the driver version and the highest SM clock in MHz of the GPU `uuid`.

    Either is None if nvidia-smi does not tell it. The GPU is named by its UUID: nvidia-smi numbers
    all GPUs of the host, torch those in CUDA_VISIBLE_DEVICES.
    """
    executable = shutil.which("nvidia-smi")
    if executable is None or uuid is None:
        return None, None
    command = [
        executable,
        "--query-gpu=driver_version,clocks.max.sm",
        "--format=csv,noheader",
        "-i",
        f"GPU-{uuid}",
    ]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    # "570.86.15, 1980 MHz", "570.86.15, [N/A]"
    answer = re.match(r"\s*([\d.]+)\s*,\s*(?:(\d+) MHz)?", result.stdout)
    if answer is None:
        return None, None
    return answer[1], int(answer[2]) if answer[2] else None


# Peaks


@dataclass(frozen=True)
class Peak:
    """Rates of a GPU on the vendor's data sheet: dense, without sparsity, at boost clock."""

    bf16_tflops: float  # tensor cores, bfloat16 or float16 inputs, float32 accumulation
    fp32_tflops: float  # outside the tensor cores (IEEE float32, not TF32)
    memory_gb_per_s: float  # 10⁹ bytes per second
    source: str


# By the driver's whole name without "NVIDIA ", so that a MIG slice or a sibling product is unknown
# and not mistaken for another. Where a sheet prints rates with sparsity, the dense rate is half.
PEAKS = {
    "B200": Peak(2250, 75, 7700, "NVIDIA Blackwell datasheet (HGX B200)"),
    "H200": Peak(989.5, 67, 4800, "NVIDIA H200 Tensor Core GPU datasheet (SXM)"),
    "H100 80GB HBM3": Peak(989.5, 67, 3350, "NVIDIA H100 Tensor Core GPU datasheet (SXM)"),
    "H100 PCIe": Peak(756.5, 51, 2000, "NVIDIA H100 Tensor Core GPU datasheet (PCIe)"),
    "A100-SXM4-40GB": Peak(312, 19.5, 1555, "NVIDIA A100 Tensor Core GPU datasheet (40GB SXM)"),
    "A100-SXM4-80GB": Peak(312, 19.5, 2039, "NVIDIA A100 Tensor Core GPU datasheet (80GB SXM)"),
    "A100-PCIE-40GB": Peak(312, 19.5, 1555, "NVIDIA A100 Tensor Core GPU datasheet (40GB PCIe)"),
    "A100 80GB PCIe": Peak(312, 19.5, 1935, "NVIDIA A100 Tensor Core GPU datasheet (80GB PCIe)"),
    "L4": Peak(121, 30.3, 300, "NVIDIA L4 Tensor Core GPU datasheet"),
    "L40S": Peak(362.05, 91.6, 864, "NVIDIA L40S datasheet"),
    "GeForce RTX 4090": Peak(165.2, 82.6, 1008, "NVIDIA Ada GPU architecture whitepaper"),
    "GeForce RTX 3090": Peak(71, 35.6, 936, "NVIDIA Ampere GA102 GPU architecture whitepaper"),
}


def device_peak(info: DeviceInfo) -> Peak | None:
    """Return the peak of the GPU with exactly this name; None for a CPU or a GPU not in PEAKS."""
    return PEAKS.get(info.name.removeprefix("NVIDIA ")) if info.kind == "cuda" else None


def recommended_dtype(compute_capability: tuple[int, int] | None) -> DTypeName:
    """Return the fastest dtype that training can trust on a GPU of this compute capability.

    bfloat16 from sm_80, float16 on sm_70 and sm_75, else float32. None, a CPU or an AMD GPU, gets
    float32. Older GPUs only emulate bfloat16.
    """
    if compute_capability is None or compute_capability < (7, 0):
        return "float32"
    return "bfloat16" if compute_capability >= (8, 0) else "float16"


# Compilers and the interpreter


def has_cxx_compiler() -> bool:
    """Return whether torch.compile finds a C++ compiler for CPU code.

    It takes $CXX if set, else the platform's default.
    """
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", default)) is not None


def has_c_compiler() -> bool:
    """Return whether Triton finds a C compiler for its launchers: $CC if set, else gcc or clang."""
    candidates = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")
    return any(shutil.which(candidate) is not None for candidate in candidates)


def interpreter_is_on() -> bool:
    """Return whether Triton kernels that are loaded from now on will be interpreted.

    Triton's own switch decides if Triton is imported, else the variable TRITON_INTERPRET.
    """
    knobs = sys.modules.get("triton.knobs")
    if knobs is not None:
        return bool(knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


def interpret_kernels() -> None:
    """Turn on Triton's interpreter for all kernels and speed it up; call before importing Triton.

    Each launch, and each call of one `@triton.jit` function by another, replaces the builtins of
    `triton.language`. The interpreter searches whole modules for them every time, which is two
    fifths of its work. Here it searches each module once.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is None:
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def builtins_of(place: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    def patch_builtins(place: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(place):
            member = getattr(place, name)
            if is_builtin(member):  # not replaced yet
                interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins
