"""Times of our own attention back ends on one shape, and of what `auto` makes of it.

    rows = benchmark_backends(shape, device="cuda")
    auto_ratio(rows)             # time of auto over that of the fastest: at most 1.1 where auto chooses well
    auto_ratio(contest(rows, shape, device="cuda"))      # the same of the fastest ones, timed again in turns

Every back end has a row: its times, or the reason why it has none. A result outside of the numerical contract is a
failed row and has no time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention import flash_attention
from cs336_systems.attention.api import explain_backend
from cs336_systems.attention.backends import BACKENDS
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.device import interpreter_is_on
from cs336_systems.experiments.attention import BOTH, FORWARD, inputs_of, measure_attention, oracle_of
from cs336_systems.experiments.implementations import Built
from cs336_systems.experiments.spec import Cell, Disagreement
from cs336_systems.inputs import attention_inputs
from cs336_systems.measure.memory import one_out_of_memory_error, release
from cs336_systems.measure.timing import best_medians

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
    run = RunConfig(scale="smoke", device=device, seed=seed)  # type: ignore[arg-type]
    try:
        return [_timing(name, shape, run, num_samples) for name in (*BACKENDS, AUTO)]
    finally:
        inputs_of.cache_clear()
        oracle_of.cache_clear()
        release(device)


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

    def both(attend: Callable[..., Any]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, grad_output)

    calls = {name: partial(both, _attend(name, shape)) for name in names}
    medians = best_medians(calls, device=device, num_samples=num_samples, budget_ms=BUDGET_MS[device])
    return [replace(row, forward_backward_ms=medians.get(row.backend, row.forward_backward_ms)) for row in rows]


def _times(rows: list[BackendTiming]) -> dict[str, float]:
    """Milliseconds of forward and backward of each back end that has a time which says something of its speed."""
    return {
        row.backend: row.forward_backward_ms
        for row in rows
        if row.forward_backward_ms is not None and not row.interpreted
    }


def _attend(backend: str, shape: AttentionShape) -> Callable[..., Any]:
    return partial(flash_attention, is_causal=shape.is_causal, enable_gqa=True, backend=backend)


def _timing(backend: str, shape: AttentionShape, run: RunConfig, num_samples: int | None) -> BackendTiming:
    q, k, *_ = inputs_of(shape, run.device, run.seed)
    try:
        chosen, reason = explain_backend(q, k, backend=backend, is_causal=shape.is_causal)
    except ValueError as error:
        return BackendTiming(backend=backend, status="skipped", reason=str(error))
    interpreted = chosen.startswith("triton") and run.device == "cpu" and interpreter_is_on()
    cell = Cell(case=shape, implementation=chosen, rows=(FORWARD, BOTH))
    built = Built(attend=_attend(backend, shape), kernel="interpreter" if interpreted else "")
    status = "ok"
    times: dict[str, float] = {}
    try:
        with one_out_of_memory_error():
            for sample in measure_attention(cell, run, num_samples=num_samples, built=built):
                times[sample.row.mode] = median(sample.samples)
    except Disagreement as error:
        status, reason = "failed", str(error)
    except ValueError as error:  # the first kernel takes few shapes
        status, reason = "skipped", str(error)
    except torch.OutOfMemoryError as error:
        status, reason = "oom", str(error).splitlines()[0]
    if status != "ok":
        times = {}
    return BackendTiming(
        backend=backend, chosen=chosen, forward_ms=times.get("forward"), status=status, reason=reason,
        forward_backward_ms=times.get("forward_backward"), interpreted=interpreted,
    )  # fmt: skip
