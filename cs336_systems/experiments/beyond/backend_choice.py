"""Triton beside Hopper on a grid of sizes, by turns: the measurements by which `auto` chooses.

`tools/backend_table.py` makes `attention/hopper_table.py` from the records, and a test compares
`auto` with them row by row. Both passes are timed in replayed graphs, so that short calls count
with the GPU's time and not the host's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from cs336_systems.attention.choose import BACKENDS, AttentionLayout, select_backend
from cs336_systems.bench.turns import Turn, graph_turn
from cs336_systems.book.frames import digits
from cs336_systems.config import AttentionShape, MaskCase, RunConfig
from cs336_systems.experiments import Heat, Pivot, problem
from cs336_systems.subjects.attention_builders import Built
from cs336_systems.subjects.attention_by_turns import AttentionByTurns
from cs336_systems.subjects.attention_passes import BOTH, BY_SHAPE, Call, sized_shape

# Head dims of the table. PROBES test whether other head dims can use the next larger one's row.
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 160, 192, 256)
PROBES = (48, 112)
# These are measured also with few heads, whose walks are divided, and with masks and documents.
COMMON_HEAD_DIMS = (64, 128)
SIZES = ((16, 512), (64, 512), (4, 4096), (16, 4096), (16, 16384))  # heads, tokens
FEW_SIZES = ((1, 1024), (1, 4096), (16, 1024))
MASKED_SIZES = ((16, 2048), (16, 4096), (16, 16384))
MASKS: tuple[dict[str, Any], ...] = ({"window": 1024}, {"documents": 1024})
PACKED_SIZES = ((4, 16384), (16, 16384))
DOCUMENTS = (1024, 4096)  # tokens of each packed one


@dataclass(frozen=True, kw_only=True)
class Attended(AttentionShape):
    """An attention call among whose back ends `auto` chooses, as it stands in the records."""

    layout: AttentionLayout = "dense"
    window: int = 0  # most recent keys that a query attends; 0: all
    documents: int = 0  # tokens of each packed document; 0: there are none

    @property
    def mask_case(self) -> MaskCase:
        """Return the call's window, documents and causal flag as the case of a mask."""
        parts = []
        if self.documents:
            starts = range(0, self.seqlen_q, self.documents)
            parts.append(
                "document:"
                + ",".join(str(min(self.documents, self.seqlen_q - start)) for start in starts)
            )
        if self.window:
            parts.append(f"window:{self.window}")
        if self.is_causal:
            parts.append("causal")
        return MaskCase(
            mask="+".join(parts) or "full",
            batch=self.batch,
            heads=self.heads,
            seqlen_q=self.seqlen_q,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )


def faster_claim(rows: pd.DataFrame) -> str:
    speeds = rows["over_triton"]
    worst = f"at worst it runs at {digits(speeds.min())} times its speed"
    return f"hopper is faster than triton in {(speeds > 1).sum()} of {len(speeds)} cases; {worst}"


