"""FlashAttention-2 beside plain attention and library kernels on the handout's grid.

The grid has one head, batch 1 and the causal mask.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from cs336_systems.book.frames import span
from cs336_systems.config import AttentionShape, DTypeName, RunConfig
from cs336_systems.experiments import (
    Cell,
    Lines,
    Pick,
    Pivot,
    Sample,
    TableSpec,
    Unsupported,
    Wide,
    problem,
)
from cs336_systems.subjects import attention_passes as attention
from cs336_systems.subjects.implementations import IMPLEMENTATIONS, STAGES, TINY_IMPLEMENTATIONS

# The handout's lengths, and one more, at which plain attention runs out of an H200's memory.
LENGTHS = {
    "tiny": (64, 128),
    "smoke": (128, 256, 512, 1024),
    "handout": tuple(2**power for power in range(7, 18)),
}
LONGEST_FLOAT32 = 65536
# Tests go further. The interpreter's times say nothing of speed, and twice the length takes four
# times as long.
LONGEST_INTERPRETED = 256
# At smoke scale, for implementations that compile anew for nearly every length, on a CPU for many
# seconds.
LONGEST_RECOMPILED = 128
RECOMPILED = ("tiled_compiled", "flex")
SHOWN = ("triton", "sdpa_flash", "sdpa_cudnn")  # in figures: timed in one run with plain attention
FIRST_DRAWN = 4096  # shorter calls take as long as the host needs to launch them
DOWN = {"d": "head_dim", "S": "seqlen_q"}


def triton_claim(rows: pd.DataFrame) -> str:
    """Return how much faster our Triton kernels are, if they are at every length."""
    ours = rows[rows["implementation"] == "triton"]
    if not ours["speed_over_eager"].min() > 1:
        return ""
    start = ours["seqlen_q"].min()
    return (
        f"From {start:,} tokens on triton is {span(ours['speed_over_eager'])} times "
        "as fast as plain PyTorch"
    )


@problem()
class FlashBenchmarking(attention.AttentionExperiment):
    implementations = IMPLEMENTATIONS
    takes = "attention"
    rows = (attention.FORWARD, attention.BACKWARD, attention.BOTH, attention.PEAK)
    speeds = {"speed_over_eager": {"implementation": "eager"}}

    def cases(self, run: RunConfig) -> list[AttentionShape]:
        """Return the grid in bfloat16 and float32 on a GPU, in float16 and float32 on a CPU.

        The interpreter cannot multiply bfloat16.
        """
        low: DTypeName = "bfloat16" if run.device == "cuda" else "float16"
        dtypes: tuple[DTypeName, ...] = ("float32",) if run.scale == "tiny" else (low, "float32")
        grid = [
            (dtype, head_dim) for dtype in dtypes for head_dim in attention.HEAD_DIMS[run.scale]
        ]
        if run.scale == "smoke":  # each dtype with one head dim still shows both axes
            grid = list(zip(dtypes, attention.HEAD_DIMS["smoke"], strict=True))
        return [
            replace(attention.sized_shape(run, 1, 1, length, head_dim, True), dtype=dtype)
            for dtype, head_dim in grid
            for length in LENGTHS[run.scale]
        ]

    def names(self, run: RunConfig) -> Sequence[str]:
        """Return the implementations except FlashAttention-4.

        `attention_shapes` times that one on shapes that fill a GPU.
        """
        names = TINY_IMPLEMENTATIONS if run.scale == "tiny" else IMPLEMENTATIONS
        return tuple(name for name in names if name not in ("flex_flash", "fa4"))

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Check each pass against the oracle, then time it.

        Unsupported for combinations that would only cost minutes.
        """
        length, name = cell.case.seqlen_q, cell.implementation
        if cell.case.dtype == "float32" and length > LONGEST_FLOAT32 and name != "eager":
            raise Unsupported(
                f"float32 is measured up to {LONGEST_FLOAT32}; "
                "only eager goes on, to its out-of-memory"
            )
        if (
            name in ("triton", "triton_first")
            and run.device == "cpu"
            and length > LONGEST_INTERPRETED
        ):
            raise Unsupported(f"the interpreter is run up to {LONGEST_INTERPRETED} tokens here")
        if run.scale == "smoke" and name in RECOMPILED and length > LONGEST_RECOMPILED:
            raise Unsupported(
                f"it compiles anew for each length: up to {LONGEST_RECOMPILED} tokens at "
                "smoke scale"
            )
        if (
            run.scale == "smoke"
            and name in (*RECOMPILED, "compiled")
            and cell.case.dtype != "float32"
        ):
            raise Unsupported("it compiles anew for each dtype: float32 alone at smoke scale")
        yield from super().measure(cell, run)

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return `slower(mode=..., dtype=...)`: on how many shapes triton is slower than eager."""

        def slower(mode: str, dtype: str) -> str:
            asked = (
                (frame["implementation"] == "triton")
                & (frame["mode"] == mode)
                & (frame["dtype"] == dtype)
            )
            found = frame.loc[asked, "speed_over_eager"].dropna()
            return f"{int((found < 1).sum())} of {len(found)}"

        return {"slower": slower}

    tables: dict[str, TableSpec] = {
        "all": Pivot(
            title="batch 1, one head, causal",
            down={"dtype": "dtype", **DOWN, "pass": "mode"},
            where={"quantity": "time"},
            ratios=(("triton", "eager"),),
        ),
        "stages": Pivot(
            title="our stages, each beside the one before, batch 1, one head, causal",
            down={"pass": "mode", "dtype": "dtype", **DOWN},
            where={
                "quantity": "time",
                "mode": ("forward", "forward_backward"),
                "implementation": STAGES,
            },
            ratios=tuple(zip(STAGES[1:], STAGES)),
        ),
        "memory": Pivot(
            title="peak memory, forward + backward",
            down={"dtype": "dtype", **DOWN},
            where={"quantity": "peak_memory"},
            unit="GiB",
        ),
        "plain_and_triton": Wide(
            title="milliseconds, batch 1, one head, causal",
            down={"dtype": "dtype", **DOWN},
            columns={
                f"{name}, {words}": Pick({"implementation": name, "mode": mode, "quantity": "time"})
                for mode, words in attention.MODE_WORDS.items()
                for name in ("eager", "triton")
            },
            where={"head_dim": (64, 128), "seqlen_q": (1024, 16384, 65536)},
        ),
    }
    figures = {
        "forward_backward": Lines(
            claim=triton_claim,
            subtitle="causal, forward + backward",
            title="Attention forward + backward: speed over plain PyTorch",
            x="seqlen_q",
            x_title="sequence length",
            y="speed_over_eager",
            y_title="times as fast as eager",
            where=attention.BOTH_TIMES
            | {
                "dtype": "bfloat16",
                "head_dim": 64,
                "implementation": SHOWN,
                "seqlen_q": lambda length: length >= FIRST_DRAWN,
            },
        )
    }
