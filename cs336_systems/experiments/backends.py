"""Times of our own attention back ends on one shape, and of what `auto` makes of it.

    rows = benchmark_backends(shape, device="cuda")
    auto_ratio(rows)             # time of auto over that of the fastest: at most 1.1 where auto chooses well

Every back end has a row: its times, or the reason why it has none. A result outside of the numerical contract is a
failed row and has no time. Those that are right are timed in turns: one after the other, two times of the same kernel
can differ by a tenth where other processes hold the processor up.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention import flash_attention
from cs336_systems.attention.api import explain_backend
from cs336_systems.attention.backends import BACKENDS
from cs336_systems.attention.contract import Oracle, compute_oracle
from cs336_systems.config import AttentionShape
from cs336_systems.device import interpreter_is_on
from cs336_systems.experiments.attention import checked_error
from cs336_systems.experiments.spec import Disagreement
from cs336_systems.inputs import AttentionInputs, attention_inputs
from cs336_systems.measure.memory import one_out_of_memory_error, release
from cs336_systems.measure.timing import best_medians, time_once

AUTO = "auto"
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


class Calls:
    """Both timed calls of the back end `name` on `inputs`, each of which returns its named results."""

    def __init__(self, name: str, shape: AttentionShape, inputs: AttentionInputs) -> None:
        self.inputs, self.leaves = inputs, [x.detach().requires_grad_() for x in inputs[:3]]
        self.attend: Any = partial(flash_attention, is_causal=shape.is_causal, enable_gqa=True, backend=name)

    def forward(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"output": self.attend(*self.inputs[:3])}

    def forward_backward(self) -> dict[str, Tensor]:
        gradients = torch.autograd.grad(self.attend(*self.leaves), self.leaves, self.inputs.grad_output)
        return dict(zip(("grad_q", "grad_k", "grad_v"), gradients))


def benchmark_backends(
    shape: AttentionShape, *, device: str, seed: int = 0, num_samples: int | None = None
) -> list[BackendTiming]:
    """A row for every back end of this package, and the last for `auto`."""
    inputs = attention_inputs(shape, device=device, seed=seed)
    oracle = compute_oracle(*inputs, is_causal=shape.is_causal)
    calls = {name: Calls(name, shape, inputs) for name in (*BACKENDS, AUTO)}
    rows = {name: _checked(name, call, oracle, device) for name, call in calls.items()}
    contenders = [name for name, row in rows.items() if row.status == "ok" and not row.interpreted]
    for mode in ("forward", "forward_backward"):
        timed = {name: getattr(calls[name], mode) for name in contenders}
        medians: dict[str, Any] = dict(
            best_medians(timed, device=device, num_samples=num_samples, budget_ms=BUDGET_MS[device])
        )
        rows |= {name: replace(rows[name], **{f"{mode}_ms": ms}) for name, ms in medians.items()}
    release(device)
    return list(rows.values())


def auto_ratio(rows: list[BackendTiming]) -> float | None:
    """Time of `auto`, forward and backward, over that of the fastest named back end; None if either has no time."""
    times = {
        row.backend: ms for row in rows if (ms := row.forward_backward_ms) is not None and not row.interpreted
    }  # fmt: skip
    auto = times.pop(AUTO, None)
    return auto / min(times.values()) if auto is not None and times else None


def _checked(name: str, calls: Calls, oracle: Oracle, device: str) -> BackendTiming:
    """The row of the back end `name`: why it has no time, or with the milliseconds of its first calls."""
    try:
        causal = calls.attend.keywords["is_causal"]
        chosen, reason = explain_backend(calls.inputs.q, calls.inputs.k, backend=name, is_causal=causal)
    except ValueError as error:
        return BackendTiming(backend=name, status="skipped", reason=str(error))
    interpreted = chosen.startswith("triton") and device == "cpu" and interpreter_is_on()
    row = BackendTiming(backend=name, chosen=chosen, reason=reason, interpreted=interpreted)
    results: dict[str, Tensor] = {}
    try:
        with one_out_of_memory_error():
            forward_ms = time_once(lambda: results.update(calls.forward()), device)
            both_ms = time_once(lambda: results.update(calls.forward_backward()), device)
            checked_error(oracle, results, chosen)
    except Disagreement as error:
        return replace(row, status="failed", reason=str(error))
    except ValueError as error:  # the first kernel takes few shapes
        return replace(row, status="skipped", reason=str(error))
    except torch.OutOfMemoryError as error:
        return replace(row, status="oom", reason=str(error).splitlines()[0])
    return replace(row, forward_ms=forward_ms, forward_backward_ms=both_ms)
