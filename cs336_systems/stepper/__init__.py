"""The picture of a kernel: record a launch in Triton's interpreter, and step through it in a page.

    with trace() as recorded:               # TRITON_INTERPRET=1, before Triton is imported
        kernel[grid](x, out, n, BLOCK=128)
    recorded.launches[0].findings           # accesses out of bounds, races, elements never stored
    write_page(recorded.launches[0], Path("kernel.html"))

The kernel is not changed. The page is one offline HTML file: it steps forward and back through each
program, draws every load and store on its tensor and shows the values of tiles and the grid. On the
command line: `cs336-systems trace module:function`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cs336_systems.stepper.html_page import finding_text, page_of, write_page
from cs336_systems.stepper.recording import Endless, Finding, Recording, Trace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "Endless",
    "Finding",
    "Recording",
    "Trace",
    "finding_text",
    "page_of",
    "trace",
    "write_page",
]

MOST_STATEMENTS = 1_000_000  # of one launch: a minute, and more than a page can hold


def trace(
    most_launches: int = 4,
    most_statements: int = MOST_STATEMENTS,
    *,
    undefined_is_nan: bool = False,
) -> AbstractContextManager[Trace]:
    """Return a context in which the first `most_launches` launches of Triton kernels are recorded.

    Lanes out of bounds do not run: such a load reads NaN, such a store writes nothing. With
    `undefined_is_nan` so do the lanes that a load's mask switches off and that have no `other`: the
    interpreter reads 0 there, and a GPU anything. A launch of
    more than `most_statements` statements raises Endless within Triton's InterpreterError. Launches
    that raise are recorded up to there. ValueError if Triton's interpreter is off, and for a launch
    of a kernel that is compiled all the same.
    """
    from cs336_systems.device import interpreter_is_on

    if not interpreter_is_on():
        raise ValueError("kernels run compiled: set TRITON_INTERPRET=1 before Triton is imported")
    from cs336_systems.stepper.hooks import recording_launches

    return recording_launches(
        Trace(),
        most_launches=most_launches,
        most_statements=most_statements,
        undefined_is_nan=undefined_is_nan,
    )
