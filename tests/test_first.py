"""The handout's first Triton kernel against the float64 oracle: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.attention.api import flash_attention
from cs336_systems.attention.reference import attention_reference
from cs336_systems.attention.triton.first import flash_forward_first
from tests.test_block_sparse import poisoned  # noqa: F401
from tests.test_s4_attention import DEVICES, DTYPES, assert_contract, inputs, run, skip_what_cannot_run

COVERS = (
    "cs336_systems/attention/contract.py", "cs336_systems/attention/reference.py", "cs336_systems/attention/tiled.py",
    "cs336_systems/attention/triton/first.py", "cs336_systems/attention/validation.py",
)  # fmt: skip
SHAPES = {
    "one-tile-d16": (1, 1, 1, 64, 64, 16),
    "batch-d32": (2, 1, 1, 192, 192, 32),
    "heads-d128": (1, 2, 2, 128, 128, 128),
    "more-keys": (2, 1, 1, 64, 256, 32),
    "more-queries": (1, 2, 2, 256, 64, 32),
    "long-d64": (1, 1, 1, 512, 512, 64),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_contract(shape, dtype, is_causal, device):
    skip_what_cannot_run("triton", dtype, device)
    assert_contract(*inputs(*shape, DTYPES[dtype], device), is_causal=is_causal, backend="triton_first")


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides_give_the_bits_of_contiguous_inputs(device):
    q, k, v, grad_output = inputs(2, 2, 2, 128, 128, 32, torch.float32, device)
    fused = torch.stack([q, k, v], dim=3)  # (batch, heads, seq, 3, head_dim)
    strided = [*fused.unbind(3), grad_output.mT.contiguous().mT]
    options = {"is_causal": True, "backend": "triton_first"}
    expected = run(q, k, v, grad_output, **options)
    for name, result in run(*strided, **options).items():
        if name in ("output", "lse"):
            assert torch.equal(result, expected[name]), name
        else:  # PyTorch's matmuls, whose sums may follow the strides
            torch.testing.assert_close(result, expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_minus_infinity_in_the_first_tile(device):
    q, k, v, _ = inputs(1, 1, 1, 64, 128, 16, torch.float32, device)
    q[..., 0], k[..., :64, 0] = 1.0, -math.inf
    output, _ = flash_forward_first(q, k, v, False, 0.25)
    expected = attention_reference(q, k[..., 64:, :], v[..., 64:, :], scale=0.25)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_saves_one_tensor_of_a_number_a_query(device):
    q, k, v, _ = (x.requires_grad_() for x in inputs(2, 3, 3, 64, 64, 16, torch.float32, device))
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
