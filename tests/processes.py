"""Whether processes that a test has started, or had started, are still there, and waiting for what
they do.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any


def is_running(pid: int) -> bool:
    """Whether the process is there and more than an entry that nobody has collected yet."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()
    return bool(state) and not state.startswith("Z")


def wait_until(
    condition: Callable[[], Any], process: subprocess.Popen[Any] | None = None, seconds: float = 120
) -> Any:
    """What `condition` returns once that is true; fails after `seconds`, or where `process` has
    ended before.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.05)
    return found
