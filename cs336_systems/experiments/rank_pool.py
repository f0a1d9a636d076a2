"""Ranks on a CPU that stay for the next cell: starting them takes a laptop longer than most cells of a small scale.

    results = pooled(measure, 2, case)      # as run_ranks(measure, 2, case), in the processes of the call before

One job of `run_ranks`, in a thread, whose function serves calls. What fails ends the job, as it would end one of its
own, and the next call starts another. On GPUs every cell has processes of its own: what a process has allocated,
compiled or fragmented is part of what is measured there.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from threading import Thread
from typing import Any

import torch

from cs336_systems.distributed.launch import RankError, run_ranks

POLL_S = 0.05
END_S = 10.0  # that ranks get to leave when they are told to


class RankPool:
    """`num_ranks` processes of one gloo group, which call what they are sent until `close`, or until a call fails."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.num_ranks = num_ranks
        pairs = [multiprocessing.get_context("spawn").Pipe() for _ in range(num_ranks)]
        self._pipes = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._pids: list[int] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(timeout_s,), name="ranks", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `function(rank, num_ranks, *args)` by rank; `RankError` as `run_ranks` raises it.

        Whatever is raised, no process of the pool is left.
        """
        try:
            if not self._pids:
                self._pids = [self._receive(pipe) for pipe in self._pipes]
            for pipe in self._pipes:
                pipe.send((function, args))
            return [self._receive(pipe) for pipe in self._pipes]
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """End the processes in good order."""
        for pipe in self._pipes if self.is_alive else ():
            with contextlib.suppress(OSError):
                pipe.send(None)
        self._thread.join(END_S)
        self._end()

    def _run(self, timeout_s: float) -> None:
        try:
            run_ranks(_serve, self.num_ranks, self._theirs, timeout_s=timeout_s)
        except (RankError, ValueError, OSError) as error:  # all that run_ranks raises
            self._error = error

    def _receive(self, pipe: Connection) -> Any:
        while not pipe.poll(POLL_S):
            if not self.is_alive and not pipe.poll():
                raise self._error or RuntimeError("the ranks ended without an error")
        return pipe.recv()

    def _end(self) -> None:
        for pid in self._pids if self.is_alive else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._thread.join(END_S)
        for pipe in (*self._pipes, *self._theirs):
            pipe.close()


_pools: list[RankPool] = []  # the one of this process, if any


def pooled(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float) -> list[Any]:
    """`run_ranks(function, num_ranks, *args)` over gloo on the CPU, in ranks that are there if there are any."""
    if _pools and (not _pools[0].is_alive or _pools[0].num_ranks != num_ranks):
        close_pool()
    if not _pools:
        _pools.append(RankPool(num_ranks, timeout_s))
        # Before multiprocessing waits, at the end of this process, for its children.
        Finalize(None, close_pool, exitpriority=10)
    return _pools[0].call(function, *args)


def close_pool() -> None:
    """End the ranks that `pooled` has kept; does nothing where there are none."""
    while _pools:
        _pools.pop().close()


def _serve(rank: int, num_ranks: int, pipes: list[Connection]) -> None:
    """A rank: say which process it is, then answer calls until None."""
    pipe = pipes[rank]
    pipe.send(os.getpid())
    while (task := pipe.recv()) is not None:
        function, args = task
        torch.manual_seed(0)
        pipe.send(function(rank, num_ranks, *args))
        del task, function, args
        gc.collect()  # wrappers and their hooks refer to each other
