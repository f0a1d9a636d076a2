"""What the figures show, before anything is drawn: one function a problem, each giving named plots with their data.

    for plot in plots("flash_benchmarking", frame):
        plot.name, plot.data        # data: a row a mark, with the columns of `POINT`

Every implementation and length of the records is a row of `data`: drawn where it was measured, annotated where not.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from cs336_systems.report.distributed import DISTRIBUTED_PLOTS
from cs336_systems.report.points import Plot
from cs336_systems.report.sharding import SHARDING_PLOTS

LENGTH = "sequence length (tokens)"
MEDIANS = "Bars: median; whiskers: quartiles."


def plots(problem: str, frame: pd.DataFrame) -> list[Plot]:
    """The plots of `problem` from its frame, leaving out those without records; none if it has no figure."""
    found = PLOTS[problem](frame) if problem in PLOTS and len(frame) else []
    return [plot for plot in found if len(plot.data)]


PLOTS: dict[str, Callable[[pd.DataFrame], list[Plot]]] = {
    **DISTRIBUTED_PLOTS,
    **SHARDING_PLOTS,
}


def device_of(frame: pd.DataFrame) -> str:
    """Name of the one device of `frame`."""
    return str(frame["device"].iloc[0])
