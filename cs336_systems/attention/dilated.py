"""Dilated attention as a reshape and dense attention: r times fewer FLOPs at rate r, no new kernel.

The sequence is cut into segments of w tokens. In a segment, the tokens whose positions are equal
modulo the rate r form one phase, and each phase attends itself: r sequences of w / r tokens cost
w² / r scores in place of w². Laid out as (w / r, r), a segment's phases are its columns. A strided
view then puts them along the heads, and no mask is needed:

    out = dilated_attention(q, k, v, segment_length=2048, dilation_rate=4, is_causal=True)

Source: LongNet (Ding et al. 2023, sections 2.2 and 2.3). There head h computes one phase only, h
modulo r, and its other tokens have no output: `phases="by_head"`, r² times fewer FLOPs. The oracle
of both forms is `BlockMask.dilated(...).to_dense()`. LongNet mixes several segment lengths and
rates, each weighed by its softmax denominators (equations 10 and 11). `merge_attention` of
`cs336_systems.distributed` does so:

    branches = [
        dilated_attention(q, k, v, length, rate, phases="by_head", return_lse=True)
        for length, rate in [(2048, 1), (4096, 2), (8192, 4)]
    ]
    output, _ = reduce(lambda one, other: merge_attention(*one, *other), branches)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Never, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.attention.api import flash_attention
from cs336_systems.attention.checks import (
    check_attention_inputs,
    check_count,
    check_flags,
    refuse_keywords,
)

Phases = Literal["all", "by_head"]


def dilated_attention(
    q: Float[Tensor, "batch heads tokens head_dim"],
    k: Float[Tensor, "batch heads tokens head_dim"],
    v: Float[Tensor, "batch heads tokens head_dim"],
    segment_length: int,
    dilation_rate: int,
    *,
    phases: Phases = "all",
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **unknown: Never,
) -> Float[Tensor, "batch heads tokens head_dim"] | tuple[Tensor, Tensor]:
    """Return self-attention of each token to the tokens of its segment and phase.

    Token i attends token j if both are in one segment and their positions in it are equal modulo
    the rate (and j <= i if `is_causal`). Memory is linear in the tokens.

    Args:
        q, k, v: as many keys as queries and as many key heads as query heads.
        segment_length: tokens of a segment. The last segment may be shorter; a length above the
            number of tokens means one segment.
        dilation_rate: r. A segment that r does not divide has phases of two lengths. With a rate
            above the segment length each token is a phase of its own.
        phases: "all", or "by_head": head h computes phase h % r alone and its other rows are 0
            (LongNet's offsets).
        scale, return_lse, backend: as in `flash_attention`; a row that a head does not compute has
            L = -inf.

    Raises TypeError or ValueError naming the argument.
    """
    if unknown:
        refuse_keywords("dilated_attention", unknown)
    check_flags(is_causal=is_causal, return_lse=return_lse)
    check_attention_inputs(q, k, v)
    if q.ndim != 4:
        raise ValueError(
            f"q must have shape (batch, heads, tokens, head_dim), got {tuple(q.shape)}"
        )
    if k.shape != q.shape:
        raise ValueError(
            f"k must have q's shape {tuple(q.shape)} in dilated attention, got {tuple(k.shape)}"
        )
    check_count("segment_length", segment_length, 1, most=None)
    check_count("dilation_rate", dilation_rate, 1, most=None)
    if phases not in get_args(Phases):
        raise ValueError(f"phases must be one of {', '.join(get_args(Phases))}, got {phases!r}")

    def dense(*inputs: Tensor) -> list[Tensor]:
        """Return [O] or, with `return_lse`, [O, L as a column]: both are cut and joined alike."""
        found = flash_attention(
            *inputs, is_causal=is_causal, scale=scale, return_lse=return_lse, backend=backend
        )
        return [found] if isinstance(found, Tensor) else [found[0], found[1][..., None]]

    # At this rate each token and each head has a phase of its own; a higher one changes nothing.
    dilation_rate = min(dilation_rate, max(1, *q.shape[1:3]))
    attend = _every_phase if phases == "all" else _phase_by_head
    tokens = q.shape[2]

    # `whole` tokens are in whole segments; the rest is one shorter segment
    whole = tokens // segment_length * segment_length
    parts: list[list[Tensor]] = [] if q.numel() else [dense(q, k, v)]
    for start, stop, length in ((0, whole, segment_length), (whole, tokens, tokens - whole)):
        if stop > start and q.numel():
            by_phase = [
                _split_phases(x[:, :, start:stop].unflatten(2, (-1, length)), dilation_rate)
                for x in (q, k, v)
            ]
            found = attend(dense, by_phase, length, dilation_rate)
            parts.append([x.flatten(3, 4)[:, :, :, :length].flatten(2, 3) for x in found])

    joined = [torch.cat(x, dim=2) if len(x) > 1 else x[0] for x in zip(*parts)]
    return (joined[0], joined[1][..., 0]) if return_lse else joined[0]


def _split_phases(
    x: Float[Tensor, "batch heads segments length head_dim"], rate: int
) -> Float[Tensor, "batch heads segments rows phases head_dim"]:
    """Return each segment's tokens in rows of one token a phase; zeros fill the last row."""
    length = x.shape[3]
    phases = min(rate, length)
    missing = -length % phases
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.unflatten(3, (-1, phases))


def _phase_groups(length: int, phases: int) -> list[tuple[range, int]]:
    """Return (phases, tokens of each) of a segment for each length that its phases have.

    The first `length % phases` phases have one token more than the others.
    """
    # torch.compile has no divmod of a length that varies
    rows, longer = length // phases, length % phases
    groups = [(range(longer), rows + 1), (range(longer, phases), rows)]
    return [(members, tokens) for members, tokens in groups if members]


def _every_phase(
    dense: Callable[..., list[Tensor]], by_phase: list[Tensor], length: int, rate: int
) -> list[Tensor]:
    """Return (batch, heads, segments, rows, phases, ...) results of every phase attending itself.

    All phases of one length are one call of `dense`. Its inputs are (batch, heads, segments,
    phases, tokens, head_dim): leading dimensions count as batch, and phases stand in the place of
    heads.
    """
    rows, phases = by_phase[0].shape[3:5]
    groups = []
    for members, tokens in _phase_groups(length, phases):
        group = (
            x[:, :, :, :tokens, members.start : members.stop].transpose(3, 4) for x in by_phase
        )
        # `dense` gives (batch, heads, segments, members, tokens, head_dim or 1): pad the tokens
        missing = (0, 0, 0, rows - tokens)
        groups.append(
            [torch.nn.functional.pad(x, missing) if tokens < rows else x for x in dense(*group)]
        )
    return [
        torch.cat(parts, dim=3).transpose(3, 4) if len(parts) > 1 else parts[0].transpose(3, 4)
        for parts in zip(*groups)
    ]


def _phase_by_head(
    dense: Callable[..., list[Tensor]], by_phase: list[Tensor], length: int, rate: int
) -> list[Tensor]:
    """Return (batch, heads, segments, rows, phases, ...) results of head h in phase h % rate alone.

    All phases of one length are one call of `dense`. Other rows have O = 0 and L = -inf.
    """
    heads, phases = by_phase[0].shape[1], by_phase[0].shape[4]
    results: list[Tensor] = []
    for members, tokens in _phase_groups(length, phases):
        kept = [phase for phase in members if phase < heads]
        if not kept:
            continue

        # the heads of each phase, one phase behind the other along the heads
        group = [
            torch.cat([x[:, phase::rate, :, :tokens, phase] for phase in kept], dim=1)
            for x in by_phase
        ]
        found = [x.transpose(1, 2) for x in dense(*(x.transpose(1, 2) for x in group))]

        # scatter the heads back to their rows
        if not results:
            shape = by_phase[0].shape[:5]
            results = [
                x.new_full((*shape, x.shape[-1]), fill) for x, fill in zip(found, (0.0, -torch.inf))
            ]
        counts = [len(range(phase, heads, rate)) for phase in kept]
        for result, x in zip(results, found):
            for phase, part in zip(kept, x.split(counts, dim=1)):
                result[:, phase::rate, :, :tokens, phase] = part
    return results  # never empty: phase 0 has at least one token, and head 0
