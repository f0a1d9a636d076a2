"""`cs336-systems doctor`: describe this machine, its attention kernels, or the tiles of a mask."""

from typing import Annotated

import typer

from cs336_systems.commands.kernels import show_kernels
from cs336_systems.commands.machine_facts import show_machine
from cs336_systems.commands.mask_tiles import show_mask
from cs336_systems.commands.shared import DeviceOption, one_line_errors


def doctor(
    *,
    device: DeviceOption = "auto",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure copies, matmuls and our back ends.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", help="Compile the tables' kernels: registers, spills, shared memory."
        ),
    ] = False,
    arch: Annotated[
        str | None, typer.Option(help="With --kernels: sm80, sm86, sm89, sm90 or sm100.")
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(
            help="Diagnose a mask: causal, window:512, document:3000,1096, hilbert:7, "
            "random:0.1, a+b, ..."
        ),
    ] = None,
    seqlen: Annotated[
        int | None, typer.Option(help="With --mask: queries and keys (4096).")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="With --mask: rows and columns of a tile (128).")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="With --mask: heads with a random mask each (1).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="With --mask: seed of what is random (0).")
    ] = None,
) -> None:
    """Say what this machine is, which attention back ends run on it, and what the others lack."""
    about_mask = mask is not None or (seqlen, block_size, heads, seed) != (None,) * 4
    about_kernels = kernels or arch is not None
    with one_line_errors():
        if about_kernels + about_mask + (measure or as_json) > 1:
            raise ValueError("give --kernels or --mask alone, without --measure and --json")
        if arch is not None and not kernels:
            raise ValueError("--arch goes with --kernels")
        if about_mask and mask is None:
            raise ValueError("--seqlen, --block-size, --heads and --seed go with --mask")
        if about_kernels:
            show_kernels(arch)
        elif mask is not None:
            show_mask(mask, seqlen=seqlen, block_size=block_size, heads=heads, seed=seed)
        else:
            show_machine(device, measure=measure, as_json=as_json)
