"""The forward that splits the keys of few queries, and query heads that share a tile."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import AttentionConfig, KernelConfig, flash_attention
from cs336_systems.attention.contract import compute_oracle
from cs336_systems.attention.tiles import part_size, select_config
from cs336_systems.attention.tiles.choice import MIN_KEY_TILES
from cs336_systems.attention.triton import passes as function
from cs336_systems.attention.triton import split
from cs336_systems.attention.triton.launch import rows_of_groups
from cs336_systems.attention.triton.passes import forward_name, kernel_config
from cs336_systems.attention.triton.split import launch_split_forward
from tests.covered import TRITON
from tests.test_attention_paths import LAYOUTS
from tests.test_s4_attention import (
    DTYPES,
    assert_contract,
    assert_within,
    draw,
    inputs,
    run,
    shipped_configs,
    skip_what_cannot_run,
    tiles,
)

COVERS = TRITON


def assert_split(
    tensors: tuple[Tensor, ...], is_causal: bool, spelling: str, *part_sizes: int
) -> None:
    q, k, v, _ = tensors
    config = tiles(spelling, q.device.type).forward
    oracle = compute_oracle(*tensors, is_causal=is_causal)
    attend = partial(
        launch_split_forward, q, k, v, is_causal=is_causal, scale=q.shape[-1] ** -0.5, config=config
    )
    for size in part_sizes:
        output, lse = attend(part_size=size)
        assert output.is_contiguous() and output.dtype == q.dtype and lse.dtype == torch.float32
        assert_within(oracle, {"output": output, "lse": lse})


# Kernels

SHAPES = {
    "S200-d64": (1, 1, 1, 200, 200, 64),
    "d40-more-queries": (2, 2, 1, 70, 130, 40),
    "d96-more-keys": (1, 1, 1, 70, 290, 96),
    "gqa": (1, 2, 1, 65, 257, 32),
    "one-query": (2, 2, 2, 1, 300, 64),
    "grouped": (2, 6, 2, 5, 300, 64),
    "one-key": (1, 2, 2, 70, 1, 16),
    "d256": (1, 1, 1, 40, 150, 256),
}


@pytest.mark.slow_if(device="cpu", is_causal=False)
@pytest.mark.slow_if(device="cpu", dtype="float32")  # interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_contract(shape, dtype, is_causal, device):
    """Whole parts, a ragged last one, and on a GPU all keys in one."""
    skip_what_cannot_run("triton", dtype, device)
    spelling = (
        "32x32_w4_s1" if dtype == "float32" else "64x64_w4_s2" if shape[-1] < 256 else "64x64_w8_s1"
    )
    part_sizes = (64, 192, 320) if device == "cuda" else (64,)
    assert_split(inputs(*shape, DTYPES[dtype], device), is_causal, spelling, *part_sizes)


def test_any_strides(device):
    tensors = tuple(map(LAYOUTS["transposed"], inputs(2, 2, 1, 70, 130, 64, torch.float16, device)))
    assert_split(tensors, True, "64x64_w4_s1", 64)


def test_many_parts_and_scores_of_1e4(is_causal, device):
    """A part's maximum may be anywhere, and its log-sum-exp is too coarse for weights."""
    q, k, v, grad = inputs(1, 1, 1, 16, 33 * 32, 16, torch.float32, device)
    assert_split((50 * q, 50 * k, v, grad), is_causal, "32x32_w4_s1", 32)


@pytest.mark.parametrize("single_rows", [0, 2**31], ids=["together", "alone"])
def test_rows_are_merged_alone_and_together(single_rows, is_causal, device, monkeypatch):
    """Which of the two is taken depends on how many rows there are."""
    monkeypatch.setattr(split, "SINGLE_ROWS", single_rows)
    assert split.merge_options(3 * 35, 10, 24)["ROWS"] == (1 if single_rows else split.MERGED_ROWS)
    assert_split(inputs(1, 3, 1, 35, 300, 24, torch.float32, device), is_causal, "32x32_w4_s1", 32)


