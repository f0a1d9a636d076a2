"""A process that runs checks in forks: each line it reads is a request, each it writes an outcome.

    {"adapters": "/path/adapters.py", "check": "fsdp.shards_the_weights", "time_limit_s": 180}
    {"status": "failed", "message": "...", "detail": "Traceback ...", "seconds": 0.9}

It imports PyTorch and the checks once and then only forks. So a check starts in milliseconds, and
an abort, a hang or an exit ends the fork alone. A check of several ranks has one process per rank,
in a gloo group.
"""

import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from cs336_systems.device import interpret_kernels
from cs336_systems.distributed.spawn import is_from_gloo
from cs336_systems.grading.counting import count_messages
from cs336_systems.grading.outcomes import is_under_test, outcome_of_death, outcome_of_error
from cs336_systems.grading.project import load_adapters
from cs336_systems.grading.registry import CHECKS, HUNG, Check
from cs336_systems.processes import die_with_parent, silence

FORK = multiprocessing.get_context("fork")
GRACE_S = 1.0  # for the other ranks to report after a first failure


# One process of a check


def run_check(check: Check, adapters: Path, rank: int, scratch: Path) -> None:
    """Run one rank of a check in this forked process: prepare, load the code under test, call.

    Errors of the check are raised. `scratch` is a folder for what the code under test writes.
    """
    os.chdir(scratch)
    stack = (scratch / f"stack of rank {rank}").open("w")  # on SIGUSR1, to say where it hangs
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    torch.set_num_threads(1)  # the tensors are small, and ranks share the cores
    if check.num_ranks == 1:
        check.function(load_adapters(adapters, scratch))
        return
    count_messages()
    module = load_adapters(adapters, scratch)
    store = dist.FileStore(str(scratch / "store"), check.num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=check.num_ranks, timeout=timedelta(seconds=60)
    )
    check.function(module, rank, check.num_ranks)
    dist.barrier()  # to the others a rank that leaves early looks like a failure


def fork(
    task: Callable[[], None], adapters: Path, answers: TextIO
) -> tuple[Connection, ForkProcess]:
    """Start a process that runs `task` in its own session; return its pipe and the process.

    The outcome arrives on the pipe as JSON. On Linux the process ends when this one does. It does
    not keep `answers` open.
    """
    reading, writing = FORK.Pipe(duplex=False)

    def run() -> None:
        # Detach from this process, run the task, and answer whatever happens.
        outcome: dict[str, Any] = {"status": "passed", "message": ""}
        try:
            os.setsid()
            die_with_parent()
            reading.close()
            answers.close()
            silence((0, 1, 2))
            task()
        except BaseException as error:
            outcome = outcome_of_error(error, adapters)
            raise
        finally:  # no interpreter tear-down: gloo's threads may abort in it
            writing.send_bytes(json.dumps(outcome | {"when": time.monotonic()}).encode())
            os._exit(0)

    process = FORK.Process(target=run)
    process.start()
    writing.close()
    return reading, process


def wait_for(
    processes: dict[Connection, ForkProcess],
    check: Check,
    time_limit_s: float,
    adapters: Path,
    scratch: Path,
) -> dict[str, Any]:
    """Return the outcome of all ranks together: the first failure, or passed.

    No process is left on return. If the grading process closes stdin, this process exits.
    """
    deadline, timed_out, places, detail = time.monotonic() + time_limit_s, False, "", ""
    stdin, running, outcomes = sys.stdin.fileno(), list(processes), []
    try:
        # Collect outcomes until all ranks have ended, or the time is over.
        while running and not timed_out:
            ready = connection.wait([stdin, *running], max(0.0, deadline - time.monotonic()))
            if stdin in ready:  # nothing is sent while a check runs, so the other side has gone
                sys.exit(1)
            timed_out = not ready
            for pipe in [pipe for pipe in running if pipe in ready]:
                running.remove(pipe)
                try:
                    outcome = json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    processes[pipe].join()
                    outcome = outcome_of_death(check, processes[pipe].exitcode or 0)
                    outcome["when"] = time.monotonic()
                outcomes.append(outcome)
                if outcome["status"] != "passed":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if timed_out:
            places, detail = where_they_hang(
                [processes[pipe] for pipe in running], adapters, scratch
            )
    finally:
        for pipe, process in processes.items():
            pipe.close()
            _end(process)

    # Choose the first failure; ranks that only lost a connection come last.
    bad = [outcome for outcome in outcomes if outcome["status"] != "passed"]
    if bad:
        return min(bad, key=lambda outcome: (is_from_gloo(outcome["message"]), outcome["when"]))
    if timed_out:
        message = f"{HUNG} after {time_limit_s:g} s{places}"
        return {"status": "failed", "message": message, "detail": detail}
    return outcomes[0]


def where_they_hang(processes: list[ForkProcess], adapters: Path, scratch: Path) -> tuple[str, str]:
    """Return the lines under test at which hanging processes are, as text, and their stacks."""
    for process in processes:
        os.kill(process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
    time.sleep(GRACE_S)
    places, stacks = [], []
    for file in sorted(scratch.glob("stack of rank *")):
        rank, stack = file.name.removeprefix("stack of "), file.read_text()
        frames = re.findall(r'File "(.*)", line (\d+) in', stack)
        own = [(path, line) for path, line in frames if is_under_test(path, adapters)]
        places += [f"{rank}: {Path(path).name}:{line}" for path, line in own[:1]]
        stacks += [f"{rank}: {stack}"] * bool(stack)
    return f" ({', '.join(places)})" if places else "", "\n".join(stacks)


def _end(process: ForkProcess) -> None:
    """Kill the process, if it still runs, and everything that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.kill()  # the process may not lead its own session yet
    process.join()


def serve() -> None:
    """Answer requests from stdin on stdout until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed text goes to stderr, answers alone to stdout
    # Look for a GPU without initialising CUDA, which a forked process could not use afterwards.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if not torch.cuda.is_available():
        interpret_kernels()  # before Triton is imported, which the next line does
    # Optimizers and compiled code import these. It takes seconds, in each process of each check if
    # it were not done here.
    for module in (
        "torch._dynamo",
        "torch._inductor.compile_fx",
    ):
        importlib.import_module(module)

    from cs336_systems.grading import (  # noqa: F401 - importing them registers their checks
        check_ddp,
        check_flash,
        check_fsdp,
        check_optimizer,
    )

    gc.collect()
    gc.freeze()  # otherwise a check's garbage collections would copy the memory of all imports
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        check, adapters = CHECKS[request["check"]], Path(request["adapters"])
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="grade-") as folder:
            scratch = Path(folder)
            tasks = [
                partial(run_check, check, adapters, rank, scratch)
                for rank in range(check.num_ranks)
            ]
            processes = dict(fork(task, adapters, answers) for task in tasks)
            outcome = wait_for(processes, check, request["time_limit_s"], adapters, scratch)
        outcome = {key: outcome.get(key, "") for key in ("status", "message", "detail")}
        print(
            json.dumps(outcome | {"seconds": time.monotonic() - started}), file=answers, flush=True
        )
