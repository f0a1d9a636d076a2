"""The Hopper part of `doctor --kernels`: registers, spills, and the order of the main loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from cs336_systems.commands.kernels import KIB, print_table

if TYPE_CHECKING:
    from cs336_systems.attention.hopper.reports import HopperReport


def show_hopper_kernels() -> None:
    """Compile every Hopper kernel and print what came out, or why this Triton cannot."""
    try:
        from cs336_systems.attention.hopper.reports import compile_hopper_kernels, shipped_hopper_kernels
    except ImportError as error:
        print(f"Hopper kernels: not compiled, since this Triton has no Gluon for Hopper ({error})")
        return
    requests = shipped_hopper_kernels()
    found = {report.request: report for report in compile_hopper_kernels(requests)}
    print_hopper_reports([found[request] for request in requests])


def print_hopper_reports(reports: Sequence[HopperReport]) -> None:
    """A line a kernel, and below them the different main loops with the kernels that have them."""
    names = ("registers", "spilled bytes", "spills a step", "shared KiB", "waits", "exp2 under matmuls")
    table = Table("Hopper kernel", *names, "remark", box=None)
    for column in table.columns[1:-1]:
        column.justify = "right"
    loops: dict[str, list[str]] = {}
    for report in reports:
        spills = max((loop.spills for loop in report.loops), default=0)
        overlap = min((loop.overlap for loop in report.loops), default=0.0)
        measured = (
            str(report.registers), str(report.spill_bytes), str(spills), f"{report.shared_bytes / KIB:.1f}",
            str(report.serialized), f"{100 * overlap:.0f} %",
        )  # fmt: skip
        table.add_row(report.request.name, *(["-"] * len(measured) if report.failure else measured), report.failure)
        for loop in dict.fromkeys(map(str, report.loops)):
            loops.setdefault(loop, []).append(report.request.name)
    print_table(table)
    print("waits: places where ptxas made the tensor cores wait; main loops, from their first matmul around:")
    for loop, kernels in loops.items():
        print(f"  {loop}", *(f"    {kernel}" for kernel in kernels), sep="\n")
