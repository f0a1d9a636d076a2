"""Table and sentences of `few_queries`: what splitting the keys brings, and how far the libraries are."""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems.report.comparisons import ratio_cell
from cs336_systems.report.frames import labels, tuples
from cs336_systems.report.markdown import ABSENT, Cells, factor, plain
from cs336_systems.report.sections import Section, constants, section, speed_up
from cs336_systems.report.shapes import fastest_sdpa, heads_in_words

PROBLEM = "few_queries"
WHOLE, SPLIT = "triton_whole", "triton"
MS_PER_US = 1e-3


def tables(frame: pd.DataFrame) -> list[Section]:
    """Shapes down, µs of each implementation across; the number of parts, and what splitting brings."""
    found = []
    for dtype, rows in frame.groupby("dtype", sort=False):
        rows = rows.assign(microseconds=rows["median"] / MS_PER_US)
        across = labels(rows)
        cells = Cells()
        lines = []
        for shape, timed in _by_shape(rows).items():
            split, best = _named(timed, SPLIT), fastest_sdpa(timed.values())
            written = [cells.text(timed.get(label), "microseconds") for label in across]
            parts, whole = _parts(split), _named(timed, WHOLE)
            gain = ABSENT if parts == "1" else ratio_cell(speed_up(whole, split), whole, split)  # of 1: the same launch
            lines.append([shape, parts, *written, gain, ratio_cell(speed_up(best, split), best, split)])
        header = ["batch × heads × queries × keys × d", "parts", *across, "split over whole", "triton over SDPA"]
        cells.remark("parts: into which triton splits the keys")
        cells.remark("triton over SDPA: over the fastest of SDPA's kernels there")
        where = " in a replayed CUDA graph" if (rows["quantity"] == "graph_time").any() else ""
        title = f"Forward (µs){where}, {constants(rows)}"
        found.append(section(str(dtype), title, header, lines, 2, cells))
    return found


def answers(frame: pd.DataFrame) -> list[str]:
    """What splitting brings where it is done, and how triton compares with the fastest of SDPA's kernels."""
    said = []
    for dtype, rows in frame.groupby("dtype", sort=False):
        shapes = _by_shape(rows)
        gains = {shape: speed_up(_named(timed, WHOLE), _named(timed, SPLIT)) for shape, timed in shapes.items()}
        kept = {shape: _parts(_named(timed, SPLIT)) in ("1", ABSENT) for shape, timed in shapes.items()}
        split = {shape: gain for shape, gain in gains.items() if not kept[shape]}
        if found := _range(split):
            said.append(
                f"In {dtype}, triton splits the keys of {len(split)} of {len(shapes)} shapes, where it has {found} the "
                "speed of the same tiles with whole keys."
            )
        fastest = {shape: fastest_sdpa(timed.values()) for shape, timed in shapes.items()}
        rivals = {shape: speed_up(fastest[shape], _named(timed, SPLIT)) for shape, timed in shapes.items()}
        if found := _range(rivals):
            ahead = sum(ratio >= 1 for ratio in rivals.values())
            said.append(
                f"In {dtype}, triton has {found} the speed of the fastest of SDPA's kernels; it is ahead on {ahead} of "
                f"{len(shapes)} shapes."
            )
    return said


def _range(ratios: dict[str, float]) -> str:
    """The least and the largest of `ratios` with their shapes; empty without any."""
    ratios = {shape: ratio for shape, ratio in ratios.items() if ratio == ratio}
    if not ratios:
        return ""
    low, high = (choose(ratios, key=lambda shape: ratios[shape]) for choose in (min, max))
    return f"{factor(ratios[low])} ({low}) to {factor(ratios[high])} ({high})"


def _by_shape(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """{shape in words: {label: row}}, those with as many queries as keys first."""
    rows = rows.assign(fewer=rows["seqlen"] < rows["seqlen_k"])
    rows = rows.sort_values(["fewer", "head_dim", "heads", "seqlen", "seqlen_k", "batch"], kind="stable")
    found: dict[str, dict[str, Any]] = {}
    for row in tuples(rows):
        found.setdefault(_words(row), {})[row.label] = row
    return found


def _words(row: Any) -> str:
    lengths = (plain(value) for value in (row.seqlen, row.seqlen_k, row.head_dim))
    sizes = " × ".join((plain(row.batch), heads_in_words(row), *lengths))
    return f"{sizes} {'causal' if row.causal else 'full'}"


def _named(timed: dict[str, Any], name: str) -> Any:
    """The row of an implementation, interpreted or not."""
    return next((row for row in timed.values() if row.implementation == name), None)


def _parts(row: Any) -> str:
    """How many parts the kernel's name says: sm90_forward_64x64_w4_s3_tma/4."""
    if row is None or row.status != "ok":
        return ABSENT
    return row.kernel.partition("/")[2] or "1"


FEW_QUERIES_CASES = {PROBLEM: ("AttentionShape",)}
FEW_QUERIES_TABLES = {PROBLEM: tables}
FEW_QUERIES_ANSWERS = {PROBLEM: answers}
