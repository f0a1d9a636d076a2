"""Section 4, attention: `flash_benchmarking`."""

from __future__ import annotations

from collections.abc import Iterator

from cs336_systems.config import AttentionShape, DTypeName, RunConfig
from cs336_systems.experiments.attention import (
    BACKWARD,
    BOTH,
    FORWARD,
    PEAK,
    attention_cell,
    measure_attention,
)
from cs336_systems.experiments.cells import Cell, Measurement, Unsupported
from cs336_systems.experiments.implementations import IMPLEMENTATIONS

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
    shape: AttentionShape = cell.case
    if shape.dtype == "float32" and shape.seqlen_q > LONGEST_FLOAT32 and cell.implementation != "eager":
        raise Unsupported(f"float32 is measured up to {LONGEST_FLOAT32}; only eager goes on, to its out-of-memory")
    if cell.implementation == "triton" and run.device == "cpu" and shape.seqlen_q > LONGEST_INTERPRETED:
        raise Unsupported(f"the interpreter is run up to {LONGEST_INTERPRETED} tokens here")
    if run.scale == "smoke" and cell.implementation in RECOMPILED and shape.seqlen_q > LONGEST_RECOMPILED:
        raise Unsupported(f"it compiles anew for each length: up to {LONGEST_RECOMPILED} tokens at smoke scale")
    if run.scale == "smoke" and cell.implementation in (*RECOMPILED, "compiled") and shape.dtype != "float32":
        raise Unsupported("it compiles anew for each dtype: float32 alone at smoke scale")
    yield from measure_attention(cell, run)


def _shape(batch: int, seqlen: int, head_dim: int, is_causal: bool, dtype: DTypeName) -> AttentionShape:
    return AttentionShape(
        batch=batch, heads=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, is_causal=is_causal, dtype=dtype
    )
