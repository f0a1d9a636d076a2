"""Writes memory snapshots as PyTorch lays them out, and files that only look like one.

This is the one module that may pickle (see `test_layout.py`): it writes what the reader must read
or refuse.
"""

from __future__ import annotations

from pathlib import Path
from pickle import dumps
from typing import Any

FRAMES = [
    {"filename": "/home/somebody/torch/nn/functional.py", "line": 9, "name": "linear"},
    {"filename": "/home/somebody/project/model.py", "line": 42, "name": "forward"},
    {"filename": "/home/somebody/project/train.py", "line": 7, "name": "main"},
]


def event(action: str, address: int, size: int, frames: list[Any]) -> dict[str, Any]:
    return {
        "action": action, "addr": address, "size": size, "stream": 0, "time_us": 1_700_000_000_000_000,
        "compile_context": "N/A", "frames": frames,
    }  # fmt: skip


def small_snapshot() -> dict[str, Any]:
    """A block from before, released; two that live and die; one alive at the end, and one alive
    throughout.
    """
    inside, none = [dict(frame) for frame in FRAMES], []
    trace = [
        event("alloc", 4096, 1024, inside),
        event("free_requested", 512, 2048, none),
        event("free_completed", 512, 2048, none),
        event("alloc", 8192, 512, none),
        event("segment_alloc", 2**40, 2**21, none),
        event("free_requested", 4096, 1024, none),
        event("free_completed", 4096, 1024, none),
        event("alloc", 4096, 4096, inside),
    ]
    blocks = [
        {"size": 1024, "state": "inactive", "address": 0},
        {"size": 4096, "state": "active_allocated", "address": 4096, "frames": inside},
        {"size": 512, "state": "active_allocated", "address": 8192},
        {"size": 3072, "state": "active_allocated", "address": 16384},
    ]
    segment = {"device": 0, "address": 0, "total_size": 2**21, "stream": 0, "blocks": blocks}
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "roundup_power2_divisions": {"1": 0},
        "ratio": 0.5,
        "split": None,
    }
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": settings}


def write(path: Path, value: Any, protocol: int = 4) -> Path:
    """A file of these bytes, or of anything else as a pickle."""
    path.write_bytes(value if isinstance(value, bytes) else dumps(value, protocol))
    return path


class Call:
    """Pickled as a call of `function` with `arguments`: what a hostile file does."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments
