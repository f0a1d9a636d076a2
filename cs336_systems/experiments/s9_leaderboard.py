"""Section 9, leaderboards: `leaderboard_2025`, causal attention forward and backward at 1x16x16384x64, bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments.attention import BACKWARD, BOTH, FORWARD, PEAK, attention_cell, measure_attention
from cs336_systems.experiments.cells import Cell, Measurement
from cs336_systems.experiments.implementations import IMPLEMENTATIONS
from cs336_systems.experiments.s4_attention import TINY_IMPLEMENTATIONS

SEQLEN = {"tiny": 64, "smoke": 128, "handout": 16384}


def leaderboard_2025_cells(run: RunConfig) -> list[Cell]:
    """All implementations on the leaderboard's shape; below handout scale one short head in float32, and fewer."""
    seqlen = SEQLEN[run.scale]
    shape = AttentionShape(
        batch=1,
        heads=16 if run.scale == "handout" else 1,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=64,
        is_causal=True,
        dtype="bfloat16" if run.device == "cuda" else "float32",
    )
    implementations: tuple[str, ...] = TINY_IMPLEMENTATIONS if run.scale == "tiny" else IMPLEMENTATIONS
    if run.scale == "smoke":  # of what is compiled one shows it; the tiles take the longest
        implementations = tuple(name for name in implementations if name != "tiled_compiled")
    rows = (FORWARD, BACKWARD, BOTH, PEAK)
    return [attention_cell(shape, name, run, rows) for name in implementations]


def measure_leaderboard_2025(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """The class harness differentiates `o.sum()`, so the gradient of the output is a stride-0 tensor of ones."""
    return measure_attention(cell, run, sum_loss=True, settled=True)
