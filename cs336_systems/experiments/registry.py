"""The problems that are measured, by name: the experiments that find themselves (spec.py)."""

from cs336_systems.experiments.spec import Calculation, Experiment, experiments

PROBLEMS: dict[str, Experiment] = {name: one for name, one in experiments().items() if not isinstance(one, Calculation)}
