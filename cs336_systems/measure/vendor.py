"""Command lines of NVIDIA's profilers, for machines that have them: `nsys` for a timeline, `ncu` for single kernels.

    command = vendor_command("nsys", [sys.executable, "-m", ...], output)      # a list, run without a shell

Both record only what runs between cudaProfilerStart and cudaProfilerStop, so that model building and warm-up stay out:
the profiled command must call `torch.cuda.profiler.start()` and `.stop()`, as `cuda_profiler_range` does. Their NVTX
ranges are those of `ranges.py`.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

NCU_LAUNCHES = 200  # kernels that ncu measures: each is run many times over, so a whole step would take hours
# The option that names the report of each tool, and its other options.
TOOLS = {
    "nsys": (
        "--output", "profile", "--force-overwrite=true", "--trace=cuda,nvtx,cublas,cudnn,osrt",
        "--cuda-memory-usage=true", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
    ),
    "ncu": (
        "--export", "--force-overwrite", "--set=full", "--profile-from-start=off",
        "--nvtx",  # ranges are shown, and choose nothing: autograd launches its kernels on a thread that has none
        f"--launch-count={NCU_LAUNCHES}", "--target-processes=all",
    ),
}  # fmt: skip


def vendor_command(tool: str, command: Sequence[str], output: Path) -> list[str]:
    """`command` under `tool`, one of TOOLS, which writes its report to `output` (without suffix)."""
    report, *options = TOOLS[tool]
    return [shutil.which(tool) or tool, *options, f"{report}={output}", *command]


@contextmanager
def cuda_profiler_range() -> Iterator[None]:
    """Between cudaProfilerStart and cudaProfilerStop: the part of a run that nsys and ncu record."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()
