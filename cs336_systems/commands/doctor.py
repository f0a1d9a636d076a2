"""`cs336-systems doctor`: what this machine is and what runs on it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cs336_systems.commands.kernels import show_kernels
from cs336_systems.commands.masks import show_mask
from cs336_systems.commands.shared import one_line_errors


def doctor(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compile the tables' kernels: registers, spills, shared memory.")
    ] = False,
    arch: Annotated[str | None, typer.Option(help="With --kernels: sm80, sm86, sm89, sm90 or sm100.")] = None,
    mask: Annotated[
        str | None,
        typer.Option(help="Diagnose a mask: causal, window:512, document:100,28, random:0.1, tokens:0.1, a+b, ..."),
    ] = None,
    seqlen: Annotated[int | None, typer.Option(help="With --mask: queries and keys (4096).")] = None,
    block_size: Annotated[int | None, typer.Option(help="With --mask: rows and columns of a tile (128).")] = None,
    heads: Annotated[int | None, typer.Option(help="With --mask: heads with a random mask each (1).")] = None,
    seed: Annotated[int, typer.Option(help="With --mask: seed of what is random.")] = 0,
) -> None:
    """Say what this machine is, which attention back ends run on it, and what is missing for the others."""
    if kernels or arch is not None:
        with one_line_errors():
            if not kernels:
                raise ValueError("--arch goes with --kernels")
            show_kernels(arch)
        return
    if mask is not None or (seqlen, block_size, heads) != (None, None, None):
        with one_line_errors():
            if mask is None:
                raise ValueError("--seqlen, --block-size and --heads go with --mask")
            show_mask(mask, seqlen=seqlen, block_size=block_size, heads=heads, seed=seed)
        return
    from cs336_systems.device import available_backends, device_peak, get_device_info, recommended_dtype
    from cs336_systems.experiments.sweep import software_versions

    info = get_device_info()
    peak = device_peak(info)
    table = Table(show_header=False, box=None)
    for key, value in info.to_dict().items():
        table.add_row(key, str(value))
    for package, version in software_versions().items():
        table.add_row(package, version)
    table.add_row("recommended dtype", recommended_dtype(info.compute_capability))
    if info.kind == "cuda":
        table.add_row("peak", f"{peak} " if peak else "unknown GPU: no peak, so no MFU")
    for backend, state in available_backends(info).items():
        table.add_row(f"backend {backend}", state)
    Console().print(table)
