"""The problems of both handouts, in handout order: section, points, editions, kind of answer.

`HANDOUT["flash_forward"].points == 15`. `list`, `run`, `grade` and the pages read it. `grade` can
give points only for what an adapter reaches; the others are answered by measuring or in writing.
"""

from dataclasses import dataclass
from typing import Literal

# The command that answers a problem which is neither measured nor reached by an adapter.
COMMANDS = {"naive_ddp": "train --wrapper naive --ranks 2"}
Answer = Literal["graded", "measured", "written"]
EDITIONS = (2025, 2026)


# titles of the chapters, of which HANDOUT has sections
CHAPTERS = {
    "2": "Profiling",
    "3": "Memory",
    "4": "Attention",
    "5": "Data parallelism",
    "6": "Sharded optimizer",
    "7": "FSDP",
    "8": "Theory of parallelism",
    "9": "Leaderboards",
}


@dataclass(frozen=True)
class HandoutProblem:
    """A problem as the handouts give it."""

    name: str  # also the CLI argument, the experiment's file, the record file and the page
    section: str  # of the 2026 handout, or of the 2025 handout if only that has the problem
    points: int
    editions: tuple[int, ...]
    answer: Answer
    title: str  # what is asked for, in our words


BOTH, OLD, NEW = EDITIONS, EDITIONS[:1], EDITIONS[1:]
RUN: Answer = "measured"
GRADE: Answer = "graded"
WRITE: Answer = "written"
_PROBLEMS = (
    (
        "benchmarking_script",
        "2.1.3",
        4,
        BOTH,
        RUN,
        "Step time of every model size, and what warm-up changes",
    ),
    (
        "nsys_profile",
        "2.1.4",
        5,
        BOTH,
        RUN,
        "Where the time of a step goes: kernels, matmul share, attention's parts",
    ),
    (
        "mixed_precision_accumulation",
        "2.1.5",
        1,
        BOTH,
        RUN,
        "A sum of a thousand terms in float32 and float16",
    ),
    (
        "benchmarking_mixed_precision",
        "2.1.5",
        2,
        BOTH,
        RUN,
        "Autocast's dtypes, layer norm, step times in bfloat16",
    ),
    (
        "memory_profiling",
        "2.1.6",
        4,
        BOTH,
        RUN,
        "Memory of a forward and a training step over time, and its origin",
    ),
    (
        "gradient_checkpointing",
        "3",
        4,
        NEW,
        RUN,
        "Activation checkpointing: peak memory and step time by strategy",
    ),
    (
        "pytorch_attention",
        "4.1.1",
        2,
        BOTH,
        RUN,
        "Plain PyTorch attention over length: time, memory, out of memory",
    ),
    ("torch_compile", "4.2", 2, BOTH, RUN, "torch.compile on attention and on the whole model"),
    (
        "flash_forward",
        "4.2.2",
        15,
        BOTH,
        GRADE,
        "FlashAttention-2's forward in PyTorch and in Triton",
    ),
    ("flash_backward", "4.2.2", 5, BOTH, GRADE, "FlashAttention-2's backward by recomputation"),
    (
        "flash_benchmarking",
        "4.2.2",
        5,
        BOTH,
        RUN,
        "FlashAttention-2 against plain attention and library kernels",
    ),
    (
        "distributed_communication_single_node",
        "5.1",
        5,
        BOTH,
        RUN,
        "Collectives on one host over message size",
    ),
    ("naive_ddp", "5.2", 5, BOTH, WRITE, "Data parallelism with an all-reduce for each parameter"),
    (
        "naive_ddp_benchmarking",
        "5.2",
        3,
        BOTH,
        RUN,
        "Naive data parallelism: step time and communication share",
    ),
    (
        "minimal_ddp_flat_benchmarking",
        "5.3.1",
        2,
        BOTH,
        RUN,
        "One flattened all-reduce against one a parameter",
    ),
    (
        "ddp_overlap_individual_parameters",
        "5.3.2",
        5,
        BOTH,
        GRADE,
        "An all-reduce as soon as a gradient is ready",
    ),
    (
        "ddp_overlap_individual_parameters_benchmarking",
        "5.3.2",
        1,
        BOTH,
        RUN,
        "What overlapping the backward saves",
    ),
    (
        "ddp_overlap_bucketed",
        "5.3.3",
        8,
        OLD,
        GRADE,
        "Gradients reduced in buckets, in reverse order",
    ),
    (
        "ddp_bucketed_benchmarking",
        "5.3.3",
        3,
        OLD,
        RUN,
        "Bucketed data parallelism over bucket sizes",
    ),
    (
        "communication_accounting",
        "5.4",
        10,
        OLD,
        WRITE,
        "Memory and bandwidth of a large model with FSDP and TP",
    ),
    (
        "optimizer_state_sharding",
        "6",
        15,
        BOTH,
        GRADE,
        "An optimizer whose state is sharded among ranks",
    ),
    (
        "optimizer_state_sharding_accounting",
        "6",
        5,
        BOTH,
        RUN,
        "Sharded optimizer state: memory, time, and ZeRO",
    ),
    ("fsdp", "7", 15, NEW, GRADE, "Fully sharded data parallelism with prefetch"),
    (
        "fsdp_accounting",
        "7",
        5,
        NEW,
        RUN,
        "FSDP: memory saved, and whether the all-gather is there in time",
    ),
    ("alternate_ring_all_reduce", "8", 1, NEW, WRITE, "What another ring all-reduce costs"),
    ("data_parallel_calcs", "8", 3, NEW, WRITE, "When data parallelism is bound by communication"),
    ("fsdp_calcs", "8", 3, NEW, WRITE, "When FSDP is bound by communication"),
    ("tp_calcs", "8", 4, NEW, WRITE, "When tensor parallelism is bound by communication"),
    ("fsdp_tp_calcs", "8", 6, NEW, WRITE, "FSDP and tensor parallelism together"),
    (
        "leaderboard_2025",
        "9",
        0,
        OLD,
        RUN,
        "Attention of 1 x 16 x 16384 x 64, causal, forward and backward",
    ),
    (
        "leaderboard_2026",
        "9",
        10,
        NEW,
        RUN,
        "A full training step of an 8B model, context 32,768, on two GPUs",
    ),
)
HANDOUT: dict[str, HandoutProblem] = {row[0]: HandoutProblem(*row) for row in _PROBLEMS}


def problems_of(edition: int | None = None, answer: Answer | None = None) -> list[HandoutProblem]:
    """Return the problems of `edition` with this kind of `answer`, in the handout's order.

    None stands for both editions, and for every kind of answer.
    """
    return [
        problem
        for problem in HANDOUT.values()
        if edition in (None, *problem.editions) and answer in (None, problem.answer)
    ]
