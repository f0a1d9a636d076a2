"""K6: how far a NaN or infinity in one row of the inputs reaches, in every back end that runs on a CPU."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import attention_reference, flash_attention, flash_attention_varlen
from cs336_systems.attention.backends import available_backends
from cs336_systems.attention.masks import BlockMask

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


def test_k6_a_dead_tile_is_never_read():
    """With a mask by tiles, rows whose tiles all lie elsewhere keep their bits and their gradients."""
    q, k, v, grad = inputs()
    mask = BlockMask.document([TILE, TILE], is_causal=True, block_size=TILE)

    def run() -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        output = flash_attention(*leaves, block_mask=mask, backend="triton")
        assert isinstance(output, Tensor)
        return output.detach(), *torch.autograd.grad(output, leaves, grad)

    expected = run()
    for x in (q, k, v):
        x[:, :, ROW] = math.nan
    for result, clean in zip(run(), expected):
        assert torch.equal(result[:, :, :TILE], clean[:, :, :TILE])
        assert result[:, :, ROW].isnan().all()


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


@pytest.mark.parametrize("kind", ["huge-logits", "hugely-negative-logits", "constant-rows", "outliers"])
@pytest.mark.parametrize("path", ["compiled", "block_mask", "packed"])
def test_k7_hard_values(path, kind):
    """Beside `test_hard_values` of the dense back ends: twice the error of plain float32."""
    if path == "compiled" and (why := available_backends()["compiled"]) != "ok":
        pytest.skip(why)
    tokens = 130
    q, k, v, grad = torch.randn(4, 1, 2, tokens, 64, generator=torch.Generator().manual_seed(0))
    if "logits" in kind:
        offset = math.sqrt(1e5 * 8)
        q[..., 0], k[..., 0] = offset, -offset if "negative" in kind else offset
    elif kind == "constant-rows":
        q, k = torch.ones_like(q), torch.ones_like(k)
    else:
        rare = torch.rand(q.shape, generator=torch.Generator().manual_seed(9)) < 0.001
        q = q + rare * 10 * torch.randn(q.shape, generator=torch.Generator().manual_seed(10))
    starts = torch.tensor([0, tokens], dtype=torch.int32)

    def attend(function: str, *leaves: Tensor) -> Tensor:
        if function == "compiled":
            output = flash_attention(*leaves, is_causal=True, backend="compiled")
        elif function == "block_mask":
            mask = BlockMask.causal(tokens, block_size=64)
            output = flash_attention(*leaves, block_mask=mask, backend="triton")
        elif function == "packed":
            packed = [x[0].transpose(0, 1) for x in leaves]
            found = flash_attention_varlen(*packed, starts, starts, tokens, tokens, is_causal=True, backend="triton")
            assert isinstance(found, Tensor)
            return found.transpose(0, 1)[None]
        else:
            output = attention_reference(*leaves, is_causal=True)
        assert isinstance(output, Tensor)
        return output

    def results(function: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        output = attend(function, *leaves)
        return [output.detach().double(), *(x.double() for x in torch.autograd.grad(output, leaves, grad.to(dtype)))]

    exact, plain = results("oracle", torch.float64), results("oracle", torch.float32)
    for name, ours, eager, expected in zip(("output", "dq", "dk", "dv"), results(path, torch.float32), plain, exact):
        bound = 2 * (eager - expected).abs().max() + 1e-5
        assert ours.isfinite().all(), name
        assert (ours - expected).abs().max() <= bound, name
