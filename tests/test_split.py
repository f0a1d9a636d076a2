"""The forward that splits the keys of few queries, and query heads that share a tile."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import AttentionConfig, KernelConfig, attention_reference, flash_attention
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.tiles import part_size, select_config
from cs336_systems.attention.tiles.parts import MIN_KEY_TILES
from cs336_systems.attention.triton import function, split
from cs336_systems.attention.triton.function import forward_name, kernel_config
from cs336_systems.attention.triton.launch import launch
from cs336_systems.attention.triton.operands import rows_of_groups
from cs336_systems.attention.triton.split import launch_split_forward
from tests.covered import ATTENTION
from tests.test_s4_attention import (
    DEVICES,
    DTYPES,
    assert_contract,
    draw,
    inputs,
    run,
    shipped_configs,
    skip_what_cannot_run,
)

COVERS = ATTENTION

H200 = {"num_multiprocessors": 132}


def tiles(device: str, spelling: str) -> KernelConfig:
    return KernelConfig.from_name(f"{'sm90' if device == 'cuda' else 'portable'}_forward_{spelling}")


def errors_of(forward, tensors: tuple[Tensor, ...], is_causal: bool, **options) -> float:
    q, k, v, _ = tensors
    output, lse = forward(q, k, v, is_causal=is_causal, scale=q.shape[-1] ** -0.5, **options)
    assert output.shape == q.shape and output.is_contiguous() and output.dtype == q.dtype
    assert lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    oracle = compute_oracle(*tensors, is_causal=is_causal)
    return max(contract_errors(oracle, {"output": output, "lse": lse}).values())


@pytest.fixture
def large_gpu(monkeypatch):
    """Triton's operators split keys as on a GPU with 132 multiprocessors, wherever they run."""
    monkeypatch.setattr(function, "num_multiprocessors", lambda device: 132)


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
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_contract(shape, dtype, is_causal, device):
    """Whole parts, a ragged last one, and on a GPU all keys in one."""
    skip_what_cannot_run("triton", dtype, device)
    tensors = inputs(*shape, DTYPES[dtype], device)
    config = tiles(device, "32x32_w4_s1" if dtype == "float32" else "64x64_w4_s2" if shape[-1] < 256 else "64x64_w8_s1")
    for size in (64, 192, 320) if device == "cuda" else (64,):
        assert errors_of(launch_split_forward, tensors, is_causal, config=config, part_size=size) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device):
    contiguous = inputs(2, 2, 1, 70, 130, 64, torch.float16, device)
    tensors = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in contiguous)
    assert not tensors[0].is_contiguous()
    options = {"config": tiles(device, "64x64_w4_s1"), "part_size": 64}
    assert errors_of(launch_split_forward, tensors, True, **options) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_many_parts_and_scores_of_1e4(device):
    """A part's maximum may be anywhere, and its log-sum-exp is too coarse for weights."""
    q, k, v, grad = inputs(1, 1, 1, 16, 33 * 32, 16, torch.float32, device)
    tensors = (50 * q, 50 * k, v, grad)
    for is_causal in (False, True):
        options = {"config": tiles(device, "32x32_w4_s1"), "part_size": 32}
        assert errors_of(launch_split_forward, tensors, is_causal, **options) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_rows_are_merged_alone_and_together(is_causal, device, monkeypatch):
    """Which of the two is taken depends on how many rows there are."""
    tensors = inputs(1, 3, 1, 35, 300, 24, torch.float32, device)
    launched = []
    noting = lambda kernel, grid, *rest: launched.append((grid, rest[-1])) or launch(kernel, grid, *rest)  # noqa: E731
    monkeypatch.setattr(split, "launch", noting)
    for single_rows, grid in ((3 * 35, 3 * 35), (3 * 35 - 1, 3 * 18)):
        monkeypatch.setattr(split, "SINGLE_ROWS", single_rows)
        options = {"config": tiles(device, "32x32_w4_s1"), "part_size": 32}
        assert errors_of(launch_split_forward, tensors, is_causal, **options) <= 1
        assert launched[-1][0] == (grid,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_operator_with_its_gradients(is_causal, device, large_gpu):
    tensors = inputs(*((1, 1, 1, 400, 400) if is_causal else (1, 4, 2, 40, 600)), 64, torch.float32, device)
    q, k = tensors[:2]
    chosen = kernel_config("forward", q, k, is_causal=is_causal)
    assert forward_name(chosen, q, k, is_causal) != chosen.name
    assert_contract(*tensors, is_causal=is_causal, backend="triton", enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shipped_tiles_on_a_gpu(head_dim, is_causal):
    """Every configuration of the table."""
    for dtype in (torch.bfloat16, torch.float32):
        tensors = inputs(1, 2, 1, 1100, 1300, head_dim, dtype, "cuda")
        for config in {configs.forward for configs in shipped_configs(head_dim, dtype, "cuda")}:
            for size in (128, 384, 1024):
                options = {"config": config, "part_size": size}
                assert errors_of(launch_split_forward, tensors, is_causal, **options) <= 1, (config, size)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1, 1, 4096, 4096, 128), (2, 32, 8, 1, 8192, 128)], ids=["one-head", "decode"])
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


