"""What all experiments with attention share: their rows, cells, shapes in words, and how an implementation is measured.

Each pass is checked against the float64 oracle on the same inputs, and only then timed. `implementations` builds what
is measured; `turns` lets several take turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from cs336_systems.accounting import attention_flops, eager_attention_bytes, tflops_per_s
from cs336_systems.attention.contract import Oracle, compute_oracle, contract_errors
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments.frames import speed, tuples
from cs336_systems.experiments.implementations import (
    COMPILED,
    AttentionFunction,
    build,
    kernel_name,
    off_contract,
    without_overhead,
)
from cs336_systems.experiments.spec import Cell, Disagreement, Row, Sample, Unsupported
from cs336_systems.inputs import AttentionInputs, attention_inputs
from cs336_systems.measure.memory import MIB, peak_cuda_bytes, release, saved_for_backward
from cs336_systems.measure.timing import time_calls, time_once

FORWARD = Row(mode="forward", quantity="time", unit="ms")
BACKWARD = Row(mode="backward", quantity="time", unit="ms")
BOTH = Row(mode="forward_backward", quantity="time", unit="ms")
COMPILE_FORWARD = Row(mode="forward", quantity="compile_time", unit="s")
COMPILE_BOTH = Row(mode="forward_backward", quantity="compile_time", unit="s")
PEAK = Row(mode="forward_backward", quantity="peak_memory", unit="MiB")
SAVED = Row(mode="backward", quantity="saved_for_backward", unit="MiB")
BEFORE_BACKWARD = Row(mode="backward", quantity="memory_before_backward", unit="MiB")

GPU_BUDGET_MS = 150.0
CPU_BUDGET_MS = 50.0
# An H200 at its power limit lowers its clock by up to a tenth within 100 ms of large kernels, holds it there, and after
# a second of them swings by up to a fifth. Between the two times repeat to 1 %.
REST_MS = 500.0
SETTLE_MS = 300.0
KEPT_SAMPLES = 25  # of a row: quartiles ask for no more, and four thousand rows shall stay a small file
MODE_WORDS = {"forward": "forward", "backward": "backward", "forward_backward": "forward + backward"}


def sized_shape(run: RunConfig, batch: int, heads: int, seqlen: int, head_dim: int, is_causal: bool) -> AttentionShape:
    """Self-attention of these sizes, in bfloat16 on a GPU and in float32 for Triton's interpreter."""
    return AttentionShape(
        batch=batch,
        heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        is_causal=is_causal,
        dtype="bfloat16" if run.device == "cuda" else "float32",
    )


def with_speeds(frame: pd.DataFrame, base: str) -> pd.DataFrame:
    """`frame` with `speed_over_<base>`: how many times as fast a row is as `base` on the same case in the same run."""
    rows = tuples(frame)
    bases = {(row["case"], row["mode"], row["quantity"]): row for row in rows if row["implementation"] == base}
    found = [speed(row, bases.get((row["case"], row["mode"], row["quantity"]))) for row in rows]
    return frame.assign(**{f"speed_over_{base}": found})


def attention_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's `shape` and `pass` in words, and `tflops` of a measured time in ms; NaN where nothing was timed."""
    shape = AttentionShape(**{name: row[name] for name in AttentionShape.__dataclass_fields__})
    heads = f"{shape.heads}/{shape.kv_heads}" if shape.kv_heads not in (None, shape.heads) else str(shape.heads)
    sizes = f"{shape.batch} × {heads} × {shape.seqlen_q:,} × {shape.head_dim}"
    if shape.seqlen_k != shape.seqlen_q:
        sizes = f"{shape.batch} × {heads} × {shape.seqlen_q:,} on {shape.seqlen_k:,} × {shape.head_dim}"
    mask = "causal" if shape.is_causal else "full"
    columns = {"shape": f"{sizes} {mask}", "pass": MODE_WORDS[row["mode"]], "tflops": math.nan}
    if row["quantity"] == "time" and row["median"] > 0:
        columns["tflops"] = tflops_per_s(attention_flops(shape, row["mode"]), row["median"])
    return columns


def attention_cell(shape: AttentionShape, implementation: str, run: RunConfig, rows: tuple[Row, ...]) -> Cell:
    """A cell that reports `rows`, plus the first call's seconds of a compiled implementation."""
    if implementation in COMPILED:
        rows = (COMPILE_FORWARD, COMPILE_BOTH, *rows)
    if run.device == "cpu":
        rows = tuple(row for row in rows if row not in (PEAK, BEFORE_BACKWARD))
    quadratic = implementation in ("eager", "compiled")
    return Cell(
        case=shape,
        implementation=implementation,
        rows=rows,
        predicted_bytes=eager_attention_bytes(shape, "forward_backward") if quadratic else 0,
    )


def settle(call: Callable[[], object]) -> None:
    """Leave the GPU idle for REST_MS, then run `call`, one after the other, for SETTLE_MS."""
    torch.cuda.synchronize()
    time.sleep(REST_MS / 1e3)
    end = time.perf_counter() + SETTLE_MS / 1e3
    while time.perf_counter() < end:
        call()
        torch.cuda.synchronize()


