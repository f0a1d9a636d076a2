"""The handout's first Triton kernel against the float64 oracle: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cs336_systems.attention.api import flash_attention
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.reference import attention_reference
from cs336_systems.attention.triton.first import flash_forward_first

COVERS = (
    "cs336_systems/attention/contract.py", "cs336_systems/attention/reference.py", "cs336_systems/attention/tiled.py",
    "cs336_systems/attention/triton/first.py", "cs336_systems/attention/validation.py",
)  # fmt: skip
CPU = pytest.param("cpu", id="cpu")
CUDA = pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)
SHAPES = {  # leading dimensions, queries, keys, head_dim
    "one-tile-d16": ((1, 1), 64, 64, 16),
    "d32": ((2,), 192, 192, 32),
    "handout": ((4,), 128, 128, 64),
    "heads-d128": ((1, 2), 128, 128, 128),
    "more-keys": ((2, 1), 64, 256, 32),
    "more-queries": ((1, 2), 256, 64, 32),
    "long": ((1,), 512, 512, 64),
}


def draw(leading: tuple[int, ...], queries: int, keys: int, head_dim: int, dtype: torch.dtype, device: str):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*leading, rows, head_dim, generator=generator).to(device, dtype)
        for rows in (queries, keys, keys, queries)
    ]


def run(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, is_causal: bool) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output, lse = flash_attention(*leaves, is_causal=is_causal, return_lse=True, backend="triton_first")
    return dict(zip(("output", "lse", "grad_q", "grad_k", "grad_v"), (
        output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, grad_output)
    )))  # fmt: skip


@pytest.fixture
def nan_results(monkeypatch):
    """Results start as NaN, so that an element that no program writes cannot pass."""
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **options: new_empty(*size, **options).fill_(math.nan))


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_contract(shape, dtype, is_causal, device, nan_results):
    if device == "cpu" and dtype == "bfloat16":
        pytest.skip("Triton's interpreter computes wrong bfloat16 dots")
    inputs = draw(*shape, getattr(torch, dtype), device)
    oracle = compute_oracle(*(x.reshape(-1, 1, *x.shape[-2:]) for x in inputs), is_causal=is_causal)
    results = run(*inputs, is_causal)
    for name, result in results.items():
        rows = inputs[0].shape[:-1] if name == "lse" else inputs[0].shape
        assert result.shape == (rows if name in ("output", "lse", "grad_q") else inputs[1].shape)
    errors = contract_errors(oracle, {name: x.view_as(oracle.expected[name]) for name, x in results.items()})
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_tile_left_out_is_rejected(device):
    """The check itself: without its last 64 keys the same kernel leaves the contract."""
    q, k, v, _ = draw((1, 1), 128, 128, 32, torch.float32, device)
    oracle = compute_oracle(q, k, v)
    output, lse = flash_forward_first(q, k[..., :64, :], v[..., :64, :], False, 32**-0.5)
    assert min(contract_errors(oracle, {"output": output, "lse": lse}).values()) > 1


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_any_strides_give_the_bits_of_contiguous_inputs(device):
    q, k, v, grad_output = draw((2, 2), 128, 128, 32, torch.float32, device)
    fused = torch.stack([q, k, v], dim=3)  # (batch, heads, seq, 3, head_dim)
    strided = [*fused.unbind(3), grad_output.mT.contiguous().mT]
    expected = run(q, k, v, grad_output, True)
    for name, result in run(*strided, True).items():
        if name in ("output", "lse"):
            assert torch.equal(result, expected[name]), name
        else:  # PyTorch's matmuls, whose sums may follow the strides
            torch.testing.assert_close(result, expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_scores_of_minus_infinity_in_the_first_tile(device):
    q, k, v, _ = draw((1, 1), 64, 128, 16, torch.float32, device)
    q[..., 0], k[..., :64, 0] = 1.0, -math.inf
    output, _ = flash_forward_first(q, k, v, False, 0.25)
    expected = attention_reference(q, k[..., 64:, :], v[..., 64:, :], scale=0.25)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_saves_one_tensor_of_a_number_a_query(device):
    q, k, v, _ = (x.requires_grad_() for x in draw((2, 3), 64, 64, 16, torch.float32, device))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        flash_attention(q, k, v, backend="triton_first")
    assert sorted(map(len, saved)) == [3, 4, 4, 4, 4] and (2, 3, 64) in saved


@pytest.mark.skipif(torch.cuda.is_available(), reason="of tensors on a CPU, interpreted")
@pytest.mark.parametrize(("q", "k", "dtype", "message"), [
    ((1, 64, 16), (1, 100, 16), torch.float32, r"whole tiles of 64, .*100, 16\)"),
    ((1, 64, 40), (1, 64, 40), torch.float32, r"head dims of \(16, 32, 64, 128\) .* q .*64, 40\)"),
    ((70000, 1, 64, 16), (70000, 1, 64, 16), torch.float32, "65,535 in the batch at most"),
    ((1, 64, 16), (1, 64, 16), torch.float64, "triton takes float32, float16, bfloat16, not float64"),
    ((1, 64, 16), (1, 64, 16), torch.bfloat16, "wrong bfloat16 products"),
    ((2, 64, 16), (1, 64, 16), torch.float32, "k must have q's 2 heads"),
], ids=str)  # fmt: skip
def test_refuses_what_it_cannot(q, k, dtype, message):
    q, k = (torch.zeros(1, dtype=dtype).expand(shape) for shape in (q, k))
    with pytest.raises(ValueError, match=message):
        flash_attention(q, k, k, backend="triton_first")


def test_refuses_grouped_heads():
    q, k = torch.zeros(1, 4, 64, 16), torch.zeros(1, 2, 64, 16)
    with pytest.raises(ValueError, match="as many key heads as query heads"):
        flash_forward_first(q, k, k, False, 1.0)
