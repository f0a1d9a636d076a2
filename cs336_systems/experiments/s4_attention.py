"""Section 4, attention: `pytorch_attention`, `torch_compile` and `flash_benchmarking`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cs336_systems.config import AttentionShape, DTypeName, ModelCase, RunConfig, proxy_model
from cs336_systems.experiments.attention import (
    BACKWARD,
    BEFORE_BACKWARD,
    BOTH,
    FORWARD,
    PEAK,
    SAVED,
    attention_cell,
    measure_attention,
)
from cs336_systems.experiments.cells import Cell, Measurement, Row, Unsupported
from cs336_systems.experiments.implementations import IMPLEMENTATIONS
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
FLASH_LENGTHS = {
    "tiny": (64, 128),
    "smoke": (128, 256, 512, 1024),
    "handout": (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
}
HEAD_DIMS = {"tiny": (32,), "smoke": (32, 64), "handout": (16, 32, 64, 128)}
LONGEST_FLOAT32 = 65536
LONGEST_INTERPRETED = 256  # tests go further; a time in the interpreter says nothing, and quadruples with the length
LONGEST_RECOMPILED = 128  # at smoke scale, for RECOMPILED: half of the problem's time on a laptop
RECOMPILED = ("tiled_compiled", "flex")  # compile anew for nearly every length, on a CPU for many seconds
TINY_IMPLEMENTATIONS = ("eager", "tiled", "triton", "sdpa_flash", "sdpa_cudnn")


def dtypes(run: RunConfig) -> tuple[DTypeName, ...]:
    """bfloat16 and float32 on a GPU; on CPU float16 stands in, as the interpreter cannot multiply bfloat16."""
    if run.scale == "tiny":
        return ("float32",)
    return ("bfloat16", "float32") if run.device == "cuda" else ("float16", "float32")


def dtypes_and_dims(run: RunConfig) -> list[tuple[DTypeName, int]]:
    """Every dtype with every head dim; at smoke scale each dtype with one, which still shows both axes."""
    dims = HEAD_DIMS[run.scale]
    if run.scale == "smoke":
        return list(zip(dtypes(run), dims, strict=True))
    return [(dtype, head_dim) for dtype in dtypes(run) for head_dim in dims]


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


def flash_benchmarking_cells(run: RunConfig) -> list[Cell]:
    """Every implementation, batch 1, one head, causal; the implementations of a shape follow one another."""
    implementations = TINY_IMPLEMENTATIONS if run.scale == "tiny" else IMPLEMENTATIONS
    return [
        attention_cell(shape, implementation, run, (FORWARD, BACKWARD, BOTH, PEAK))
        for dtype, head_dim in dtypes_and_dims(run)
        for seqlen in FLASH_LENGTHS[run.scale]
        for shape in [_shape(1, seqlen, head_dim, True, dtype)]
        for implementation in implementations
    ]


def measure_section4(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    if isinstance(cell.case, ModelCase):
        yield from measure_model(cell, run)
        return
    shape: AttentionShape = cell.case
    if shape.dtype == "float32" and shape.seqlen_q > LONGEST_FLOAT32 and cell.implementation != "eager":
        raise Unsupported(f"float32 is measured up to {LONGEST_FLOAT32}; only eager goes on, to its out-of-memory")
    if cell.implementation == "triton" and run.device == "cpu" and shape.seqlen_q > LONGEST_INTERPRETED:
        raise Unsupported(f"the interpreter is run up to {LONGEST_INTERPRETED} tokens here")
    if run.scale == "smoke" and cell.implementation in RECOMPILED and shape.seqlen_q > LONGEST_RECOMPILED:
        raise Unsupported(f"it compiles anew for each length: up to {LONGEST_RECOMPILED} tokens at smoke scale")
    if run.scale == "smoke" and cell.implementation in (*RECOMPILED, "compiled") and shape.dtype != "float32":
        raise Unsupported("it compiles anew for each dtype: float32 alone at smoke scale")
    passes = None
    if run.scale == "handout" and cell.problem != "flash_benchmarking":
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
