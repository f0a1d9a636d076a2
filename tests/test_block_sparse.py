"""Block masks: kernels that walk lists of tiles, and the back ends that attend through the dense
mask.

Against the float64 oracle with the same mask, on CPU (Triton through its interpreter) and on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import BlockMask, flash_attention
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.dynamic import choose_keys, shared_keys_attention
from cs336_systems.attention.masks.tiles import num_blocks, unpack_tokens
from cs336_systems.attention.reference import attention_reference
from tests.covered import ATTENTION
from tests.test_s4_attention import (
    BACKENDS,
    DTYPES,
    all_results,
    assert_equal,
    inputs,
    poisoned,  # noqa: F401
    run,
    skip_what_cannot_run,
    tiles,
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


def pattern(name: str, device: str) -> BlockMask:
    return BlockMask.from_blocks(
        torch.tensor(PATTERNS[name], dtype=torch.bool, device=device), BLOCK
    )


def random_blocks(batch: int, heads: int, device: str) -> BlockMask:
    blocks = torch.rand(batch, heads, 2, 2, generator=torch.Generator().manual_seed(1)) < 0.6
    return BlockMask.from_blocks(blocks.to(device), BLOCK, seq_lengths=(100, 120))


def random_tokens(
    lengths: tuple[int, int], block_size: tuple[int, int], density: float, device: str
) -> BlockMask:
    tokens = torch.rand(1, 2, *lengths, generator=torch.Generator().manual_seed(5)) < density
    return BlockMask.from_dense(tokens.to(device), block_size)


def single_rows(device: str) -> Tensor:
    """(200, 100) pairs of tokens, all attended but by five queries."""
    dense = torch.ones(200, 100, dtype=torch.bool, device=device)
    dense[[0, 3, 64, 150, 199]] = False
    return dense


def worst_error(
    q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, mask: BlockMask, **options
) -> float:
    """The largest error over its bound: at most 1 within the contract."""
    results = run(q, k, v, grad_output, block_mask=mask, **options)
    oracle = compute_oracle(q, k, v, grad_output, mask=mask.to_dense(), scale=options.get("scale"))
    return max(contract_errors(oracle, results).values())


# A1, A4: skipping is correct, tiles are partial and ragged, masks have batch entries and heads of
# their own

# Sizes of the inputs (batch, heads, key heads, head dim), and the mask.
CASES: dict[str, tuple[tuple[int, int, int, int], Callable[[str], BlockMask]]] = {
    **{name: ((1, 1, 1, 32), partial(pattern, name)) for name in PATTERNS},
    "causal": (
        (1, 1, 1, 40),
        lambda device: BlockMask.causal(130, block_size=BLOCK, device=device),
    ),
    **{
        f"mask-{batch}x{heads}": ((2, 4, 2, 32), partial(random_blocks, batch, heads))
        for batch in (1, 2)
        for heads in (1, 4)
    },
    "density-.5": ((1, 2, 2, 64), partial(random_tokens, (130, 200), (64, 64), 0.5)),
    "density-.1": ((1, 2, 2, 64), partial(random_tokens, (130, 200), (64, 64), 0.1)),
    # Most rows have no key in the first tile that they meet, and some have none at all.
    "density-.01": ((1, 2, 2, 64), partial(random_tokens, (130, 200), (64, 64), 0.01)),
    "wide-tiles": ((1, 2, 2, 64), partial(random_tokens, (200, 150), (64, 128), 0.1)),
    "tall-tiles": ((1, 2, 2, 64), partial(random_tokens, (97, 300), (128, 64), 0.1)),
    # Of two keys plain attention may lose nothing to rounding: there would be no yardstick.
    "one-query": ((1, 2, 2, 64), partial(random_tokens, (1, 17), (64, 64), 0.5)),
    "one-key": ((1, 2, 2, 64), partial(random_tokens, (256, 1), (128, 128), 0.5)),
}


@pytest.mark.slow_if(device="cpu", dtype="float16")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*(("triton", dtype) for dtype in DTYPES), ("reference", "float32"), ("tiled", "float32")],
)
@pytest.mark.parametrize("case", CASES)
def test_masks(case, backend, dtype, device):
    skip_what_cannot_run(backend, dtype, device)
    (batch, heads, kv_heads, head_dim), make = CASES[case]
    mask = make(device)
    tensors = inputs(batch, heads, kv_heads, *mask.seq_lengths, head_dim, DTYPES[dtype], device)
    assert worst_error(*tensors, mask, backend=backend, enable_gqa=True) <= 1


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("spelling", "device", "dtype"),
    [  # 256x256 is larger than the mask's; tf32x3 is float32 in three products on tensor cores
        *((spelling, "cpu", "float32") for spelling in ("64x64", "32x128", "128x16", "256x256", "64x64_w8_s2_tf32x3")),
        *(
            pytest.param(spelling, "cuda", dtype, marks=pytest.mark.gpu)
            for spelling, dtype in (
                ("64x64", "bfloat16"), ("64x128", "bfloat16"), ("128x64", "bfloat16"), ("256x256", "bfloat16"),
                ("64x64_w8_s2_tf32x3", "float32"),
            )
        ),
    ],
)  # fmt: skip
def test_a_tile_of_the_mask_in_several_steps(spelling, device, dtype):
    """A mask of 128 x 128, its tiles of all three kinds, walked by smaller ones in every kernel."""
    config = tiles(spelling if "_" in spelling else f"{spelling}_w8_s2", "cpu")
    mask = BlockMask.sliding_window(300, window=280, block_size=128, device=device)
    assert mask.num_full and mask.num_partial and mask.num_dead
    tensors = inputs(1, 1, 1, 300, 300, 32, DTYPES[dtype], device)
    assert worst_error(*tensors, mask, backend="triton", config=config) <= 1


# A2: skipping really skips


@pytest.mark.parametrize("side", ["keys", "queries"])
def test_dead_tiles_are_never_read(side, device):
    """NaN in keys and values, or queries and output gradients, of dead tiles, to which the lists'
    unused ends point.
    """
    lists = ("kv_indices", "full_kv_indices") if side == "keys" else ("q_indices", "full_q_indices")
    mask = with_padding(pattern("row-and-column-dead", device), dict.fromkeys(lists, 1))
    q, k, v, grad_output = inputs(1, 2, 2, 256, 256, 32, torch.float32, device)
    clean = run(q, k, v, grad_output, backend="triton", block_mask=mask)
    for x in (k, v) if side == "keys" else (q, grad_output):
        x[:, :, 64:128] = math.nan
    dirty = run(q, k, v, grad_output, backend="triton", block_mask=mask)
    # the latter by the tiles that are NaN
    whole, cut = ("output", "lse", "grad_q"), ("grad_k", "grad_v")
    if side == "queries":
        whole, cut = cut, ("output",)
    assert_equal(dirty, {name: clean[name] for name in whole})
    for name in cut:
        rows = [*range(64), *range(128, 256)]
        assert torch.equal(dirty[name][:, :, rows], clean[name][:, :, rows]), name
        assert not dirty[name][:, :, 64:128].any(), f"{name} of what nothing attends must be zero"


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter multiplies")
@pytest.mark.parametrize("name", ["checkerboard", "row-and-column-dead"])
def test_a2_the_visited_tiles_are_those_of_the_lists(name, monkeypatch):
    """A visit multiplies twice in the forward, three times for dQ and four times for dK and dV."""
    from triton.runtime.interpreter import InterpreterBuilder

    products, create_dot = [], InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda *arguments: products.append(1) or create_dot(*arguments),
    )
    options = {"block_mask": pattern(name, "cpu"), "config": tiles("64x64_w4_s1", "cpu")}
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
    """The bug of block-sparse kernels that branch: a skipped tile does not move the pointers, so
    the n-th live tile reads the n-th tile. Planted by numbering the lists' entries; without it the
    same inputs pass.
    """
    q, k, v, grad_output = inputs(1, 1, 1, 256, 256, 32, torch.float32, "cpu")
    mask = pattern(name, "cpu")
    assert worst_error(q, k, v, grad_output, mask, backend="triton") <= 1
    for field, results in (
        ("full_kv_indices", ("output", "grad_q")),
        ("full_q_indices", ("grad_k", "grad_v")),
    ):
        shape = getattr(mask, field).shape
        planted = torch.arange(shape[-1], dtype=torch.int32).expand(shape).contiguous()
        wrong = replace(mask, lists=mask.lists._replace(**{field: planted}))
        found = run(q, k, v, grad_output, block_mask=wrong, backend="triton")
        errors = contract_errors(compute_oracle(q, k, v, grad_output, mask=mask.to_dense()), found)
        assert all(errors[name] > 1 for name in results), errors


# A3: rows without a key


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bottom-right", "all-dead", "single-rows"])
def test_rows_without_keys(kind, backend, device):
    if kind == "bottom-right":  # the first 100 queries come before the first key
        mask = BlockMask.causal(200, 100, bottom_right=True, block_size=BLOCK, device=device)
    elif kind == "all-dead":
        mask = BlockMask.from_blocks(
            torch.zeros(4, 2, dtype=torch.bool, device=device), BLOCK, seq_lengths=(200, 100)
        )
    else:
        mask = BlockMask.from_dense(single_rows(device), BLOCK)
    tensors = inputs(1, 2, 2, 200, 100, 32, torch.float32, device)
    results = all_of(mask, tensors, torch.ones(1, 2, 200, device=device), backend)
    empty = ~mask.to_dense()[0, 0].any(-1)
    assert empty.any() and mask.empty_rows == empty.sum()
    assert (
        not results["output"][:, :, empty].any()
        and (results["lse"][:, :, empty] == -math.inf).all()
    )
    assert not results["grad_q"][:, :, empty].any()
    exact = partial(attention_reference, mask=mask.to_dense(), return_lse=True)
    doubles = [x.double() for x in tensors]
    expected = all_results(
        exact, doubles[:3], doubles[3], torch.ones(1, 2, 200, dtype=torch.float64, device=device)
    )
    for name, result in results.items():
        torch.testing.assert_close(result.double(), expected[name], rtol=1e-4, atol=1e-5, msg=name)


def all_of(
    mask: BlockMask, tensors: tuple[Tensor, ...], grad_lse: Tensor, backend: str
) -> dict[str, Tensor]:
    attend = partial(flash_attention, block_mask=mask, return_lse=True, backend=backend)
    return all_results(attend, tensors[:3], tensors[3], grad_lse)


@pytest.mark.parametrize(
    ("backend", "result"), [*((backend, "lse") for backend in BACKENDS), ("tiled", "output")]
)
def test_a_nan_gradient_of_a_row_without_keys_goes_nowhere(result, backend, device):
    """`logaddexp` of two rows of -inf has a gradient of NaN; times P = 0 it became all of dK."""
    mask, empty = BlockMask.from_dense(single_rows(device), BLOCK), ~single_rows(device).any(-1)
    *tensors, grad_output = inputs(1, 2, 2, 200, 100, 32, torch.float32, device)
    results = []
    for dead in (math.nan, 1.0):
        upstream = {"output": grad_output.clone(), "lse": torch.ones(1, 2, 200, device=device)}
        upstream[result][:, :, empty] = dead
        results.append(all_of(mask, (*tensors, upstream["output"]), upstream["lse"], backend))
    assert all(results[1][name].isfinite().all() for name in ("grad_q", "grad_k", "grad_v"))
    assert_equal(*results)


def check(mask: BlockMask, expected: Tensor) -> None:
    """`mask` attends exactly `expected`, both directions of its lists say so, and its own counts
    are true.
    """
    dense = mask.to_dense()
    assert torch.equal(dense, expected.expand_as(dense)) and mask.shape == tuple(dense.shape)
    (rows, columns), (q_block, k_block) = (
        map(num_blocks, mask.seq_lengths, mask.block_size),
        mask.block_size,
    )
    # a tile that an end cuts is not full
    whole = dense.new_zeros(*dense.shape[:2], rows * q_block, columns * k_block)
    whole[:, :, : dense.shape[2], : dense.shape[3]] = dense
    tiles = whole.view(*dense.shape[:2], rows, q_block, columns, k_block).transpose(3, 4)
    full = tiles.all(-1).all(-1)
    partial = tiles.any(-1).any(-1) & ~full
    bits = unpack_tokens(mask.token_bits, k_block)
    for side, lines in (("kv", 2), ("q", 3)):  # by row, by column of tiles
        for prefix, kind in (("", partial), ("full_", full)):
            counts, indices = (
                getattr(mask, f"{prefix}{side}_{name}") for name in ("num_blocks", "indices")
            )
            listed, by_line = (
                torch.arange(indices.shape[3]) < counts[..., None],
                kind.transpose(2, lines),
            )
            assert torch.equal(counts, by_line.sum(-1).int())
            assert (
                torch.equal(indices[listed], by_line.nonzero()[:, 3].int())
                and not indices[~listed].any()
            )
            if kind is partial:
                tokens = getattr(mask, f"{side}_tokens")[listed].long()
                assert torch.equal(bits[tokens], tiles.transpose(2, lines)[by_line])
    assert (mask.num_full, mask.num_partial) == (full.sum(), partial.sum())
    assert mask.num_dead == full.numel() - mask.num_full - mask.num_partial
    assert mask.num_attended == dense.sum() and mask.empty_rows == (~dense.any(-1)).sum()
    # A10; one pair is both
    forms = {"full": torch.ones_like(dense), "causal": torch.ones_like(dense).tril()}
    exact = [form for form, tokens in forms.items() if dense.numel() and torch.equal(dense, tokens)]
    assert mask.dense_form in (exact or [None])


# A9: the mask of shared keys


@pytest.mark.parametrize(
    ("queries", "keys", "block"),
    [(64, 50, 16), (100, 37, 16), (150, 200, 64), (65, 30, 64), (1, 1, 16)],
)
def test_staircase_in_one_launch(queries, keys, block, device, monkeypatch):
    """Into memory that was anything, both ways; so does torch.compile's operator."""
    from cs336_systems.attention.triton.staircase import launch_staircase, opaque_staircase

    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(-9)
    )
    climbs = torch.rand(2, 2, queries, generator=torch.Generator().manual_seed(queries)) < 0.6
    lengths = climbs.cumsum(-1).clamp(max=keys).int()
    mask = launch_staircase(lengths.to(device), keys, block)
    assert all(map(torch.equal, opaque_staircase(lengths.to(device), keys, block), mask.lists))
    check(mask.to("cpu"), torch.arange(keys) < lengths[..., None])


