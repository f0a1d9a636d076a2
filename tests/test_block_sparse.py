"""Block masks: kernels that walk lists of tiles, and the back ends that attend through the dense mask.

Against the float64 oracle with the same mask, on CPU (Triton through its interpreter) and on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import AttentionConfig, BlockMask, KernelConfig, flash_attention
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.masks.tiles import num_blocks, unpack_tokens
from cs336_systems.attention.reference import attention_reference
from cs336_systems.attention.triton import launch
from tests.covered import ATTENTION
from tests.test_s4_attention import (
    BACKENDS,
    DEVICES,
    DTYPES,
    draw,
    inputs,
    run,
    skip_what_cannot_run,
)

COVERS = ATTENTION

BLOCK = 64
# Live tiles of a 4 x 4 plane, S = 256 in tiles of 64.
PATTERNS = {
    "first-tile-dead": [[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1]],
    "middle-tile-dead": [[1, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 1], [1, 0, 1, 1]],
    "last-tile-dead": [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]],
    "checkerboard": [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]],
    "row-and-column-dead": [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1], [0, 0, 1, 1]],
}
A_SKIP_BEFORE_A_LIVE_TILE = ["first-tile-dead", "checkerboard", "row-and-column-dead"]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results start as NaN, so that an element that no program writes cannot pass."""

    def poisoned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*arguments: Any, **options: Any) -> Tensor:
            x = function(*arguments, **options)
            return x.fill_(math.nan) if x.is_floating_point() else x

        return allocate

    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"), (Tensor, "new_empty_strided"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    assert launch.empty((2,), torch.float32, torch.device("cpu")).isnan().all(), "the kernels' results come from there"


def pattern(name: str, device: str) -> BlockMask:
    return BlockMask.from_blocks(torch.tensor(PATTERNS[name], dtype=torch.bool, device=device), BLOCK)


def worst_error(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, mask: BlockMask, **options) -> float:
    """The largest error over its bound: at most 1 within the contract."""
    results = run(q, k, v, grad_output, block_mask=mask, **options)
    oracle = compute_oracle(q, k, v, grad_output, mask=mask.to_dense(), scale=options.get("scale"))
    return max(contract_errors(oracle, results).values())


# A1: skipping is correct


@pytest.mark.slow_if(device="cpu", dtype="float16")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PATTERNS)
def test_skipped_tiles(name, dtype, device):
    skip_what_cannot_run("triton", dtype, device)
    q, k, v, grad_output = inputs(1, 1, 1, 256, 256, 32, DTYPES[dtype], device)
    assert worst_error(q, k, v, grad_output, pattern(name, device), backend="triton") <= 1


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=lambda shape: f"mask-{shape[0]}x{shape[1]}")
def test_masks_broadcast_over_batch_and_heads(shape, backend, device):
    """Also with grouped-query attention: a mask's heads are those of the queries."""
    blocks = torch.rand(*shape, 2, 2, generator=torch.Generator().manual_seed(1)) < 0.6
    mask = BlockMask.from_blocks(blocks.to(device), BLOCK, seq_lengths=(100, 120))
    q, k, v, grad_output = inputs(2, 4, 2, 100, 120, 32, torch.float32, device)
    assert worst_error(q, k, v, grad_output, mask, backend=backend, enable_gqa=True) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_are_the_masks_batch(backend, device):
    q, k, v = (draw(2, 3, 1, 70, 16, dtype=torch.float32, device=device, seed=seed) for seed in range(3))
    dense = torch.rand(6, 1, 70, 70, generator=torch.Generator().manual_seed(1)).to(device) < 0.5
    mask = BlockMask.from_dense(dense, BLOCK)
    output, lse = flash_attention(q, k, v, block_mask=mask, backend=backend, return_lse=True)
    expected, expected_lse = attention_reference(q, k, v, mask=dense.view(2, 3, 1, 70, 70), return_lse=True)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    alone = flash_attention(q[0, 0], k[0, 0], v[0, 0], block_mask=BlockMask.from_dense(dense[0, 0], BLOCK))
    torch.testing.assert_close(alone, expected[0, 0], rtol=1e-5, atol=1e-5)


