"""K6: how far a NaN or infinity in one row of the inputs reaches, in every back end that runs on a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import flash_attention
from cs336_systems.attention.masks import BlockMask
from cs336_systems.attention.triton.first import FlashAttentionTritonFirst

SEQLEN, TILE, ROW = 256, 128, 200  # of attention, the longest side of a CPU's tiles, the row that is not finite
BACKENDS = ["reference", "tiled", "triton_first", "triton"]


def attend(backend: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if backend == "triton_first":
        output = FlashAttentionTritonFirst.apply(*leaves, True)
    else:
        output = flash_attention(*leaves, is_causal=True, backend=backend)
        assert isinstance(output, Tensor)
    names = ("output", "grad_q", "grad_k", "grad_v")
    return dict(zip(names, (output.detach(), *torch.autograd.grad(output, leaves, grad))))


def inputs() -> list[Tensor]:
    return list(torch.randn(4, 1, 2, SEQLEN, 16, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_k6_reaches_no_other_head_and_no_earlier_tile(backend, operand, value):
    """The rows that attend it are lost. Earlier ones of its tile are lost to V alone, to which they give the weight 0.

    Plain attention has one tile.
    """
    q, k, v, grad = inputs()
    expected = attend(backend, q, k, v, grad)
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
        safe = 0 if backend == "reference" else TILE
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
