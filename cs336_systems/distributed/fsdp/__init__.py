"""Fully sharded data parallelism (ZeRO stage 3): each rank keeps its rows of every weight.

Read the story in this order: `plan.py`, `weight.py`, `gather.py`, `unit.py`, `wrapper.py`,
`unit_call.py`, `reduce.py`. `unit_guards.py` and `agreement.py` hold its checks.
"""

from cs336_systems.distributed.fsdp.plan import wrap_blocks
from cs336_systems.distributed.fsdp.wrapper import FSDP, gather_full_params, load_full_params

__all__ = ["FSDP", "gather_full_params", "load_full_params", "wrap_blocks"]
