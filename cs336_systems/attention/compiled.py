"""Stage 2: the reference under torch.compile, fused but still with a stored score matrix.

The compiler fuses scale, mask and softmax.

    output = compiled_reference()(q, k, v, is_causal=True)

This is not about callers that compile a call of `flash_attention`: see "watched" in `rule.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cs336_systems.attention.reference import attention_reference


@cache
def compiled_reference(dynamic: bool | None = None) -> Callable[..., Any]:
    """Return `attention_reference` under torch.compile; it takes the same arguments.

    One compiled function serves every caller of a process. `dynamic=True` compiles once for all
    lengths, for sweeps over lengths. The default specialises on the first shape and generalises
    when a second one comes.
    """
    return torch.compile(attention_reference, dynamic=dynamic)
