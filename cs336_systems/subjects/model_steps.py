"""Time a language model: forward, forward and backward, full training step.

Models to be compared are measured by turns in one cell: between two cells a GPU's clock and a
host's load change by more than some of the differences in question.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cs336_systems.bench.spec import Disagreement, Row, Sample
from cs336_systems.bench.turns import in_order
from cs336_systems.bench.worker import Outcome, outcome_of
from cs336_systems.config import HANDOUT_SIZES, MODEL_SIZES, ModelCase, RunConfig, proxy_model
from cs336_systems.inputs import token_batch
from cs336_systems.measure.allocations import one_out_of_memory_error, release
from cs336_systems.measure.timing import time_calls, time_once
from cs336_systems.model import AdamW, build_model, cross_entropy

MODEL_MODES = ("forward", "forward_backward", "train_step")
STEPS_A_TURN = 3  # timed steps of each mode in a turn
LEAST_ROUNDS, MOST_ROUNDS = 2, {"tiny": 2, "smoke": 2, "handout": 6}  # `compare` needs four samples
ROUNDS_BUDGET_S = {"cpu": 20.0, "cuda": 30.0}  # a further round must be expected to end within this
# A compiled model may reorder float32 sums. Its logits and loss must agree with eager's within this
# fraction of their largest element.
TOLERANCE = 1e-3
P = TypeVar("P")


def model_cases(run: RunConfig, sizes: Sequence[str] = HANDOUT_SIZES) -> list[ModelCase]:
    """Return the model cases at the run's scale, in float32 with plain attention.

    handout: all of `sizes`, batch 4, context 512. smoke: the real small model and a narrow proxy of
    medium, batch 1, context 64. tiny: one narrow proxy, batch 1, context 32.
    """
    models = [MODEL_SIZES[size] for size in sizes]
    if run.scale == "tiny":
        models = [replace(proxy_model("small", 64), context_length=32, vocab_size=256)]
    if run.scale == "smoke":
        models = [
            replace(model, context_length=64)
            for model in (MODEL_SIZES["small"], proxy_model("medium"))
        ]
    batch = 4 if run.scale == "handout" else 1
    return [ModelCase(model=model, batch=batch, attention="reference") for model in models]


class TrainingStep:
    """A model, its optimizer and a batch; benchmarks time its methods of MODEL_MODES.

    The batch of each `rank` is different. `case` has model, batch, attention and precision.
    """

    optimizer: Any = None  # made at the first step, so that other modes do not hold its state

    def __init__(self, case: Any, run: RunConfig, rank: int = 0) -> None:
        self.vocab_size, self.autocast, self.device = (
            case.model.vocab_size,
            case.precision.autocast,
            run.device,
        )
        self.tokens, self.targets = token_batch(
            case.model, case.batch, device=run.device, seed=run.seed + rank
        )
        module = self._build(case, run)
        self.parameters = list(module.parameters())
        if not self.parameters:
            raise Disagreement("the model has no parameters")
        self.model: Any = module

    def _build(self, case: Any, run: RunConfig) -> nn.Module:
        """Return the case's model, or the user's own, on the run's device."""
        dtype = getattr(torch, case.precision.parameters)
        return build_model(
            case.model,
            attention=case.attention,
            model_spec=run.model,
            device=run.device,
            dtype=dtype,
            seed=run.seed,
        )

    def forward(self) -> Tensor:
        """Return the logits, without a graph."""
        with torch.no_grad(), self._precision():
            return self._logits()

    def loss(self) -> Tensor:
        """Return the loss with its graph."""
        with self._precision():
            return cross_entropy(self._logits(), self.targets)

    def forward_backward(self) -> Tensor:
        """Run forward and backward, leaving gradients in the parameters, and return the loss."""
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def train_step(self) -> Tensor:
        """Run forward, backward and an AdamW step, and return the loss before the step."""
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
        """Return the model's logits; raise Disagreement if their type, dtype or shape is wrong.

        The check launches no kernel, so that it can be a part of timed steps.
        """
        logits = self.model(self.tokens)
        if not isinstance(logits, Tensor):
            raise Disagreement(
                f"the model must return a tensor of logits, got {type(logits).__name__}"
            )
        shape = (*self.tokens.shape, self.vocab_size)
        if not logits.is_floating_point() or logits.shape != shape:
            raise Disagreement(
                "the model must return floating-point logits of shape "
                f"(batch, context_length, vocab_size) = {shape}, "
                f"got {logits.dtype} of shape {tuple(logits.shape)}"
            )
        return logits

    def _precision(self) -> AbstractContextManager[object]:
        """Return the context of a forward: autocast if the case has it."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device, dtype=getattr(torch, self.autocast))


def timed_modes(
    step: TrainingStep, modes: Sequence[str], *, warmup: int, count: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield each of `modes` with the milliseconds of `count` passes after `warmup` untimed ones.

    Raises Disagreement if the logits are not finite, or for other modes than forward if the loss is
    not; each check precedes the timing that needs it.
    """
    require_finite("logits", step.forward())
    for mode in modes:
        if mode != "forward":
            step.reset()
            require_finite("loss", step.forward_backward())
        call: Callable[[], Tensor] = getattr(step, mode)
        samples = time_calls(
            call, device=step.device, warmup=warmup, before=step.reset, num_samples=count
        )
        step.reset()
        yield mode, samples


