"""Starts the ranks of a distributed job: spawned here, or handed to us by torchrun. One function serves both.

    def train(rank, num_ranks, steps): ...             # the default process group is up when it is called

    losses = run_ranks(train, 2, 100)                   # spawns two processes here; a list, a result a rank
    losses = launch(train, 2, 100)                      # the same, or this process's part of a torchrun job

Phases of `run_ranks`: the parent opens a store on a free loopback port of its own, starts the ranks and waits for
their reports; each rank joins the group, calls the function, reports and waits; when all have reported they are let
go. So no rank leaves the group while another still talks to it, and no port is chosen that somebody else may take.

When a rank fails the others are ended and `RankError` tells the first failure. A rank that was killed reports
nothing, and its peers report broken connections: those are consequences and are told only if nothing else is known.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.distributed.processes import end_with_parent, end_with_starter, exit_reason

BACKENDS = ("gloo", "nccl")
DEVICES = ("cpu", "cuda")
LOOPBACK = "127.0.0.1"
DEFAULT_TIMEOUT_S = 120.0  # that a collective waits for the other ranks
START_TIMEOUT_S = 300.0  # that a rank waits for the others to be up: importing torch on a cold disk
GRACE_S = 2.0  # after the first failure, in which the others may say more about it
POLL_S = 0.5
STOP_TIMEOUT_S = 10.0
START_METHODS = ("spawn", "forkserver")
PRELOADED = ("torch._dynamo", "cs336_systems.distributed.launch")  # the first is what an optimizer imports
START_METHOD = "spawn"  # where the caller names none
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RankError(RuntimeError):
    """A rank failed. `rank` is which; the others are "" or False if its process died.

    `error_type` is the name of its exception, `reason` that exception's message, and `is_argument_error` says whether
    it is a ValueError, TypeError or OSError: a caller's mistake, of which the message is all there is to know.
    """

    def __init__(
        self, message: str, rank: int, error_type: str = "", reason: str = "", is_argument_error: bool = False
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.error_type = error_type
        self.reason = reason
        self.is_argument_error = is_argument_error


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where this process stands in the job."""

    rank: int
    num_ranks: int
    local_rank: int  # among the ranks of this host
    device: torch.device  # this rank's


@dataclass(frozen=True, kw_only=True)
class _Result:
    value: Any


@dataclass(frozen=True, kw_only=True)
class _Failure:
    rank: int
    when: float  # seconds, the host's clock
    text: str
    error_type: str = ""
    reason: str = ""
    is_argument_error: bool = False
    kind: int  # 0: an error of its own, 1: the process died, 2: a consequence of another rank's end


# Joining a group


