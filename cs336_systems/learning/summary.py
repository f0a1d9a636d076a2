"""A figure of a recording for a notebook: who touches which elements, and what is wrong.

show_recording(recording, Path("add.html"))     # the figure, and a link to the page
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cs336_systems.notebook import show
from cs336_systems.stepper import Recording, finding_text, write_page
from cs336_systems.stepper.argument import Argument

WIDEST = 32  # elements of a vector in a row of its picture
GREY = (0.93, 0.93, 0.94)
WHITE = (1.0, 1.0, 1.0)
RED = (0.84, 0.16, 0.16)
BLUE = (0.17, 0.42, 0.83)  # of an element that is loaded most often; fewer loads are paler
# of programs: those of matplotlib's tab20 that are neither red nor blue
WHEEL = (4, 2, 8, 10, 12, 16, 18, 5, 3, 9, 11, 13, 17, 19)
PANEL_INCHES = 2.6
MOST_LINES = 40  # rows and columns of a picture with lines between its elements


def show_recording(recording: Recording, page: Path) -> None:
    """Write the page of `recording` to `page`, and display its summary and a link to the page."""
    from IPython.display import HTML, display

    write_page(recording, page)
    show(summary(recording), describe(recording))
    display(HTML(f'<a href="{page.as_posix()}" target="_blank">Step through {recording.name}</a>'))


def describe(recording: Recording) -> str:
    """Return the summary's alternative text: the arguments, and what is wrong."""
    names = ", ".join(argument.name for argument in recording.arguments)
    found = "; ".join(finding_text(recording, finding) for finding in recording.findings)
    return (
        f"Elements of {names} that {recording.name} loads and stores. {found or 'All in bounds'}."
    )


def summary(recording: Recording) -> Any:
    """Return a matplotlib figure with a panel for each tensor.

    Stored elements have the colour of their program, loaded ones are the bluer the more often.
    Elements out of bounds are red, those that nobody touches grey, those that were never stored,
    in a tensor that is stored to, white.
    """
    from matplotlib.figure import Figure

    arguments = recording.arguments
    columns = min(4, len(arguments))
    rows = -(-len(arguments) // columns)
    figure = Figure(figsize=(PANEL_INCHES * columns, 2.3 * rows + 0.5), dpi=80)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels:
        axes.set_axis_off()

    for axes, argument in zip(panels, arguments):
        wrong = out_of_bounds(recording, argument)
        picture = paint(argument, wrong)
        line = 0.4 if max(picture.shape) <= MOST_LINES else 0.0  # points
        axes.pcolormesh(picture, edgecolors="white" if line else "face", linewidth=line)
        axes.invert_yaxis()
        shape = "×".join(map(str, argument.shape))
        shape += ", the first" if len(argument.shape) > 2 else ""
        axes.set_title(f"{argument.name}  {shape}", fontsize=9, color="black")
    lines = [finding_text(recording, finding) for finding in recording.findings[:3]]
    title = "\n".join(lines) or f"{recording.name}: nothing out of bounds, nothing stored twice"
    figure.suptitle(title, fontsize=9, color=RED if lines else "black")
    figure.tight_layout()
    return figure


def out_of_bounds(recording: Recording, argument: Argument) -> set[int]:
    """Return the elements behind the end of an argument that accesses meant."""
    return {
        element
        for finding in recording.findings
        if finding.argument == argument.name and finding.what in ("outside", "beside")
        for element in finding.elements
        if element >= argument.num_elements
    }


def paint(argument: Argument, wrong: set[int]) -> np.ndarray[Any, Any]:
    """Return the picture of a tensor, (rows, columns, 3): its first slice, and rows for `wrong`."""
    colours = element_colours(argument)
    width = argument.shape[-1] if len(argument.shape) > 1 else min(WIDEST, argument.num_elements)
    if len(argument.shape) > 2:
        colours = colours[: argument.shape[-2] * width]

    end = max([len(colours), *(element + 1 for element in wrong)])
    end = min(end, len(colours) + 6 * width)
    picture = np.ones((-(-end // width) * width, 3))
    picture[: len(colours)] = colours
    for element in wrong:
        if element < len(picture):
            picture[element] = RED
    return picture.reshape(-1, width, 3)


def element_colours(argument: Argument) -> np.ndarray[Any, Any]:
    """Return each element's colour, (elements, 3)."""
    from matplotlib import colormaps

    colours = np.full((argument.num_elements, 3), GREY)
    share = argument.num_loads / max(1, argument.num_loads.max(initial=0))
    loaded = argument.num_loads > 0
    depth = (0.3 + 0.7 * share[loaded])[:, None]
    colours[loaded] = (1 - depth) * np.array(WHITE) + depth * np.array(BLUE)

    stored = argument.stored_by >= 0
    if stored.any():
        wheel = np.array([colormaps["tab20"](colour)[:3] for colour in WHEEL])
        colours[~stored & ~loaded] = WHITE
        colours[stored] = wheel[argument.stored_by[stored] % len(wheel)]
    return colours
