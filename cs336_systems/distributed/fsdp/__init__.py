"""Fully sharded data parallelism, in the order of reading: weights, units, communication, order, wrapper."""

from cs336_systems.distributed.fsdp.blocks import wrap_blocks
from cs336_systems.distributed.fsdp.wrapper import FSDP

__all__ = ["FSDP", "wrap_blocks"]
