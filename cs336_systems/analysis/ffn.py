"""When DP, FSDP, TP and FSDP + TP are communication-bound, for one SwiGLU layer.

The problems are 8.2 to 8.5 of the 2026 handout. A layer has D × F matrices W1, W2 and an F × D
matrix W3 and works on B tokens, all in two bytes an element. C is a device's FLOP/s, W its outgoing
bytes per second. Only matmuls count, rings are ideal, and communication is hidden behind
computation until it takes longer. Forward is three matmuls, 6·B·D·F FLOPs; backward six.

    layer = FeedForward(tokens=65_536, d_model=4096, d_ff=11_008)
    fsdp_limit(layer, flops_per_s=989.5e12, bytes_per_s=450e9)    # most devices for FSDP

A `mode` is "forward" or "backward". A limit is a real number: the largest number N of devices for
which communication is hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cs336_systems.analysis.rings import all_gather_seconds, all_reduce_seconds
from cs336_systems.config import require_positive

ELEMENT_BYTES = 2
NUM_MATRICES = 3
MATMULS = {"forward": 3, "backward": 6}


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """One SwiGLU layer and its batch of tokens."""

    tokens: int  # B: of the whole batch, over all devices
    d_model: int  # D
    d_ff: int  # F

    def __post_init__(self) -> None:
        require_positive(self, ["tokens", "d_model", "d_ff"])

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the three matrices: 6·D·F."""
        return NUM_MATRICES * ELEMENT_BYTES * self.d_model * self.d_ff

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of the input, the output, or the gradient of either: 2·B·D."""
        return ELEMENT_BYTES * self.tokens * self.d_model


def ffn_flops(layer: FeedForward, mode: str, num_devices: int = 1) -> float:
    """Return the FLOPs of one device: 6·B·D·F/N forward, 12·B·D·F/N backward.

    Every scheme divides them evenly: DP and FSDP the batch, TP the hidden dimension, FSDP + TP
    both.
    """
    return 2 * MATMULS[mode] * layer.tokens * layer.d_model * layer.d_ff / num_devices


# One axis


def data_parallel_seconds(layer: FeedForward, num_devices: int, *, bytes_per_s: float) -> float:
    """Return the seconds of DP's backward all-reduce of three gradients: 12·D·F·(N - 1)/(N·W).

    The forward communicates nothing.
    """
    return all_reduce_seconds(layer.weight_bytes, num_devices, bytes_per_s)


def data_parallel_limit(layer: FeedForward, *, flops_per_s: float, bytes_per_s: float) -> float:
    """Return the most devices for which DP is not communication-bound: N ≤ 1 + B·W/C.

    From 12·D·F·(N - 1)/(N·W) ≤ 12·B·D·F/(N·C): B/N tokens a device must not fall below about C/W.
    """
    return 1 + layer.tokens * bytes_per_s / flops_per_s


def fsdp_seconds(layer: FeedForward, mode: str, num_devices: int, *, bytes_per_s: float) -> float:
    """Return the seconds that FSDP's collectives of `mode` take.

    Forward: all-gather of the weights, 6·D·F·(N - 1)/(N·W). Backward: the same all-gather, and the
    reduce-scatter of gradients, which takes as long.
    """
    collectives = 1 if mode == "forward" else 2
    return collectives * all_gather_seconds(layer.weight_bytes, num_devices, bytes_per_s)


def fsdp_limit(
    layer: FeedForward, mode: str = "backward", *, flops_per_s: float, bytes_per_s: float
) -> float:
    """Return the most devices for which FSDP is not communication-bound: N ≤ 1 + B·W/C.

    The limit is DP's, in both modes: the backward has twice the communication and twice the FLOPs.
    """
    return 1 + layer.tokens * bytes_per_s / flops_per_s


def tp_seconds(layer: FeedForward, mode: str, num_devices: int, *, bytes_per_s: float) -> float:
    """Return the seconds of TP's all-reduce of (B, D) in either mode: 4·B·D·(N - 1)/(N·W).

    The forward reduces y, the backward dx.
    """
    return all_reduce_seconds(layer.activation_bytes, num_devices, bytes_per_s)


def tp_limit(layer: FeedForward, mode: str, *, flops_per_s: float, bytes_per_s: float) -> float:
    """Return the most devices for which TP is not communication-bound.

    N ≤ 1 + 3·F·W/(2·C) forward, N ≤ 1 + 3·F·W/C backward, whatever the batch: only a wider layer
    helps.
    """
    return 1 + MATMULS[mode] / 2 * layer.d_ff * bytes_per_s / flops_per_s


# Two axes, forward


def fsdp_tp_seconds(
    layer: FeedForward, num_fsdp: int, num_tp: int, *, bytes_per_s: float, overlap: bool = True
) -> float:
    """Return the seconds of the forward's communication on a grid of num_fsdp × num_tp devices.

    That is the larger of the two axes' times, or their sum without `overlap`, if they share the
    network. FSDP gathers a TP rank's 1/N_TP of the weights: 6·D·F·(N_FSDP - 1)/(N_FSDP·N_TP·W). TP
    all-reduces an FSDP rank's share of the batch: 4·B·D·(N_TP - 1)/(N_FSDP·N_TP·W).
    """
    fsdp = all_gather_seconds(layer.weight_bytes / num_tp, num_fsdp, bytes_per_s)
    tp = all_reduce_seconds(layer.activation_bytes / num_fsdp, num_tp, bytes_per_s)
    return max(fsdp, tp) if overlap else fsdp + tp


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Number of devices on each axis; not rounded to whole devices."""

    fsdp: float
    tp: float

    @property
    def devices(self) -> float:
        """Return the number of devices on both axes together."""
        return self.fsdp * self.tp


