"""Starting the ranks of a distributed job: as new processes of this host, or under torchrun.

    def train(rank, num_ranks, steps): ...   # called when the default process group is ready

    losses = run_ranks(train, 2, 100)        # starts two processes; a list, one result per rank
    losses = launch(train, 2, 100)           # the same, or this process's part of a torchrun job

`torch.multiprocessing.start_processes` starts the ranks, and ends them when one fails. This file
adds:

- a rendezvous: the ranks meet in a store that this process opens on a free loopback port, so no
  other program can take the port. They meet again when all have their results, so no rank leaves
  while another still communicates with it;
- results and errors: results come back to the caller. Of several failures the first is reported; a
  broken connection to another rank is reported only if there is nothing else;
- clean ends: a rank ends with the process that started it, in whatever way that has ended.
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
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_storage
from torch.multiprocessing.spawn import ProcessException, start_processes

from cs336_systems.config import FieldError
from cs336_systems.device import get_device_info
from cs336_systems.processes import end_with_parent, exit_reason

DEFAULT_TIMEOUT_S = 120.0  # how long a collective waits for the other ranks
# how long a rank waits for the others to start: importing torch from a cold disk takes long
START_TIMEOUT = timedelta(seconds=300)
POLL_S = 0.02
MOST_SHOWN = 100_000  # characters of an error that are kept; the store takes some millions
GRACE_S = 2.0  # after the first failure, for other ranks to report theirs
START_METHOD = "spawn"  # if the caller names none
# modules that a fork server imports; optimizers import torch._dynamo
PRELOADED = ["torch._dynamo", "cs336_systems.distributed.spawn"]
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RankError(RuntimeError):
    """Raised by `run_ranks` if a rank failed.

    Args:
        text: the message, with the rank's traceback if it raised an exception.
        rank: the rank that failed first.
        error_type: name of its exception's class; "" if its process died.
        reason: its exception's message.
        is_argument_error: whether the exception is a ValueError, TypeError or OSError, whose
            message needs no traceback.
        field_error: the arguments of its exception if that is a FieldError. The attribute is an
            equal FieldError, or None.
    """

    def __init__(
        self,
        text: str,
        rank: int,
        error_type: str = "",
        reason: str = "",
        is_argument_error: bool = False,
        field_error: Sequence[str] = (),
    ):
        super().__init__(text)
        self.rank, self.error_type, self.reason = rank, error_type, reason
        self.is_argument_error = is_argument_error
        self.field_error = FieldError(*field_error) if field_error else None


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "gloo",
    device: str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    start_method: str | None = None,
) -> list[Any]:
    """Run `function(rank, num_ranks, *args)` in `num_ranks` new processes; return their results.

    Args:
        function: a function at the top level of an importable file, or a `functools.partial` of
            one.
        args: further arguments; they and the results must be picklable. CPU tensors in `args` are
            shared with the ranks, each by a file descriptor; those in results are copied.
        backend: "gloo", or "nccl" with device "cuda", which needs one GPU per rank.
        device: "cpu", or "cuda", which makes GPU rank % (number of GPUs) current in each rank.
        timeout_s: how long a collective waits for the other ranks, in seconds.
        start_method: "spawn", the default, starts processes that import all they need.
            "forkserver", for device "cpu", copies a process that has imported PyTorch, and that
            keeps the environment of the first such job.

    Returns one result per rank, in rank order. Raises ValueError if the job cannot be started,
    RankError if a rank fails; no process is left then.
    """
    # check, and prepare the fork server
    start_method = start_method or START_METHOD
    _check(function, num_ranks, backend, device, timeout_s)
    _check_importable(function)
    if start_method != "spawn" and (start_method, device) != ("forkserver", "cpu"):
        raise ValueError(
            f"start_method must be spawn, or forkserver for device 'cpu', got {start_method!r}"
        )
    if start_method == "forkserver":
        preloaded = [*PRELOADED, *{_module_of(function)} - {"__main__"}]
        # without effect if the server runs already
        multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
    # start_processes would log a warning for each process that it ends
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)

    # open the store on a free port
    listener = socket.create_server(("127.0.0.1", 0))
    port, fd = listener.getsockname()[1], listener.detach()  # the store closes the socket
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd
    )

    # start the ranks
    job = (num_ranks, backend, device, timeout_s)
    queue = multiprocessing.get_context(start_method).SimpleQueue()
    results: dict[int, Any] = {}
    arguments = (store.port, queue, job, function, args)
    ranks = start_processes(_rank_main, arguments, num_ranks, join=False, start_method=start_method)

    # collect results until all ranks have ended, or one has failed
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
        del store  # frees the port: the traceback of an error would keep this frame alive


def _rank_main(
    rank: int, port: int, queue: Any, job: tuple[int, str, str, float], function: Any, args: Any
) -> None:
    """Run one rank: meet the others, join the group, call `function`, report, wait, and exit.

    It never returns: the process exits without the interpreter's tear-down.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_parent()
    num_ranks, backend, device, timeout_s = job
    # The second client reports a failure: a thread may be waiting in the first, and later the
    # process may have no socket left.
    store, reporting = (
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=START_TIMEOUT) for _ in range(2)
    )
    try:
        if device == "cpu":
            _share_cores(num_ranks)

        # Meet: so a short time-out of collectives need not cover the start of a process.
        if store.add("up", 1) == num_ranks:
            store.set("all up", "")
        store.wait(["all up"])

        # join, call
        _join_group(backend, device, rank, timeout_s, store=store, rank=rank, world_size=num_ranks)
        result = function(rank, num_ranks, *args)

        # Report: the result's tensors are copied. Registered only now, since the function may
        # share tensors of its own.
        ForkingPickler.register(torch.UntypedStorage, _copied)
        queue.put((rank, result))

        # wait for the others
        store.wait(["all done"], timedelta(days=365))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        reporting.set(f"failure of {rank}", json.dumps(_describe(error)))
        _leave(1)
        raise
    _leave(0)


