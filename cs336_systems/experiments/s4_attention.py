"""Section 4, attention: `pytorch_attention`, `torch_compile` and `flash_benchmarking`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cs336_systems.config import AttentionShape, DTypeName, ModelCase, RunConfig, proxy_model
from cs336_systems.experiments.attention import (
    BACKWARD,
    BEFORE_BACKWARD,
    FORWARD,
    PEAK,
    SAVED,
    attention_cell,
    measure_attention,
)
from cs336_systems.experiments.cells import Cell, Measurement, Row
from cs336_systems.experiments.model_cells import MODEL_MODES, measure_model, model_cell, time_row
from cs336_systems.experiments.s2_profiling import models

HANDOUT_PASSES = 100  # timed passes that the handout asks of pytorch_attention and torch_compile
PASSES_BEYOND = 20  # at the lengths that we add to its grid
LONGEST_OF_HANDOUT = 16384
# Where an 80 GB GPU runs out of memory an H200 does not, so the grid goes on until plain attention really fails.
PYTORCH_LENGTHS = {
    "tiny": (64, 128),
    "smoke": (128, 256, 512, 1024),
    "handout": (256, 1024, 4096, 8192, 16384, 32768, 65536),
}
HEAD_DIMS = {"tiny": (32,), "smoke": (32, 64), "handout": (16, 32, 64, 128)}


def pytorch_attention_cells(run: RunConfig) -> list[Cell]:
    """Plain attention, batch 8, one head, no mask, float32."""
    rows = (FORWARD, SAVED, BEFORE_BACKWARD, BACKWARD, PEAK)
    return [attention_cell(shape, "eager", run, rows) for shape in _pytorch_shapes(run)]


def torch_compile_cells(run: RunConfig) -> list[Cell]:
    """(a) the same attention, eager and compiled; (b) whole models, eager and compiled."""
    cells = [
        attention_cell(shape, implementation, run, (FORWARD, BACKWARD))
        for shape in _pytorch_shapes(run)
        for implementation in ("eager", "compiled")
        if implementation == "eager" or run.scale != "tiny"
    ]
    if run.scale == "tiny":
        return cells
    compile_rows = tuple(Row(mode=mode, quantity="compile_time", unit="s") for mode in MODEL_MODES[:2])
    times = tuple(time_row(mode) for mode in MODEL_MODES)
    for model, batch in models(run):
        if run.scale == "smoke":  # compiling takes a laptop longer the more blocks there are, and shows no more
            if not model.name.endswith("-proxy"):
                continue
            narrow = proxy_model("medium", 128)  # by a name of its own: other problems' proxy is wider and deeper
            model = replace(narrow, name="medium-2-layer-proxy", num_layers=2, context_length=model.context_length)
        case = ModelCase(model=model, batch=batch, attention="reference", warmup=1 if run.scale == "smoke" else 2)
        cells.append(model_cell("torch_compile", case, "eager", times))
        cells.append(model_cell("torch_compile", case, "compiled", compile_rows + times))
    return cells


def measure_section4(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    if isinstance(cell.case, ModelCase):
        yield from measure_model(cell, run)
        return
    shape: AttentionShape = cell.case
    passes = None
    if run.scale == "handout":
        passes = HANDOUT_PASSES if shape.seqlen_q <= LONGEST_OF_HANDOUT else PASSES_BEYOND
    yield from measure_attention(cell, run, num_samples=passes)


def _pytorch_shapes(run: RunConfig) -> list[AttentionShape]:
    return [
        _shape(8, seqlen, head_dim, False, "float32")
        for head_dim in HEAD_DIMS[run.scale]
        for seqlen in PYTORCH_LENGTHS[run.scale]
    ]


def _shape(batch: int, seqlen: int, head_dim: int, is_causal: bool, dtype: DTypeName) -> AttentionShape:
    return AttentionShape(
        batch=batch, heads=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, is_causal=is_causal, dtype=dtype
    )