def fsdp_tp_limit(
    layer: FeedForward, *, flops_per_s: float, bytes_per_s: float, overlap: bool = True
) -> Grid:
    """Return the grid with the most devices whose forward is not communication-bound.

    Let a = B·W/C and b = 3·F·W/(2·C). With overlap each axis has its own limit, N_FSDP ≤ 1 + a and
    N_TP ≤ 1 + b, so N ≤ (1 + a)(1 + b). Without, the two share one budget,

        (N_FSDP - 1)/a + (N_TP - 1)/b ≤ 1,

    a line on which the product is largest where both axes take half of K = 1 + 1/a + 1/b:
    N_FSDP = a·K/2, N_TP = b·K/2, N ≤ a·b·K²/4 = (a·b + a + b)²/(4·a·b), about a quarter of the
    devices. If that point has less than one device on an axis (a small batch, a narrow layer), the
    axis is not used.
    """
    a = layer.tokens * bytes_per_s / flops_per_s
    b = 1.5 * layer.d_ff * bytes_per_s / flops_per_s
    if overlap:
        return Grid(fsdp=1 + a, tp=1 + b)
    budget = 1 + 1 / a + 1 / b
    fsdp = min(max(a * budget / 2, 1.0), 1 + a)  # the ends of the line: no FSDP, no TP
    return Grid(fsdp=fsdp, tp=1 + b * (1 - (fsdp - 1) / a))


def best_integer_grid(
    layer: FeedForward, *, flops_per_s: float, bytes_per_s: float, overlap: bool = True
) -> tuple[int, int]:
    """Return (N_FSDP, N_TP) with the most devices in whole numbers, by search over N_TP.

    Of equal grids it is the one with fewer TP devices.
    """
    a = layer.tokens * bytes_per_s / flops_per_s
    b = 1.5 * layer.d_ff * bytes_per_s / flops_per_s
    grids = []
    for num_tp in range(1, math.floor(1 + b) + 1):
        share = 1.0 if overlap else 1 - (num_tp - 1) / b
        grids.append((math.floor(1 + a * share), num_tp))
    return max(grids, key=lambda grid: (grid[0] * grid[1], -grid[1]))
