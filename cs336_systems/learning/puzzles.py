"""The twelve puzzles of notebooks/s1_triton.py: check a kernel, and see what it did.

check_puzzle("add", add_kernel)     # prints "right", or "not yet: ..." with a hint
show_puzzle("add", add_kernel)      # a figure of its accesses, and a page that steps through it
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cs336_systems.learning.attention_puzzles import ATTENTION_PUZZLES
from cs336_systems.learning.judging import judge
from cs336_systems.learning.matrix_puzzles import MATRIX_PUZZLES
from cs336_systems.learning.summary import show_recording
from cs336_systems.learning.vector_puzzles import VECTOR_PUZZLES
from cs336_systems.stepper import trace

PUZZLES = {**VECTOR_PUZZLES, **MATRIX_PUZZLES, **ATTENTION_PUZZLES}


def check_puzzle(name: str, kernel: Any) -> None:
    """Print "right" if `kernel` solves the puzzle `name`, else "not yet: " and a hint.

    ValueError for an unknown name.
    """
    hint = judge(_puzzle(name), kernel).hint
    print(f"not yet: {hint}" if hint else "right")


def show_puzzle(name: str, kernel: Any, folder: Path = Path()) -> None:
    """Display what `kernel` did in the case that decided on it.

    A figure shows who touches what. The page `name`.html, written into `folder` and linked, steps
    through the launch. ValueError for an unknown name.
    """
    recording = judge(_puzzle(name), kernel).recording
    if recording is None:
        print("no picture yet: the kernel has not run")
        return
    show_recording(recording, folder / f"{name}.html")


def show_launch(launch: Callable[[], Any], folder: Path = Path()) -> None:
    """Display what the first kernel that `launch()` runs does, as `show_puzzle` does."""
    with trace(most_launches=1) as recorded:
        launch()
    (recording,) = recorded.launches
    show_recording(recording, folder / f"{launch.__name__}.html")


def _puzzle(name: str) -> Any:
    if name not in PUZZLES:
        raise ValueError(f"puzzle must be one of {', '.join(PUZZLES)}, got {name!r}")
    return PUZZLES[name]
