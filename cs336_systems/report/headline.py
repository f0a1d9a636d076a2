"""The README's table of steps on several GPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from cs336_systems.report import distributed, sharding
from cs336_systems.report.comparisons import OTHER_RUN, OTHER_RUN_REMARK, ratio_cell, same_run
from cs336_systems.report.frames import NOT_MEASURED, tuples
from cs336_systems.report.markdown import Cells, plain, provenance, table
from cs336_systems.report.sections import speed_up

OVERLAP = "ddp_overlap_individual_parameters_benchmarking"
TORCH_ZERO, TORCH_FSDP = (sharding.OPTIMIZER_PEER,), (sharding.FSDP_PEER,)
PAIRS = {  # problem -> our wrapper, PyTorch's that do the same (the fastest counts), the quantity that is the peak
    OVERLAP: (("overlap", distributed.TORCH_DDP, "peak_memory"), ("bucketed", distributed.TORCH_DDP, "peak_memory")),
    sharding.OPTIMIZER_PROBLEM: (("sharded", TORCH_ZERO, "peak_memory"), ("zero1", TORCH_ZERO, "peak_memory")),
    sharding.FSDP_PROBLEM: (("fsdp", TORCH_FSDP, "peak_memory"),),
}
OUR_NAMES = {"overlap": "overlapped DDP", "bucketed": "bucketed DDP"} | sharding.NAMES
THEIR_NAMES = sharding.NAMES | distributed.NAMES
NO_STEPS = "*No training step on several GPUs was timed on this device beside PyTorch's.*"


def distributed_headline(frames: Mapping[str, pd.DataFrame]) -> str:
    """Our data-parallel and sharded training steps on GPUs beside PyTorch's of the same case, as Markdown.

    `frames` hold a frame for each problem. A case of which either has no record is left out; one that failed says so.
    """
    cells = Cells()
    shown: list[pd.DataFrame] = []
    lines = [
        line for problem in PAIRS if problem in frames for line in _step_lines(problem, frames[problem], cells, shown)
    ]
    if not lines:
        return NO_STEPS
    head = "A training step on several GPUs; medians, quartiles in brackets; peak memory of a rank."
    header = ["ours", "model", "ranks", "precision", "step (ms)", "peak (MiB)", "PyTorch's", "its step (ms)"]
    header += ["its peak (MiB)", "speed against PyTorch's"]
    if any(line[-1] == OTHER_RUN for line in lines):
        cells.remark(OTHER_RUN_REMARK)
    legend = cells.legend()
    parts = [head, table(header, lines, 4), *([legend] if legend else []), provenance(pd.concat(shown))]
    return "\n\n".join(parts)


def _step_lines(
    problem: str, frame: pd.DataFrame, cells: Cells, shown: list[pd.DataFrame]
) -> list[list[str]]:  # fmt: skip
    """A line for each case and pair of which both sides have a record; their times are added to `shown`."""
    frame = sharding.with_cases(frame[frame["mode"] == "train_step"])
    frame = frame[[json.loads(case).get("backend") == "nccl" for case in frame["case"]]]
    frame = frame.assign(setting=[_without_buckets(case) for case in frame["case"]])
    lines = []
    for _, rows in frame.groupby("setting", sort=False):
        for name, peers, peak in PAIRS[problem]:
            ours = _fastest(rows, (name,))
            theirs = _fastest(rows, peers, ours)
            if ours is None or theirs is None:
                continue
            shown += [_rows_of_cell(rows, ours, "time"), _rows_of_cell(rows, theirs, "time")]
            lines.append(
                [
                    OUR_NAMES[name],
                    plain(ours.model),
                    plain(ours.ranks),
                    ours.compute + ("" if ours.reduce == "as computed" else f", gradients averaged in {ours.reduce}"),
                    cells.time(ours),
                    cells.text(_same_cell(rows, ours, peak)),
                    THEIR_NAMES[theirs.implementation],
                    cells.time(theirs),
                    cells.text(_same_cell(rows, theirs, peak)),
                    ratio_cell(speed_up(theirs, ours), ours, theirs),
                ]
            )
    return lines


def _without_buckets(case: str) -> str:
    """`case` but for the bucket size, which wrappers without buckets do not have."""
    return json.dumps({name: value for name, value in json.loads(case).items() if name != "bucket_size_mb"})


def _fastest(rows: pd.DataFrame, implementations: tuple[str, ...], beside: Any = None) -> Any:
    """The time of the fastest of `implementations`, or of one that failed where none ran; None without a record.

    Those of the run that `beside` is of go first.
    """
    found = tuples(rows[(rows["quantity"] == "time") & rows["implementation"].isin(implementations)])
    found = [row for row in found if row.status != NOT_MEASURED]
    if beside is not None:
        found = [row for row in found if row.status == "ok" and same_run(row, beside)] or found
    return min(found, key=lambda row: row.median if row.status == "ok" else math.inf, default=None)


def _same_cell(rows: pd.DataFrame, timed: Any, quantity: str) -> Any:
    """The row of `quantity` of the cell that `timed` is of, if there is one."""
    found = tuples(_rows_of_cell(rows, timed, quantity))
    return found[0] if found else None


def _rows_of_cell(rows: pd.DataFrame, timed: Any, quantity: str) -> pd.DataFrame:
    same = (rows["implementation"] == timed.implementation) & (rows["case"] == timed.case)
    return rows[same & (rows["quantity"] == quantity)]
