"""Whether processes that a test has started, or had started, are still there."""

from __future__ import annotations

import subprocess


def is_running(pid: int) -> bool:
    """Whether the process is there and more than an entry that nobody has collected yet."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")
