"""`communication_accounting` of the 2025 handout: memory and batch of a model of 220 billion.

The model, XXL, is 126 blocks of two linear layers, 16384 → 53248 → 16384, and nothing else: 220
billion parameters. Master weights, gradients and AdamW's two moments are float32, activations
bfloat16 and never recomputed. The handout names no batch: what depends on it is a function of
`tokens`. The batch is for TPU v5p, in the notation of the TPU Scaling Book.

    fixed_bytes(XXL) / 80e9                # H100s for weights, gradients and optimizer state
    smallest_batch_per_device(XXL, V5P)    # tokens a device for a compute-bound forward
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
FIXED_TENSORS = 4  # master weights, gradients, two moments
H100_BYTES = 80 * 10**9
V5P_BYTES = 95 * 10**9


@dataclass(frozen=True, kw_only=True)
class TwoLayerModel:
    """`num_blocks` blocks of two linear layers, d_model → d_ff → d_model, without biases."""

    d_model: int
    d_ff: int
    num_blocks: int

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return 2 * self.d_model * self.d_ff * self.num_blocks


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A slice of a TPU pod: its speed and how its devices divide the work."""

    flops_per_s: float  # C of one device
    link_bytes_per_s: float  # W_ici of one axis, both directions
    fsdp: int  # X: devices along the batch
    tp: int  # Y: devices along the hidden dimension
    fsdp_axes: int  # M_X: axes of the mesh that carry FSDP's traffic
    tp_axes: int  # M_Y

    @property
    def devices(self) -> int:
        """Return the number of devices, X·Y."""
        return self.fsdp * self.tp


XXL = TwoLayerModel(d_model=16_384, d_ff=53_248, num_blocks=126)
V5P = Mesh(flops_per_s=4.6e14, link_bytes_per_s=2 * 9e10, fsdp=16, tp=4, fsdp_axes=2, tp_axes=1)


# (a) and (b): memory


def fixed_bytes(model: TwoLayerModel) -> int:
    """Return the bytes of master weights, gradients and two moments in float32: 16 a parameter."""
    return FIXED_TENSORS * FLOAT32_BYTES * model.parameters


def saved_bytes(model: TwoLayerModel, tokens: int) -> int:
    """Return the bytes saved for backward in bfloat16: the input of each linear layer.

    They are 2·(d_model + d_ff) for each token and block.
    """
    return BFLOAT16_BYTES * tokens * (model.d_model + model.d_ff) * model.num_blocks


def bytes_per_device(model: TwoLayerModel, tokens: int, num_fsdp: int) -> float:
    """Return the bytes of each of N = `num_fsdp` devices: (16·P + A/2)/N + A/2.

    P is the number of parameters, A is `saved_bytes` of `tokens`. Everything is sharded but every
    second layer's activations, of which each device has its own.
    """
    half = saved_bytes(model, tokens) / 2
    return (fixed_bytes(model) + half) / num_fsdp + half


def fewest_devices(model: TwoLayerModel, tokens: int) -> int:
    """Return the least N_FSDP whose `bytes_per_device` is below a TPU v5p's memory.

    Raises ValueError if the half of the activations that is not sharded leaves no room at all.
    """
    half = saved_bytes(model, tokens) / 2
    if half >= V5P_BYTES:
        raise ValueError(
            f"tokens must leave room in {V5P_BYTES:g} bytes, "
            f"got {tokens} with {half:g} bytes not sharded"
        )
    return math.floor((fixed_bytes(model) + half) / (V5P_BYTES - half)) + 1


# (c): batch


def smallest_batch_per_device(model: TwoLayerModel, mesh: Mesh, *, overlap: bool = True) -> float:
    """Return the fewest tokens a device, B/N, for which the forward is compute-bound.

    A block's forward computes for 4·B·D·F/(N·C), gathers a TP rank's share of two bfloat16 matrices
    in 4·D·F/(Y·W·M_X) and gathers and reduces an FSDP rank's tokens in 4·B·D/(X·W·M_Y). TP's
    condition does not depend on the batch: F/Y ≥ α/M_Y, with α = C/W. FSDP's is B/N ≥ α/(M_X·Y). If
    the axes' collectives cannot be overlapped, FSDP has what TP leaves, a share 1 - α·Y/(M_Y·F) of
    the time. Raises ValueError if no batch is large enough.
    """
    alpha = mesh.flops_per_s / mesh.link_bytes_per_s
    tp_share = alpha * mesh.tp / (mesh.tp_axes * model.d_ff)
    if tp_share >= 1:
        raise ValueError(
            f"mesh.tp must be below {mesh.tp_axes * model.d_ff / alpha:.4g} "
            f"for tensor parallelism to be compute-bound, got {mesh.tp}"
        )
    return alpha / (mesh.fsdp_axes * mesh.tp) / (1.0 if overlap else 1 - tp_share)
