"""Cells that time a language model, eager or compiled: forward, forward and backward, full training step."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.config import HANDOUT_SIZES, MODEL_SIZES, ModelCase, RunConfig, proxy_model
from cs336_systems.device import has_cxx_compiler
from cs336_systems.experiments import Cell, Disagreement, Sample, Unsupported
from cs336_systems.inputs import token_batch
from cs336_systems.measure.memory import release
from cs336_systems.measure.timing import MIN_SAMPLES, time_calls, time_once
from cs336_systems.model import AdamW, build_model, cross_entropy

MODEL_MODES = ("forward", "forward_backward", "train_step")
BUDGET_MS = {"cuda": 3000.0, "cpu": 1000.0}  # of timed steps a mode, at least five and at most a hundred of them
# A compiled model may reorder float32 sums: its logits and its loss agree with eager's within this times the largest.
TOLERANCE = 1e-3


def model_cases(run: RunConfig) -> list[ModelCase]:
    """A case for each size at the run's scale, in float32 with plain attention.

    handout: the handout's five sizes, batch 4, context 512. smoke: the real small model at context 128, batch 1, and
    a narrow proxy of medium (another would say nothing new in a laptop's minutes). tiny: one narrow proxy.
    """
    models = [MODEL_SIZES[size] for size in HANDOUT_SIZES]
    if run.scale == "tiny":
        models = [replace(proxy_model("small", 64), context_length=32, vocab_size=256)]
    if run.scale == "smoke":
        models = [replace(model, context_length=128) for model in (MODEL_SIZES["small"], proxy_model("medium"))]
    batch = 4 if run.scale == "handout" else 1
    return [ModelCase(model=model, batch=batch, attention="reference") for model in models]


class TrainingStep:
    """A model, its optimizer and a batch, with the three things that a benchmark times as methods."""

    optimizer: Any = None  # made at the first step: its state is not the other modes' memory

    def __init__(self, case: Any, run: RunConfig, rank: int = 0) -> None:
        self.vocab_size, self.autocast, self.device = case.model.vocab_size, case.precision.autocast, run.device
        self.tokens, self.targets = token_batch(case.model, case.batch, device=run.device, seed=run.seed + rank)
        module = self._build(case, run)
        self.parameters = list(module.parameters())
        if not self.parameters:
            raise Disagreement("the model has no parameters")
        self.model: Any = module

    def _build(self, case: Any, run: RunConfig) -> nn.Module:
        dtype = getattr(torch, case.precision.parameters)
        return build_model(
            case.model, attention=case.attention, model_spec=run.model, device=run.device, dtype=dtype, seed=run.seed
        )

    def forward(self) -> Tensor:
        """Logits, without a graph."""
        with torch.no_grad(), self._precision():
            return self._logits()

    def loss(self) -> Tensor:
        """The loss, with the graph that a backward needs."""
        with self._precision():
            return cross_entropy(self._logits(), self.targets)

    def forward_backward(self) -> Tensor:
        """The loss, its gradients left in the parameters."""
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def train_step(self) -> Tensor:
        """The loss before an AdamW step."""
        if self.optimizer is None:
            self.optimizer = AdamW(self.parameters, lr=1e-4)
        loss = self.forward_backward()
        self.optimizer.step()
        return loss

    def reset(self) -> None:
        """Drop the gradients, as a training loop does before each step."""
        for parameter in self.parameters:
            parameter.grad = None

    def _logits(self) -> Tensor:
        """The model's output, checked at every step for what costs no kernel: type, dtype and shape."""
        logits = self.model(self.tokens)
        if not isinstance(logits, Tensor):
            raise Disagreement(f"the model must return a tensor of logits, got {type(logits).__name__}")
        shape = (*self.tokens.shape, self.vocab_size)
        if not logits.is_floating_point() or logits.shape != shape:
            raise Disagreement(
                f"the model must return floating-point logits of shape (batch, context_length, vocab_size) = {shape}, "
                f"got {logits.dtype} of shape {tuple(logits.shape)}"
            )
        return logits

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device, dtype=getattr(torch, self.autocast))


def measure_model(
    cell: Cell, run: RunConfig, *, budget_ms: float | None = None, min_samples: int = MIN_SAMPLES
) -> Iterator[Sample]:
    """Time every promised mode, for `budget_ms` of timed steps each (default: the device's), at least `min_samples`.

    A model is timed only if its logits, and in the other modes its loss, are finite and of the right shape; a compiled
    one is also compared with the eager one on the same weights and batch. Raises Disagreement where it is not so.
    """
    case: ModelCase = cell.case
    if cell.implementation == "compiled" and run.device == "cpu" and not has_cxx_compiler():
        raise Unsupported("no C++ compiler")
    release(run.device)
    step = TrainingStep(case, run)
    rows = {(row.mode, row.quantity): row for row in cell.rows}
    logits = step.forward()
    require_finite("logits", logits)
    expected: dict[str, Tensor] = {}  # of the compiled model
    if cell.implementation == "compiled":
        expected = {"forward": logits, "forward_backward": step.forward_backward()}
        require_finite("loss", expected["forward_backward"])
        step.reset()
        step.model = torch.compile(step.model)
    del logits
    for mode in MODEL_MODES:
        call: Callable[[], Tensor] = getattr(step, mode)
        if (mode, "time") not in rows:
            continue
        if mode in expected:
            results: list[Tensor] = []
            seconds = time_once(lambda: results.append(call()), run.device) / 1e3  # noqa: B023
            _agree("logits" if mode == "forward" else "loss", results.pop(), expected.pop(mode))
            if row := rows.get((mode, "compile_time")):
                yield Sample(row=row, samples=[seconds])
        elif mode != "forward":
            step.reset()
            require_finite("loss", step.forward_backward())
        budget = BUDGET_MS[run.device] if budget_ms is None else budget_ms
        samples = time_calls(
            call, device=run.device, warmup=case.warmup, before=step.reset, budget_ms=budget, min_samples=min_samples
        )  # fmt: skip
        step.reset()
        yield Sample(row=rows[mode, "time"], samples=samples)


def wall_clock(step: TrainingStep, mode: str, count: int) -> list[float]:
    """Milliseconds of each of `count` passes, each alone, from the first on; Disagreement if the last is not finite."""
    results: list[Tensor] = []
    samples = []
    for _ in range(count):
        step.reset()
        results.clear()
        samples.append(time_once(lambda: results.append(getattr(step, mode)()), step.device))
    step.reset()
    # Only now: the check's own kernels would warm up the process between two steps.
    require_finite("logits" if mode == "forward" else "loss", results[0])
    return samples


def require_finite(what: str, value: Tensor) -> None:
    """Disagreement unless all of a model's `value` (its logits, its loss) is finite."""
    # Both extremes are NaN if any element is. isfinite would need temporaries as large as the logits.
    smallest, largest = (extreme.item() for extreme in value.aminmax())
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        raise Disagreement(f"the model's {what} must be finite, got values from {smallest:g} to {largest:g}")


def _agree(what: str, value: Tensor, expected: Tensor) -> None:
    error = (value - expected).abs().max().item()
    bound = TOLERANCE * expected.abs().max().item()
    if not error <= bound:
        raise Disagreement(f"compiled {what} differ from eager's by {error:.3g}, more than {bound:.3g}")
