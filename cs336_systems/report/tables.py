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

from cs336_systems.report.distributed import DISTRIBUTED_TABLES
from cs336_systems.report.frames import (
    MODE_TITLES,
    MODEL_VARIANTS,
    select,
    tuples,
    variants,
)
from cs336_systems.report.leaderboard import LEADERBOARD_TABLES
from cs336_systems.report.markdown import Cells, number, plain, provenance
from cs336_systems.report.memory_tables import MEMORY_TABLES
from cs336_systems.report.profiles import tables as profile_tables
from cs336_systems.report.sections import (
    Measure,
    Section,
    attention_keys,
    constants,
    groups,
    key_cells,
    key_heading,
    longest_warmup,
    measures_section,
    pivot,
    present_modes,
    section,
    timed,
)
from cs336_systems.report.sharding import SHARDING_TABLES
from cs336_systems.report.training import training_sections


def sections(problem: str, frame: pd.DataFrame) -> list[Section]:
    """The sections of `problem` from its frame; none when the frame is empty."""
    return TABLES.get(problem, one_row_a_record)(frame) if len(frame) else []


def problem_table(shown: Sequence[Section], frame: pd.DataFrame) -> str:
    """`shown`, sections of one problem, as one Markdown text with the provenance of `frame` below."""
    parts = [f"**{section.title}**\n\n{section.body}" for section in shown]
    return "\n\n".join([*parts, provenance(frame)])


def benchmarking_script(frame: pd.DataFrame) -> list[Section]:
    """Time of one step by model and mode after the longest warm-up, and what shorter warm-ups cost."""
    keys = ["model", *variants(frame, ("label", *MODEL_VARIANTS)), "mode"]
    steps = timed(frame)
    warm = longest_warmup(steps)
    cells = Cells()
    rows = []
    for row in tuples(warm):
        varied = row.status == "ok" and row.mean > 0
        spread = f"{number(100 * row.std / row.mean, 2)} %" if varied else cells.text(row, "std")
        rows.append([*key_cells(row, keys), cells.mean(row), cells.time(row), spread])
    header = [*map(key_heading, keys), "mean ± std (ms)", "median (quartiles) (ms)", "std / mean"]
    title = f"Time of a step after {plain(warm['warmup'].max())} warm-up steps"
    found = [section("steps", title, header, rows, len(keys), cells)]
    for name, title in (("mean", "mean ± std of all timed steps"), ("first", "first timed step alone")):
        found.append(_warmup_section(steps, keys, name, title))
    return found


def pytorch_attention(frame: pd.DataFrame) -> list[Section]:
    """Plain attention: times of both passes and memory by head dim and length."""
    keys = attention_keys(frame) + variants(frame, ("label",))
    measures: list[Measure] = [("time", mode, f"{MODE_TITLES[mode]} (ms)") for mode in present_modes(frame)]
    measures += [
        ("memory_before_backward", None, "memory before backward (MiB)"),
        ("peak_memory", None, "peak memory (MiB)"),
    ]
    return [measures_section("attention", f"Attention, {constants(frame)}", frame, keys, measures)]


def torch_compile(frame: pd.DataFrame) -> list[Section]:
    """Eager against compiled: attention by mode, then whole models; compile time apart."""
    found = []
    attention = frame[frame["case_type"] == "AttentionShape"]
    for mode in present_modes(attention):
        title = f"Attention {MODE_TITLES[mode]} (ms), {constants(attention)}"
        keys = attention_keys(attention)
        found.append(pivot(f"attention.{mode}", title, select(attention, "time", mode), keys, fast="compiled"))
    models = frame[frame["case_type"] == "ModelCase"]
    keys = ["model", *variants(models, MODEL_VARIANTS)]
    if len(models):
        found.append(pivot("models", "Models, a step (ms)", timed(models), [*keys, "mode"], fast="compiled"))
    for name, cases, of in (("attention", attention, attention_keys(attention)), ("models", models, keys)):
        compile_times = select(cases, "compile_time")
        if len(compile_times):
            of = of + variants(compile_times, ("mode",))
            found.append(pivot(f"{name}.compile_time", f"Time to compile, {name} (s)", compile_times, of))
    return found


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
    "benchmarking_script": benchmarking_script,
    "nsys_profile": profile_tables,
    "pytorch_attention": pytorch_attention,
    "torch_compile": torch_compile,
    "training_run": training_sections,
    **DISTRIBUTED_TABLES,
    **SHARDING_TABLES,
    **LEADERBOARD_TABLES,
    **MEMORY_TABLES,
}


def _warmup_section(steps: pd.DataFrame, keys: list[str], name: str, title: str) -> Section:
    warmups = sorted(steps["warmup"].unique())
    cells = Cells()
    lines = []
    for group in groups(steps, keys):
        by_warmup = {row.warmup: row for row in tuples(group)}
        found = [by_warmup.get(warmup) for warmup in warmups]
        written = [cells.mean(row) if name == "mean" else cells.text(row, "first") for row in found]
        lines.append([*key_cells(tuples(group)[0], keys), *written])
    header = [*map(key_heading, keys), *(f"{plain(warmup)} warm-up{'' if warmup == 1 else 's'}" for warmup in warmups)]
    return section(f"warmup.{name}", f"Effect of warm-up: {title} (ms)", header, lines, len(keys), cells)


def _leaves(case: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"model": {"name": "small"}}` as `{"model.name": "small"}`."""
    flat: dict[str, Any] = {}
    for name, value in case.items():
        flat |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
