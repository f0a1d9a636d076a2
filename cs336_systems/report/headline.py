"""The README's table: a few shapes that matter, ours against eager and against the best of the peers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from cs336_systems.report.comparisons import best_peer
from cs336_systems.report.frames import BASELINE, OURS, select, tuples
from cs336_systems.report.markdown import Cells, factor, number, plain, provenance, table
from cs336_systems.report.sections import speed_up

LEADERBOARD, BENCHMARK = "leaderboard_2025", "flash_benchmarking"
SELECTED_LENGTHS = (1024, 4096, 16384, 65536)
SELECTED_HEAD_DIMS = (64, 128)
NO_SPEED = f"*No compiled {OURS} kernel was timed on this device.*"


def headline(frames: Mapping[str, pd.DataFrame]) -> str:
    """Forward + backward on the leaderboard's shape and selected causal bfloat16 shapes, as Markdown.

    `frames` hold a frame for each problem. Where no Triton kernel ran compiled, one sentence says so instead.
    """
    used = [frames[problem] for problem in (LEADERBOARD, BENCHMARK) if problem in frames]
    cases = [rows for frame in used for rows in _cases(frame)]
    cells = Cells()
    lines = [_line(rows, cells) for rows in cases if _row(rows, OURS) is not None]
    if not lines:
        return NO_SPEED
    header = ["batch × heads × S × d", "TFLOP/s", f"{OURS} (ms)", f"{BASELINE} (ms)", "best peer (ms)", "best peer"]
    header += [f"speed against {BASELINE}", "against best peer"]
    head = "Attention forward + backward, causal, bfloat16; medians, quartiles in brackets."
    legend = cells.legend()
    parts = [head, table(header, lines), *([legend] if legend else []), provenance(pd.concat(used))]
    return "\n\n".join(parts)


def _cases(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """Timed rows of each selected case: all of the leaderboard, some of the benchmark."""
    rows = select(frame, "time", "forward_backward")
    rows = rows[(rows["dtype"] == "bfloat16") & (rows["causal"] == True)]  # noqa: E712 (a column of objects)
    if frame["problem"].iloc[0] == BENCHMARK:
        rows = rows[rows["seqlen"].isin(SELECTED_LENGTHS) & rows["head_dim"].isin(SELECTED_HEAD_DIMS)]
    return [group for _, group in rows.groupby("case", sort=False)]


def _line(rows: pd.DataFrame, cells: Cells) -> list[str]:
    ours, eager, peer = _row(rows, OURS), _row(rows, BASELINE), best_peer(rows)
    shape = " × ".join(plain(value) for value in (ours.batch, ours.heads, ours.seqlen, ours.head_dim))
    rate = number(ours.tflops, 3) if ours.status == "ok" else cells.text(ours)
    return [
        shape,
        rate,
        cells.time(ours),
        cells.time(eager),
        cells.time(peer),
        peer.label if peer is not None else "none ran",
        factor(speed_up(eager, ours)),
        factor(speed_up(peer, ours)),
    ]


def _row(rows: pd.DataFrame, implementation: str) -> Any:
    """The row of `implementation`, if it has one that was not interpreted."""
    found = tuples(rows[(rows["implementation"] == implementation) & ~rows["interpreted"].astype(bool)])
    return found[0] if found else None
