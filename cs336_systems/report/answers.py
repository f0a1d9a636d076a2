"""Sentences with numbers for the writeup's questions: one function a problem, from its frame.

    answer("flash_benchmarking", frame)      # a Markdown list; a sentence whose records are missing is left out

Only real kernels are compared: a Triton kernel that ran in the interpreter has no speed worth a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from cs336_systems.report.comparisons import against_best_peer, compared, real
from cs336_systems.report.counters import COUNTER_ANSWERS
from cs336_systems.report.distributed import DISTRIBUTED_ANSWERS
from cs336_systems.report.few_queries import FEW_QUERIES_ANSWERS
from cs336_systems.report.frames import (
    BASELINE,
    DTYPE_ORDER,
    MODE_TITLES,
    OUR_KERNELS,
    OURS,
    labels,
    ordered,
    select,
    tuples,
)
from cs336_systems.report.ladder import LADDER_ANSWERS
from cs336_systems.report.long_calls import LONG_CALL_ANSWERS
from cs336_systems.report.markdown import code_span, factor, number, plain
from cs336_systems.report.masks import MASK_ANSWERS
from cs336_systems.report.sections import present_modes
from cs336_systems.report.shapes import SHAPE_ANSWERS
from cs336_systems.report.sharding import SHARDING_ANSWERS
from cs336_systems.report.short_calls import SHORT_CALL_ANSWERS
from cs336_systems.report.tiles import TILE_ANSWERS

EXAMPLE_LENGTH = 16384  # the leaderboard's length: examples quote it where it was measured
EXAMPLE_HEAD_DIM = 64


def answer(problem: str, frame: pd.DataFrame) -> str:
    """The sentences of `problem` as a Markdown list; empty when nothing can be said."""
    sentences = ANSWERS[problem](frame) if problem in ANSWERS and len(frame) else []
    return "\n".join("- " + " ".join(sentence.split()) for sentence in sentences)


def flash_benchmarking(frame: pd.DataFrame) -> list[str]:
    """For each dtype: an example, the range of speed-ups, the best peer, the first OOM, memory; then compile times."""
    said = []
    fast = "compiled" if frame["interpreted"].any() else OURS
    if frame["interpreted"].any():
        said.append(f"The {OURS} kernels ran in Triton's interpreter here, so their times are compared with nothing.")
    for dtype in ordered(frame["dtype"], DTYPE_ORDER):
        cases = frame[frame["dtype"] == dtype]
        times = select(cases, "time", "forward_backward")
        example = _example(compared(times, slow=BASELINE, fast=fast))
        if example is not None:
            said.append(
                f"At S={plain(example.seqlen)}, d={plain(example.head_dim)}, {dtype}{_causal(example)}, {fast} "
                f"forward + backward takes {number(example.median)} ms against {number(example.median_slow)} ms for "
                f"{BASELINE}: {factor(example.ratio)} as fast."
            )
            said += against_best_peer(times[times["case"] == example.case])
        for mode in present_modes(cases):
            pairs = compared(select(cases, "time", mode), slow=BASELINE, fast=fast)
            if len(pairs) > 1:
                said.append(
                    f"Over all {len(pairs)} shapes in {dtype} that both can run, {fast} {MODE_TITLES[mode]} has "
                    f"{_range_of(pairs['ratio'])} the speed of {BASELINE}."
                )
        said += out_of_memory(cases, ("seqlen", "head_dim", "dtype"))
        peaks = compared(select(cases, "peak_memory"), slow=BASELINE, fast=fast)
        if len(peaks):
            row = tuples(peaks.sort_values(["seqlen", "head_dim"]))[-1]
            said.append(
                f"At S={plain(row.seqlen)}, d={plain(row.head_dim)}, {dtype}, {BASELINE} needs at its peak "
                f"{number(row.median_slow)} MiB, {fast} {number(row.median)} MiB: {factor(row.ratio)} as much."
            )
    return said + compile_times(frame, "attention")


def leaderboard_2025(frame: pd.DataFrame) -> list[str]:
    """The place of each of our kernels among all implementations, and the best peer."""
    said = []
    times = select(frame, "time", "forward_backward")
    for _, rows in times.groupby("case", sort=False):
        ranked = tuples(real(rows).sort_values("median", kind="stable"))
        for place, row in enumerate(ranked, start=1):
            if row.implementation not in OUR_KERNELS:
                continue
            said.append(
                f"At {plain(row.batch)} × {plain(row.heads)} × {plain(row.seqlen)} × {plain(row.head_dim)}, "
                f"{row.dtype}{_causal(row)}, {row.implementation} forward + backward takes {number(row.median)} ms "
                f"({number(row.tflops, 3)} TFLOP/s), place {place} of the {len(ranked)} that ran."
            )
        said += against_best_peer(rows)
    return said


ANSWERS: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    "flash_benchmarking": flash_benchmarking,
    "leaderboard_2025": leaderboard_2025,
    **SHAPE_ANSWERS,
    **LONG_CALL_ANSWERS,
    **SHORT_CALL_ANSWERS,
    **FEW_QUERIES_ANSWERS,
    **LADDER_ANSWERS,
    **COUNTER_ANSWERS,
    **TILE_ANSWERS,
    **MASK_ANSWERS,
    **DISTRIBUTED_ANSWERS,
    **SHARDING_ANSWERS,
}


def out_of_memory(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """For each implementation the first case that ran out of memory: the shortest, then the narrowest."""
    said = []
    broken = frame[frame["status"] == "oom"]
    for label in labels(broken):
        rows = broken[broken["label"] == label]
        sizes = [key for key in ("seqlen", "head_dim") if key in keys]
        first = tuples(rows.sort_values(sizes, kind="stable") if sizes else rows)[0]
        names = {"head_dim": "d=", "seqlen": "S="}
        where = ", ".join(names.get(key, "") + plain(getattr(first, key)) for key in keys)
        said.append(f"{label} first runs out of memory at {where}: {code_span(first.message)}.")
    return said


def compile_times(cases: pd.DataFrame, what: str) -> list[str]:
    """One sentence with the median and longest first call of each implementation that was compiled.

    Cases share what is compiled, so a median may be of calls that had nothing to compile.
    """
    rows = real(cases[cases["quantity"] == "compile_time"])
    parts = []
    for label in labels(rows):
        one = rows[rows["label"] == label]
        unit = one["unit"].iloc[0]
        middle, longest = number(one["median"].median(), 3), number(one["median"].max(), 3)
        parts.append(f"{label} {middle} {unit} (longest {longest} {unit})")
    if not parts:
        return []
    first = f"First calls of {what}, which compile what no earlier case has compiled, take in the median over cases"
    return [f"{first}: {'; '.join(parts)}."]


def _example(pairs: pd.DataFrame) -> Any:
    """The row that an example quotes: the usual length and head dim where measured, else the longest; None if empty."""
    if pairs.empty:
        return None
    usual = pairs[pairs["seqlen"] == EXAMPLE_LENGTH]
    rows = usual if len(usual) else pairs[pairs["seqlen"] == pairs["seqlen"].max()]
    return tuples(rows[rows["head_dim"] == _nearest(rows["head_dim"], EXAMPLE_HEAD_DIM)])[0]


def _nearest(values: pd.Series, wanted: int) -> float:
    """The value nearest to `wanted`, the smaller of two; NaN when there is none."""
    return min(values, key=lambda value: (abs(value - wanted), value), default=float("nan"))


def _range_of(ratios: pd.Series) -> str:
    if len(ratios) == 1:
        return factor(ratios.iloc[0])
    return f"{factor(ratios.min())} to {factor(ratios.max())} (median {factor(ratios.median())})"


def _causal(row: Any) -> str:
    return ", causal" if row.causal else ""
