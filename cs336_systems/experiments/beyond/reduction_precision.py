"""The error of a mean over ranks in bfloat16, by order of additions, and what training sees of it.

Errors are of simulated ranks whose gradients are a mean, common to all, plus noise of their own.
They are relative to the exact mean of the float32 gradients, over all elements. Numbers are drawn
by NumPy and added one by one, so they are the same on every machine.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cs336_systems.analysis.bandwidth import bus_factor
from cs336_systems.analysis.reductions import (
    halving_sum,
    message_sum,
    ring_sum,
    stochastic_add,
)
from cs336_systems.book.frames import digits, pick
from cs336_systems.experiments import Calculation, Lines, Listing, problem
from cs336_systems.subjects.reduced_training import one_thread, train

# how the ranks' gradients differ -> standard deviation of the mean over that of a rank's noise
GRADIENTS = {"differ": 0.1, "agree": 10.0}
NUM_RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
LISTED_RANKS = (2, 4, 8, 64, 512)
LEAST_OF_SLOPE = 8  # ranks from which on the growth is fitted
NUM_ELEMENTS, NUM_STEPS = 256, 16  # the mean is the same in each step, the noise is not

RING, TREE, STOCHASTIC = "ring", "tree", "ring, stochastic rounding"
MESSAGES, SENT_BACK = "bfloat16 messages, float32 sum", "the same, rounded again"
EXACT = "ring in float32"
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    RING: lambda gradients: ring_sum(gradients.bfloat16()),
    TREE: lambda gradients: halving_sum(gradients.bfloat16()),
    STOCHASTIC: lambda gradients: ring_sum(
        gradients.bfloat16(), stochastic_add(torch.Generator().manual_seed(0))
    ),
    MESSAGES: message_sum,
    SENT_BACK: lambda gradients: message_sum(gradients).bfloat16(),
    EXACT: ring_sum,
}
BYTES = {RING: 2, MESSAGES: 2, EXACT: 4}  # of an element of a message

MICRO_BATCHES, MICRO_RANKS = 64, 8
TRAINING_RANKS, TRAINING_STEPS, LAST_STEPS = 64, 60, 20
OTHER_DATA = "other data"
SIGNIFICANT = 3  # digits that rows keep, so that another machine's last bits show nowhere


@lru_cache(maxsize=1)  # the sums of a case share it
def draw(gradients: str, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return float32 gradients of `num_ranks` ranks in NUM_STEPS steps, and their exact mean.

    They are (ranks, steps · elements) and (steps · elements) in float64.
    """
    generator = np.random.default_rng(num_ranks)
    mean = GRADIENTS[gradients] * generator.standard_normal(NUM_ELEMENTS)
    noise = generator.standard_normal((num_ranks, NUM_STEPS, NUM_ELEMENTS))
    drawn = torch.from_numpy(mean + noise).float().flatten(1)
    # float64 adds 512 float32 values with an error of 10⁻¹⁴, in any order
    return drawn, drawn.double().mean(0)


