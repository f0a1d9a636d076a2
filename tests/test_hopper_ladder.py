"""`hopper_ladder`: its rungs and what they run."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.config import RunConfig
from cs336_systems.experiments import hopper_ladder
from cs336_systems.experiments.attention import sized_shape
from cs336_systems.experiments.hopper_ladder import RUNGS, build_rung
from cs336_systems.experiments.registry import PROBLEMS
from cs336_systems.experiments.spec import Unsupported

TINY = RunConfig(scale="tiny", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")


def test_every_rung_has_every_shape():
    cells = PROBLEMS["hopper_ladder"].cells(RunConfig(scale="handout", device="cuda"))
    assert len(cells) == len(RUNGS) * len(hopper_ladder.SHAPES["handout"])
    assert {cell.case.dtype for cell in cells} == {"bfloat16"}


def test_the_first_rungs_are_measured_and_the_others_say_why_not():
    run = TINY
    cells = {cell.implementation: cell for cell in PROBLEMS["hopper_ladder"].cells(run)}
    measured = list(PROBLEMS["hopper_ladder"].measure(cells["triton_pointers"], run))
    assert {one.row.mode for one in measured} == {"forward", "backward", "forward_backward"}
    assert all(one.kernel.startswith("interpreter portable_forward_") for one in measured)
    first = list(PROBLEMS["hopper_ladder"].measure(cells["triton_first"], run))
    assert {one.kernel for one in first} == {"interpreter flash_fwd_kernel tiled_backward"}
    assert max(one.error for one in first if one.error is not None) <= 1
    for rung, why in (
        ("triton_tma", "TMA on GPUs of compute capability 9.0"),
        ("hopper_deterministic", "hopper kernels run on CUDA devices, and the inputs are on cpu"),
        ("hopper", "hopper kernels run on CUDA devices, and the inputs are on cpu"),
    ):
        with pytest.raises(Unsupported, match=why):
            list(PROBLEMS["hopper_ladder"].measure(cells[rung], run))


def test_an_unknown_rung_is_refused():
    with pytest.raises(ValueError, match="rung must be one of triton_first, triton_pointers, .*, got 'flex'"):
        build_rung("flex", sized_shape(HANDOUT, 1, 1, 64, 64, True), "cpu")


def test_rungs_differ_in_how_tiles_are_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    shape = sized_shape(HANDOUT, 1, 16, 16384, 64, True)
    by_pointers, by_tma = (build_rung(name, shape, "cuda").kernel.split() for name in tuple(RUNGS)[1:3])
    assert not any(name.endswith("_tma") for name in by_pointers) and all(name.endswith("_tma") for name in by_tma)
    assert len(by_pointers) == len(by_tma) == 3
