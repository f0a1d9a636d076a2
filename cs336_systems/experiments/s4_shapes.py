"""Beyond the handout: `attention_shapes`, our kernels beside the fastest of the libraries on shapes that models use.

Three questions. How fast are the kernels where a GPU is full: batches, heads and lengths of real training steps, head
dims 64 and 128, bfloat16. What does a call cost the host: on short sequences the GPU waits for Python, so the wall
time of a call that nobody waits for bounds the step, however fast the kernel is. And what is left of a short call when
nobody launches it: replayed from a CUDA graph, which is how short steps are run, it takes the GPU's time alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments.attention_cells import BACKWARD, BOTH, FORWARD, attention_cell, measure_attention
from cs336_systems.experiments.cells import Cell, Measurement, Row
from cs336_systems.experiments.implementations import AttentionFunction, build, kernel_name, without_overhead
from cs336_systems.inputs import attention_inputs
from cs336_systems.profiling.timing import time_calls

PROBLEM = "attention_shapes"
SHAPE_IMPLEMENTATIONS = ("triton", "hopper", "sdpa_cudnn", "sdpa_flash", "flex")
# (batch, heads, length, head_dim, causal). The first is the 2025 leaderboard's; the last is the 2026 leaderboard's 8B
# step; 64 heads of 8192 are the shape of MagiAttention's published table.
SHAPES = {
    "tiny": ((1, 1, 64, 64, True),),
    "smoke": ((1, 1, 128, 64, True), (1, 1, 128, 128, False)),
    "handout": (
        (1, 16, 16384, 64, True),
        (4, 32, 4096, 64, True),
        (1, 32, 16384, 64, True),
        (1, 32, 16384, 64, False),
        (8, 16, 2048, 128, True),
        (2, 16, 8192, 128, True),
        (1, 16, 16384, 128, True),
        (1, 16, 16384, 128, False),
        (1, 64, 8192, 128, False),
        (1, 32, 32768, 128, True),
    ),
}
# Where the host's part is measured: two shapes that a GPU ends before the host has launched the next, and one of 1 ms.
HOST_SHAPES = ((1, 8, 1024, 64, True), (1, 16, 512, 64, True), (8, 16, 2048, 128, True))
HOST_FORWARD = Row(mode="forward", quantity="host_time", unit="ms")
HOST_BOTH = Row(mode="forward_backward", quantity="host_time", unit="ms")
GRAPH_FORWARD = Row(mode="forward", quantity="graph_time", unit="ms")
GRAPH_BOTH = Row(mode="forward_backward", quantity="graph_time", unit="ms")
SHORT_ROWS = (HOST_FORWARD, HOST_BOTH, GRAPH_FORWARD, GRAPH_BOTH)
HOST_CALLS = 50  # a sample's: a GPU queues a thousand launches before the host must wait, and a call makes up to ten
HOST_SAMPLES = 10
GRAPH_CALLS = 20  # in one graph, whose own start takes microseconds


def attention_shapes_cells(run: RunConfig) -> list[Cell]:
    """Every implementation on every shape; on a GPU also the short ones, with the host's time and without the host."""
    on_gpu = run.device == "cuda"
    names = [name for name in SHAPE_IMPLEMENTATIONS if name != "flex" or run.scale != "tiny"]  # compiles for seconds
    cells = []
    for sizes in dict.fromkeys((*SHAPES[run.scale], *(HOST_SHAPES if on_gpu else ()))):
        short = SHORT_ROWS if on_gpu and sizes in HOST_SHAPES else ()
        shape, rows = sized_shape(run, *sizes), (FORWARD, BACKWARD, BOTH, *short)
        cells += [attention_cell(PROBLEM, shape, name, run, rows) for name in names]
    return cells


def measure_attention_shapes(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """The kernels' times, each pass checked first; then, where the cell promises them, the host's and the graph's."""
    yield from measure_attention(cell, run, settled=True)
    if HOST_FORWARD in cell.rows:
        yield from _measure_short(cell, run)


def host_times(call: Callable[[], object], *, device: str) -> list[float]:
    """Milliseconds that a call keeps the host, in the mean over HOST_CALLS calls that nobody waits for, per sample."""
    samples = []
    for _ in range(HOST_SAMPLES + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        samples.append((time.perf_counter() - start) * 1e3 / HOST_CALLS)
    if device == "cuda":
        torch.cuda.synchronize()
    return samples[1:]  # the first warms up


def graph_times(call: Callable[[], object]) -> list[float]:
    """Milliseconds of `call`, CUDA kernels of fixed shapes, replayed from a graph of GRAPH_CALLS calls in a row."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what runs for the first time loads code, which no graph can hold
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    return [sample / GRAPH_CALLS for sample in time_calls(graph.replay, device="cuda", num_samples=HOST_SAMPLES)]


def _measure_short(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """The same inputs in every call."""
    shape, device, name = cell.case, run.device, cell.implementation
    kernel = kernel_name(name, shape, device)
    inputs = attention_inputs(shape, device=device, seed=run.seed)
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    def calls(function: AttentionFunction) -> dict[str, Callable[[], object]]:
        def forward() -> Tensor:
            with torch.no_grad():
                return function(*inputs[:3])

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(*leaves), leaves, inputs.grad_output)

        return {"forward": forward, "forward_backward": both}

    with without_overhead(build(name, shape, device)) as function:
        for row in SHORT_ROWS:
            call = calls(function)[row.mode]
            times_ms = graph_times(call) if row.quantity == "graph_time" else host_times(call, device=device)
            yield Measurement(row=row, samples=times_ms, kernel=kernel)


def sized_shape(run: RunConfig, batch: int, heads: int, seqlen: int, head_dim: int, is_causal: bool) -> AttentionShape:
    """Self-attention of these sizes, in bfloat16 on a GPU and in float32 for Triton's interpreter."""
    return AttentionShape(
        batch=batch,
        heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        is_causal=is_causal,
        dtype="bfloat16" if run.device == "cuda" else "float32",
    )
