"""Sentences with numbers for the writeup's questions: one function a problem, from its frame.

    answer("flash_benchmarking", frame)      # a Markdown list; a sentence whose records are missing is left out

Only real kernels are compared: a Triton kernel that ran in the interpreter has no speed worth a sentence.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from cs336_systems.report.distributed import DISTRIBUTED_ANSWERS
from cs336_systems.report.sharding import SHARDING_ANSWERS

EXAMPLE_LENGTH = 16384  # the leaderboard's length: examples quote it where it was measured
EXAMPLE_HEAD_DIM = 64


def answer(problem: str, frame: pd.DataFrame) -> str:
    """The sentences of `problem` as a Markdown list; empty when nothing can be said."""
    sentences = ANSWERS[problem](frame) if problem in ANSWERS and len(frame) else []
    return "\n".join("- " + " ".join(sentence.split()) for sentence in sentences)


ANSWERS: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    **DISTRIBUTED_ANSWERS,
    **SHARDING_ANSWERS,
}


