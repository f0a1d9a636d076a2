"""Starts the ranks of a distributed job: spawned here, or handed to us by torchrun. One function
serves both.

    def train(rank, num_ranks, steps): ...             # the default process group is up when it is called

    losses = run_ranks(train, 2, 100)                   # spawns two processes here; a list, a result a rank
    losses = launch(train, 2, 100)                      # the same, or this process's part of a torchrun job

`torch.multiprocessing.start_processes` starts the ranks, and ends them when one fails. Added here
are what it lacks:

- the ranks meet in a store that this process opens on a free loopback port, and meet again when all
  have their results: no port may be taken by somebody else, and no rank leaves while another still
  talks to it;
- results come back, and of several failures the first: that connections to a rank broke is told if
  nothing else is;
- a rank ends with the process that started it, however that ended.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_storage
from torch.multiprocessing.spawn import ProcessException, _prctl_pr_set_pdeathsig, start_processes

from cs336_systems.device import get_device_info

DEFAULT_TIMEOUT_S = 120.0  # that a collective waits for the other ranks
# that a rank waits for the others to be up: importing torch on a cold disk
START_TIMEOUT = timedelta(seconds=300)
POLL_S = 0.02
MOST_SHOWN = 100_000  # characters of an error: the store takes some millions
GRACE_S = 2.0  # after the first failure, in which the others may say more about it
START_METHOD = "spawn"  # where the caller names none
# the first is what an optimizer imports
PRELOADED = ["torch._dynamo", "cs336_systems.distributed.spawn"]
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RankError(RuntimeError):
    """Rank `rank` failed, by an exception of the class `error_type` ("" if its process died) that
    says `reason`.

    `is_argument_error`: it is a ValueError, TypeError or OSError, whose message says all.
    """

    def __init__(
        self,
        text: str,
        rank: int,
        error_type: str = "",
        reason: str = "",
        is_argument_error: bool = False,
    ):
        super().__init__(text)
        self.rank, self.error_type, self.reason = rank, error_type, reason
        self.is_argument_error = is_argument_error


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "gloo",
    device: str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    start_method: str | None = None,
) -> list[Any]:
    """The results of `function(rank, num_ranks, *args)` in `num_ranks` new processes, in the order
    of ranks.

    `function` is at the top level of an importable file; arguments and results can be pickled, and
    CPU tensors of `args` are shared, each by a file descriptor; those of results are copied.

    Device "cuda" makes GPU rank % (number of GPUs) current in each rank; backend "nccl" needs a GPU
    a rank. A collective waits `timeout_s` for the other ranks. Start method "spawn", the default,
    starts processes that import all they need; "forkserver", for device "cpu", copies one that has
    imported PyTorch and has the environment of the first such job. ValueError for what cannot be
    started, RankError for a rank that fails; none is left then.
    """
    start_method = start_method or START_METHOD
    _check(function, num_ranks, backend, device, timeout_s)
    _check_importable(function)
    if start_method != "spawn" and (start_method, device) != ("forkserver", "cpu"):
        raise ValueError(
            f"start_method must be spawn, or forkserver for device 'cpu', got {start_method!r}"
        )
    if start_method == "forkserver":
        preloaded = [*PRELOADED, *{_module_of(function)} - {"__main__"}]
        # no effect once the server runs
        multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
    # no warning for each that it ends
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    listener = socket.create_server(("127.0.0.1", 0))
    port, fd = listener.getsockname()[1], listener.detach()  # the store closes it
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd
    )
    job = (num_ranks, backend, device, timeout_s)
    queue = multiprocessing.get_context(start_method).SimpleQueue()
    results: dict[int, Any] = {}
    arguments = (store.port, queue, job, function, args)
    ranks = start_processes(_rank_main, arguments, num_ranks, join=False, start_method=start_method)
    try:
        while not ranks.join(timeout=POLL_S, grace_period=GRACE_S):
            while not queue.empty():
                rank, results[rank] = queue.get()
                if len(results) == num_ranks:
                    store.set("all done", "")
        return [results[rank] for rank in range(num_ranks)]
    except ProcessException:
        exit_codes = [process.exitcode for process in ranks.processes]
        raise _first_failure(store, exit_codes, set(results)) from None
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
        queue.close()
        del store  # and its port: an error's traceback would hold this frame


def _rank_main(
    rank: int, port: int, queue: Any, job: tuple[int, str, str, float], function: Any, args: Any
) -> None:
    """A rank's main: meet, join, call, report, wait for the others, leave without the interpreter's
    tear-down.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent()
    num_ranks, backend, device, timeout_s = job
    # The second is for a failure: a thread may be waiting in the first, and later there may be no
    # socket left.
    store, reporting = (
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=START_TIMEOUT) for _ in range(2)
    )
    try:
        if device == "cpu":
            _share_cores(num_ranks)
        # a short time-out of collectives need not cover the start of a process
        if store.add("up", 1) == num_ranks:
            store.set("all up", "")
        store.wait(["all up"])
        _join_group(backend, device, rank, timeout_s, store=store, rank=rank, world_size=num_ranks)
        result = function(rank, num_ranks, *args)
        # for this last message: the function may share its own
        ForkingPickler.register(torch.UntypedStorage, _copied)
        queue.put((rank, result))
        store.wait(["all done"], timedelta(days=365))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        reporting.set(f"failure of {rank}", json.dumps(_describe(error)))
        _leave(1)
        raise
    _leave(0)


