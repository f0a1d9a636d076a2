"""`cs336-systems doctor`: what this machine is and what runs on it."""

from __future__ import annotations

from typing import Annotated

import typer

from cs336_systems.commands.machine import show_machine
from cs336_systems.commands.shared import DeviceOption, one_line_errors


def doctor(
    device: DeviceOption = "auto",
    measure: Annotated[bool, typer.Option("--measure", help="Measure copies, matmuls and our back ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what this machine is, which attention back ends run on it, and what is missing for the others."""
    with one_line_errors():
        show_machine(device, measure=measure, as_json=as_json)
