"""The problems that are measured, by name, and what measures them: the experiments that find themselves (spec.py)."""

from collections.abc import Callable, Iterator

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Calculation, Cell, Experiment, Sample, experiments, load
from cs336_systems.experiments.tuning import PROBLEM as TUNE_FLASH
from cs336_systems.experiments.tuning import measure_tune_flash

PROBLEMS: dict[str, Experiment] = {name: one for name, one in experiments().items() if not isinstance(one, Calculation)}

# What commands of their own measure with the same machinery: no problems, so `list` and `run` leave them out.
COMMANDS = {TUNE_FLASH: measure_tune_flash}


def measure_function(name: str) -> Callable[[Cell, RunConfig], Iterator[Sample]]:
    """What measures a cell of the problem or command `name`."""
    return COMMANDS[name] if name in COMMANDS else load(name).measure
