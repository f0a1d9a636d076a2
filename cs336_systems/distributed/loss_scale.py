"""A loss scale for float16, with one decision for all ranks: a step that overflows on one of them is skipped by all.

    scaler = LossScaler()
    scaler.scale(loss).backward()
    model.finish_gradient_synchronization()
    scaler.unscale_(optimizer)              # where gradients are clipped
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)                  # made, or skipped, on every rank
    scaler.update()

float16 has no numbers below 6e-8, so small gradients vanish unless the loss, and with it every gradient, is multiplied
by a large number first (Micikevicius et al., arXiv:1710.03740). Too large a one overflows: then the step is skipped and
the scale halved; after many good steps it is doubled. torch.amp.GradScaler does this with this rank's gradients. Under
data parallelism they are equal; of shards each rank would decide for itself, and the ranks part for good. So here the
ranks exchange whether any of them has found a number that is not finite.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from cs336_systems.distributed.collectives import rank_in
from cs336_systems.distributed.zero1 import Zero1Optimizer


class LossScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, whose options `options` are, for the ranks of `process_group` together (None: all).

    For any optimizer, over replicas, FSDP's shards or a Zero1Optimizer's slices; without a process group the scaler of
    one process. ValueError on a rank that is not of the group.
    """

    def __init__(
        self, device: str | None = None, *, process_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"), **options)
        if dist.is_initialized():
            rank_in(process_group)
        self.process_group = process_group

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Torch's, on the gradients that the update will use, and then the exchange; also for a rank without any."""
        if isinstance(optimizer, Zero1Optimizer):
            for gradient in optimizer.averaged_gradients():
                torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, inv_scale)
        else:
            for found in super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16).values():
                found_inf = torch.maximum(found_inf, found.to(found_inf.device))
        if dist.is_initialized():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self.process_group)
        return {found_inf.device: found_inf}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make the step, unless a gradient of any rank is not finite; unscales first where that was not done."""
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result
