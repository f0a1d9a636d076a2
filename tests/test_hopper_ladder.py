"""`hopper_ladder`: its rungs and what they run."""

from typing import Any

import torch

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention import sized_shape
from cs336_systems.experiments.hopper_ladder import RUNGS
from cs336_systems.experiments.registry import PROBLEMS

TINY = RunConfig(scale="tiny", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")


def test_the_first_rungs_are_measured_and_the_others_say_why_not():
    (cell,) = PROBLEMS["hopper_ladder"].cells(TINY)
    found: dict[str, list[Any]] = {name: [] for name in RUNGS}
    for one in PROBLEMS["hopper_ladder"].measure(cell, TINY):
        found[one.row.implementation].append(one)
    assert all(one.kernel.startswith("interpreter portable_forward_") for one in found["triton_pointers"])
    assert {one.kernel for one in found["triton_first"]} == {"interpreter flash_fwd_kernel tiled_backward"}
    for name in ("triton_first", "triton_pointers"):
        assert {one.row.mode for one in found[name]} == {"forward", "backward", "forward_backward"}
        assert max(one.error for one in found[name]) <= 1
    hopper = "hopper kernels run on CUDA devices, and the inputs are on cpu"
    for rung, why in (
        ("triton_tma", "TMA on GPUs of compute capability 9.0"),
        ("hopper_deterministic", hopper),
        ("hopper", hopper),
        ("fa4", "FlashAttention-4 needs CUDA"),
    ):
        assert {why in one.message for one in found[rung]} == {True}, rung


def test_rungs_differ_in_how_tiles_are_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    shape = sized_shape(HANDOUT, 1, 16, 16384, 64, True)
    by_pointers, by_tma = (
        PROBLEMS["hopper_ladder"].built(name, shape, "cuda").kernel.split() for name in tuple(RUNGS)[1:3]
    )
    assert not any(name.endswith("_tma") for name in by_pointers) and all(name.endswith("_tma") for name in by_tma)
    assert len(by_pointers) == len(by_tma) == 3
