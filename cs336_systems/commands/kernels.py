"""Tables of compiled kernels, for `doctor --kernels` and `tune flash --compile-only`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from cs336_systems.commands.sweeps import progress_bar
from cs336_systems.commands.terminal import show_table

if TYPE_CHECKING:
    from cs336_systems.compiler.hopper_reports import HopperReport
    from cs336_systems.compiler.offline import CompileReport, CompileRequest
    from cs336_systems.config import DTypeName

KIB = 1024
HOPPER = "sm90"
LINE_EVERY = 10  # kernels between two lines of progress, where there is no terminal


def show_kernels(arch: str | None) -> None:
    """Compile every configuration in the table of `arch` and print what the compiler reports.

    With None the architecture is this machine's. For Hopper its own kernels follow.
    """
    reports = compile_with_progress(shipped_requests(arch or machine_arch("doctor --kernels")))
    print_reports(reports)
    spilling = [
        report
        for report in reports
        if report.request.dtype != "float32" and report.request.head_dim <= 128
    ]
    count = sum(report.spill_bytes > 0 for report in spilling)
    print(f"16-bit kernels up to head dim 128 that spill: {count} of {len(spilling)}")
    if reports[0].request.arch == HOPPER:
        show_hopper_kernels()


def machine_arch(command: str) -> str:
    """Return the architecture of this machine's GPU, such as "sm90".

    ValueError, which names `command`, if this machine has no GPU that the compiler supports.
    """
    from cs336_systems.compiler.offline import ARCHITECTURES, arch_of_capability
    from cs336_systems.device import get_device_info

    info = get_device_info()
    arch = arch_of_capability(info.compute_capability)
    if arch is None:
        raise ValueError(
            f"{command} compiles for one of {', '.join(ARCHITECTURES)}, and {info.name} is none: "
            "name one with --arch"
        )
    return arch


def shipped_requests(arch: str) -> list[CompileRequest]:
    """Return a compilation request for every configuration in the table of `arch`.

    Each is compiled causal and not, a forward also with split keys. The 16-bit dtypes compile
    alike, so bfloat16 stands for both. ValueError for an unknown architecture.
    """
    from cs336_systems.attention.tiles.choice import TABLES
    from cs336_systems.compiler.offline import CompileRequest, check_arch

    check_arch(arch)
    dtypes: dict[int, DTypeName] = {2: "bfloat16", 4: "float32"}
    return [
        CompileRequest(
            config=config,
            arch=arch,
            head_dim=tile,
            dtype=dtypes[width],
            is_causal=is_causal,
            is_split=is_split,
        )
        for (kernel, width, tile), row in TABLES[arch].items()
        for config in dict.fromkeys(row.configs)
        for is_split in ((False, True) if kernel == "forward" else (False,))
        for is_causal in (True, False)
    ]


def compile_with_progress(requests: Sequence[CompileRequest]) -> list[CompileReport]:
    """Compile `requests` and return the reports in the same order, showing a progress bar.

    Without a terminal a line is printed to stderr every LINE_EVERY kernels instead.
    """
    from cs336_systems.compiler.offline import compile_configs

    found = {}
    with progress_bar() as progress:
        if progress.disable:
            print(
                f"compiling {len(requests)} kernels, some seconds each", file=sys.stderr, flush=True
            )
        task = progress.add_task("compiling", total=len(requests), cell="")
        for report in compile_configs(requests):
            found[report.request] = report
            progress.advance(task)
            if progress.disable and len(found) % LINE_EVERY == 0:
                print(f"compiled {len(found)} of {len(requests)}", file=sys.stderr, flush=True)
    return [found[request] for request in requests]


def print_reports(reports: Sequence[CompileReport], max_spill_bytes: int = 0) -> None:
    """Print a table with one row per compilation, and what prevents a kernel from being used.

    A row gives a thread's registers and spilled bytes, and a program's shared memory. A spill of
    more than `max_spill_bytes` counts as an obstacle.
    """
    from cs336_systems.attention.tiles.choice import SHARED_MEMORY_LIMIT_BYTES
    from cs336_systems.compiler.offline import triton_version

    numbers = ("registers", "spilled bytes", "shared KiB", "waits")
    table = Table("configuration", "head dim", "dtype", "mask", *numbers, "remark", box=None)
    for column in table.columns[1:-1]:
        column.justify = "right"
    for report in reports:
        request = report.request
        measured = [
            report.registers,
            report.spill_bytes,
            f"{report.shared_bytes / KIB:.1f}",
            report.serialized,
        ]
        table.add_row(
            request.name,
            str(request.head_dim),
            request.dtype,
            "causal" if request.is_causal else "full",
            *(["-"] * len(measured) if report.failure else map(str, measured)),
            report.obstacle(max_spill_bytes),
        )
    archs = sorted({report.request.arch for report in reports})
    limits = ", ".join(
        f"{arch} has {SHARED_MEMORY_LIMIT_BYTES[arch] // KIB} KiB of shared memory"
        for arch in archs
    )
    print(
        f"triton {triton_version()}; {limits}; waits: places where ptxas made the tensor cores wait"
    )
    show_table(table)


def show_hopper_kernels() -> None:
    """Compile every Hopper kernel and print the reports, or say why Triton cannot compile them."""
    try:
        from cs336_systems.compiler.hopper_reports import (
            compile_hopper_kernels,
            shipped_hopper_kernels,
        )
    except ImportError as error:
        print(f"Hopper kernels: not compiled, since this Triton has no Gluon for Hopper ({error})")
        return
    requests = shipped_hopper_kernels()
    found = {report.request: report for report in compile_hopper_kernels(requests)}
    print_hopper_reports([found[request] for request in requests])


def print_hopper_reports(reports: Sequence[HopperReport]) -> None:
    """Print a table with one row per kernel, then each distinct main loop with its kernels."""
    names = (
        "registers",
        "spilled bytes",
        "spills a step",
        "shared KiB",
        "waits",
        "exp2 under matmuls",
    )
    table = Table("Hopper kernel", *names, "remark", box=None)
    for column in table.columns[1:-1]:
        column.justify = "right"

    loops: dict[str, list[str]] = {}
    for report in reports:
        # A kernel may have several main loops: the table shows the worst of each number.
        spills = max((loop.spills for loop in report.loops), default=0)
        overlap = min((loop.overlap for loop in report.loops), default=0.0)
        measured = (
            str(report.registers),
            str(report.spill_bytes),
            str(spills),
            f"{report.shared_bytes / KIB:.1f}",
            str(report.serialized),
            f"{100 * overlap:.0f} %",
        )
        table.add_row(
            report.request.name,
            *(["-"] * len(measured) if report.failure else measured),
            report.failure,
        )
        for loop in dict.fromkeys(map(str, report.loops)):
            loops.setdefault(loop, []).append(report.request.name)

    show_table(table)
    print(
        "waits: places where ptxas made the tensor cores wait; "
        "main loops, from their first matmul around:"
    )
    for loop, kernels in loops.items():
        print(f"  {loop}", *(f"    {kernel}" for kernel in kernels), sep="\n")
