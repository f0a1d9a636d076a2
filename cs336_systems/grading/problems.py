"""The handout's problems: their points, their editions, and how each is answered.

Only what an adapter reaches can be graded by running it. A problem that is answered in writing or by measuring has no
points here, and the table of a grade says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EDITIONS = (2025, 2026)


@dataclass(frozen=True, kw_only=True)
class HandoutProblem:
    """One problem as the handout names it."""

    name: str
    points: int  # what the handout gives for it
    answer: Literal["graded", "measured", "written"]
    section: str
    title: str
    editions: tuple[int, ...] = EDITIONS


def _problem(name: str, points: int, answer: str, section: str, title: str, *editions: int) -> HandoutProblem:
    return HandoutProblem(
        name=name, points=points, answer=answer, section=section, title=title, editions=editions or EDITIONS  # type: ignore[arg-type]
    )  # fmt: skip


PROBLEMS = {
    problem.name: problem
    for problem in (
        _problem("benchmarking_script", 4, "measured", "2.1.3", "Step time of every model size"),
        _problem("nsys_profile", 5, "measured", "2.1.4", "Where the time of a step goes"),
        _problem("mixed_precision_accumulation", 1, "measured", "2.1.5", "A sum of a thousand terms"),
        _problem("benchmarking_mixed_precision", 2, "measured", "2.1.5", "Autocast's dtypes and times"),
        _problem("memory_profiling", 4, "measured", "2.1.6", "Memory of a forward and a training step"),
        _problem("gradient_checkpointing", 4, "measured", "3", "Peak memory by checkpointing strategy", 2026),
        _problem("pytorch_attention", 2, "measured", "4.1.1", "Plain attention over sequence length"),
        _problem("torch_compile", 2, "measured", "4.2", "torch.compile on attention and on the model"),
        _problem("flash_forward", 15, "graded", "4.2.2", "FlashAttention-2's forward, in PyTorch and in Triton"),
        _problem("flash_backward", 5, "graded", "4.2.2", "FlashAttention-2's backward, recomputed"),
        _problem("flash_benchmarking", 5, "measured", "4.2.2", "FlashAttention-2 against plain attention"),
        _problem("distributed_communication_single_node", 5, "measured", "5.1", "Time of collectives"),
        _problem("naive_ddp", 5, "written", "5.2", "A script that trains with one all-reduce a parameter"),
        _problem("naive_ddp_benchmarking", 3, "measured", "5.2", "Step time and communication share"),
        _problem("minimal_ddp_flat_benchmarking", 2, "measured", "5.3.1", "One flattened all-reduce"),
        _problem("ddp_overlap_individual_parameters", 5, "graded", "5.3.2", "All-reduces that overlap the backward"),
        _problem("ddp_overlap_individual_parameters_benchmarking", 1, "measured", "5.3.2", "Step time, two traces"),
        _problem("ddp_overlap_bucketed", 8, "graded", "5.3.3", "Buckets of gradients, reduced when full", 2025),
        _problem("ddp_bucketed_benchmarking", 3, "measured", "5.3.3", "Step time over bucket sizes", 2025),
        _problem("communication_accounting", 10, "written", "5.4", "Memory and bandwidth of a large model", 2025),
        _problem("optimizer_state_sharding", 15, "graded", "6", "An optimizer whose state is split over the ranks"),
        _problem("optimizer_state_sharding_accounting", 5, "measured", "6", "Memory and time of the split state"),
        _problem("fsdp", 15, "graded", "7", "A model whose weights are split over the ranks", 2026),
        _problem("fsdp_accounting", 5, "measured", "7", "Memory and time of the split weights", 2026),
        _problem("alternate_ring_all_reduce", 1, "written", "8", "Another ring all-reduce", 2026),
        _problem("data_parallel_calcs", 3, "written", "8", "Limits of data parallelism", 2026),
        _problem("fsdp_calcs", 3, "written", "8", "Limits of FSDP", 2026),
        _problem("tp_calcs", 4, "written", "8", "Limits of tensor parallelism", 2026),
        _problem("fsdp_tp_calcs", 6, "written", "8", "Limits of both together", 2026),
        _problem("leaderboard_2025", 0, "measured", "9", "Attention of 1 x 16 x 16384 x 64", 2025),
        _problem("leaderboard_2026", 10, "measured", "9", "A training step of an 8B model", 2026),
    )
}


def problems_of(edition: int | None = None, answer: str | None = None) -> list[HandoutProblem]:
    """The problems of one edition, or of both, and those answered in one way, in the handout's order."""
    return [
        problem
        for problem in PROBLEMS.values()
        if edition in (None, *problem.editions) and answer in (None, problem.answer)
    ]