@problem(title="Triton beside Hopper by size and mask: what `auto` chooses by", order=2)
class BackendChoice(AttentionByTurns):
    implementations = ("triton", "hopper")
    rows = (BOTH,)
    speeds = {"over_triton": {"implementation": "triton"}}
    rounds = {"cpu": 3, "cuda": 6}

    def cases(self, run: RunConfig) -> list[Attended]:
        """Return dense calls by size and head dim, then calls with lists and packed documents."""

        def case(
            heads: int, tokens: int, head_dim: int, is_causal: bool = False, **more: Any
        ) -> Attended:
            return Attended(**vars(sized_shape(run, 1, heads, tokens, head_dim, is_causal)), **more)

        if run.scale != "handout":  # there the kernels are interpreted
            small = case(2, 64 if run.scale == "tiny" else 128, 32, True)
            return (
                [small]
                if run.scale == "tiny"
                else [small, replace(small, layout="packed", documents=64)]
            )

        either = (False, True)
        dense = [
            case(*size, dim, causal) for dim in HEAD_DIMS for size in SIZES for causal in either
        ]
        dense += [
            case(*size, dim, causal)
            for dim in COMMON_HEAD_DIMS
            for size in FEW_SIZES
            for causal in either
        ]
        dense += [case(16, 4096, dim, causal) for dim in PROBES for causal in either]
        dense += [replace(case(16, 4096, 64, True), dtype="float16")]
        listed = [
            case(*size, dim, layout="block_mask", **mask)
            for dim in COMMON_HEAD_DIMS
            for size in MASKED_SIZES
            for mask in MASKS
        ]
        packed = [
            case(*size, dim, causal, layout="packed", documents=length)
            for dim in COMMON_HEAD_DIMS
            for size in PACKED_SIZES
            for causal in either
            for length in DOCUMENTS
        ]
        return [*dense, *listed, *packed]

    def turn_of(self, call: Call, device: str) -> Turn:
        """Return a turn that replays the call in a CUDA graph, where there is one."""
        return graph_turn(call, device)

    def built(self, name: str, case: Attended, run: RunConfig) -> Built:
        """Return the implementation `name`, the one with lists for a mask of tiles."""
        return super().built(f"{name}_lists" if case.layout == "block_mask" else name, case, run)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add words for the mask, the sizes by which `auto` chooses, and its choice on an H200."""
        causal = " causal" if row["is_causal"] else ""
        length = row["documents"] or row["window"]
        what = "documents" if row["documents"] else "window"
        words = {
            "dense": "causal" if causal else "full",
            "block_mask": f"{what} of {length:,} by lists",
            "packed": f"packed{causal} documents of {length:,}",
        }
        return super().columns(row) | {
            "attended": words[row["layout"]],
            "tokens": row["documents"] if row["layout"] == "packed" else row["seqlen_q"],
            "queries": row["batch"] * row["heads"] * row["seqlen_q"],
            "size": f"{row['heads']} × {row['seqlen_q']:,} {words[row['layout']]}",
            "auto": taken_by_auto(row),
        }

    def compared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Add `cost`: the time of the back end that auto takes over that of the faster one."""
        ratios = zip(frame["over_triton"], frame["auto"])
        return frame.assign(
            cost=[max(1.0, 1 / one if auto == "hopper" else one) for one, auto in ratios]
        )

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return `num_cases`, and `worst`, the largest `cost` of a case."""
        return {"num_cases": frame["case"].nunique(), "worst": frame["cost"].max()}

    tables = {
        "times": Pivot(
            title="triton and hopper by turns",
            down={
                **BY_SHAPE,
                "attended": "attended",
                "dtype": "dtype",
                "pass": "pass",
                "auto takes": "auto",
            },
            ratios=(("hopper", "triton"),),
        )
    }
    figures = {
        "over_triton": Heat(
            claim=faster_claim,
            title="Both passes of dense attention: hopper over triton",
            subtitle="forward + backward, times as fast as triton",
            x="head_dim",
            x_title="head dim",
            y="size",
            y_title="heads × tokens",
            color="head_dim",
            value="over_triton",
            middle=1,
            where={
                "layout": "dense",
                "implementation": "hopper",
                "dtype": "bfloat16",
                "head_dim": HEAD_DIMS,
            },
        )
    }


def taken_by_auto(row: Mapping[str, Any]) -> str:
    """Return the back end that `auto` takes on an H200 for a row of the records."""
    documents = row["documents"] if row["layout"] == "packed" else 0
    name, _ = select_backend(
        device_kind="cuda",
        dtype=row["dtype"],
        head_dim=row["head_dim"],
        batch_heads=row["batch"] * row["heads"],
        seqlen_q=row["seqlen_q"],
        seqlen_k=row["seqlen_k"],
        layout=row["layout"],
        is_causal=row["is_causal"],
        longest=(documents, documents) if documents else None,
        available=dict.fromkeys(BACKENDS, "ok"),
    )
    return name
