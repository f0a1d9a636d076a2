"""A loss scale for float16: if gradients overflow on one rank, all ranks skip the step.

    scaler = LossScaler()
    scaler.scale(loss).backward()
    model.finish_gradient_synchronization()
    scaler.unscale_(optimizer)              # needed before gradients are clipped
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)                  # made, or skipped, on every rank
    scaler.update()

A scale keeps small gradients from vanishing in float16 (Micikevicius et al., arXiv:1710.03740). If
it is too large, gradients overflow: then the step is skipped and the scale halved.
torch.amp.GradScaler decides this by the gradients of its own rank. With sharded gradients each rank
would decide by itself, and the ranks would diverge for good. Here they exchange the decision.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from cs336_systems.distributed.collectives import Group, rank_in
from cs336_systems.distributed.zero1 import Zero1Optimizer


class LossScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler that decides for all ranks of `process_group` together.

    It works with any optimizer over replicas, FSDP's shards or a Zero1Optimizer's slices; without
    an initialised process group it serves one process. `device` None: "cuda" if there is a GPU,
    else "cpu". `options` are those of torch.amp.GradScaler. Raises ValueError on a rank outside of
    the group.
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
        """Unscale the gradients that the update will use; return whether any rank's overflowed.

        Overrides torch's method. The result has one entry, 1.0 after an overflow on any rank, also
        on a rank without gradients. Collective.
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
        """Make the optimizer's step unless a gradient of any rank is not finite; return its result.

        Unscales the gradients first if `unscale_` was not called.
        """
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result
