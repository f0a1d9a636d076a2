"""Wrong: a shard is a view of the whole weight, whose memory it keeps."""

import minimal
import torch
from minimal import *  # noqa: F403


def get_fsdp(module, compute_dtype=None):
    clone, torch.Tensor.clone = torch.Tensor.clone, lambda self, **_: self
    try:
        return minimal.FSDP(module, compute_dtype)
    finally:
        torch.Tensor.clone = clone