# A4: partial tiles, ragged ends, tiles of the mask that are several of the kernel's


TOKEN_MASKS = {
    "density-.5": ((130, 200), (64, 64), 0.5),
    "density-.1": ((130, 200), (64, 64), 0.1),
    "density-.01": ((130, 200), (64, 64), 0.01),
    "wide-tiles": ((200, 150), (64, 128), 0.1),
    "tall-tiles": ((97, 300), (128, 64), 0.1),
    "one-query": ((1, 17), (64, 64), 0.5),
    "one-key": ((256, 1), (128, 128), 0.5),
}


@pytest.mark.slow_if(device="cpu", dtype="float32")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", TOKEN_MASKS.values(), ids=TOKEN_MASKS.keys())
def test_random_token_masks(case, dtype, device):
    """At density .01 most rows have no key in the first tile that they meet, and some have none at all.

    The single query attends half of its keys: one with two keys may cost plain attention no rounding at all, and then
    there is no yardstick.
    """
    skip_what_cannot_run("triton", dtype, device)
    lengths, block_size, density = case
    generator = torch.Generator().manual_seed(5)
    dense = torch.rand(1, 2, *lengths, generator=generator).to(device) < density
    q, k, v, grad_output = inputs(1, 2, 2, *lengths, 64, DTYPES[dtype], device)
    mask = BlockMask.from_dense(dense, block_size)
    assert worst_error(q, k, v, grad_output, mask, backend="triton") <= 1


TILES = [  # 256x256 is larger than the mask's; tf32x3 is float32 in three products on tensor cores
    *(pytest.param(tiles, "cpu", "float32", id=f"{tiles}-cpu") for tiles in ("64x64", "32x128", "128x16", "256x256")),
    pytest.param("64x64_w8_s2_tf32x3", "cpu", "float32", id="64x64-tf32x3-cpu"),
    *(
        pytest.param(tiles, "cuda", "bfloat16", id=f"{tiles}-cuda", marks=pytest.mark.gpu)
        for tiles in ("64x64", "64x128", "128x64", "256x256")
    ),
    pytest.param("64x64_w8_s2_tf32x3", "cuda", "float32", id="64x64-tf32x3-cuda", marks=pytest.mark.gpu),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tiles, device, dtype", TILES)
def test_a_tile_of_the_mask_in_several_steps(tiles, device, dtype):
    """A mask of 128 x 128, its tiles of all three kinds, walked by smaller ones in every kernel."""
    spelling = tiles if "_" in tiles else f"{tiles}_w8_s2"
    configs = {name: KernelConfig.from_name(f"portable_{name}_{spelling}") for name in ("forward", "dkdv", "dq")}
    mask = BlockMask.sliding_window(300, window=280, block_size=128, device=device)
    assert mask.num_full and mask.num_partial and mask.num_dead
    q, k, v, grad_output = inputs(1, 1, 1, 300, 300, 32, DTYPES[dtype], device)
    assert worst_error(q, k, v, grad_output, mask, backend="triton", config=AttentionConfig(**configs)) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [16, 40, 128])
def test_causal_mask_equals_is_causal(head_dim, backend, device):
    q, k, v, grad_output = inputs(1, 1, 1, 130, 130, head_dim, torch.float32, device)
    masked = run(q, k, v, grad_output, backend=backend, block_mask=BlockMask.causal(130, block_size=64, device=device))
    for name, expected in run(q, k, v, grad_output, backend=backend, is_causal=True).items():
        torch.testing.assert_close(masked[name], expected, rtol=1e-5, atol=1e-5)


