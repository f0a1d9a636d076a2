"""Plain PyTorch attention by length and head dim: time, memory, and where memory runs out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.book.frames import digits, pick
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments import Lines, Pick, Wide, problem
from cs336_systems.measure.timing import time_calls
from cs336_systems.subjects import attention_passes as attention

BATCH = 8
PASSES = 100  # timed passes that the handout asks for
PASSES_BEYOND = 20  # timed passes at the lengths that we add to its grid
LONGEST_OF_HANDOUT = 16384
# An H200 has room where an 80 GB GPU runs out of memory, so the grid goes on until plain attention
# really fails.
LENGTHS = {
    "tiny": (64, 128),
    "smoke": (128, 256, 512, 1024),
    "handout": (256, 1024, 4096, 8192, 16384, 32768, 65536),
}
MEMORY = {
    attention.SAVED.quantity: "saved for backward",
    attention.PEAK.quantity: "peak of both passes",
}


def memory_claim(rows: pd.DataFrame) -> str:
    """Return that memory grows with S², if twice the length saves 3.5 to 4.5 times as much.

    The two longest lengths are compared.
    """
    saved = rows[rows["quantity"] == attention.SAVED.quantity].sort_values("seqlen_q").tail(2)
    if len(saved) < 2:
        return ""
    growth = saved["median"].iloc[1] / saved["median"].iloc[0]
    length = saved["seqlen_q"].iloc[1]
    if not (length == 2 * saved["seqlen_q"].iloc[0] and 3.5 <= growth <= 4.5):
        return ""
    return (
        f"Memory grows with S²: {digits(saved['median'].iloc[1])} GiB saved for the backward "
        f"at S = {length:,}"
    )


@problem()
class PyTorchAttention(attention.AttentionExperiment):
    rows = (
        attention.FORWARD,
        attention.SAVED,
        attention.BEFORE_BACKWARD,
        attention.BACKWARD,
        attention.PEAK,
    )

    def cases(self, run: RunConfig) -> list[AttentionShape]:
        """Return every head dim with every length: batch 8, one head, no mask, float32."""
        return [
            replace(attention.sized_shape(run, BATCH, 1, seqlen, head_dim, False), dtype="float32")
            for head_dim in attention.HEAD_DIMS[run.scale]
            for seqlen in LENGTHS[run.scale]
        ]

    def samples_of(self, call: attention.Call, case: AttentionShape, run: RunConfig) -> list[float]:
        """Time as many passes as the handout asks for; below its scale a time limit decides."""
        if run.scale != "handout":
            return super().samples_of(call, case, run)
        passes = PASSES if case.seqlen_q <= LONGEST_OF_HANDOUT else PASSES_BEYOND
        return time_calls(call, device=run.device, warmup=1, num_samples=passes)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return super().columns(row) | {"memory": MEMORY.get(row["quantity"], "")}

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Fit the forward's time at the handout's longest length as a line over the head dim.

        `intercept` is in ms, `slope` in ms per column.
        """
        chosen = {
            "mode": "forward",
            "quantity": "time",
            "seqlen_q": LONGEST_OF_HANDOUT,
            "status": "ok",
        }
        rows = pick(frame, chosen)
        slope, intercept = np.polyfit(
            rows["head_dim"].astype(float), rows["median"].astype(float), 1
        )
        return {"slope": float(slope), "intercept": float(intercept)}

    tables = {
        name: Wide(
            title=f"Plain attention, batch 8, float32{words}",
            down=down,
            where=where,
            columns={
                "forward (ms)": Pick({"mode": "forward", "quantity": "time"}),
                "backward (ms)": Pick({"mode": "backward", "quantity": "time"}),
                "memory before backward (GiB)": Pick(
                    {"quantity": attention.BEFORE_BACKWARD.quantity}, "GiB"
                ),
                "saved for backward (GiB)": Pick({"quantity": attention.SAVED.quantity}, "GiB"),
                "peak (GiB)": Pick({"quantity": attention.PEAK.quantity}, "GiB"),
            },
        )
        for name, words, down, where in (
            ("one", ", d = 64", {"S": "seqlen_q"}, {"head_dim": 64}),
            ("all", "", {"d": "head_dim", "S": "seqlen_q"}, {}),
        )
    }
    figures = {
        "memory": Lines(
            claim=memory_claim,
            title="Memory of plain attention",
            x="seqlen_q",
            x_title="S",
            y_title="memory (GiB)",
            color="memory",
            unit="GiB",
            where={"quantity": tuple(MEMORY), "head_dim": 64},
        )
    }
