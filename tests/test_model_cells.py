"""Model cells: a model that does not work is never recorded as timed."""

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.config import ModelCase, ModelConfig, RunConfig
from cs336_systems.experiments import models
from cs336_systems.experiments.models import MODEL_MODES, TrainingStep, measure_model, wall_clock
from cs336_systems.experiments.spec import Cell, Disagreement, Row
from tests.broken_models import Bigram

MODEL = ModelConfig(
    name="test", d_model=8, d_ff=16, num_layers=1, num_heads=1, vocab_size=11, context_length=6, rope_theta=500.0
)
CASE = ModelCase(model=MODEL, batch=2, attention="reference", warmup=0)


class NotFinite(Bigram):
    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        logits[-1, -1, -1] += float("nan")
        return logits


class OnePosition(Bigram):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[:, :1]


class Pair(Bigram):
    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        return super().forward(tokens), None


class Integers(Bigram):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).long()


class NoParameters(nn.Module):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, self.vocab_size)


class NotFiniteInTraining(Bigram):
    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits * float("nan") if torch.is_grad_enabled() else logits


BROKEN = [
    (NotFinite, r"the model's {what} must be finite, got values from nan to nan"),
    (OnePosition, r"logits of shape .* = \(2, 6, 11\), got torch.float32 of shape \(2, 1, 11\)"),
    (Integers, r"floating-point logits of shape .*, got torch.int64 of shape \(2, 6, 11\)"),
    (Pair, "the model must return a tensor of logits, got tuple"),
    (NoParameters, "the model has no parameters"),
]


def run_with(model: type[nn.Module]) -> RunConfig:
    return RunConfig(scale="tiny", device="cpu", model=f"{__name__}:{model.__name__}")


def cell_of(*modes: str) -> Cell:
    return Cell(case=CASE, implementation="eager", rows=tuple(Row(mode, "time", "ms", CASE) for mode in modes))


@pytest.mark.parametrize("mode", MODEL_MODES)
@pytest.mark.parametrize("model, message", BROKEN, ids=[model.__name__ for model, _ in BROKEN])
def test_a_broken_model_is_not_timed(model, message, mode, monkeypatch):
    """A user's model that returned NaN, one position, a pair or constants was recorded as ok, and as very fast."""
    with pytest.raises(Disagreement, match=message.format(what="logits" if mode == "forward" else "loss")):
        wall_clock(TrainingStep(CASE, run_with(model)), mode, 2)
    monkeypatch.setattr(models, "time_calls", lambda *_, **__: pytest.fail("timed before it was checked"))
    with pytest.raises(Disagreement, match=message.format(what="logits")):
        next(measure_model(cell_of(mode), run_with(model)))


def test_a_model_that_breaks_in_training_keeps_its_forward():
    measured = []
    with pytest.raises(Disagreement, match="the model's loss must be finite, got values from nan to nan"):
        for measurement in measure_model(cell_of(*MODEL_MODES), run_with(NotFiniteInTraining)):
            measured.append(measurement.row.mode)
    assert measured == ["forward"]


def test_the_warmup_series_begins_with_the_models_first_step(monkeypatch):
    """The check of the output comes after the series: one before it would be a warm-up step that no row counts."""
    events = []
    time_once, require_finite, forward = models.time_once, models.require_finite, TrainingStep.forward

    def record(name, call):
        def recorded(*arguments):
            events.append(name)
            return call(*arguments)

        return recorded

    monkeypatch.setattr(models, "time_once", record("time", time_once))
    monkeypatch.setattr(models, "require_finite", record("check", require_finite))
    monkeypatch.setattr(TrainingStep, "forward", record("step", forward))
    assert len(wall_clock(TrainingStep(CASE, run_with(Bigram)), "forward", 3)) == 3
    assert events == ["time", "step"] * 3 + ["check"]


def test_a_working_model_is_timed_in_every_mode():
    measured = list(measure_model(cell_of(*MODEL_MODES), run_with(Bigram)))
    assert [measurement.row.mode for measurement in measured] == list(MODEL_MODES)
    assert all(sample > 0 for measurement in measured for sample in measurement.samples)
