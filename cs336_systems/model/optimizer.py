"""AdamW with a bounded working set, and gradient clipping.

optimizer = AdamW(model.parameters(), lr=3e-4)
clip_gradients(model.parameters(), max_norm=1.0)
optimizer.step()
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor

TEMPORARY_BYTES = 256 * 2**20  # largest temporary of a step, unless one parameter alone is larger


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) in the 2026 edition's order.

    At step t, with gradient g:

        p ← p · (1 − lr · weight_decay)
        m ← β1 · m + (1 − β1) · g
        v ← β2 · v + (1 − β2) · g²
        p ← p − lr · sqrt(1 − β2^t) / (1 − β1^t) · m / (sqrt(v) + eps)

    eps stands outside the bias correction, where torch.optim.AdamW adds eps · sqrt(1 − β2^t).
    State of a parameter: "step" (int), "exp_avg" and "exp_avg_sq" (its own dtype and device).
    Everything is updated in place; the only temporary is sqrt(v), in batches of at most
    `TEMPORARY_BYTES`, so that a step needs little more memory than parameters, gradients and state.
    A hyper-parameter may be a scalar tensor, whose value is read at each step (on a GPU, a
    synchronisation), and a state dict of torch.optim.AdamW can be loaded.

    Raises ValueError on hyper-parameters out of range, and on parameters that are not real floating
    point or have sparse gradients; the latter before anything is updated.
    """

    def __init__(
        self,
        params: Any,  # what torch.optim takes: tensors, (name, tensor) pairs, or dicts of groups
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose own hyper-parameters replace the defaults."""
        _validate_hyperparameters({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, run first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Group what one multi-tensor call may update; change nothing before all are checked.
        together: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not parameter.is_floating_point() or parameter.grad.layout != torch.strided:
                    raise ValueError(
                        f"params must be floating point with dense gradients, "
                        f"got {parameter.dtype} of shape {tuple(parameter.shape)}"
                    )
                # int: a step in a state dict of torch.optim.AdamW is a tensor
                step = int(self.state.get(parameter, {}).get("step", 0)) + 1
                together[number, parameter.device, parameter.dtype, step].append(parameter)
        for (number, _, _, step), parameters in together.items():
            for batch in _batches(parameters, TEMPORARY_BYTES):
                self._update(batch, step, self.param_groups[number])
        return loss

    def _update(self, parameters: list[Tensor], step: int, group: dict[str, Any]) -> None:
        """Update `parameters`, all of them at step `step`, with the hyper-parameters of `group`."""
        # float: multi-tensor calls take a tensor as one factor for each parameter, or not at all.
        lr, weight_decay, eps = (float(group[name]) for name in ("lr", "weight_decay", "eps"))
        beta1, beta2 = (float(beta) for beta in group["betas"])

        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["step"] = step

        # no gradient is None: `step` skips such parameters
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        exp_avgs = [self.state[parameter]["exp_avg"] for parameter in parameters]
        exp_avg_sqs = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]

        if weight_decay != 0:
            torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(denominators, eps)
        step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        torch._foreach_addcdiv_(parameters, exp_avgs, denominators, -step_size)


def clip_gradients(
    parameters: Tensor | Iterable[Tensor], max_norm: float, eps: float = 1e-6
) -> Tensor:
    """Scale all gradients in place to a norm of at most `max_norm`, and return the norm before.

    The factor is `min(1, max_norm / (norm + eps))`. `norm`, a scalar tensor, is the 2-norm of all
    gradients taken as one vector: accumulated in float64, so that squares of float32 do not
    overflow, and returned in float32 at least. No host synchronisation. Parameters without a
    gradient are skipped; without any, the norm is 0. If the accumulated norm is not finite, since a
    gradient is not (or float64 gradients exceed 1e154), every gradient becomes NaN: a step with
    them cannot pass for a clipped one.

    Raises ValueError if max_norm is not positive, and TypeError, before any is scaled, on gradients
    that are sparse or not real floating point.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    by_device = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.layout != torch.strided or not parameter.grad.is_floating_point():
                raise TypeError(
                    f"parameters must have dense floating-point gradients, "
                    f"got {parameter.grad.layout} {parameter.grad.dtype} "
                    f"of shape {tuple(parameter.grad.shape)}"
                )
            by_device[parameter.grad.device].append(parameter.grad.detach())
    if not by_device:
        return torch.zeros(())

    gradients = [gradient for group in by_device.values() for gradient in group]
    dtype = reduce(torch.promote_types, (gradient.dtype for gradient in gradients), torch.float32)
    first_device = gradients[0].device
    norms = [
        norm.to(first_device)
        for group in by_device.values()
        for norm in torch._foreach_norm(group, 2, torch.float64)
    ]
    total_norm = torch.linalg.vector_norm(torch.stack(norms))

    # NaN if the norm is not finite: an infinite one would make the scale and all gradients 0.
    scale = (max_norm / (total_norm + eps)).clamp(max=1.0).where(total_norm.isfinite(), math.nan)
    for device, group in by_device.items():
        torch._foreach_mul_(group, scale.to(device, dtype))
    return total_norm.to(dtype)


def _validate_hyperparameters(group: dict[str, Any]) -> None:
    """Raise ValueError naming the first hyper-parameter of `group` that is out of range."""
    for name, minimum in (
        ("lr", "non-negative"),
        ("weight_decay", "non-negative"),
        ("eps", "positive"),
    ):
        value = group[name]
        if not math.isfinite(value) or value < 0 or (value == 0 and minimum == "positive"):
            raise ValueError(f"{name} must be finite and {minimum}, got {value}")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")


def _batches(tensors: list[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Yield `tensors` in order, in lists of at most `max_bytes`; a larger tensor stands alone."""
    batch: list[Tensor] = []
    batch_bytes = 0
    for tensor in tensors:
        if batch and batch_bytes + tensor.nbytes > max_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(tensor)
        batch_bytes += tensor.nbytes
    if batch:
        yield batch
