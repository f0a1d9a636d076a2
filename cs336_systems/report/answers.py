"""Sentences with numbers for the writeup's questions: one function a problem, from its frame.

    answer("flash_benchmarking", frame)      # a Markdown list; a sentence whose records are missing is left out

Only real kernels are compared: a Triton kernel that ran in the interpreter has no speed worth a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from cs336_systems.report.comparisons import compared, real
from cs336_systems.report.distributed import DISTRIBUTED_ANSWERS
from cs336_systems.report.frames import (
    BASELINE,
    MODE_TITLES,
    labels,
    select,
    tuples,
)
from cs336_systems.report.leaderboard import LEADERBOARD_ANSWERS
from cs336_systems.report.markdown import code_span, factor, number, plain
from cs336_systems.report.memory_answers import MEMORY_ANSWERS
from cs336_systems.report.profiles import answers as profile_answers
from cs336_systems.report.sections import longest_warmup, present_modes, timed
from cs336_systems.report.sharding import SHARDING_ANSWERS
from cs336_systems.report.training import training_answer

EXAMPLE_LENGTH = 16384  # the leaderboard's length: examples quote it where it was measured
EXAMPLE_HEAD_DIM = 64


def answer(problem: str, frame: pd.DataFrame) -> str:
    """The sentences of `problem` as a Markdown list; empty when nothing can be said."""
    sentences = ANSWERS[problem](frame) if problem in ANSWERS and len(frame) else []
    return "\n".join("- " + " ".join(sentence.split()) for sentence in sentences)


def benchmarking_script(frame: pd.DataFrame) -> list[str]:
    """Times of the smallest and largest model, variation, the cost of the first steps."""
    steps = timed(frame)
    warm = real(longest_warmup(steps))
    said = []
    for group in [rows for _, rows in warm.groupby(["model", "precision", "context"], sort=False, dropna=False)]:
        times = {row.mode: row.median for row in tuples(group.drop_duplicates("mode"))}
        if {"forward", "forward_backward"} <= set(times):
            first = tuples(group)[0]
            text = f"{first.model} ({first.precision}, context {plain(first.context)}): forward takes "
            text += f"{number(times['forward'], 3)} ms, forward + backward {number(times['forward_backward'], 3)} ms "
            text += f"({factor(times['forward_backward'] / times['forward'])})"
            step = times.get("train_step")
            said.append(text + (f", the full training step {number(step, 3)} ms." if step is not None else "."))
    spread = warm[warm["samples"] > 1].assign(spread=warm["std"] / warm["mean"])
    if len(spread):
        worst = tuples(spread.loc[[spread["spread"].idxmax()]])[0]
        said.append(
            f"After {plain(warm['warmup'].max())} warm-up steps the standard deviation is "
            f"{number(100 * spread['spread'].min(), 2)} % to {number(100 * spread['spread'].max(), 2)} % of the mean, "
            f"the most for {worst.model}, {MODE_TITLES[worst.mode]}."
        )
    for warmup in sorted(set(steps["warmup"]) - {warm["warmup"].max()}):
        ratios = _first_steps(real(steps[steps["warmup"] == warmup]), warm)
        if ratios:
            ratio, model, mode = max(ratios)
            counted = "1 warm-up step" if warmup == 1 else f"{plain(warmup)} warm-up steps"
            before = "Without warm-up" if warmup == 0 else f"After {counted}"
            said.append(
                f"{before} the first timed step takes {factor(min(ratios)[0])} to {factor(ratio)} the median of the "
                f"steps after {plain(warm['warmup'].max())} warm-ups, the most for {model}, {MODE_TITLES[mode]}."
            )
    return said + out_of_memory(frame, ("model", "mode"))


def pytorch_attention(frame: pd.DataFrame) -> list[str]:
    """Where memory ends, how memory and time grow with length."""
    said = out_of_memory(frame, ("seqlen", "head_dim"))
    for quantity, mode, what in (
        ("memory_before_backward", None, "the memory in use before the backward pass"),
        ("time", "forward", "the time of the forward pass"),
        ("time", "backward", "the time of the backward pass"),
    ):
        rows = real(select(frame, quantity, mode))
        rows = rows[rows["head_dim"] == _nearest(rows["head_dim"], EXAMPLE_HEAD_DIM)].drop_duplicates("seqlen")
        if len(rows) > 1:
            shorter, longer = tuples(rows.sort_values("seqlen"))[-2:]
            said.append(
                f"At d={plain(longer.head_dim)}, from S={plain(shorter.seqlen)} to {plain(longer.seqlen)} "
                f"({plain(longer.seqlen / shorter.seqlen)} times as long), {what} grows from {number(shorter.median)} "
                f"to {number(longer.median)} {longer.unit}: {factor(longer.median / shorter.median)}."
            )
    return said


def torch_compile(frame: pd.DataFrame) -> list[str]:
    """Range of speed-ups over attention shapes and over models, and what compiling costs."""
    said = []
    for case_type, what in (("AttentionShape", "attention"), ("ModelCase", "whole models")):
        cases = frame[frame["case_type"] == case_type]
        for mode in present_modes(cases):
            pairs = compared(select(cases, "time", mode), slow=BASELINE, fast="compiled")
            if len(pairs):
                said.append(f"Compiled {what}, {MODE_TITLES[mode]}: {_range_of(pairs['ratio'])} the speed of eager.")
        said += compile_times(cases, what)
        said += out_of_memory(cases, ("seqlen", "head_dim") if case_type == "AttentionShape" else ("model", "mode"))
    return said


ANSWERS: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    "benchmarking_script": benchmarking_script,
    "nsys_profile": profile_answers,
    "pytorch_attention": pytorch_attention,
    "torch_compile": torch_compile,
    "training_run": training_answer,
    **DISTRIBUTED_ANSWERS,
    **SHARDING_ANSWERS,
    **LEADERBOARD_ANSWERS,
    **MEMORY_ANSWERS,
}


def out_of_memory(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """For each implementation the first case that ran out of memory: the shortest, then the narrowest."""
    said = []
    broken = frame[frame["status"] == "oom"]
    for label in labels(broken):
        rows = broken[broken["label"] == label]
        sizes = [key for key in ("seqlen", "head_dim") if key in keys]
        first = tuples(rows.sort_values(sizes, kind="stable") if sizes else rows)[0]
        names = {"head_dim": "d=", "seqlen": "S="}
        where = ", ".join(names.get(key, "") + plain(getattr(first, key)) for key in keys)
        said.append(f"{label} first runs out of memory at {where}: {code_span(first.message)}.")
    return said


def compile_times(cases: pd.DataFrame, what: str) -> list[str]:
    """One sentence with the median and longest first call of each implementation that was compiled.

    Cases share what is compiled, so a median may be of calls that had nothing to compile.
    """
    rows = real(cases[cases["quantity"] == "compile_time"])
    parts = []
    for label in labels(rows):
        one = rows[rows["label"] == label]
        unit = one["unit"].iloc[0]
        middle, longest = number(one["median"].median(), 3), number(one["median"].max(), 3)
        parts.append(f"{label} {middle} {unit} (longest {longest} {unit})")
    if not parts:
        return []
    first = f"First calls of {what}, which compile what no earlier case has compiled, take in the median over cases"
    return [f"{first}: {'; '.join(parts)}."]


def _first_steps(steps: pd.DataFrame, warm: pd.DataFrame) -> list[tuple[float, str, str]]:
    """(first step / median of warm steps, model, mode) for each configuration in both."""
    keys = ["label", "model", "context", "batch", "attention", "precision", "mode"]
    pairs = steps.merge(warm[[*keys, "median"]], on=keys, suffixes=("", "_warm"))
    return [(row.first / row.median_warm, row.model, row.mode) for row in tuples(pairs) if row.median_warm > 0]


def _nearest(values: pd.Series, wanted: int) -> float:
    """The value nearest to `wanted`, the smaller of two; NaN when there is none."""
    return min(values, key=lambda value: (abs(value - wanted), value), default=float("nan"))


def _range_of(ratios: pd.Series) -> str:
    if len(ratios) == 1:
        return factor(ratios.iloc[0])
    return f"{factor(ratios.min())} to {factor(ratios.max())} (median {factor(ratios.median())})"