def test_heads_of_a_group_are_rows_of_one():
    q, k, *_ = inputs(2, 6, 2, 5, 40, 16, torch.float32, "cpu")
    rows = rows_of_groups(q, k, False)
    assert rows.shape == (2, 2, 15, 16) and rows.data_ptr() == q.data_ptr()
    assert torch.equal(rows, q.reshape(2, 2, 15, 16))
    one = q[:, :, 3:4]  # a generated token: heads are apart
    assert torch.equal(rows_of_groups(one, k, False), one.reshape(2, 2, 3, 16))
    assert rows_of_groups(one, k, False).data_ptr() == one.data_ptr()
    packed = draw(2, 1, 6, 16, dtype=torch.float32, device="cpu", seed=0).transpose(1, 2)  # (batch, seq, heads, d)
    assert torch.equal(rows_of_groups(packed, k, False), packed.reshape(2, 2, 3, 16))


def test_other_queries_stay_as_they_are():
    q, k, *_ = inputs(2, 6, 2, 5, 40, 16, torch.float32, "cpu")
    assert rows_of_groups(q, k, True) is q, "a causal mask is by query"
    assert rows_of_groups(q, q, False) is q, "no groups"
    many = draw(2, 6, 22, 16, dtype=torch.float32, device="cpu", seed=0)
    assert rows_of_groups(many, k, False) is many, "more than a tile"
    apart = q[:, :, :4]
    assert rows_of_groups(apart, k, False) is apart, "no view has such rows"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "one token of many"])
def test_grouped_heads_attend_like_heads(layout, device):
    q, k, v, grad = inputs(2, 6, 2, 8, 90, 64, torch.float32, device)
    if layout == "tokens first":
        q = q[:, :, :1].transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "one token of many":
        q = q[:, :, 5:6]
    grad = grad[:, :, : q.shape[2]].contiguous()
    assert rows_of_groups(q, k, False) is not q
    assert_contract(q, k, v, grad, backend="triton", enable_gqa=True)


# How many parts


def parts(seqlen_q: int, seqlen_k: int, heads: int, head_dim: int, is_causal: bool, dtype: str = "bfloat16") -> int:
    config = select_config(
        "forward", capability=(9, 0), head_dim=head_dim, batch=1, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        dtype=dtype, is_causal=is_causal, tma=dtype != "float32",
    )  # fmt: skip
    size = part_size(
        config, head_dim=head_dim, bytes_per_element=4 if dtype == "float32" else 2, batch_heads=heads,
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, **H200,
    )  # fmt: skip
    if size == 0:
        return 1
    assert size % config.key_tile == 0 and size >= MIN_KEY_TILES * config.key_tile
    return -(-min(seqlen_k, seqlen_q if is_causal else seqlen_k) // size)


def test_parts_fill_the_gpu_and_no_more():
    for head_dim, dtype, is_causal in itertools.product((64, 128), ("bfloat16", "float32"), (False, True)):
        assert parts(2048, 2048, 1, head_dim, is_causal, dtype) >= 4
        assert parts(8192, 8192, 64, head_dim, is_causal, dtype) == 1
        assert parts(128, 128, 1, head_dim, is_causal, dtype) == 1
    assert parts(1, 131072, 1, 128, False) >= 32
    assert parts(1, 8192, 1024, 128, False) == 1
    assert parts(16384, 16384, 1, 64, True) == 2, "the last causal tile walks alone what all others share"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_behind_all_causal_queries_are_no_parts(head_dim):
    """They would be memory that nobody writes, and leave the others in parts too large."""
    assert parts(1024, 131072, 1, head_dim, True) == parts(1024, 1024, 1, head_dim, True) > 1
    assert parts(64, 131072, 1, head_dim, True) == 1


def test_a_caller_s_tiles_are_split_too(large_gpu, monkeypatch):
    """Parts are whole tiles of the configuration that runs."""
    asked = []

    def launch(*tensors, part_size: int, config: KernelConfig, **options):
        asked.append((config, part_size))
        return launch_split_forward(*tensors, part_size=part_size, config=config, **options)

    monkeypatch.setattr(function, "launch_split_forward", launch)
    q, k, v, _ = inputs(1, 1, 1, 20, 1000, 64, torch.float32, "cpu")
    config = tiles("cpu", "32x32_w4_s1")
    output = flash_attention(q, k, v, backend="triton", config=AttentionConfig(forward=config))
    ((used, size),) = asked
    assert used == config and size < 1000 and size % 32 == 0
    torch.testing.assert_close(output, attention_reference(q, k, v))
