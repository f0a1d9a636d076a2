"""Start, end and judge child processes that may die: ranks, measuring workers, checks, compilers.

    end_with_parent()                     # in the child, first
    log_output(Path("worker.log"))        # in the child: what it and its libraries print
    stop(process, timeout_s=10)           # in the parent: ask, then kill
    exit_reason(process.exitcode)         # in words: "signal SIGSEGV"

What the children do, and how they answer, is told where they are started: `bench.worker` measures a
cell after the other over a pipe, `distributed.spawn` runs a function on every rank,
`grading.server` forks a process for each check, `compiler.offline` compiles in a pool.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

STDOUT, STDERR = 1, 2  # file descriptors


def exit_reason(code: int | None) -> str:
    """Return in words how a process ended, by its exit code: "signal SIGKILL", "exit code 1"."""
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, on Linux; elsewhere do nothing."""
    from torch.multiprocessing.spawn import _prctl_pr_set_pdeathsig

    _prctl_pr_set_pdeathsig(signal.SIGKILL)


def end_with_parent() -> None:
    """Make this multiprocessing child end when the process that started it has ended.

    Nothing else would stop a child that hangs.
    """
    # On Linux the kernel kills it, whatever it does. With a fork server the server is the parent,
    # which ends with the process that started it.
    die_with_parent()
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        """Exit when the starter has ended."""
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def log_output(log: Path) -> None:
    """Append all that this process prints from now on to the file `log`, libraries' output too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (STDOUT, STDERR):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def silence(streams: Iterable[int]) -> None:
    """Send these file descriptors of this process to the null device."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


def stop(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Ask a process to end by SIGTERM, and kill it if it has not after `timeout_s` seconds."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
        return
    process.kill()
    process.wait()