def model_rounds(
    players: Sequence[P],
    turn: Callable[[P, Sequence[str]], Iterator[tuple[str, list[float]]]],
    modes: Sequence[str],
    run: RunConfig,
) -> tuple[dict[tuple[P, str], list[float]], dict[tuple[P, str], Outcome]]:
    """Measure `players` in interleaved rounds; return their times and the outcomes of failed modes.

    The times are milliseconds by (player, mode). `turn(player, modes)` yields modes with their
    times, the same number of times for every player. If it runs out of memory or a result is wrong,
    the modes that it has not yielded have an outcome that says so, and are left out of later
    rounds. Rounds go on for ROUNDS_BUDGET_S, at least LEAST_ROUNDS of them and at most MOST_ROUNDS.
    """
    samples: dict[tuple[P, str], list[float]] = defaultdict(list)
    missing: dict[tuple[P, str], Outcome] = {}
    began = time.monotonic()
    for number in range(MOST_ROUNDS[run.scale]):
        round_began = time.monotonic()
        for player in in_order(players, number):
            left = [mode for mode in modes if (player, mode) not in missing]
            try:
                with one_out_of_memory_error():
                    for mode, taken in turn(player, tuple(left)) if left else ():
                        samples[player, mode] += taken
                        left.remove(mode)
            except (torch.OutOfMemoryError, Disagreement) as error:
                missing |= {(player, mode): outcome_of(error) for mode in left}
            release(run.device)

        # Stop if another round of the same length would exceed the budget.
        now = time.monotonic()
        if (
            number + 1 >= LEAST_ROUNDS
            and now - began + (now - round_began) > ROUNDS_BUDGET_S[run.device]
        ):
            break
    return samples, missing


def round_samples(
    rows: Mapping[tuple[P, str], Row],
    samples: Mapping[tuple[P, str], list[float]],
    missing: Mapping[tuple[P, str], Outcome],
) -> Iterator[Sample]:
    """Yield the sample of each of `rows`, which are keyed as the results of `model_rounds`."""
    for key, row in rows.items():
        if key in missing:
            yield Sample(row=row, status=missing[key].status, message=missing[key].message)
        else:
            yield Sample(row=row, samples=samples[key])


def first_calls(step: TrainingStep, compiled: Any, run: RunConfig) -> Iterator[tuple[str, float]]:
    """Yield forward and forward_backward, each with the seconds of the compiled model's first call.

    Raises Disagreement unless its logits and its loss are those of the eager model of `step`, on
    the same weights and batch.
    """
    eager = step.model
    expected = {"forward": step.forward(), "forward_backward": step.forward_backward()}
    require_finite("logits", expected["forward"])
    require_finite("loss", expected["forward_backward"])
    step.reset()
    step.model = compiled
    try:
        for mode in ("forward", "forward_backward"):
            results: list[Tensor] = []
            seconds = (
                time_once(
                    lambda: results.append(getattr(step, mode)()),  # noqa: B023
                    run.device,
                )
                / 1e3
            )
            _agree("logits" if mode == "forward" else "loss", results.pop(), expected.pop(mode))
            yield mode, seconds
    finally:
        step.model = eager
        step.reset()


def wall_clock(step: TrainingStep, mode: str, count: int) -> list[float]:
    """Return the milliseconds of each of `count` passes, one at a time, without a warm-up.

    Raises Disagreement if the last result is not finite.
    """
    results: list[Tensor] = []
    samples = []
    for _ in range(count):
        step.reset()
        results.clear()
        samples.append(time_once(lambda: results.append(getattr(step, mode)()), step.device))
    step.reset()
    # The check comes last: between two steps its kernels would warm up the process.
    require_finite("logits" if mode == "forward" else "loss", results[0])
    return samples


def require_finite(what: str, value: Tensor) -> None:
    """Raise Disagreement unless all elements of `value` are finite; `what` names it."""
    # Both extremes are NaN if any element is. isfinite would need temporaries as large as the
    # logits.
    smallest, largest = (extreme.item() for extreme in value.aminmax())
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        raise Disagreement(
            f"the model's {what} must be finite, got values from {smallest:g} to {largest:g}"
        )


def _agree(what: str, value: Tensor, expected: Tensor) -> None:
    """Raise Disagreement unless `value` differs from `expected` by at most TOLERANCE x its max."""
    error = (value - expected).abs().max().item()
    bound = TOLERANCE * expected.abs().max().item()
    if not error <= bound:
        raise Disagreement(
            f"compiled {what} differ from eager's by {error:.3g}, more than {bound:.3g}"
        )
