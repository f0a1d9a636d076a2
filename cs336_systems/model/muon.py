"""Muon: momentum whose matrices are orthogonalized before they are added to the weights.

    optimizer = Muon(muon_groups(model), lr=1e-3)     # AdamW for all but the blocks' matrices

An elementwise optimizer can be cut anywhere. Muon cannot: each element of the update depends on the
whole matrix. `ShardedOptimizer` gives whole matrices to ranks, and `distributed/sharded_muon.py` gathers
FSDP's rows for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cs336_systems.model.optimizer import AdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, of the steepest quintic at 0
# An orthogonal m x n matrix has elements of about 1/sqrt(max(m, n)); AdamW's updates about this.
ADAMW_RMS = 0.2


def newton_schulz(matrix: Float[Tensor, "m n"], steps: int = 5) -> Float[Tensor, "m n"]:
    """Return nearly U Vᵀ of the `matrix` U S Vᵀ, in its dtype: singular values from 0.7 to 1.2.

    Each step is a X + (b XXᵀ + c (XXᵀ)²) X, from X = matrix / |matrix|, on the side of the smaller
    dimension (Jordan et al. 2024, kellerjordan.github.io/posts/muon).
    """
    a, b, c = COEFFICIENTS
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Return the FLOPs of `newton_schulz`: a step has three products of the smaller dimension m.

    Two are m x n x m, one is m x m x m, two FLOPs each.
    """
    small, large = sorted((rows, columns))
    return steps * (2 * 2 * small * small * large + 2 * small**3)


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: matrices in the blocks (members of ModuleLists), and all else for AdamW.

    Embedding and head are in the second, as Muon's authors found better.
    """
    blocks = {
        parameter
        for inner in model.modules()
        if isinstance(inner, nn.ModuleList)
        for parameter in inner.parameters()
    }
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.ndim == 2 and parameter in blocks].append(parameter)
    return [{"params": some, "use_muon": use} for use, some in groups.items()]


class Muon(AdamW):
    """Muon for matrices, and AdamW for groups with `use_muon=False`, at one learning rate.

    At a step, with gradient g of an m x n matrix:

        b ← momentum · b + (1 − momentum) · g
        u = (1 − momentum) · g + momentum · b                       (Nesterov)
        p ← p · (1 − lr · weight_decay) − lr · 0.2 · sqrt(max(m, n)) · newton_schulz(u)

    The factor gives updates of AdamW's size (Liu et al., arXiv:2502.16982). State of a matrix:
    "momentum_buffer" and "step". `ns_dtype` is the dtype in which matrices are orthogonalized.
    Raises ValueError for parameters that are no matrices, and as `AdamW` does.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        ns_steps: int = 5,
        ns_dtype: str = "bfloat16",
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        settings = {"momentum": momentum, "ns_steps": ns_steps, "ns_dtype": ns_dtype}
        settings |= {"use_muon": use_muon, "lr": lr, "betas": betas, "eps": eps}
        self._matrices: list[tuple[Tensor, dict[str, Any]]] = []
        torch.optim.Optimizer.__init__(self, params, {**settings, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose hyper-parameters replace the defaults."""
        settings = {**self.defaults, **param_group}
        if not 0 <= settings["momentum"] < 1:
            raise ValueError(f"momentum must be in [0, 1), got {settings['momentum']}")
        super().add_param_group(param_group)
        if settings["use_muon"]:
            for parameter in self.param_groups[-1]["params"]:
                if parameter.ndim != 2:
                    shape = tuple(parameter.shape)
                    raise ValueError(f"params must be matrices for use_muon, got shape {shape}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, run first, returns."""
        self._matrices.clear()
        loss = super().step(closure)  # calls `_update`
        updates = [self._momentum_of(matrix, group) for matrix, group in self._matrices]
        for (matrix, group), update in zip(self._matrices, self.orthogonalize(updates)):
            lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
            matrix.mul_(1 - lr * weight_decay)
            factor = ADAMW_RMS * math.sqrt(max(self.whole_shape(matrix)))
            matrix.add_(update.to(matrix.dtype), alpha=-lr * factor)
        return loss

    def _update(self, parameters: list[Tensor], step: int, group: dict[str, Any]) -> None:
        """Update `parameters` as AdamW does, or put the matrices of Muon aside."""
        if not group["use_muon"]:
            super()._update(parameters, step, group)
            return
        for matrix in parameters:
            self.state[matrix]["step"] = step
            self._matrices.append((matrix, group))

    def _momentum_of(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum of `matrix`, and return u, in `ns_dtype`."""
        momentum, state, gradient = float(group["momentum"]), self.state[matrix], matrix.grad
        assert gradient is not None  # AdamW's step leaves others out
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum).to(getattr(torch, group["ns_dtype"]))

    def orthogonalize(self, updates: list[Tensor]) -> list[Tensor]:
        """Return `newton_schulz` of each of `updates`, which are those of `_matrices`."""
        return [
            newton_schulz(update, group["ns_steps"])
            for update, (_, group) in zip(updates, self._matrices)
        ]

    def whole_shape(self, matrix: Tensor) -> torch.Size:
        """Return the shape of the whole matrix that a parameter stands for."""
        return matrix.shape
