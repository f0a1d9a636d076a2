"""A real training run with every wrapper, compared with the losses of one process.

It is no problem of the handout, but what its sections 5 to 8 are for. A cell trains from the same
seed on the same text. Its loss curve is recorded only if it is the curve of one process without a
wrapper, up to rounding.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pandas as pd
import torch

from cs336_systems.book.frames import dicts, digits
from cs336_systems.book.tables import Pick, Wide
from cs336_systems.config import MODEL_SIZES, ModelConfig, RunConfig
from cs336_systems.distributed.spawn import launch
from cs336_systems.experiments import (
    Cell,
    Disagreement,
    Experiment,
    Lines,
    Row,
    Sample,
    Unsupported,
    problem,
)
from cs336_systems.training import TrainingConfig, TrainingResult, train
from cs336_systems.training.hyperparameters import NANO, WRAPPERS, byte_model
from cs336_systems.training.loop import RunOptions, train_rank

LOSS = Row(mode="train_step", quantity="loss", unit="nats")
VALIDATION = Row(mode="train_step", quantity="validation_loss", unit="nats")
ROWS = (LOSS, VALIDATION)
TINY = ModelConfig(
    name="tiny", d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=256, context_length=32
)
NUM_RANKS = 2
# Rounding in another order moves a loss a little at first, and training amplifies it. The bounds,
# relative to one process, hold for each of the first steps and for the mean over the last ones.
FIRST_STEPS, FIRST_BOUND = 10, 1e-4
LAST_STEPS, LAST_BOUND = 10, 1e-2
# The earlier stages of DDP are left out: bucketed DDP is the last of them.
DRAWN = ("bucketed", "sharded-optimizer", "zero1", "fsdp")
STEPS_A_POINT = 25  # averaged in a point of the figure
SMALLEST = 0.1  # millionths: smaller differences are drawn as this one, float32's rounding


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """The settings with which a cell trains; its wrapper is the cell's implementation."""

    model: ModelConfig
    num_ranks: int
    attention: str
    batch: int
    accumulation: int
    steps: int
    learning_rate: float
    final_learning_rate: float
    warmup_steps: int
    clip_norm: float

    def config(self, wrapper: str, seed: int) -> TrainingConfig:
        """Return the configuration of a training run with these settings."""
        return TrainingConfig(wrapper=wrapper, seed=seed, **vars(self))


def training_case(run: RunConfig) -> TrainingCase:
    """Return one process's run at the scale: the small model, a narrow one, or a few steps.

    These are the handout, smoke and tiny scales.
    """
    case = TrainingCase(
        model=NANO,
        num_ranks=1,
        attention="sdpa",
        batch=16,
        accumulation=1,
        steps=300,
        learning_rate=2e-3,
        final_learning_rate=2e-4,
        warmup_steps=20,
        clip_norm=1.0,
    )
    if run.scale == "tiny":
        return replace(case, model=TINY, batch=4, steps=6, warmup_steps=2)
    if run.scale == "smoke":
        return replace(case, model=byte_model(NANO, 64), batch=8, steps=40, warmup_steps=8)
    small = byte_model(MODEL_SIZES["small"], 256)
    return replace(
        case, model=small, steps=200, learning_rate=6e-4, final_learning_rate=6e-5, warmup_steps=50
    )


def curve_error(losses: list[float], expected: list[float]) -> float:
    """Return the largest difference of two loss curves over its bound.

    The bounds hold for each of the first steps and for the mean over the last. Infinite if a loss
    is not finite or the lengths differ.
    """
    if len(losses) != len(expected) or not all(map(math.isfinite, losses)):
        return math.inf
    first = max(
        abs(ours / theirs - 1) for ours, theirs in list(zip(losses, expected))[:FIRST_STEPS]
    )
    last = abs(sum(losses[-LAST_STEPS:]) / sum(expected[-LAST_STEPS:]) - 1)
    return max(first / FIRST_BOUND, last / LAST_BOUND)


@lru_cache(maxsize=1)
def _alone(case: TrainingCase, device: str, seed: int) -> TrainingResult:
    """Return the run of one process, with which every wrapper's is compared."""
    return train(case.config("none", seed), RunOptions(device=device))


