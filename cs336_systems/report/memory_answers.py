"""Sentences about mixed precision, memory and checkpointing; `answers.py` lists them by problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd

from cs336_systems.report.frames import BASELINE, MODE_TITLES, tuples
from cs336_systems.report.markdown import code_span, counted, factor, number, plain
from cs336_systems.report.memory_tables import AUTOCAST_ORDER, Lookup, median, precision_of


def accumulation(frame: pd.DataFrame) -> list[str]:
    """Each sum with its error."""
    said = []
    for row in tuples(frame[frame["status"] == "ok"]):
        case = json.loads(row.case)
        how = f"{case.get('addend')} terms" + (" converted to float32" if case.get("converted") else "")
        said.append(
            f"{how} into a {case.get('accumulator')} sum: {row.kernel or number(row.median, 6)}, off by "
            f"{number(row.median - 10, 2)}."
        )
    return said


def mixed_precision(frame: pd.DataFrame) -> list[str]:
    """The dtypes in words, where a norm overflows, and how much faster low precision is."""
    lookup = Lookup(frame)
    said = []
    for key, case in lookup.of_type("AutocastCase"):
        rows = [lookup.row(key, BASELINE, "forward_backward", f"dtype of {name}") for name in AUTOCAST_ORDER]
        named = [f"{name} {row.kernel}" for name, row in zip(AUTOCAST_ORDER, rows) if row is not None and row.kernel]
        if named:
            said.append(f"Under {case.get('dtype')} autocast: {', '.join(named)}.")
    for key, case in lookup.of_type("NormCase"):
        overflow = median(lookup.row(key, BASELINE, "forward", "overflowing_squares"))
        if overflow > 0:
            said.append(
                f"With inputs of standard deviation {plain(case.get('scale'))}, {number(100 * overflow, 3)} % of the "
                f"squares are infinite in {case.get('dtype')}."
            )
    steps = frame[(frame["case_type"] == "ModelCase") & (frame["quantity"] == "time") & (frame["status"] == "ok")]
    times = {(row.model, row.mode, row.precision): row.median for row in tuples(steps)}
    for precision in sorted({name for _, _, name in times} - {"float32"}, reverse=True):
        for mode in dict.fromkeys(steps["mode"]):
            ratios = [
                (times[model, mode, "float32"] / time, model)
                for (model, one, name), time in times.items()
                if (one, name) == (mode, precision) and (model, mode, "float32") in times and time > 0
            ]
            if ratios:
                parts = ", ".join(f"{model} {factor(ratio)}" for ratio, model in ratios)
                said.append(f"{precision}, {MODE_TITLES[mode]}, against float32: {parts} as fast.")
    return said + _failures(frame)


def memory_profiling(frame: pd.DataFrame) -> list[str]:
    """Peaks of the passes, the residual stream, a block's savings and gradients, and how well they were predicted."""
    lookup = Lookup(frame)
    said = []
    for key, case in lookup.of_type("MemoryCase"):
        for mode in lookup.modes:
            for implementation in lookup.implementations:
                peaks = _phase_peaks(lookup, key, implementation, mode)
                if peaks:
                    phase, peak = max(peaks.items(), key=lambda item: item[1])
                    said.append(
                        f"{_named(case)}, {MODE_TITLES[mode]}, {implementation}: the peak is "
                        f"{number(peak / 1024)} GiB, in {phase}."
                    )
    said += _predictions(lookup)
    for key, case in lookup.of_type("BlocksCase"):
        for implementation in lookup.implementations:
            said += _block(lookup, key, case, implementation)
    return said + _failures(frame)


def _named(case: dict[str, Any]) -> str:
    model = case.get("model") or {}
    return f"{model.get('name')} at context {model.get('context_length')}, {precision_of(case)}"


def _phase_peaks(lookup: Lookup, key: str, implementation: str, mode: str) -> dict[str, float]:
    rows = [row for row in lookup.cell(key, implementation, mode) if row.quantity.startswith("peak_memory.")]
    if not all(row.status == "ok" for row in rows):
        return {}
    return {row.quantity.partition(".")[2]: row.median for row in rows}