def check_launch(
    num_ranks: int, backend: str, device: str, timeout_s: float, start_method: str = START_METHOD
) -> None:
    """Raise ValueError naming the argument that no job can be started with."""
    if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or num_ranks < 1:
        raise ValueError(f"num_ranks must be a positive int, got {num_ranks!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
    if start_method not in START_METHODS:
        raise ValueError(f"start_method must be one of {', '.join(START_METHODS)}, got {start_method!r}")
    if start_method == "forkserver" and device != "cpu":
        raise ValueError(f"start_method 'forkserver' is for device 'cpu', got {device!r}: CUDA may not survive a fork")
    if backend == "nccl" and device != "cuda":
        raise ValueError("backend 'nccl' moves CUDA tensors only: it needs device 'cuda', got 'cpu'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, and torch.cuda.is_available() is False")


def _check_gpus(num_local_ranks: int, backend: str) -> None:
    """NCCL refuses two ranks on one GPU, late and obscurely; gloo may share it."""
    if backend == "nccl" and num_local_ranks > torch.cuda.device_count():
        raise ValueError(
            f"backend 'nccl' needs a GPU a rank: num_ranks is {num_local_ranks} on this host, "
            f"which has {torch.cuda.device_count()}"
        )


def rank_device(device: str, local_rank: int) -> torch.device:
    """The device of the rank `local_rank` of its host; ranks beyond the GPUs share them."""
    return torch.device("cuda", local_rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")


def _join(
    store: dist.Store | None, rank: int, num_ranks: int, local_rank: int, backend: str, device: str, timeout_s: float
) -> RankInfo:
    """Make the default process group of this rank, and its GPU the current one. Without `store`, MASTER_* say where."""
    own_device = rank_device(device, local_rank)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    dist.init_process_group(
        backend,
        init_method="env://" if store is None else None,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
        device_id=own_device if backend == "nccl" else None,  # connects now, not in the first timed collective
    )
    return RankInfo(rank=rank, num_ranks=num_ranks, local_rank=local_rank, device=own_device)


# A job that torchrun started


def is_torchrun() -> bool:
    """Whether this process is a rank that torchrun (or a Slurm script in its manner) started."""
    return all(name in os.environ for name in TORCHRUN_VARIABLES)


def init_from_environment(backend: str = "gloo", device: str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S) -> RankInfo:
    """Join the process group that torchrun's variables describe; the caller ends it with `leave_group`.

    Raises ValueError naming a variable that is missing or no number, and what `run_ranks` raises for arguments.
    """
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be set in the environment: start this with torchrun")
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise ValueError(f"{name} must be a non-negative number, got {os.environ[name]!r}")
        numbers[name] = int(os.environ[name])
    rank, num_ranks, local_rank = numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]
    check_launch(num_ranks, backend, device, timeout_s)
    if rank >= num_ranks:
        raise ValueError(f"RANK must be less than WORLD_SIZE={num_ranks}, got {rank}")
    _check_gpus(local_rank + 1, backend)
    collect_garbage_at_exit()
    return _join(None, rank, num_ranks, local_rank, backend, device, timeout_s)


def leave_group() -> None:
    """Wait for the other ranks, then end the default process group; does nothing where there is none."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def collect_garbage_at_exit() -> None:
    """Keep gloo from aborting a process that has finished.

    A wrapper and its hooks refer to each other, so they, and the group that they hold, may live until the interpreter
    tears down; gloo's threads then meet a dead interpreter (3 to 13 % of two-rank jobs on torch 2.13).
    """
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)


def launch(
    function: Callable[..., Any],
    num_ranks: int | None,
    *args: Any,
    backend: str = "gloo",
    device: str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    start_method: str | None = None,
) -> list[Any]:
    """`run_ranks`, or inside a torchrun job this rank's call of `function`, whose list then holds one result.

    Under torchrun `num_ranks` may be None; another number than WORLD_SIZE raises ValueError.
    """
    if not is_torchrun():
        if num_ranks is None:
            raise ValueError("num_ranks must be given where torchrun does not say it")
        return run_ranks(
            function, num_ranks, *args, backend=backend, device=device, timeout_s=timeout_s, start_method=start_method
        )
    if num_ranks is not None and str(num_ranks) != os.environ["WORLD_SIZE"]:
        raise ValueError(f"num_ranks must be torchrun's WORLD_SIZE={os.environ['WORLD_SIZE']}, got {num_ranks}")
    info = init_from_environment(backend, device, timeout_s)
    result = function(info.rank, info.num_ranks, *args)  # where it raises, torchrun ends the other ranks
    leave_group()
    return [result]


# A job of this process's own


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "gloo",
    device: str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    start_method: str | None = None,
) -> list[Any]:
    """The results of `function(rank, num_ranks, *args)` in `num_ranks` new processes, in the order of ranks.

    Args:
        function: at the top level of an importable module, since the processes import it.
        args, results: what multiprocessing can send. CPU tensors travel in shared memory, so ranks see each other's
            writes to an argument; a CUDA tensor dies with its process and is no result.
        backend: "gloo", or "nccl", which needs device "cuda" and a GPU a rank.
        device: "cuda" makes GPU rank % (number of GPUs) current in each rank.
        timeout_s: that a collective waits for the other ranks before it fails. There is no limit on the whole.
        start_method: "spawn", the default, starts processes that import all they need. "forkserver", for device "cpu",
            copies one process that has imported PyTorch, which saves seconds a job. That process, started by the first
            such job, keeps the environment that it then sees.

    Raises:
        ValueError: for arguments no job can be started with.
        RankError: with the first failing rank's traceback, or how it died. No process is left then, or at Ctrl-C.
    """
    start_method = START_METHOD if start_method is None else start_method
    check_launch(num_ranks, backend, device, timeout_s, start_method)
    if device == "cuda":
        _check_gpus(num_ranks, backend)
    name = getattr(function, "__qualname__", "")
    if "<locals>" in name or "<lambda>" in name:
        raise ValueError(f"function must be at the top level of a module, for the ranks to import it, got {name}")
    store = _loopback_store()
    context: Any = multiprocessing.get_context(start_method)
    if start_method == "forkserver":  # without effect once the server runs
        context.set_forkserver_preload([*PRELOADED, *{function.__module__} - {"__main__"}])
    parent_pid = os.getpid() if start_method == "spawn" else None  # the server starts them, and outlives us with them
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(num_ranks):
            pipe, child_pipe = context.Pipe()
            pipes.append(pipe)
            job = (rank, num_ranks, backend, device, timeout_s)
            process = context.Process(
                target=_rank_main, args=(child_pipe, parent_pid, store.port, job, function, args), name=f"rank-{rank}"
            )
            process.start()
            processes.append(process)
            child_pipe.close()
        results = _collect(processes, pipes)
        for pipe in pipes:
            pipe.send(None)  # all have reported: leave
        for process in processes:
            process.join(STOP_TIMEOUT_S)
        return results
    except BrokenPipeError:
        raise RankError(_last_words(processes), rank=_first_dead(processes)) from None
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _loopback_store() -> dist.TCPStore:
    """A store that listens on a free port of the loopback interface only, for as long as the object lives."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    port = listener.getsockname()[1]
    # The store owns and closes the descriptor.
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


def _collect(processes: list[Any], pipes: list[Connection]) -> list[Any]:
    """The ranks' results once all have reported; RankError, soon after the first failure, if one did not succeed."""
    results: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    deadline = float("inf")
    while len(results) + len(failures) < len(processes) and time.monotonic() < deadline:
        waiting = [rank for rank in range(len(processes)) if rank not in results and rank not in failures]
        # Before reading: what a dead rank has sent is then in its pipe. A forked grandchild can keep a pipe open, so
        # its end says less than the exit code.
        dead = [rank for rank in waiting if processes[rank].exitcode is not None]
        ready = wait([pipes[rank] for rank in waiting], POLL_S if not dead else 0)
        for rank in waiting:
            if pipes[rank] not in ready and rank not in dead:
                continue
            report = _receive(pipes[rank], processes[rank], rank)
            if isinstance(report, _Failure):
                failures[rank] = report
                deadline = min(deadline, time.monotonic() + GRACE_S)
            elif report is not None:
                results[rank] = report.value
    if failures:
        first = min(failures.values(), key=lambda failure: (failure.kind, failure.when))
        text = f"rank {first.rank} of {len(processes)} {first.text}"
        silent = [str(rank) for rank in range(len(processes)) if rank not in failures and rank not in results]
        if first.kind == 2 and silent:
            text += f"\nIt waited for other ranks; nothing was heard of {', '.join(silent)}, which may hang."
        raise RankError(text, first.rank, first.error_type, first.reason, first.is_argument_error)
    return [results[rank] for rank in range(len(processes))]


def _receive(pipe: Connection, process: Any, rank: int) -> _Result | _Failure | None:
    """The report in `pipe`, or that the process died without one."""
    try:
        if pipe.poll():
            report = pipe.recv()
            assert isinstance(report, _Result | _Failure)
            return report
    except (EOFError, ConnectionResetError):
        process.join(STOP_TIMEOUT_S)
    return _Failure(rank=rank, when=time.time(), text=f"died ({exit_reason(process.exitcode)})", kind=1)


def _first_dead(processes: list[Any]) -> int:
    return next((rank for rank, process in enumerate(processes) if process.exitcode is not None), 0)


def _last_words(processes: list[Any]) -> str:
    rank = _first_dead(processes)
    return f"rank {rank} of {len(processes)} died ({exit_reason(processes[rank].exitcode)}) after its result"


def _rank_main(
    pipe: Connection,
    parent_pid: int | None,
    port: int,
    job: tuple[int, int, str, str, float],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """A rank's main: join, call, report, wait for the others, leave without the interpreter's tear-down."""
    if parent_pid is None:
        end_with_starter()
    else:
        end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    rank, num_ranks, backend, device, timeout_s = job
    try:
        if device == "cpu":
            # Ranks that each took every core would wait for each other's threads.
            torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=START_TIMEOUT_S))
        _await_all(store, num_ranks)
        _join(dist.PrefixStore("group", store), rank, num_ranks, rank, backend, device, timeout_s)
        pipe.send(_Result(value=function(rank, num_ranks, *args)))
        pipe.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        pipe.send(_failure(rank, error))  # with its traceback, which the parent tells if this was the first
        _exit(1)
        raise
    _exit(0)


def _await_all(store: dist.TCPStore, num_ranks: int) -> None:
    """Wait until every rank is up, so that a short time-out of collectives need not cover the start of a process."""
    if store.add("ranks-up", 1) == num_ranks:
        store.set("all-up", "1")
    store.wait(["all-up"])


def _failure(rank: int, error: BaseException) -> _Failure:
    # gloo raises plain RuntimeErrors that name its source file; the others have a class.
    consequence = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
    reason = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]  # what fits into a table
    text = f"failed: {reason}\n" + "".join(traceback.format_exception(error)).rstrip()
    return _Failure(
        rank=rank,
        when=time.time(),
        text=text,
        error_type=type(error).__name__,
        reason=str(error),
        is_argument_error=isinstance(error, ValueError | TypeError | OSError),
        kind=2 if consequence else 0,
    )


def _exit(code: int) -> None:
    """End the process here: gloo's threads may abort in the interpreter's tear-down, after all is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
