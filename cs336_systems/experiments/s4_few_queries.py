"""Beyond the handout: `few_queries`, attention whose queries are too few to fill a GPU.

One head of a long sequence, as the handout's benchmark has it, and what generation calls: one token for each sequence
of a batch, or a few drafted ones, over all keys so far. The Triton forward then splits the keys among programs; beside
it runs the same forward with the keys left whole. Times are of the GPU alone, in replayed graphs: eager calls this
short wait for the host (`short_calls`). Keys and values that fit the L2 cache are there from the call before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from cs336_systems.attention.contract import Oracle, compute_oracle
from cs336_systems.config import AttentionShape, DTypeName, RunConfig
from cs336_systems.experiments.attention_cells import FORWARD, checked_error, settle
from cs336_systems.experiments.cells import Cell, Measurement
from cs336_systems.experiments.implementations import AttentionFunction, build, kernel_name, without_overhead
from cs336_systems.experiments.s4_short_calls import GRAPH_FORWARD, graph_times
from cs336_systems.inputs import AttentionInputs, attention_inputs
from cs336_systems.measure.timing import time_calls

PROBLEM = "few_queries"
WHOLE = "triton_whole"  # the Triton forward without splitting
SIXTEEN_BIT = (WHOLE, "triton", "sdpa_flash", "sdpa_cudnn")
SINGLE = (WHOLE, "triton", "sdpa_efficient")  # SDPA's other kernels take no float32
# (batch, heads, key heads, queries, keys, head_dim, causal)
HEADS = tuple(
    (1, heads, heads, seqlen, seqlen, head_dim, True)
    for head_dim in (64, 128)
    for heads, seqlen in ((1, 1024), (1, 4096), (1, 16384), (4, 2048))
)
GENERATION = (
    (1, 8, 8, 1, 4096, 64, False),
    (1, 32, 8, 1, 4096, 128, False),
    (1, 32, 8, 1, 32768, 128, False),
    (8, 32, 8, 1, 8192, 128, False),
    (64, 32, 8, 1, 4096, 128, False),
    (1, 1, 1, 1, 131072, 128, False),
    (1, 32, 4, 8, 16384, 128, False),
    (1, 16, 16, 128, 8192, 128, False),
)
SHAPES: dict[str, dict[DTypeName, tuple[tuple[int, int, int, int, int, int, bool], ...]]] = {
    "tiny": {"float32": ((1, 2, 1, 1, 128, 32, False),)},
    "smoke": {"float32": ((1, 1, 1, 128, 128, 64, True), (1, 4, 2, 1, 256, 64, False))},
    "handout": {"bfloat16": (*HEADS, *GENERATION), "float32": tuple(shape for shape in HEADS if shape[3] == 4096)},
}


def few_queries_cells(run: RunConfig) -> list[Cell]:
    """Every implementation that takes the dtype on every shape; the Hopper kernels where heads are of a sequence."""
    rows = (GRAPH_FORWARD,) if run.device == "cuda" else (FORWARD,)
    cells = []
    for dtype, shapes in SHAPES[run.scale].items():
        for batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, is_causal in shapes:
            case = AttentionShape(
                batch=batch, heads=heads, kv_heads=None if kv_heads == heads else kv_heads, seqlen_q=seqlen_q,
                seqlen_k=seqlen_k, head_dim=head_dim, is_causal=is_causal, dtype=dtype,
            )  # fmt: skip
            names = SIXTEEN_BIT if dtype == "bfloat16" else SINGLE if run.device == "cuda" else (*SINGLE, "sdpa_flash")
            if dtype == "bfloat16" and is_causal:
                names = (*names, "hopper")
            cells += [Cell(problem=PROBLEM, case=case, implementation=name, rows=rows) for name in names]
    return cells


def measure_few_queries(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """The forward, checked against the oracle and then timed."""
    shape, device = cell.case, run.device
    function, kernel = build_forward(cell.implementation, shape, device)
    inputs = _inputs(shape, device, run.seed)
    with without_overhead(function) as attend:

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(*inputs[:3])

        error = checked_error(_oracle(shape, device, run.seed), {"output": forward()}, cell.implementation)
        if device == "cuda":
            settle(forward)
        times_ms = graph_times(forward) if device == "cuda" else time_calls(forward, device=device, num_samples=3)
        (row,) = cell.rows
        yield Measurement(row=row, samples=times_ms, kernel=kernel, error=error)


def build_forward(name: str, shape: AttentionShape, device: str) -> tuple[AttentionFunction, str]:
    """The implementation and the name of its forward kernel; the name ends with the number of parts, if any."""
    if name != WHOLE:
        kernels = kernel_name(name, shape, device).split()
        return build(name, shape, device), " ".join(kernels[: 2 if kernels[:1] == ["interpreter"] else 1])
    from cs336_systems.attention.triton.forward import launch_forward
    from cs336_systems.attention.triton.function import kernel_config
    from cs336_systems.attention.triton.operands import rows_of_groups

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = kernel_config("forward", rows_of_groups(q, k, shape.is_causal), k, is_causal=shape.is_causal)
        scale = shape.head_dim**-0.5
        return launch_forward(q, k, v, is_causal=shape.is_causal, scale=scale, config=config)[0]

    return attend, build_forward("triton", shape, device)[1].partition("/")[0]


# Both are shared by the implementations of a shape, which a sweep visits one after the other.
@lru_cache(maxsize=1)
def _inputs(shape: AttentionShape, device: str, seed: int) -> AttentionInputs:
    _oracle.cache_clear()
    return attention_inputs(shape, device=device, seed=seed)


@lru_cache(maxsize=1)
def _oracle(shape: AttentionShape, device: str, seed: int) -> Oracle:
    return compute_oracle(*_inputs(shape, device, seed)[:3], is_causal=shape.is_causal)
