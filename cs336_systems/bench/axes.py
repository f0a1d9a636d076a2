"""Change the modes, heads, lengths and head dims of a sweep of attention, as `run` asks for them.

    cs336-systems run dense_masks --mode forward --heads 16 --seqlen 4096,8192 --head-dim 64

Every chosen value replaces the value of the problem's own cells, so that each cell is repeated for
each combination of chosen values. Cells that become equal are merged. A cell keeps only its rows
of the chosen modes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from cs336_systems.bench.spec import Cell
from cs336_systems.config import AttentionShape, Axes, MaskCase

CHOSEN = "-chosen"  # suffix of results folders whose cases have chosen sizes
OF_THE_MASK = ("density", "block_density")  # quantities that the tables of every mode need
Case = AttentionShape | MaskCase


def choose_cells(problem: str, cells: Sequence[Cell], axes: Axes) -> list[Cell]:
    """Return `cells` of `problem` with their cases and rows changed as `axes` say.

    Without any option set, `cells` are returned as they are. Raises ValueError if an option is set
    and `problem` is no sweep of attention, or if it has no row of a chosen mode.
    """
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

    # Equal cells are merged: (case, implementation) is the key.
    chosen: dict[tuple[object, str], Cell] = {}
    for cell in cells:
        rows = tuple(
            row
            for row in cell.rows
            if not axes.modes or row.mode in axes.modes or row.quantity in OF_THE_MASK
        )
        if not any(row.quantity not in OF_THE_MASK for row in rows):
            continue

        # One cell for each combination of chosen sizes; an axis without options keeps its own.
        own, lengths = cell.case, axes.seqlens or (None,)
        for heads, length, dim in product(
            axes.heads or (own.heads,), lengths, axes.head_dims or (own.head_dim,)
        ):
            case = _with_length(_with_heads(replace(own, head_dim=dim), heads), length)
            chosen.setdefault((case, cell.implementation), replace(cell, case=case, rows=rows))

    # Sort by case: its implementations share inputs and oracle, so they are measured in a row.
    places = {case: place for place, case in enumerate(dict.fromkeys(case for case, _ in chosen))}
    return sorted(chosen.values(), key=lambda cell: places[cell.case])


def _with_heads(case: Case, heads: int) -> Case:
    """Return `case` with `heads` query heads and the same number of query heads per key head.

    Raises ValueError if `heads` is not a multiple of that number.
    """
    if not isinstance(case, AttentionShape) or case.kv_heads is None:
        return replace(case, heads=heads)
    group = case.heads // case.kv_heads
    if heads % group:
        raise ValueError(
            f"--heads must be a multiple of the {group} heads that share a key head, got {heads}"
        )
    return replace(case, heads=heads, kv_heads=heads // group)


def _with_length(case: Case, seqlen: int | None) -> Case:
    """Return `case` with `seqlen` keys; `case` itself if `seqlen` is None.

    The number of queries follows if it equalled the number of keys, else it stays. The documents
    of a document mask keep their shares of the sequence.
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
    """Return a mask's name with its documents scaled from `before` to `after` tokens in all.

    The first document takes what rounding leaves. Names of other masks are returned unchanged.

    >>> _scaled("document:60,40", 100, 10), _scaled("causal", 100, 10)
    ('document:6,4', 'causal')
    """
    name, _, lengths = part.partition(":")
    if name != "document":
        return part
    scaled = [int(length) * after // before for length in lengths.split(",")]
    scaled[0] += after - sum(scaled)
    return f"{name}:{','.join(map(str, scaled))}"