def _copied(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """How a queue sends the memory of CPU tensors: its bytes, where PyTorch shares it and keeps a
    file open for each.

    Once for all tensors that view it.
    """
    if storage.device.type != "cpu":
        return reduce_storage(storage)
    return _storage_of, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),)


def _storage_of(data: np.ndarray) -> torch.UntypedStorage:
    return torch.from_numpy(data).untyped_storage()


def _share_cores(num_ranks: int) -> None:
    """Ranks of one host that each took every core would wait for each other's threads."""
    cores = get_device_info("cpu").num_cores or 1
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores) // num_ranks))


def _leave(code: int) -> None:
    """End the process here: gloo's threads may abort in the interpreter's tear-down, after all is
    done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _describe(error: BaseException) -> dict[str, Any]:
    """A failure as the parent reads it."""
    # also where str(error) raises
    shown = "".join(traceback.format_exception_only(error)).strip()[:MOST_SHOWN]
    reason = shown.partition(": ")[2]
    # gloo raises plain RuntimeErrors that name its source file; the others have a class.
    is_consequence = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/" in reason
    )
    line = shown.splitlines()[0]  # what fits into a table
    text = f"failed: {line}\n" + "".join(traceback.format_exception(error)).rstrip()[:MOST_SHOWN]
    is_argument_error = isinstance(error, ValueError | TypeError | OSError)
    told = {
        "error_type": type(error).__name__,
        "reason": reason,
        "is_argument_error": is_argument_error,
    }
    # Kinds, the most telling first: 0 is an error of its own, 1 a death, 2 a consequence of another
    # rank's end.
    return {"kind": 2 if is_consequence else 0, "when": time.time(), "text": text, "told": told}


def _first_failure(
    store: dist.Store, exit_codes: list[int | None], succeeded: set[int]
) -> RankError:
    """What is to be told of a job of which some ranks failed, died or were ended."""
    failures: dict[int, dict[str, Any]] = {}
    for rank, code in enumerate(exit_codes):
        if store.check([f"failure of {rank}"]):
            failures[rank] = json.loads(store.get(f"failure of {rank}"))
        elif code not in (0, -signal.SIGTERM):  # by which those are ended that still ran
            failures[rank] = {
                "kind": 1,
                "when": 0.0,
                "text": f"died ({exit_reason(code)})",
                "told": {},
            }
    first, failure = min(failures.items(), key=lambda one: (one[1]["kind"], one[1]["when"]))
    text = f"rank {first} of {len(exit_codes)} {failure['text']}"
    silent = [
        str(rank)
        for rank in range(len(exit_codes))
        if rank not in failures and rank not in succeeded
    ]
    if failure["kind"] == 2:
        if silent:
            text += f"\nIt waited for others; nothing was heard of rank {', '.join(silent)}, which may hang."
        if succeeded:
            returned = ", ".join(map(str, sorted(succeeded)))
            text += f"\nNo longer in the job, since its function has returned: rank {returned}."
    return RankError(text, first, **failure["told"])


def exit_reason(code: int | None) -> str:
    """How a process ended, from its exit code: "signal SIGKILL", "exit code 1"."""
    return (
        f"signal {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"exit code {code}"
    )


def end_with_parent() -> None:
    """Let this process of multiprocessing's end when its starter is gone: nobody else stops one
    that hangs.
    """
    # on Linux, whatever it does; a fork server ends with its starter
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _module_of(function: Any) -> str:
    """The name of the module that new processes import for `function`, also where that is a
    `functools.partial`.
    """
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def _check_importable(function: Any) -> None:
    """ValueError where new processes cannot find `function`, or the program that it is started
    from.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    if "<" in (name := getattr(inner, "__qualname__", "")):  # a lambda, or within another function
        raise ValueError(
            f"function must be at the top level of a module, where new processes find it, got {name}"
        )
    main = sys.modules["__main__"]
    # none with -c and in a notebook, "<stdin>" where that is read
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (file is not None and os.path.isfile(file)):
        return
    if _module_of(function) == "__main__" or file is not None:
        shown = name or repr(function)
        raise ValueError(
            f"function must be in a file, which new processes import, got {shown} typed in a notebook, "
            "after -c or into stdin: write it to a file such as ranks.py and import it from there"
        )


