"""Ring attention on gloo ranks against one process, and the merge of two parts of the keys."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import attention_reference, flash_attention
from cs336_systems.config import ModelConfig
from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.distributed.ring_attention import (
    merge_attention,
    ring_attention,
    split_context,
    zigzag_join,
    zigzag_split,
)
from cs336_systems.distributed.spawn import run_ranks
from cs336_systems.model import TransformerLM, cross_entropy
from tests.one_job import OneJob

COVERS = ("cs336_systems/distributed/ring_attention.py",)
THREE_RANKS = OneJob(3)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


attend = partial(attention_reference, return_lse=True)


@pytest.mark.parametrize("cut", [1, 7, 16], ids=lambda cut: f"{cut}_of_17_keys")
def test_merged_parts_are_attention_over_all_keys(cut: int):
    q, k, v = draw(2, 3, 9, 8), draw(2, 3, 17, 8, seed=1), draw(2, 3, 17, 8, seed=2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    first = attend(leaves[0], leaves[1][..., :cut, :], leaves[2][..., :cut, :])
    second = attend(leaves[0], leaves[1][..., cut:, :], leaves[2][..., cut:, :])
    output, lse = merge_attention(*first, *second)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = attend(*whole)
    assert (output - expected).abs().max() <= 1e-12
    assert (lse - expected_lse).abs().max() <= 1e-12
    upstream, upstream_lse = draw(2, 3, 9, 8, seed=3), draw(2, 3, 9, seed=4)
    torch.autograd.backward((output, lse), (upstream, upstream_lse))
    torch.autograd.backward((expected, expected_lse), (upstream, upstream_lse))
    for ours, theirs in zip(leaves, whole):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_a_part_without_keys_changes_nothing():
    q, k, v = draw(5, 8), draw(6, 8, seed=1), draw(6, 8, seed=2)
    output, lse = attend(q, k, v)
    nothing = torch.zeros_like(output), torch.full_like(lse, -math.inf)
    for merged in (merge_attention(output, lse, *nothing), merge_attention(*nothing, output, lse)):
        torch.testing.assert_close(merged, (output, lse), rtol=0, atol=1e-15)
    empty_output, empty_lse = merge_attention(*nothing, *nothing)
    assert not empty_output.any() and empty_lse.eq(-math.inf).all()


def test_large_scores_do_not_overflow_and_shapes_that_do_not_match_are_refused():
    output, lse = merge_attention(
        torch.ones(1, 2), torch.tensor([5e4]), torch.zeros(1, 2), torch.tensor([-5e4])
    )
    assert torch.equal(output, torch.ones(1, 2)) and lse.item() == 5e4
    with pytest.raises(
        ValueError, match=r"outputs must have one shape and log-sum-exps .*, got \(4, 8\), \(3,\)"
    ):
        merge_attention(torch.zeros(4, 8), torch.zeros(3), torch.zeros(4, 8), torch.zeros(4))


def test_zigzag_parts_join_to_the_whole_and_have_the_same_causal_area():
    """The reason for the zig-zag: with contiguous parts the last rank has 2N - 1 times the first's."""
    x = torch.arange(24).view(1, 24, 1)
    parts = [zigzag_split(x, rank, 3, dim=1) for rank in range(3)]
    assert parts[0].flatten().tolist() == [0, 1, 2, 3, 20, 21, 22, 23]
    assert torch.equal(zigzag_join(parts, dim=1), x)
    with pytest.raises(
        ValueError, match="tensor must have a multiple of 10 elements along dim 1, got 24"
    ):
        zigzag_split(x, 0, 5, dim=1)
    mask = torch.ones(32, 32).tril()
    assert len({zigzag_split(mask, rank, 4, dim=0).sum().item() for rank in range(4)}) == 1


# is_causal, back end, dtype, heads of keys and values (of 4)
CASES = [
    (True, "reference", torch.float64, 4),
    (False, "reference", torch.float64, 2),
    (True, "tiled", torch.float64, 1),
    (True, "tiled", torch.float32, 4),
    (True, "triton", torch.float32, 2),
]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}
TINY = ModelConfig(
    name="test", d_model=16, d_ff=24, num_layers=2, num_heads=2, vocab_size=11, context_length=24
)


