"""How figures look: one colour-blind-safe colour and one marker for each name, the same in every figure.

The colours are Okabe and Ito's and Tol's muted ones, told apart by marker too. Ours are drawn thick, peers thin.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from cs336_systems.report.frames import BASELINE, OUR_KERNELS, OURS

DPI = 130
LITERAL: dict[str, Any] = {"parse_math": False}  # for text from records: two "$" in an error message are no formula
TEXT_POINTS = 9  # small print: annotations, notes, legends
COLOURS = {
    # implementations
    BASELINE: "#000000",
    "compiled": "#8A8A8A",
    "tiled": "#56B4E9",
    "tiled_compiled": "#AA4499",
    OURS: "#D55E00",
    "triton_pointers": "#DDCC77",
    "triton_tma": "#D55E00",
    "hopper_deterministic": "#CC6677",
    "hopper": "#882255",
    "sdpa_flash": "#0072B2",
    "sdpa_cudnn": "#009E73",
    "sdpa_efficient": "#999933",
    "flex": "#E69F00",
    "triton_lists": "#882255",
    "sdpa_mask": "#DDCC77",
    "sdpa_padded": "#AA4499",
    "torch_varlen": "#332288",
    # modes
    "forward": "#66A9D8",
    "backward": "#CC6677",
    "forward_backward": "#0072B2",
    "train_step": "#332288",
    # data parallelism
    "naive": "#000000",
    "flat": "#8A8A8A",
    "overlap": "#56B4E9",
    "bucketed": "#D55E00",
    "torch DDP": "#0072B2",
    "torch DDP, gradients as views": "#AA4499",
    # collectives
    "nccl, 2 ranks": "#E69F00",
    "nccl, 4 ranks": "#D55E00",
    "nccl, 6 ranks": "#AA4499",
    "nccl, 8 ranks": "#882255",
    "gloo, 2 ranks": "#56B4E9",
    "gloo, 4 ranks": "#0072B2",
    "gloo, 6 ranks": "#44AA99",
    "gloo, 8 ranks": "#117733",
    # lanes of a timeline
    "compute": "#66A9D8",
    "communication": "#D55E00",
    # sharding
    "unsharded": "#000000",
    "sharded": "#56B4E9",
    "zero1": "#D55E00",
    "torch_zero": "#0072B2",
    "fsdp": "#D55E00",
    "fsdp_layer": "#E69F00",
    "torch_fsdp": "#0072B2",
    # what memory is for
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer_state": "#E69F00",
    "peak_memory": "#332288",
    "predicted_peak_memory": "#DDCC77",
    # memory
    "optimizer": "#AA3377",
    "activations": "#228833",
    "temporaries": "#EE6677",
    "simulated": "#BBBBBB",
    # precisions
    "float32": "#222222",
    "bfloat16 autocast": "#E69F00",
    "bfloat16": "#0072B2",
    # categories of kernels, and the parts of plain attention
    "gemm": "#0072B2",
    "attention": "#D55E00",
    "softmax": "#CC6677",
    "elementwise": "#DDAA33",
    "reduction": "#44AA99",
    "copy": "#999933",
    "other": "#8A8A8A",
    "attention_scores_time": "#0072B2",
    "attention_softmax_time": "#CC6677",
    "attention_softmax_kernel_time": "#DDAA33",
    "attention_values_time": "#66A9D8",
    # models, light to dark with their size
    "small": "#DDAA33",
    "medium": "#44AA99",
    "large": "#0072B2",
    "xl": "#882255",
    "10b": "#000000",
}
MARKERS = {
    **{f"{backend}, {ranks} ranks": mark for backend in ("nccl", "gloo") for ranks, mark in zip((2, 4, 6, 8), "os^D")},
    BASELINE: "o",
    "compiled": "s",
    "tiled": "v",
    "tiled_compiled": "^",
    OURS: "D",
    "hopper": "p",
    "sdpa_flash": "P",
    "sdpa_cudnn": "X",
    "sdpa_efficient": "h",
    "flex": "*",
    "triton_lists": "d",
    "sdpa_mask": "8",
    "sdpa_padded": "p",
    "torch_varlen": ">",
    "small": "o",
    "medium": "s",
    "large": "^",
    "xl": "D",
    "10b": "v",
}
OTHER_COLOURS = ("#CC6677", "#332288", "#44AA99", "#882255", "#DDCC77")
OTHER_MARKERS = ("<", ">", "p", "d", "8")


def colour(name: str) -> str:
    """The colour of implementation, mode or model `name`; of an unknown one by its hash, so that it is stable."""
    return COLOURS.get(_base(name), OTHER_COLOURS[crc32(name.encode()) % len(OTHER_COLOURS)])


def marker(name: str) -> str:
    return MARKERS.get(_base(name), OTHER_MARKERS[crc32(name.encode()) % len(OTHER_MARKERS)])


def line_width(name: str) -> float:
    return 2.6 if _base(name) in OUR_KERNELS else 1.4


def short_length(length: float) -> str:
    """A sequence length on an axis: 512, 2K, 128K (K = 1024)."""
    return f"{int(length) // 1024}K" if length >= 1024 and length % 1024 == 0 else f"{length:g}"


def _base(name: str) -> str:
    """`small-proxy` looks like `small`, `triton (interpreter)` like `triton`."""
    return name.split(" (")[0].removesuffix("-proxy")
