"""Grouped heads, lengths of no whole tile and head dims between the usual ones, by turns.

These are the shapes of many real models. `attention_shapes` has those that kernels are made for:
as many key heads as query heads, powers of two.
"""

from dataclasses import replace

from cs336_systems.experiments import problem
from cs336_systems.subjects.attention_by_turns import AttentionByTurns
from cs336_systems.subjects.attention_passes import BOTH_TIMES, SMALL, rate_bars, rate_tables


@problem(title="Grouped heads, odd lengths and head dims: beside FlashAttention-4", order=1.5)
class UnevenShapes(AttentionByTurns):
    implementations = ("hopper", "sdpa_cudnn", "fa4")
    takes = "attention"
    rounds = {"cpu": 3, "cuda": 8}
    # (batch, heads, length, head_dim, causal, key heads). The first are those of Llama 3's 8B and
    # of Qwen3's 30B-A3B models.
    sizes = {
        **SMALL,
        "handout": (
            (1, 32, 8192, 128, True, 8),
            (4, 32, 4096, 128, True, 4),
            (4, 32, 4096, 64, True, 4),
            (1, 32, 32768, 128, True, 8),
            (2, 16, 6000, 128, True),
            (4, 16, 3000, 64, True),
            (2, 16, 8192, 32, True),
            (4, 16, 4096, 80, True),
            (4, 16, 4096, 96, True),
        ),
    }

    tables = rate_tables((("hopper", "fa4"), ("hopper", "sdpa_cudnn")))
    figures = {
        "forward_backward": replace(
            rate_bars("Grouped heads, odd lengths and head dims"), where=BOTH_TIMES
        ),
    }