def whole_inputs(num_ranks: int, dtype: torch.dtype, kv_heads: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    heads = (4, kv_heads, kv_heads, 4)
    return [draw(2, heads[seed], 8 * num_ranks, 16, seed=seed).to(dtype) for seed in range(4)]


@THREE_RANKS.call
def ring_on_rank(rank: int, num_ranks: int) -> list[list[Tensor]]:
    """For each case this rank's output and gradients."""
    found = []
    odd = draw(1, 1, 5, 8)
    with pytest.raises(
        ValueError, match="the same even number of positions under a causal mask, got 5 and 5"
    ):
        ring_attention(odd, odd, odd, is_causal=True)
    for is_causal, backend, dtype, kv_heads in CASES:
        whole = whole_inputs(num_ranks, dtype, kv_heads)
        q, k, v, grad_output = (zigzag_split(x, rank, num_ranks, dim=-2) for x in whole)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": kv_heads < 4}
        output = ring_attention(*leaves, backend=backend, **options)
        output.backward(grad_output)
        found.append([output.detach(), *(leaf.grad for leaf in leaves)])
    return found


@THREE_RANKS.check
def test_gradients_are_not_differentiated_in_silence(rank: int, num_ranks: int) -> None:
    """The gradients had no graph, so that a penalty on them trained nothing, without a word."""
    q, k, v = (draw(1, 1, 4, 8, seed=seed).requires_grad_() for seed in range(3))
    output = ring_attention(q, k, v, is_causal=True)
    grads = torch.autograd.grad(output.sum(), (q, k, v), create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported here"):
        torch.autograd.grad(grads[0].square().sum(), q)


@THREE_RANKS.check
def test_ranks_with_other_shapes_are_told_so_in_their_first_call(rank: int, num_ranks: int) -> None:
    """gloo ended their processes, without an exception."""
    group = torch.distributed.new_group()
    part = draw(1, 1, 4 + 2 * (rank == 1), 8)
    shapes = r"rank 0 has 'q' of shape \(1, 1, 4, 8\), float64, rank 1 'q' of shape \(1, 1, 6, 8\)"
    with pytest.raises(ValueError, match=f"q, k and v must be the same on all ranks: {shapes}"):
        ring_attention(part, part, part, group=group)


@THREE_RANKS.check
def test_any_leading_dimensions(rank: int, num_ranks: int) -> None:
    """Of three-dimensional inputs the backward took rows for heads, and repeated them."""
    leaves = [draw(2, 16, 8, seed=3 * rank + seed).requires_grad_() for seed in range(3)]
    expected = ring_attention(*(x[None] for x in leaves), is_causal=True, backend="tiled")[0]
    for lead in ((), (1, 1)):
        output = ring_attention(
            *(x.view(*lead, *x.shape) for x in leaves), is_causal=True, backend="tiled"
        )
        assert output.shape == (*lead, 2, 16, 8)
        torch.testing.assert_close(output.view_as(expected), expected, rtol=0, atol=0)
        ours, theirs = (
            torch.autograd.grad(x.sin().sum(), leaves, retain_graph=True)
            for x in (output, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@THREE_RANKS.check
def test_a_model_of_split_contexts_has_one_processs_gradients(rank: int, num_ranks: int) -> None:
    tokens, targets = torch.randint(
        11, (2, 3, TINY.context_length), generator=torch.Generator().manual_seed(1)
    )
    torch.manual_seed(0)
    alone = TransformerLM.from_config(TINY).double()
    model = deepcopy(alone)
    make_whole = split_context(model, torch.distributed.new_group(), backend="tiled")
    part, wanted = (zigzag_split(x, rank, num_ranks, dim=1) for x in (tokens, targets))
    compiled = torch.compile(model, backend="eager")(part)  # the first call on the group
    torch.testing.assert_close(compiled, model(part))
    model = OverlapDDP(model)
    cross_entropy(alone(tokens), targets).backward()
    cross_entropy(model(part), wanted).backward()
    model.finish_gradient_synchronization()
    for own, one in zip(model.parameters(), alone.parameters(), strict=True):
        assert (own.grad - one.grad).abs().max() < 1e-9 * one.grad.abs().max()
    with pytest.raises(ValueError, match="sequence must be this rank's 8 positions, got 24"):
        model(tokens)
    make_whole()
    torch.testing.assert_close(model(tokens), alone(tokens))


def assert_one_process_attention(results: list[list[list[Tensor]]]) -> None:
    num_ranks = len(results)
    for case, (is_causal, backend, dtype, kv_heads) in enumerate(CASES):
        whole = whole_inputs(num_ranks, dtype, kv_heads)
        leaves = [x.double().requires_grad_() for x in whole[:3]]
        every = [x.repeat_interleave(4 // x.shape[1], 1) for x in leaves]
        expected = attention_reference(*every, is_causal=is_causal, scale=0.3)
        expected.backward(whole[3].double())
        for place, wanted in enumerate([expected.detach(), *(leaf.grad for leaf in leaves)]):
            ours = zigzag_join([results[rank][case][place] for rank in range(num_ranks)], dim=-2)
            assert ours.dtype == dtype
            error = (ours - wanted).abs().max().item()
            assert error <= TOLERANCES[dtype] * max(1.0, wanted.abs().max().item()), (
                is_causal,
                backend,
                place,
            )


def test_three_ranks_are_one_process_forward_and_backward():
    assert_one_process_attention(THREE_RANKS.results(ring_on_rank))


def test_D9_one_rank_is_one_process_attention(alone_in_a_group):
    assert_one_process_attention([ring_on_rank(0, 1)])
    test_gradients_are_not_differentiated_in_silence(0, 1)
    leaves = [
        draw(1, 1, 8, 16, seed=seed, dtype=torch.float32).requires_grad_() for seed in range(3)
    ]
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [call(*leaves, is_causal=True) for call in (ring_attention, flash_attention)]
    ours, plain = (
        torch.autograd.grad(output, leaves, torch.ones_like(output)) for output in outputs
    )
    torch.testing.assert_close([outputs[0], *ours], [outputs[1], *plain], rtol=0.02, atol=0.02)
    with pytest.raises(
        ValueError, match="model must have CausalMultiHeadSelfAttention layers, Linear has none"
    ):
        split_context(torch.nn.Linear(2, 2))


def ring_on_gpu_rank(rank: int, num_ranks: int, backend: str) -> list[Tensor]:
    device = torch.device("cuda", torch.cuda.current_device())
    whole = [
        draw(1, 4, 512 * num_ranks, 64, seed=seed).to(device, torch.bfloat16) for seed in range(4)
    ]
    q, k, v, grad_output = (zigzag_split(x, rank, num_ranks, dim=-2) for x in whole)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = ring_attention(*leaves, is_causal=True, backend=backend)
    output.backward(grad_output)
    return [x.float().cpu() for x in (output.detach(), *(leaf.grad for leaf in leaves))]


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_the_ring_on_nccl_is_one_gpus_attention(backend: str):
    """bfloat16 through the kernels: within twice the error of plain attention in the same dtype."""
    num_ranks = torch.cuda.device_count()
    if num_ranks < 2:
        pytest.skip("needs two GPUs")
    results = run_ranks(ring_on_gpu_rank, num_ranks, backend, backend="nccl", device="cuda")
    whole = [
        draw(1, 4, 512 * num_ranks, 64, seed=seed).to("cuda", torch.bfloat16) for seed in range(4)
    ]

    def attended(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in whole[:3]]
        output = attention_reference(*leaves, is_causal=True)
        output.backward(whole[3].to(dtype))
        return [x.double().cpu() for x in (output.detach(), *(leaf.grad for leaf in leaves))]

    for place, (exact, plain) in enumerate(zip(attended(torch.float64), attended(torch.bfloat16))):
        ours = zigzag_join([parts[place] for parts in results], dim=-2)
        # One more rounding for each rank's part, in the output's dtype.
        bound = 2 * (plain - exact).abs().max() * math.sqrt(num_ranks) + 1e-5
        assert (ours - exact).abs().max() <= bound, place
