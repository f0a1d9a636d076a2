"""Calls of attention as other code makes them: other keywords, modes, exports, copies and files of
masks.
"""

from __future__ import annotations

import copy
import dataclasses
import io

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.accounting import ATTENTION_FLOPS_PER_PAIR, causal_area
from cs336_systems.attention import (
    FlashAttentionPyTorch,
    api,
    flash_attention,
    flash_attention_varlen,
)
from cs336_systems.attention.api import attention_backward
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.dilated import dilated_attention
from cs336_systems.attention.dynamic import shared_keys_attention
from cs336_systems.attention.masks import BlockMask


def inputs(*shape: int, requires_grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for _ in range(3)]


def test_replaced_lists_lose_the_dense_form() -> None:
    """The dense form was a field, which `replace` kept beside other lists: they were ignored."""
    causal = BlockMask.causal(128, block_size=64)
    window = BlockMask.sliding_window(128, window=9, block_size=64)
    mask = dataclasses.replace(causal, lists=window.lists)
    assert causal.dense_form == "causal" and mask.dense_form is None
    q, k, v = inputs(1, 1, 128, 16)
    expected = flash_attention(q, k, v, block_mask=window, backend="reference")
    torch.testing.assert_close(flash_attention(q, k, v, block_mask=mask), expected)


def test_written_lists_lose_the_dense_form_in_copies_too() -> None:
    """A mask whose lists had been written into was still attended as the one that had been made."""
    mask = BlockMask.causal(128, block_size=64)
    assert copy.deepcopy(mask).dense_form == mask.to("cpu").dense_form == "causal"
    mask.lists.token_bits.zero_()
    assert mask.dense_form is None and copy.deepcopy(mask).dense_form is None


