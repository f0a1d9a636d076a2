"""Tiles read by Hopper's copy engine (TMA), which inputs it can read, and the order in which
programs run.

On CPU Triton's interpreter stands in for the engine; on CUDA the configurations with and without it
are compared.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.attention import BlockMask
from cs336_systems.attention.call import Saved
from cs336_systems.attention.contract import compute_oracle
from cs336_systems.attention.tiles.choice import Walks
from cs336_systems.attention.tiles.kernel_config import HALF_L2_SHARE_BYTES, L2_SHARE_BYTES
from cs336_systems.attention.triton import backward, forward, launch
from cs336_systems.attention.triton.backward import launch_preprocess
from cs336_systems.attention.triton.launch import describable, heads_together
from cs336_systems.attention.triton.passes import kernel_config
from cs336_systems.attention.triton.steps import ROW_PADDING, tile_of_program
from tests.covered import TRITON
from tests.test_attention_paths import laid_out
from tests.test_s4_attention import (
    DTYPES,
    assert_equal,
    assert_within,
    draw,
    inputs,
    run,
    skip_what_cannot_run,
    tiles,
)

COVERS = TRITON

SHAPES = {
    "S150-d64": (1, 2, 2, 150, 150, 64),
    "d40-more-queries": (2, 2, 2, 100, 70, 40),
    "d96-more-keys": (1, 1, 1, 70, 130, 96),
    "gqa": (1, 6, 2, 65, 129, 32),
    "one-query": (1, 2, 2, 1, 70, 64),
    "one-key": (1, 3, 3, 70, 1, 16),
}


def assert_tma_equals_pointers(tensors: tuple[Tensor, ...], tile: str, **options) -> None:
    """Both within the contract; in the interpreter, which does the same arithmetic on the same
    tiles, equal.
    """
    device = tensors[0].device.type
    mask = options["block_mask"].to_dense() if "block_mask" in options else None
    oracle = compute_oracle(*tensors, is_causal=options.get("is_causal", False), mask=mask)
    by_tma, by_pointers = (
        run(*tensors, backend="triton", enable_gqa=True, config=tiles(spelling, device), **options)
        for spelling in (f"{tile}_tma", tile)
    )
    assert_within(oracle, by_tma)
    assert_within(oracle, by_pointers)
    if device == "cpu":
        assert_equal(by_tma, by_pointers)


@pytest.mark.slow_if(device="cpu", is_causal=False)
@pytest.mark.slow_if(device="cpu", dtype="float32")  # interpreted: by TMA and by pointers
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dense(shape, dtype, is_causal, device):
    skip_what_cannot_run("triton", dtype, device)
    tile = "32x32_w4_s2" if dtype == "float32" else "64x64_w4_s2"
    assert_tma_equals_pointers(inputs(*shape, DTYPES[dtype], device), tile, is_causal=is_causal)


@pytest.mark.parametrize(
    "shape", [(1, 4, 2, 200, 150, 40), (2, 1, 1, 97, 130, 64)], ids=["gqa-d40", "batch-d64"]
)
def test_block_sparse(shape, device):
    dense = torch.rand(1, shape[1], *shape[3:5], generator=torch.Generator().manual_seed(5)) < 0.4
    dense[:, :, :64, 64:128] = False  # a dead tile
    dense[:, :, 64:128, :64] = True  # a full one
    mask = BlockMask.from_dense(dense.to(device), 64)
    assert_tma_equals_pointers(
        inputs(*shape, torch.float16, device), "64x64_w4_s2", block_mask=mask
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["64x128_w4_s2", "128x64_w4_s2", "128x64_w8_s3"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_tiles(head_dim, tile, is_causal):
    tensors = inputs(2, 4, 4, 1000, 1100, head_dim, torch.bfloat16, "cuda")
    assert_tma_equals_pointers(tensors, tile, is_causal=is_causal)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="TMA is sm_90's",
)
@pytest.mark.parametrize("layout", ["fused", "unaligned"])
def test_the_table_reads_by_tma_what_it_can(layout):
    tensors = laid_out(layout, 2, 3, 70, 64, torch.bfloat16, "cuda")
    q, k, v, _ = tensors
    assert kernel_config("forward", q, k, tma=describable(q, k, v)).tma == (layout == "fused")
    assert_within(compute_oracle(*tensors), run(*tensors, backend="triton"))


# Inputs that the engine reads


def test_describable():
    x = torch.zeros(2, 3, 70, 64, dtype=torch.float16)
    assert describable(x) and describable(x, x.transpose(0, 1), x.transpose(1, 2))
    for layout in ("fused", "offset", "transposed"):
        assert describable(*laid_out(layout, 2, 3, 70, 64, x.dtype, "cpu"))
    for layout in ("unaligned", "expanded", "head-dim-strided"):
        assert not any(map(describable, laid_out(layout, 2, 3, 70, 64, x.dtype, "cpu")))
    assert describable(x[:, :, 1:, 8:]), "a slice that begins 16 bytes into a row"
    assert not describable(x[..., 4:]), "8 bytes into a row"
    assert not describable(x, x[..., :59].contiguous()), "rows of 118 bytes"
    assert describable(x[..., :59]), "rows of 59 numbers, 128 bytes apart"
    assert not describable(torch.zeros(2, 3, 70, 66, dtype=x.dtype)[..., :64]), "rows of 132 bytes"
    assert not describable(x[:, :, :1].expand(-1, -1, 70, -1)), "stride 0 of rows alone"
    assert not describable(x[..., ::2])
    flat = torch.zeros(1 + 2 * 3 * 70 * 64, dtype=torch.float16)
    assert not describable(flat[1:].view(x.shape)), "the address is odd"
    # Strides of 20 bytes are fine in float32 and in no 16-bit dtype
    assert describable(torch.zeros(1, 1, 8, 20)) and not describable(
        torch.zeros(1, 1, 8, 20, dtype=torch.float16)
    )


def test_strides_of_dimensions_of_one_are_no_obstacle(device):
    """PyTorch leaves any number there."""
    contiguous = inputs(1, 1, 1, 16, 16, 64, torch.float16, device)
    odd = [x.as_strided(x.shape, (7, 13, 64, 1)) for x in contiguous]
    assert describable(*odd)
    options = {"backend": "triton", "config": tiles("64x64_w4_s2_tma", device)}
    assert_equal(run(*odd, **options), run(*contiguous, **options))


def test_a_gradient_that_no_copy_helps_takes_the_pointer_kernels(device):
    """q, k and v of head dim 59 cut from rows of 64 can be described, a contiguous gradient of 59
    cannot.
    """
    q, k, v = (
        draw(1, 1, 70, 64, dtype=torch.float16, device=device, seed=seed)[..., :59]
        for seed in range(3)
    )
    grad_output = draw(1, 1, 70, 59, dtype=torch.float16, device=device, seed=3)
    assert describable(q, k, v) and not describable(grad_output)
    assert_within(compute_oracle(q, k, v, grad_output), run(q, k, v, grad_output, backend="triton"))


# The order of programs


@triton.jit
def record_order_kernel(
    order_ptr, num_tiles, N_HEADS, HEADS_TOGETHER, LAST_TILE_FIRST: tl.constexpr
):
    tile, batch_head, batch, head = tile_of_program(
        num_tiles, N_HEADS, HEADS_TOGETHER, LAST_TILE_FIRST
    )
    row = order_ptr + tl.program_id(0) * 4
    tl.store(row, tile)
    tl.store(row + 1, batch_head.to(tl.int32))
    tl.store(row + 2, batch.to(tl.int32))
    tl.store(row + 3, head.to(tl.int32))


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("together", [1, 2, 4, 8, 16])
def test_each_program_has_a_tile_of_its_own(together, last_first, device):
    """2 x 5 heads: no number here but 1 and 2 divides them, and 16 is more than there are."""
    num_tiles, batches, heads = 3, 2, 5
    order = torch.full((num_tiles * batches * heads, 4), -1, dtype=torch.int32, device=device)
    record_order_kernel[(len(order),)](
        order, num_tiles, heads, together, LAST_TILE_FIRST=last_first
    )
    everything = [(head // heads, head % heads) for head in range(batches * heads)]
    expected = [
        [tile, batch * heads + head, batch, head]
        for start in range(0, len(everything), together)
        for tile in sorted(range(num_tiles), reverse=last_first)
        for batch, head in everything[start : start + together]
    ]
    assert order.tolist() == expected


def test_heads_together_fill_the_cache_share():
    def together(batch_heads: int, rows: int, group: int = 1) -> int:
        return heads_together(
            batch_heads, torch.empty(1, 1, rows, 64, dtype=torch.bfloat16, device="meta"), group
        )

    head_bytes = 2 * 1024 * 64 * 2  # K and V, or Q and dO, of 1024 rows
    fitting = L2_SHARE_BYTES // head_bytes
    assert together(10 * fitting, 1024) == fitting == 128
    assert together(10 * fitting, 1025) == fitting // 2  # one more row, and one head fewer fits
    assert together(10 * fitting, 1024, group=4) == fitting // 4  # each program reads four heads
    assert together(1, 1024) == 1 and together(2, 1024) == 2 and together(7, 1024) == 4
    assert together(64, 2**22) == 1  # not even one fits
    assert (
        heads_together(64, torch.empty(1024, 64, dtype=torch.bfloat16), share=L2_SHARE_BYTES // 4)
        == 32
    )


def test_more_causal_heads_than_fit_are_taken_where_the_call_ends_sooner(monkeypatch):
    """8 key heads of 8,192 tokens, of which the cache holds one: two were measured to be fastest."""
    q = torch.empty(1, 32, 8192, 128, dtype=torch.bfloat16, device="meta")
    options = {"walks": Walks(128, 128), "block_steps": 4}
    assert heads_together(8, q, 4, HALF_L2_SHARE_BYTES, **options) == 1  # no GPU to count
    monkeypatch.setattr(launch, "num_multiprocessors", lambda _: 132)
    assert heads_together(8, q, 4, HALF_L2_SHARE_BYTES) == 1
    assert heads_together(8, q, 4, HALF_L2_SHARE_BYTES, **options) == 2


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_heads_take_turns_where_tiles_differ_in_length(mask, monkeypatch):
    together = {}

    def record(kernel, grid, tensors, numbers, options):
        if "preprocess" not in kernel.fn.__name__:
            strides = [number for number in numbers if type(number) is tuple]
            together[kernel.fn.__name__] = numbers[len(strides) + 1]

    for module in (forward, backward):
        monkeypatch.setattr(module, "launch", record)
    q, rows = torch.randn(2, 6, 300, 64), torch.randn(2, 6, 300)
    configs = {f"{name}_config": kernel_config(name, q, q) for name in ("dkdv", "dq")}
    if mask == "window":
        lists = BlockMask.sliding_window(300, window=9, block_size=128).lists
    else:
        lists = None
    options = {"is_causal": mask == "causal", "scale": 1.0}
    forward.launch_forward(q, q, q, lists, **options, config=kernel_config("forward", q, q))
    backward.launch_backward(Saved(q, q, q, q, rows, q, None), lists, **options, **configs)
    # a power of two of the twelve
    assert len(together) == 3 and set(together.values()) == {1 if mask == "full" else 8}


# Rows of the backward


@pytest.mark.parametrize("num_queries", [1, 255, 256, 257])
def test_rows_past_the_end_give_no_probability(num_queries, device):
    output, grad_output = (
        draw(2, 3, num_queries, 40, dtype=torch.float16, device=device, seed=s) for s in range(2)
    )
    lse, grad_lse = (
        draw(2, 3, num_queries, dtype=torch.float32, device=device, seed=s) for s in (2, 3)
    )
    lse_log2, delta = launch_preprocess(output, lse, grad_output, grad_lse)
    padded = -(-num_queries // ROW_PADDING.value) * ROW_PADDING.value
    assert lse_log2.shape == delta.shape == (2, 3, padded)
    expected = (output.float() * grad_output.float()).sum(-1) - grad_lse
    torch.testing.assert_close(delta[..., :num_queries], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_log2[..., :num_queries], lse / math.log(2), rtol=1e-6, atol=1e-6)
    assert (lse_log2[..., num_queries:] == math.inf).all() and (delta[..., num_queries:] == 0).all()
    exact = launch_preprocess(output, lse, grad_output, grad_lse, padded=False)
    assert torch.equal(exact[0], lse_log2[..., :num_queries]) and torch.equal(
        exact[1], delta[..., :num_queries]
    )