def _copied(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Pickle a storage for a queue: a CPU storage as its bytes, another as PyTorch does.

    PyTorch would share a CPU storage, and keep a file open for each. Tensors that view one storage
    send it once.
    """
    if storage.device.type != "cpu":
        return reduce_storage(storage)
    return _storage_of, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),)


def _storage_of(data: np.ndarray) -> torch.UntypedStorage:
    """Unpickle a storage that `_copied` has pickled."""
    return torch.from_numpy(data).untyped_storage()


def _share_cores(num_ranks: int) -> None:
    """Give this rank's share of the host's cores to PyTorch's threads, at least one.

    If each rank used every core, ranks would wait for each other's threads.
    """
    cores = get_device_info("cpu").num_cores or 1
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores) // num_ranks))


def _leave(code: int) -> None:
    """Exit with `code` at once, without the interpreter's tear-down.

    gloo's threads may abort the process in the tear-down, when all is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_from_gloo(message: str) -> bool:
    """Return whether an error's message is gloo's, so that another rank was lost.

    gloo names its source file, or, if another message to the same rank timed out, a closed pair.
    """
    return "gloo/" in message or "pair closure" in message


def _describe(error: BaseException) -> dict[str, Any]:
    """Return what the parent needs to know of a failure, as JSON can hold it.

    "kind" orders failures, the most telling first: 0 is an error of the rank's own, 1 a death (from
    `_first_failure`), 2 a consequence of another rank's end. "when" is the time, "text" the message
    with its traceback, and "told" the arguments of RankError.
    """
    # format_exception_only also works if str(error) raises
    shown = "".join(traceback.format_exception_only(error)).strip()[:MOST_SHOWN]
    reason = shown.partition(": ")[2]
    # gloo raises plain RuntimeErrors; other transports have a class
    is_consequence = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and is_from_gloo(reason)
    )
    line = shown.splitlines()[0]  # the first line alone fits into a table
    text = f"failed: {line}\n" + "".join(traceback.format_exception(error)).rstrip()[:MOST_SHOWN]
    is_argument_error = isinstance(error, ValueError | TypeError | OSError)
    told = {
        "error_type": type(error).__name__,
        "reason": reason,
        "is_argument_error": is_argument_error,
        "field_error": error.args if isinstance(error, FieldError) else (),
    }
    return {"kind": 2 if is_consequence else 0, "when": time.time(), "text": text, "told": told}