def _predictions(lookup: Lookup) -> list[str]:
    """How far the simulated peak, and the closed form, are from the measured one."""
    simulated, closed = [], []
    for key, _ in lookup.of_type("MemoryCase"):
        for mode in lookup.modes:
            measured = max(_phase_peaks(lookup, key, BASELINE, mode).values(), default=0.0)
            predicted = max(_phase_peaks(lookup, key, "simulated", mode).values(), default=0.0)
            formula = median(lookup.row(key, BASELINE, mode, "closed_form_peak"))
            if measured and predicted:
                simulated.append(abs(predicted / measured - 1))
            if measured and formula == formula:
                closed.append(abs(formula / measured - 1))
    said = []
    for what, errors in (("The simulation", simulated), ("The closed form", closed)):
        if errors:
            said.append(
                f"{what} is off by {number(100 * max(errors), 2)} % of the measured peak at most, over {len(errors)} "
                "passes."
            )
    return said


def _block(lookup: Lookup, key: str, case: dict[str, Any], implementation: str) -> list[str]:
    def value(mode: str, quantity: str) -> float:
        return median(lookup.row(key, implementation, mode, quantity))

    saved, residual = value("forward", "saved_for_backward"), value("forward", "residual_stream")
    if saved != saved:
        return []
    ranked = [lookup.row(key, implementation, "forward", f"saved.{rank}") for rank in range(1, 6)]
    parts = [
        f"{code_span(row.kernel)} {number(row.median)}" for row in ranked if row is not None and row.status == "ok"
    ]
    stream = f"a residual-stream tensor has {number(residual)} MiB; " if residual == residual else ""
    text = f"{_named(case)}, {implementation}: {stream}a block saves {number(saved)} MiB for backward"
    said = [text + (f", most of it by {', '.join(parts)}." if parts else ".")]
    made, expected = value("backward", "gradients_of_block"), value("backward", "closed_form_gradients")
    if made == made and expected == expected:
        said.append(
            f"Its backward makes {number(made)} MiB of gradients; its parameters and input have {number(expected)} MiB."
        )
    return said


def gradient_checkpointing(frame: pd.DataFrame) -> list[str]:
    """Which group size has the least peak, what recursion and kept attention give, and the stored bytes."""
    lookup = Lookup(frame)
    said = []
    families: dict[tuple[str, str, str], list[tuple[str, float, float]]] = {}
    for key, case in lookup.of_type("MemoryCase"):
        for implementation in lookup.implementations:
            peak = median(lookup.row(key, implementation, "train_step", "peak_memory"))
            time = median(lookup.row(key, implementation, "train_step", "time"))
            if peak == peak:
                family = (_named(case), str(case.get("attention")), implementation)
                families.setdefault(family, []).append((str(case.get("checkpointing")), peak, time))
    for (name, attention, implementation), found in families.items():
        parts = [
            f"{_strategy(strategy)} {number(peak / 1024)} GiB" + (f" in {number(time)} ms" if time == time else "")
            for strategy, peak, time in found
        ]
        said.append(f"{name}, {attention} attention, {implementation}: {'; '.join(parts)}.")
    for key, case in lookup.of_type("BlocksCase"):
        blocks, parts = case.get("blocks"), []
        for implementation in lookup.implementations:
            saved = median(lookup.row(key, implementation, "forward", "saved_for_backward"))
            if saved == saved:
                parts.append(f"{implementation} {number(saved)} MiB")
        if parts:
            said.append(
                f"{counted(blocks, 'block')}, {_strategy(str(case.get('checkpointing')))}, "
                f"{'stores' if blocks == 1 else 'store'} between forward and backward: {', '.join(parts)}."
            )
    return said + _failures(frame)


def _strategy(name: str) -> str:
    if name == "none":
        return "without checkpointing"
    return f"groups of {name}" if name.isdecimal() else name


def _failures(frame: pd.DataFrame) -> list[str]:
    """Each reason for out-of-memory once, with the first case it ended."""
    said: dict[str, str] = {}
    for row in tuples(frame[frame["status"] == "oom"]):
        case = json.loads(row.case)
        strategy = case.get("checkpointing", "none")
        how = "" if strategy == "none" else f", {_strategy(strategy)}"
        text = f"{_named(case)}{how}, {MODE_TITLES[row.mode]}, {row.implementation}"
        said.setdefault(text, f"{text} runs out of memory: {code_span(row.message)}.")
    return list(said.values())


MEMORY_ANSWERS: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    "mixed_precision_accumulation": accumulation,
    "benchmarking_mixed_precision": mixed_precision,
    "memory_profiling": memory_profiling,
    "gradient_checkpointing": gradient_checkpointing,
}
