"""The only list of problems. Their names are the handout's, on the command line, in the records and in the writeup."""

from __future__ import annotations

from cs336_systems.experiments.cells import Problem
from cs336_systems.experiments.s2_precision import (
    benchmarking_mixed_precision_cells,
    measure_accumulation,
    measure_mixed_precision,
    mixed_precision_accumulation_cells,
)
from cs336_systems.experiments.s2_profiling import benchmarking_script_cells, measure_benchmarking_script
from cs336_systems.experiments.s3_memory import (
    gradient_checkpointing_cells,
    measure_gradient_checkpointing,
    measure_memory_profiling,
    memory_profiling_cells,
)
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
            name="mixed_precision_accumulation",
            title="A sum of a thousand terms in float32 and float16",
            section="2.1.5",
            editions=(2025, 2026),
            points=1,
            cells=mixed_precision_accumulation_cells,
            measure=measure_accumulation,
        ),
        Problem(
            name="benchmarking_mixed_precision",
            title="Autocast's dtypes, layer norm's overflow, and step times in low precision",
            section="2.1.5",
            editions=(2025, 2026),
            points=2,
            cells=benchmarking_mixed_precision_cells,
            measure=measure_mixed_precision,
        ),
        Problem(
            name="memory_profiling",
            title="Memory of a forward and a training step over time, by phase, category and origin",
            section="2.1.6",
            editions=(2025, 2026),
            points=4,
            cells=memory_profiling_cells,
            measure=measure_memory_profiling,
        ),
        Problem(
            name="gradient_checkpointing",
            title="Activation checkpointing: peak memory and step time by strategy",
            section="3",
            editions=(2026,),
            points=4,
            cells=gradient_checkpointing_cells,
            measure=measure_gradient_checkpointing,
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
