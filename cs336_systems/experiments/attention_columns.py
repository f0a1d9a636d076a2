"""What tables and figures of attention say of a case: its shape in words, its rate, and shapes by scale."""

from __future__ import annotations

import math
from typing import Any

from cs336_systems.accounting import attention_flops, tflops_per_s
from cs336_systems.config import AttentionShape, RunConfig

MODE_WORDS = {"forward": "forward", "backward": "backward", "forward_backward": "forward + backward"}


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


def attention_columns(row: dict[str, Any], shape: AttentionShape) -> dict[str, Any]:
    """`shape` in words, and `tflops` of a measured time in ms; NaN where nothing was timed."""
    heads = f"{shape.heads}/{shape.kv_heads}" if shape.kv_heads not in (None, shape.heads) else str(shape.heads)
    sizes = f"{shape.batch} × {heads} × {shape.seqlen_q:,} × {shape.head_dim}"
    if shape.seqlen_k != shape.seqlen_q:
        sizes = f"{shape.batch} × {heads} × {shape.seqlen_q:,} on {shape.seqlen_k:,} × {shape.head_dim}"
    columns = {"shape": f"{sizes} {'causal' if shape.is_causal else 'full'}", "tflops": math.nan}
    if row["quantity"] == "time" and row["median"] > 0:
        columns["tflops"] = tflops_per_s(attention_flops(shape, row["mode"]), row["median"])
    return columns
