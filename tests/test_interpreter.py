"""What the tests' interpreter of Triton kernels has in common with a GPU."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def _both_products(
    q_ptr,
    k_ptr,
    scores_ptr,
    transposed_ptr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    rows, keys, columns = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + columns)
    k = tl.load(k_ptr + keys[:, None] * D + columns)
    places = rows[:, None] * KEYS + keys
    tl.store(scores_ptr + places, tl.dot(q, tl.trans(k), input_precision="ieee"))
    tl.store(transposed_ptr + places, tl.trans(tl.dot(k, tl.trans(q), input_precision="ieee")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [(16, 16, 32), (64, 64, 64), (128, 64, 128)], ids=str)
def test_scores_of_the_backward_are_those_of_the_forward(sizes, dtype):
    rows, keys, head_dim = sizes
    generator = torch.Generator().manual_seed(0)
    q, k = (10 * torch.randn(size, head_dim, generator=generator) for size in (rows, keys))
    q, k = q.to(dtype), k.to(dtype)
    scores, transposed = torch.empty(2, rows, keys)
    _both_products[(1,)](q, k, scores, transposed, rows, keys, head_dim)
    torch.testing.assert_close(scores, (q.double() @ k.double().T).float(), rtol=1e-6, atol=1e-3)
    assert torch.equal(scores, transposed)
