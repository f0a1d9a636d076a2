"""Where the time of a step goes, read from profiles by code and not from a timeline by eye.

For each model and context the forward, the forward with backward, and the full step with AdamW are
first timed by the wall clock, undisturbed, and then profiled. The rows of a mode are the wall
clock; the kernels' summed time and their number; the time of each category; the kernels that take
the most time, and those that are no matmul; and what plain attention spends on its two products and
on what stands between them.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from cs336_systems.book.frames import span
from cs336_systems.config import (
    MODEL_SIZES,
    SIZES_2025,
    ModelCase,
    ModelConfig,
    Precision,
    RunConfig,
    proxy_model,
)
from cs336_systems.experiments import (
    Bars,
    Cell,
    Experiment,
    Listing,
    Pick,
    Ratio,
    Row,
    Sample,
    Wide,
    problem,
)
from cs336_systems.measure.allocations import release
from cs336_systems.measure.capture import capture
from cs336_systems.measure.kernel_names import CATEGORIES, short_name
from cs336_systems.measure.ranges import SCORES, SOFTMAX, VALUES, annotate
from cs336_systems.measure.trace import Trace
from cs336_systems.subjects.model_steps import MODEL_MODES, TrainingStep, wall_clock

WALL_CLOCK_STEPS = 5  # `compare` needs four
CONTEXTS = (128, 256, 512, 1024)
# The longest context with which a full step fits an H200, and the next, with which it does not.
LONGEST = {"small": (6144, 7168), "xl": (1536, 2048)}
WITH_AUTOCAST = ("small", "xl")  # profiled under autocast, too, at the context 512
NUM_PROFILED_STEPS = {"tiny": 1, "smoke": 2, "handout": 2}
# The five longest kernels, and the five longest that are no matmul.
RANKED, RANKS = ("kernel", "other_kernel"), range(1, 6)
CATEGORY_WORDS = {"gemm": "matmul"}
ATTENTION_PARTS = {"scores": SCORES, "softmax": SOFTMAX, "values": VALUES}


def models(run: RunConfig) -> list[tuple[ModelConfig, int]]:
    """Return (model, batch) pairs of both editions, or proxies below handout scale.

    The proxies are those of the smallest and the largest model. 2025: every size at each of
    CONTEXTS. 2026: two sizes and three contexts, the last the longest that trains on the GPU: for
    `small` and `xl` the contexts of LONGEST.
    """
    if run.scale == "handout":
        asked = [(size, context) for size in SIZES_2025 for context in CONTEXTS]
        asked += [(size, context) for size, contexts in LONGEST.items() for context in contexts]
        return [(replace(MODEL_SIZES[size], context_length=context), 4) for size, context in asked]
    if run.scale == "tiny":
        model = replace(proxy_model("small", 64), vocab_size=256)
        return [(replace(model, context_length=context), 1) for context in (16, 32)]

    # The vocabulary is small: at these widths the handout's would leave the blocks hardly any share
    # of the time.
    proxies = [
        replace(proxy_model(size, width), vocab_size=1000)
        for size, width in (("small", 128), ("xl", 256))
    ]
    return [
        (replace(proxy, context_length=context), 1)
        for proxy in proxies
        for context in (64, 128, 256)
    ]


def selections(mode: str) -> dict[str, dict[str, str]]:
    """Return the times that a profile of `mode` is asked for, by name.

    Each value selects the kernels that the time sums up.
    """
    found: dict[str, dict[str, str]] = {"kernel_time": {}}
    found |= {f"{category}_time": {"category": category} for category in CATEGORIES}
    if mode != "train_step":
        found |= {
            f"attention_{part}_time": {"within": name} for part, name in ATTENTION_PARTS.items()
        }
        # The softmax alone, without scale and mask.
        found["attention_softmax_kernel_time"] = {"within": SOFTMAX, "category": "softmax"}
    return found


def profile_rows(mode: str) -> list[Row]:
    """Return the rows of a profile of `mode`."""
    names = ["time", *selections(mode), "kernel_calls"]
    names += [
        f"{name}_{rank}_{what}" for name in RANKED for rank in RANKS for what in ("time", "calls")
    ]
    return [Row(mode, name, "calls" if name.endswith("_calls") else "ms") for name in names]


def measurements(trace: Trace, rows: dict[str, Row]) -> Iterator[Sample]:
    """Yield samples of a mode's `rows` from `trace`, one value for each profiled step.

    The wall clock is not among them.
    """
    steps = range(len(trace.step_ms))
    trace = trace.in_steps()
    for quantity, selection in selections(rows["time"].mode).items():
        yield Sample(
            row=rows[quantity], samples=[trace.kernel_ms(step=step, **selection) for step in steps]
        )
    yield Sample(
        row=rows["kernel_calls"], samples=[float(len(trace.select(step=step))) for step in steps]
    )

    # Rank kernels by name alone, since an operator may be of two categories.
    totals: dict[str, float] = defaultdict(float)
    for total in trace.top_kernels():
        totals[total.name] += total.ms
    matmuls = {short_name(kernel.name) for kernel in trace.select(category="gemm")}
    names = sorted(totals, key=lambda name: (-totals[name], name))
    for prefix, ranked in (
        ("kernel", names),
        ("other_kernel", [name for name in names if name not in matmuls]),
    ):
        for rank in RANKS:
            time, calls = rows[f"{prefix}_{rank}_time"], rows[f"{prefix}_{rank}_calls"]
            if rank > len(ranked):
                reason = f"the profile has {len(ranked)} such kernels"
                yield from (Sample(row=row, message=reason) for row in (time, calls))
                continue
            name = ranked[rank - 1]
            chosen = [
                [k for k in trace.select(step=step) if short_name(k.name) == name] for step in steps
            ]
            taken = [sum(kernel.duration_us for kernel in kernels) / 1e3 for kernels in chosen]
            yield Sample(row=time, samples=taken, kernel=name)
            yield Sample(
                row=calls, samples=[float(len(kernels)) for kernels in chosen], kernel=name
            )


class Shares(Bars):
    """Stacked bars of each part's share of its bar's sum, in percent."""

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        rows = super().rows(frame)
        rows = rows[rows["median"] > 0]
        return rows.assign(
            share=100 * rows["median"] / rows.groupby(self.x)["median"].transform("sum")
        )


def products_claim(rows: pd.DataFrame) -> str:
    """Return the matmuls' share in float32, if it is more than half of every bar."""
    shares = rows.loc[(rows["category"] == "matmul") & (rows["precision"] == "float32"), "share"]
    if not shares.min() > 50:
        return ""
    return f"In float32 matmuls take {span(shares, 2)} % of the time of a training step's kernels"


