"""Stage 2: the reference under torch.compile, which fuses scale, mask and softmax but still stores
the score matrix.

What happens where a caller compiles a call of `flash_attention` is in `rule.py`, the watched way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cs336_systems.attention.reference import attention_reference


@cache
def compiled_reference(dynamic: bool | None = None) -> Callable[..., Any]:
    """`attention_reference` compiled, with the same arguments.

    One compiled function serves every caller of a process. `dynamic=True` compiles once for all
    lengths, which a sweep over lengths wants; the default specialises on the first shape and
    generalises when a second one comes.
    """
    return torch.compile(attention_reference, dynamic=dynamic)
