"""A child process that does not outlive its parent, however that ended: nobody else would stop one that hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

WATCH_INTERVAL_S = 1
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent_pid: int) -> None:
    """Let this process, a child of `parent_pid`, be killed when its parent is gone."""
    if sys.platform == "linux":
        import ctypes

        # The signal comes when the parent's thread that started this process ends; for `run` that is the main thread,
        # or a lane's.
        asked = ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL)) == 0
        if os.getppid() != parent_pid:  # it ended before the request
            os._exit(1)
        if asked:
            return
    threading.Thread(target=watch_parent, args=(parent_pid,), daemon=True).start()


def end_with_starter() -> None:
    """Let this process of multiprocessing's end when the process that asked for it is gone, parent or not."""
    starter = multiprocessing.parent_process()
    assert starter is not None, "a process that multiprocessing has started"

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def watch_parent(parent_pid: int) -> None:
    """End this process once its parent is another one than `parent_pid`."""
    while os.getppid() == parent_pid:
        time.sleep(WATCH_INTERVAL_S)
    os._exit(1)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End `process`, started in a session of its own, if it still runs, with all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def exit_reason(code: int | None) -> str:
    """How a process ended, from its exit code: "signal SIGKILL", "exit code 1"."""
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
