"""Table, figures and sentences of `attention_shapes`: rates by shape, our ratios to the libraries, what a call costs.

    tables(frame)      # forward, backward, forward_backward (TFLOP/s and ratios), host_time, graph_time (µs), ms.<mode>

A ratio is a quotient of medians of one run: clocks and power differ between runs more than kernels do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from cs336_systems.report.comparisons import compared, real
from cs336_systems.report.frames import MODE_TITLES, MODES, OUR_KERNELS, labels, ordered, select, tuples
from cs336_systems.report.markdown import Cells, factor, number, plain
from cs336_systems.report.points import Plot, points
from cs336_systems.report.sections import Section, constants, pivot, present_modes, section, speed_up

PROBLEM = "attention_shapes"
CUDNN, FLEX, FLASH = "sdpa_cudnn", "flex", "sdpa_flash"
MS_PER_US = 1e-3
# What a short call takes, by quantity: the table's title, and of what the ratio is.
CALL_TITLES = {
    "host_time": ("Host's time of a call", "the host's time"),
    "graph_time": ("Time of a call in a replayed CUDA graph", "the time"),
}


def tables(frame: pd.DataFrame) -> list[Section]:
    """TFLOP/s with our ratios, a section for each mode; what a short call takes; the times in ms."""
    frame = with_shapes(frame)
    modes = present_modes(frame)
    found = [_rates(mode, times(frame, mode)) for mode in modes]
    for quantity in CALL_TITLES:
        rows = frame[frame["quantity"] == quantity]
        if len(rows):
            found.append(_of_a_call(quantity, rows))
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
    """Our range of ratios to cuDNN and FlexAttention in each mode; what a short call takes beside SDPA's."""
    frame = with_shapes(frame)
    said = []
    for ours in OUR_KERNELS:
        for mode in present_modes(frame):
            rows = select(frame, "time", mode)
            parts = [_range(peer, compared(rows, slow=peer, fast=ours)) for peer in (CUDNN, FLEX)]
            if any(parts):
                said.append(f"{ours} {MODE_TITLES[mode]} has " + " and ".join(part for part in parts if part) + ".")
    for quantity in CALL_TITLES:
        for ours in OUR_KERNELS:
            said += _worst_calls(quantity, frame[frame["quantity"] == quantity], ours)
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


def _of_a_call(quantity: str, rows: pd.DataFrame) -> Section:
    """What a call takes in µs, and ours over the shorter of SDPA's kernels."""
    rows = rows.assign(microseconds=rows["median"] / MS_PER_US)
    across = labels(rows)
    ours = [name for name in OUR_KERNELS if name in across]
    cells = Cells()
    lines = []
    for (shape, mode), group in rows.groupby(["shape", "mode"], sort=False):
        by_name = _by_implementation(group)
        written = [cells.text(by_name.get(label), "microseconds") for label in across]
        ratios = [factor(1 / speed_up(fastest_sdpa(by_name.values()), by_name.get(name))) for name in ours]
        lines.append([str(shape), MODE_TITLES[str(mode)], *written, *ratios])
    header = ["batch × heads × S × d", "mode", *across, *(f"{name} over SDPA" for name in ours)]
    title, what = CALL_TITLES[quantity]
    cells.remark(f"over SDPA: {what} over that of the cheaper of SDPA's kernels there; lower is better")
    return section(quantity, f"{title} (µs), {constants(rows)}", header, lines, 2, cells)


def _worst_calls(quantity: str, calls: pd.DataFrame, ours: str) -> list[str]:
    """A sentence a mode: where a call of `ours` compares worst with the cheaper of SDPA's kernels."""
    said = []
    for mode in ordered(calls["mode"], MODES):
        ratios: list[tuple[float, Any]] = []
        for _, rows in calls[calls["mode"] == mode].groupby("shape", sort=False):
            found = _by_implementation(rows)
            ratios.append((1 / speed_up(fastest_sdpa(found.values()), found.get(ours)), found.get(ours)))
        ratios = [(ratio, row) for ratio, row in ratios if ratio == ratio]
        if ratios:
            worst, row = max(ratios, key=lambda pair: pair[0])
            verb = "keeps the host for" if quantity == "host_time" else "in a replayed CUDA graph takes"
            said.append(
                f"A call of {ours}, {MODE_TITLES[mode]}, {verb} at most {factor(worst)} the time of "
                f"SDPA's cheaper kernel: {number(row.median / MS_PER_US, 3)} µs at {row.shape}."
            )
    return said


def _by_implementation(rows: pd.DataFrame) -> dict[str, Any]:
    return {row.implementation: row for row in tuples(rows)}


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