# A2: skipping really skips


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["keys", "queries"])
def test_dead_tiles_are_never_read(side, device):
    """NaN in keys and values, or queries and output gradients, of dead tiles, to which the lists' unused ends point."""
    lists = ("kv_indices", "full_kv_indices") if side == "keys" else ("q_indices", "full_q_indices")
    mask = with_padding(pattern("row-and-column-dead", device), dict.fromkeys(lists, 1))
    q, k, v, grad_output = inputs(1, 2, 2, 256, 256, 32, torch.float32, device)
    clean = run(q, k, v, grad_output, backend="triton", block_mask=mask)
    for x in (k, v) if side == "keys" else (q, grad_output):
        x[:, :, 64:128] = math.nan
    dirty = run(q, k, v, grad_output, backend="triton", block_mask=mask)
    if side == "queries":
        assert torch.equal(clean["grad_k"], dirty["grad_k"]) and torch.equal(clean["grad_v"], dirty["grad_v"])
        assert not dirty["output"][:, :, 64:128].any()
        return
    for name in ("output", "lse", "grad_q"):
        assert torch.equal(clean[name], dirty[name]), name
    for name in ("grad_k", "grad_v"):
        kept = [x[:, :, [*range(64), *range(128, 256)]] for x in (clean[name], dirty[name])]
        assert torch.equal(*kept), name
        assert not dirty[name][:, :, 64:128].any(), f"{name} of keys that nothing attends must be zero"


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter multiplies")
@pytest.mark.parametrize("name", ["checkerboard", "row-and-column-dead"])
def test_a2_the_visited_tiles_are_those_of_the_lists(name, monkeypatch):
    """A visit multiplies twice in the forward, three times for dQ and four times for dK and dV."""
    from triton.runtime.interpreter import InterpreterBuilder

    products, create_dot = [], InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda *arguments: products.append(1) or create_dot(*arguments)
    )
    tiles = {kernel: KernelConfig.from_name(f"portable_{kernel}_64x64_w4_s1") for kernel in ("forward", "dkdv", "dq")}
    options = {"block_mask": pattern(name, "cpu"), "config": AttentionConfig(**tiles)}
    run(*inputs(1, 2, 2, 256, 256, 32, torch.float32, "cpu"), backend="triton", **options)
    heads, listed = 2, sum(map(sum, PATTERNS[name]))
    assert len(products) == heads * listed * (2 + 3 + 4)


def with_padding(mask: BlockMask, tiles: dict[str, int]) -> BlockMask:
    """`mask` with lists one slot longer, and the unused slots pointing at the given tile."""
    lists = {}
    for name, tile in tiles.items():
        padded = torch.nn.functional.pad(getattr(mask, name), (0, 1))
        number = getattr(mask, name.replace("_indices", "_num_blocks"))
        unused = torch.arange(padded.shape[-1], device=padded.device) >= number[..., None]
        assert unused.any()
        lists[name] = padded.masked_fill(unused, tile)
        if not name.startswith("full_"):
            tokens = name.replace("_indices", "_tokens")
            lists[tokens] = torch.nn.functional.pad(getattr(mask, tokens), (0, 1))
    return replace(mask, lists=mask.lists._replace(**lists))


@pytest.mark.parametrize("name", A_SKIP_BEFORE_A_LIVE_TILE)
def test_pointers_advanced_inside_the_skip_branch_are_rejected(name):
    """The bug of block-sparse kernels that branch: a skipped tile does not move the pointers, so the n-th live tile
    reads the n-th tile. Planted by numbering the lists' entries; without it the same inputs pass."""
    q, k, v, grad_output = inputs(1, 1, 1, 256, 256, 32, torch.float32, "cpu")
    mask = pattern(name, "cpu")
    assert worst_error(q, k, v, grad_output, mask, backend="triton") <= 1
    for field, results in (("full_kv_indices", ("output", "grad_q")), ("full_q_indices", ("grad_k", "grad_v"))):
        shape = getattr(mask, field).shape
        planted = torch.arange(shape[-1], dtype=torch.int32).expand(shape).contiguous()
        wrong = replace(mask, lists=mask.lists._replace(**{field: planted}))
        found = run(q, k, v, grad_output, block_mask=wrong, backend="triton")
        errors = contract_errors(compute_oracle(q, k, v, grad_output, mask=mask.to_dense()), found)
        assert all(errors[name] > 1 for name in results), errors


