"""Attention over one sequence on 1, 2, 4 and 8 ranks, by the ring.

It is no problem of the handout. One rank runs this package's attention and sends nothing. With
more, each rank has an equal part of the sequence, and passes keys and values around while it
computes. Fewer heads of keys and values are fewer bytes for the same arithmetic. A cell is a number
of ranks, its rows every length and pass. Before anything is timed, rows of the output and of the
queries' gradient are checked in float64 against all keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from cs336_systems.bench.spec import Cell, Disagreement, Experiment, Row, Sample, problem
from cs336_systems.book.figures import Lines
from cs336_systems.book.frames import span, with_speeds
from cs336_systems.book.tables import Pick, Ratio, Wide
from cs336_systems.config import AttentionShape, DTypeName, RunConfig
from cs336_systems.distributed.ring_attention import ring_attention, zigzag_split
from cs336_systems.inputs import attention_inputs
from cs336_systems.measure.allocations import release
from cs336_systems.subjects import ranks
from cs336_systems.subjects.attention_passes import BOTH, BOTH_TIMES, FORWARD, PEAK
from cs336_systems.subjects.ranks import TIMES

# TIMES are those of rank 0 alone.
ROWS = (FORWARD, BOTH, *(Row("forward_backward", name, "ms") for name in TIMES))
LENGTHS = {"tiny": (256,), "smoke": (1024, 2048), "handout": (65536, 131072, 262144, 524288)}
NUM_RANKS = {"tiny": (2,), "smoke": (1, 2), "handout": (1, 2, 4, 8)}
# (heads, numbers of key heads, head dim)
HEADS = {"tiny": (2, (2,), 16), "smoke": (4, (4, 1), 32), "handout": (8, (8, 2), 128)}
BUDGET_MS = {"tiny": 20.0, "smoke": 200.0, "handout": 500.0}  # for timed calls
MIN_SAMPLES = 3
CHECKED_ROWS = 8  # per rank, spread over its part of the sequence


@dataclass(frozen=True, kw_only=True)
class ContextCase:
    """Causal attention over one sequence, of which each rank has an equal part."""

    length: int  # of the whole sequence
    heads: int
    kv_heads: int
    head_dim: int
    dtype: DTypeName
    num_ranks: int
    backend: str  # nccl on GPUs, gloo on CPUs


class SpeedUp(Lines):
    """Lines of a length's speed over that on one rank, in any run, and a line of the ideal."""

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return rows with `speed_up` over one rank and `line`, the length in words or "ideal"."""
        rows = super().rows(frame)
        alone = rows[rows["num_ranks"] == 1].set_index("length")["median"]
        rows = rows.assign(speed_up=rows["length"].map(alone) / rows["median"])
        rows = rows.dropna(subset="speed_up").assign(
            line=[f"{length:,} tokens" for length in rows["length"]]
        )
        ideal = rows.drop_duplicates("num_ranks").assign(
            line="ideal", speed_up=lambda one: 1.0 * one["num_ranks"]
        )
        return pd.concat([rows, ideal])


def speed_up_claim(rows: pd.DataFrame) -> str:
    measured = rows[rows["line"] != "ideal"]
    most = measured[measured["num_ranks"] == measured["num_ranks"].max()]
    if most["num_ranks"].iloc[0] == 1:
        return ""
    return f"{most['num_ranks'].iloc[0]} ranks are {span(most['speed_up'])} times as fast as one"


@problem(title="One sequence on several ranks: keys and values passed around a ring", order=13)
class ContextParallel(Experiment):
    implementations = ("ring",)

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return a cell per number of key heads and of ranks; NCCL for as many ranks as GPUs."""
        heads, groups, head_dim = HEADS[run.scale]
        dtype: DTypeName = "bfloat16" if run.device == "cuda" else "float32"
        # The peak is that of the rank that needs most.
        rows = (*ROWS, PEAK) if run.device == "cuda" else ROWS
        counts = [number for number in NUM_RANKS[run.scale] if number <= ranks.most_ranks(run)]
        cells = []
        for kv_heads, number in product(groups, counts):
            cases = [
                ContextCase(
                    length=length,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    dtype=dtype,
                    num_ranks=number,
                    backend=ranks.backend_of(run),
                )
                for length in LENGTHS[run.scale]
            ]
            of_cases = tuple(replace(row, case=case) for case in cases for row in rows)
            cells.append(Cell(case=cases[0], implementation="ring", rows=of_cases))
        return cells

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        cases = list(dict.fromkeys(row.case for row in cell.rows))
        found = ranks.run_cell(partial(_time_rings, cases=cases, run=run), cell.case, run)
        for case, reports in zip(cases, zip(*found)):
            yield from ranks.report_samples((row for row in cell.rows if row.case == case), reports)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        ranks = "1 rank" if row["num_ranks"] == 1 else f"{row['num_ranks']} ranks"
        return {"line": ranks, "grouped": row["kv_heads"] < row["heads"]}

    def compared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Add `of_one`: how many times as fast as on one rank."""
        return with_speeds(
            frame, "of_one", {"num_ranks": 1}, by=("length", "kv_heads", "mode", "quantity")
        )

    tables = {
        name: Wide(
            title=title,
            down={"tokens": "length", "heads of keys": "kv_heads", "ranks": "num_ranks"},
            where=where,
            columns={
                "forward (ms)": Pick({"quantity": "time", "mode": "forward"}),
                "both (ms)": Pick({"quantity": "time", "mode": "forward_backward"}),
                "speed of one": Pick(
                    {"quantity": "time", "mode": "forward_backward"}, value="of_one"
                ),
                "communication (ms)": Pick({"quantity": "communication_time"}),
                "beside compute (ms)": Pick({"quantity": "overlap_time"}),
                "hidden": Ratio("beside compute (ms)", "communication (ms)", percent=True),
                "peak of a rank (GiB)": Pick({"quantity": "peak_memory"}, unit="GiB"),
            },
        )
        for name, title, where in (
            (
                "ungrouped",
                "Causal attention over one sequence, each head with keys of its own",
                {"grouped": False},
            ),
            (
                "grouped",
                "Causal attention over one sequence, four heads to a head of keys",
                {"grouped": True},
            ),
        )
    }
    figures = {
        "both": SpeedUp(
            claim=speed_up_claim,
            title="Speed over one rank's",
            subtitle="causal, forward + backward, each run of its own",
            x="num_ranks",
            x_title="ranks",
            y="speed_up",
            y_title="times as fast as one rank",
            color="line",
            where=BOTH_TIMES | {"grouped": False},
        )
    }


def _time_rings(
    rank: int, num_ranks: int, cases: Sequence[ContextCase], run: RunConfig
) -> list[ranks.RankReport]:
    """Return the report of this rank for each case."""
    return [_time_ring(rank, num_ranks, case, run) for case in cases]


def _time_ring(rank: int, num_ranks: int, case: ContextCase, run: RunConfig) -> ranks.RankReport:
    """Check one case on this rank, then time both passes and trace one; return the report.

    Disagreement if the checked rows are wrong.
    """
    device = run.device
    release(device)
    shape = AttentionShape(
        batch=1,
        heads=case.heads,
        kv_heads=case.kv_heads,
        seqlen_q=case.length,
        seqlen_k=case.length,
        head_dim=case.head_dim,
        is_causal=True,
        dtype=case.dtype,
    )
    whole = list(attention_inputs(shape, device=device, seed=run.seed))  # the same on every rank
    parts = [zigzag_split(x, rank, num_ranks, dim=-2).contiguous() for x in whole]
    leaves, upstream = [x.requires_grad_() for x in parts[:3]], parts[3]

    def forward() -> Tensor:
        return ring_attention(*leaves, is_causal=True, enable_gqa=case.kv_heads < case.heads)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, upstream)

    # Check first: the whole sequence is needed only for that and is then freed.
    error = _error(forward().detach(), both()[0], whole, rank, num_ranks)
    if not error <= 1:
        raise Disagreement(f"rows are off attention in float64 by {error:.3g} times the bound")
    whole.clear()

    samples: ranks.Samples = {}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for mode, call in (("forward", forward), ("forward_backward", both)):
        samples[mode, "time"] = ranks.timed_calls(call, device, BUDGET_MS[run.scale], MIN_SAMPLES)
    samples["forward_backward", "peak_memory"] = ranks.peak_mib(device)
    samples |= ranks.trace_on_first(both, rank, device, "forward_backward")
    return ranks.RankReport(error=error, samples=samples)


def _error(
    output: Tensor, grad_q: Tensor, whole: Sequence[Tensor], rank: int, num_ranks: int
) -> float:
    """Return the largest error of checked rows of this rank's output and dQ, over its bound.

    The bound is twice the error of the same rows in plain low precision, times the root of the
    number of ranks, plus 1e-5. Both errors are taken against float64. NaN if an error is NaN.
    """
    q, k, v, grad_output = whole
    positions = zigzag_split(torch.arange(q.shape[-2], device=q.device), rank, num_ranks, dim=0)
    places = torch.linspace(0, len(positions) - 1, CHECKED_ROWS, device=q.device).long()
    visible = torch.arange(q.shape[-2], device=q.device) <= positions[places, None]
    rows, upstream = q[..., positions[places], :], grad_output[..., positions[places], :]
    repeated = q.shape[1] // k.shape[1]

    errors = []
    for head in range(q.shape[1]):  # one head at a time, to bound the float64 copies of keys
        exact_and_plain = []
        for dtype in (torch.float64, q.dtype):
            keys, values = (x[0, head // repeated].to(dtype) for x in (k, v))
            query = rows[0, head].to(dtype).requires_grad_()
            scores = query @ keys.T * q.shape[-1] ** -0.5
            attended = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values
            (gradient,) = torch.autograd.grad(attended, query, upstream[0, head].to(dtype))
            exact_and_plain.append((attended.detach(), gradient))
        for ours, right, rough in zip((output, grad_q), *exact_and_plain):
            bound = 2 * (rough.double() - right).abs().max() * num_ranks**0.5 + 1e-5
            errors.append((ours[0, head, places].double() - right).abs().max() / bound)
    return torch.stack(errors).max().item()  # NaN if any is