def measure_attention(
    cell: Cell,
    run: RunConfig,
    *,
    num_samples: int | None = None,
    sum_loss: bool = False,
    settled: bool = False,
    built: tuple[AttentionFunction, str] | None = None,
) -> Iterator[Sample]:
    """Measure the promised rows of `cell` in the order forward, backward, forward_backward.

    Each part is checked against the float64 oracle before it is timed. The forward is timed without a graph, the
    backward on a graph made outside, the two together from scratch. With `sum_loss` the loss is the sum of the output,
    so that its gradient arrives as a stride-0 tensor of ones; without, that gradient is random. Without `num_samples` a
    row takes as many as its time allows and keeps KEPT_SAMPLES of them, evenly spaced in time. `settled`: a GPU rests,
    then runs each part for a while before it is timed, so that no median falls where the clock does. `built`: the
    function and the kernel's name, where the implementation is none of `implementations`.
    """
    shape, device = cell.case, run.device
    built = built or (
        build(cell.implementation, shape, device), kernel_name(cell.implementation, shape, device)
    )  # fmt: skip
    with without_overhead(built[0]) as function:
        yield from _measure(cell, run, function, built[1], num_samples, sum_loss, settled)


def _measure(
    cell: Cell, run: RunConfig, function: AttentionFunction, kernel: str, num_samples: int | None, sum_loss: bool,
    settled: bool,
) -> Iterator[Sample]:  # fmt: skip
    shape, device = cell.case, run.device
    inputs = inputs_of(shape, device, run.seed, sum_loss)
    budget_ms = GPU_BUDGET_MS if device == "cuda" else CPU_BUDGET_MS
    warmup = 1
    if kernel.startswith("interpreter"):  # its times say nothing of speed: one sample, no warm-up
        warmup, num_samples = 0, 1

    def timed(row: Row, call: Callable[[], object], error: float) -> Iterator[Sample]:
        if row in cell.rows:
            if settled and device == "cuda":
                settle(call)
            samples = time_calls(call, device=device, warmup=warmup, num_samples=num_samples, budget_ms=budget_ms)
            kept = samples if num_samples else evenly_spaced(samples, KEPT_SAMPLES)
            yield Sample(row=row, samples=kept, kernel=kernel, error=error)

    def first_call(row: Row, milliseconds: float) -> Iterator[Sample]:
        if row in cell.rows:
            yield Sample(row=row, samples=[milliseconds / 1e3], kernel=kernel)

    # forward
    results: dict[str, Tensor] = {}

    def forward() -> None:
        with torch.no_grad():
            results["output"] = function(inputs.q, inputs.k, inputs.v)

    yield from first_call(COMPILE_FORWARD, time_once(forward, device))
    oracle = oracle_of(shape, device, run.seed, sum_loss)  # after the first call: what does not fit needs no oracle
    error = checked_error(oracle, results, cell.implementation)
    results.clear()
    yield from timed(FORWARD, lambda: _without_graph(function, inputs), error)

    if all(row.mode == "forward" for row in cell.rows):
        return

    # backward
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    if device == "cpu" and cell.implementation == "flex":
        raise Unsupported("FlexAttention has no backward on CPU")

    def both() -> tuple[Tensor, ...]:
        output = function(*leaves)
        if sum_loss:
            return torch.autograd.grad(output.sum(), leaves)
        return torch.autograd.grad(output, leaves, inputs.grad_output)

    gradients: list[Tensor] = []
    yield from first_call(COMPILE_BOTH, time_once(lambda: gradients.extend(both()), device))
    named = dict(zip(("grad_q", "grad_k", "grad_v"), gradients))
    error = max(error, checked_error(oracle, named, cell.implementation))
    gradients.clear()
    named.clear()
    if SAVED in cell.rows:
        yield Sample(row=SAVED, samples=[saved_for_backward(lambda: function(*leaves)) / MIB], kernel=kernel)
    release(device)
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    output = function(*leaves)
    if BEFORE_BACKWARD in cell.rows:
        torch.cuda.synchronize()
        used = torch.cuda.memory_allocated() - allocated + sum(x.nbytes for x in inputs)
        yield Sample(row=BEFORE_BACKWARD, samples=[used / MIB], kernel=kernel)
    yield from timed(
        BACKWARD, lambda: torch.autograd.grad(output, leaves, inputs.grad_output, retain_graph=True), error
    )
    del output

    # forward and backward
    yield from timed(BOTH, both, error)
    if PEAK in cell.rows:
        yield Sample(row=PEAK, samples=[peak_cuda_bytes(both) / MIB], kernel=kernel)


def evenly_spaced(samples: Sequence[float], at_most: int) -> list[float]:
    """`at_most` of `samples`, the first and then evenly spaced ones, in their order; all of them if they are fewer."""
    count = len(samples)
    return [samples[place * count // at_most] for place in range(at_most)] if count > at_most else list(samples)


def _without_graph(function: Callable[..., Tensor], inputs: AttentionInputs) -> Tensor:
    with torch.no_grad():
        return function(inputs.q, inputs.k, inputs.v)


def checked_error(oracle: Oracle, results: Mapping[str, Tensor], implementation: str) -> float:
    """The largest error of `results` over its bound; Disagreement with its name where it breaks the contract."""
    errors = contract_errors(oracle, results)
    name, worst = max(errors.items(), key=lambda item: item[1])
    if not worst <= 1:
        raise Disagreement(off_contract(implementation, name, worst))
    return worst


# Both are shared by the implementations of a shape, which a sweep visits one after the other.
@lru_cache(maxsize=1)
def inputs_of(shape: AttentionShape, device: str, seed: int, sum_loss: bool) -> AttentionInputs:
    oracle_of.cache_clear()
    release(device)
    inputs = attention_inputs(shape, device=device, seed=seed)
    if sum_loss:
        inputs = inputs._replace(grad_output=inputs.q.new_ones(()).expand(inputs.q.shape))
    return inputs


@lru_cache(maxsize=1)
def oracle_of(shape: AttentionShape, device: str, seed: int, sum_loss: bool) -> Oracle:
    release(device)
    oracle = compute_oracle(*inputs_of(shape, device, seed, sum_loss), is_causal=shape.is_causal)
    release(device)
    return oracle
