"""Scaling efficiency of training steps: what of N GPUs' work is left after their communication.

Weak scaling: every rank has as many sequences however many ranks there are, so that N ranks without communication
would take the time of one. The efficiency is that time over the measured one. Times of two runs are not divided.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems.report.comparisons import OTHER_RUN, OTHER_RUN_REMARK, same_run
from cs336_systems.report.frames import tuples
from cs336_systems.report.markdown import ABSENT, Cells, number, plain
from cs336_systems.report.sections import Section, groups, key_cells, key_heading, section


def efficiency_section(rows: pd.DataFrame, keys: list[str], baseline: str) -> list[Section]:
    """A line an implementation of each case, a column a number of ranks; nothing without a step on one rank.

    `rows` are step times with the columns `ranks` and `shown`; `keys` name what cases differ in beside them. One rank's
    time is the implementation's own where there is one, else that of `baseline`.
    """
    counts = sorted({int(count) for count in rows["ranks"] if count > 1})
    cells, lines = Cells(), []
    for case in groups(rows, keys) if keys else [rows]:
        for of_one in groups(case[case["ranks"] > 1], ["shown"]):
            alone = one_rank(case, tuples(of_one)[0].implementation, baseline)
            if alone is None:
                continue
            by_count = {row.ranks: row for row in tuples(of_one.drop_duplicates("ranks"))}
            line = [*key_cells(alone, keys), tuples(of_one)[0].shown, alone.shown, cells.time(alone)]
            lines.append([*line, *(_cell(alone, by_count.get(count)) for count in counts)])
    if not lines:
        return []
    cells.remark("efficiency: one rank's step over that of N ranks, each rank with as many sequences")
    if any(OTHER_RUN in line for line in lines):
        cells.remark(OTHER_RUN_REMARK.replace("its peer's", "one rank's"))
    header = [*map(key_heading, keys), "implementation", "one rank", "its step (ms)"]
    header += [f"efficiency at {plain(count)} (%)" for count in counts]
    return [section("efficiency", "Scaling efficiency of a training step", header, lines, len(keys) + 2, cells)]


def efficiency_answer(rows: pd.DataFrame, keys: list[str], baseline: str) -> list[str]:
    """A sentence for each case and number of ranks that was measured in one run with one rank's step."""
    said = []
    for case in groups(rows, keys) if keys else [rows]:
        for of_count in groups(case[(case["ranks"] > 1) & (case["status"] == "ok")], ["ranks"]):
            parts = []
            for row in tuples(of_count.drop_duplicates("shown")):
                alone = one_rank(case, row.implementation, baseline)
                if alone is not None and same_run(alone, row):
                    parts.append(f"{row.shown} {number(efficiency(alone, row), 3)} %")
            if parts:
                first = tuples(of_count)[0]
                where = ", ".join([*key_cells(first, keys), f"{plain(first.ranks)} ranks"])
                said.append(f"{where}: scaling efficiency {', '.join(parts)}.")
    return said


def one_rank(case: pd.DataFrame, implementation: str, baseline: str) -> Any:
    """The measured step of `implementation` on one rank, else of `baseline`, else None."""
    alone = case[(case["ranks"] == 1) & (case["status"] == "ok") & (case["median"] > 0)]
    for name in (implementation, baseline):
        found = tuples(alone[alone["implementation"] == name])
        if found:
            return found[0]
    return None


def efficiency(alone: Any, row: Any) -> float:
    """Percent of the ranks' work that is left: 100 where a step of N ranks takes as long as that of one."""
    return 100 * float(alone.median) / float(row.median)


def _cell(alone: Any, row: Any) -> str:
    if row is None or row.status != "ok" or not row.median > 0:
        return ABSENT
    return number(efficiency(alone, row), 3) if same_run(alone, row) else OTHER_RUN
