"""Beyond the handout: `kernel_counters`, what limits the attention kernels, as the GPU's own counters say.

Tensor cores that are busy for all of a kernel's cycles leave nothing to gain but the clock. What keeps them from it is
what warps wait for: exponentials, barriers, products in flight, memory. Each of our kernels stands beside cuDNN's on
four of the shapes where the two are compared: in each pass the kernel that takes the longest.
"""

from __future__ import annotations

from collections.abc import Iterator

from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments.attention import sized_shape
from cs336_systems.experiments.cells import Cell, Measurement, Row, Unsupported
from cs336_systems.experiments.implementations import build
from cs336_systems.measure.counters import COUNTERS, CountersUnavailableError, KernelCounters, read_counters

PROBLEM = "kernel_counters"
COUNTED = ("triton", "hopper", "sdpa_cudnn")
SHAPES = {
    "tiny": ((1, 1, 64, 64, True),),
    "smoke": ((1, 1, 128, 64, True),),
    "handout": (
        (4, 32, 4096, 64, True),
        (1, 16, 16384, 64, True),
        (1, 16, 16384, 128, True),
        (1, 64, 8192, 128, False),
    ),
}
MODES = ("forward", "backward")
ROWS = tuple(
    Row(mode=mode, quantity=quantity, unit=unit) for mode in MODES for quantity, (_, _, unit, _) in COUNTERS.items()
)


def kernel_counters_cells(run: RunConfig) -> list[Cell]:
    """Every implementation on every shape."""
    return [
        Cell(problem=PROBLEM, case=sized_shape(run, *sizes), implementation=name, rows=ROWS)
        for sizes in SHAPES[run.scale]
        for name in COUNTED
    ]


def measure_kernel_counters(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """The counters of each pass's longest kernel, one sample each; `Unsupported` where they cannot be read."""
    shape, name = cell.case, cell.implementation
    if run.device != "cuda":
        raise Unsupported("a CPU has no counters that ncu reads")
    build(name, shape, run.device)  # refuses what cannot run here
    try:
        forward = read_counters(profile_arguments(name, shape, "forward"))
        both = read_counters(profile_arguments(name, shape, "forward_backward"))
    except CountersUnavailableError as error:
        raise Unsupported(str(error)) from error
    for mode, kernel in zip(MODES, longest_of_passes(forward, both)):
        for row in ROWS:
            if row.mode != mode:
                continue
            value = kernel.values.get(row.quantity)
            if value is None:
                yield Measurement(row=row, kernel=kernel.name, skipped="this GPU has no such counter")
            else:
                yield Measurement(row=row, kernel=kernel.name, samples=[value])


def profile_arguments(implementation: str, shape: AttentionShape, mode: str) -> list[str]:
    """What `cs336-systems` is told, to run `mode` once between the profiler's start and stop."""
    sizes = "x".join(map(str, (shape.batch, shape.heads, shape.seqlen_q, shape.head_dim)))
    mask = "--causal" if shape.is_causal else "--full"
    options = ["--implementation", implementation, "--precision", shape.dtype, mask, "--device", "cuda", "--steps", "1"]
    return ["profile", sizes, "--mode", mode, *options]


def longest_of_passes(
    forward: list[KernelCounters], both: list[KernelCounters]
) -> tuple[KernelCounters, KernelCounters]:
    """The longest kernel of the forward pass, and of `both` passes the longest that the forward does not run.

    RuntimeError where a pass has none.
    """
    names = {kernel.name for kernel in forward}
    backward = [kernel for kernel in both if kernel.name not in names]
    if not forward or not backward:
        raise RuntimeError(f"ncu saw {len(forward)} kernels of the forward pass and {len(backward)} of the backward")
    return max(forward, key=_time), max(backward, key=_time)


def _time(kernel: KernelCounters) -> float:
    return kernel.values["kernel_time"]
