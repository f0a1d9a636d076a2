"""Table, figures and sentences of `attention_shapes`: rates by shape and our ratios to the libraries.

    tables(frame)      # forward, backward, forward_backward (TFLOP/s and ratios), ms.<mode>

A ratio is a quotient of medians of one run: clocks and power differ between runs more than kernels do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from cs336_systems.report.comparisons import compared, real
from cs336_systems.report.frames import MODE_TITLES, OUR_KERNELS, labels, select, tuples
from cs336_systems.report.markdown import Cells, factor, plain
from cs336_systems.report.points import Plot, points
from cs336_systems.report.sections import Section, constants, pivot, present_modes, section, speed_up

PROBLEM = "attention_shapes"
CUDNN, FLEX = "sdpa_cudnn", "flex"


def tables(frame: pd.DataFrame) -> list[Section]:
    """TFLOP/s with our ratios, a section for each mode; then the times in ms."""
    frame = with_shapes(frame)
    modes = present_modes(frame)
    found = [_rates(mode, times(frame, mode)) for mode in modes]
    for mode in modes:
        rows = select(frame, "time", mode)
        found.append(pivot(f"ms.{mode}", f"{MODE_TITLES[mode]} (ms), {constants(rows)}", rows, ["shape"]))
    return found


def plots(frame: pd.DataFrame) -> list[Plot]:
    """TFLOP/s by shape and implementation, a figure for each mode."""
    frame = with_shapes(frame)
    found = []
    for mode in present_modes(frame):
        rows = times(frame, mode)
        rows = rows.assign(short=[short_shape(row) for row in tuples(rows)])
        data = points(rows, panel=(), series="label", style="implementation", x="short")
        data["y"] = list(rows["tflops"])
        data[["low", "high"]] = float("nan")  # quartiles of a full GPU are narrower than a line
        title = f"Attention {MODE_TITLES[mode]} on {frame['device'].iloc[0]}, {constants(frame)}"
        found.append(
            Plot(
                name=mode, title=title, kind="bars", data=data, x_label="batch × heads × length × head dim, mask",
                y_label="speed (TFLOP/s)", log_y=False, notes=("Bars: from the median time.",),
            )
        )  # fmt: skip
    return found


def answers(frame: pd.DataFrame) -> list[str]:
    """Our range of ratios to cuDNN and FlexAttention in each mode."""
    frame = with_shapes(frame)
    said = []
    for ours in OUR_KERNELS:
        for mode in present_modes(frame):
            rows = select(frame, "time", mode)
            parts = [_range(peer, compared(rows, slow=peer, fast=ours)) for peer in (CUDNN, FLEX)]
            if any(parts):
                said.append(f"{ours} {MODE_TITLES[mode]} has " + " and ".join(part for part in parts if part) + ".")
    return said


def with_shapes(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with the column `shape`, what tells the cases apart in words, by head dim, mask and length."""
    frame = frame.assign(shape=[_words(row) for row in tuples(frame)], full=~frame["causal"].astype(bool))
    return _in_order(frame)


def times(frame: pd.DataFrame, mode: str) -> pd.DataFrame:
    """Rows of `mode`'s times, cells that broke included, in the order of `with_shapes`."""
    return _in_order(select(frame, "time", mode))


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.sort_values(["head_dim", "full", "seqlen", "batch", "heads"], kind="stable", ignore_index=True)


def _words(row: Any) -> str:
    sizes = " × ".join(plain(value) for value in (row.batch, row.heads, row.seqlen, row.head_dim))
    return f"{sizes} {'causal' if row.causal else 'full'}"


def heads_in_words(row: Any) -> str:
    """`16`, or `32/8`: query heads over key heads where those are fewer."""
    return plain(row.heads) if row.kv_heads != row.kv_heads else f"{plain(row.heads)}/{plain(row.kv_heads)}"


def short_shape(row: Any) -> str:
    """The shape on three short lines, for the foot of a bar."""
    length = f"{int(row.seqlen) // 1024}K" if row.seqlen >= 1024 else plain(row.seqlen)
    mask = "causal" if row.causal else "full"
    return f"{plain(row.batch)}×{plain(row.heads)}×\n{length}×{plain(row.head_dim)}\n{mask}"


def _rates(mode: str, rows: pd.DataFrame) -> Section:
    """Shapes down, implementations across, then our ratios to cuDNN and FlexAttention."""
    across = labels(rows)
    pairs = [(ours, peer) for ours in OUR_KERNELS if ours in across for peer in (CUDNN, FLEX) if peer in across]
    cells = Cells()
    lines = []
    for shape, group in rows.groupby("shape", sort=False):
        by_label = {row.label: row for row in tuples(group)}
        rates = [cells.text(by_label.get(label), "tflops") for label in across]
        ratios = [factor(speed_up(by_label.get(peer), by_label.get(ours))) for ours, peer in pairs]
        lines.append([str(shape), *rates, *ratios])
    header = ["batch × heads × S × d", *across, *(f"{ours} over {peer}" for ours, peer in pairs)]
    title = f"{MODE_TITLES[mode]} (TFLOP/s), {constants(rows)}"
    return section(mode, title, header, lines, 1, cells)


def fastest_sdpa(rows: Iterable[Any]) -> Any:
    """Of `rows` that of SDPA's kernel with the smallest median; None if none ran."""
    ran = (row for row in rows if row.implementation.startswith("sdpa") and row.status == "ok")
    return min(ran, key=lambda row: row.median, default=None)


def _range(peer: str, pairs: pd.DataFrame) -> str:
    if not len(real(pairs)):
        return ""
    lowest, highest = factor(pairs["ratio"].min()), factor(pairs["ratio"].max())
    return f"{lowest} to {highest} the speed of {peer}" if lowest != highest else f"{lowest} the speed of {peer}"


SHAPE_CASES = {PROBLEM: ("AttentionShape",)}
SHAPE_TABLES = {PROBLEM: tables}
SHAPE_PLOTS = {PROBLEM: plots}
SHAPE_ANSWERS = {PROBLEM: answers}
