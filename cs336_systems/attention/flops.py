"""What `torch.utils.flop_counter.FlopCounterMode` counts for the attention operators: their useful FLOPs.

As `accounting.attention_flops` has them: 4 · attended pairs · head_dim of each head forward, 2.5 times that backward.
Of masks and packed documents the values decide: counting reads them, and waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from cs336_systems.accounting import ATTENTION_FLOPS_PER_PAIR, causal_area
from cs336_systems.attention.masks.block_mask import BlockMask
from cs336_systems.attention.masks.tiles import TileLists

WORD_BITS = 32


def count_flops(name: str, extras: tuple[str, ...], packed: bool) -> None:
    """Register the formulas of the operators `cs336_systems::<name>` and `<name>_backward` with these extras."""
    names = [extra.split()[1] for extra in extras]
    for operator, mode, first_extra in ((name, "forward", 3), (f"{name}_backward", "backward", 7)):

        def formula(
            q: Tensor, k: Tensor, *arguments: Any, mode: str = mode, first: int = first_extra - 2, out_val: Any = None
        ) -> int:
            given = dict(zip(names, arguments[first:]))
            pairs = _attended_pairs(q, k, given, is_causal=arguments[first + len(names)], packed=packed)
            return ATTENTION_FLOPS_PER_PAIR[mode] * pairs * q.shape[-1]

        overload_packet: Callable[..., Any] = getattr(torch.ops.cs336_systems, operator)
        register_flop_formula(overload_packet, get_raw=True)(formula)
        # A counter copies the formulas when it is made; kernels are imported by their first call, perhaps inside it.
        for active in _get_current_dispatch_mode_stack():
            counter = getattr(active, "counter", None)
            if isinstance(counter, FlopCounterMode):
                counter.flop_registry[overload_packet] = flop_registry[overload_packet]


def _attended_pairs(q: Tensor, k: Tensor, extras: dict[str, Any], *, is_causal: bool, packed: bool) -> int:
    """(query, key) pairs that are attended, over all heads."""
    if packed:
        documents = zip(*(extras[f"cu_seqlens_{side}"].diff().tolist() for side in "qk"))
        return q.shape[1] * sum(_area(queries, keys, is_causal) for queries, keys in documents)
    batch_heads = q.shape[0] * q.shape[1]
    lengths = q.shape[2], k.shape[2]
    if "kv_num_blocks" in extras:
        lists = TileLists(*(extras[name] for name in TileLists._fields))
        block_size = lists.token_bits.shape[1], lists.token_bits.shape[2] * WORD_BITS
        mask = BlockMask(lists=lists, block_size=block_size, seq_lengths=lengths)
        return mask.num_attended * batch_heads // (mask.shape[0] * mask.shape[1])
    if (dense := extras.get("mask")) is not None:
        return int(dense.sum()) * batch_heads // (dense.shape[0] * dense.shape[1])
    return batch_heads * _area(*lengths, is_causal)


def _area(queries: int, keys: int, is_causal: bool) -> int:
    return causal_area(queries, keys) if is_causal else queries * keys
