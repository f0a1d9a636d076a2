"""What surrounds the launches of attention kernels: finding compiled ones again, and the stages that are timed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cs336_systems.attention import BlockMask, flash_attention
from cs336_systems.attention.triton.steps import LOG2_E
from cs336_systems.attention.validation import to_autocast_dtype
from cs336_systems.profiling.stages import STAGES, TOTAL, time_stages, unaccounted
from tests.test_s4_attention import DEVICES, inputs, run

COVERS = ("cs336_systems/attention",)
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def launches() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.launch_twice"]
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def forwards(launches: list[dict]) -> list[dict]:
    """The launches of the pointer kernel: aligned twice, shifted, aligned, shifted, and a row fewer."""
    return [launch for launch in launches if launch["kernel"] == "flash_forward_kernel"][:6]


def test_a_second_launch_is_not_classified_and_the_same(launches):
    first, second, *_ = forwards(launches)
    assert first["classified"] and not second["classified"]
    outputs = [launch["arguments"].pop(position) for launch in (first, second) for position in (4, 3)]
    assert all(kind == "tensor" for kind, *_ in outputs)  # new ones each time
    assert first["arguments"] == second["arguments"] and first["grid"] == second["grid"] == [4, 1, 1]
    assert first["hash"] == second["hash"]


def test_a_shifted_pointer_is_another_kernel(launches):
    """A kernel compiled for aligned pointers faults on others: the same shapes must not find it."""
    aligned, _, shifted, again, shifted_again, shorter = forwards(launches)
    assert shifted["classified"] and shifted["hash"] != aligned["hash"]
    assert not again["classified"] and again["hash"] == aligned["hash"]
    assert not shifted_again["classified"] and shifted_again["hash"] == shifted["hash"]
    assert shorter["classified"] and shorter["hash"] != aligned["hash"]  # 79 rows are no multiple of 16


def test_another_scale_reaches_the_kernel(launches):
    """Floating-point numbers are no part of what finds a kernel, and are passed on."""
    scales = {
        "flash_backward_dkdv_kernel": (0.125, 0.25), "flash_backward_dq_kernel": (0.125, 0.25),
        "hopper_forward_kernel": (0.125 * LOG2_E.value, 0.25 * LOG2_E.value),
        "hopper_backward_kernel": (0.125 * LOG2_E.value, 0.25 * LOG2_E.value),
        "hopper_backward_convert_kernel": (0.125, 0.25),
        "varlen_forward_kernel": (0.125 * LOG2_E.value, 0.25 * LOG2_E.value),
        "varlen_dkdv_kernel": (0.125, 0.25), "varlen_dq_kernel": (0.125, 0.25),
    }  # fmt: skip
    others = ("flash_backward_preprocess_kernel", "hopper_backward_preprocess_kernel", "flash_split_forward_kernel",
              "flash_merge_kernel")  # fmt: skip
    for kernel in (*scales, *others):
        first, second, *_ = (launch for launch in launches if launch["kernel"] == kernel)
        assert first["classified"] and not second["classified"]
        assert first["hash"] == second["hash"]
        for launch, scale in zip((first, second), scales.get(kernel, ())):
            assert scale in launch["arguments"]
    *_, first, second = (launch for launch in launches if launch["kernel"] == "flash_forward_kernel")
    assert first["arguments"][0][0] == "descriptor" and not second["classified"]
    assert first["arguments"][0] == second["arguments"][0]


def test_every_kernel_can_be_launched_by_the_driver_alone(launches):
    """Its parameters are those that its PTX declares: another version of Triton may pass others."""
    assert {launch["kernel"] for launch in launches if launch["bindable"]} == {
        "flash_forward_kernel", "flash_backward_preprocess_kernel", "flash_backward_dkdv_kernel",
        "flash_backward_dq_kernel", "hopper_forward_kernel", "hopper_backward_preprocess_kernel",
        "hopper_backward_kernel", "hopper_backward_convert_kernel", "flash_split_forward_kernel", "flash_merge_kernel",
        "varlen_forward_kernel", "varlen_dkdv_kernel", "varlen_dq_kernel",
    }  # fmt: skip
    assert all(launch["bindable"] for launch in launches)


@pytest.mark.gpu
def test_aligned_and_shifted_inputs_by_turns():
    """Equal shapes and strides; the second launch of each is found by numbers."""
    tensors = inputs(1, 2, 2, 80, 80, 64, torch.bfloat16, "cuda")
    shifted = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x) for x in tensors]
    expected = run(*tensors, backend="triton", is_causal=True)
    for q, k, v, grad_output in (shifted, tensors, shifted):
        for name, result in run(q, k, v, grad_output, backend="triton", is_causal=True).items():
            torch.testing.assert_close(result, expected[name], rtol=2e-2, atol=2e-2)


# Stages


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "block-sparse"])
def test_attention_marks_its_stages(masked, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, grad_output = inputs(1, 1, 1, 64, 64, 16, dtype, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def call():
        mask = BlockMask.causal(64, block_size=64, device=device) if masked else None
        flash_attention(*leaves, block_mask=mask, backend="triton").backward(grad_output)

    samples = time_stages(call, device=device, num_samples=2, warmup=1)
    expected = {name for name in STAGES if name != "cast" and (masked or name != "mask_build")}
    assert set(samples) == {TOTAL, *expected}
    assert all(value > 0 for name in expected for value in samples[name])


def test_a_cast_is_a_stage():
    x = torch.ones(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        samples = time_stages(lambda: to_autocast_dtype(x), device="cpu", num_samples=1)
        assert set(samples) == {TOTAL, "cast"} and to_autocast_dtype(x).dtype == torch.bfloat16
        assert set(time_stages(lambda: to_autocast_dtype(x.bfloat16()), device="cpu", num_samples=1)) == {TOTAL}


@pytest.mark.gpu
@pytest.mark.alone
def test_the_stages_of_a_long_sequence_are_the_whole_of_it():
    tensors = inputs(1, 16, 16, 8192, 8192, 64, torch.bfloat16, "cuda")
    leaves = [x.requires_grad_() for x in tensors[:3]]
    samples = time_stages(
        lambda: flash_attention(*leaves, is_causal=True, backend="triton").backward(tensors[3]), device="cuda"
    )
    assert abs(unaccounted(samples)) < 0.1, samples
