"""`long_calls`: what a turn is and that who is slow is told from the others."""

from __future__ import annotations

import time

import pytest
import torch

from cs336_systems.config import RunConfig
from cs336_systems.experiments import turns
from cs336_systems.experiments.implementations import build
from cs336_systems.experiments.long_calls import (
    ROUNDS,
    SETTLE_MS,
    SHAPES,
    TIMED_MS,
    counts_of,
)
from cs336_systems.experiments.registry import PROBLEMS
from cs336_systems.experiments.spec import Unsupported
from cs336_systems.measure.samples import summarize
from cs336_systems.measure.timing import time_in_a_row

COVERS = (
    "cs336_systems/experiments/long_calls.py",
    "cs336_systems/experiments/turns.py",
    "cs336_systems/measure/timing.py",
)
TINY = RunConfig(scale="tiny", device="cpu")
PROBLEM = PROBLEMS["long_calls"]
MODES = ("forward", "backward", "forward_backward")


def tiny_cell():
    (cell,) = PROBLEM.cells(TINY)
    return cell


# Cells


def test_a_cell_has_the_three_modes_of_all_and_other_gpus_may_work():
    cells = PROBLEM.cells(RunConfig(scale="handout", device="cuda"))
    assert len(cells) == len(SHAPES["handout"])
    for cell in cells:
        assert not cell.alone and cell.implementations == PROBLEM.implementations
        assert [(row.implementation, row.mode) for row in cell.rows] == [
            (name, mode) for name in PROBLEM.implementations for mode in MODES
        ]
        assert cell.case.seqlen_q == 16384 and cell.case.dtype == "bfloat16"


# Turns


@pytest.mark.parametrize(
    ("call_ms", "untimed", "timed"), [(3.4, 18, 15), (11.5, 6, 4), (70.0, 1, 1), (200.0, 1, 1)]
)
def test_a_turn_is_as_many_calls_as_fill_it(call_ms, untimed, timed):
    assert counts_of(call_ms) == (untimed, timed)
    assert untimed * call_ms >= SETTLE_MS and (timed == 1 or abs(timed * call_ms - TIMED_MS) <= call_ms / 2)


# Measuring


class Slow(torch.autograd.Function):
    """The identity, which keeps whoever goes through it waiting: 10 ms forward, 30 ms backward."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.01)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.03)
        return grad


def test_who_is_slow_is_so_in_every_mode(monkeypatch):
    """The backward alone is that of a graph made before: the forward's wait is no part of it."""

    def fake(name, shape, device):
        if name == "hopper":
            raise Unsupported("not here")
        fast = build("sdpa_flash", shape, device)
        return fast if name == "triton" else lambda q, k, v: Slow.apply(fast(q, k, v))

    monkeypatch.setattr(turns, "build", fake)
    monkeypatch.setattr(turns, "kernel_name", lambda name, shape, device: "")
    found = {(one.row.implementation, one.row.mode): one for one in PROBLEM.measure(tiny_cell(), TINY)}
    assert {found["hopper", mode].skipped for mode in MODES} == {"not here"}
    waited = {}
    for mode in MODES:
        fast, slow = found["triton", mode].samples, found["sdpa_cudnn", mode].samples
        assert len(fast) == len(slow) == ROUNDS["cpu"]
        waited[mode] = summarize([late - soon for soon, late in zip(fast, slow)]).median
    assert 8 < waited["forward"] < 25 < waited["backward"] < 38 < waited["forward_backward"]


@pytest.mark.gpu
@pytest.mark.alone
def test_calls_in_a_row_take_the_gpus_time():
    cycles = 2 * 10**7
    one_ms = time_in_a_row(lambda: torch.cuda._sleep(cycles), 5, "cuda")
    assert time_in_a_row(lambda: torch.cuda._sleep(2 * cycles), 5, "cuda") == pytest.approx(2 * one_ms, rel=0.1)
