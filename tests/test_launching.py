"""What surrounds the launches of attention kernels: how they overlap, and the stages that are
timed.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import BlockMask, flash_attention
from cs336_systems.attention.checks import to_autocast_dtype
from cs336_systems.attention.tiles.choice import SHARED_MEMORY_LIMIT_BYTES
from cs336_systems.attention.triton import launch
from cs336_systems.compiler.offline import triton_version
from cs336_systems.measure.stages import STAGES, TOTAL, time_stages
from tests.covered import HOPPER, REPLAY, TRITON
from tests.test_s4_attention import inputs, run
from tests.test_stages import unaccounted
from tests.test_varlen import packed, run_packed

COVERS = (*TRITON, HOPPER, *REPLAY)
ROOT = Path(__file__).resolve().parent.parent
JUDGE = "3.6.0"  # the Triton of the machines that the sm_90 table was measured on
# They read a cut tile by pointers and the others by TMA: a kernel that does both has no register
# left at head dim 128.
KNOWN_SPILLS = {("varlen_tma", "forward"), ("varlen_tma", "dkdv")}


# Kernels that overlap

# Launched early or not, and the order in their PTX. dQ reads what the preprocess has written
# without awaiting it: dK/dV starts dQ only when it has done so in all its programs, spare ones of
# packed documents included.
DKDV = True, ["await", "start", "read", "end"]
DQ = True, ["read", "await", "end"]
ALONE = False, ["end"]
KERNELS = {
    "flash_forward_kernel": ALONE,
    "flash_backward_preprocess_kernel": (False, ["start", "end"]),
    "flash_backward_dkdv_kernel": DKDV,
    "flash_backward_dq_kernel": DQ,
    "flash_split_forward_kernel": (False, ["start", "end"]),
    "flash_merge_kernel": (True, ["await", "read", "end"]),
    "varlen_forward_kernel": ALONE,
    "varlen_dkdv_kernel": (True, ["await", "start", "read", "await", "start", "end"]),
    "varlen_dq_kernel": DQ,
    "hopper_forward_kernel": ALONE,
    "hopper_split_forward_kernel": ALONE,
    "hopper_listed_forward_kernel": ALONE,
    "hopper_packed_forward_kernel": ALONE,
    "hopper_counter_kernel": ALONE,
    "hopper_backward_preprocess_kernel": (False, ["start", "end"]),
    # in producer and senders
    "hopper_backward_kernel": (True, ["end", "await", "start", "read", "await"]),
    "hopper_listed_backward_kernel": (True, ["await", "start", "read", "await", "end"]),
    "hopper_packed_backward_kernel": (True, ["end", "await", "start", "read", "await"]),
    "hopper_split_backward_kernel": (True, ["await", "start", "read", "await", "end"]),
    "hopper_backward_join_kernel": (True, ["await", "read", "end"]),
    "hopper_transpose_bits_kernel": ALONE,
    "hopper_wide_dkdv_kernel": (False, ["read", "end"]),
    "hopper_wide_dq_kernel": (False, ["read", "end", "read"]),
    "hopper_backward_convert_kernel": (True, ["await", "read", "end"]),
}


def compiled(*options: str, **environment: str) -> list[dict[str, Any]]:
    """The lines of `tests.compiled_kernels`, in a process in which kernels are not interpreted."""
    environment |= {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRITON_INTERPRET", *environment)
    }
    command = [sys.executable, "-m", "tests.compiled_kernels", *options]
    process = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.parametrize(
    "which", [[], pytest.param(["--all"], marks=pytest.mark.slow)], ids=["once", "all"]
)
def test_compiled_kernels_wait_before_they_read_and_can_be_replayed(which, tmp_path):
    """Their parameters are those that their PTX declares: another version of Triton may pass
    others.
    """
    # A kept PTX names the sources of the checkout that compiled it.
    lines = compiled(*which, TRITON_CACHE_DIR=str(tmp_path))
    assert {line["kernel"] for line in lines if line["arch"] == "sm90"} == KERNELS.keys()
    for line in lines:
        assert line["parameters"], line
        if line["arch"] == "sm90":
            assert (line["early"], line["events"]) == KERNELS[line["kernel"]], line
        else:  # which cannot overlap
            assert not line["early"] and not {"await", "start"} & set(line["events"]), line


@pytest.mark.slow
def test_kernels_compile_for_sm_90_and_spill_no_more_than_is_known():
    """The block-sparse and the varlen kernels, with TMA and without; with its Triton also for
    registers.
    """
    reports = compiled("--registers")
    assert len(reports) == 24
    for report in reports:
        assert not report["failure"], report
        assert report["shared_bytes"] <= SHARED_MEMORY_LIMIT_BYTES["sm90"], report
    if triton_version() == JUDGE:
        assert not any(report["serialized"] for report in reports), reports
        assert {
            tuple(report["request"][:2]) for report in reports if report["spill_bytes"]
        } == KNOWN_SPILLS


@pytest.mark.parametrize(
    "capability, overlaps",
    [((7, 5), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)],
)
def test_kernels_overlap_from_sm_90_on(capability, overlaps, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(launch.knobs.runtime, "interpret", False)
    options = partial(launch.overlap_options, torch.device("cuda", 0))
    assert options() == {"OVERLAP": overlaps}
    assert options(follows=True) == (
        {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}
    )
    timed = []
    time_stages(lambda: timed.append(options(follows=True)), device="cpu", num_samples=1, warmup=0)
    assert timed == [{"OVERLAP": False}]
    monkeypatch.setattr(launch.knobs.runtime, "interpret", True)
    assert options(follows=True) == {"OVERLAP": False}


NAN_BYTES = [2**power for power in range(9, 25)]  # of blocks that PyTorch's allocator hands out


def overwrite_free_memory() -> None:
    """NaN where the last call's L, D and parts were, if the allocator is so kind, as the kernel
    behind the call.
    """
    blocks = [
        torch.full((size // 4,), math.nan, device="cuda") for size in NAN_BYTES for _ in range(4)
    ]
    del blocks


SHAPES = {
    "split": (1, 1, 1, 2048, 2048, 64),
    "hopper-split": (1, 2, 1, 2048, 2048, 128),  # all walks of both passes are divided
    "hopper-parts": (1, 2, 2, 2048, 256, 64),  # all walks of the backward are divided
    "hopper-last-parts": (67, 2, 1, 1000, 256, 64),  # those of two tiles, on 132 multiprocessors
    "hopper-causal-parts": (1, 16, 1, 256, 256, 128),
}


def overlapping_call(family: str) -> Callable[[], dict[str, Tensor]]:
    """A call whose kernels overlap and repeat bit for bit: its output, log-sum-exp and gradients."""
    backend = "hopper" if family.startswith("hopper") else "triton"
    if family.endswith("varlen"):
        lengths = [256] * 8 if backend == "hopper" else [700, 0, 64, 129, 1, 1000]
        tensors, documents = packed(lengths, None, 5, 8, 4, 64, torch.bfloat16, "cuda")
        return partial(
            run_packed, tensors, documents, is_causal=True, backend=backend, enable_gqa=True
        )
    shape = SHAPES.get(family, (2, 8, 4, 1000, 1000, 64))
    options: dict[str, Any] = {"backend": backend, "enable_gqa": True}
    options["is_causal"] = family not in ("dense", "hopper-parts", "hopper-last-parts")
    if family in ("hopper", "hopper-split"):
        # else dQ's last bits vary, where more than two tiles of keys add to it
        options["deterministic"] = True
    if family.endswith("block-sparse"):
        mask = BlockMask.causal(1000, block_size=128, device="cuda")
        if backend == "hopper":
            mask = BlockMask.document([256, 256, 256, 232], block_size=128, device="cuda")
        options |= {"is_causal": False, "block_mask": mask}
    dtype = torch.float32 if family == "float32" else torch.bfloat16
    return partial(run, *inputs(*shape, dtype, "cuda"), **options)


FAMILIES = ["dense", "causal", "float32", "split", "varlen", "block-sparse"]
FAMILIES += [
    "hopper",
    "hopper-split",
    "hopper-parts",
    "hopper-last-parts",
    "hopper-causal-parts",
    "hopper-varlen",
]
FAMILIES += ["hopper-block-sparse"]


def without_overlap(call: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    results: list[dict[str, Tensor]] = []
    time_stages(lambda: results.append(call()), device="cuda", num_samples=1, warmup=0)
    return results[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_overlapping_kernels_give_the_same_bits(family):
    """Two hundred times, by Triton's launches and by replays, with NaN where memory comes free."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels overlap from sm_90 on")
    call = overlapping_call(family)
    expected = without_overlap(call)
    assert all(result.isfinite().all() for name, result in expected.items() if name != "lse")
    assert launch.overlap_options(torch.device("cuda", 0)) == {"OVERLAP": True}
    wrong = {name: torch.zeros((), device="cuda") for name in expected}
    for _ in range(200):
        overwrite_free_memory()
        for name, result in call().items():
            wrong[name] += (result != expected[name]).any()
    assert {name: int(count) for name, count in wrong.items()} == dict.fromkeys(expected, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_overlapping_kernels_in_a_graph(family):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels overlap from sm_90 on")
    call = overlapping_call(family)
    expected = without_overlap(call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call() for _ in range(4)]  # one call's kernels behind another's, too
    for _ in range(50):
        for results in captured:
            for result in results.values():
                result.fill_(math.nan)
        graph.replay()
        for results in captured:
            for name, result in results.items():
                assert torch.equal(result, expected[name]), name


# Stages


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
        assert set(
            time_stages(lambda: to_autocast_dtype(x.bfloat16()), device="cpu", num_samples=1)
        ) == {TOTAL}


@pytest.mark.gpu
@pytest.mark.alone
def test_the_stages_of_a_long_sequence_are_the_whole_of_it():
    tensors = inputs(1, 16, 16, 8192, 8192, 64, torch.bfloat16, "cuda")
    leaves = [x.requires_grad_() for x in tensors[:3]]
    samples = time_stages(
        lambda: flash_attention(*leaves, is_causal=True, backend="triton").backward(tensors[3]),
        device="cuda",
    )
    assert abs(unaccounted(samples)) < 0.1, samples
