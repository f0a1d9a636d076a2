"""Section 5, data parallelism: collectives on one host, and the four wrappers against one another and PyTorch's."""

from __future__ import annotations

from dataclasses import replace

import torch

from cs336_systems.config import MODEL_SIZES, DataParallelCase, ModelConfig, Precision, RunConfig, proxy_model
from cs336_systems.experiments.cells import Cell
from cs336_systems.experiments.ddp_cells import PEERS, WITH_BUCKETS, ddp_cell

BUCKET_SIZES_MB = {"tiny": (0.1,), "smoke": (0.1, 1, 10), "handout": (1, 10, 100, 1000)}
DEFAULT_BUCKET_MB = {"tiny": 0.1, "smoke": 1.0, "handout": 25.0}  # the last as PyTorch's
FEWER_RANKS = {"tiny": (), "smoke": (), "handout": (1,)}  # beside the most: what a step costs with nobody to wait for
MODEL_BATCH = 4  # sequences of each rank, as the handout's


def max_ranks(run: RunConfig) -> int:
    """Ranks of the comparison: all GPUs of the host; two processes on a CPU, or where there is only one GPU."""
    return max(2, torch.cuda.device_count()) if run.device == "cuda" else 2


def all_ranks(run: RunConfig) -> list[int]:
    """Ranks of the scaling curve: 2, 4, 8 as far as there are GPUs; on a CPU the two."""
    return [ranks for ranks in (2, 4, 8) if ranks <= max_ranks(run)]


def model(run: RunConfig) -> tuple[ModelConfig, int]:
    """(model, sequences of a rank): xl at handout scale, below it a narrow proxy."""
    if run.scale == "handout":
        return MODEL_SIZES["xl"], MODEL_BATCH
    if run.scale == "tiny":
        return replace(proxy_model("xl", 64), context_length=16, vocab_size=256), 1
    return replace(proxy_model("xl", 128), context_length=64, vocab_size=1000), 2


def precisions(run: RunConfig) -> list[Precision]:
    """float32, and before it bfloat16 autocast where a GPU is fast at it, so that communication weighs more."""
    return [Precision(autocast="bfloat16"), Precision()] if run.device == "cuda" else [Precision()]


def _case(run: RunConfig, ranks: int, precision: Precision, bucket_size_mb: float | None = None) -> DataParallelCase:
    config, batch = model(run)
    return DataParallelCase(
        model=config,
        batch=batch,
        num_ranks=ranks,
        backend="nccl" if run.device == "cuda" else "gloo",
        attention="reference",
        precision=precision,
        bucket_size_mb=bucket_size_mb,
    )


def _cells(
    problem: str, run: RunConfig, implementations: tuple[str, ...], ranks: list[int], computes: list[Precision]
) -> list[Cell]:
    return [
        ddp_cell(
            problem,
            _case(run, number, precision, DEFAULT_BUCKET_MB[run.scale] if implementation in WITH_BUCKETS else None),
            implementation,
        )
        for precision in computes
        for number in ranks
        for implementation in implementations
    ]


def naive_cells(run: RunConfig) -> list[Cell]:
    """Naive data parallelism, and the same step on a single rank; `overlap_cells` has it in both precisions."""
    ranks = [*FEWER_RANKS[run.scale], *all_ranks(run)]
    return _cells("naive_ddp_benchmarking", run, ("naive",), ranks, precisions(run)[:1])


def flat_cells(run: RunConfig) -> list[Cell]:
    """One all-reduce against one a parameter."""
    implementations = ("flat",) if run.scale == "tiny" else ("naive", "flat")
    return _cells("minimal_ddp_flat_benchmarking", run, implementations, [max_ranks(run)], precisions(run)[:1])


def overlap_cells(run: RunConfig) -> list[Cell]:
    """All four and PyTorch's own, in one run, in both precisions, and a rank that sends nothing beside them."""
    implementations: tuple[str, ...] = ("naive", "flat", "overlap", "bucketed", *PEERS)
    if run.scale == "smoke":  # one of PyTorch's is enough to compare with in a laptop's minutes
        implementations = tuple(name for name in implementations if name != "torch_ddp")
    elif run.scale == "tiny":
        implementations = ("overlap",)
    problem, cells = "ddp_overlap_individual_parameters_benchmarking", []
    for precision in precisions(run):
        cells += _cells(problem, run, ("naive",), list(FEWER_RANKS[run.scale]), [precision])
        cells += _cells(problem, run, implementations, all_ranks(run), [precision])
    return cells


def bucketed_cells(run: RunConfig) -> list[Cell]:
    """Bucket sizes, ours and at handout scale PyTorch's."""
    implementations = ("bucketed", "torch_ddp_view") if run.scale == "handout" else ("bucketed",)
    return [
        ddp_cell("ddp_bucketed_benchmarking", _case(run, max_ranks(run), precisions(run)[0], size), implementation)
        for size in BUCKET_SIZES_MB[run.scale]
        for implementation in implementations
    ]
