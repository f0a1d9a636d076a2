"""The only list of problems. Their names are the handout's, on the command line, in the records and in the writeup."""

from __future__ import annotations

from cs336_systems.experiments.cells import Problem
from cs336_systems.experiments.s2_nsys_profile import measure_nsys_profile, nsys_profile_cells
from cs336_systems.experiments.s2_profiling import benchmarking_script_cells, measure_benchmarking_script
from cs336_systems.experiments.s4_attention import (
    flash_benchmarking_cells,
    measure_section4,
    pytorch_attention_cells,
    torch_compile_cells,
)
from cs336_systems.experiments.s9_leaderboard import leaderboard_2025_cells, measure_leaderboard_2025

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
            name="nsys_profile",
            title="Where the time of a step goes: kernels, matmul share, attention's parts",
            section="2.1.4",
            editions=(2025, 2026),
            points=5,
            cells=nsys_profile_cells,
            measure=measure_nsys_profile,
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
    )
}
