"""The feed-forward layer split over simulated devices: the equations of `ffn`, run and counted.

A grid of N_FSDP × N_TP devices in one process, which exchange data by the rings of `rings` only.
N_TP = 1 is FSDP, N_FSDP = 1 is tensor parallelism. Device (i, j), TP rank i and FSDP rank j, holds
W1, W2 shards of (D/N_FSDP, F/N_TP) and a W3 shard of (F/N_TP, D/N_FSDP). A test compares results
with autograd and counts with the closed forms.

The backward that the handout asks for (`tp_calcs`), for TP rank i with dy known to all:

    dz_i  = dy W3_iᵀ                dW3_i = z_iᵀ dy
    dx2_i = dz_i ∘ f(x1_i)          dW2_i = xᵀ dx2_i
    dx1_i = dz_i ∘ f'(x1_i) ∘ x2_i  dW1_i = xᵀ dx1_i
    dx    = all-reduce over i of (dx1_i W1_iᵀ + dx2_i W2_iᵀ)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.analysis.ffn import ELEMENT_BYTES
from cs336_systems.analysis.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter

FSDP_DIMS = {"w1": 0, "w2": 0, "w3": 1}  # dimension that FSDP cuts; TP cuts the other one


class Weights(NamedTuple):
    """Three matrices: the layer's weights or their gradients."""

    w1: Float[Tensor, "d_model d_ff"]
    w2: Float[Tensor, "d_model d_ff"]
    w3: Float[Tensor, "d_ff d_model"]


class Pass:
    """One pass on a grid of devices: its operations, and the FLOPs and bytes of one device.

    All devices do the same amount of work.
    """

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        # FLOPs of one device, and bytes that it sends along an axis, two an element
        self.flops = self.fsdp_bytes = self.tp_bytes = 0.0

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Return `left @ right`, one device's product, and count its FLOPs."""
        self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1] / self.num_devices
        return left @ right

    def gather(self, shards: list[Weights]) -> Weights:
        """Return a TP rank's whole matrices, by an all-gather of each over its FSDP ranks."""
        matrices = []
        for name, dim in FSDP_DIMS.items():
            parts = [getattr(shard, name) for shard in shards]
            # one element of the ring is a whole shard
            results, traffic = ring_all_gather([[part] for part in parts])
            matrices.append(torch.cat(results[0], dim))
            self.fsdp_bytes += (
                ELEMENT_BYTES * parts[0].numel() * sum(traffic.sent) / self.num_devices
            )
        return Weights(*matrices)

    def reduce_scatter(self, gradients: list[Weights]) -> list[Weights]:
        """Return FSDP rank j's shard of each summed gradient, for every j, by reduce-scatters."""
        kept = []
        for name, dim in FSDP_DIMS.items():
            parts = [getattr(one, name).chunk(len(gradients), dim) for one in gradients]
            results, traffic = ring_reduce_scatter(parts)
            kept.append([shard for (shard,) in results])
            self.fsdp_bytes += (
                ELEMENT_BYTES * parts[0][0].numel() * sum(traffic.sent) / self.num_devices
            )
        return [Weights(*one) for one in zip(*kept)]

    def all_reduce(self, parts: list[Tensor]) -> Tensor:
        """Return the sum of `parts` over the TP ranks, by an all-reduce whose elements are rows."""
        results, traffic = ring_all_reduce([list(part) for part in parts])
        self.tp_bytes += ELEMENT_BYTES * parts[0].shape[1] * sum(traffic.sent) / self.num_devices
        return torch.stack(results[0])


class Simulation(NamedTuple):
    """Whole results, joined from the devices', and the counts of one device by mode."""

    y: Tensor
    dx: Tensor
    gradients: Weights
    counts: dict[str, Pass]


def simulate(
    weights: Weights,
    x: Float[Tensor, "batch d_model"],
    dy: Float[Tensor, "batch d_model"],
    *,
    num_fsdp: int = 1,
    num_tp: int = 1,
) -> Simulation:
    """Return outputs and gradients of the layer with f = SiLU, computed on a grid, and the counts.

    Raises ValueError unless num_fsdp divides batch and d_model, and num_tp divides d_ff.
    """
    (batch, d_model), d_ff = x.shape, weights.w1.shape[1]
    for name, devices, sizes in (
        ("num_fsdp", num_fsdp, (batch, d_model)),
        ("num_tp", num_tp, (d_ff,)),
    ):
        if devices < 1 or any(size % devices for size in sizes):
            raise ValueError(f"{name} must divide {' and '.join(map(str, sizes))}, got {devices}")
    forward, backward = (Pass(num_fsdp * num_tp) for _ in range(2))
    shards = _shard(weights, num_fsdp, num_tp)
    xs, dys = x.chunk(num_fsdp), dy.chunk(num_fsdp)  # of FSDP rank j

    # Forward
    full = [forward.gather(shards[i]) for i in range(num_tp)]  # of TP rank i
    saved, ys = [], []
    for j in range(num_fsdp):
        partial = []
        for i in range(num_tp):
            x1, x2 = (forward.matmul(xs[j], matrix) for matrix in (full[i].w1, full[i].w2))
            z = torch.nn.functional.silu(x1) * x2
            saved.append((x1, x2, z))
            partial.append(forward.matmul(z, full[i].w3))
        ys.append(forward.all_reduce(partial))

    # Backward
    full = [backward.gather(shards[i]) for i in range(num_tp)]
    # [i][j]: gradients of a TP rank's matrices
    local: list[list[Weights]] = [[] for _ in range(num_tp)]
    dxs = []
    for j in range(num_fsdp):
        partial = []
        for i in range(num_tp):
            x1, x2, z = saved[j * num_tp + i]
            w1, w2, w3 = full[i]
            dz = backward.matmul(dys[j], w3.T)
            sigmoid = torch.sigmoid(x1)
            dx2 = dz * x1 * sigmoid
            dx1 = dz * (sigmoid + x1 * sigmoid * (1 - sigmoid)) * x2
            partial.append(backward.matmul(dx1, w1.T) + backward.matmul(dx2, w2.T))
            dw1, dw2 = (backward.matmul(xs[j].T, gradient) for gradient in (dx1, dx2))
            local[i].append(Weights(dw1, dw2, backward.matmul(z.T, dys[j])))
        dxs.append(backward.all_reduce(partial))
    reduced = [backward.reduce_scatter(local[i]) for i in range(num_tp)]
    counts = {"forward": forward, "backward": backward}
    return Simulation(
        y=torch.cat(ys), dx=torch.cat(dxs), gradients=_unshard(reduced), counts=counts
    )


def _shard(weights: Weights, num_fsdp: int, num_tp: int) -> list[list[Weights]]:
    """Return the shard of TP rank i and FSDP rank j as [i][j].

    TP cuts W1 and W2 in columns and FSDP in rows; W3 is cut the other way round.
    """

    shards = {
        name: [part.chunk(num_fsdp, dim) for part in getattr(weights, name).chunk(num_tp, 1 - dim)]
        for name, dim in FSDP_DIMS.items()
    }
    return [
        [Weights(*(shards[name][i][j] for name in FSDP_DIMS)) for j in range(num_fsdp)]
        for i in range(num_tp)
    ]


def _unshard(shards: list[list[Weights]]) -> Weights:
    """Return the whole matrices of shards [i][j], the inverse of `_shard`."""

    def join(name: str, dim: int) -> Tensor:
        return torch.cat(
            [torch.cat([getattr(shard, name) for shard in row], dim) for row in shards], 1 - dim
        )

    return Weights(*(join(name, dim) for name, dim in FSDP_DIMS.items()))
