"""Tables, figures and answers of sections 6 and 7: sharded optimizers and FSDP.

The columns that only these cases have (ranks, reduce dtype, checkpointing) are read from each row's case here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd

from cs336_systems.report.comparisons import RUN_REMARK, hatched, run_cell, run_key, run_names, same_run
from cs336_systems.report.distributed import INTERVAL_LANES, bar_notes, interval_marks, ranks_of
from cs336_systems.report.efficiency import efficiency_answer, efficiency_section
from cs336_systems.report.frames import select, sort_cells, tuples, variants
from cs336_systems.report.markdown import Cells, factor, number
from cs336_systems.report.points import POINT, Plot, points
from cs336_systems.report.sections import Measure, Section, key_cells, key_heading, section

PARTS = ("parameters", "gradients", "optimizer_state")
MOMENTS = ("memory_after_init", "memory_before_step", "memory_after_step")  # of the first step
PEAKS = (*MOMENTS, "peak_memory")  # the last also of later steps, which begin with the optimizer's state
OPTIMIZER_PEER, FSDP_PEER = "torch_zero", "torch_fsdp"
NAMES = {
    "unsharded": "DDP, nothing sharded",
    "sharded": "ShardedOptimizer",
    "zero1": "Zero1Optimizer",
    "torch_zero": "torch ZeroRedundancyOptimizer",
    "fsdp": "FSDP",
    "fsdp_layer": "FSDP, a unit a layer",
    "torch_fsdp": "torch fully_shard",
}
KEYS = ("model", "ranks", "compute", "reduce", "checkpointing")
AS_COMPUTED = "as computed"  # no dtype of its own for the gradients' average
PREDICTED = "predicted_peak_memory"
PART_TITLES = {"optimizer_state": "optimizer state"}


def with_cases(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with ranks, compute and reduce dtype, checkpointing and the implementation's shown name."""
    cases = [json.loads(case) for case in frame["case"]]
    order = list(NAMES)
    frame = frame.assign(
        ranks=[int(case.get("num_ranks") or 0) for case in cases],
        compute=[str((case.get("precision") or {}).get("autocast") or "float32") for case in cases],
        reduce=[str(case.get("reduce_dtype") or AS_COMPUTED) for case in cases],
        checkpointing=[str(case.get("checkpointing") or "none") for case in cases],
        shown=[NAMES.get(str(name), str(name)) for name in frame["label"]],
    )
    places = [order.index(name) if name in order else len(order) for name in frame["implementation"]]
    frame = sort_cells(frame.assign(_place=places))
    return frame.sort_values(["model", "ranks", "compute", "reduce", "_place"], kind="stable", ignore_index=True)


def keys_of(frame: pd.DataFrame) -> list[str]:
    return ["model", "ranks", "compute", *variants(frame, KEYS[3:]), "shown"]


def optimizer_tables(frame: pd.DataFrame) -> list[Section]:
    """Step time; memory at the handout's three moments; what a rank keeps."""
    frame = with_cases(frame)
    step: list[Measure] = [
        ("time", "train_step", "step (ms)"),
        ("communication_time", "train_step", "communication (ms)"),
    ]
    step += [("overlap_time", "train_step", "of it beside compute (ms)")]
    return [
        _measures("time", "Time of a training step", frame, step),
        *efficiency_section(*_scaled(frame), "unsharded"),
        _measures("memory", "Peak memory of a rank (MiB), up to", frame, _memory_measures(frame, PEAKS)),
        _measures("breakdown", "What a rank keeps between steps (MiB)", frame, _memory_measures(frame, PARTS)),
    ]


