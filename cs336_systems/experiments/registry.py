"""The problems that are measured, by name: the experiments that find themselves (spec.py)."""

from cs336_systems.experiments.spec import Calculation, Experiment, experiments
from cs336_systems.experiments.tuning import TUNE_FLASH

PROBLEMS: dict[str, Experiment] = {name: one for name, one in experiments().items() if not isinstance(one, Calculation)}

# Commands with records of their own, and the problem that measures their cells; `list` and `run` leave them out.
COMMANDS = {TUNE_FLASH: "tile_choice"}