# A3: rows without a key


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bottom-right", "all-dead", "single-rows"])
def test_rows_without_keys(kind, backend, device):
    if kind == "bottom-right":  # the first 100 queries come before the first key
        mask = BlockMask.causal(200, 100, bottom_right=True, block_size=BLOCK, device=device)
    elif kind == "all-dead":
        mask = BlockMask.from_blocks(torch.zeros(4, 2, dtype=torch.bool, device=device), BLOCK, seq_lengths=(200, 100))
    else:
        dense = torch.ones(200, 100, dtype=torch.bool, device=device)
        dense[[0, 3, 64, 150, 199]] = False
        mask = BlockMask.from_dense(dense, BLOCK)
    q, k, v, grad_output = inputs(1, 2, 2, 200, 100, 32, torch.float32, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output, lse = flash_attention(*leaves, block_mask=mask, return_lse=True, backend=backend)
    grads = torch.autograd.grad((output, lse), leaves, (grad_output, torch.ones_like(lse)))
    empty = ~mask.to_dense()[0, 0].any(-1)
    assert empty.any() and mask.empty_rows == empty.sum()
    assert not output[:, :, empty].any() and (lse[:, :, empty] == -math.inf).all()
    assert not grads[0][:, :, empty].any() and all(grad.isfinite().all() for grad in grads)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected, expected_lse = attention_reference(*exact, mask=mask.to_dense(), return_lse=True)
    upstream = (grad_output.double(), torch.ones_like(expected_lse))
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(grads, torch.autograd.grad((expected, expected_lse), exact, upstream)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("backend", "result"), [*((backend, "lse") for backend in BACKENDS), ("tiled", "output")])
def test_a_nan_gradient_of_a_row_without_keys_goes_nowhere(result, backend, device):
    """`logaddexp` of two rows of -inf has a gradient of NaN; times P = 0 it became all of dK."""
    dense = torch.ones(200, 100, dtype=torch.bool, device=device)
    dense[[0, 3, 64, 150, 199]] = False
    empty, mask = ~dense.any(-1), BlockMask.from_dense(dense, BLOCK)
    q, k, v, grad_output = inputs(1, 2, 2, 200, 100, 32, torch.float32, device)
    grads = []
    for dead in (math.nan, 1.0):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        output, lse = flash_attention(*leaves, block_mask=mask, return_lse=True, backend=backend)
        upstream = {"output": grad_output.clone(), "lse": torch.ones_like(lse)}
        upstream[result][:, :, empty] = dead
        grads.append(torch.autograd.grad((output, lse), leaves, tuple(upstream.values())))
    for name, ours, expected in zip("qkv", *grads):
        assert expected.isfinite().all() and torch.equal(ours, expected), f"gradient of {name}"


def check(mask: BlockMask, expected: Tensor) -> None:
    """`mask` attends exactly `expected`, both directions of its lists say so, and its own counts are true."""
    dense = mask.to_dense()
    assert torch.equal(dense, expected.expand_as(dense)) and mask.shape == tuple(dense.shape)
    (rows, columns), (q_block, k_block) = map(num_blocks, mask.seq_lengths, mask.block_size), mask.block_size
    whole = dense.new_zeros(*dense.shape[:2], rows * q_block, columns * k_block)  # a tile that an end cuts is not full
    whole[:, :, : dense.shape[2], : dense.shape[3]] = dense
    tiles = whole.view(*dense.shape[:2], rows, q_block, columns, k_block).transpose(3, 4)
    full = tiles.all(-1).all(-1)
    partial = tiles.any(-1).any(-1) & ~full
    bits = unpack_tokens(mask.token_bits, k_block)
    for side, lines in (("kv", 2), ("q", 3)):  # by row, by column of tiles
        for prefix, kind in (("", partial), ("full_", full)):
            counts, indices = (getattr(mask, f"{prefix}{side}_{name}") for name in ("num_blocks", "indices"))
            listed, by_line = torch.arange(indices.shape[3]) < counts[..., None], kind.transpose(2, lines)
            assert torch.equal(counts, by_line.sum(-1).int())
            assert torch.equal(indices[listed], by_line.nonzero()[:, 3].int()) and not indices[~listed].any()
            if kind is partial:
                tokens = getattr(mask, f"{side}_tokens")[listed].long()
                assert torch.equal(bits[tokens], tiles.transpose(2, lines)[by_line])
    assert (mask.num_full, mask.num_partial) == (full.sum(), partial.sum())
    assert mask.num_dead == full.numel() - mask.num_full - mask.num_partial
    assert mask.num_attended == dense.sum() and mask.empty_rows == (~dense.any(-1)).sum()


# A9: the mask of shared keys


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("queries", "keys", "block"), [(64, 50, 16), (100, 37, 16), (150, 200, 64), (65, 30, 64), (1, 1, 16)]
)
def test_staircase_in_one_launch(queries, keys, block, device, monkeypatch):
    """Into memory that was anything, both ways; so does torch.compile's operator."""
    from cs336_systems.attention.triton.staircase import launch_staircase, opaque_staircase

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(-9))
    climbs = torch.rand(2, 2, queries, generator=torch.Generator().manual_seed(queries)) < 0.6
    lengths = climbs.cumsum(-1).clamp(max=keys).int()
    mask = launch_staircase(lengths.to(device), keys, block)
    assert all(map(torch.equal, opaque_staircase(lengths.to(device), keys, block), mask.lists))
    check(mask.to("cpu"), torch.arange(keys) < lengths[..., None])


