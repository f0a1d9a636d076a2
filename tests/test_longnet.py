"""LongNet's mixture over segments and rates: one softmax in which a key counts as often as branches attend it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cs336_systems.attention.dilated import dilated_attention, longnet_attention
from cs336_systems.attention.masks import BlockMask

SEGMENTS = [(8, 1), (16, 2), (64, 4)]


def oracle(q: Tensor, k: Tensor, v: Tensor, segments: list[tuple[int, int]], is_causal: bool) -> Tensor:
    """Scores' exponentials times how many branches attend the pair, over their sum."""
    counts = sum(
        BlockMask.dilated(
            q.shape[2], segment_length=length, dilation_rate=rate, heads=q.shape[1], is_causal=is_causal, block_size=16
        ).to_dense().to(q.dtype)
        for length, rate in segments
    )  # fmt: skip
    assert isinstance(counts, Tensor)
    weights = counts * (q @ k.mT * q.shape[-1] ** -0.5).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ v / total.masked_fill(total == 0, 1)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("tokens", [1, 50, 128])
@pytest.mark.parametrize("segments", [[(16, 4)], SEGMENTS], ids=["no_branch_keeps_some", "three_branches"])
def test_the_mixture_is_one_softmax_over_all_branches(segments, tokens, is_causal):
    q, k, v, grad = torch.randn(4, 2, 5, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for attend in (
        lambda *leaves: oracle(*leaves, segments, is_causal),
        lambda *leaves: longnet_attention(*leaves, segments, is_causal=is_causal, backend="reference"),
        lambda *leaves: longnet_attention(*leaves, segments, is_causal=is_causal, backend="tiled"),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        output = attend(*leaves)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, grad)])
    for result in results[1:]:
        for name, ours, expected in zip(("output", "grad_q", "grad_k", "grad_v"), result, results[0]):
            # tiled rounds L to nothing in float64, and both are exact but for the order of sums
            assert (ours - expected).abs().max() <= 1e-12, name


def test_the_log_sum_exp_of_dropped_rows_is_minus_infinity():
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, lse = dilated_attention(q, q, q, 8, 2, phases="by_head", return_lse=True)
    assert (lse[0, 0, 1::2] == -torch.inf).all()
    assert (lse[0, 1, 0::2] == -torch.inf).all()
    expected = torch.logsumexp(q[0, 0, 0::2] @ q[0, 0, 0::2].mT / 2, -1)
    torch.testing.assert_close(lse[0, 0, 0::2], expected)


@pytest.mark.parametrize("segments", [[], [(8,)], (8, 1), None], ids=str)
def test_segments_must_be_pairs(segments):
    q = torch.randn(1, 1, 8, 4)
    with pytest.raises(ValueError, match="segments must be pairs"):
        longnet_attention(q, q, q, segments)
