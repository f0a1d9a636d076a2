"""The README's tables: attention beside the libraries' and beside plain attention, and steps on several GPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from cs336_systems.report import distributed, shapes, sharding
from cs336_systems.report.comparisons import OTHER_RUN, OTHER_RUN_REMARK, best_peer, ratio_cell, real, same_run
from cs336_systems.report.frames import BASELINE, NOT_MEASURED, OUR_KERNELS, OURS, labels, select, tuples
from cs336_systems.report.markdown import ABSENT, Cells, factor, number, plain, provenance, table
from cs336_systems.report.sections import constants, speed_up

LEADERBOARD, BENCHMARK = "leaderboard_2025", "flash_benchmarking"
SELECTED_LENGTHS = (16384, 65536)
SELECTED_HEAD_DIMS = (64, 128)
NO_SPEED = f"*No compiled {OURS} kernel was timed on this device.*"

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


def headline(frames: Mapping[str, pd.DataFrame]) -> str:
    """Forward + backward beside the libraries' on the shapes of models, then beside plain attention, as Markdown.

    `frames` hold a frame for each problem. Where no Triton kernel ran compiled, one sentence says so instead.
    """
    found = [_beside_libraries(frames[shapes.PROBLEM])] if shapes.PROBLEM in frames else []
    found.append(_beside_plain_attention(frames))
    return "\n\n".join(text for text in found if text) or NO_SPEED


def _beside_libraries(frame: pd.DataFrame) -> str:
    """TFLOP/s of each shape of `attention_shapes`, and our fastest over the fastest library; "" if nothing compiled."""
    rows = shapes.times(shapes.with_shapes(frame), "forward_backward")
    if not len(real(rows[rows["implementation"].isin(OUR_KERNELS)])):
        return ""
    across = labels(rows)
    cells = Cells()
    lines = []
    for shape, group in rows.groupby("shape", sort=False):
        by_name = {row.label: row for row in tuples(group)}
        ours = tuples(real(group[group["implementation"].isin(OUR_KERNELS)]).sort_values("median", kind="stable"))
        ratio = factor(speed_up(best_peer(group, ours[0]), ours[0])) if ours else ABSENT
        lines.append([str(shape), *(cells.text(by_name.get(name), "tflops") for name in across), ratio])
    header = ["batch × heads × S × d", *across, "ours over the fastest library"]
    head = f"Attention forward + backward in TFLOP/s, {constants(rows)}; medians. Ours are {' and '.join(OUR_KERNELS)}."
    legend = cells.legend()
    return "\n\n".join([head, table(header, lines), *([legend] if legend else []), provenance(frame)])


def _beside_plain_attention(frames: Mapping[str, pd.DataFrame]) -> str:
    """Ours, eager and the best peer on the leaderboard's shape and on long causal sequences of one head."""
    used = [frames[problem] for problem in (LEADERBOARD, BENCHMARK) if problem in frames]
    cases = [rows for frame in used for rows in _cases(frame)]
    cells = Cells()
    lines = [_line(rows, name, cells) for rows in cases for name in OUR_KERNELS if _row(rows, name) is not None]
    if not lines:
        return ""
    if any(OTHER_RUN in line for line in lines):
        cells.remark(OTHER_RUN_REMARK)
    header = ["batch × heads × S × d", "ours", "TFLOP/s", "time (ms)", f"{BASELINE} (ms)", "best peer (ms)"]
    header += ["best peer", f"speed against {BASELINE}", "against best peer"]
    head = "Beside plain attention: forward + backward, causal, bfloat16; medians, quartiles in brackets."
    legend = cells.legend()
    parts = [head, table(header, lines, 2), *([legend] if legend else []), provenance(pd.concat(cases))]
    return "\n\n".join(parts)


def _cases(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """Timed rows of each selected case: all of the leaderboard, some of the benchmark."""
    rows = select(frame, "time", "forward_backward")
    rows = rows[(rows["dtype"] == "bfloat16") & (rows["causal"] == True)]  # noqa: E712 (a column of objects)
    if frame["problem"].iloc[0] == BENCHMARK:
        rows = rows[rows["seqlen"].isin(SELECTED_LENGTHS) & rows["head_dim"].isin(SELECTED_HEAD_DIMS)]
    return [group for _, group in rows.groupby("case", sort=False)]


def _line(rows: pd.DataFrame, name: str, cells: Cells) -> list[str]:
    ours, eager = _row(rows, name), _row(rows, BASELINE)
    peer = best_peer(rows, ours)
    shape = " × ".join(plain(value) for value in (ours.batch, ours.heads, ours.seqlen, ours.head_dim))
    rate = number(ours.tflops, 3) if ours.status == "ok" else cells.text(ours)
    return [
        shape,
        name,
        rate,
        cells.time(ours),
        cells.time(eager),
        cells.time(peer),
        peer.label if peer is not None else "none ran",
        ratio_cell(speed_up(eager, ours), eager, ours),
        factor(speed_up(peer, ours)),
    ]


def _row(rows: pd.DataFrame, implementation: str) -> Any:
    """The row of `implementation`, if it has one that was not interpreted."""
    found = tuples(rows[(rows["implementation"] == implementation) & ~rows["interpreted"].astype(bool)])
    return found[0] if found else None


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
