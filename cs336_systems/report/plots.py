"""What the figures show, before anything is drawn: one function a problem, each giving named plots with their data.

    for plot in plots("flash_benchmarking", frame):
        plot.name, plot.data        # data: a row a mark, with the columns of `POINT`

Every implementation and length of the records is a row of `data`: drawn where it was measured, annotated where not.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from cs336_systems.report.distributed import DISTRIBUTED_PLOTS
from cs336_systems.report.frames import DTYPE_ORDER, MODE_TITLES, complete, ordered, select, variants
from cs336_systems.report.ladder import LADDER_PLOTS
from cs336_systems.report.markdown import plain
from cs336_systems.report.masks import MASK_PLOTS
from cs336_systems.report.points import Plot, points, points_by_length
from cs336_systems.report.sections import attention_keys, constants, present_modes
from cs336_systems.report.shapes import SHAPE_PLOTS
from cs336_systems.report.sharding import SHARDING_PLOTS
from cs336_systems.report.short_calls import SHORT_CALL_PLOTS

LENGTH = "sequence length (tokens)"
MEDIANS = "Bars: median; whiskers: quartiles."


def plots(problem: str, frame: pd.DataFrame) -> list[Plot]:
    """The plots of `problem` from its frame, leaving out those without records; none if it has no figure."""
    found = PLOTS[problem](frame) if problem in PLOTS and len(frame) else []
    return [plot for plot in found if len(plot.data)]


def flash_benchmarking(frame: pd.DataFrame) -> list[Plot]:
    """TFLOP/s against length for each dtype and mode, and peak memory for each dtype; a panel for each head dim."""
    found = []
    for dtype in ordered(frame["dtype"], DTYPE_ORDER):
        cases = frame[frame["dtype"] == dtype]
        where = f"on {device_of(frame)}\n{constants(cases)}"
        for mode in present_modes(cases):
            found.append(
                Plot(
                    name=f"speed_{dtype}_{mode}",
                    title=f"Attention {MODE_TITLES[mode]} {where}",
                    kind="lines",
                    data=points_by_length(select(cases, "time", mode), rate=True),
                    x_label=LENGTH,
                    y_label="speed (TFLOP/s)",
                )
            )
        if (cases["quantity"] == "peak_memory").any():
            found.append(
                Plot(
                    name=f"memory_{dtype}",
                    title=f"Peak memory of attention forward + backward {where}",
                    kind="lines",
                    data=points_by_length(select(cases, "peak_memory")),
                    x_label=LENGTH,
                    y_label="peak memory (MiB)",
                )
            )
    return found


def leaderboard_2025(frame: pd.DataFrame) -> list[Plot]:
    """Forward + backward by implementation, the fastest above; one panel for each shape."""
    rows = select(frame, "time", "forward_backward")
    shape = variants(frame, attention_keys(frame))
    rows = complete(rows, shape) if shape else rows
    data = points(rows, panel=shape, series="label", style="implementation", x="label")
    order = data.sort_values(["drawn", "y"], ascending=[False, True], kind="stable")
    longest = f"S={plain(frame['seqlen'].max())}, d={plain(frame['head_dim'].max())}, " if not shape else ""
    return [
        Plot(
            name="ranking",
            title=f"Attention forward + backward on {device_of(frame)}\n{longest}{constants(frame)}",
            kind="ranking",
            data=order.reset_index(drop=True),
            x_label="time (ms)",
            y_label="implementation",
            log_y=False,
            notes=(MEDIANS,),
        )
    ]


PLOTS: dict[str, Callable[[pd.DataFrame], list[Plot]]] = {
    "flash_benchmarking": flash_benchmarking,
    "leaderboard_2025": leaderboard_2025,
    **SHAPE_PLOTS,
    **SHORT_CALL_PLOTS,
    **LADDER_PLOTS,
    **MASK_PLOTS,
    **DISTRIBUTED_PLOTS,
    **SHARDING_PLOTS,
}


def device_of(frame: pd.DataFrame) -> str:
    """Name of the one device of `frame`."""
    return str(frame["device"].iloc[0])
