"""Autocast's dtypes, a layer norm computed in one dtype, and step times in three precisions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cs336_systems.book.frames import dicts, digits, pick, speed
from cs336_systems.config import SIZES_OF_BOTH, DTypeName, ModelCase, Precision, RunConfig
from cs336_systems.experiments import (
    Bars,
    Cell,
    Experiment,
    Pick,
    Pivot,
    Row,
    Sample,
    Wide,
    problem,
)
from cs336_systems.subjects.model_steps import (
    MODEL_MODES,
    STEPS_A_TURN,
    TrainingStep,
    model_cases,
    model_rounds,
    round_samples,
    timed_modes,
)

PRECISIONS = (Precision(), Precision(autocast="bfloat16"), Precision(parameters="bfloat16"))
NORM_SCALES = (1.0, 100.0, 300.0, 1000.0)
NORM_WIDTH, NORM_EPS = 1024, 1e-5
NORM_DTYPES: tuple[DTypeName, ...] = ("float32", "float16", "bfloat16")
LOW: tuple[DTypeName, ...] = ("float16", "bfloat16")
AUTOCAST_TENSORS = ("parameters", "fc1 output", "layer norm output", "logits", "loss", "gradients")
BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True, kw_only=True)
class AutocastCase:
    """The toy model's training step under autocast."""

    dtype: DTypeName


@dataclass(frozen=True, kw_only=True)
class NormCase:
    """A layer norm computed in one dtype throughout, on inputs of standard deviation `scale`."""

    dtype: DTypeName
    scale: float


OVERFLOW = Row(mode="forward", quantity="overflowing_squares", unit="1")
NORM_ERROR = Row(mode="forward", quantity="norm_error", unit="1")
DTYPES_SEEN = tuple(
    Row(mode="forward_backward", quantity=f"dtype of {name}", unit="bit")
    for name in AUTOCAST_TENSORS
)


class ToyModel(nn.Module):
    """The handout's toy model: linear, ReLU, layer norm, linear."""

    def __init__(self, in_features: int = 20, out_features: int = 5) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)

    def forward(self, x: Float[Tensor, "batch features"]) -> Float[Tensor, "batch classes"]:
        return self.fc2(self.ln(F.relu(self.fc1(x))))


def autocast_dtypes(device: str, dtype: str) -> dict[str, str]:
    """Return the dtype of each of `AUTOCAST_TENSORS` in a step of `ToyModel` under autocast.

    `device` and `dtype` are autocast's.
    """
    model = ToyModel().to(device)
    seen: dict[str, Tensor] = {}
    for name, module in (
        ("fc1 output", model.fc1),
        ("layer norm output", model.ln),
        ("logits", model.fc2),
    ):
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.__setitem__(name, output)
        )
    x = torch.randn(8, 20, device=device)
    targets = torch.zeros(8, dtype=torch.int64, device=device)
    with torch.autocast(device, dtype=getattr(torch, dtype)):
        seen["parameters"] = model.fc1.weight
        seen["loss"] = F.cross_entropy(model(x), targets)
    seen["loss"].backward()
    gradient = model.fc1.weight.grad
    assert gradient is not None
    seen["gradients"] = gradient
    return {name: str(seen[name].dtype).removeprefix("torch.") for name in AUTOCAST_TENSORS}


class NormResult(NamedTuple):
    """What a layer norm computed in one dtype loses."""

    overflowing_squares: float  # the fraction of squared deviations that are infinite
    # Largest difference of the output from float64's, whose elements are of order 1. NaN if an
    # element is not finite.
    error: float


def norm_in(dtype: str, scale: float, *, device: str = "cpu") -> NormResult:
    """Run a layer norm with every step rounded to `dtype`, on normal inputs scaled by `scale`.

    Twice as large inputs have the same normalised output, but squares four times as large: in
    float16 they pass 65,504 where |x - mean| exceeds 256. bfloat16 has float32's range and loses
    digits instead.
    """
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(16, NORM_WIDTH, generator=generator, dtype=torch.float64)).to(device)
    expected = F.layer_norm(x, (NORM_WIDTH,), eps=NORM_EPS)
    low = x.to(getattr(torch, dtype))
    deviation = low - low.mean(dim=-1, keepdim=True)
    squares = deviation.square()
    normalized = deviation * torch.rsqrt(squares.mean(dim=-1, keepdim=True) + NORM_EPS)
    return NormResult(
        overflowing_squares=float(squares.isinf().double().mean()),
        error=float((normalized.double() - expected).abs().max()),
    )


def gain_claim(rows: pd.DataFrame) -> str:
    """Return that larger models gain more, if the speed rises from size to size in every mode."""
    if not all(of["over_float32"].is_monotonic_increasing for _, of in rows.groupby("mode")):
        return ""
    gains, sizes = rows["over_float32"], list(dict.fromkeys(rows["model"]))
    ends = f"{digits(gains.min())} on {sizes[0]} to {digits(gains.max())} times on {sizes[-1]}"
    return f"bfloat16 autocast gains more the larger the model: {ends}"


