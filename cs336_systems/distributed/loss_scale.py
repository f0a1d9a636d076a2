"""A loss scale for float16, with one decision for all ranks: a step that overflows on one of them is skipped by all.

    scaler = LossScaler()
    scaler.scale(loss).backward()
    model.finish_gradient_synchronization()
    if scaler.unscale(optimizer):           # the same answer on every rank
        model.clip_grad_norm_(1.0)
        optimizer.step()

float16 has no numbers below 6e-8, so small gradients vanish unless the loss, and with it every gradient, is multiplied
by a large number first (Micikevicius et al., arXiv:1710.03740). Too large a one overflows: then the step is skipped and
the scale halved; after many good steps it is doubled. torch.amp.GradScaler looks at this rank's gradients only. Under
data parallelism they are equal; of shards each rank would decide for itself, and the ranks part for good.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.collectives import rank_in
from cs336_systems.distributed.zero1 import Zero1Optimizer


class LossScaler:
    """The scale in `value`, a power of two, and how many steps it has been good for.

    `process_group` are the ranks that decide together: None for all, or for this process where there is no group.
    Raises ValueError for a scale that is not positive and finite, an interval below 1, and on a rank that is not of the
    group.
    """

    def __init__(
        self, value: float = 2.0**16, *, growth_interval: int = 2000, process_group: dist.ProcessGroup | None = None
    ) -> None:
        _check_scale(value)
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {growth_interval!r}")
        if dist.is_initialized():
            rank_in(process_group)
        self.value = value
        self.growth_interval = growth_interval
        self.process_group = process_group
        self.good_steps = 0  # since the scale was changed

    def scale(self, loss: Tensor) -> Tensor:
        """What to call backward on."""
        return loss * self.value

    @torch.no_grad()
    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether to make the step: then gradients have their own size again. Collective; waits for the device.

        Call it once a step, after `finish_gradient_synchronization` and before clipping. After False the gradients are
        of no use: zero them.
        """
        gradients = gradients_of(optimizer)
        finite = self._all_finite(gradients)
        if finite and gradients:
            torch._foreach_mul_(gradients, 1 / self.value)
        if not finite and isinstance(optimizer, Zero1Optimizer):
            optimizer.skip_step()
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = 2 * self.value, 0
        return finite

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on alike, as JSON knows it."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on as `state_dict` says. Raises ValueError, and changes nothing, where no scaler could have said so."""
        value, good_steps = state_dict["value"], state_dict["good_steps"]
        _check_scale(value)
        if not isinstance(good_steps, int) or good_steps < 0:
            raise ValueError(f"good_steps must be an int of at least 0, got {good_steps!r}")
        self.value, self.good_steps = float(value), good_steps

    def _all_finite(self, gradients: list[Tensor]) -> bool:
        """On every rank of the group, also where this one has no gradient."""
        device = gradients[0].device if gradients else _device_of(self.process_group)
        verdicts = [torch.ones((), device=device), *(gradient.isfinite().all().float() for gradient in gradients)]
        smallest = torch.stack(verdicts).min()
        if dist.is_initialized() and dist.get_world_size(self.process_group) > 1:
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self.process_group)
        return bool(smallest.item())


def _check_scale(value: Any) -> None:
    if not (isinstance(value, int | float) and 0 < value <= sys.float_info.max):
        raise ValueError(f"value must be positive and finite, got {value!r}")


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients that `optimizer` will use: of its parameters, or the averaged slices of a Zero1Optimizer."""
    if isinstance(optimizer, Zero1Optimizer):
        optimizer.finish_gradient_synchronization()
        return [bucket.gradient for bucket in optimizer.buckets]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's collectives take tensors from."""
    on_gpu = dist.is_initialized() and dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