class Differences(Lines):
    """Lines of each wrapper's relative loss difference from one process, in millionths, by step.

    Each point is the mean over STEPS_A_POINT steps.
    """

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the points of the lines: wrapper, last step of the group, mean difference."""
        found = []
        rows = dicts(super().rows(frame))
        alone = next((row for row in rows if row["implementation"] == "none"), None)
        for row in rows:
            if alone is None or row is alone:
                continue
            pairs = [1e6 * abs(a / b - 1) for a, b in zip(row["samples"], alone["samples"])]
            for at in range(0, len(pairs), STEPS_A_POINT):
                group = pairs[at : at + STEPS_A_POINT]
                difference = max(sum(group) / len(group), SMALLEST)
                found.append(
                    {
                        "wrapper": row["implementation"],
                        "step": at + len(group),
                        "difference": difference,
                    }
                )
        return pd.DataFrame(found, columns=["wrapper", "step", "difference"])


def same_claim(rows: pd.DataFrame) -> str:
    worst = rows["difference"].max()
    if not worst < 1000:
        return ""
    return f"Every wrapper's loss is within {digits(worst)} millionths of one process's"


@problem(title="Training a language model with every wrapper: the same losses", order=19)
class TrainingRun(Experiment):
    implementations = WRAPPERS

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return one process, then each wrapper on two ranks, one with gradient accumulation."""
        alone = training_case(run)
        wrappers = {"tiny": ("bucketed",), "smoke": ("bucketed", "sharded-optimizer", "fsdp")}
        cells = [Cell(case=alone, implementation="none", rows=ROWS)]
        for wrapper in wrappers.get(run.scale, WRAPPERS[1:]):
            case = replace(
                alone, num_ranks=NUM_RANKS, accumulation=2 if wrapper == "bucketed" else 1
            )
            cells.append(Cell(case=case, implementation=wrapper, rows=ROWS))
        return cells

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Train, compare with one process, then yield each step's loss and the held-out loss."""
        if run.model is not None:
            raise Unsupported("the run trains this package's model, not the user's")
        case: TrainingCase = cell.case
        result = expected = _alone(replace(case, num_ranks=1, accumulation=1), run.device, run.seed)
        if cell.implementation != "none":
            own_gpus = run.device == "cuda" and torch.cuda.device_count() >= case.num_ranks
            result = launch(
                train_rank,
                case.num_ranks,
                case.config(cell.implementation, run.seed),
                RunOptions(device=run.device),
                backend="nccl" if own_gpus else "gloo",
                device=run.device,
                start_method="forkserver" if run.device == "cpu" else "spawn",
            )[0]
        error = curve_error(result.losses, expected.losses)
        if not error <= 1:
            raise Disagreement(f"losses are off one process's by {error:.3g} times the bound")
        for row, samples in zip(ROWS, (result.losses, [result.validation_loss])):
            yield Sample(row=row, samples=samples, error=error if row == LOSS else None)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        last = row["samples"][-LAST_STEPS:]
        return {
            "first": row["samples"][0] if row["samples"] else math.nan,
            "last": sum(last) / len(last) if last else math.nan,
        }

    tables = {
        "losses": Wide(
            title="Loss in nats a byte",
            down={
                "wrapper": "implementation",
                "ranks": "num_ranks",
                "micro-batches": "accumulation",
            },
            columns={
                "first loss": Pick({"quantity": "loss"}, value="first", significant=5),
                "mean of the last 10": Pick({"quantity": "loss"}, value="last", significant=5),
                "held-out loss": Pick({"quantity": "validation_loss"}, significant=4),
                "difference over its bound": Pick(
                    {"quantity": "loss"}, value="error", significant=2
                ),
            },
        )
    }
    figures = {
        "differences": Differences(
            claim=same_claim,
            subtitle="two ranks, means over 25 steps",
            title="Difference of the loss from one process's, four of seven wrappers, "
            "means over 25 steps",
            x="step",
            y="difference",
            y_title="relative difference (millionths)",
            color="wrapper",
            where={"quantity": "loss", "implementation": ("none", *DRAWN)},
        )
    }