@pytest.mark.parametrize("spelling", [None, "32x32_w4_s1"], ids=["table", "named"])
def test_the_operator_with_its_gradients(spelling, is_causal, device, monkeypatch):
    """As on a GPU with 132 multiprocessors, wherever it runs; parts are whole tiles of the
    configuration that runs.
    """
    asked = []

    def launch(*tensors, part_size: int, config: KernelConfig, **options):
        asked.append((config, part_size))
        return launch_split_forward(*tensors, part_size=part_size, config=config, **options)

    monkeypatch.setattr(function, "launch_split_forward", launch)
    monkeypatch.setattr(function, "num_multiprocessors", lambda device: 132)
    tensors = inputs(
        *((1, 1, 1, 400, 400) if is_causal else (1, 4, 2, 40, 600)), 64, torch.float32, device
    )
    config = AttentionConfig(forward=tiles(spelling, device).forward) if spelling else None
    assert_contract(*tensors, is_causal=is_causal, backend="triton", enable_gqa=True, config=config)
    ((used, size),) = asked
    assert (
        0 < size < tensors[1].shape[2]
        and size % used.key_tile == 0
        and (config is None or used == config.forward)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shipped_tiles_on_a_gpu(head_dim, is_causal):
    """Every configuration of the table."""
    for dtype in (torch.bfloat16, torch.float32):
        tensors = inputs(1, 2, 1, 1100, 1300, head_dim, dtype, "cuda")
        for spelling in {
            configs.forward.spelling for configs in shipped_configs(head_dim, dtype, "cuda")
        }:
            assert_split(tensors, is_causal, spelling, 128, 384, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 4096, 4096, 128), (2, 32, 8, 1, 8192, 128)], ids=["one-head", "decode"]
)
def test_200_repeats_are_bit_equal(shape):
    is_causal = shape[3] == shape[4]
    tensors = inputs(*shape, torch.bfloat16, "cuda")
    rows, k = rows_of_groups(tensors[0], tensors[1], is_causal), tensors[1]
    chosen = kernel_config("forward", rows, k, is_causal=is_causal)
    assert "/" in forward_name(chosen, rows, k, is_causal)
    options = {"is_causal": is_causal, "backend": "triton", "enable_gqa": True}
    assert_contract(*tensors, **options)
    first = run(*tensors, **options)
    for _ in range(200):
        results = flash_attention(*tensors[:3], **options, return_lse=True)
        assert torch.equal(results[0], first["output"]) and torch.equal(results[1], first["lse"])


# Query heads in one tile


def test_heads_of_a_group_are_rows_of_one_tile():
    """Where a view of q has such rows, they fit one tile, and no causal mask tells queries apart."""
    q, k, *_ = inputs(2, 6, 2, 5, 40, 16, torch.float32, "cpu")
    one_token, packed = q[:, :, 3:4], LAYOUTS["transposed"](q[:, :, :1])
    for queries in (q, one_token, packed):
        rows = rows_of_groups(queries, k, False)
        assert (
            torch.equal(rows, queries.reshape(2, 2, -1, 16))
            and rows.data_ptr() == queries.data_ptr()
        )
    more_than_a_tile = draw(2, 6, 22, 16, dtype=torch.float32, device="cpu", seed=0)
    for queries, keys, is_causal in (
        (q, k, True), (q, q, False), (more_than_a_tile, k, False), (q[:, :, :4], k, False)
    ):  # fmt: skip
        assert rows_of_groups(queries, keys, is_causal) is queries


@pytest.mark.parametrize("layout", ["heads first", "tokens first", "one token of many"])
def test_grouped_heads_attend_like_heads(layout, device):
    q, k, v, grad = inputs(2, 6, 2, 8, 90, 64, torch.float32, device)
    if layout == "tokens first":
        q = LAYOUTS["transposed"](q[:, :, :1])
    elif layout == "one token of many":
        q = q[:, :, 5:6]
    grad = grad[:, :, : q.shape[2]].contiguous()
    assert rows_of_groups(q, k, False) is not q
    assert_contract(q, k, v, grad, backend="triton", enable_gqa=True)


# How many parts


def parts(
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    head_dim: int,
    is_causal: bool,
    dtype: str = "bfloat16",
) -> int:
    config = select_config(
        "forward", capability=(9, 0), head_dim=head_dim, batch=1, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        dtype=dtype, is_causal=is_causal, tma=dtype != "float32",
    )  # fmt: skip
    size = part_size(
        config, head_dim=head_dim, bytes_per_element=4 if dtype == "float32" else 2, batch_heads=heads,
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, num_multiprocessors=132,
    )  # fmt: skip
    if size == 0:
        return 1
    assert size % config.key_tile == 0 and size >= MIN_KEY_TILES * config.key_tile
    return -(-min(seqlen_k, seqlen_q if is_causal else seqlen_k) // size)


def test_parts_fill_the_gpu_and_no_more():
    for head_dim, dtype, is_causal in itertools.product(
        (64, 128), ("bfloat16", "float32"), (False, True)
    ):
        assert parts(2048, 2048, 1, head_dim, is_causal, dtype) >= 4
        assert parts(8192, 8192, 64, head_dim, is_causal, dtype) == 1
        assert parts(128, 128, 1, head_dim, is_causal, dtype) == 1
        # Keys behind all causal queries would be memory that nobody writes, and leave the others in
        # parts too large.
        assert parts(1024, 131072, 1, head_dim, True) == parts(1024, 1024, 1, head_dim, True) > 1
        assert parts(64, 131072, 1, head_dim, True) == 1
    assert parts(1, 131072, 1, 128, False) >= 32
    assert parts(1, 8192, 1024, 128, False) == 1
    assert parts(16384, 16384, 1, 64, True) == 2, (
        "the last causal tile walks alone what all others share"
    )
