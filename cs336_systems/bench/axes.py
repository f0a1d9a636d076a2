"""What `run` sets of a sweep of attention: modes, heads, lengths and head dims.

    cs336-systems run dense_masks --mode forward --heads 16 --seqlen 4096,8192 --head-dim 64

Each of the problem's cells comes once for every chosen value in the place of its own. Cells that
are then the same are one, and of a cell's rows those of the chosen modes stay.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from cs336_systems.bench.spec import Cell
from cs336_systems.config import AttentionShape, Axes, MaskCase

CHOSEN = "-chosen"  # ends the names of folders whose cases are no problem's own
OF_THE_MASK = ("density", "block_density")  # quantities that every mode's tables need
Case = AttentionShape | MaskCase


def choose_cells(problem: str, cells: Sequence[Cell], axes: Axes) -> list[Cell]:
    """The cells of `problem` on `axes`; ValueError where it has no such axis or mode."""
    if axes == Axes():
        return list(cells)
    if not all(isinstance(cell.case, AttentionShape | MaskCase) for cell in cells) or not cells:
        raise ValueError(
            f"{axes.options} has no effect on {problem}, which is no sweep of attention"
        )
    modes = list(
        dict.fromkeys(
            row.mode for cell in cells for row in cell.rows if row.quantity not in OF_THE_MASK
        )
    )
    for mode in axes.modes:
        if mode not in modes:
            raise ValueError(
                f"--mode must be one of {', '.join(modes)} for {problem}, got {mode!r}"
            )
    chosen: dict[tuple[object, str], Cell] = {}
    for cell in cells:
        rows = tuple(
            row
            for row in cell.rows
            if not axes.modes or row.mode in axes.modes or row.quantity in OF_THE_MASK
        )
        if not any(row.quantity not in OF_THE_MASK for row in rows):
            continue
        own, lengths = cell.case, axes.seqlens or (None,)
        for heads, length, dim in product(
            axes.heads or (own.heads,), lengths, axes.head_dims or (own.head_dim,)
        ):
            case = _with_length(_with_heads(replace(own, head_dim=dim), heads), length)
            chosen.setdefault((case, cell.implementation), replace(cell, case=case, rows=rows))
    # Implementations of a case share its inputs and its oracle, so that they are measured one after
    # the other.
    places = {case: place for place, case in enumerate(dict.fromkeys(case for case, _ in chosen))}
    return sorted(chosen.values(), key=lambda cell: places[cell.case])


def _with_heads(case: Case, heads: int) -> Case:
    """`case` with as many query heads; a key head serves as many of them as before."""
    if not isinstance(case, AttentionShape) or case.kv_heads is None:
        return replace(case, heads=heads)
    group = case.heads // case.kv_heads
    if heads % group:
        raise ValueError(
            f"--heads must be a multiple of the {group} heads that share a key head, got {heads}"
        )
    return replace(case, heads=heads, kv_heads=heads // group)


def _with_length(case: Case, seqlen: int | None) -> Case:
    """`case` with as many keys, and queries where it had as many of them; documents keep their
    shares.
    """
    if seqlen is None:
        return case
    changes: dict[str, Any] = {}
    if hasattr(case, "mask"):
        changes["mask"] = "+".join(
            _scaled(part, case.seqlen_q, seqlen) for part in case.mask.split("+")
        )
    if isinstance(case, MaskCase):
        return replace(case, seqlen_q=seqlen, **changes)
    queries = seqlen if case.seqlen_q == case.seqlen_k else case.seqlen_q
    return replace(case, seqlen_q=queries, seqlen_k=seqlen, **changes)


def _scaled(part: str, before: int, after: int) -> str:
    """
    >>> _scaled("document:60,40", 100, 10), _scaled("causal", 100, 10)
    ('document:6,4', 'causal')
    """
    name, _, lengths = part.partition(":")
    if name != "document":
        return part
    scaled = [int(length) * after // before for length in lengths.split(",")]
    scaled[0] += after - sum(scaled)
    return f"{name}:{','.join(map(str, scaled))}"
