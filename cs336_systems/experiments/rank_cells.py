"""Cells whose work is done by several ranks: children of the measuring process, which die with it.

`run_cell` is `run_ranks` with the errors of the ranks told as a cell's: out of memory, wrong result, or failed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.config import RunConfig
from cs336_systems.distributed.launch import RankError, run_ranks
from cs336_systems.experiments.cells import Disagreement, Unsupported
from cs336_systems.measure.memory import CPU_ALLOCATOR
from cs336_systems.measure.timing import plan_samples, time_once

COLLECTIVE_TIMEOUT_S = 240.0  # ranks differ in the time that they take to compile, allocate and load


def run_cell(
    function: Callable[..., Any], num_ranks: int, *args: Any, backend: str, run: RunConfig, from_scratch: bool = False
) -> list[Any]:
    """The ranks' results, or the exception that gives the cell's rows their status.

    `from_scratch`: also on a CPU every rank imports all it needs, where that is part of what is measured.
    """
    if run.device == "cuda" and backend == "nccl" and num_ranks > torch.cuda.device_count():
        raise Unsupported(f"needs {num_ranks} GPUs, this host has {torch.cuda.device_count()}")
    device = run.device if backend == "nccl" else "cpu"
    try:
        return run_ranks(
            function, num_ranks, *args, backend=backend, device=device, timeout_s=COLLECTIVE_TIMEOUT_S,
            start_method="forkserver" if run.device == "cpu" and not from_scratch else "spawn",
        )  # fmt: skip
    except RankError as error:
        first_line = str(error).splitlines()[0]
        out_of_memory = error.error_type in ("OutOfMemoryError", "MemoryError") or CPU_ALLOCATOR in error.reason
        if out_of_memory or error.error_type == "Disagreement":
            print(error, file=sys.stderr)  # with the rank's traceback, for the log: the record takes one line
        if out_of_memory:
            raise torch.OutOfMemoryError(first_line) from error
        if error.error_type == "Disagreement":
            raise Disagreement(first_line) from error
        raise


def agreed_samples(call: Callable[[], object], device: str, budget_ms: float, minimum: int) -> int:
    """How often to time `call`: rank 0's plan, on every rank, since one call more on one rank would wait for ever.

    What is there by now stays: left to the garbage collector it would be gone through in a timed call, for up to 0.2 s.
    """
    gc.collect()
    gc.freeze()
    dist.barrier()
    planned = plan_samples(time_once(call, device), budget_ms, minimum)
    count = torch.tensor([planned], device="cuda" if device == "cuda" else "cpu")
    dist.broadcast(count, src=0)
    return int(count.item())


def slowest(samples_by_rank: list[list[float]]) -> list[float]:
    """Of each repetition the time of the rank that took longest: a step is over when all are done."""
    return [max(samples) for samples in zip(*samples_by_rank)]