def fsdp_tables(frame: pd.DataFrame) -> list[Section]:
    """Step time and peaks; what a rank keeps; the forward's and the step's communication beside compute."""
    frame = with_cases(frame)
    step: list[Measure] = [("time", "train_step", "step (ms)")]
    step += _memory_measures(frame, ("peak_memory", "predicted_peak_memory"))
    found = [
        _measures("step", "Time and peak memory of a training step", frame, step),
        *efficiency_section(*_scaled(frame), "unsharded"),
        _measures("breakdown", "What a rank keeps between steps (MiB)", frame, _memory_measures(frame, PARTS)),
    ]
    for mode, title in (("forward", "forward pass"), ("train_step", "training step")):
        lanes: list[Measure] = [
            ("traced_time", mode, "traced (ms)"),
            ("compute_time", mode, "compute (ms)"),
            ("communication_time", mode, "communication (ms)"),
            ("overlap_time", mode, "of it beside compute (ms)"),
        ]
        found.append(_measures(f"overlap.{mode}", f"One traced {title} of rank 0", frame, lanes))
    return found


def _scaled(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Step times, and what they differ in beside their ranks and their implementation."""
    return select(frame, "time", "train_step"), ["model", "compute", *variants(frame, KEYS[3:])]


def _memory_measures(frame: pd.DataFrame, quantities: tuple[str, ...]) -> list[Measure]:
    """Those of `quantities` that were promised: the CPU has no peaks."""
    present = set(frame["quantity"])
    return [(name, "train_step", _title(name)) for name in quantities if name in present]


def _title(quantity: str) -> str:
    return PART_TITLES.get(quantity, quantity.replace("_memory", " memory").replace("_", " "))


def _measures(name: str, title: str, frame: pd.DataFrame, measures: list[Measure]) -> Section:
    """Cases down, measures across, under the shown names."""
    keys = keys_of(frame)
    columns = []
    for quantity, mode, heading in measures:
        rows = select(frame, quantity, mode)
        columns.append((heading, {(row.implementation, row.case): row for row in tuples(rows)}))
    cells, named = Cells(), run_names(frame)
    lines = []
    for row in tuples(frame.drop_duplicates(["implementation", "case"])):
        found = [by_cell.get((row.implementation, row.case)) for _, by_cell in columns]
        of_runs = [run_cell(found, named)] if len(named) > 1 else []
        lines.append([*key_cells(row, keys), *map(cells.time, found), *of_runs])
    if len(named) > 1:
        cells.remark(RUN_REMARK)
    header = ["implementation" if key == "shown" else key_heading(key) for key in keys]
    header += [*(heading for heading, _ in columns), *(["commit"] if len(named) > 1 else [])]
    return section(name, title, header, lines, len(keys), cells)


def optimizer_plots(frame: pd.DataFrame) -> list[Plot]:
    return [*_time_plot(frame, "sharded optimizers"), *_kept_plot(frame)]


def fsdp_plots(frame: pd.DataFrame) -> list[Plot]:
    found = _time_plot(frame, "FSDP")
    frame = with_cases(frame)
    peaks = frame[frame["quantity"].isin(("peak_memory", PREDICTED))]
    if (peaks["quantity"] == "peak_memory").any():
        # The closed form's is the same whatever is a unit: one bar a case.
        peaks = peaks[(peaks["quantity"] != PREDICTED) | ~peaks.duplicated(["case", "quantity", "status", "median"])]
        predicted = peaks["quantity"] == PREDICTED
        peaks = peaks.assign(
            shown=peaks["shown"].mask(predicted, peaks["shown"] + ", predicted"),
            style=peaks["label"].mask(predicted, PREDICTED),
        )
        found.append(_bars("memory", f"Peak memory of a rank on {_device(frame)}", peaks, frame, "peak memory (MiB)"))
    return [*found, *_kept_plot(frame), *_timelines(frame)]


def _timelines(frame: pd.DataFrame) -> list[Plot]:
    """For each case the traced forward pass of FSDP and of the peer: the gathers' lane over that of compute."""
    plots_found = []
    for _, rows in frame.groupby("case", sort=False):
        first = tuples(rows)[0]
        marks: list[dict[str, Any]] = []
        traced = rows["quantity"].isin(INTERVAL_LANES) & (rows["mode"] == "forward")
        named = run_names(rows[traced & rows["implementation"].isin(("fsdp", FSDP_PEER))])
        for row in tuples(rows[rows["quantity"].isin(INTERVAL_LANES)]):
            if row.mode == "forward" and row.status == "ok" and row.implementation in ("fsdp", FSDP_PEER):
                of_run = f", commit {named[run_key(row)]}" if len(named) > 1 else ""
                marks += interval_marks(row.shown + of_run, row)
        if marks and first.ranks > 1:  # one rank gathers nothing
            parts = (first.model, ranks_of(first), first.compute, first.reduce, first.checkpointing)
            plots_found.append(
                Plot(
                    name="timeline_" + "_".join(parts).replace(" ", "_"),
                    title=f"One traced forward pass of rank 0 on {_device(frame)}\n{', '.join(_words(first, KEYS))}",
                    kind="timeline",
                    data=pd.DataFrame(marks, columns=list(POINT)),
                    x_label="time (ms)",
                    y_label="",
                    log_y=False,
                )
            )
    return plots_found


def _time_plot(frame: pd.DataFrame, what: str) -> list[Plot]:
    frame = with_cases(frame)
    rows = select(frame, "time", "train_step")
    rows = rows.assign(style=rows["label"])
    return [_bars("time", f"Training step under {what} on {_device(frame)}", rows, frame, "time of a step (ms)")]


def _kept_plot(frame: pd.DataFrame) -> list[Plot]:
    """What a rank keeps, stacked: a panel a case, a bar an implementation."""
    frame = with_cases(frame)
    kept = frame[frame["quantity"].isin(PARTS)]
    data = points(kept, panel=[], series="quantity", style="quantity", x="shown")
    data["panel"] = [", ".join(_words(row, variants(frame, KEYS))) for row in tuples(kept)]
    data["series"] = [_title(name) for name in kept["quantity"]]
    order = [PARTS.index(name) for name in kept["quantity"]]
    data = data.assign(_order=order).sort_values("_order", kind="stable").drop(columns="_order")
    return [
        Plot(
            name="kept",
            title=f"What a rank keeps between steps on {_device(frame)}{_common(frame)}",
            kind="stacked",
            data=data,
            x_label="",
            y_label="memory (MiB)",
            log_y=False,
        )
    ]


def _words(row: Any, keys: list[str] | tuple[str, ...]) -> list[str]:
    """Those of `keys` that say something about the case of `row`, as one reads them."""
    words = {
        "model": row.model,
        "ranks": ranks_of(row),
        "compute": row.compute,
        "reduce": f"gradients in {row.reduce}" if row.reduce != AS_COMPUTED else "",
        "checkpointing": "checkpointed" if row.checkpointing != "none" else "",
    }
    return [words[key] for key in keys if words[key]]


def _common(frame: pd.DataFrame) -> str:
    """The second line of a title: model and ranks where all cases have the same."""
    words = _words(tuples(frame)[0], [key for key in ("model", "ranks") if key not in variants(frame, KEYS)])
    return f"\n{', '.join(words)}" if words else ""


def _bars(name: str, title: str, rows: pd.DataFrame, frame: pd.DataFrame, y_label: str) -> Plot:
    """A group of bars a case of `rows`, a bar an implementation, in its `style`; a panel for each number of ranks."""
    varying = [key for key in variants(frame, KEYS) if key != "ranks"] or ["model"]
    rows = rows.sort_values("ranks", kind="stable")
    lines = ["\n".join(_words(row, varying)) for row in tuples(rows)]
    rows = rows.assign(_x=[line.replace("gradients in", "gradients\nin") for line in lines])
    data = points(rows, panel=variants(frame, ("ranks",)), series="shown", style="style", x="_x")
    data, named = hatched(data, rows) if name == "time" else (data, ())
    return Plot(
        name=name,
        title=title + _common(frame),
        kind="bars",
        data=data,
        x_label="",
        y_label=y_label,
        log_y=False,
        notes=bar_notes(named) if name == "time" else (),
        runs=named,
    )


def _device(frame: pd.DataFrame) -> str:
    return str(frame["device"].iloc[0])


def optimizer_answers(frame: pd.DataFrame) -> list[str]:
    """Memory saved and what it costs, against nothing sharded and against PyTorch's."""
    said = []
    for where, cell in _cases(frame):
        unsharded, sharded = cell("unsharded", "optimizer_state"), cell("sharded", "optimizer_state")
        if unsharded and sharded:
            said.append(
                f"{where}: sharding cuts a rank's optimizer state from {number(unsharded)} to {number(sharded)} MiB "
                f"({factor(sharded / unsharded)}); parameters ({_mib(cell('sharded', 'parameters'))}) and gradients "
                f"({_mib(cell('sharded', 'gradients'))}) stay whole."
            )
        peaks = [(name, cell("unsharded", name), cell("sharded", name)) for name in MOMENTS]
        if all(before and after for _, before, after in peaks):
            parts = [f"{_title(name)} {number(before)} and {number(after)}" for name, before, after in peaks]
            said.append(f"{where}: peak MiB without and with sharding: {'; '.join(parts)}.")
        said += _times(where, cell, "sharded", "unsharded")
        said += _times(where, cell, "sharded", OPTIMIZER_PEER)
        said += _times(where, cell, "zero1", "unsharded")
        said += _times(where, cell, "zero1", OPTIMIZER_PEER)
    return [*said, *efficiency_answer(*_scaled(with_cases(frame)), "unsharded")]


def fsdp_answers(frame: pd.DataFrame) -> list[str]:
    """Memory saved; speed and peak against fully_shard; whether the all-gather finishes in time."""
    said = []
    for where, cell in _cases(frame):
        whole = sum(cell("unsharded", name) for name in PARTS)
        shared = sum(cell("fsdp", name) for name in PARTS)
        if whole and shared:
            said.append(
                f"{where}: parameters, gradients and optimizer state take {number(whole)} MiB a rank unsharded and "
                f"{number(shared)} MiB under FSDP ({factor(shared / whole)})."
            )
        peak, predicted = cell("fsdp", "peak_memory"), cell("fsdp", "predicted_peak_memory")
        unsharded = cell("unsharded", "peak_memory")
        if peak and predicted:
            before = f", {number(unsharded)} MiB unsharded" if unsharded else ""
            said.append(
                f"{where}: FSDP peaks at {number(peak)} MiB{before}; the closed form said {number(predicted)} MiB "
                f"({factor(predicted / peak)} of what was measured)."
            )
        said += _times(where, cell, "fsdp", FSDP_PEER)
        for ours, other in (("fsdp", "unsharded"), ("fsdp_layer", "fsdp"), ("fsdp_layer", "unsharded")):
            said += _times(where, cell, ours, other, or_say_why=False)
        said += _times(where, cell, "fsdp_layer", FSDP_PEER, or_say_why=False)
        theirs = cell(FSDP_PEER, "peak_memory")
        if peak and theirs:
            said.append(
                f"{where}: its peak is {factor(peak / theirs)} that of torch fully_shard ({number(theirs)} MiB)."
            )
        said += _in_time(where, cell, "fsdp") + _in_time(where, cell, "fsdp_layer")
    return [*said, *efficiency_answer(*_scaled(with_cases(frame)), "unsharded")]


class CaseRows:
    """What was measured of one case: `cell(implementation, quantity, mode)` is a median, 0 if absent."""

    def __init__(self, rows: pd.DataFrame) -> None:
        measured = tuples(rows[rows["status"] == "ok"])
        self._rows = {(row.implementation, row.quantity, row.mode): row for row in measured}

    def row(self, implementation: str, quantity: str, mode: str = "train_step") -> Any:
        return self._rows.get((implementation, quantity, mode))

    def __call__(self, implementation: str, quantity: str, mode: str = "train_step") -> float:
        row = self.row(implementation, quantity, mode)
        return 0.0 if row is None else float(row.median)


def _cases(frame: pd.DataFrame) -> list[tuple[str, CaseRows]]:
    """For each case how a sentence names it, and what was measured of it."""
    frame = with_cases(frame)
    varying = variants(frame, KEYS)
    found = []
    for _, rows in frame.groupby("case", sort=False):
        first = tuples(rows)[0]
        where = f"{first.model}, {ranks_of(first)}, {first.compute}"
        if "reduce" in varying and first.compute != "float32":
            where += f", gradients averaged {first.reduce if first.reduce == AS_COMPUTED else 'in ' + first.reduce}"
        found.append((where, CaseRows(rows)))
    return found


def _times(where: str, cell: CaseRows, ours: str, other: str, *, or_say_why: bool = True) -> list[str]:
    """Both times and their ratio; of two runs their commits in its place, or nothing."""
    first, second = cell.row(ours, "time"), cell.row(other, "time")
    if first is None or second is None or not (first.median > 0 and second.median > 0):
        return []
    if not same_run(first, second):
        of_day = first.commit == second.commit
        parts = [
            f"{number(row.median)} ms with {_in_sentence(name)} at commit `{row.commit[:10]}`"
            + (f" on {str(row.date)[:10]}" if of_day else "")
            for row, name in ((first, ours), (second, other))
        ]
        return [f"{where}: a step takes {' and '.join(parts)}: two runs, not compared."] if or_say_why else []
    return [
        f"{where}: a step takes {number(first.median)} ms with {_in_sentence(ours)}, "
        f"{factor(first.median / second.median)} the {number(second.median)} ms of {_in_sentence(other)}."
    ]


def _in_sentence(implementation: str) -> str:
    """The name with what follows its comma in brackets, so that it stands between commas: `FSDP (a unit a layer)`."""
    name, comma, how = NAMES[implementation].partition(", ")
    return f"{name} ({how})" if comma else name


def _in_time(where: str, cell: CaseRows, ours: str) -> list[str]:
    """What of the forward's communication no computation hides."""
    sent, hidden = cell(ours, "communication_time", "forward"), cell(ours, "overlap_time", "forward")
    compute = cell(ours, "compute_time", "forward")
    if not (sent and compute):
        return []
    return [
        f"{where}: in the forward pass of {_in_sentence(ours)} the all-gathers take {number(sent)} ms beside "
        f"{number(compute)} ms of compute, and {number(hidden)} ms of them ({number(100 * hidden / sent, 3)} %) run "
        f"while a kernel computes; the rest, {number(sent - hidden)} ms, is waited for."
    ]


def _mib(value: float) -> str:
    return f"{number(value)} MiB" if value else "not measured"


OPTIMIZER_PROBLEM, FSDP_PROBLEM = "optimizer_state_sharding_accounting", "fsdp_accounting"
SHARDING_TABLES: dict[str, Callable[[pd.DataFrame], list[Section]]] = {
    OPTIMIZER_PROBLEM: optimizer_tables,
    FSDP_PROBLEM: fsdp_tables,
}
SHARDING_PLOTS: dict[str, Callable[[pd.DataFrame], list[Plot]]] = {
    OPTIMIZER_PROBLEM: optimizer_plots,
    FSDP_PROBLEM: fsdp_plots,
}
SHARDING_ANSWERS: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    OPTIMIZER_PROBLEM: optimizer_answers,
    FSDP_PROBLEM: fsdp_answers,
}
SHARDING_CASES = {OPTIMIZER_PROBLEM: ("ShardingCase",), FSDP_PROBLEM: ("ShardingCase",)}
