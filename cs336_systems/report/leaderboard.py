"""Tables, figure and answers of `leaderboard_2026`: a training step of an 8B model on two GPUs, as time and as rate.

Rates credit the step's useful FLOPs (`model_flops`): twice the forward for the backward, causal pairs of attention
only, nothing that is computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pandas as pd

from cs336_systems.accounting import model_flops, tflops_per_s
from cs336_systems.config import ModelConfig
from cs336_systems.device import PEAKS, model_flops_utilization, peak_by_name
from cs336_systems.report.comparisons import RUN_REMARK, hatched, run_cell, run_names, same_run
from cs336_systems.report.distributed import bar_notes, peak_of
from cs336_systems.report.frames import select, sort_cells, tuples
from cs336_systems.report.markdown import ABSENT, Cells, factor, number, plain
from cs336_systems.report.points import Plot, points
from cs336_systems.report.sections import Section, key_cells, section
from cs336_systems.report.sharding import NAMES, PARTS

PROBLEM = "leaderboard_2026"
RECORD_MS, RECORD_GPU = 3837.0, "B200"  # the class's, on two of them
COLD_LIMIT_S = 600.0  # the handout's, for the whole run
RECOMPUTED = {
    "nothing": "nothing",
    "after_attention": "after attention",
    "around_attention": "around attention",
    "block": "whole blocks",
}
KEYS = ["shown", "recomputed", "attention", "compiler"]
HEADINGS = ["implementation", "computed again", "attention", "blocks"]


def with_settings(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with the columns of KEYS, ranks, compute dtype, tokens of a step, and useful FLOPs of a rank."""
    cases = [json.loads(case) for case in frame["case"]]
    models = [_model(case["model"]) for case in cases]
    batches = [int(case["batch"]) for case in cases]
    ranks = [int(case["num_ranks"]) for case in cases]
    return sort_cells(
        frame.assign(
            shown=[NAMES.get(str(name), str(name)) for name in frame["label"]],
            recomputed=[RECOMPUTED.get(str(case.get("recompute")), str(case.get("recompute"))) for case in cases],
            compiler=["compiled" if case.get("compiled") else "eager" for case in cases],
            ranks=ranks,
            compute=[str((case.get("precision") or {}).get("autocast") or "float32") for case in cases],
            tokens=[n * b * model.context_length for n, b, model in zip(ranks, batches, models)],
            flops=[model_flops(model, batch, "train_step") for model, batch in zip(models, batches)],
        )
    )


def _model(case: dict[str, Any]) -> ModelConfig:
    known = {field.name for field in fields(ModelConfig)}
    return ModelConfig(**{name: value for name, value in case.items() if name in known})


def leaderboard_tables(frame: pd.DataFrame) -> list[Section]:
    """The step, fastest first, as time and rate, with its memory; where its time goes; what a rank keeps."""
    frame = with_settings(frame)
    found = [_step_table(frame)]
    parts = {
        "start_time": "cold start (s)",
        "traced_time": "traced step (ms)",
        "compute_time": "compute (ms)",
        "communication_time": "communication (ms)",
        "overlap_time": "of it beside compute (ms)",
    }
    found.append(_quantities("parts", "From launch to the end of the first step, and one traced step of rank 0", frame,
                             parts))  # fmt: skip
    kept = {name: f"{name.replace('_', ' ')} (MiB)" for name in PARTS}
    found.append(_quantities("kept", "What a rank keeps between steps", frame, kept))
    return found


def _step_table(frame: pd.DataFrame) -> Section:
    times = select(frame, "time", "train_step")
    peaks, predicted = (_by_cell(frame, name) for name in ("peak_memory", "predicted_peak_memory"))
    cells = Cells()
    lines = []
    names = run_names(times)
    for row in tuples(times.sort_values("median", kind="stable", na_position="last")):
        rates = [ABSENT] * 3
        if row.status == "ok" and row.median > 0:
            share = utilization(row)
            rates = [number(row.tokens / row.median * 1e3), number(tflops_per_s(row.flops, row.median))]
            rates.append(ABSENT if share is None else f"{number(100 * share, 3)} %")
        key = (row.implementation, row.case)
        memory = [cells.text(table.get(key)) for table in (peaks, predicted) if table]
        run = [run_cell([row], names)] if len(names) > 1 else []
        lines.append([*key_cells(row, KEYS), cells.time(row), *rates, *memory, *run])
    processor = _processor(str(frame["device_kind"].iloc[0]))
    header = [*HEADINGS, "step (ms)", "tokens/s", f"TFLOP/s a {processor}", "of its peak"]
    header += [title for title, table in (("peak (MiB)", peaks), ("predicted (MiB)", predicted)) if table]
    if len(names) > 1:
        header.append("commit")
        cells.remark(RUN_REMARK)
    peak = peak_of(frame)
    if peak is not None:
        cells.remark(f"peak of a GPU: {plain(peak.bf16_tflops)} TFLOP/s ({peak.source})")
    return section("step", f"Full training step, {_what(frame)}", header, lines, len(KEYS), cells)


def _quantities(name: str, title: str, frame: pd.DataFrame, quantities: dict[str, str]) -> Section:
    cells = Cells()
    columns = [_by_cell(frame, quantity) for quantity in quantities]
    lines = [
        [*key_cells(row, KEYS), *(cells.text(column.get((row.implementation, row.case))) for column in columns)]
        for row in tuples(frame.drop_duplicates(["implementation", "case"]))
    ]
    return section(name, title, [*HEADINGS, *quantities.values()], lines, len(KEYS), cells)


