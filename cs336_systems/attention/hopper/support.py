"""Which tensors the Hopper kernels take on this machine, and if not, why.

    reason = hopper_refusal(q)       # None, or one sentence: no Hopper GPU, no Gluon, float32, head_dim 256, ...

`flash_attention` asks the same of `select_backend`; this is for callers of the operator itself.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cs336_systems.device import AttentionLayout, available_backends, get_device_info
from cs336_systems.device import hopper_refusal as refusal_of_facts


def hopper_refusal(q: Tensor, *, layout: AttentionLayout = "dense") -> str | None:
    """Why q (..., head_dim), and what goes with it, cannot be attended by the Hopper kernels; None if it can."""
    return _refusal(q.device, q.dtype, q.shape[-1], layout)


@cache  # asked at every call, and an H200 stays one
def _refusal(device: torch.device, dtype: torch.dtype, head_dim: int, layout: AttentionLayout) -> str | None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    name = str(dtype).removeprefix("torch.")
    why = refusal_of_facts(device.type, capability, name, head_dim, layout)
    if why is None:
        state = available_backends(get_device_info("cuda"))["hopper"]
        why = None if state == "ok" else state
    return why