def _check(function: Any, num_ranks: int, backend: str, device: str, timeout_s: float) -> None:
    """ValueError naming the argument that no job can be started with; `num_ranks` of this host."""
    if not callable(function):
        raise ValueError(f"function must be callable, got {function!r}")
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ValueError(f"timeout_s must be a positive number, got {timeout_s!r}")
    if type(num_ranks) is not int or num_ranks < 1:
        raise ValueError(f"num_ranks must be a positive int, got {num_ranks!r}")
    if (backend, device) not in (("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda")):
        raise ValueError(
            f"backend must be gloo, or nccl with device 'cuda', got {backend!r} and {device!r}"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, and torch.cuda.is_available() is False")
    # NCCL refuses that late and obscurely
    if backend == "nccl" and num_ranks > (have := torch.cuda.device_count()):
        raise ValueError(
            f"backend 'nccl' needs a GPU a rank: num_ranks is {num_ranks} on this host, which has {have}"
        )


def _join_group(backend: str, device: str, local_rank: int, timeout_s: float, **where: Any) -> None:
    """Make the default process group of this rank, and its GPU, shared by ranks beyond the GPUs,
    the current one.
    """
    own = None
    if device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        if backend == "nccl":  # connect now, not in the first timed collective
            own = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=own, **where)


def is_torchrun() -> bool:
    """Whether this process is a rank that torchrun (or a Slurm script in its manner) started."""
    return all(name in os.environ for name in TORCHRUN_VARIABLES)


def launch(
    function: Callable[..., Any],
    num_ranks: int | None,
    *args: Any,
    backend: str = "gloo",
    device: str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    start_method: str | None = None,
) -> list[Any]:
    """`run_ranks`, or inside a torchrun job this rank's call of `function`, whose list then holds
    one result.

    Under torchrun `num_ranks` may be None; another number than WORLD_SIZE raises ValueError.
    """
    if not is_torchrun():
        if num_ranks is None:
            raise ValueError("num_ranks must be given where torchrun does not say it")
        options: dict[str, Any] = {"backend": backend, "device": device, "timeout_s": timeout_s}
        return run_ranks(function, num_ranks, *args, **options, start_method=start_method)
    if num_ranks is not None and str(num_ranks) != os.environ["WORLD_SIZE"]:
        raise ValueError(
            f"num_ranks must be torchrun's WORLD_SIZE={os.environ['WORLD_SIZE']}, got {num_ranks}"
        )
    collect_garbage_at_exit()
    if "OMP_NUM_THREADS" not in os.environ:  # which torchrun sets, and Slurm does not
        _share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))
    local_rank = int(os.environ["LOCAL_RANK"])
    _check(function, local_rank + 1, backend, device, timeout_s)
    _join_group(backend, device, local_rank, timeout_s)
    # where it raises, torchrun ends the other ranks
    result = function(dist.get_rank(), dist.get_world_size(), *args)
    dist.barrier()
    dist.destroy_process_group()
    return [result]


def collect_garbage_at_exit() -> None:
    """Keep gloo, whose group may live in a cycle, from aborting a process that has finished: 3 to
    13 % of jobs did.
    """
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)