@pytest.mark.gpu
def test_shared_keys_on_a_gpu_equal_their_token_mask():
    q, k, v, _ = inputs(1, 4, 2, 1000, 1000, 64, torch.bfloat16, "cuda")
    bias = torch.rand(1, 2, 1000, generator=torch.Generator().manual_seed(5)).cuda()
    positions, _ = choose_keys(bias, 200)
    output = shared_keys_attention(
        q, k, v, bias, 200, is_causal=True, enable_gqa=True, backend="triton"
    )
    kept = torch.zeros(1, 2, 1000, dtype=torch.bool, device="cuda").scatter(2, positions, True)
    dense = (
        kept.repeat_interleave(2, dim=1)[:, :, None]
        & torch.ones(1000, 1000, device="cuda").tril().bool()
    )
    exact = attention_reference(
        q.double(), *(x.double().repeat_interleave(2, dim=1) for x in (k, v)), mask=dense
    )
    assert (output - exact).norm() <= 0.01 * exact.norm()


# A8, K8: large


@pytest.mark.gpu
@pytest.mark.alone
def test_memory_stays_linear():
    """Built from blocks, no (queries, keys) tensor: forward and backward at S = 65536 peak at 12
    times q at most.
    """
    seqlen = 65536
    mask = BlockMask.random_blocks(seqlen, density=0.1, device="cuda")
    leaves = [
        x.requires_grad_() for x in inputs(1, 8, 8, seqlen, seqlen, 64, torch.bfloat16, "cuda")[:3]
    ]
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
    elif kind == "window":
        mask = BlockMask.sliding_window(2000, 2017, window=300, block_size=block, device="cuda")
    elif kind == "causal-blocks":
        blocks = (
            torch.rand(2048 // block, 2048 // block, generator=torch.Generator().manual_seed(2))
            < 0.3
        )
        mask = BlockMask.from_blocks(blocks.cuda(), block, is_causal=True)
    else:
        dense = torch.rand(1000, 1000, generator=torch.Generator().manual_seed(3)) < 0.1
        mask = BlockMask.from_dense(dense.cuda(), block)
    tensors = inputs(1, 4, 2, *mask.seq_lengths, head_dim, DTYPES[dtype], "cuda")
    assert worst_error(*tensors, mask, backend="triton", enable_gqa=True) <= 1


@pytest.mark.parametrize("block_size", [(512, 64), (1024, 128)])
@pytest.mark.parametrize("queries", [200, 600])
def test_a_tile_past_the_end_of_a_head_reads_no_other(queries, block_size, device):
    """L and delta are padded to 256 rows, and such a tile has more: they were the next head's, or
    anybody's memory.
    """
    mask = BlockMask.sliding_window(queries, window=40, block_size=block_size, device=device)
    q, k, v, grad_output = inputs(1, 2, 2, queries, queries, 32, torch.float32, device)
    clean = run(q, k, v, grad_output, backend="triton", block_mask=mask)
    grad_output[:, 1] = math.nan
    dirty = run(q, k, v, grad_output, backend="triton", block_mask=mask)
    for name, result in clean.items():
        assert torch.equal(dirty[name][:, 0], result[:, 0]), name
