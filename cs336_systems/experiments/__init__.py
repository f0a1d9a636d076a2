"""All names that the file of an experiment needs, in one import.

from cs336_systems.experiments import Cell, Experiment, Pivot, Row, Sample, problem
"""

from cs336_systems.bench.spec import (
    Calculation,
    Cell,
    Disagreement,
    Experiment,
    Row,
    Sample,
    Unsupported,
    problem,
)
from cs336_systems.book.figures import Bars, Figure, Heat, Lines, Spans
from cs336_systems.book.tables import Difference, Listing, Pick, Pivot, Ratio, TableSpec, Wide

__all__ = [
    "Bars",
    "Calculation",
    "Cell",
    "Difference",
    "Disagreement",
    "Experiment",
    "Figure",
    "Heat",
    "Lines",
    "Listing",
    "Pick",
    "Pivot",
    "Ratio",
    "Row",
    "Sample",
    "Spans",
    "TableSpec",
    "Unsupported",
    "Wide",
    "problem",
]
