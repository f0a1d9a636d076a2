"""Causality (G6), masks that are none (A10), SDPA's bool masks, and neighbourhoods on a grid (G8)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cs336_systems.attention.api as api
from cs336_systems.attention import flash_attention, flash_attention_varlen
from cs336_systems.attention.dilated import dilated_attention
from cs336_systems.attention.dynamic import shared_keys_attention
from cs336_systems.attention.masks import BlockMask, neighbourhood_mask, parse_mask
from cs336_systems.attention.masks.block_mask import from_attn_mask
from cs336_systems.grids import hilbert_order, neighbourhood_block_density, row_major_order


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# Causality

TOKENS, EDITED = 97, 50


def masked(pattern: str):
    mask = parse_mask(pattern, seqlen=TOKENS, block_size=32)
    return lambda q, k, v: flash_attention(q, k, v, block_mask=mask, backend="tiled")


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends = torch.tensor([0, 33, TOKENS], dtype=torch.int32)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    output = flash_attention_varlen(*rows, ends, ends, TOKENS, TOKENS, is_causal=True, backend="tiled")
    assert isinstance(output, Tensor)
    return output.transpose(0, 1)[None]


CAUSAL = {
    **{pattern: masked(pattern) for pattern in (
        "causal", "window:24", "document:40,57+causal", "dilated:32/2+causal", "random:0.5+causal",
        "tokens:0.5+causal", "topk:7", "shared:20+causal",
    )},
    "is_causal": lambda q, k, v: flash_attention(q, k, v, is_causal=True, backend="tiled"),
    "packed": packed,
    "dilated": lambda q, k, v: dilated_attention(
        q, k, v, segment_length=64, dilation_rate=4, is_causal=True, backend="tiled"
    ),
    "dilated by head": lambda q, k, v: dilated_attention(
        q, k, v, segment_length=64, dilation_rate=2, phases="by_head", is_causal=True, backend="tiled"
    ),
    "shared keys": lambda q, k, v: shared_keys_attention(
        q, k, v, randn(1, 2, TOKENS), num_keys=20, is_causal=True, backend="tiled"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CAUSAL)
def test_g6_a_token_changes_no_row_before_it_nor_its_gradients(kind):
    def run(edit: float) -> list[Tensor]:
        leaves = list(torch.randn(3, 1, 2, TOKENS, 8, generator=torch.Generator().manual_seed(1)))
        for x in leaves:
            x[:, :, EDITED] += edit
        leaves = [x.requires_grad_() for x in leaves]
        output = CAUSAL[kind](*leaves)
        before = output[:, :, :EDITED]
        return [before.detach(), *torch.autograd.grad(before.square().sum(), leaves)]

    for result, other in zip(run(0.0), run(1.0)):
        assert torch.equal(result, other)
        assert result[:, :, :EDITED].any() and not result[:, :, EDITED:].any()


# The dense form


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (97, 97), (40, 130), (130, 40), (128, 257)], ids=str)
def test_a10_a_mask_knows_that_it_is_full_or_causal(lengths, block):
    ones = torch.ones(2, 3, *lengths, dtype=torch.bool)
    assert BlockMask.from_dense(ones, block).dense_form == "full"
    if lengths != (1, 1):  # one pair is both
        causal = ones.tril()
        assert BlockMask.from_dense(causal, block).dense_form == "causal"
        assert BlockMask.causal(*lengths, block_size=block).dense_form == "causal"
        for mask in (ones, causal):  # a pair less in one head is neither, and one moved above the diagonal
            mask[1, 2, -1, 0] = False
            assert BlockMask.from_dense(mask, block).dense_form is None
        causal[1, 2, 0, -1] = True
        if lengths[1] > 1:
            assert BlockMask.from_dense(causal, block).dense_form is None


def test_a10_other_masks_have_no_dense_form():
    for pattern in ("window:64", "document:100,156", "random:0.5", "tokens:0.9", "dilated:64/2"):
        assert parse_mask(pattern, seqlen=256, block_size=32).dense_form is None
    assert BlockMask.causal(64, 128, bottom_right=True, block_size=32).dense_form is None
    assert BlockMask.causal(0, 5).dense_form is None
    both = BlockMask.sliding_window(256, window=256, block_size=32) & BlockMask.causal(256, block_size=32)
    assert both.dense_form == "causal" == both.to("cpu").dense_form


def test_a10_auto_takes_the_dense_kernel_and_a_named_back_end_the_mask(monkeypatch):
    q = randn(1, 2, 128, 16)
    taken = []
    real = api.attention_reference
    monkeypatch.setattr(
        api, "attention_reference", lambda *args, **kw: taken.append(kw.get("mask")) or real(*args, **kw)
    )
    mask = BlockMask.causal(128, block_size=64)
    outputs = [flash_attention(q, q, q, block_mask=mask, backend=name) for name in ("auto", "reference")]
    assert taken[0] is None
    assert taken[1] is not None
    torch.testing.assert_close(*outputs)


def test_a10_the_choice_breaks_no_graph():
    q, mask = randn(1, 2, 128, 16), BlockMask.causal(128, block_size=64)
    compiled = torch.compile(lambda q: flash_attention(q, q, q, block_mask=mask), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q), flash_attention(q, q, q, is_causal=True))


# SDPA's masks


@pytest.mark.parametrize("backend", ["auto", "tiled", "triton"])
@pytest.mark.parametrize("shape", [(97, 70), (1, 70), (3, 97, 70), (2, 1, 97, 70), (2, 3, 97, 70)], ids=str)
def test_a_bool_attn_mask_is_sdpas(shape, backend):
    """Rows without a key give 0, -inf and no gradient, where releases of SDPA have differed."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    if shape[-2] > 1:
        mask[..., 5, :] = False
    dtype = torch.float32 if backend == "triton" else torch.float64
    q, k, v = (randn(2, 3, length, 16).to(dtype).requires_grad_() for length in (97, 70, 70))
    rows = mask.any(-1).expand(2, 3, 97)
    grad = randn(2, 3, 97, 16).to(dtype) * rows[..., None]
    ours, lse = flash_attention(q, k, v, attn_mask=mask, return_lse=True, backend=backend)
    seen = mask | ~mask.any(-1, keepdim=True)  # whose rows without a key see all, and get no gradient
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen) * rows[..., None]
    tolerance = {"atol": 2e-5, "rtol": 0.0} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 0.0}
    torch.testing.assert_close(ours, theirs, **tolerance)
    for name, x in zip(torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(theirs, (q, k, v), grad)):
        torch.testing.assert_close(name, x, **tolerance)
    assert ((lse == -torch.inf) == ~rows).all()


