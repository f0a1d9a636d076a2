"""Tables, figures and answers of section 5: collectives, and the data-parallel wrappers.

The columns that only distributed cases have (ranks, backend, bytes, bucket size) are read from each row's case here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch

from cs336_systems.config import BYTES_PER_ELEMENT, ModelConfig
from cs336_systems.device import Peak, peak_by_name
from cs336_systems.distributed.bandwidth import algorithm_gb_per_s, best_bucket_bytes, bus_factor, bus_gb_per_s
from cs336_systems.distributed.ddp_bucketed import BYTES_PER_MB, aligned_size, plan_buckets
from cs336_systems.model import TransformerLM
from cs336_systems.records import INTERVALS
from cs336_systems.report.comparisons import (
    OTHER_RUN,
    OTHER_RUN_REMARK,
    hatched,
    ratio_cell,
    run_cell,
    run_key,
    run_names,
    runs,
    same_run,
)
from cs336_systems.report.efficiency import efficiency_answer, efficiency_section
from cs336_systems.report.frames import select, tuples, variants
from cs336_systems.report.markdown import ABSENT, Cells, factor, number, plain
from cs336_systems.report.points import POINT, Plot, points
from cs336_systems.report.sections import Section, groups, section

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
ORDER = ("naive", "flat", "overlap", "bucketed", "torch_ddp", "torch_ddp_view")
TORCH_DDP = ("torch_ddp", "torch_ddp_view")
NAMES = {"torch_ddp": "torch DDP", "torch_ddp_view": "torch DDP, gradients as views"}
BACKENDS = {"nccl": "NCCL", "gloo": "Gloo"}
LANES = ("communication", "compute")  # of a timeline, from below
INTERVAL_LANES = {lane + INTERVALS: lane for lane in LANES}  # by quantity
KEY_HEADINGS = {"ranks": "ranks", "precision": "precision", "bucket_mb": "bucket (MiB)", "shown": "implementation"}


def with_cases(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with ranks, backend, operation, megabytes, bytes, bucket_mb and the implementation's shown name."""
    cases = [json.loads(case) for case in frame["case"]]
    frame = frame.assign(
        ranks=[int(case.get("num_ranks") or 0) for case in cases],
        backend=[str(case.get("backend") or "") for case in cases],
        operation=[str(case.get("operation") or "") for case in cases],
        bytes=[int(case.get("num_bytes") or 0) for case in cases],
        bucket_mb=[float(case.get("bucket_size_mb") or "nan") for case in cases],
        shown=[NAMES.get(str(name), str(name)) for name in frame["label"]],
    )
    frame["megabytes"] = frame["bytes"] / 1e6
    frame["_place"] = [ORDER.index(name) if name in ORDER else len(ORDER) for name in frame["implementation"]]
    frame["_operation"] = [OPERATIONS.index(name) if name in OPERATIONS else 0 for name in frame["operation"]]
    keys = ["model", "precision", "ranks", "backend", "_operation", "_place", "bucket_mb", "bytes", "quantity", "case"]
    return frame.sort_values(keys, kind="stable", ignore_index=True)


# Collectives


def communication_table(frame: pd.DataFrame) -> list[Section]:
    """For each backend: time and bandwidths by operation, ranks and size."""
    frame = with_cases(frame)
    found = []
    for backend, rows in frame.groupby("backend", sort=True):
        peak = link_peak(rows) if backend == "nccl" else None
        cells, named = Cells(), run_names(rows)
        lines = []
        for row in tuples(rows.sort_values(["_operation", "ranks", "bytes"], kind="stable")):
            line = [row.operation.replace("_", "-"), plain(row.ranks), plain(row.megabytes), cells.time(row)]
            line += [number(value, 3) for value in bandwidths(row)] if row.status == "ok" else [ABSENT, ABSENT]
            if peak is not None:
                line.append(f"{number(100 * bandwidths(row)[1] / peak, 2)} %" if row.status == "ok" else ABSENT)
            lines.append([*line, *([run_cell([row], named)] if len(named) > 1 else [])])
        header = ["collective", "ranks", "size (MB)", "time (ms)", "algorithm (GB/s)", "bus (GB/s)"]
        header += ["bus / link peak"] if peak is not None else []
        header += ["commit"] if len(named) > 1 else []
        if peak is not None:
            cells.remark(f"link peak: {plain(peak)} GB/s each way ({link_source(rows)})")
        cells.remark("time: of the rank that took longest; MB = 10⁶ bytes, GB/s = 10⁹ bytes/s")
        where = "GPU memory" if backend == "nccl" else "host memory"
        found.append(
            section(str(backend), f"{BACKENDS.get(str(backend), backend)}, float32 in {where}", header, lines, 3, cells)
        )
    return found


