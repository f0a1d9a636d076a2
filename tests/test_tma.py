"""Tiles read by Hopper's copy engine (TMA), which inputs it can read, and the order in which programs run.

On CPU Triton's interpreter stands in for the engine; on CUDA the configurations with and without it are compared.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.attention import AttentionConfig, BlockMask, KernelConfig, flash_attention, flash_attention_varlen
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.tiles.config import KERNELS, L2_SHARE_BYTES
from cs336_systems.attention.triton.backward import launch_preprocess
from cs336_systems.attention.triton.function import kernel_config
from cs336_systems.attention.triton.operands import describable
from cs336_systems.attention.triton.steps import ROW_PADDING, heads_together, tile_of_program
from tests.covered import ATTENTION
from tests.test_s4_attention import DEVICES, DTYPES, draw, inputs, run, skip_what_cannot_run

COVERS = ATTENTION

BLOCK = 64


def tiles(spelling: str, device: str) -> AttentionConfig:
    target = "sm90" if device == "cuda" else "portable"
    return AttentionConfig(**{kernel: KernelConfig.from_name(f"{target}_{kernel}_{spelling}") for kernel in KERNELS})


def assert_tma_equals_pointers(tensors: tuple[Tensor, ...], oracle, tile: str = "64x64_w4_s2", **options) -> None:
    """Both within the contract; in the interpreter, which does the same arithmetic on the same tiles, equal."""
    device = tensors[0].device.type
    options["enable_gqa"] = tensors[0].shape[1] != tensors[1].shape[1]
    by_tma, by_pointers = (
        run(*tensors, backend="triton", config=tiles(spelling, device), **options) for spelling in (f"{tile}_tma", tile)
    )
    for results in (by_tma, by_pointers):
        errors = contract_errors(oracle, results)
        assert max(errors.values()) <= 1, errors
    if device == "cpu":
        for name, result in by_tma.items():
            assert torch.equal(result, by_pointers[name]), name


# Kernels

SHAPES = {
    "S150-d64": (1, 2, 2, 150, 150, 64),
    "d40-more-queries": (2, 2, 2, 100, 70, 40),
    "d96-more-keys": (1, 1, 1, 70, 130, 96),
    "gqa": (1, 6, 2, 65, 129, 32),
    "one-query": (1, 2, 2, 1, 70, 64),
    "one-key": (1, 3, 3, 70, 1, 16),
}


@pytest.mark.slow_if(device="cpu", is_causal=False)
@pytest.mark.slow_if(device="cpu", dtype="float32")  # interpreted: by TMA and by pointers
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dense(shape, dtype, is_causal, device):
    skip_what_cannot_run("triton", dtype, device)
    tensors = inputs(*shape, DTYPES[dtype], device)
    tile = "32x32_w4_s2" if dtype == "float32" else "64x64_w4_s2"
    assert_tma_equals_pointers(tensors, compute_oracle(*tensors, is_causal=is_causal), tile, is_causal=is_causal)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 4, 2, 200, 150, 40), (2, 1, 1, 97, 130, 64)], ids=["gqa-d40", "batch-d64"])
def test_block_sparse(shape, device):
    tensors = inputs(*shape, torch.float16, device)
    generator = torch.Generator().manual_seed(5)
    dense = torch.rand(1, shape[1], *shape[3:5], generator=generator).to(device) < 0.4
    dense[:, :, :BLOCK, BLOCK : 2 * BLOCK] = False  # a dead tile
    dense[:, :, BLOCK : 2 * BLOCK, :BLOCK] = True  # a full one
    oracle = compute_oracle(*tensors, mask=dense)
    assert_tma_equals_pointers(tensors, oracle, block_mask=BlockMask.from_dense(dense, BLOCK))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("tile", ["64x128_w4_s2", "128x64_w4_s2", "128x64_w8_s3"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_tiles(head_dim, tile, is_causal):
    tensors = inputs(2, 4, 4, 1000, 1100, head_dim, torch.bfloat16, "cuda")
    assert_tma_equals_pointers(tensors, compute_oracle(*tensors, is_causal=is_causal), tile, is_causal=is_causal)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="TMA is sm_90's"
)
@pytest.mark.parametrize("layout", ["fused", "unaligned"])
def test_the_table_reads_by_tma_what_it_can(layout):
    q, k, v = views(layout, torch.bfloat16, "cuda")
    grad_output = draw(*q.shape, dtype=q.dtype, device="cuda", seed=3)
    assert kernel_config("forward", q, k, tma=describable(q, k, v)).tma == (layout == "fused")
    errors = contract_errors(compute_oracle(q, k, v, grad_output), run(q, k, v, grad_output, backend="triton"))
    assert max(errors.values()) <= 1, errors


# Inputs that the engine reads


def views(layout: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of shape (2, 3, 70, 64), cut out of one tensor (2, 70, 3, 3, 64)."""
    offset = layout == "unaligned"
    fused = draw(2, 70, 3, 3, 64 + 2 * offset, dtype=dtype, device=device, seed=0)[..., :64]
    q, k, v = fused.unbind(2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def test_describable():
    x = torch.zeros(2, 3, 70, 64, dtype=torch.float16)
    assert describable(x) and describable(x, x.transpose(0, 1), x.transpose(1, 2))
    assert describable(*views("fused", torch.float16, "cpu"))
    assert not describable(*views("unaligned", torch.float16, "cpu"))
    assert describable(x[:, :, 1:, 8:]), "a slice that begins 16 bytes into a row"
    assert not describable(x[..., 4:]), "8 bytes into a row"
    assert not describable(x, x[..., :59].contiguous()), "rows of 118 bytes"
    assert describable(x[..., :59]), "rows of 59 numbers, 128 bytes apart"
    assert not describable(x.transpose(2, 3)), "head_dim is not the last in memory"
    assert not describable(x[..., ::2])
    assert not describable(x[:, :1].expand(-1, 3, -1, -1)), "stride 0"
    assert not describable(x[:, :, :1].expand(-1, -1, 70, -1))
    assert not describable(torch.zeros(1, 1, 1, 1, dtype=x.dtype).expand(x.shape))
    flat = torch.zeros(1 + 2 * 3 * 70 * 64, dtype=torch.float16)
    assert not describable(flat[1:].view(x.shape)), "the address is odd"
    # Strides of 20 bytes are fine in float32 and in no 16-bit dtype
    assert describable(torch.zeros(1, 1, 8, 20)) and not describable(torch.zeros(1, 1, 8, 20, dtype=torch.float16))


@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_dimensions_of_one_are_no_obstacle(device):
    """PyTorch leaves any number there."""
    odd = [
        torch.as_strided(draw(16 * 64, dtype=torch.float16, device=device, seed=seed), (1, 1, 16, 64), (7, 13, 64, 1))
        for seed in range(3)
    ]
    assert describable(*odd)
    output = flash_attention(*odd, backend="triton", config=tiles("64x64_w4_s2_tma", device))
    contiguous = [x.clone(memory_format=torch.contiguous_format) for x in odd]
    expected = flash_attention(*contiguous, backend="triton", config=tiles("64x64_w4_s2_tma", device))
    assert torch.equal(output, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_fused_projections_are_read_in_place(device):
    q, k, v = views("fused", torch.float16, device)
    grad_output = draw(2, 3, 70, 64, dtype=q.dtype, device=device, seed=3)
    assert_tma_equals_pointers((q, k, v, grad_output), compute_oracle(q, k, v, grad_output))


@pytest.mark.parametrize("device", DEVICES)
def test_tma_asked_for_by_name_is_refused_where_it_cannot_read(device):
    """Of packed documents the forward's q is read by pointers alone."""
    options = {"backend": "triton", "config": tiles("64x64_w4_s2_tma", device)}
    message = r"_tma reads tiles by TMA, which needs {} with contiguous rows at multiples of 16 bytes, got"
    for operand in "qkv":
        tensors = dict(zip("qkv", views("fused", torch.float16, device)))
        tensors[operand] = torch.zeros(2, 3, 70, 66, dtype=torch.float16, device=device)[..., :64]
        with pytest.raises(ValueError, match=message.format(operand)):
            flash_attention(**tensors, **options)
    q, k, v, _ = inputs(1, 1, 1, 20, 20, 59, torch.float16, device)
    with pytest.raises(ValueError, match=r"needs q .* got strides \(1180, 1180, 59, 1\) of 2 bytes"):
        flash_attention(q, k, v, **options)
    ends = torch.tensor([0, 20], dtype=torch.int32, device=device)
    for operand in "kv":
        rows = {name: torch.zeros(20, 1, 64, dtype=torch.float16, device=device) for name in "qkv"}
        rows |= {name: torch.zeros(20, 1, 66, dtype=torch.float16, device=device)[..., :64] for name in ("q", operand)}
        with pytest.raises(ValueError, match=message.format(operand)):
            flash_attention_varlen(*rows.values(), ends, ends, 20, 20, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("upstream", ["expanded", "misaligned"])
def test_a_gradient_that_tma_cannot_read_is_copied(upstream, device):
    """`output.sum().backward()` sends a stride of 0."""
    q, k, v, grad_output = inputs(1, 2, 1, 100, 70, 64, torch.float16, device)
    if upstream == "expanded":
        grad_output = torch.ones_like(grad_output[:, :1, :1, :1]).expand(q.shape)
    else:
        buffer = grad_output.new_zeros(grad_output.numel() + 1)
        grad_output = buffer[1:].view(q.shape).copy_(grad_output)
    assert not describable(grad_output)
    copied = grad_output.clone(memory_format=torch.contiguous_format)
    options = {"backend": "triton", "enable_gqa": True, "config": tiles("64x64_w4_s2_tma", device)}
    for name, result in run(q, k, v, grad_output, **options).items():
        assert torch.equal(result, run(q, k, v, copied, **options)[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_no_copy_helps_takes_the_pointer_kernels(device):
    """q, k and v of head dim 59 cut from rows of 64 can be described, a contiguous gradient of 59 cannot."""
    q, k, v = (draw(1, 1, 70, 64, dtype=torch.float16, device=device, seed=seed)[..., :59] for seed in range(3))
    grad_output = draw(1, 1, 70, 59, dtype=torch.float16, device=device, seed=3)
    assert describable(q, k, v) and not describable(grad_output)
    errors = contract_errors(compute_oracle(q, k, v, grad_output), run(q, k, v, grad_output, backend="triton"))
    assert max(errors.values()) <= 1, errors


# The order of programs


@triton.jit
def record_order_kernel(order_ptr, num_tiles, N_HEADS, HEADS_TOGETHER, LAST_TILE_FIRST: tl.constexpr):
    tile, batch_head, batch, head = tile_of_program(num_tiles, N_HEADS, HEADS_TOGETHER, LAST_TILE_FIRST)
    row = order_ptr + tl.program_id(0) * 4
    tl.store(row, tile)
    tl.store(row + 1, batch_head.to(tl.int32))
    tl.store(row + 2, batch.to(tl.int32))
    tl.store(row + 3, head.to(tl.int32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("together", [1, 2, 4, 8, 16])
def test_each_program_has_a_tile_of_its_own(together, last_first, device):
    """2 x 5 heads: no number here but 1 and 2 divides them, and 16 is more than there are."""
    num_tiles, batches, heads = 3, 2, 5
    order = torch.full((num_tiles * batches * heads, 4), -1, dtype=torch.int32, device=device)
    record_order_kernel[(len(order),)](order, num_tiles, heads, together, LAST_TILE_FIRST=last_first)
    visited = [tuple(row) for row in order.tolist()]
    everything = {(t, b * heads + h, b, h) for t in range(num_tiles) for b in range(batches) for h in range(heads)}
    assert len(visited) == len(everything) and set(visited) == everything
    for start in range(0, len(visited), together * num_tiles):
        group = visited[start : start + together * num_tiles]
        assert len({batch_head for _, batch_head, _, _ in group}) <= together
        steps = [tile for tile, *_ in group]
        assert steps == sorted(steps, reverse=last_first)


def test_heads_together_fill_the_cache_share():
    def together(batch_heads: int, rows: int, group: int = 1) -> int:
        return heads_together(batch_heads, torch.empty(1, 1, rows, 64, dtype=torch.bfloat16, device="meta"), group)

    head_bytes = 2 * 1024 * 64 * 2  # K and V, or Q and dO, of 1024 rows
    fitting = L2_SHARE_BYTES // head_bytes
    assert together(10 * fitting, 1024) == fitting == 128
    assert together(10 * fitting, 1025) == fitting // 2  # one more row, and one head fewer fits
    assert together(10 * fitting, 1024, group=4) == fitting // 4  # each program reads four heads
    assert together(1, 1024) == 1 and together(2, 1024) == 2 and together(7, 1024) == 4
    assert together(64, 2**22) == 1  # not even one fits


# Rows of the backward


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_queries", [1, 255, 256, 257])
def test_rows_past_the_end_give_no_probability(num_queries, device):
    output, grad_output = (draw(2, 3, num_queries, 40, dtype=torch.float16, device=device, seed=s) for s in range(2))
    lse, grad_lse = (draw(2, 3, num_queries, dtype=torch.float32, device=device, seed=s) for s in (2, 3))
    lse_log2, delta = launch_preprocess(output, lse, grad_output, grad_lse)
    padded = -(-num_queries // ROW_PADDING.value) * ROW_PADDING.value
    assert lse_log2.shape == delta.shape == (2, 3, padded)
    expected = (output.float() * grad_output.float()).sum(-1) - grad_lse
    torch.testing.assert_close(delta[..., :num_queries], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_log2[..., :num_queries], lse / math.log(2), rtol=1e-6, atol=1e-6)
    assert (lse_log2[..., num_queries:] == math.inf).all() and (delta[..., num_queries:] == 0).all()
    exact = launch_preprocess(output, lse, grad_output, grad_lse, padded=False)
    assert torch.equal(exact[0], lse_log2[..., :num_queries]) and torch.equal(exact[1], delta[..., :num_queries])
