"""Our attention kernels beside the fastest libraries on shapes that models use, by turns.

The shapes fill a GPU: batches, heads and lengths of real training steps, head dims 64 to 256,
bfloat16. `short_calls` measures calls that are too short for that.
"""

from dataclasses import replace

from cs336_systems.experiments import problem
from cs336_systems.subjects.attention_by_turns import AttentionByTurns
from cs336_systems.subjects.attention_passes import BOTH_TIMES, SMALL, rate_bars, rate_tables

DRAWN = ("triton", "hopper", "sdpa_cudnn", "fa4")


@problem(title="Attention on shapes of real models", order=1)
class AttentionShapes(AttentionByTurns):
    implementations = ("triton", "hopper", "sdpa_cudnn", "flex", "flex_flash", "fa4")
    takes = "attention"
    # (batch, heads, length, head_dim, causal). The first is the 2025 leaderboard's; 32 heads of
    # 32,768 are the 2026 leaderboard's 8B step; 64 heads of 8192 are the shape of MagiAttention's
    # published table.
    sizes = {
        **SMALL,
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
            (4, 16, 2048, 256, True),
            (2, 16, 4096, 256, True),
            (2, 16, 4096, 256, False),
            (1, 16, 8192, 256, True),
        ),
    }

    tables = rate_tables(
        (("hopper", "fa4"), ("hopper", "sdpa_cudnn"), ("triton", "sdpa_cudnn"), ("triton", "flex"))
    )
    figures = {  # a part of the shapes, since the figure is on the README's first screen
        "forward_backward": replace(
            rate_bars("Attention forward + backward"),
            where=BOTH_TIMES | {"batch": (1, 2), "heads": (1, 16), "implementation": DRAWN},
        ),
    }
