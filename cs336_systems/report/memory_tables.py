"""Tables of mixed precision, memory and activation checkpointing; `tables.py` lists them by problem.

A cell is looked up by case, implementation, mode and quantity, so that an absent record is a dash and a broken one says
why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from cs336_systems.report.frames import BASELINE, MODE_TITLES, MODES, ordered, tuples
from cs336_systems.report.markdown import Cells, factor, number, plain
from cs336_systems.report.sections import Section, present_modes, section, speed_up

PHASES = ("start", "forward", "backward", "optimizer step")
RANKS = range(1, 6)
AUTOCAST_ORDER = ("parameters", "fc1 output", "layer norm output", "logits", "loss", "gradients")
CHECKPOINTING_ORDER = ("none", "1", "2", "4", "8", "recursive", "selective")
MEMORY_IMPLEMENTATIONS = ("eager", "compiled", "simulated", "simulated compiled")  # measured first

STRATEGIES_TITLE = "Activation checkpointing by strategy"
STORED_TITLE = "Stored between forward and backward"
NOT_YET = "*Not measured yet.*"


class Lookup:
    """The rows of a frame by what names them."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._rows = {(row.case, row.implementation, row.mode, row.quantity): row for row in tuples(frame)}
        self.cases: dict[str, dict[str, Any]] = {str(case): json.loads(str(case)) for case in frame["case"]}
        self.implementations = ordered(frame["implementation"], MEMORY_IMPLEMENTATIONS)
        self.modes = ordered(frame["mode"], MODES)

    def row(self, case: str, implementation: str, mode: str, quantity: str) -> Any:
        return self._rows.get((case, implementation, mode, quantity))

    def cell(self, case: str, implementation: str, mode: str) -> list[Any]:
        """All rows of one cell and mode."""
        return [row for key, row in self._rows.items() if key[:3] == (case, implementation, mode)]

    def of_type(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """(key, case) of all cases of a class, the most natural order first."""
        found = [(key, case) for key, case in self.cases.items() if case.get("type") == name]
        return sorted(found, key=lambda pair: _order(pair[1]))


def _order(case: dict[str, Any]) -> tuple[Any, ...]:
    """Small models and contexts first, then precision, attention, and strategies in their own order."""
    model = case.get("model") or {}
    checkpointing = str(case.get("checkpointing", ""))
    rank = CHECKPOINTING_ORDER.index(checkpointing) if checkpointing in CHECKPOINTING_ORDER else 99
    sizes = (model.get("d_model") or 0, model.get("context_length") or 0, case.get("blocks") or 0)
    scale = case.get("scale") or 0
    return (
        *sizes,
        str(case.get("dtype", "")),
        scale,
        precision_of(case),
        str(case.get("attention", "")),
        rank,
        checkpointing,
    )


def precision_of(case: dict[str, Any]) -> str:
    precision = case.get("precision") or {}
    autocast = precision.get("autocast")
    return f"{autocast} autocast" if autocast else str(precision.get("parameters", ""))


def median(row: Any) -> float:
    """The measured value of `row`; NaN where there is none."""
    return float(row.median) if row is not None and row.status == "ok" else float("nan")


def accumulation(frame: pd.DataFrame) -> list[Section]:
    """The four sums."""
    cells = Cells()
    rows = []
    for row in tuples(frame):
        case = json.loads(row.case)
        names = [plain(case.get(name, "")) for name in ("accumulator", "addend", "converted")]
        # The kernel is the sum with all its digits, of which samples keep six.
        rows.append([*names, row.kernel if row.status == "ok" and row.kernel else cells.text(row)])
    header = ["accumulator", "addend", "addend converted to float32", "sum"]
    return [section("sums", "0.01 added a thousand times", header, sorted(rows), 3, cells)]


def mixed_precision(frame: pd.DataFrame) -> list[Section]:
    """Autocast's dtypes, the norm in low precision, and the time of a step by precision."""
    found = []
    lookup = Lookup(frame)
    autocast = lookup.of_type("AutocastCase")
    if autocast:
        cells = Cells()
        lines = []
        for name in AUTOCAST_ORDER:
            seen = [lookup.row(key, BASELINE, "forward_backward", f"dtype of {name}") for key, _ in autocast]
            texts = [row.kernel if row is not None and row.status == "ok" else cells.text(row) for row in seen]
            lines.append([name, *texts])
        header = ["tensor", *(f"{case.get('dtype', '')} autocast" for _, case in autocast)]
        found.append(section("dtypes", "Dtypes under autocast, toy model", header, lines, len(header), cells))
    norms = lookup.of_type("NormCase")
    if norms:
        cells = Cells()
        lines = []
        for key, case in norms:
            values = [lookup.row(key, BASELINE, "forward", name) for name in ("overflowing_squares", "norm_error")]
            lines.append([str(case.get("dtype")), plain(case.get("scale")), *(cells.text(value) for value in values)])
        header = [
            "dtype throughout",
            "std of the inputs",
            "fraction of infinite squares",
            "largest error of the output",
        ]
        found.append(section("norm", "Layer norm computed in one dtype", header, lines, 2, cells))
    steps = frame[frame["case_type"] == "ModelCase"]
    if len(steps):
        found.append(_steps(steps))
    return found


def _steps(frame: pd.DataFrame) -> Section:
    """Models and modes down, precisions across, with the speed against float32."""
    precisions = sorted(set(frame["precision"]), key=lambda name: (name != "float32", -len(name)))
    cells = Cells()
    lines = []
    for model in dict.fromkeys(frame["model"]):
        for mode in present_modes(frame):
            rows = frame[(frame["model"] == model) & (frame["mode"] == mode) & (frame["quantity"] == "time")]
            by_precision = {row.precision: row for row in tuples(rows)}
            if by_precision:
                base = by_precision.get("float32")
                times = [cells.time(by_precision.get(name)) for name in precisions]
                ratios = [factor(speed_up(base, by_precision.get(name))) for name in precisions if name != "float32"]
                lines.append([str(model), plain(mode), *times, *ratios])
    faster = [f"{name} over float32" for name in precisions if name != "float32"]
    header = ["model", "mode", *(f"{name} (ms)" for name in precisions), *faster]
    return section("steps", "Time of a step by precision", header, lines, 2, cells)


def memory_profiling(frame: pd.DataFrame) -> list[Section]:
    """Peaks by phase, the largest allocations, what a block saves, and which operations save most."""
    lookup = Lookup(frame)
    found = []
    profiled = lookup.of_type("MemoryCase")
    if profiled:
        found += [_peaks(lookup, profiled), _allocations(lookup, profiled)]
    blocks = lookup.of_type("BlocksCase")
    if blocks:
        found += [_blocks(lookup, blocks), _contributors(lookup, blocks)]
    return [one for one in found if one.body]


def _peaks(lookup: Lookup, cases: Sequence[tuple[str, dict[str, Any]]]) -> Section:
    cells = Cells()
    lines = []
    for key, case in cases:
        for mode in lookup.modes:
            for implementation in lookup.implementations:
                if lookup.cell(key, implementation, mode):
                    found = [lookup.row(key, implementation, mode, f"peak_memory.{phase}") for phase in PHASES]
                    known = [phase for phase in PHASES if mode != "forward" or phase in PHASES[:2]]
                    texts = [cells.text(row) if phase in known else "" for phase, row in zip(PHASES, found)]
                    closed = cells.text(lookup.row(key, implementation, mode, "closed_form_peak"))
                    lines.append([*_names(case), plain(mode), implementation, *texts, closed])
    header = ["model", "context", "precision", "mode", "implementation"]
    header += [f"{phase} (MiB)" for phase in PHASES] + ["closed form (MiB)"]
    return section("peaks", "Peak memory of each phase", header, lines, 5, cells)


def _names(case: dict[str, Any]) -> list[str]:
    model = case.get("model") or {}
    return [str(model.get("name", "")), plain(model.get("context_length", "")), precision_of(case)]


def _allocations(lookup: Lookup, cases: Sequence[tuple[str, dict[str, Any]]]) -> Section:
    cells = Cells()
    lines = []
    for key, case in cases:
        for mode in lookup.modes:
            for implementation in lookup.implementations:
                for rank in RANKS:
                    row = lookup.row(key, implementation, mode, f"allocation.{rank}")
                    if row is not None:
                        lines.append([*_names(case), plain(mode), implementation, cells.text(row), row.kernel])
    header = ["model", "context", "precision", "mode", "implementation", "size (MiB)", "count, kind and origin"]
    return section("allocations", "Largest allocations made in a pass", header, lines, 5, cells)


def _blocks(lookup: Lookup, cases: Sequence[tuple[str, dict[str, Any]]]) -> Section:
    quantities = (
        ("forward", "residual_stream"), ("forward", "saved_for_backward"), ("forward", "closed_form_saved"),
        ("backward", "gradients_of_block"), ("backward", "closed_form_gradients"),
    )  # fmt: skip
    cells = Cells()
    lines = []
    for key, case in cases:
        for implementation in lookup.implementations:
            if lookup.cell(key, implementation, "forward"):
                found = [lookup.row(key, implementation, mode, quantity) for mode, quantity in quantities]
                lines.append([*_names(case), implementation, *map(cells.text, found)])
    header = ["model", "context", "precision", "implementation", "residual stream (MiB)", "saved for backward (MiB)"]
    header += ["closed form (MiB)", "gradients made in backward (MiB)", "expected (MiB)"]
    return section("blocks", "One block: saved for backward, and gradients", header, lines, 4, cells)


def _contributors(lookup: Lookup, cases: Sequence[tuple[str, dict[str, Any]]]) -> Section:
    cells = Cells()
    lines = []
    for key, case in cases:
        for implementation in lookup.implementations:
            for rank in RANKS:
                row = lookup.row(key, implementation, "forward", f"saved.{rank}")
                if row is not None:
                    lines.append([*_names(case), implementation, cells.text(row), row.kernel])
    header = ["model", "context", "precision", "implementation", "saved (MiB)", "by"]
    return section("contributors", "Operations that save most", header, lines, 4, cells)


def gradient_checkpointing(frame: pd.DataFrame) -> list[Section]:
    """Strategies with their peaks and times; and what is stored between forward and backward.

    The writeup shows each on its own, so both are there while a sweep has measured one of them.
    """
    lookup = Lookup(frame)
    strategies, stored = lookup.of_type("MemoryCase"), lookup.of_type("BlocksCase")
    found = [
        Section(name="strategies", title=STRATEGIES_TITLE, body=NOT_YET),
        Section(name="stored", title=STORED_TITLE, body=NOT_YET),
    ]
    if strategies:
        found[0] = _strategies(lookup, strategies)
    if stored:
        found[1] = _stored(lookup, stored)
    return found


def _stored(lookup: Lookup, cases: Sequence[tuple[str, dict[str, Any]]]) -> Section:
    cells = Cells()
    lines = []
    for key, case in cases:
        values = [lookup.row(key, name, "forward", "saved_for_backward") for name in lookup.implementations]
        names = [*_names(case)[:2], plain(case.get("blocks", "")), str(case.get("checkpointing", ""))]
        lines.append([*names, *(cells.text(value) for value in values)])
    columns = (f"{name} (MiB)" for name in lookup.implementations)
    header = ["model", "context", "blocks", "blocks per group", *columns]
    return section("stored", STORED_TITLE, header, lines, 4, cells)


def _strategies(lookup: Lookup, cases: Sequence[tuple[str, dict[str, Any]]]) -> Section:
    cells = Cells()
    lines = []
    for key, case in cases:
        for implementation in lookup.implementations:
            if lookup.cell(key, implementation, "train_step"):
                found = [
                    lookup.row(key, implementation, "train_step", name) for name in ("peak_memory", "added_memory")
                ]
                time = lookup.row(key, implementation, "train_step", "time")
                names = [*_names(case)[:2], str(case.get("attention", "")), str(case.get("checkpointing", ""))]
                peak = median(found[0]) / 1024
                gib = number(peak) if peak == peak else cells.text(found[0])
                step = "" if implementation == "simulated" else cells.time(time)
                lines.append([*names, implementation, gib, cells.text(found[1]), step])
    header = ["model", "context", "attention", "blocks per group", "implementation", "peak of a step (GiB)"]
    header += ["added by forward and backward (MiB)", f"{MODE_TITLES['train_step']} (ms)"]
    return section("strategies", STRATEGIES_TITLE, header, lines, 5, cells)


MEMORY_TABLES: dict[str, Callable[[pd.DataFrame], list[Section]]] = {
    "mixed_precision_accumulation": accumulation,
    "benchmarking_mixed_precision": mixed_precision,
    "memory_profiling": memory_profiling,
    "gradient_checkpointing": gradient_checkpointing,
}
MEMORY_CASE_TYPES = {
    "mixed_precision_accumulation": ("AccumulationCase",),
    "benchmarking_mixed_precision": ("AutocastCase", "NormCase", "ModelCase"),
    "memory_profiling": ("MemoryCase", "BlocksCase"),
    "gradient_checkpointing": ("MemoryCase", "BlocksCase"),
}