def _by_cell(frame: pd.DataFrame, quantity: str) -> dict[tuple[str, str], Any]:
    """Rows of `quantity` by implementation and case; empty where none was promised."""
    if not (frame["quantity"] == quantity).any():
        return {}
    return {(row.implementation, row.case): row for row in tuples(select(frame, quantity, "train_step"))}


def utilization(row: Any) -> float | None:
    """Share of the GPU's bfloat16 peak that the useful FLOPs of a timed row are; None where no peak applies."""
    if row.compute != "bfloat16":
        return None
    return model_flops_utilization(row.flops, row.median / 1e3, peak_by_name(str(row.device)), row.compute)


def leaderboard_plots(frame: pd.DataFrame) -> list[Plot]:
    """A bar for every cell's step."""
    rows = select(with_settings(frame), "time", "train_step")
    settings = [f"{row.recomputed}\n{row.attention}, {row.compiler}" for row in tuples(rows)]
    rows = rows.assign(settings=settings, style=rows["label"])
    data, named = hatched(points(rows, panel=[], series="shown", style="style", x="settings"), rows)
    return [
        Plot(
            name="time",
            title=f"Full training step on {frame['device'].iloc[0]}\n{_what(with_settings(frame))}",
            kind="bars",
            data=data,
            x_label="computed again in backward; attention",
            y_label="time of a step (ms)",
            log_y=False,
            notes=bar_notes(named),
            runs=named,
        )
    ]


def leaderboard_answers(frame: pd.DataFrame) -> list[str]:
    """The fastest step against the record and the peak; against fully_shard; memory; cold start; communication."""
    frame = with_settings(frame)
    times = select(frame, "time", "train_step")
    good = times[(times["status"] == "ok") & (times["median"] > 0)].sort_values("median", kind="stable")
    ours = tuples(good[good["implementation"] == "fsdp"])
    if not ours:
        return []
    best = ours[0]
    said = [_fastest(best)]
    for theirs in tuples(good[good["implementation"] == "torch_fsdp"]):
        same = next((row for row in ours if row.case == theirs.case), None)
        if same is not None and same_run(same, theirs):
            said.append(
                f"With equal settings ({_settings(same)}) a step takes {number(same.median)} ms with FSDP, "
                f"{factor(same.median / theirs.median)} the {number(theirs.median)} ms of torch fully_shard."
            )
    for other in (row for row in ours[1:] if same_run(row, best)):
        said.append(f"With {_settings(other)} a step takes {factor(other.median / best.median)} the fastest's time.")

    def value(quantity: str) -> float:
        row = _by_cell(frame, quantity).get((best.implementation, best.case))
        return float(row.median) if row is not None and row.status == "ok" else 0.0

    peak, predicted, start = value("peak_memory"), value("predicted_peak_memory"), value("start_time")
    if peak and predicted:
        said.append(
            f"The fastest peaks at {number(peak)} MiB a rank; the closed form said {number(predicted)} MiB "
            f"({factor(predicted / peak)} of what was measured)."
        )
    if start:
        text = f"From a cold cache its first step ends after {number(start, 3)} s"
        if best.model == "8b" and best.device_kind != "cpu":  # which the limit is for
            steps = int((COLD_LIMIT_S - start) / best.median * 1e3)
            text += f"; the handout's {plain(COLD_LIMIT_S)} s have room for {max(0, steps):,} more"
        said.append(f"{text}.")
    sent, hidden = value("communication_time"), value("overlap_time")
    if sent:
        said.append(
            f"Of {number(sent)} ms of communication in a traced step {number(100 * hidden / sent, 3)} % run beside "
            f"compute."
        )
    return said


def _fastest(best: Any) -> str:
    text = (
        f"The fastest step of FSDP takes {number(best.median)} ms ({_settings(best)}): "
        f"{number(best.tokens / best.median * 1e3)} tokens/s, "
        f"{number(tflops_per_s(best.flops, best.median))} TFLOP/s a {_processor(best.device_kind)}"
    )
    share = utilization(best)
    if share is None:
        return f"{text}."
    text += f", {number(100 * share, 3)} % of its peak."
    if best.model != "8b":
        return text
    own, theirs = peak_by_name(str(best.device)), PEAKS[RECORD_GPU]
    record = model_flops_utilization(best.flops, RECORD_MS / 1e3, theirs, best.compute)
    assert own is not None and record is not None
    return (
        f"{text} The class's record, {number(RECORD_MS)} ms on two {RECORD_GPU}, is {number(100 * record, 3)} % of "
        f"theirs, which is {factor(theirs.bf16_tflops / own.bf16_tflops)} as high."
    )


def _processor(device_kind: str) -> str:
    """What a rate is of: a GPU for each rank, where ranks do not share a CPU."""
    return "rank" if device_kind == "cpu" else "GPU"


def _settings(row: Any) -> str:
    return f"{row.recomputed} computed again, {row.attention} attention, {row.compiler} blocks"


def _what(frame: pd.DataFrame) -> str:
    row = tuples(frame)[0]
    return (
        f"{row.model}, {plain(row.ranks)} ranks, batch {plain(row.batch)} each, context {row.context:,}, {row.compute}"
    )


LEADERBOARD_TABLES: dict[str, Callable[[pd.DataFrame], list[Section]]] = {PROBLEM: leaderboard_tables}
LEADERBOARD_PLOTS: dict[str, Callable[[pd.DataFrame], list[Plot]]] = {PROBLEM: leaderboard_plots}
LEADERBOARD_ANSWERS: dict[str, Callable[[pd.DataFrame], list[str]]] = {PROBLEM: leaderboard_answers}
LEADERBOARD_CASES = {PROBLEM: ("LongStepCase",)}
