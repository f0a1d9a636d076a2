"""Writes memory snapshots as PyTorch lays them out, of any size, and files that only look like one.

This is the one module that may pickle (see `test_layout.py`): it writes what the reader must read or refuse.
"""

from __future__ import annotations

import struct
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
    """A block from before, released; two that live and die; one alive at the end, and one alive throughout."""
    inside, none = FRAMES, []
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
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "roundup_power2_divisions": {"1": 0}, "ratio": 0.5, "split": None}
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": settings}


def write(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(dumps(value, protocol))
    return path


class Call:
    """Pickled as a call of `function` with `arguments`: what a hostile file does."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


KEYS = ("action", "addr", "size", "stream", "time_us", "compile_context", "frames")


def write_large(path: Path, num_events: int, frames_an_event: int = 30) -> Path:
    """A snapshot of `num_events` events as the standard pickler would write it, without holding it in memory.

    Each event is a new dict with a list of frames of its own, all memoized; frames are shared, as PyTorch's are.
    """

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode() + b"\x94"

    def get(index: int) -> bytes:
        return b"j" + struct.pack("<I", index)

    shared_frames = 500
    with open(path, "wb") as file:
        # Memo: 0 the dict, 1 its key, 2 the trace list's list, 3 the list of shared frames, then frames, strings, list.
        file.write(b"\x80\x04}\x94(" + text("warm_up") + b"]\x94(")
        index = 3
        first_frame = index
        for number in range(shared_frames):
            file.write(b"}\x94(")
            for key, value in (("filename", f"/m/{number}.py"), ("name", f"f{number}")):
                file.write(text(key) + text(value))
            file.write(text("line") + b"M" + struct.pack("<H", number) + b"u")
            index += 6
        file.write(b"e")
        file.write(text("keys") + b"]\x94(")
        index += 2
        first_key = index
        for key in (*KEYS, "alloc", "free_requested", "N/A"):
            file.write(text(key))
            index += 1
        file.write(b"e" + text("device_traces") + b"]\x94(]\x94")
        keys = [get(first_key + number) for number in range(len(KEYS))]
        actions, context = (get(first_key + len(KEYS)), get(first_key + len(KEYS) + 1)), get(first_key + len(KEYS) + 2)
        chunk = []
        for number in range(num_events):
            if number % 1000 == 0:
                chunk.append(b"(")
            address = 2**45 + 512 * (number // 2)
            values = (
                actions[number % 2], b"\x8a\x07" + address.to_bytes(7, "little"), b"M\x00\x02", b"K\x00",
                b"\x8a\x07" + (1_700_000_000_000_000 + number).to_bytes(7, "little"), context,
            )  # fmt: skip
            frames = [get(first_frame + 6 * ((number // 2 % 50 + k) % shared_frames)) for k in range(frames_an_event)]
            frame_list = b"]\x94(" + b"".join(frames) + b"e"
            parts = [key + value for key, value in zip(keys, (*values, frame_list))]
            chunk.append(b"}\x94(" + b"".join(parts) + b"u")
            if number % 1000 == 999 or number == num_events - 1:
                chunk.append(b"e")
                file.write(b"".join(chunk))
                chunk = []
        file.write(b"e" + text("segments") + b"]\x94u.")
    return path
