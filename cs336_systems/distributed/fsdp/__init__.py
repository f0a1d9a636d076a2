"""Fully sharded data parallelism, in the order of reading: plan, unit, wrapper, call, reduce,
agreement.
"""

from cs336_systems.distributed.fsdp.plan import wrap_blocks
from cs336_systems.distributed.fsdp.wrapper import FSDP, gather_full_params, load_full_params

__all__ = ["FSDP", "gather_full_params", "load_full_params", "wrap_blocks"]