def errors(gradients: str, num_ranks: int, sum_of: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Return the errors of a mean over ranks that `sum_of` adds.

    Relative, in percent: of a step's mean ("error") and of the mean of NUM_STEPS steps ("of
    steps"). Independent errors make the second smaller by the root of NUM_STEPS, equal ones do not.
    Also the "shrinkage", the part of the error that shortens the exact mean, and the error over the
    noise of the exact mean itself, which is a mean of that many ranks only ("of noise").
    """
    drawn, exact = draw(gradients, num_ranks)
    error = sum_of(drawn).double() / num_ranks - exact
    scale = root_mean_square(exact)
    of_steps = error.view(NUM_STEPS, NUM_ELEMENTS).mean(0)
    found = {
        "error": root_mean_square(error) / scale,
        "of steps": root_mean_square(of_steps) / scale,
        "shrinkage": -float(error @ exact / (exact @ exact)),
        "of noise": root_mean_square(error) * math.sqrt(num_ranks),
    }
    return {name: 100 * rounded(value) for name, value in found.items()}


def root_mean_square(values: Tensor) -> float:
    """Return the root of the mean square of `values`."""
    return math.sqrt(float(values.square().mean()))


def rounded(value: float) -> float:
    """Return `value` with SIGNIFICANT digits."""
    return float(f"{value:.{SIGNIFICANT}g}")


def accumulated_error(gradients: str, accumulate: torch.dtype, sum_of: str) -> float:
    """Return the error in percent of a mean over ranks, each of which adds micro-batches first.

    MICRO_RANKS ranks add MICRO_BATCHES gradients each in the dtype `accumulate`, one by one, then
    `sum_of` adds the ranks'.
    """
    drawn, exact = draw(gradients, MICRO_RANKS * MICRO_BATCHES)
    micro = drawn.view(MICRO_RANKS, MICRO_BATCHES, -1).to(accumulate)
    totals = micro[:, 0]
    for number in range(1, MICRO_BATCHES):
        totals = totals + micro[:, number]
    mean = SUMS[sum_of](totals.float()).double() / len(drawn)
    return 100 * rounded(root_mean_square(mean - exact) / root_mean_square(exact))


@cache
def training_rows() -> list[dict[str, Any]]:
    """Return a row for each way to reduce, with its distance from a run that reduces in float32.

    The row OTHER_DATA is a float32 run on other batches: what the choice of data alone changes.
    """
    runs = {
        name: train(SUMS[name], num_ranks=TRAINING_RANKS, steps=TRAINING_STEPS)
        for name in (EXACT, RING, MESSAGES)
    }
    runs[OTHER_DATA] = train(
        SUMS[EXACT], num_ranks=TRAINING_RANKS, steps=TRAINING_STEPS, data_seed=1
    )
    base = runs[EXACT]
    rows = []
    for name, run in runs.items():
        last = [sum(one.losses[-LAST_STEPS:]) / LAST_STEPS for one in (run, base)]
        distance = (run.weights - base.weights).norm() / base.weights.norm()
        rows.append(
            {
                "quantity": "training",
                "sum": name,
                "first loss": rounded(run.losses[0]),
                "last loss": rounded(last[0]),
                "loss change": 100 * rounded(abs(last[0] / last[1] - 1)),
                "weights change": 100 * rounded(float(distance)),
                "agreement": rounded(sum(run.agreement) / len(run.agreement)),
            }
        )
    return rows


@cache
def error_rows() -> list[dict[str, Any]]:
    """Return a row for each kind of gradients, number of ranks and sum, with its errors."""
    return [
        {"quantity": "error", "gradients": gradients, "ranks": num_ranks, "sum": name}
        | {"line": name if gradients == "agree" else f"{name}, ranks {gradients}"}
        | errors(gradients, num_ranks, sum_of)
        for gradients in GRADIENTS
        for num_ranks in NUM_RANKS
        for name, sum_of in SUMS.items()
    ]


def error_claim(rows: pd.DataFrame) -> str:
    """Return a title: the ring's and the float32 sum's error at the most ranks that agree."""
    most = rows["ranks"].max()
    of = rows[rows["ranks"] == most].set_index("line")["error"]
    return (
        f"At {most} ranks that agree a ring in bfloat16 is off by {digits(of[RING])} %, "
        f"float32 sums of bfloat16 messages by {digits(of[MESSAGES])} %"
    )


@problem(title="Means over ranks in bfloat16 against float32", order=18)
class ReductionPrecision(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return the errors of each sum, side by side for the table, and the runs of training."""
        with one_thread():
            rows = error_rows()
            trained = training_rows()
        table = []
        for gradients in GRADIENTS:
            for ranks in LISTED_RANKS:
                found = {
                    row["sum"]: row
                    for row in rows
                    if (row["gradients"], row["ranks"]) == (gradients, ranks)
                }
                table.append(
                    {"quantity": "table", "gradients": gradients, "ranks": ranks}
                    | {name: found[name]["error"] for name in (RING, TREE, STOCHASTIC, MESSAGES)}
                    | {f"{RING}, {NUM_STEPS} steps": found[RING]["of steps"]}
                )
        return [*rows, *table, *trained]

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return the template's functions, and the names of the sums for their arguments.

        `error(sum, ranks, gradients, column)`: a number of `errors` in percent. `growth(sum,
        gradients)`: exponent e of the error ~ ranksᵉ from LEAST_OF_SLOPE ranks on.
        `accumulated(dtype, sum, gradients)`: see `accumulated_error`. `trained(sum, column)`: a
        number of a training run. `sent(sum, operation, ranks)`: bytes that a rank sends for each
        element.
        """

        def error(name: str, ranks: int, gradients: str = "differ", column: str = "error") -> str:
            """Return one of the errors, in percent."""
            where = {"quantity": "error", "sum": name, "ranks": ranks, "gradients": gradients}
            (found,) = pick(frame, where)[column]
            return f"{digits(found)} %"

        def growth(name: str, gradients: str = "differ") -> str:
            """Return the slope of the line through the logarithms of ranks and error."""
            rows = pick(frame, {"quantity": "error", "sum": name, "gradients": gradients})
            rows = rows[rows["ranks"] >= LEAST_OF_SLOPE]
            ranks, found = (np.log(rows[name].to_numpy(dtype=float)) for name in ("ranks", "error"))
            return digits(float(np.polyfit(ranks, found, deg=1)[0]), 2)

        def accumulated(dtype: str, name: str, gradients: str = "differ") -> str:
            """Return the error of MICRO_RANKS ranks with MICRO_BATCHES micro-batches each."""
            with one_thread():
                return f"{digits(accumulated_error(gradients, getattr(torch, dtype), name))} %"

        def trained(name: str, column: str) -> str:
            """Return a number of a training run."""
            (found,) = pick(frame, {"quantity": "training", "sum": name})[column]
            return digits(found, 2)

        def sent(name: str, operation: str = "all_reduce", ranks: int = 8) -> str:
            """Return the bytes that a rank sends for each element of the gradient."""
            return digits(bus_factor(operation, ranks) * BYTES[name])

        return {
            "RING": RING,
            "STOCHASTIC": STOCHASTIC,
            "MESSAGES": MESSAGES,
            "SENT_BACK": SENT_BACK,
            "EXACT": EXACT,
            "OTHER_DATA": OTHER_DATA,
            "error": error,
            "growth": growth,
            "accumulated": accumulated,
            "trained": trained,
            "sent": sent,
        }

    tables = {
        "errors": Listing(
            title="Relative error of the mean over ranks (%), in bfloat16 where not said otherwise",
            where={"quantity": "table"},
            columns={
                "ranks' gradients": "gradients",
                "ranks": "ranks",
                RING: RING,
                TREE: TREE,
                STOCHASTIC: STOCHASTIC,
                MESSAGES: MESSAGES,
                f"{RING}, mean of {NUM_STEPS} steps": f"{RING}, {NUM_STEPS} steps",
            },
        )
    }
    figures = {
        "errors": Lines(
            claim=error_claim,
            title="Error of a mean over ranks in bfloat16",
            subtitle="simulated: ranks agree, mean 10 times the noise, where not said otherwise",
            x="ranks",
            y="error",
            y_title="relative error of the mean (%)",
            color="line",
            where={
                "quantity": "error",
                "line": (RING, TREE, STOCHASTIC, MESSAGES, f"{RING}, ranks differ"),
            },
        )
    }