@pytest.mark.gpu
def test_shared_keys_on_a_gpu_equal_their_token_mask():
    from cs336_systems.attention.dynamic import choose_keys, shared_keys_attention

    q, k, v, _ = inputs(1, 4, 2, 1000, 1000, 64, torch.bfloat16, "cuda")
    bias = torch.rand(1, 2, 1000, generator=torch.Generator().manual_seed(5)).cuda()
    positions, _ = choose_keys(bias, 200)
    output = shared_keys_attention(q, k, v, bias, 200, is_causal=True, enable_gqa=True, backend="triton")
    kept = torch.zeros(1, 2, 1000, dtype=torch.bool, device="cuda").scatter(2, positions, True)
    dense = kept.repeat_interleave(2, dim=1)[:, :, None] & torch.ones(1000, 1000, device="cuda").tril().bool()
    exact = attention_reference(q.double(), *(x.double().repeat_interleave(2, dim=1) for x in (k, v)), mask=dense)
    assert (output - exact).norm() <= 0.01 * exact.norm()


# A8, K8: large


@pytest.mark.gpu
@pytest.mark.alone
def test_memory_stays_linear():
    """Built from blocks, no (queries, keys) tensor: forward and backward at S = 65536 peak at 12 times q at most."""
    seqlen = 65536
    mask = BlockMask.random_blocks(seqlen, density=0.1, device="cuda")
    leaves = [x.requires_grad_() for x in inputs(1, 8, 8, seqlen, seqlen, 64, torch.bfloat16, "cuda")[:3]]
    torch.cuda.reset_peak_memory_stats()
    flash_attention(*leaves, block_mask=mask, backend="triton").sum().backward()
    peak = torch.cuda.max_memory_allocated()
    size = leaves[0].numel() * leaves[0].element_size()
    assert peak <= 12 * size, f"{peak / size:.1f} times the bytes of q"


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("block", "dtype"), [(64, "float16"), (128, "bfloat16")])
@pytest.mark.parametrize("kind", ["blocks", "causal-blocks", "window", "tokens"])
def test_longer_sequences(kind, block, head_dim, dtype):
    if kind == "blocks":
        mask = BlockMask.random_blocks(2048, density=0.3, heads=4, block_size=block, device="cuda")
    elif kind == "causal-blocks":
        blocks = torch.rand(2048 // block, 2048 // block, generator=torch.Generator().manual_seed(2)) < 0.3
        mask = BlockMask.from_blocks(blocks.cuda(), block, is_causal=True)
    elif kind == "window":
        mask = BlockMask.sliding_window(2000, 2017, window=300, block_size=block, device="cuda")
    else:
        dense = torch.rand(1000, 1000, generator=torch.Generator().manual_seed(3)) < 0.1
        mask = BlockMask.from_dense(dense.cuda(), block)
    tensors = inputs(1, 4, 2, *mask.seq_lengths, head_dim, DTYPES[dtype], "cuda")
    assert worst_error(*tensors, mask, backend="triton", enable_gqa=True) <= 1
