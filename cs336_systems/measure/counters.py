"""What the GPU's own counters say of a kernel, read by NVIDIA's Nsight Compute (`ncu`): what limits it.

    output = read_counters(["profile", "1x16x16384x64", "--mode", "forward", ...])   # kernels of that call, in order
    kernel = max(output, key=lambda kernel: kernel.values["kernel_time"])
    kernel.values["tensor_pipe"]                                                      # share of its cycles

ncu runs a kernel several times, a few counters each, alone and with cold caches: times are not those of a benchmark,
and the clock is one that a GPU without other load holds. Shares of cycles and waits hold for the kernel all the same.
Metrics are named as in Nsight Compute's documentation; those of stalls as in its section of warp states.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

# What a warp waits for between two of its instructions, in cycles for each instruction that is issued.
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "selected", "short_scoreboard",
    "sleeping", "wait",
)  # fmt: skip
STALL = "stall_"
# quantity: (metric of ncu, its unit, our unit, ours for one of ncu's)
COUNTERS: dict[str, tuple[str, str, str, float]] = {
    "kernel_time": ("gpu__time_duration.sum", "ns", "ms", 1e-6),
    "sm_clock": ("sm__cycles_elapsed.avg.per_second", "hz", "GHz", 1e-9),
    "tensor_pipe": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "%", "1", 0.01),
    "exponential_pipe": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", "%", "1", 0.01),
    "issue_slots": ("smsp__issue_active.avg.pct_of_peak_sustained_active", "%", "1", 0.01),
    **{
        f"{STALL}{reason}": (f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio", "", "1", 1.0)
        for reason in STALLS
    },
}
NO_COUNTERS = ("", "n/a", "nan")  # what ncu writes for a metric that the GPU lacks
TIMEOUT_S = 300.0


class CountersUnavailableError(Exception):
    """ncu is not there, or may not read this GPU's counters; the message says which."""


@dataclass(frozen=True, kw_only=True)
class KernelCounters:
    """One launch: the kernel's name, and the quantities of COUNTERS that the GPU has."""

    name: str
    values: dict[str, float]  # unit "1": shares; of stalls, cycles that a warp waits for each of its instructions


def counters_command(arguments: Sequence[str]) -> list[str]:
    """`cs336-systems ARGUMENTS --tool api` under ncu: its CSV on standard output, clocks left as they are."""
    return [
        shutil.which("ncu") or "ncu", "--csv", "--page=raw", "--print-units=base", "--clock-control=none",
        "--profile-from-start=off", "--target-processes=all",
        f"--metrics={','.join(metric for metric, *_ in COUNTERS.values())}",
        sys.executable, "-m", "cs336_systems", *arguments, "--tool", "api",
    ]  # fmt: skip


def read_counters(arguments: Sequence[str]) -> list[KernelCounters]:
    """The kernels that `cs336-systems ARGUMENTS` runs between the profiler's start and stop, in order.

    CountersUnavailableError where there is no ncu or it has no access; RuntimeError with ncu's last line where the
    command fails otherwise.
    """
    if shutil.which("ncu") is None:
        raise CountersUnavailableError("ncu is not on PATH")
    done = subprocess.run(counters_command(arguments), capture_output=True, text=True, timeout=TIMEOUT_S)
    messages = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==ERROR==")]
    for message in messages:
        if "ERR_NVGPUCTRPERM" in message or "initialize the profiler" in message or "not supported" in message:
            raise CountersUnavailableError(f"ncu cannot read the counters: {message.removeprefix('==ERROR==').strip()}")
    if done.returncode:
        last = messages or (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(f"ncu ended with exit code {done.returncode}: {last[-1]}")
    return parse_counters(done.stdout)


def parse_counters(text: str) -> list[KernelCounters]:
    """The kernels of ncu's raw CSV page, between whatever else the program printed; ValueError on other units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    header = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        return []
    units, *rows = csv.DictReader(io.StringIO("\n".join(lines[header:])))
    kernels = []
    for row in rows:
        values = {}
        for quantity, (metric, unit, _, factor) in COUNTERS.items():
            value = row.get(metric, "").lower()
            if value in NO_COUNTERS:
                continue
            if unit and units[metric].lower() != unit:
                raise ValueError(f"ncu's {metric} must be in {unit}, got {units[metric]!r}")
            values[quantity] = float(value.replace(",", "")) * factor
        kernels.append(KernelCounters(name=row["Kernel Name"], values=values))
    return kernels