@problem()
class NsysProfile(Experiment):
    def cells(self, run: RunConfig) -> list[Cell]:
        """Return every model and context in float32, at handout scale some under autocast too.

        Those under bfloat16 autocast have the context 512.
        """
        cases = [
            ModelCase(model=model, batch=batch, attention="reference", warmup=2)
            for model, batch in models(run)
        ]
        if run.scale == "handout":
            autocast = Precision(autocast="bfloat16")
            middle = [
                case
                for case in cases
                if case.model.context_length == 512 and case.model.name in WITH_AUTOCAST
            ]
            cases += [replace(case, precision=autocast) for case in middle]
        rows = tuple(row for mode in MODEL_MODES for row in profile_rows(mode))
        return [Cell(case=case, implementation="eager", rows=rows) for case in cases]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Time and profile each mode; Disagreement if logits or loss are not finite."""
        release(run.device)
        step = TrainingStep(cell.case, run)
        for mode in MODEL_MODES:
            rows = {row.quantity: row for row in cell.rows if row.mode == mode}
            warmup, call = cell.case.warmup, getattr(step, mode)
            yield Sample(
                row=rows["time"], samples=wall_clock(step, mode, warmup + WALL_CLOCK_STEPS)[warmup:]
            )
            with annotate(step.model):
                num_steps = NUM_PROFILED_STEPS[run.scale]
                trace = capture(
                    call, device=run.device, num_steps=num_steps, warmup=0, before=step.reset
                )
            step.reset()
            yield from measurements(trace, rows)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add the context, a kernel's rank and group, the category and the model in words."""
        category = row["quantity"].removesuffix("_time")
        known = category in CATEGORIES and row["quantity"].endswith("_time")
        rank = next((rank for rank in RANKS if f"kernel_{rank}_" in row["quantity"]), None)
        precision = "" if row["precision"] == "float32" else f", {row['precision']}"
        return {
            "context": row["model.context_length"],
            "rank": rank,
            "among": "no matmul" if row["quantity"].startswith("other_") else "all",
            "category": CATEGORY_WORDS.get(category, category) if known else "",
            "shown": f"{row['model']}, context {row['model.context_length']:,}{precision}",
        }

    tables = {
        "time": Wide(
            title="Wall clock and kernels of a pass",
            down={"model": "shown"},
            columns={
                "forward, wall clock (ms)": Pick({"mode": "forward", "quantity": "time"}),
                "its kernels (ms)": Pick({"mode": "forward", "quantity": "kernel_time"}),
                "kernels": Pick({"mode": "forward", "quantity": "kernel_calls"}),
                "matmul (ms)": Pick({"mode": "forward", "quantity": "gemm_time"}),
                "matmuls' share": Ratio("matmul (ms)", "its kernels (ms)", percent=True),
                "step, wall clock (ms)": Pick({"mode": "train_step", "quantity": "time"}),
                "step's kernels (ms)": Pick({"mode": "train_step", "quantity": "kernel_time"}),
                "step's matmul (ms)": Pick({"mode": "train_step", "quantity": "gemm_time"}),
                "matmuls' share of the step": Ratio(
                    "step's matmul (ms)", "step's kernels (ms)", percent=True
                ),
                "AdamW (ms)": Pick({"mode": "train_step", "quantity": "optimizer_time"}),
                "AdamW's share": Ratio("AdamW (ms)", "step's kernels (ms)", percent=True),
            },
        ),
        "attention": Wide(
            title="Attention of a forward, all layers (ms)",
            down={"model": "shown"},
            where={"mode": "forward"},
            columns={
                "QKᵀ": Pick({"quantity": "attention_scores_time"}),
                "scale, mask, softmax": Pick({"quantity": "attention_softmax_time"}),
                "of it softmax": Pick({"quantity": "attention_softmax_kernel_time"}),
                "PV": Pick({"quantity": "attention_values_time"}),
            },
        ),
        "kernels": Listing(
            title="The kernels that take the most time, and those of no matmul (ms)",
            where={"quantity": tuple(f"{name}_{rank}_time" for name in RANKED for rank in RANKS)},
            columns={
                "model": "shown",
                "pass": "mode",
                "of": "among",
                "rank": lambda row: int(row["rank"]),
                "kernel": "kernel",
                "ms": "median",
            },
        ),
    }
    figures = {
        "categories": Shares(
            claim=products_claim,
            title="Where the kernels' time of a training step goes",
            x="shown",
            y="share",
            y_title="share of the kernels' time (%)",
            color="category",
            stacked=True,
            subtitle="float32 unless the bar says bfloat16",
            where={"mode": "train_step", "category": lambda category: category != ""},
        )
    }