def test_an_attn_mask_may_share_some_of_the_leading_dimensions():
    q, mask = randn(2, 3, 2, 20, 16), randn(2, 1, 1, 20, 20) > 0
    mask[..., 0] = True
    theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    torch.testing.assert_close(flash_attention(q, q, q, attn_mask=mask), theirs)
    shared = from_attn_mask(mask[0], q, q)
    assert shared.shape == (1, 1, 20, 20) and from_attn_mask(mask[:, :, 0], q[:, 0], q[:, 0]).shape == (2, 1, 20, 20)
    assert from_attn_mask(mask[:0], q[:0], q[:0]).shape == (0, 1, 20, 20)


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled"])
@pytest.mark.parametrize("leading", [(0,), (2, 0)])
def test_an_attn_mask_of_an_empty_batch(leading, backend):
    q = randn(*leading, 3, 20, 16)
    assert flash_attention(q, q, q, attn_mask=randn(20, 20) > 0, backend=backend).shape == q.shape


def test_an_attn_mask_that_does_not_fit_is_named_under_the_compiler_too():
    attend = torch.compile(lambda x, mask: flash_attention(x, x, x, attn_mask=mask), backend="eager")
    with pytest.raises(ValueError, match="attn_mask must broadcast"):
        attend(randn(2, 3, 20, 16), randn(20, 19) > 0)


# Neighbourhoods


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("radius", [0, 2, 7, 40])
@pytest.mark.parametrize("order", ["rows", "hilbert"])
def test_g8_a_neighbourhood_mask_is_the_dense_one(order, radius, block):
    n = 16
    tokens = (hilbert_order if order == "hilbert" else row_major_order)(n)
    rows, columns = tokens // n, tokens % n
    near = ((rows[:, None] - rows).abs() <= radius) & ((columns[:, None] - columns).abs() <= radius)
    mask = neighbourhood_mask(n, radius=radius, order=order, block_size=block)
    assert torch.equal(mask.to_dense()[0, 0], near)
    counted = neighbourhood_block_density(n, radius=radius, block_size=block, order=tokens)
    assert mask.block_density == pytest.approx(counted)
    name = "grid" if order == "rows" else order
    assert torch.equal(parse_mask(f"{name}:{radius}", seqlen=n * n, block_size=block).to_dense(), mask.to_dense())


def test_g8_no_dense_mask_is_made():
    """Of 65,536 tokens it would be 4 GiB: no tensor meanwhile takes more than 256 MiB."""
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            largest.append(result.nbytes if isinstance(result, Tensor) else 0)
            return result

    with Watch():
        mask = neighbourhood_mask(256, radius=3, order="hilbert", block_size=128)
    assert max(largest) <= 2**28
    assert mask.block_density < 0.05


def test_g8_bad_grids_are_refused():
    with pytest.raises(ValueError, match="needs a square number of tokens"):
        parse_mask("grid:3", seqlen=200)
    with pytest.raises(ValueError, match="needs a power of 4 of tokens"):
        parse_mask("hilbert:3", seqlen=36)
    with pytest.raises(ValueError, match="order must be one of rows, hilbert"):
        neighbourhood_mask(8, radius=1, order="snake")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n must be a power of two"):
        neighbourhood_mask(12, radius=1, order="hilbert")
