"""The only list of problems. Their names are the handout's, on the command line, in the records and in the writeup."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cs336_systems.config import RunConfig
from cs336_systems.experiments.cells import Cell, Measurement, Problem
from cs336_systems.experiments.mask_cells import measure_masked
from cs336_systems.experiments.masks import (
    block_sparse_cells,
    dense_masks_cells,
    dilated_attention_cells,
    dynamic_mask_cells,
)
from cs336_systems.experiments.s2_profiling import benchmarking_script_cells, measure_benchmarking_script
from cs336_systems.experiments.s4_attention import (
    flash_benchmarking_cells,
    measure_section4,
    pytorch_attention_cells,
    torch_compile_cells,
)
from cs336_systems.experiments.s9_leaderboard import leaderboard_2025_cells, measure_leaderboard_2025
from cs336_systems.experiments.tuning import PROBLEM as TUNE_FLASH
from cs336_systems.experiments.tuning import measure_tune_flash

PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem(
            name="benchmarking_script",
            title="Step time of every model size, and what warm-up changes",
            section="2.1.3",
            editions=(2025, 2026),
            points=4,
            cells=benchmarking_script_cells,
            measure=measure_benchmarking_script,
        ),
        Problem(
            name="pytorch_attention",
            title="Plain PyTorch attention over sequence length: time, memory, out of memory",
            section="4.1.1",
            editions=(2025, 2026),
            points=2,
            cells=pytorch_attention_cells,
            measure=measure_section4,
        ),
        Problem(
            name="torch_compile",
            title="torch.compile on attention and on the whole model",
            section="4.2",
            editions=(2025, 2026),
            points=2,
            cells=torch_compile_cells,
            measure=measure_section4,
        ),
        Problem(
            name="flash_benchmarking",
            title="FlashAttention-2 against plain attention and the library kernels",
            section="4.2.2",
            editions=(2025, 2026),
            points=5,
            cells=flash_benchmarking_cells,
            measure=measure_section4,
        ),
        Problem(
            name="leaderboard_2025",
            title="The 2025 leaderboard: 1 x 16 x 16384 x 64, causal, bfloat16, forward and backward",
            section="9",
            editions=(2025,),
            points=0,
            cells=leaderboard_2025_cells,
            measure=measure_leaderboard_2025,
        ),
        Problem(
            name="dense_masks",
            title="Full and causal attention, alone and over packed documents, against library kernels",
            section="beyond",
            editions=(),
            points=0,
            cells=dense_masks_cells,
            measure=measure_masked,
        ),
        Problem(
            name="block_sparse",
            title="Skipping tiles: speed by density, and what random token masks gain",
            section="beyond",
            editions=(),
            points=0,
            cells=block_sparse_cells,
            measure=measure_masked,
        ),
        Problem(
            name="dynamic_mask",
            title="Keys chosen by a bias at run time: gathered, or by lists of tiles",
            section="beyond",
            editions=(),
            points=0,
            cells=dynamic_mask_cells,
            measure=measure_masked,
        ),
        Problem(
            name="dilated_attention",
            title="Dilated attention by reshape against dense attention",
            section="beyond",
            editions=(),
            points=0,
            cells=dilated_attention_cells,
            measure=measure_masked,
        ),
    )
}

# What commands of their own measure with the same machinery: no problems, so `list` and `run` leave them out.
COMMANDS = {TUNE_FLASH: measure_tune_flash}


def measure_function(name: str) -> Callable[[Cell, RunConfig], Iterator[Measurement]]:
    """What measures a cell of the problem or command `name`."""
    return COMMANDS[name] if name in COMMANDS else PROBLEMS[name].measure
