"""K6: how far a NaN or infinity in one row of the inputs reaches, in every back end that runs on a CPU."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import flash_attention, flash_attention_varlen
from cs336_systems.attention.backends import available_backends

SEQLEN, TILE, ROW = 256, 128, 200  # of attention, the longest side of a CPU's tiles, the row that is not finite
BACKENDS = ["reference", "compiled", "tiled", "triton_first", "triton"]  # test_hopper.py has the last


def attend(backend: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
    if (why := available_backends()[backend]) != "ok":
        pytest.skip(why)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = flash_attention(*leaves, is_causal=True, backend=backend)
    assert isinstance(output, Tensor)
    names = ("output", "grad_q", "grad_k", "grad_v")
    return dict(zip(names, (output.detach(), *torch.autograd.grad(output, leaves, grad))))


def inputs() -> list[Tensor]:
    return list(torch.randn(4, 1, 2, SEQLEN, 16, generator=torch.Generator().manual_seed(0)))


@cache
def clean_results(backend: str) -> dict[str, Tensor]:
    return attend(backend, *inputs())


@pytest.mark.slow_if(value=-math.inf)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_k6_reaches_no_other_head_and_no_earlier_tile(backend, operand, value):
    """The rows that attend it are lost. Earlier ones of its tile are lost to V alone, to which they give the weight 0.

    Plain attention has one tile.
    """
    q, k, v, grad = inputs()
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
    """The output and the gradients of three documents; row 60, in the second, of all inputs is `bad`."""
    cu_seqlens = torch.tensor([0, 50, 150, 200], dtype=torch.int32)
    q, k, v, grad = torch.randn(4, 200, 2, 16, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        for x in (q, k, v, grad):
            x[60] = bad
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output = flash_attention_varlen(*leaves, cu_seqlens, cu_seqlens, 100, 100, is_causal=True, backend=backend)
    assert isinstance(output, Tensor)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


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
