"""What the figures show, before anything is drawn: one function a problem, each giving named plots with their data.

    for plot in plots("flash_benchmarking", frame):
        plot.name, plot.data        # data: a row a mark, with the columns of `POINT`

Every implementation and length of the records is a row of `data`: drawn where it was measured, annotated where not.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from cs336_systems.report.distributed import DISTRIBUTED_PLOTS
from cs336_systems.report.frames import MODE_TITLES, MODEL_VARIANTS, select, variants
from cs336_systems.report.leaderboard import LEADERBOARD_PLOTS
from cs336_systems.report.markdown import plain
from cs336_systems.report.memory_plots import MEMORY_PLOTS
from cs336_systems.report.points import Plot, model_speed_ups, points, points_by_length
from cs336_systems.report.profiles import plots as profile_plots
from cs336_systems.report.sections import constants, longest_warmup, present_modes, timed
from cs336_systems.report.sharding import SHARDING_PLOTS
from cs336_systems.report.training import training_plots

LENGTH = "sequence length (tokens)"
FIRST_STEP = ", first step"  # ends the name of the series that shows first steps alone
MEMORY_STYLES = {"memory_before_backward": "forward", "peak_memory": "train_step"}
MEDIANS = "Bars: median; whiskers: quartiles."


def plots(problem: str, frame: pd.DataFrame) -> list[Plot]:
    """The plots of `problem` from its frame, leaving out those without records; none if it has no figure."""
    found = PLOTS[problem](frame) if problem in PLOTS and len(frame) else []
    return [plot for plot in found if len(plot.data)]


def benchmarking_script(frame: pd.DataFrame) -> list[Plot]:
    """Time of a step by model and mode; and what the first steps cost without warm-up."""
    steps = timed(frame)
    names = variants(steps, ("label", *MODEL_VARIANTS))
    warm = longest_warmup(steps)
    found = [
        Plot(
            name="steps",
            title=f"Time of a step after {plain(warm['warmup'].max())} warm-up steps on {device_of(frame)}",
            kind="bars",
            data=points(warm, panel=names, series="mode", style="mode", x="model"),
            x_label="model",
            y_label="time of a step (ms)",
            notes=(MEDIANS,),
        )
    ]
    if steps["warmup"].nunique() > 1:
        all_steps = points(steps, panel=["mode", *names], series="model", style="model", x="warmup")
        first = all_steps.assign(series=all_steps["series"] + FIRST_STEP, y=list(steps["first"]))
        first[["low", "high"]] = float("nan")
        found.append(
            Plot(
                name="warmup",
                title=f"Effect of warm-up on the timed steps on {device_of(frame)}",
                kind="warmups",
                data=pd.concat([all_steps, first], ignore_index=True),
                x_label="warm-up steps before the first timed one",
                y_label="time of a step (ms)",
                notes=("Solid: median and quartiles of the timed steps. Dotted, hollow: the first timed step alone.",),
            )
        )
    return found


def pytorch_attention(frame: pd.DataFrame) -> list[Plot]:
    """Time of both passes against length, and memory, a panel for each head dim."""
    passes = []
    for mode in present_modes(frame):
        marks = points_by_length(select(frame, "time", mode))
        several = frame["label"].nunique() > 1
        series = marks["series"] + f", {MODE_TITLES[mode]}" if several else MODE_TITLES[mode]
        passes.append(marks.assign(series=series, style=mode))
    found = [
        Plot(
            name="time",
            title=f"Plain attention on {device_of(frame)}\n{constants(frame)}",
            kind="lines",
            data=pd.concat(passes, ignore_index=True),
            x_label=LENGTH,
            y_label="time (ms)",
        )
    ]
    memory = []
    for quantity, name in (("memory_before_backward", "before backward"), ("peak_memory", "peak")):
        if (frame["quantity"] == quantity).any():
            memory.append(points_by_length(select(frame, quantity)).assign(series=name, style=MEMORY_STYLES[quantity]))
    if memory:
        found.append(
            Plot(
                name="memory",
                title=f"Memory of plain attention on {device_of(frame)}\n{constants(frame)}",
                kind="lines",
                data=pd.concat(memory, ignore_index=True),
                x_label=LENGTH,
                y_label="memory (MiB)",
            )
        )
    return found


def torch_compile(frame: pd.DataFrame) -> list[Plot]:
    """Eager against compiled attention by length, a figure for each mode; speed-up of whole models."""
    found = []
    attention = frame[frame["case_type"] == "AttentionShape"]
    for mode in present_modes(attention):
        found.append(
            Plot(
                name=f"attention_{mode}",
                title=f"Attention {MODE_TITLES[mode]} on {device_of(frame)}\n{constants(attention)}",
                kind="lines",
                data=points_by_length(select(attention, "time", mode)),
                x_label=LENGTH,
                y_label="time (ms)",
            )
        )
    models = frame[frame["case_type"] == "ModelCase"]
    if len(models):
        found.append(
            Plot(
                name="models",
                title=f"Speed-up of whole models by torch.compile on {device_of(frame)}",
                kind="bars",
                data=model_speed_ups(models),
                x_label="model",
                y_label="time eager / time compiled",
                log_y=False,
                line_at=1.0,
                notes=("Ratio of medians; above the line at 1, compiled is faster.",),
            )
        )
    return found


PLOTS: dict[str, Callable[[pd.DataFrame], list[Plot]]] = {
    "benchmarking_script": benchmarking_script,
    "nsys_profile": profile_plots,
    "pytorch_attention": pytorch_attention,
    "torch_compile": torch_compile,
    "training_run": training_plots,
    **DISTRIBUTED_PLOTS,
    **SHARDING_PLOTS,
    **LEADERBOARD_PLOTS,
    **MEMORY_PLOTS,
}


def device_of(frame: pd.DataFrame) -> str:
    """Name of the one device of `frame`."""
    return str(frame["device"].iloc[0])
