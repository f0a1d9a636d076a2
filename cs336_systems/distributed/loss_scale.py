"""A loss scale for float16, with one decision for all ranks: a step that overflows on one of them
is skipped by all.

    scaler = LossScaler()
    scaler.scale(loss).backward()
    model.finish_gradient_synchronization()
    scaler.unscale_(optimizer)              # where gradients are clipped
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)                  # made, or skipped, on every rank
    scaler.update()

A scale keeps small gradients from vanishing in float16 (Micikevicius et al., arXiv:1710.03740). One
that is too large overflows: then the step is skipped and the scale halved. torch.amp.GradScaler
decides that from this rank's gradients. Of shards each rank would decide for itself, and the ranks
part for good: here they tell each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from cs336_systems.distributed.collectives import Group, rank_in
from cs336_systems.distributed.zero1 import Zero1Optimizer


class LossScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with its `options`, for the ranks of `process_group` together;
    ValueError on other ranks.

    For any optimizer, over replicas, FSDP's shards or a Zero1Optimizer's slices; without a group
    for one process.
    """

    def __init__(
        self, device: str | None = None, *, process_group: Group = None, **options: Any
    ) -> None:
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"), **options)
        if dist.is_initialized():
            rank_in(process_group)
        self.process_group = process_group

    @torch.no_grad()
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Torch's, on the gradients that the update will use, and then the exchange; also for a
        rank without any.
        """
        if isinstance(optimizer, Zero1Optimizer):
            for gradient in optimizer.averaged_gradients():
                torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, inv_scale)
        else:
            for found in (
                super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16).values()
            ):
                found_inf = torch.maximum(found_inf, found.to(found_inf.device))
        if dist.is_initialized():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self.process_group)
        return {found_inf.device: found_inf}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make the step, unless a gradient of any rank is not finite; unscales first where that was
        not done.
        """
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result
