"""Attention with too few queries to fill a GPU: a long sequence's one head, or generated tokens.

The Triton forward then splits the keys among programs. The same forward with whole keys runs beside
it. Times are of the GPU alone, in replayed graphs, since eager calls this short wait for the host
(`short_calls`). Keys and values that fit the L2 cache are there from the call before.
"""

import math
from dataclasses import replace
from typing import Any

import pandas as pd

from cs336_systems.bench.turns import MOST_CALLS, captured
from cs336_systems.book.frames import digits
from cs336_systems.config import BYTES_PER_ELEMENT, AttentionShape, DTypeName, RunConfig
from cs336_systems.experiments import Bars, Cell, Pivot, Row, problem
from cs336_systems.measure.timing import time_calls
from cs336_systems.subjects import attention_passes as attention
from cs336_systems.subjects.attention_builders import Built, whole_keys
from cs336_systems.subjects.attention_passes import FORWARD

GRAPH_FORWARD = Row(mode="forward", quantity="graph_time", unit="ms")
GRAPH_SAMPLES = 10
WHOLE = "triton_whole"  # the Triton forward without splitting
SIXTEEN_BIT = (WHOLE, "triton", "sdpa_flash", "sdpa_cudnn", "fa4")
GENERATING = ("triton", "sdpa_flash", "sdpa_cudnn", "fa4")  # shown in the figure
SINGLE = (WHOLE, "triton", "sdpa_efficient")  # SDPA's other kernels take no float32
# (batch, heads, key heads, queries, keys, head_dim, causal)
HEADS = tuple(
    (1, heads, heads, seqlen, seqlen, head_dim, True)
    for head_dim in (64, 128)
    for heads, seqlen in ((1, 1024), (1, 4096), (1, 16384), (4, 2048))
)
GENERATION = (
    (1, 8, 8, 1, 4096, 64, False),
    (1, 32, 8, 1, 4096, 128, False),
    (1, 32, 8, 1, 32768, 128, False),
    (8, 32, 8, 1, 8192, 128, False),
    (64, 32, 8, 1, 4096, 128, False),
    (1, 1, 1, 1, 131072, 128, False),
    (1, 32, 4, 8, 16384, 128, False),
    (1, 16, 16, 128, 8192, 128, False),
)
SHAPES: dict[str, dict[DTypeName, tuple[tuple[int, int, int, int, int, int, bool], ...]]] = {
    "tiny": {"float32": ((1, 2, 1, 1, 128, 32, False),)},
    "smoke": {"float32": ((1, 1, 1, 128, 128, 64, True), (1, 4, 2, 1, 256, 64, False))},
    "handout": {
        "bfloat16": (*HEADS, *GENERATION),
        "float32": tuple(shape for shape in HEADS if shape[3] == 4096),
    },
}


def rate_claim(rows: pd.DataFrame) -> str:
    """Return what splitting gains for one sequence, where nothing else fills the GPU."""
    rates = rows[rows["batch"] == 1].groupby("implementation")["tb_s"].max()
    if not {"triton", "fa4"} <= set(rates.index) or not rates["fa4"] < rates["triton"]:
        return ""
    ours, theirs = digits(rates["triton"]), digits(rates["fa4"])
    return (
        f"One sequence's keys split, triton reads up to {ours} TB/s; "
        f"FlashAttention-4, unsplit, {theirs}"
    )


@problem(
    title="Attention of one head, and of generated tokens: "
    "the keys split, whole, and the libraries",
    order=4,
)
class FewQueries(attention.AttentionExperiment):
    implementations = (
        WHOLE,
        "triton",
        "hopper",
        "sdpa_flash",
        "sdpa_cudnn",
        "sdpa_efficient",
        "fa4",
    )
    settled = True

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return every shape with every implementation that takes its dtype.

        The Hopper kernels run on the causal shapes, which are heads of a sequence.
        """
        rows = (GRAPH_FORWARD,) if run.device == "cuda" else (FORWARD,)
        cells = []
        for dtype, shapes in SHAPES[run.scale].items():
            names = (
                SIXTEEN_BIT
                if dtype == "bfloat16"
                else SINGLE
                if run.device == "cuda"
                else (*SINGLE, "sdpa_flash")
            )
            for batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, is_causal in shapes:
                grouped = None if kv_heads == heads else kv_heads
                case = attention.sized_shape(
                    run, batch, heads, seqlen_k, head_dim, is_causal, grouped
                )
                case = replace(case, seqlen_q=seqlen_q, dtype=dtype)
                more = ("hopper",) if dtype == "bfloat16" and is_causal else ()
                cells += [
                    Cell(case=case, implementation=name, rows=rows) for name in (*names, *more)
                ]
        return cells

    def built(self, name: str, case: AttentionShape, run: RunConfig) -> Built:
        """Return the forward `name`, whose kernel's name ends with the number of parts.

        A forward that does not split the keys has no number.
        """
        built = super().built("triton" if name == WHOLE else name, case, run)
        kernels = built.kernel.split()
        kernel = " ".join(kernels[: 2 if kernels[:1] == ["interpreter"] else 1])
        if name == WHOLE:
            return Built(attend=whole_keys(case), kernel=kernel.partition("/")[0])
        return replace(built, kernel=kernel)

    def samples_of(self, call: attention.Call, case: Any, run: RunConfig) -> list[float]:
        """Return milliseconds per call, on a GPU from a replayed graph of MOST_CALLS calls."""
        if run.device == "cpu":
            return time_calls(call, device="cpu", warmup=1, num_samples=3)
        graph = captured(call)
        return [
            ms / MOST_CALLS
            for ms in time_calls(graph.replay, device="cuda", num_samples=GRAPH_SAMPLES)
        ]

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add `parts`, how many the keys are split into, and `tb_s`, the TB/s of reading them.

        The number of parts comes from the kernel's name; values are read as well as keys.
        """
        _, _, parts = row["kernel"].partition("/")
        elements = (
            2 * row["batch"] * (row["kv_heads"] or row["heads"]) * row["seqlen_k"] * row["head_dim"]
        )
        rate = (
            elements * BYTES_PER_ELEMENT[row["dtype"]] / row["median"] / 1e9
            if row["median"] > 0
            else math.nan
        )
        return super().columns(row) | {"parts": int(parts) if parts else 1, "tb_s": rate}

    tables = {
        dtype: Pivot(
            title=f"forward, {dtype}",
            down={"batch × heads × queries on keys × head dim": "shape"},
            unit="µs",
            where={"mode": "forward", "dtype": dtype},
            ratios=tuple(
                ("triton", name)
                for name in (WHOLE, "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "fa4")
            ),
        )
        for dtype in ("bfloat16", "float32")
    } | {
        "generation": Pivot(
            title="one token: keys and values read (TB/s)",
            down={"batch × heads × queries on keys × head dim": "shape"},
            value="tb_s",
            where={"mode": "forward", "seqlen_q": 1},
        )
    }
    figures = {
        "generation": Bars(
            claim=rate_claim,
            title="One token: keys and values read",
            subtitle="forward of one query a head, batch × heads × queries on keys × head dim",
            x="shape",
            y="tb_s",
            y_title="keys and values read (TB/s)",
            where={"mode": "forward", "seqlen_q": 1, "implementation": GENERATING},
        ),
    }
