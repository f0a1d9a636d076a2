"""Hardware counters of GPU kernels, read by NVIDIA's Nsight Compute (`ncu`): what limits a kernel.

    # the kernels of that call, in order
    kernels = read_counters(["profile", "1x16x16384x64", "--mode", "forward", ...])
    kernels.sort_values("kernel_time")["tensor_pipe"]    # shares of their cycles

ncu runs a kernel several times, a few counters each, alone and with cold caches: times are not
those of a benchmark, and the clock is one that a GPU without other load holds. Shares of cycles and
waits hold for the kernel all the same. Metrics are named as in Nsight Compute's documentation;
those of stalls as in its section of warp states.
"""

import io
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pandas as pd

# Reasons for which a warp waits between two of its instructions, counted in cycles for each
# instruction that is issued.
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "wait",
)
STALL = "stall_"
# quantity: (ncu's metric, ncu's unit, our unit, factor from ncu's unit to ours)
COUNTERS: dict[str, tuple[str, str, str, float]] = {
    "kernel_time": ("gpu__time_duration.sum", "ns", "ms", 1e-6),
    "sm_clock": ("sm__cycles_elapsed.avg.per_second", "hz", "GHz", 1e-9),
    "tensor_pipe": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "%",
        "1",
        0.01,
    ),
    "exponential_pipe": (
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
        "%",
        "1",
        0.01,
    ),
    "issue_slots": ("smsp__issue_active.avg.pct_of_peak_sustained_active", "%", "1", 0.01),
    **{
        f"{STALL}{reason}": (
            f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio",
            "",
            "1",
            1.0,
        )
        for reason in STALLS
    },
}
TIMEOUT_S = 300.0


class CountersUnavailableError(Exception):
    """ncu is not installed, or may not read this GPU's counters; the message says which."""


def read_counters(arguments: Sequence[str]) -> pd.DataFrame:
    """Return the counters of the kernels that `cs336-systems ARGUMENTS` runs while it profiles.

    A row a kernel, as from `parse_counters`: those between the profiler's start and stop. Raises
    CountersUnavailableError if there is no ncu or it has no access; RuntimeError with ncu's last
    line if the command fails otherwise.
    """
    if shutil.which("ncu") is None:
        raise CountersUnavailableError("ncu is not on PATH")

    metrics = ",".join(metric for metric, *_ in COUNTERS.values())
    command = [
        "ncu",
        "--csv",
        "--page=raw",
        "--print-units=base",
        "--clock-control=none",
        "--profile-from-start=off",
        "--target-processes=all",
        f"--metrics={metrics}",
        sys.executable,
        "-m",
        "cs336_systems",
        *arguments,
        "--tool",
        "api",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)

    # Missing access is told apart from a command that fails.
    messages = [
        line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==ERROR==")
    ]
    for message in messages:
        if (
            "ERR_NVGPUCTRPERM" in message
            or "initialize the profiler" in message
            or "not supported" in message
        ):
            raise CountersUnavailableError(
                f"ncu cannot read the counters: {message.removeprefix('==ERROR==').strip()}"
            )
    if done.returncode:
        last = messages or (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(f"ncu ended with exit code {done.returncode}: {last[-1]}")
    return parse_counters(done.stdout)


def parse_counters(text: str) -> pd.DataFrame:
    """Return a row for each kernel on ncu's raw CSV page: its `name` and quantities of COUNTERS.

    Rows are in the page's order, quantities in our units. The page stands between whatever else the
    program printed. A counter that the GPU lacks is NaN. Raises ValueError if ncu has a counter in
    another unit than COUNTERS, or in words.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    while lines and not lines[0].startswith('"ID"'):
        del lines[0]
    page = io.StringIO("\n".join(lines or ['"Kernel Name"']))
    units = pd.read_csv(page, nrows=1, dtype=str, keep_default_na=False)  # the row below the header
    page.seek(0)
    kernels = pd.read_csv(page, skiprows=[1], thousands=",")

    found = pd.DataFrame({"name": kernels["Kernel Name"]})
    for quantity, (metric, unit, _, factor) in COUNTERS.items():
        values = kernels.get(metric, pd.Series(dtype=float))
        if not pd.api.types.is_numeric_dtype(values):
            raise ValueError(f"ncu's {metric} must be numbers, got {', '.join(map(repr, values))}")
        if unit and values.notna().any() and units[metric][0].lower() != unit:
            raise ValueError(f"ncu's {metric} must be in {unit}, got {units[metric][0]!r}")
        found[quantity] = values * factor
    return found
