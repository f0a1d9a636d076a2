"""Cells that time attention under a mask, and how they are measured: check against the oracle first, then time.

Beside the times a cell records the density of the mask that ran, and the share of its tiles that are live: the inverse
of that share is what skipping tiles can gain at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from cs336_systems.accounting import eager_attention_bytes
from cs336_systems.attention import BlockMask
from cs336_systems.attention.contract import Oracle, compute_oracle
from cs336_systems.config import MaskCase, RunConfig
from cs336_systems.experiments.attention import (
    BACKWARD,
    BOTH,
    CPU_BUDGET_MS,
    FORWARD,
    GPU_BUDGET_MS,
    PEAK,
    checked_error,
)
from cs336_systems.experiments.cells import Cell, Measurement, Row
from cs336_systems.experiments.mask_implementations import build_masked, is_plain, mask_of, shape_of
from cs336_systems.inputs import AttentionInputs, attention_inputs
from cs336_systems.measure.memory import MIB, peak_cuda_bytes, release
from cs336_systems.measure.timing import MIN_SAMPLES, time_calls, time_once

DENSITY = Row(mode="forward", quantity="density", unit="1")
BLOCK_DENSITY = Row(mode="forward", quantity="block_density", unit="1")
MASK_TIME = Row(mode="forward", quantity="mask_time", unit="ms")
DENSE_MASK = ("eager", "tiled", "sdpa_mask")  # implementations that hold a (queries, keys) tensor


def mask_cell(problem: str, case: MaskCase, implementation: str, run: RunConfig, *, mask_time: bool = False) -> Cell:
    """A cell that reports both densities, the times of both passes and together, and on a GPU the peak memory.

    With `mask_time` also the time to build what a call with a new mask needs.
    """
    rows = [DENSITY, BLOCK_DENSITY, FORWARD, BACKWARD, BOTH]
    rows += [MASK_TIME] if mask_time else []
    rows += [PEAK] if run.device == "cuda" else []
    quadratic = implementation in DENSE_MASK
    return Cell(
        problem=problem,
        case=case,
        implementation=implementation,
        rows=tuple(rows),
        predicted_bytes=eager_attention_bytes(shape_of(case), "forward_backward") if quadratic else 0,
    )


def measure_masked(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """Measure the promised rows of `cell`; each pass is checked against the float64 oracle before it is timed."""
    case, device = cell.case, run.device
    mask = _mask(case, device, run.seed)
    yield Measurement(row=DENSITY, samples=[mask.density])
    yield Measurement(row=BLOCK_DENSITY, samples=[mask.block_density])
    implementation = build_masked(cell.implementation, case, mask, run)
    kernel, attend, unpack = implementation.kernel, implementation.attend, implementation.unpack
    interpreted = kernel.startswith("interpreter")
    inputs = _inputs(case, device, run.seed)
    q, k, v, grad_output = (implementation.pack(x) for x in inputs)

    results: list[Tensor] = []

    def forward() -> None:
        with torch.no_grad():
            results[:] = [attend(q, k, v)]

    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]

    def both() -> None:
        results[:] = torch.autograd.grad(attend(*leaves), leaves, grad_output)

    def timed(row: Row, call: Callable[[], object], first_ms: float, error: float) -> Iterator[Measurement]:
        budget_ms = GPU_BUDGET_MS if device == "cuda" else CPU_BUDGET_MS
        # An interpreted call takes seconds and says nothing of speed: the one that was checked is its only sample.
        samples = [first_ms] if interpreted else time_calls(call, device=device, warmup=1, budget_ms=budget_ms)
        yield Measurement(row=row, samples=samples, kernel=kernel, error=error)

    # forward
    first_ms = time_once(forward, device)
    oracle = _oracle(case, device, run.seed)  # after the first call: what does not fit needs no oracle
    error = checked_error(oracle, {"output": unpack(results[0])}, cell.implementation)
    yield from timed(FORWARD, forward, first_ms, error)

    # forward and backward
    first_ms = time_once(both, device)
    gradients = {name: unpack(x) for name, x in zip(("grad_q", "grad_k", "grad_v"), results)}
    error = max(error, checked_error(oracle, gradients, cell.implementation))
    yield from timed(BOTH, both, first_ms, error)

    # backward
    results.clear()
    release(device)
    graph = attend(*leaves)

    def backward() -> None:
        torch.autograd.grad(graph, leaves, grad_output, retain_graph=True)

    yield from timed(BACKWARD, backward, time_once(backward, device), error)
    del graph

    # the mask, memory
    if MASK_TIME in cell.rows and implementation.build_mask is not None:
        samples = time_calls(implementation.build_mask, device=device, num_samples=MIN_SAMPLES)
        yield Measurement(row=MASK_TIME, samples=samples)
    if PEAK in cell.rows:
        results.clear()
        yield Measurement(row=PEAK, samples=[peak_cuda_bytes(both) / MIB], kernel=kernel)


# All three are shared by the implementations of a case, which a sweep visits one after the other.
@lru_cache(maxsize=1)
def _mask(case: MaskCase, device: str, seed: int) -> BlockMask:
    _inputs.cache_clear()
    _oracle.cache_clear()
    release(device)
    return mask_of(case, device, seed)


@lru_cache(maxsize=1)
def _inputs(case: MaskCase, device: str, seed: int) -> AttentionInputs:
    return attention_inputs(shape_of(case), device=device, seed=seed)


@lru_cache(maxsize=1)
def _oracle(case: MaskCase, device: str, seed: int) -> Oracle:
    token_mask = None if is_plain(case.mask) else _mask(case, device, seed).to_dense()
    oracle = compute_oracle(*_inputs(case, device, seed), is_causal=case.mask == "causal", mask=token_mask)
    del token_mask
    release(device)
    return oracle
