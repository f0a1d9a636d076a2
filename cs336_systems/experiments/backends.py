"""Times of our own attention back ends on one shape, and of what `auto` makes of it.

    rows = benchmark_backends(shape, device="cuda")
    auto_ratio(rows)             # time of auto over that of the fastest: at most 1.1 where auto chooses well
    auto_ratio(contest(rows, shape, device="cuda"))      # the same of the fastest ones, timed again in turns

Every back end has a row: its times, or the reason why it has none. A result outside of the numerical contract is a
failed row and has no time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cs336_systems.attention import flash_attention
from cs336_systems.attention.api import explain_backend
from cs336_systems.attention.backends import BACKENDS
from cs336_systems.attention.contract import Oracle, compute_oracle, contract_errors
from cs336_systems.config import AttentionShape
from cs336_systems.device import interpreter_is_on
from cs336_systems.experiments.implementations import off_contract
from cs336_systems.inputs import attention_inputs
from cs336_systems.measure.memory import one_out_of_memory_error, release
from cs336_systems.measure.samples import summarize
from cs336_systems.measure.timing import MIN_SAMPLES, best_medians, time_calls

AUTO = "auto"
CONTENDER_RATIO = 1.5  # a back end that took so many times the fastest's time is not timed again
BUDGET_MS = {"cuda": 200.0, "cpu": 50.0}


@dataclass(frozen=True, kw_only=True)
class BackendTiming:
    """One back end on one shape: medians in milliseconds, or why there are none."""

    backend: str
    chosen: str = ""  # what auto took, and for a named back end its own name
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    status: str = "ok"  # ok, skipped, oom or failed
    reason: str = ""  # why it was chosen, or why there is no time
    interpreted: bool = False  # Triton's interpreter: right, but no speed


def benchmark_backends(
    shape: AttentionShape, *, device: str, seed: int = 0, num_samples: int | None = None
) -> list[BackendTiming]:
    """A row for every back end of this package, and the last for `auto`."""
    release(device)
    inputs = attention_inputs(shape, device=device, seed=seed)
    oracle = compute_oracle(*inputs, is_causal=shape.is_causal)
    return [_timing(name, shape, inputs, oracle, device, num_samples) for name in (*BACKENDS, AUTO)]


def auto_ratio(rows: list[BackendTiming]) -> float | None:
    """Time of `auto`, forward and backward, over that of the fastest named back end; None if either has no time."""
    times = _times(rows)
    auto = times.pop(AUTO, None)
    return auto / min(times.values()) if auto is not None and times else None


def contest(
    rows: list[BackendTiming], shape: AttentionShape, *, device: str, seed: int = 0, num_samples: int | None = None
) -> list[BackendTiming]:
    """The rows of `auto` and of the back ends near the fastest, forward and backward timed anew, in turns.

    `benchmark_backends` times one after the other: two times of the same kernel can differ by a tenth where other
    processes hold the processor up. The others' rows come back as they are.
    """
    times = _times(rows)
    names = [name for name, ms in times.items() if name == AUTO or ms <= CONTENDER_RATIO * min(times.values())]
    *inputs, grad_output = attention_inputs(shape, device=device, seed=seed)
    leaves = [x.detach().requires_grad_() for x in inputs]
    calls = {name: _forward_backward(name, shape, leaves, grad_output) for name in names}
    medians = best_medians(calls, device=device, num_samples=num_samples, budget_ms=BUDGET_MS[device])
    return [replace(row, forward_backward_ms=medians.get(row.backend, row.forward_backward_ms)) for row in rows]


def _times(rows: list[BackendTiming]) -> dict[str, float]:
    """Milliseconds of forward and backward of each back end that has a time which says something of its speed."""
    return {
        row.backend: row.forward_backward_ms
        for row in rows
        if row.forward_backward_ms is not None and not row.interpreted
    }


def _forward_backward(
    backend: str, shape: AttentionShape, leaves: list[Tensor], grad_output: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    def both() -> tuple[Tensor, ...]:
        attended = _output(flash_attention(*leaves, is_causal=shape.is_causal, enable_gqa=True, backend=backend))
        return torch.autograd.grad(attended, leaves, grad_output)

    return both


def _timing(
    backend: str, shape: AttentionShape, inputs: tuple[Tensor, ...], oracle: Oracle, device: str,
    num_samples: int | None,
) -> BackendTiming:  # fmt: skip
    q, k, v, grad_output = inputs
    try:
        chosen, reason = explain_backend(q, k, backend=backend)
    except ValueError as error:
        return BackendTiming(backend=backend, status="skipped", reason=str(error))
    interpreted = chosen.startswith("triton") and device == "cpu" and interpreter_is_on()
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]

    def forward() -> Tensor:
        with torch.no_grad():
            return _output(flash_attention(q, k, v, is_causal=shape.is_causal, enable_gqa=True, backend=backend))

    both = _forward_backward(backend, shape, leaves, grad_output)

    def median_ms(call: Callable[[], object]) -> float:
        count = MIN_SAMPLES if interpreted and num_samples is None else num_samples
        warmup = 0 if interpreted else 1
        return summarize(
            time_calls(call, device=device, warmup=warmup, num_samples=count, budget_ms=BUDGET_MS[device])
        ).median

    try:
        with one_out_of_memory_error():
            gradients = both()
            results = {"output": forward(), **dict(zip(("grad_q", "grad_k", "grad_v"), gradients))}
            errors = contract_errors(oracle, results)
            worst = max(errors, key=lambda name: errors[name])
            if not errors[worst] <= 1:
                why = off_contract(chosen, worst, errors[worst])
                return BackendTiming(backend=backend, chosen=chosen, status="failed", reason=why)
            del gradients, results
            return BackendTiming(
                backend=backend, chosen=chosen, forward_ms=median_ms(forward), forward_backward_ms=median_ms(both),
                reason=reason, interpreted=interpreted,
            )  # fmt: skip
    except ValueError as error:  # the first kernel takes few shapes
        return BackendTiming(backend=backend, chosen=chosen, status="skipped", reason=str(error))
    except torch.OutOfMemoryError as error:
        return BackendTiming(backend=backend, chosen=chosen, status="oom", reason=str(error).splitlines()[0])
    finally:
        release(device)


def _output(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)  # a pair only where the log-sum-exp is asked for
    return result