def bandwidths(row: Any) -> tuple[float, float]:
    """Algorithm and bus bandwidth of a timed collective in GB/s, NaN of a clock that saw nothing."""
    if not row.median > 0:
        return float("nan"), float("nan")
    return algorithm_gb_per_s(row.bytes, row.median), bus_gb_per_s(row.operation, row.ranks, row.bytes, row.median)


def link_peak(frame: pd.DataFrame) -> float | None:
    """GB/s each way between the GPUs of the frame's device; None where it is not known."""
    peak = peak_of(frame)
    return None if peak is None else peak.link_gb_per_s


def link_source(frame: pd.DataFrame) -> str:
    peak = peak_of(frame)
    return "" if peak is None else peak.source


def peak_of(frame: pd.DataFrame) -> Peak | None:
    """The peak of the frame's device; None where none is known."""
    return peak_by_name(str(frame["device"].iloc[0]))


def communication_plots(frame: pd.DataFrame) -> list[Plot]:
    """Bus bandwidth against size: a panel for each collective, a line for each backend and number of ranks."""
    frame = with_cases(frame)
    frame = frame.sort_values(["_operation", "backend", "ranks", "bytes"], kind="stable", ignore_index=True)
    frame["line"] = [f"{row.backend}, {row.ranks} ranks" for row in tuples(frame)]
    frame["_title"] = [name.replace("_", "-") for name in frame["operation"]]
    marks = points(frame, panel=[], series="line", style="line", x="megabytes")
    marks["panel"] = list(frame["_title"])
    factors = pd.Series(
        [row.bytes * bus_factor(row.operation, row.ranks) / 1e6 if row.ranks else 0.0 for row in tuples(frame)]
    )
    # bytes / ms / 10⁶ is GB/s; a rate is inverse to its time, and so are its quartiles.
    marks["y"], marks["low"], marks["high"] = (
        list(factors / frame[name].where(frame[name] > 0)) for name in ("median", "quartile_high", "quartile_low")
    )
    marks["drawn"] &= marks["y"].notna()  # a clock that saw nothing gives no rate
    peak = link_peak(frame)
    notes = (f"Link peak: {plain(peak)} GB/s each way ({link_source(frame)}).",) if peak is not None else ()
    return [
        Plot(
            name="bandwidth",
            title=f"Bus bandwidth of collectives on {frame['device'].iloc[0]}",
            kind="lines",
            data=marks,
            x_label="size of the tensor (MB)",
            y_label="bus bandwidth (GB/s)",
            notes=notes,
        )
    ]


def communication_answer(frame: pd.DataFrame) -> list[str]:
    """For each backend and number of ranks the all-reduce of the smallest and the largest size."""
    rows = with_cases(frame)
    rows = rows[(rows["status"] == "ok") & (rows["operation"] == "all_reduce")]
    said = []
    for (backend, ranks), group in rows.groupby(["backend", "ranks"]):
        first, *_, last = [*tuples(group.sort_values("bytes"))] * 2 if len(group) == 1 else tuples(group)
        text = f"{backend}, {plain(ranks)} ranks: an all-reduce of {plain(first.megabytes)} MB takes "
        text += f"{number(first.median, 3)} ms, a bus bandwidth of {number(bandwidths(first)[1], 3)} GB/s"
        if last.bytes > first.bytes:
            text += (
                f"; of {plain(last.megabytes)} MB {number(last.median, 3)} ms, {number(bandwidths(last)[1], 3)} GB/s"
            )
            peak = link_peak(rows) if backend == "nccl" else None
            text += f", {number(100 * bandwidths(last)[1] / peak, 2)} % of the link's peak" if peak else ""
        said.append(text + ".")
    return said


