"""Measuring by turns: who comes after whom, and whose rows are lost when one of them cannot be
measured.
"""

import time
from itertools import product
from statistics import median
from unittest.mock import Mock

import pytest
import torch

from cs336_systems.attention import flash_attention
from cs336_systems.bench.harness import Provenance, Sweep, planned_cells
from cs336_systems.bench.spec import Unsupported, load
from cs336_systems.bench.turns import ROUNDS, Player, in_order, play
from cs336_systems.bench.worker import Outcome
from cs336_systems.config import RunConfig
from cs336_systems.measure.timing import time_in_a_row
from cs336_systems.subjects import attention_by_turns
from cs336_systems.subjects import attention_passes as attention
from cs336_systems.subjects.attention_builders import Built
from cs336_systems.subjects.implementations import build

COVERS = ("cs336_systems/bench/turns.py", "cs336_systems/measure/timing.py")

TINY = RunConfig(scale="tiny", device="cpu")
PROBLEM, SHAPES = load("short_calls"), load("attention_shapes")
MODES = ("forward", "backward", "forward_backward")
TORCH_OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")
HOST_OOM = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
)


# Order


def player(name: str, log: list[str]) -> Player:
    def turn(mode: str) -> dict[str, float]:
        log.append(f"{name} {mode}")
        return {"time": float(len(log)), "host_time": 0.0}

    made = {mode: lambda mode=mode: turn(mode) for mode in ("forward", "backward")}
    return Player(name=name, kernel="", error=0.0, turns=made)


def test_three_come_in_every_order():
    players = [player(name, []) for name in "abc"]
    rounds = ["".join(one.name for one in in_order(players, number)) for number in range(6)]
    assert rounds == ["abc", "cba", "bca", "acb", "cab", "bac"]


def test_a_round_goes_through_the_modes_and_the_first_is_not_kept():
    log: list[str] = []
    samples = play([player(name, log) for name in "abc"], 6)
    assert len(log) == (6 + 1) * 2 * 3
    assert log[6:12] == [f"{name} {mode}" for mode in ("forward", "backward") for name in "abc"]
    assert log[12:15] == ["c forward", "b forward", "a forward"]
    assert set(samples) == set(product("abc", ("forward", "backward"), ("time", "host_time")))
    assert samples["a", "forward", "time"][:2] == [7.0, 15.0] and samples["c", "forward", "time"][
        :2
    ] == [9.0, 13.0]
    assert {len(taken) for taken in samples.values()} == {6}


# Those that cannot be measured


def tiny_cell():
    (cell,) = planned_cells("short_calls", TINY)
    return cell


def broken_build(monkeypatch, breaks) -> None:
    """`build`, but for triton, whose function raises or is wrong; `breaks` is what to raise, or the
    function.
    """

    wrong = Mock(side_effect=breaks) if isinstance(breaks, BaseException) else breaks

    def replaced(name, case, run):
        return Built(attend=wrong) if name == "triton" else build(name, case, run.device)

    monkeypatch.setattr(attention, "build_case", replaced)


@pytest.mark.parametrize(
    ("breaks", "status", "message"),
    [
        (
            lambda q, k, v: flash_attention(q, k, v, is_causal=True, backend="reference") + 1,
            "failed",
            "output is off",
        ),
        (RuntimeError("ptxas died\nat line 7"), "failed", "RuntimeError: ptxas died"),
        (ValueError("no tile fits"), "failed", "ValueError: no tile fits"),
        (AssertionError("of a reader's own"), "failed", "AssertionError: of a reader's own"),
        (TORCH_OOM, "oom", "CUDA out of memory"),
        (HOST_OOM, "oom", "[enforce fail"),
        (Unsupported("not here"), "skipped", "not here"),
    ],
    ids=[
        "wrong",
        "compiler",
        "refusal",
        "assertion",
        "device memory",
        "host memory",
        "unsupported",
    ],
)
def test_who_cannot_be_measured_costs_its_own_rows(breaks, status, message, monkeypatch, tmp_path):
    """An out-of-memory error or one of a compiler had cost everybody's rows of the shape."""
    broken_build(monkeypatch, breaks)
    measurements = list(PROBLEM.measure(tiny_cell(), TINY))
    assert len(measurements) == len(tiny_cell().rows)
    sweep = Sweep(TINY, tmp_path, Provenance(commit="c0ffee", dirty=False))
    records = sweep.record(tiny_cell(), Outcome(measurements=measurements))
    found = {record.implementation: record for record in records}
    assert {name: record.status for name, record in found.items()} == {
        "triton": status, "hopper": "skipped", "sdpa_flash": "ok", "sdpa_cudnn": "skipped",
    }  # fmt: skip
    assert found["triton"].message.startswith(message) and not found["triton"].samples


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=["Ctrl-C", "exit"])
def test_who_is_told_to_stop_stops(error, monkeypatch):
    broken_build(monkeypatch, error)
    with pytest.raises(type(error)):
        list(PROBLEM.measure(tiny_cell(), TINY))


def test_what_leaves_no_device_is_no_others_failure(monkeypatch):
    """After a fault every call of a CUDA context raises: no implementation is said to have failed
    by itself for it.
    """
    fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    broken_build(monkeypatch, fault)
    monkeypatch.setattr(attention_by_turns, "release", Mock(side_effect=fault))
    measurements = []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measurements.extend(PROBLEM.measure(tiny_cell(), TINY))
    assert {measurement.row.implementation for measurement in measurements} == {"triton"}


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

    def fake(name, shape, run):
        if name not in ("triton", "sdpa_cudnn"):
            raise Unsupported("not here")
        fast = build("sdpa_flash", shape, run.device).attend
        return fast if name == "triton" else lambda q, k, v: Slow.apply(fast(q, k, v))

    monkeypatch.setattr(SHAPES, "built", lambda *call: Built(attend=fake(*call)))
    (cell,) = SHAPES.cells(TINY)
    found = {(one.row.implementation, one.row.mode): one for one in SHAPES.measure(cell, TINY)}
    assert {found["hopper", mode].message for mode in MODES} == {"not here"}
    waited = {}
    for mode in MODES:
        fast, slow = found["triton", mode].samples, found["sdpa_cudnn", mode].samples
        assert len(fast) == len(slow) == ROUNDS["cpu"]
        waited[mode] = median([late - soon for soon, late in zip(fast, slow)])
    assert 8 < waited["forward"] < 25 < waited["backward"] < 38 < waited["forward_backward"]


@pytest.mark.gpu
@pytest.mark.alone
def test_calls_in_a_row_take_the_gpus_time():
    cycles = 2 * 10**7
    torch.cuda._sleep(30 * cycles)  # until the clock of a GPU that was idle has risen
    one_ms = time_in_a_row(lambda: torch.cuda._sleep(cycles), 5, "cuda")
    assert time_in_a_row(lambda: torch.cuda._sleep(2 * cycles), 5, "cuda") == pytest.approx(
        2 * one_ms, rel=0.1
    )
