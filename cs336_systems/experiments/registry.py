"""The only list of problems. Their names are the handout's, on the command line, in the records and in the writeup."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cs336_systems.config import RunConfig
from cs336_systems.experiments.cells import Cell, Measurement, Problem
from cs336_systems.experiments.collective_cells import communication_cells, measure_communication
from cs336_systems.experiments.ddp_cells import measure_ddp
from cs336_systems.experiments.mask_cells import measure_masked
from cs336_systems.experiments.masks import (
    block_sparse_cells,
    dense_masks_cells,
    dilated_attention_cells,
    dynamic_mask_cells,
)
from cs336_systems.experiments.s2_nsys_profile import measure_nsys_profile, nsys_profile_cells
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
from cs336_systems.experiments.s4_counters import kernel_counters_cells, measure_kernel_counters
from cs336_systems.experiments.s4_few_queries import few_queries_cells, measure_few_queries
from cs336_systems.experiments.s4_ladder import hopper_ladder_cells, measure_hopper_ladder
from cs336_systems.experiments.s4_long_calls import long_calls_cells, measure_long_calls
from cs336_systems.experiments.s4_shapes import attention_shapes_cells, measure_attention_shapes
from cs336_systems.experiments.s4_short_calls import measure_short_calls, short_calls_cells
from cs336_systems.experiments.s4_tiles import measure_tile_choice, tile_choice_cells
from cs336_systems.experiments.s5_distributed import bucketed_cells, flat_cells, naive_cells, overlap_cells
from cs336_systems.experiments.s6_sharding import optimizer_sharding_cells
from cs336_systems.experiments.s7_fsdp import fsdp_cells
from cs336_systems.experiments.s9_leaderboard import leaderboard_2025_cells, measure_leaderboard_2025
from cs336_systems.experiments.s9_training_step import leaderboard_2026_cells, measure_leaderboard_2026
from cs336_systems.experiments.s_context_parallel import context_parallel_cells, measure_context_parallel
from cs336_systems.experiments.s_training import measure_training_run, training_run_cells
from cs336_systems.experiments.sharding_cells import measure_sharding
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
            name="nsys_profile",
            title="Where the time of a step goes: kernels, matmul share, attention's parts",
            section="2.1.4",
            editions=(2025, 2026),
            points=5,
            cells=nsys_profile_cells,
            measure=measure_nsys_profile,
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
            name="leaderboard_2025",
            title="The 2025 leaderboard: 1 x 16 x 16384 x 64, causal, bfloat16, forward and backward",
            section="9",
            editions=(2025,),
            points=0,
            cells=leaderboard_2025_cells,
            measure=measure_leaderboard_2025,
        ),
        Problem(
            name="leaderboard_2026",
            title="The 2026 leaderboard: a full training step of an 8B model, context 32,768, on two GPUs",
            section="9",
            editions=(2026,),
            points=10,
            cells=leaderboard_2026_cells,
            measure=measure_leaderboard_2026,
        ),
        Problem(
            name="attention_shapes",
            title="Attention on shapes of real models",
            section="beyond",
            editions=(),
            points=0,
            cells=attention_shapes_cells,
            measure=measure_attention_shapes,
        ),
        Problem(
            name="long_calls",
            title="Our kernels and cuDNN's on the longest of those shapes, by turns",
            section="beyond",
            editions=(),
            points=0,
            cells=long_calls_cells,
            measure=measure_long_calls,
        ),
        Problem(
            name="short_calls",
            title="What short attention calls take: the host, both, and the GPU alone, by turns",
            section="beyond",
            editions=(),
            points=0,
            cells=short_calls_cells,
            measure=measure_short_calls,
        ),
        Problem(
            name="few_queries",
            title="Attention of one head, and of generated tokens: the keys split, whole, and the libraries",
            section="beyond",
            editions=(),
            points=0,
            cells=few_queries_cells,
            measure=measure_few_queries,
        ),
        Problem(
            name="hopper_ladder",
            title="From Triton with pointers to Gluon on Hopper: what each rung adds",
            section="beyond",
            editions=(),
            points=0,
            cells=hopper_ladder_cells,
            measure=measure_hopper_ladder,
        ),
        Problem(
            name="kernel_counters",
            title="What the GPU's counters say limits the attention kernels",
            section="beyond",
            editions=(),
            points=0,
            cells=kernel_counters_cells,
            measure=measure_kernel_counters,
        ),
        Problem(
            name="tile_choice",
            title="The tile tables against the best of a grid, and against one fixed tile",
            section="beyond",
            editions=(),
            points=0,
            cells=tile_choice_cells,
            measure=measure_tile_choice,
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
        Problem(
            name="training_run",
            title="Training a language model with every wrapper: the same losses",
            section="beyond",
            editions=(),
            points=0,
            cells=training_run_cells,
            measure=measure_training_run,
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

# What commands of their own measure with the same machinery: no problems, so `list` and `run` leave them out.
COMMANDS = {TUNE_FLASH: measure_tune_flash}


def measure_function(name: str) -> Callable[[Cell, RunConfig], Iterator[Measurement]]:
    """What measures a cell of the problem or command `name`."""
    return COMMANDS[name] if name in COMMANDS else PROBLEMS[name].measure
