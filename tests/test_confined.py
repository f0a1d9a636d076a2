"""K6: how far a NaN or infinity in one row of the inputs reaches, in every back end that runs on a
CPU.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from cs336_systems.attention.choose import available_backends
from tests.test_s4_attention import inputs, run
from tests.test_varlen import packed, run_packed

# of attention, the longest side of a CPU's tiles, the row that is not finite
SEQLEN, TILE, ROW = 256, 128, 200
# test_hopper.py has the last
BACKENDS = ["reference", "compiled", "tiled", "triton_first", "triton"]


def attend(backend: str, *tensors: Tensor) -> dict[str, Tensor]:
    if (why := available_backends()[backend]) != "ok":
        pytest.skip(why)
    return run(*tensors, is_causal=True, backend=backend)


def numbers() -> tuple[Tensor, ...]:
    return inputs(1, 2, 2, SEQLEN, SEQLEN, 16, torch.float32, "cpu")


@cache
def clean_results(backend: str) -> dict[str, Tensor]:
    return attend(backend, *numbers())


@pytest.mark.slow_if(value=-math.inf)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_k6_reaches_no_other_head_and_no_earlier_tile(backend, operand, value):
    """The rows that attend it are lost. Earlier ones of its tile are lost to V alone, to which they
    give the weight 0.

    Plain attention has one tile.
    """
    q, k, v, grad = numbers()
    expected = clean_results(backend)
    {"q": q, "k": k, "v": v}[operand][:, 0, ROW] = value
    results = attend(backend, q, k, v, grad)
    for name, result in results.items():
        assert torch.equal(result[:, 1], expected[name][:, 1]), f"{name} of the other head"
    output, clean = results["output"][0, 0], expected["output"][0, 0]
    if operand == "q":  # its own row, and nothing else of O
        assert not output[ROW].isfinite().all()
        others = [row for row in range(SEQLEN) if row != ROW]
        assert torch.equal(output[others], clean[others])
        return
    assert not output[ROW:].isfinite().any()
    if operand == "k":
        assert torch.equal(output[:ROW], clean[:ROW])
    else:
        safe = 0 if backend in ("reference", "compiled") else TILE
        assert torch.equal(output[:safe], clean[:safe])
        assert output[safe:ROW].isnan().any(), "0 times what is not finite: confined by no back end"


def attend_documents(backend: str, bad: float | None = None) -> list[Tensor]:
    """The output and the gradients of three documents; row 60, in the second, of all inputs is
    `bad`.
    """
    tensors, documents = packed([50, 100, 50], None, 0, 2, 2, 16, torch.float32, "cpu")
    if bad is not None:
        for x in tensors:
            x[60] = bad
    results = run_packed(tensors, documents, is_causal=True, backend=backend)
    return [results[name] for name in ("output", "grad_q", "grad_k", "grad_v")]


clean_documents = cache(attend_documents)


@pytest.mark.slow_if(value=-math.inf)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("backend", ["reference", "compiled", "tiled", "triton"])
def test_k6_a_bad_document_spoils_no_other(backend, value):
    """Its neighbours share tiles with it, and keep their bits and their gradients."""
    if (why := available_backends()[backend]) != "ok":
        pytest.skip(why)
    for result, clean in zip(attend_documents(backend, value), clean_documents(backend)):
        assert torch.equal(result[:50], clean[:50])
        assert torch.equal(result[150:], clean[150:])
        assert not result[60].isfinite().all()
