"""Section 7, `fsdp_accounting`: memory, step time and the all-gather's race with compute, beside `fully_shard`."""

from __future__ import annotations

from dataclasses import replace

import torch

from cs336_systems.config import MODEL_SIZES, ModelConfig, Precision, RunConfig, proxy_model
from cs336_systems.experiments.cells import Cell
from cs336_systems.experiments.sharding_cells import FSDP_IMPLEMENTATIONS, ShardingCase, sharding_cell

ALONE = ("unsharded", "fsdp", "torch_fsdp")  # on one rank too: both FSDPs compute in other dtypes than autocast
BATCH = {"tiny": 1, "smoke": 2, "handout": 4}  # sequences of each rank


def sharding_model(run: RunConfig) -> ModelConfig:
    """xl at handout scale, below it a narrow proxy of a few tokens."""
    if run.scale == "handout":
        return MODEL_SIZES["xl"]
    if run.scale == "tiny":
        return replace(proxy_model("xl", 64), context_length=16, vocab_size=256)
    return replace(proxy_model("xl", 128), context_length=64, vocab_size=1000)


def comparisons(
    run: RunConfig, implementations: tuple[str, ...], alone: tuple[str, ...] = ("unsharded",)
) -> list[tuple[int, str]]:
    """(ranks, implementation): all on 2, 4 and 8 ranks as far as there are GPUs, on a CPU on 2.

    At handout scale first `alone` on a single rank, which sends nothing: what efficiency at more is measured by.
    """
    gpus = torch.cuda.device_count() if run.device == "cuda" else 2
    counts = [ranks for ranks in (2, 4, 8) if ranks <= max(2, gpus)]  # with one GPU the cells of two say what lacks
    single = [(1, name) for name in alone] if run.scale == "handout" else []
    return [*single, *((ranks, name) for ranks in counts for name in implementations)]


def sharding_case(
    run: RunConfig, num_ranks: int, compute_dtype: str | None, reduce_dtype: str | None = None
) -> ShardingCase:
    """The standard configuration on `num_ranks`: plain attention, no checkpointing."""
    return ShardingCase(
        model=sharding_model(run),
        batch=BATCH[run.scale],
        num_ranks=num_ranks,
        backend="nccl" if run.device == "cuda" else "gloo",
        attention="reference",
        precision=Precision(autocast=compute_dtype),  # type: ignore[arg-type]
        reduce_dtype=reduce_dtype,
    )


def fsdp_cells(run: RunConfig) -> list[Cell]:
    """10b, which only sharding fits; then every implementation at every number of ranks and precision."""
    problem = "fsdp_accounting"
    computes: list[tuple[str | None, str | None]] = [(None, None)]
    if run.device == "cuda":  # what is trained with first
        computes = [("bfloat16", "float32"), ("bfloat16", None), *computes]
    implementations = ("fsdp", "torch_fsdp") if run.scale == "tiny" else FSDP_IMPLEMENTATIONS
    cells = []
    if run.scale == "handout":
        large = sharding_case(run, 2, "bfloat16", "float32")
        large = replace(large, model=MODEL_SIZES["10b"], checkpointing="non_reentrant", attention="sdpa")
        cells += [sharding_cell(problem, large, name) for name in ("fsdp", "torch_fsdp")]
    for compute, reduce in computes:
        for ranks, name in comparisons(run, implementations, ALONE):
            cells.append(sharding_cell(problem, sharding_case(run, ranks, compute, reduce), name))
    return cells
