"""Terms of one training step under each stage of data parallelism, from naive DDP to FSDP.

    rows = step_terms(book)       # a row for each stage and term, in milliseconds
    step_chart(rows)              # stacked bars

The steps are of xl on two GPUs in bfloat16. A trace gives the time in which compute kernels run,
the time in which the link is busy, and the time of both. AdamW is its kernels' time in the profile
of one GPU, which updates as many parameters as a rank of DDP; the rest of the kernels' time is
forward, backward and copies, which no record tells apart. Nor does one have the optimizer of a
sharded step, so that its kernels are one term.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cs336_systems.book.figures import alt
from cs336_systems.book.lookups import Page

if TYPE_CHECKING:
    from cs336_systems.book.pages import Book

MODEL, NUM_RANKS, PRECISION = "xl", 2, "bfloat16 autocast"
OVERLAP = "ddp_overlap_individual_parameters_benchmarking"
# stage: problem, implementation, whether each rank updates all parameters
STAGES = {
    "naive DDP": ("naive_ddp_benchmarking", "naive", True),
    "flat DDP": ("minimal_ddp_flat_benchmarking", "flat", True),
    "overlapped DDP": (OVERLAP, "overlap", True),
    "bucketed DDP": (OVERLAP, "bucketed", True),
    "ZeRO-1": ("optimizer_state_sharding_accounting", "zero1", False),
    "FSDP": ("fsdp_accounting", "fsdp", False),
}
TERMS = {  # term: colour of its part of a bar
    "other kernels": "#4c78a8",
    "AdamW": "#54a24b",
    "all kernels, AdamW among them": "#72b7b2",
    "exposed communication": "#e45756",
    "neither kernels nor link": "#bab0ac",
}


def step_terms(book: Book) -> list[dict[str, Any]]:
    """Return a row for each stage and term: `stage`, `term`, `ms`, `order` and the `date`.

    The terms of a stage add up to the traced time of its step. Raises ValueError if a record is
    missing.
    """
    profile: Any = partial(
        Page(book, "nsys_profile").number,
        "optimizer_time",
        mode="train_step",
        model=MODEL,
        context=512,
        precision=PRECISION,
    )
    adamw, date_of_adamw = profile(), date_of(profile(column="run"))
    rows = []
    for stage, (problem, implementation, updates_all) in STAGES.items():
        where: dict[str, Any] = {"model": MODEL, "num_ranks": NUM_RANKS, "precision": PRECISION}
        if stage == "FSDP":
            where["reduce"] = "bfloat16"
        read: Any = partial(Page(book, problem).number, mode="train_step", **where)
        kernels = read("compute_time", implementation)
        exposed = read("communication_time", implementation)
        exposed -= read("overlap_time", implementation)
        whole = read("traced_time", implementation)
        date = date_of(read("traced_time", implementation, column="run"))

        split = [kernels - adamw, adamw, 0.0] if updates_all else [0.0, 0.0, kernels]
        times = [*split, exposed, max(0.0, whole - kernels - exposed)]
        for order, (term, ms) in enumerate(zip(TERMS, times)):
            if ms:
                row = {"stage": stage, "term": term, "ms": round(ms, 1), "order": order}
                rows.append(row | {"date": date_of_adamw if term == "AdamW" else date})
    return rows


def date_of(run: str) -> str:
    """Return the day of the run named `run`, whose name begins with it: "2026-11-21"."""
    return f"{run[:4]}-{run[4:6]}-{run[6:8]}"


def step_chart(rows: list[dict[str, Any]]) -> Any:
    """Return the Altair chart of `step_terms`: a bar for each stage, stacked by term."""
    whole = {stage: sum(row["ms"] for row in rows if row["stage"] == stage) for stage in STAGES}
    first, last = whole["naive DDP"], whole["FSDP"]
    dates = sorted({row["date"] for row in rows})
    claim = f"From naive DDP to FSDP a step goes from {first:.0f} to {last:.0f} ms"
    below = [
        "xl, two H200, 2,048 tokens a rank, bfloat16; FSDP without autocast's casts",
        f"traces of {' and '.join(dates)}; each bar adds up to its traced step",
    ]
    color = alt.Scale(domain=list(TERMS), range=list(TERMS.values()))
    bars = alt.Chart(alt.Data(values=rows)).mark_bar()
    return bars.encode(
        y=alt.Y("stage:N", sort=list(STAGES), title=None),
        x=alt.X("ms:Q", stack="zero", title="ms a step"),
        color=alt.Color("term:N", sort=list(TERMS), title=None, scale=color).legend(
            orient="top", columns=3
        ),
        order="order:O",
        tooltip=["stage:N", "term:N", alt.Tooltip("ms:Q", format=".1f"), "date:N"],
    ).properties(width=520, height=200, title=alt.Title(text=claim, subtitle=below))
