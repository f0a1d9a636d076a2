"""Calls that differ in values alone are remembered: masks and boundaries of equal shapes are not
mistaken.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import (
    BlockMask,
    api,
    attention_reference,
    flash_attention,
    flash_attention_varlen,
    replay,
)
from cs336_systems.attention.call import Call
from cs336_systems.attention.choose import available_backends
from tests.covered import ATTENTION, HOPPER, REPLAY
from tests.test_s4_attention import draw, inputs

COVERS = (*ATTENTION, HOPPER, *REPLAY)
ROUNDS = 4  # a call is recorded at its second time, and replayed from its third on
HOPPER_HERE = pytest.mark.skipif(
    available_backends()["hopper"] != "ok", reason="hopper kernels need an sm_90 GPU"
)
ON_GPUS = [
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    pytest.param("hopper", "cuda", marks=[pytest.mark.gpu, HOPPER_HERE]),
]


@pytest.mark.parametrize(("backend", "device"), [("triton", "cpu"), *ON_GPUS])
def test_masks_of_equal_shapes_keep_their_own_tiles(backend, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, grad_output = inputs(1, 2, 2, 256, 256, 64, dtype, device)
    first = torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) < 0.5
    masks = [BlockMask.from_dense(tokens.to(device), 128) for tokens in (first, ~first)]
    # on a CPU the rule replays nothing: there its passes are taken from the memory here
    operator = api.operator_of(backend, "block_mask")

    def attend(*tensors: Tensor, block_mask: BlockMask) -> Tensor:
        if device == "cuda":
            return flash_attention(*tensors, block_mask=block_mask, backend=backend)
        call = Call(False, 64**-0.5, lists=block_mask.lists)
        return operator.apply(*tensors, call, replay.replayed(operator, *tensors, call))[0]

    for _ in range(ROUNDS):
        for mask in masks:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            output = attend(*leaves, block_mask=mask)
            grads = torch.autograd.grad(output, leaves, grad_output)
            exact = [x.detach().double().requires_grad_() for x in leaves]
            expected = attention_reference(*exact, mask=mask.to_dense())
            wanted = torch.autograd.grad(expected, exact, grad_output.double())
            for ours, theirs in zip((output, *grads), (expected, *wanted)):
                torch.testing.assert_close(ours.double(), theirs, rtol=0.02, atol=0.02)
    assert len(replay._remembered) == 1


def test_a_remembered_mask_may_move_and_change():
    q = draw(1, 1, 128, 16, dtype=torch.float32, device="cpu", seed=0)
    mask = BlockMask.sliding_window(128, window=40, block_size=64)
    attend = partial(flash_attention, q, q, q, backend="triton")
    attend(block_mask=mask)
    there = copy.copy(mask)  # as pickled and loaded there
    object.__setattr__(there, "lists", mask.to("meta").lists)
    with pytest.raises(ValueError, match="block_mask must be on q's device cpu, got meta"):
        attend(block_mask=there)
    for x, y in zip(mask.lists, BlockMask.causal(128, block_size=64).lists):
        x.data = y.clone()
    torch.testing.assert_close(
        attend(block_mask=mask), attention_reference(q, q, q, is_causal=True)
    )


def test_a_number_that_cannot_be_hashed_is_a_scale():
    class Half(float):
        __hash__ = None  # type: ignore[assignment]

    q = draw(1, 1, 64, 16, dtype=torch.float32, device="cpu", seed=0)
    mask = BlockMask.causal(64, block_size=64)
    for options in ({"is_causal": True}, {"block_mask": mask}):
        output = flash_attention(q, q, q, scale=Half(0.5), backend="triton", **options)
        torch.testing.assert_close(output, attention_reference(q, q, q, scale=0.5, is_causal=True))


@pytest.mark.parametrize(("backend", "device"), ON_GPUS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_boundaries_of_equal_shapes_are_read_anew(is_causal, backend, device):
    q, k, v = (
        draw(1000, 2, 64, dtype=torch.bfloat16, device=device, seed=seed) for seed in range(3)
    )
    for _ in range(ROUNDS):
        for ends in ([0, 300, 1000], [0, 1000, 1000], [0, 17, 500]):
            cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
            ours = flash_attention_varlen(
                q, k, v, cu_seqlens, cu_seqlens, 1000, 1000, is_causal=is_causal, backend=backend
            )
            expected = torch.zeros_like(q, dtype=torch.float64)
            for start, end in zip(ends, ends[1:]):
                own = (x[start:end].transpose(0, 1).double() for x in (q, k, v))
                expected[start:end] = attention_reference(*own, is_causal=is_causal).transpose(0, 1)
            torch.testing.assert_close(ours.double(), expected, rtol=0.02, atol=0.02)
    assert len(replay._remembered) == 1


@pytest.mark.gpu
def test_a_remembered_packed_call_still_refuses():
    q = draw(100, 2, 64, dtype=torch.bfloat16, device="cuda", seed=0)
    cu_seqlens = torch.tensor([0, 100], dtype=torch.int32, device="cuda")
    flash_attention_varlen(q, q, q, cu_seqlens, cu_seqlens, 100, 100)
    for wrong in (cu_seqlens.long(), cu_seqlens.cpu(), cu_seqlens[None]):
        with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
            flash_attention_varlen(q, q, q, wrong, wrong, 100, 100)
    with pytest.raises(TypeError, match="is_causal"):
        flash_attention_varlen(q, q, q, cu_seqlens, cu_seqlens, 100, 100, is_causal=0)
