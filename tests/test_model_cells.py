"""Model cells: a model that does not work is never recorded as timed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.bench.spec import Disagreement, Row, Sample, load
from cs336_systems.config import ModelCase, ModelConfig, RunConfig
from cs336_systems.subjects import model_steps as models
from cs336_systems.subjects.model_steps import (
    MODEL_MODES,
    TrainingStep,
    first_calls,
    model_rounds,
    round_samples,
    timed_modes,
    wall_clock,
)
from tests.broken_models import Bigram

MODEL = ModelConfig(
    name="test",
    d_model=8,
    d_ff=16,
    num_layers=1,
    num_heads=1,
    vocab_size=11,
    context_length=6,
    rope_theta=500.0,
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
    def __init__(
        self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta
    ):
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


def timed(model: type[nn.Module], *modes: str):
    return timed_modes(TrainingStep(CASE, run_with(model)), modes, warmup=0, count=3)


@pytest.mark.parametrize("mode", MODEL_MODES)
@pytest.mark.parametrize("model, message", BROKEN, ids=[model.__name__ for model, _ in BROKEN])
def test_a_broken_model_is_not_timed(model, message, mode, monkeypatch):
    """A user's model that returned NaN, one position, a pair or constants was recorded as ok, and
    as very fast.
    """
    with pytest.raises(
        Disagreement, match=message.format(what="logits" if mode == "forward" else "loss")
    ):
        wall_clock(TrainingStep(CASE, run_with(model)), mode, 2)
    monkeypatch.setattr(
        models, "time_calls", lambda *_, **__: pytest.fail("timed before it was checked")
    )
    with pytest.raises(Disagreement, match=message.format(what="logits")):
        next(timed(model, mode))


def test_a_model_that_breaks_in_training_keeps_its_forward():
    measured = []
    with pytest.raises(
        Disagreement, match="the model's loss must be finite, got values from nan to nan"
    ):
        for mode, _ in timed(NotFiniteInTraining, *MODEL_MODES):
            measured.append(mode)
    assert measured == ["forward"]


def test_the_warmup_series_begins_with_the_models_first_step(monkeypatch):
    """The check of the output comes after the series: one before it would be a warm-up step that no
    row counts.
    """
    events = []
    time_once, require_finite, forward = (
        models.time_once,
        models.require_finite,
        TrainingStep.forward,
    )

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
    measured = dict(timed(Bigram, *MODEL_MODES))
    assert list(measured) == list(MODEL_MODES)
    assert all(len(samples) == 3 and min(samples) > 0 for samples in measured.values())


# By turns


TINY = RunConfig(scale="tiny", device="cpu")


def test_players_of_a_round_have_as_many_times_and_change_their_order():
    order = []

    def turn(player, modes):
        order.append(player)
        yield from ((mode, [1.0, 2.0]) for mode in modes)

    samples, missing = model_rounds("abc", turn, ("forward", "train_step"), TINY)
    assert order == [*"abc", *"cba"] and not missing
    assert {len(taken) for taken in samples.values()} == {4} and len(samples) == 6


def test_a_mode_that_does_not_fit_costs_neither_the_others_nor_the_other_players():
    asked = []

    def turn(player, modes):
        asked.append((player, modes))
        for mode in modes:
            if (player, mode) == ("float32", "train_step"):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 82.00 MiB.")
            yield mode, [1.0]

    modes = ("forward", "train_step")
    rows = {
        (name, mode): Row(mode, "time", "ms", name)
        for name in ("float32", "bfloat16")
        for mode in modes
    }
    found = list(round_samples(rows, *model_rounds(["float32", "bfloat16"], turn, modes, TINY)))
    assert [(sample.status, len(sample.samples)) for sample in found if sample.samples] == [
        ("skipped", 2)
    ] * 3
    (without,) = (sample for sample in found if not sample.samples)
    assert without.row == rows["float32", "train_step"] and without.status == "oom"
    assert asked[-1] == ("float32", ("forward",)), "what does not fit is not tried again"


def test_a_compiled_model_that_is_wrong_has_no_times_and_the_eager_one_has(monkeypatch):
    """The compiled one used to have a cell of its own, so that a ratio was of two runs whenever one
    was repeated.
    """
    problem = load("torch_compile")
    run = RunConfig(scale="smoke", device="cpu")
    (cell,) = (cell for cell in problem.cells(run) if isinstance(cell.case, ModelCase))
    cell = replace(cell, case=CASE)
    monkeypatch.setattr("torch.compile", lambda model: lambda tokens: 2 * model(tokens))
    monkeypatch.setattr("cs336_systems.experiments.torch_compile.has_cxx_compiler", lambda: True)
    found: dict[tuple[str, str, str], Sample] = {
        (one.row.implementation, one.row.mode, one.row.quantity): one
        for one in problem.measure(cell, run)
    }
    assert len(found) == len(cell.rows)
    for (name, _, _), sample in found.items():
        assert bool(sample.samples) == (name == "eager")
        assert sample.samples or (
            sample.status == "failed" and "compiled logits differ" in sample.message
        )


def test_first_calls_leave_the_step_as_it_was():
    step = TrainingStep(CASE, run_with(Bigram))
    model = step.model
    assert [mode for mode, _ in first_calls(step, model, TINY)] == ["forward", "forward_backward"]
    assert step.model is model and all(parameter.grad is None for parameter in step.parameters)
