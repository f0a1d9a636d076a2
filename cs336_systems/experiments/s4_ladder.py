"""Beyond the handout: `hopper_ladder`, what each technique of the attention kernels adds on a Hopper GPU.

Rung by rung, on the same inputs in one run: tiles read through pointers, tiles read by the copy engine (TMA), then the
Gluon kernels with warps that copy and warp groups that multiply; their forward alone, with the backward in two passes
that stays bit-reproducible, and with the backward of five matmuls. cuDNN is the mark to reach.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cs336_systems.attention import AttentionConfig, flash_attention, select_config
from cs336_systems.attention.backends import HOPPER_CAPABILITY, hopper_refusal
from cs336_systems.attention.tiles.config import KERNELS
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments.attention_cells import BACKWARD, BOTH, FORWARD, attention_cell, measure_attention
from cs336_systems.experiments.cells import Cell, Measurement, Unsupported
from cs336_systems.experiments.implementations import AttentionFunction, build, kernel_name
from cs336_systems.experiments.s4_shapes import sized_shape

PROBLEM = "hopper_ladder"
RUNGS = ("triton_pointers", "triton_tma", "hopper_deterministic", "hopper", "sdpa_cudnn")
SHAPES = {
    "tiny": ((1, 1, 64, 64, True),),
    "smoke": ((1, 1, 128, 64, True),),
    "handout": (
        (1, 16, 16384, 64, True),
        (1, 16, 16384, 64, False),
        (8, 16, 2048, 128, True),
        (1, 16, 16384, 128, True),
        (1, 16, 16384, 128, False),
    ),
}


def hopper_ladder_cells(run: RunConfig) -> list[Cell]:
    """Every rung on every shape."""
    rows = (FORWARD, BACKWARD, BOTH)
    return [
        attention_cell(PROBLEM, sized_shape(run, *sizes), rung, run, rows)
        for sizes in SHAPES[run.scale]
        for rung in RUNGS
    ]


def measure_hopper_ladder(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """Measure a rung, each pass checked against the oracle first."""
    return measure_attention(cell, run, settled=True, built=build_rung(cell.implementation, cell.case, run.device))


def build_rung(name: str, shape: AttentionShape, device: str) -> tuple[AttentionFunction, str]:
    """The rung `name` and the kernels it runs; `Unsupported` with the reason, ValueError for an unknown name."""
    if name not in RUNGS:
        raise ValueError(f"rung must be one of {', '.join(RUNGS)}, got {name!r}")
    if name == "hopper_deterministic":
        query = torch.empty((1, 1, 1, shape.head_dim), dtype=getattr(torch, shape.dtype), device=device)
        if (why := hopper_refusal(query)) is not None:
            raise Unsupported(why)
        forward = kernel_name("hopper", shape, device).split()[0]
        backward = kernel_name("triton", shape, device).split()[1:]
        return (
            lambda q, k, v: flash_attention(q, k, v, is_causal=shape.is_causal, backend="hopper", deterministic=True),
            " ".join((forward, *backward)),
        )
    if name.startswith("triton"):
        config = _triton_config(shape, device, tma=name == "triton_tma")
        kernel = config.names.replace(",", " ")
        return (
            lambda q, k, v: flash_attention(q, k, v, is_causal=shape.is_causal, backend="triton", config=config),
            kernel if device == "cuda" else f"interpreter {kernel}",
        )
    return build(name, shape, device), kernel_name(name, shape, device)


def _triton_config(shape: AttentionShape, device: str, *, tma: bool) -> AttentionConfig:
    """The table's tiles for inputs that TMA can read, or as if it could not."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    if tma and capability != HOPPER_CAPABILITY:
        raise Unsupported("the table reads tiles by TMA on GPUs of compute capability 9.0")
    return AttentionConfig(
        **{
            kernel: select_config(
                kernel,
                capability=capability,
                head_dim=shape.head_dim,
                batch=shape.batch,
                heads=shape.heads,
                seqlen_q=shape.seqlen_q,
                seqlen_k=shape.seqlen_k,
                dtype=shape.dtype,
                is_causal=shape.is_causal,
                tma=tma,
            )
            for kernel in KERNELS
        }
    )
