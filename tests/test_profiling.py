"""Timing and memory of closures, on what can be known exactly."""

import time
from functools import partial
from statistics import median

import pytest
import torch

from cs336_systems.measure.allocations import MIB, peak_cuda_bytes, saved_for_backward
from cs336_systems.measure.timing import plan_samples, time_calls, time_once

COVERS = ("cs336_systems/measure",)


def test_counts_and_what_is_outside_the_timed_part():
    events: list[str] = []
    call, before = partial(events.append, "call"), partial(events.append, "before")
    samples = time_calls(call, device="cpu", warmup=2, num_samples=3, before=before)
    assert len(samples) == 3 and events == ["before", "call"] * 5


def test_a_sleep_is_measured_and_its_preparation_is_not():
    call, before = partial(time.sleep, 0.02), partial(time.sleep, 0.05)
    samples = time_calls(call, device="cpu", warmup=0, num_samples=5, before=before)
    assert 20.0 <= median(samples) < 30.0


def test_sample_counts_follow_the_budget():
    assert plan_samples(10.0, 400.0) == 40
    assert plan_samples(1e6, 400.0) == 5, "never fewer than five"
    assert plan_samples(0.001, 400.0) == 100 and plan_samples(0.0, 400.0) == 100
    assert len(time_calls(lambda: time.sleep(0.01), device="cpu", budget_ms=80.0)) in range(5, 9)


def test_saved_bytes_count_each_storage_once():
    x = torch.ones(1000, requires_grad=True)
    assert saved_for_backward(lambda: x * x) == 4000, "both factors are the same storage"
    assert saved_for_backward(lambda: x.exp()) == 4000
    assert saved_for_backward(lambda: x + 1) == 0


@pytest.mark.gpu
@pytest.mark.alone
def test_a_kernel_of_known_length_is_measured_within_two_percent():
    """Its length is in nanoseconds: one in cycles would be known as long as the clock that counted
    them stays.
    """
    from tests.spin_kernel import spin

    spin(1.0)
    for milliseconds in (5.0, 20.0):
        samples = time_calls(
            lambda length=milliseconds: spin(length), device="cuda", num_samples=10
        )
        assert median(samples) == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_clock_that_does_not_wait_for_the_kernel_is_caught(monkeypatch):
    """Without its synchronisation the wall clock sees the launch alone: the check above must not
    pass then.
    """
    cycles = 200 * 10**6
    waited = time_once(lambda: torch.cuda._sleep(cycles), "cuda")
    torch.cuda.synchronize()
    monkeypatch.setattr("cs336_systems.measure.timing.synchronize", lambda device: None)
    hurried = time_once(lambda: torch.cuda._sleep(cycles), "cuda")
    torch.cuda.synchronize()
    assert waited > 50 and hurried < 0.1 * waited


@pytest.mark.gpu
@pytest.mark.alone
def test_peak_memory_is_what_was_allocated():
    def call() -> torch.Tensor:
        first = torch.empty(64 * MIB, dtype=torch.int8, device="cuda")
        del first
        return torch.empty(48 * MIB, dtype=torch.int8, device="cuda")

    assert peak_cuda_bytes(call) == 64 * MIB
