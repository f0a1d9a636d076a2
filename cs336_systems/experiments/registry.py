"""All problems by name: the experiments that find themselves (spec.py), and those that are not moved yet.

A problem leaves UNMOVED when `<problem>.py` with its class under `@problem` stands in this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cs336_systems.config import RunConfig
from cs336_systems.experiments.cells import Cell, Measurement, Problem
from cs336_systems.experiments.collective_cells import communication_cells, measure_communication
from cs336_systems.experiments.ddp_cells import measure_ddp
from cs336_systems.experiments.handout import HANDOUT
from cs336_systems.experiments.s5_distributed import bucketed_cells, flat_cells, naive_cells, overlap_cells
from cs336_systems.experiments.s6_sharding import optimizer_sharding_cells
from cs336_systems.experiments.s7_fsdp import fsdp_cells
from cs336_systems.experiments.s_context_parallel import context_parallel_cells, measure_context_parallel
from cs336_systems.experiments.sharding_cells import measure_sharding
from cs336_systems.experiments.spec import Calculation, Experiment, experiments, load
from cs336_systems.experiments.tuning import PROBLEM as TUNE_FLASH
from cs336_systems.experiments.tuning import measure_tune_flash

UNMOVED: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem(
            name="distributed_communication_single_node",
            title="Collectives on one host: time and bandwidth over message size",
            section="5.1",
            editions=(2025, 2026),
            points=5,
            cells=communication_cells,
            measure=measure_communication,
        ),
        Problem(
            name="naive_ddp_benchmarking",
            title="Naive data parallelism: step time and communication share",
            section="5.2",
            editions=(2025, 2026),
            points=3,
            cells=naive_cells,
            measure=measure_ddp,
        ),
        Problem(
            name="minimal_ddp_flat_benchmarking",
            title="One flattened all-reduce against one a parameter",
            section="5.3.1",
            editions=(2025, 2026),
            points=2,
            cells=flat_cells,
            measure=measure_ddp,
        ),
        Problem(
            name="ddp_overlap_individual_parameters_benchmarking",
            title="Overlapping the backward with communication, against PyTorch's DDP",
            section="5.3.2",
            editions=(2025, 2026),
            points=1,
            cells=overlap_cells,
            measure=measure_ddp,
        ),
        Problem(
            name="ddp_bucketed_benchmarking",
            title="Bucketed data parallelism over bucket sizes",
            section="5.3.3",
            editions=(2025,),
            points=3,
            cells=bucketed_cells,
            measure=measure_ddp,
        ),
        Problem(
            name="optimizer_state_sharding_accounting",
            title="Sharded optimizer state: memory before and after the step, step time, against ZeRO",
            section="6",
            editions=(2025, 2026),
            points=5,
            cells=optimizer_sharding_cells,
            measure=measure_sharding,
        ),
        Problem(
            name="fsdp_accounting",
            title="FSDP: memory, step time, and whether the all-gather is there in time",
            section="7",
            editions=(2026,),
            points=5,
            cells=fsdp_cells,
            measure=measure_sharding,
        ),
        Problem(
            name="context_parallel",
            title="One sequence on several ranks: keys and values passed around a ring",
            section="beyond",
            editions=(),
            points=0,
            cells=context_parallel_cells,
            measure=measure_context_parallel,
        ),
    )
}


def _in_order() -> dict[str, Problem | Experiment]:
    measured = {name: one for name, one in experiments().items() if not isinstance(one, Calculation)}
    known: dict[str, Problem | Experiment] = {**UNMOVED, **measured}
    return {name: known[name] for name in (*HANDOUT, *known) if name in known}


PROBLEMS = _in_order()

# What commands of their own measure with the same machinery: no problems, so `list` and `run` leave them out.
COMMANDS = {TUNE_FLASH: measure_tune_flash}


def measure_function(name: str) -> Callable[[Cell, RunConfig], Iterator[Measurement]]:
    """What measures a cell of the problem or command `name`."""
    if name in COMMANDS:
        return COMMANDS[name]
    return UNMOVED[name].measure if name in UNMOVED else load(name).measure