def test_masks_load_with_weights_only() -> None:
    """`torch.load` refused a file with a mask unless it was told to trust everything in it."""
    mask, file = BlockMask.causal(100, block_size=64), io.BytesIO()
    torch.save({"mask": mask}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["mask"]
    assert loaded.dense_form == "causal" and torch.equal(loaded.to_dense(), mask.to_dense())


@pytest.mark.parametrize("other", ["", "full_"])
def test_a_tile_listed_twice_is_refused(other: str) -> None:
    """Kernels added a tile that was listed twice two times, and `to_dense` once."""
    lists = BlockMask.from_dense(torch.ones(128, 128, dtype=torch.bool).tril(), 64).lists
    changed = {"kv_num_blocks": torch.full_like(lists.kv_num_blocks, 1)}
    if other:
        changed = {"full_kv_num_blocks": torch.ones_like(lists.full_kv_num_blocks)}
    else:
        changed = {
            "kv_num_blocks": torch.full_like(lists.kv_num_blocks, 2),
            "kv_indices": torch.zeros_like(lists.kv_indices).repeat(1, 1, 1, 2),
            "kv_tokens": lists.kv_tokens.repeat(1, 1, 1, 2),
        }
    with pytest.raises(ValueError, match="must list each tile of a line once"):
        BlockMask(lists=lists._replace(**changed), block_size=(64, 64), seq_lengths=(128, 128))


def test_a_default_device_leaves_calls_to_be_replayed(monkeypatch) -> None:
    """Under `torch.device` as a context no call was remembered, nor by autocast that casts nothing."""
    x = torch.zeros(1, 1, 16, 16)
    operator, watched = api.operator_of("triton"), []
    registered = operator._registered
    monkeypatch.setattr(
        operator, "_registered", lambda *given: watched.append(given) or registered(*given)
    )

    def may_be_replayed() -> bool:
        watched.clear()
        flash_attention(x, x, x, backend="triton")
        return not watched

    with torch.device("cpu"):
        assert may_be_replayed()
    with torch.autocast("cpu", dtype=torch.float16):
        assert may_be_replayed()
    with torch.overrides.BaseTorchFunctionMode():
        assert not may_be_replayed()


@pytest.mark.parametrize("sigma", [50.0, 100.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_large_float32_scores_keep_the_contract(is_causal: bool, sigma: float) -> None:
    """Kernels rounded L to float32 three times on its way to the backward: dV was up to 1.4 times
    its bound.
    """
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, grad = (torch.randn(1, 2, 192, 32, generator=generator) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q * sigma, k, v)]
        oracle = compute_oracle(*leaves, grad, is_causal=is_causal)
        output, lse = flash_attention(
            *leaves, is_causal=is_causal, backend="triton", return_lse=True
        )
        grads = torch.autograd.grad(output, leaves, grad)
        results = dict(zip(("output", "lse", "grad_q", "grad_k", "grad_v"), (output, lse, *grads)))
        errors = contract_errors(oracle, {name: x.detach() for name, x in results.items()})
        assert max(errors.values()) <= 1, errors


def test_the_dense_form_is_remembered_without_a_look_at_the_lists(monkeypatch) -> None:
    """A call that `auto` gives to the dense kernels read eleven lists first, of which none is used."""
    mask = BlockMask.causal(128, block_size=64)
    assert mask.dense_form == "causal"
    monkeypatch.setattr(BlockMask, "_find_dense_form", lambda _: None)
    assert mask.dense_form == "causal"
    mask.lists.token_bits.zero_()
    assert mask.dense_form is None


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("kind", ["full", "causal", "mask"])
def test_the_flop_counter_counts_attended_pairs(backend: str, kind: str) -> None:
    """`FlopCounterMode` counted nothing for our operators."""
    q, k, v = inputs(2, 3, 128, 16, requires_grad=True)
    mask = BlockMask.sliding_window(128, window=20, block_size=64) if kind == "mask" else None
    with FlopCounterMode(display=False) as forward:
        output = flash_attention(
            q, k, v, is_causal=kind == "causal", block_mask=mask, backend=backend
        )
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    pairs = {
        "full": 128 * 128,
        "causal": causal_area(128, 128),
        "mask": mask.num_attended if mask else 0,
    }[kind]
    for counter, mode in ((forward, "forward"), (backward, "backward")):
        assert counter.get_total_flops() == ATTENTION_FLOPS_PER_PAIR[mode] * pairs * 2 * 3 * 16


def test_the_flop_counter_counts_packed_documents() -> None:
    """`FlopCounterMode` counted nothing for packed documents."""
    q, k, v = inputs(64, 2, 16)
    bounds = torch.tensor([0, 24, 64], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        flash_attention_varlen(q, k, v, bounds, bounds, 40, 40, is_causal=True, backend="triton")
    pairs = causal_area(24, 24) + causal_area(40, 40)
    assert counter.get_total_flops() == ATTENTION_FLOPS_PER_PAIR["forward"] * pairs * 2 * 16


@pytest.mark.parametrize("name", ["output", "lse", "grad_output", "grad_lse"])
def test_backward_operators_refuse_what_is_too_short(name: str) -> None:
    """Backward operators read past the end of an L or a gradient that was too short."""
    q, k, v = inputs(1, 2, 64, 16)
    output, lse = flash_attention(q, k, v, backend="tiled", return_lse=True)
    given = {"output": output, "lse": lse, "grad_output": output, "grad_lse": lse}
    given[name] = given[name][:, :, :32]
    for operator in (
        torch.ops.cs336_systems.triton_attention_backward,
        torch.ops.cs336_systems.tiled_attention_backward,
    ):
        mask = (None,) if "tiled" in str(operator) else ()
        with pytest.raises(ValueError, match=f"^{name} must be"):
            operator(q, k, v, *given.values(), *mask, False, 0.25, False, "")
    if name != "grad_lse":
        with pytest.raises(ValueError, match=f"^{name} must be"):
            attention_backward(q, k, v, *list(given.values())[:3], backend="tiled")


def test_shared_keys_compile_whole() -> None:
    """Without is_causal it asked the host whether all keys are chosen, which no whole graph can."""
    q, k, v = inputs(1, 2, 32, 16)
    bias = torch.arange(32.0).expand(1, 1, 32).contiguous()
    compiled = torch.compile(shared_keys_attention, fullgraph=True, backend="eager")
    expected = shared_keys_attention(q, k, v, bias, 8, backend="tiled")
    torch.testing.assert_close(compiled(q, k, v, bias, 8, backend="tiled"), expected)


def test_export_leaves_batch_and_lengths_open() -> None:
    """`torch.export` fixed the batch, where it leaves SDPA's open."""

    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flash_attention(q, k, v, is_causal=True, backend="tiled")

    batch, length = (
        torch.export.Dim("batch", min=2, max=64),
        torch.export.Dim("length", min=2, max=4096),
    )
    dynamic = ({0: batch, 2: length},) * 3
    exported = torch.export.export(
        Attend(), tuple(inputs(4, 2, 32, 16)), dynamic_shapes=dynamic
    ).module()
    other = inputs(3, 2, 50, 16)
    torch.testing.assert_close(
        exported(*other), flash_attention(*other, is_causal=True, backend="reference")
    )


@pytest.mark.parametrize(
    "function", [flash_attention, flash_attention_varlen, dilated_attention, shared_keys_attention]
)
@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("causal", "is_causal"),
        ("dropout_p", "no dropout"),
        ("softmax_scale", "scale"),
        ("wrong", "wrong"),
    ],
)
def test_keywords_of_others_are_named(function, keyword: str, hint: str) -> None:
    """Whoever came from SDPA or flash-attn got Python's bare TypeError."""
    call = {
        flash_attention: (), flash_attention_varlen: (None,) * 4, shared_keys_attention: (None, 1),
        dilated_attention: (),
    }[function]  # fmt: skip
    required = {"segment_length": 2, "dilation_rate": 1} if function is dilated_attention else {}
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) .*{hint}"):
        function(*inputs(1, 1, 4, 4), *call, **required, **{keyword: 1})


@pytest.mark.parametrize("shape", [(4, 32, 16), (2, 3, 32, 16), (32, 16)])
def test_the_handouts_function_has_a_watched_backward_of_any_leading_shape(
    shape: tuple[int, ...],
) -> None:
    """Under torch.compile or a counter its backward is the operator's, which takes four dimensions:
    it raised.
    """
    tensors = inputs(*shape, requires_grad=True)
    expected = torch.autograd.grad(FlashAttentionPyTorch.apply(*tensors, True).sum(), tensors)
    with FlopCounterMode(display=False):
        watched = torch.autograd.grad(FlashAttentionPyTorch.apply(*tensors, True).sum(), tensors)
    for one, other in zip(expected, watched):
        torch.testing.assert_close(one, other)
