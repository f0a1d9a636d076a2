"""Beyond the handout: `attention_shapes`, our kernels beside the fastest of the libraries on shapes that models use.

How fast are the kernels where a GPU is full: batches, heads and lengths of real training steps, head dims 64 and 128,
bfloat16. What calls take that are too short for that, `short_calls` measures; and the longest by turns, `long_calls`.
"""

from __future__ import annotations

from collections.abc import Iterator

from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments.attention_cells import BACKWARD, BOTH, FORWARD, attention_cell, measure_attention
from cs336_systems.experiments.cells import Cell, Measurement

PROBLEM = "attention_shapes"
SHAPE_IMPLEMENTATIONS = ("triton", "hopper", "sdpa_cudnn", "sdpa_flash", "flex")
# (batch, heads, length, head_dim, causal). The first is the 2025 leaderboard's; the last is the 2026 leaderboard's 8B
# step; 64 heads of 8192 are the shape of MagiAttention's published table.
SHAPES = {
    "tiny": ((1, 1, 64, 64, True),),
    "smoke": ((1, 1, 128, 64, True), (1, 1, 128, 128, False)),
    "handout": (
        (1, 16, 16384, 64, True),
        (4, 32, 4096, 64, True),
        (1, 32, 16384, 64, True),
        (1, 32, 16384, 64, False),
        (8, 16, 2048, 128, True),
        (2, 16, 8192, 128, True),
        (1, 16, 16384, 128, True),
        (1, 16, 16384, 128, False),
        (1, 64, 8192, 128, False),
        (1, 32, 32768, 128, True),
    ),
}


def attention_shapes_cells(run: RunConfig) -> list[Cell]:
    """Every implementation on every shape."""
    names = [name for name in SHAPE_IMPLEMENTATIONS if name != "flex" or run.scale != "tiny"]  # compiles for seconds
    shapes = [sized_shape(run, *sizes) for sizes in SHAPES[run.scale]]
    return [attention_cell(PROBLEM, shape, name, run, (FORWARD, BACKWARD, BOTH)) for shape in shapes for name in names]


def measure_attention_shapes(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """The kernels' times, each pass checked first."""
    return measure_attention(cell, run, settled=True)


def sized_shape(run: RunConfig, batch: int, heads: int, seqlen: int, head_dim: int, is_causal: bool) -> AttentionShape:
    """Self-attention of these sizes, in bfloat16 on a GPU and in float32 for Triton's interpreter."""
    return AttentionShape(
        batch=batch,
        heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        is_causal=is_causal,
        dtype="bfloat16" if run.device == "cuda" else "float32",
    )
