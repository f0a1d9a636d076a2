"""Markdown tables: one function a problem, each giving named sections that documents may quote alone.

    sections("flash_benchmarking", frame)       # [Section(name="bfloat16.forward", title=..., body=...), ...]
    problem_table(shown, frame)                 # these under their titles, with the line of provenance

A cell quotes the median and, in brackets, the quartiles. Where there is nothing to quote it says why, and the reasons
stand below the table. A problem without a function of its own gets a table with one row a record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from cs336_systems.report.counters import COUNTER_TABLES
from cs336_systems.report.distributed import DISTRIBUTED_TABLES
from cs336_systems.report.few_queries import FEW_QUERIES_TABLES
from cs336_systems.report.frames import (
    ATTENTION_KEYS,
    ATTENTION_VARIANTS,
    DTYPE_ORDER,
    MODE_TITLES,
    OURS,
    ordered,
    select,
    tuples,
    variants,
)
from cs336_systems.report.ladder import LADDER_TABLES
from cs336_systems.report.long_calls import LONG_CALL_TABLES
from cs336_systems.report.markdown import Cells, plain, provenance
from cs336_systems.report.masks import MASK_TABLES
from cs336_systems.report.sections import (
    Measure,
    Section,
    attention_keys,
    constants,
    measures_section,
    pivot,
    present_modes,
    section,
)
from cs336_systems.report.shapes import SHAPE_TABLES
from cs336_systems.report.sharding import SHARDING_TABLES
from cs336_systems.report.short_calls import SHORT_CALL_TABLES
from cs336_systems.report.tiles import TILE_TABLES


def sections(problem: str, frame: pd.DataFrame) -> list[Section]:
    """The sections of `problem` from its frame; none when the frame is empty."""
    return TABLES.get(problem, one_row_a_record)(frame) if len(frame) else []


def problem_table(shown: Sequence[Section], frame: pd.DataFrame) -> str:
    """`shown`, sections of one problem, as one Markdown text with the provenance of `frame` below."""
    parts = [f"**{section.title}**\n\n{section.body}" for section in shown]
    return "\n\n".join([*parts, provenance(frame)])


def flash_benchmarking(frame: pd.DataFrame) -> list[Section]:
    """For each dtype: times and TFLOP/s by mode, peak memory; compile times last."""
    found = []
    for dtype in ordered(frame["dtype"], DTYPE_ORDER):
        cases = frame[frame["dtype"] == dtype]
        where = constants(cases)
        keys = attention_keys(cases)
        for mode in present_modes(cases):
            rows = select(cases, "time", mode)
            found.append(pivot(f"{dtype}.{mode}", f"{MODE_TITLES[mode]} (ms), {where}", rows, keys, fast=OURS))
        for mode in present_modes(cases):
            rows = select(cases, "time", mode)
            title = f"{MODE_TITLES[mode]} (TFLOP/s), {where}"
            found.append(pivot(f"tflops.{dtype}.{mode}", title, rows, keys, value="tflops"))
        if (cases["quantity"] == "peak_memory").any():  # not of a CPU
            peaks = select(cases, "peak_memory")
            found.append(pivot(f"memory.{dtype}", f"Peak memory, forward + backward (MiB), {where}", peaks, keys))
    compile_times = select(frame, "compile_time")
    if len(compile_times):
        keys = attention_keys(frame) + variants(compile_times, ("mode",))
        found.append(pivot("compile_time", "Time to compile (s)", compile_times, keys))
    return found


def leaderboard_2025(frame: pd.DataFrame) -> list[Section]:
    """All implementations on the leaderboard's shape, the fastest forward + backward first."""
    times = select(frame, "time", "forward_backward")
    drawn = times[~times["interpreted"]]
    order = [*drawn.sort_values("median", kind="stable")["label"], *frame["label"]]  # without a time: behind
    keys = ["label", *variants(frame, (*ATTENTION_KEYS, *ATTENTION_VARIANTS))]
    measures: list[Measure] = [("time", mode, f"{MODE_TITLES[mode]} (ms)") for mode in present_modes(frame)]
    measures += [("tflops", "forward_backward", "TFLOP/s"), ("peak_memory", None, "peak memory (MiB)")]
    title = f"Attention at S={plain(frame['seqlen'].max())}, d={plain(frame['head_dim'].max())}, {constants(frame)}"
    frame = frame.assign(_order=frame["label"].map(order.index)).sort_values("_order", kind="stable")
    return [measures_section("implementations", title, frame, keys, measures)]


def one_row_a_record(frame: pd.DataFrame) -> list[Section]:
    """Any problem: what the cases have in common above, what tells them apart in columns."""
    cases = pd.DataFrame([_leaves(json.loads(case)) for case in frame["case"]])
    names = [str(name) for name in cases]
    common = [name for name in names if cases[name].nunique(dropna=False) == 1]
    differing = [name for name in names if name not in common]
    cells = Cells()
    rows = []
    for row, case in zip(tuples(frame), cases[differing].itertuples(index=False)):
        described = [str(row.label), *map(plain, case), plain(row.mode), str(row.quantity)]
        rows.append([*described, cells.time(row), str(row.unit)])
    header = ["implementation", *differing, "mode", "quantity", "median (quartiles)", "unit"]
    shared = [(name, cases[name].iloc[0]) for name in common if name != "type"]
    title = ", ".join(f"{name} {plain(value)}" for name, value in shared if value is not None)
    return [section("records", title or "All records", header, rows, len(header) - 2, cells)]


TABLES: dict[str, Callable[[pd.DataFrame], list[Section]]] = {
    "flash_benchmarking": flash_benchmarking,
    "leaderboard_2025": leaderboard_2025,
    **SHAPE_TABLES,
    **LONG_CALL_TABLES,
    **SHORT_CALL_TABLES,
    **FEW_QUERIES_TABLES,
    **LADDER_TABLES,
    **COUNTER_TABLES,
    **TILE_TABLES,
    **MASK_TABLES,
    **DISTRIBUTED_TABLES,
    **SHARDING_TABLES,
}


def _leaves(case: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"model": {"name": "small"}}` as `{"model.name": "small"}`."""
    flat: dict[str, Any] = {}
    for name, value in case.items():
        flat |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