@problem()
class BenchmarkingMixedPrecision(Experiment):
    by_turns = True  # the precisions of one model size take turns

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return cells for autocast's dtypes, the norm's errors, and each size's steps.

        The steps are timed in float32, under bfloat16 autocast and in bfloat16.
        """
        cells = [
            Cell(case=AutocastCase(dtype=dtype), implementation="eager", rows=DTYPES_SEEN)
            for dtype in LOW
        ]
        norms = [
            NormCase(dtype=dtype, scale=scale) for dtype in NORM_DTYPES for scale in NORM_SCALES
        ]
        cells += [
            Cell(case=norm, implementation="eager", rows=(OVERFLOW, NORM_ERROR)) for norm in norms
        ]

        modes = MODEL_MODES if run.scale == "handout" else MODEL_MODES[:2]
        for case in model_cases(run, SIZES_OF_BOTH):
            # On a CPU without bfloat16 units a real model's step takes many seconds.
            if run.scale != "handout" and not case.model.name.endswith("-proxy"):
                continue
            case = replace(case, warmup=2 if run.scale == "handout" else 0)
            of_precisions = [replace(case, precision=precision) for precision in PRECISIONS]
            times = tuple(Row(mode, "time", "ms", one) for one in of_precisions for mode in modes)
            cells.append(Cell(case=case, implementation="eager", rows=times))
        return cells

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        if isinstance(cell.case, AutocastCase):
            found = autocast_dtypes(run.device, cell.case.dtype)
            for row, name in zip(DTYPES_SEEN, AUTOCAST_TENSORS, strict=True):
                yield Sample(row=row, samples=[BITS[found[name]]], kernel=found[name])
        elif isinstance(cell.case, NormCase):
            result = norm_in(cell.case.dtype, cell.case.scale, device=run.device)
            yield Sample(row=OVERFLOW, samples=[result.overflowing_squares])
            yield Sample(row=NORM_ERROR, samples=[result.error])
        else:
            yield from self._measure_precisions(cell, run)

    def _measure_precisions(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Yield the times of all modes, with the precisions taking turns.

        Each turn builds its own model, since no GPU holds three of `10b`.
        """

        def turn(case: ModelCase, modes: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
            yield from timed_modes(
                TrainingStep(case, run), modes, warmup=case.warmup, count=STEPS_A_TURN
            )

        rows = {(row.case, row.mode): row for row in cell.rows}
        players, modes = (list(dict.fromkeys(names)) for names in zip(*rows))
        yield from round_samples(rows, *model_rounds(players, turn, modes, run))

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "tensor": row["quantity"].removeprefix("dtype of "),
            "under": f"{row.get('dtype')} autocast",
            "percent": 100 * row["median"]
            if row["quantity"] == "overflowing_squares"
            else float("nan"),
        }

    def compared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Add `over_float32`: how many times as fast a pass is as the model's in float32."""
        rows = dicts(frame)
        known = {
            (row.get("model"), row["mode"], row["precision"]): row
            for row in rows
            if row["quantity"] == "time"
        }
        pairs = [(row, known.get((row.get("model"), row["mode"], "float32"))) for row in rows]
        return frame.assign(
            over_float32=[speed(row, base) if base else float("nan") for row, base in pairs]
        )

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return `gain(model)`: a training step's speed under autocast over that in float32."""

        def gain(model: str) -> str:
            chosen = {
                "model": model,
                "mode": "train_step",
                "precision": "bfloat16 autocast",
                "quantity": "time",
            }
            (row,) = dicts(pick(frame, chosen))
            return digits(row["over_float32"])

        return {"gain": gain}

    tables = {
        "times": Pivot(
            title="Time of a step; speed within a run, the bfloat16 autocast's over float32's",
            down=("model", "mode"),
            across="precision",
            where={"quantity": "time"},
            ratios=(("bfloat16 autocast", "float32"),),
        ),
        "dtypes": Pivot(
            title="Dtypes of the toy model under autocast",
            down=("tensor",),
            across="under",
            value="kernel",
            where={"quantity": lambda quantity: quantity.startswith("dtype of")},
        ),
        "norm": Wide(
            title="Layer norm computed in one dtype throughout",
            down={"dtype": "dtype", "std of the inputs": "scale"},
            where={"case_type": "NormCase"},
            columns={
                "infinite squares (%)": Pick({"quantity": "overflowing_squares"}, value="percent"),
                "largest error of the output": Pick({"quantity": "norm_error"}),
            },
        ),
    }
    figures = {
        "steps": Bars(
            claim=gain_claim,
            title="Speed of bfloat16 autocast over float32",
            x="model",
            y="over_float32",
            y_title="speed over float32's",
            color="mode",
            significant=2,
            subtitle="precisions by turns",
            where={"quantity": "time", "precision": "bfloat16 autocast"},
        )
    }
