"""`cs336-systems generate`: continue a prompt with a model that `train` saved in a folder."""

import os
from pathlib import Path
from typing import Annotated

import typer

from cs336_systems.commands.shared import (
    DeviceOption,
    ends_at_a_signal,
    one_line_errors,
    out_of_memory_in_one_line,
    wait_briefly,
)


def generate(
    *,
    out: Annotated[Path, typer.Option(help="Folder of a run, as `train --out` left it.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "Alice ",
    length: Annotated[int, typer.Option(help="Characters to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the most likely character.")] = 0.8,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest characters of this probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 0,
    device: DeviceOption = "auto",
) -> None:
    """Write text with the newest checkpoint of a training run."""
    with one_line_errors(), ends_at_a_signal("interrupted"):
        wait_briefly(os.environ)
        import torch

        from cs336_systems.device import resolve_device
        from cs336_systems.distributed.checkpoint import load_checkpoint
        from cs336_systems.model import build_model
        from cs336_systems.training.folder import read_config
        from cs336_systems.training.loop import write_text

        if not prompt:
            raise ValueError("--prompt must not be empty")
        if length < 1:
            raise ValueError(f"--length must be at least 1, got {length}")
        if not 0 <= seed < 2**63:
            raise ValueError(f"--seed must be from 0 to {2**63 - 1}, got {seed}")
        config, _ = read_config(out)
        on = torch.device(resolve_device(device))
        dtype = getattr(torch, config.precision.parameters)
        with out_of_memory_in_one_line():
            model = build_model(config.model, attention="sdpa", device=on, dtype=dtype)
            load_checkpoint(out / "checkpoints", model)
            written = write_text(
                model, prompt, length, device=on, temperature=temperature, top_p=top_p, seed=seed
            )
        typer.echo(prompt + written)
