"""`short_calls`: who takes turns and what a turn tells apart."""

import time
from dataclasses import replace
from statistics import median

import pytest
import torch

from cs336_systems.bench.spec import load
from cs336_systems.bench.turns import Player, play
from cs336_systems.config import RunConfig
from cs336_systems.experiments.beyond import short_calls
from cs336_systems.experiments.beyond.few_queries import GRAPH_SAMPLES
from cs336_systems.experiments.beyond.short_calls import CALLS, ROUNDS
from cs336_systems.measure.timing import time_calls

COVERS = (
    "cs336_systems/experiments/beyond/few_queries.py",
    "cs336_systems/experiments/beyond/short_calls.py",
    "cs336_systems/bench/turns.py",
    "cs336_systems/measure/timing.py",
)
TINY = RunConfig(scale="tiny", device="cpu")
PROBLEM = load("short_calls")


def tiny_cell():
    (cell,) = PROBLEM.cells(TINY)
    return cell


# Measuring


def test_the_host_is_free_before_the_device_is_done(monkeypatch):
    """Milliseconds a call, of which waiting for the device is no part of the host's; the first call
    is not timed.
    """
    monkeypatch.setitem(CALLS, "cpu", 4)
    monkeypatch.setattr(short_calls, "synchronize", lambda device: time.sleep(0.02))
    called: list[float] = []

    def call() -> None:
        called.append(time.perf_counter())
        time.sleep(0.001)

    turn = PROBLEM.turn_of(call, "cpu")
    samples = play([Player(name="a", kernel="", error=0.0, turns={"forward": turn})], 2)
    assert len(called) == (2 + 1) * (1 + 4)
    for host, whole in zip(
        samples["a", "forward", "host_time"], samples["a", "forward", "time"], strict=True
    ):
        assert 1 <= host < whole - 4.9


@pytest.mark.gpu
@pytest.mark.alone
def test_a_replayed_call_takes_its_kernels_time_and_no_launch():
    cycles_per_ms = (
        2
        * 10**8
        / max(time_calls(lambda: torch.cuda._sleep(2 * 10**8), device="cuda", num_samples=3))
    )
    run = RunConfig(scale="tiny", device="cuda")
    samples = load("few_queries").samples_of(
        lambda: torch.cuda._sleep(int(0.1 * cycles_per_ms)), None, run
    )
    assert len(samples) == GRAPH_SAMPLES
    assert median(samples) == pytest.approx(0.1, rel=0.1)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_turn_on_a_gpu_tells_host_whole_and_graph_apart():
    """A kernel of a millisecond keeps the host for a few microseconds; a host that sleeps is no
    part of the graph.
    """
    run = RunConfig(scale="tiny", device="cuda")
    cell = replace(PROBLEM.cells(run)[0], case=replace(tiny_cell().case, dtype="bfloat16"))
    found = {
        (
            measurement.row.implementation,
            measurement.row.mode,
            measurement.row.quantity,
        ): measurement
        for measurement in PROBLEM.measure(cell, run)
    }
    for name in ("triton", "sdpa_flash"):
        for mode in ("forward", "forward_backward"):
            taken = {
                quantity: found[name, mode, quantity].samples
                for quantity in ("host_time", "time", "graph_time")
            }
            assert {len(samples) for samples in taken.values()} == {ROUNDS["cuda"]}
            assert all(host <= whole for host, whole in zip(taken["host_time"], taken["time"]))
            assert median(taken["graph_time"]) < median(taken["time"])