def _first_failure(
    store: dist.Store, exit_codes: list[int | None], succeeded: set[int]
) -> RankError:
    """Return the error to raise for a job in which some ranks failed, died or were ended.

    It is that of the most telling kind (see `_describe`), and of that kind the earliest.
    `succeeded` are the ranks whose results have come.
    """
    # the failures that ranks have reported, and the deaths of those that could not
    failures: dict[int, dict[str, Any]] = {}
    for rank, code in enumerate(exit_codes):
        if store.check([f"failure of {rank}"]):
            failures[rank] = json.loads(store.get(f"failure of {rank}"))
        elif code not in (0, -signal.SIGTERM):  # SIGTERM ended the ranks that were still running
            failures[rank] = {
                "kind": 1,
                "when": 0.0,
                "text": f"died ({exit_reason(code)})",
                "told": {},
            }

    first, failure = min(failures.items(), key=lambda one: (one[1]["kind"], one[1]["when"]))
    text = f"rank {first} of {len(exit_codes)} {failure['text']}"

    # if all failures are consequences, name the ranks that may be the cause
    silent = [
        str(rank)
        for rank in range(len(exit_codes))
        if rank not in failures and rank not in succeeded
    ]
    if failure["kind"] == 2:
        if silent:
            text += (
                "\nIt waited for others; nothing was heard of rank "
                f"{', '.join(silent)}, which may hang."
            )
        if succeeded:
            returned = ", ".join(map(str, sorted(succeeded)))
            text += f"\nNo longer in the job, since its function has returned: rank {returned}."
    return RankError(text, first, **failure["told"])


def _module_of(function: Any) -> str:
    """Return the name of the module that new processes import for `function`.

    A `functools.partial` counts as the function in it.
    """
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def _check_importable(function: Any) -> None:
    """Raise ValueError if new processes could not import `function` or the main program.

    That is so for lambdas and inner functions, and for code from a notebook, `-c` or stdin.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    # the name of a lambda has "<lambda>" in it, that of an inner function "<locals>"
    if "<" in (name := getattr(inner, "__qualname__", "")):
        raise ValueError(
            "function must be at the top level of a module, where new processes find it, "
            f"got {name}"
        )

    # the main program has no file with -c and in a notebook, and "<stdin>" if it is read from there
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (file is not None and os.path.isfile(file)):
        return
    if _module_of(function) == "__main__" or file is not None:
        shown = name or repr(function)
        raise ValueError(
            f"function must be in a file, which new processes import, got {shown} "
            "typed in a notebook, "
            "after -c or into stdin: write it to a file such as ranks.py and import it from there"
        )


def _check(function: Any, num_ranks: int, backend: str, device: str, timeout_s: float) -> None:
    """Raise ValueError naming an argument with which no job can start.

    `num_ranks` is the number of ranks on this host.
    """
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
    # checked here, since NCCL's own error comes late and is obscure
    if backend == "nccl" and num_ranks > (have := torch.cuda.device_count()):
        raise ValueError(
            f"backend 'nccl' needs a GPU a rank: num_ranks is {num_ranks} "
            f"on this host, which has {have}"
        )


def _join_group(backend: str, device: str, local_rank: int, timeout_s: float, **where: Any) -> None:
    """Create this rank's default process group; with device "cuda" make its GPU current first.

    If there are more ranks than GPUs, several ranks share one. `where` goes to
    `init_process_group`: the store, rank and number of ranks, or nothing under torchrun.
    """
    own = None
    if device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        if backend == "nccl":  # connect now, not in the first timed collective
            own = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=own, **where)


def is_torchrun() -> bool:
    """Return whether torchrun, or a Slurm script that sets its variables, started this process."""
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
    """Run `function` on all ranks by `run_ranks`, or under torchrun on this rank only.

    Returns the list of the ranks' results; under torchrun it holds this rank's only. Arguments are
    those of `run_ranks`. Under torchrun `num_ranks` may be None, a number other than WORLD_SIZE
    raises ValueError, and `start_method` is not used; otherwise None raises ValueError.
    """
    if not is_torchrun():
        if num_ranks is None:
            raise ValueError("num_ranks must be given where torchrun does not say it")
        options: dict[str, Any] = {"backend": backend, "device": device, "timeout_s": timeout_s}
        return run_ranks(function, num_ranks, *args, **options, start_method=start_method)
    if num_ranks is not None and str(num_ranks) != os.environ["WORLD_SIZE"]:
        raise FieldError(
            "num_ranks",
            f"must be torchrun's WORLD_SIZE={os.environ['WORLD_SIZE']}, got {num_ranks}",
        )

    collect_garbage_at_exit()
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it, Slurm does not
        _share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))
    local_rank = int(os.environ["LOCAL_RANK"])
    _check(function, local_rank + 1, backend, device, timeout_s)
    _join_group(backend, device, local_rank, timeout_s)

    # if the function raises, torchrun ends the other ranks
    result = function(dist.get_rank(), dist.get_world_size(), *args)
    dist.barrier()
    dist.destroy_process_group()
    return [result]


def collect_garbage_at_exit() -> None:
    """Make the process collect garbage at exit, which frees gloo's process groups in time.

    A group may live in a reference cycle. Left to the interpreter's tear-down, gloo aborted the
    finished process in 3 to 13 % of jobs.
    """
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)