# Data-parallel steps


def steps(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a cell: its step time, with the traced milliseconds and the peak memory as columns (NaN if missing)."""
    rows = with_cases(select(frame, "time", "train_step"))
    for quantity in ("traced_time", "communication_time", "compute_time", "overlap_time", "peak_memory"):
        measured = frame[(frame["quantity"] == quantity) & (frame["status"] == "ok")]
        by_cell = {(row.implementation, row.case): row.median for row in tuples(measured)}
        rows[quantity] = [by_cell.get((row.implementation, row.case), float("nan")) for row in tuples(rows)]
    return rows


def ddp_table(frame: pd.DataFrame) -> list[Section]:
    """One line a cell: step, against PyTorch's DDP, communication, how much of it is hidden, memory."""
    rows = steps(frame)
    keys = variants(rows, ("model", "precision", "ranks", "batch")) + ["shown"] + variants(rows, ("bucket_mb",))
    has_peer = rows["implementation"].isin(TORCH_DDP).any()
    has_memory = rows["peak_memory"].notna().any()
    cells, named = Cells(), run_names(rows)
    lines = []
    for row in tuples(rows):
        line = [plain(getattr(row, key)) for key in keys] + [cells.time(row)]
        if has_peer:
            line.append(against_peer(rows, row))
        line += [number(row.communication_time, 3), number(percent(row.communication_time, row.traced_time), 3)]
        line += [number(percent(row.overlap_time, row.communication_time), 3)]
        line += [number(row.communication_time - row.overlap_time, 3)]
        line += [number(row.peak_memory)] if has_memory else []
        line += [run_cell([row], named)] if len(named) > 1 else []
        lines.append(line)
    header = [KEY_HEADINGS.get(key, key) for key in keys] + ["step (ms)"]
    header += ["time / torch DDP's"] if has_peer else []
    header += ["communication (ms)", "of the traced step (%)", "hidden behind compute (%)", "not hidden (ms)"]
    header += ["peak memory (MiB)"] if has_memory else []
    header += ["commit"] if len(named) > 1 else []
    if has_peer:
        cells.remark("time / torch DDP's: of the faster of PyTorch's in the same case")
    if any(OTHER_RUN in line for line in lines):
        cells.remark(OTHER_RUN_REMARK)
    first = tuples(rows)[0]
    fixed = [f"{first.model}" if "model" not in keys else "", f"context {plain(first.context)}"]
    fixed += [f"{plain(first.batch)} sequences a rank" if "batch" not in keys else ""]
    fixed += [first.precision if "precision" not in keys else "", "" if "ranks" in keys else f"{first.ranks} ranks"]
    title = "A training step, " + ", ".join(part for part in fixed if part)
    efficiencies = efficiency_section(rows, _scaled(rows), "naive")
    return [section("steps", title, header, lines, len(keys), cells), *efficiencies]


def _scaled(rows: pd.DataFrame) -> list[str]:
    """What steps differ in beside their ranks and their implementation, whose buckets are its own affair."""
    return variants(rows, ("model", "precision", "batch"))


def against_peer(rows: pd.DataFrame, row: Any) -> str:
    """Time of `row` over that of the faster of PyTorch's wrappers on the same model, precision and ranks, as a cell."""
    same = rows[(rows["status"] == "ok") & rows["implementation"].isin(TORCH_DDP)]
    for key in ("model", "precision", "ranks", "batch", "context"):
        same = same[same[key] == getattr(row, key)]
    if len(variants(rows, ("bucket_mb",))) and row.bucket_mb == row.bucket_mb:
        sized = same[same["bucket_mb"] == row.bucket_mb]
        same = sized if len(sized) else same
    if row.status != "ok" or same.empty:
        return ABSENT
    peers = sorted(tuples(same), key=lambda peer: (not same_run(peer, row), peer.median))
    return ratio_cell(row.median / peers[0].median, row, peers[0])


def ddp_plots(frame: pd.DataFrame) -> list[Plot]:
    """Step times as bars, and the lanes of the traced steps at the number of ranks of which most are recorded."""
    rows = steps(frame)
    first, panel, x = tuples(rows)[0], variants(rows, ("precision",)), [ranks_of(row) for row in tuples(rows)]
    by_bucket = rows["bucket_mb"].nunique() > 1
    if by_bucket:
        panel, rows = variants(rows, ("precision", "ranks")), rows.sort_values("bucket_mb", kind="stable")
        x = [plain(row.bucket_mb) if row.bucket_mb == row.bucket_mb else "none" for row in tuples(rows)]
    marks, named = hatched(points(rows.assign(_x=x), panel=panel, series="shown", style="shown", x="_x"), rows)
    found = [
        Plot(
            name="steps",
            title=f"Time of a data-parallel step on {frame['device'].iloc[0]}\n{_model(first)}",
            kind="bars",
            data=marks,
            x_label="largest bucket (MiB)" if by_bucket else "",
            y_label="time of a step (ms)",
            log_y=False,
            notes=bar_notes(named),
            runs=named,
        )
    ]
    for precision, group in rows.groupby("precision", sort=True):
        drawn = {ranks: timeline_points(frame, group[group["ranks"] == ranks]) for ranks in sorted(set(group["ranks"]))}
        ranks = max(drawn, key=lambda ranks: (drawn[ranks]["panel"].nunique(), ranks))
        if len(data := drawn[ranks]):
            name = str(precision).replace(" ", "_")
            found.append(
                Plot(
                    name=f"timeline_{name}",
                    title=f"One traced step of rank 0 on {frame['device'].iloc[0]}\n"
                    f"{_model(first)}, {precision}, {ranks} ranks",
                    kind="timeline",
                    data=data,
                    x_label="time (ms)",
                    y_label="",
                    log_y=False,
                )
            )
    return found


def bar_notes(named: tuple[str, ...]) -> tuple[str, ...]:
    """What the bars of steps are, and that hatched ones are of other runs if some are (`named`)."""
    notes = ("Bars: median; whiskers: quartiles.",)
    return (*notes, f"Plain: commit {named[0]}; times of different runs do not compare.") if named else notes


def timeline_points(frame: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """A mark an interval: low and high are its ends, y is its lane, the panel its implementation.

    A step of several ranks of which one lane is not recorded has no marks: half of it would look like no overlap.
    """
    marks = []
    named = run_names(rows)
    for row in tuples(rows):
        bucket = f", {plain(row.bucket_mb)} MiB" if rows["bucket_mb"].nunique() > 1 and row.bucket_mb > 0 else ""
        cell = frame[(frame["implementation"] == row.implementation) & (frame["case"] == row.case)]
        cell = cell[cell["quantity"].isin(INTERVAL_LANES) & (cell["status"] == "ok")]
        if row.ranks > 1 and len(cell) < len(LANES):
            continue
        for quantity in INTERVAL_LANES:
            for found in tuples(cell[cell["quantity"] == quantity]):
                of_run = f", commit {named[run_key(row)]}" if len(named) > 1 and row.status == "ok" else ""
                marks += interval_marks(row.shown + bucket + of_run, found)
    return pd.DataFrame(marks, columns=list(POINT))


def interval_marks(panel: str, row: Any) -> list[dict[str, Any]]:
    """A mark for each interval of `row`, whose quantity names its lane."""
    lane = INTERVAL_LANES[row.quantity]
    return [
        dict(zip(POINT, (panel, lane, lane, start, float(LANES.index(lane)), start, end, "ok", "", True)))
        for start, end in zip(row.values[::2], row.values[1::2])
    ]


def ddp_answer(frame: pd.DataFrame) -> list[str]:
    """For each configuration the share of communication and what is hidden; the factors between implementations."""
    rows = steps(frame)
    said = []
    for row in tuples(rows[rows["status"] == "ok"]):
        text = f"{row.shown}{_bucket(row)}, {row.precision}, {ranks_of(row)}: a step takes {number(row.median)} ms"
        if row.ranks > 1 and row.communication_time == row.communication_time:
            share = percent(row.communication_time, row.traced_time)
            text += (
                f"; in the traced one {number(row.communication_time, 3)} ms ({number(share, 3)} %) are communication"
            )
            if row.communication_time > 0:
                text += f", {number(percent(row.overlap_time, row.communication_time), 3)} % of it beside compute"
        said.append(text + ".")
    for group in groups(rows[rows["status"] == "ok"], ["precision", "ranks"]):
        by_name = {row.implementation: row for row in tuples(group.drop_duplicates("implementation"))}
        for fast, slow in (("flat", "naive"), ("overlap", "naive"), ("overlap", "flat")):
            if fast in by_name and slow in by_name:
                ratio = by_name[slow].median / by_name[fast].median
                where = f"{by_name[fast].precision}, {ranks_of(by_name[fast])}"
                if same_run(by_name[fast], by_name[slow]):
                    said.append(f"{fast} has {factor(ratio)} the speed of {slow} ({where}).")
                else:
                    said.append(f"{fast} and {slow} are of two runs and not compared ({where}).")
    return [*said, *efficiency_answer(rows, _scaled(rows), "naive")]


def bucketed_answer(frame: pd.DataFrame) -> list[str]:
    """The answers of a step, then the model of the overhead with bandwidth and cost of a call from these records.

    The model is left out where a number of buckets between those of the ends communicates longer than both; sizes that
    make the very buckets of an end differ from it by noise.
    """
    rows = steps(frame)
    ours = rows[(rows["status"] == "ok") & (rows["implementation"] == "bucketed") & (rows["communication_time"] > 0)]
    said = [*ddp_answer(frame), *_best_buckets(rows), *_bucket_plans(ours)]
    for group in groups(ours, ["precision", "ranks"]):
        newest = runs(group)[0]  # a call's cost is a difference of times
        ordered = [row for row in tuples(group.sort_values("bucket_mb")) if run_key(row) == newest]
        small, large = ordered[0], ordered[-1]
        calls = [num_buckets(row) for row in (small, large)]
        extra_ms = small.communication_time - large.communication_time
        if calls[0] <= calls[1] or extra_ms <= 0:
            continue  # the cost of a call is within the noise
        between = [row for row in ordered[1:-1] if calls[0] > num_buckets(row) > calls[1]]
        if any(row.communication_time > small.communication_time for row in between):
            continue  # the model has no such hill
        per_call_s = extra_ms * 1e-3 / (calls[0] - calls[1])
        total = gradient_bytes(small)
        sending_s = large.communication_time * 1e-3 - calls[1] * per_call_s
        if sending_s > 0:
            best = best_bucket_bytes(total, total / sending_s, per_call_s)
            said.append(
                f"{small.precision}, {ranks_of(small)}: {calls[0]} buckets of at most {plain(small.bucket_mb)} MiB "
                f"communicate {number(extra_ms, 3)} ms longer than {calls[1]} of at most {plain(large.bucket_mb)} MiB, "
                f"so a call costs {number(per_call_s * 1e6, 3)} µs and the rest is sent at "
                f"{number(total / sending_s / 1e9, 3)} GB/s; the model's best bucket then has "
                f"{number(best / BYTES_PER_MB, 3)} MiB."
            )
    return said


def _best_buckets(rows: pd.DataFrame) -> list[str]:
    """Of each implementation the bucket sizes of its shortest and its longest step, if of one run."""
    said = []
    for group in groups(rows[rows["status"] == "ok"], ["precision", "ranks", "shown"]):
        ordered = sorted(tuples(group), key=lambda row: row.median)
        best, worst = ordered[0], ordered[-1]
        if len(ordered) < 2 or best.bucket_mb == worst.bucket_mb or len(runs(group)) > 1:
            continue
        said.append(
            f"{best.precision}, {ranks_of(best)}: the step of {best.shown} is shortest with buckets of "
            f"{plain(best.bucket_mb)} MiB ({number(best.median)} ms) and longest with {plain(worst.bucket_mb)} MiB "
            f"({number(worst.median)} ms, {factor(worst.median / best.median)} of it)."
        )
    return said


def _bucket_plans(ours: pd.DataFrame) -> list[str]:
    """How many buckets each size of `ours` makes, and what the last one sent holds."""
    said = []
    for group in groups(ours.drop_duplicates(["model", "bucket_mb"]), ["model"]):
        parts: list[str] = []
        for row in tuples(group.sort_values("bucket_mb")):
            parameters, plan = _plan(row)
            elements = sum(aligned_size(parameters[index]) for index in plan[-1])
            last = elements * BYTES_PER_ELEMENT[json.loads(row.case)["precision"]["parameters"]]
            size = f"{plain(row.bucket_mb)} MiB {'make ' if not parts else ''}{len(plan)}"
            above = ", one parameter larger than the limit" if last > row.bucket_mb * BYTES_PER_MB else ""
            held = f"the last sent has {number(last / BYTES_PER_MB, 3)} MiB{above}"
            parts.append(f"{size}{' buckets' if not parts else ''} ({held})")
        said.append(f"{group['model'].iloc[0]}: at most {', '.join(parts)}.")
    return said


def num_buckets(row: Any) -> int:
    """Buckets that `BucketedDDP` makes of the row's model."""
    return len(_plan(row)[1])


def _plan(row: Any) -> tuple[list[torch.nn.Parameter], list[list[int]]]:
    """The parameters of the row's model, and which of them share a bucket."""
    parameters = list(_meta_model(row.case).parameters())
    return parameters, plan_buckets(parameters, row.bucket_mb * BYTES_PER_MB)


def gradient_bytes(row: Any) -> int:
    dtype = json.loads(row.case)["precision"]["parameters"]
    return sum(parameter.numel() for parameter in _meta_model(row.case).parameters()) * BYTES_PER_ELEMENT[dtype]


def _meta_model(case: str) -> TransformerLM:
    with torch.device("meta"):
        return TransformerLM.from_config(ModelConfig(**json.loads(case)["model"]))


def percent(part: float, whole: float) -> float:
    """NaN where there is no whole."""
    return 100 * part / whole if whole > 0 else float("nan")


def _model(row: Any) -> str:
    return f"{row.model}, context {plain(row.context)}, {plain(row.batch)} sequences a rank"


def _bucket(row: Any) -> str:
    return f", {plain(row.bucket_mb)} MiB" if row.bucket_mb == row.bucket_mb else ""


def ranks_of(row: Any) -> str:
    return f"{row.ranks} rank{'s' if row.ranks > 1 else ''}"


DDP_PROBLEMS = (
    "naive_ddp_benchmarking",
    "minimal_ddp_flat_benchmarking",
    "ddp_overlap_individual_parameters_benchmarking",
    "ddp_bucketed_benchmarking",
)
COMMUNICATION = "distributed_communication_single_node"
DISTRIBUTED_TABLES: dict[str, Callable[[pd.DataFrame], list[Section]]] = {
    COMMUNICATION: communication_table,
    **dict.fromkeys(DDP_PROBLEMS, ddp_table),
}
DISTRIBUTED_PLOTS: dict[str, Callable[[pd.DataFrame], list[Plot]]] = {
    COMMUNICATION: communication_plots,
    **dict.fromkeys(DDP_PROBLEMS, ddp_plots),
}
DISTRIBUTED_ANSWERS: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    COMMUNICATION: communication_answer,
    **dict.fromkeys(DDP_PROBLEMS, ddp_answer),
    "ddp_bucketed_benchmarking": bucketed_answer,
}
DISTRIBUTED_CASES = {COMMUNICATION: ("CollectiveCase",), **dict.fromkeys(DDP_PROBLEMS, ("DataParallelCase",))}
