"""FLOP formulas of the attention operators for `torch.utils.flop_counter.FlopCounterMode`.

    count_flops("triton_attention", call_of)    # done by `AttentionOperator` when it is counted

They count useful FLOPs, as `accounting.attention_flops` does: 4 · attended pairs · head_dim for
each head in the forward, 2.5 times that in the backward. The pairs of masks and packed documents
depend on tensor values: counting reads them, and waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from cs336_systems.accounting import ATTENTION_FLOPS_PER_PAIR, causal_area
from cs336_systems.attention.call import Call
from cs336_systems.attention.masks.tiles import count_attended


def count_flops(name: str, call_of: Callable[[tuple[Any, ...]], Call]) -> None:
    """Register FLOP formulas for the operators `cs336_systems::<name>` and `<name>_backward`.

    `call_of` returns the Call that an operator's last arguments describe: those behind q, k, v
    and, in the backward, behind the seven fields of `Saved`.
    """
    for operator, mode, num_tensors in ((name, "forward", 3), (f"{name}_backward", "backward", 7)):

        def formula(
            q: Tensor,
            k: Tensor,
            *others: Any,
            mode: str = mode,
            first: int = num_tensors - 2,
            out_val: Any = None,
        ) -> int:
            """Return the FLOPs of one call, with the operator's arguments by position."""
            pairs = _attended_pairs(q, k, call_of(others[first:]))
            return ATTENTION_FLOPS_PER_PAIR[mode] * pairs * q.shape[-1]

        overload_packet: Callable[..., Any] = getattr(torch.ops.cs336_systems, operator)
        register_flop_formula(overload_packet, get_raw=True)(formula)

        # A counter copies the formulas when it is made. The first call imports a kernel, perhaps
        # while a counter is active: add the formula to its copy too.
        for active in _get_current_dispatch_mode_stack():
            counter = getattr(active, "counter", None)
            if isinstance(counter, FlopCounterMode):
                counter.flop_registry[overload_packet] = flop_registry[overload_packet]


def _attended_pairs(q: Tensor, k: Tensor, call: Call) -> int:
    """Return the number of attended (query, key) pairs over all batch entries and query heads."""
    if call.documents is not None:
        lengths_q, lengths_k = (ends.diff().tolist() for ends in call.documents[:2])
        return q.shape[1] * sum(
            _area(*lengths, call.is_causal) for lengths in zip(lengths_q, lengths_k)
        )

    batch_heads = q.shape[0] * q.shape[1]
    lengths = q.shape[2], k.shape[2]
    if call.lists is not None:
        batch, heads = call.lists.kv_num_blocks.shape[:2]
        attended = count_attended(call.lists.tile_map(), call.lists.block_size)
        return attended * batch_heads // (batch * heads)
    if call.mask is not None:
        return int(call.mask.sum()) * batch_heads // (call.mask.shape[0] * call.mask.shape[1])
    return batch_heads * _area(*lengths, call.is_causal)


def _area(queries: int, keys: int, is_causal: bool) -> int:
    """Return the number of pairs of a dense or causal mask (top left)."""
    return causal_area(queries, keys) if is_causal else queries * keys
