"""The order in which a block is compiled, checkpointed and sharded, in one place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.distributed.fsdp.plan import find_blocks

Checkpointing = Literal["none", "reentrant", "non_reentrant"]
CHECKPOINTINGS: tuple[str, ...] = get_args(Checkpointing)


def wrap_blocks(model: nn.Module, *, checkpointing: Checkpointing = "none", compiled: bool = False) -> nn.Module:
    """Checkpoint, and compile, the forward of every block of `model` in place; call it before FSDP. Returns `model`.

    From the inside out: compile, checkpoint, shard. The compiler must see the plain forward, with neither hooks nor a
    recomputation in it. FSDP's hooks must lie outside of the checkpoint: the backward then gathers a block once, before
    the recomputation, and keeps it for the gradients that follow. Only `forward` is replaced, so that every module
    stays an instance of its own class under its own name.
    """
    if checkpointing not in CHECKPOINTINGS:
        raise ValueError(f"checkpointing must be one of {', '.join(CHECKPOINTINGS)}, got {checkpointing!r}")
    blocks = find_blocks(model)
    if not blocks:
        raise ValueError("model must hold its blocks in an nn.ModuleList, found none with weights")
    for block in blocks.values():
        forward: Callable[..., Any] = block.forward
        if compiled:
            forward = torch.compile(forward)
        if checkpointing != "none":
            forward = partial(checkpoint, forward, use_reentrant=checkpointing == "reentrant")
        block.forward = forward
    return model
