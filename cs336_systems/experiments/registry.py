"""The problems that are measured, by name, and what measures them: the experiments that find themselves (spec.py)."""

from collections.abc import Callable, Iterator

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Calculation, Cell, Experiment, Sample, experiments, load
from cs336_systems.experiments.tuning import TUNE_FLASH

PROBLEMS: dict[str, Experiment] = {name: one for name, one in experiments().items() if not isinstance(one, Calculation)}

# Commands with records of their own, and the problem that measures their cells; `list` and `run` leave them out.
COMMANDS = {TUNE_FLASH: "tile_choice"}


def measure_function(name: str) -> Callable[[Cell, RunConfig], Iterator[Sample]]:
    """What measures a cell of the problem or command `name`."""
    return load(COMMANDS.get(name, name)).measure
