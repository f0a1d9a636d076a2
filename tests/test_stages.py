"""Times of the stages inside a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.measure import stages
from cs336_systems.measure.stages import TOTAL, stage, time_stages

COVERS = ("cs336_systems/measure",)


def unaccounted(samples: dict[str, list[float]]) -> float:
    """The share of the whole call, by medians, that no stage accounts for."""
    return 1 - sum(median(values) for name, values in samples.items() if name != TOTAL) / median(
        samples[TOTAL]
    )


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Milliseconds pass in it alone, on the stages' clock, whatever else the machine does."""
    now_s = [0.0]
    monkeypatch.setattr(stages, "time", SimpleNamespace(perf_counter=lambda: sum(now_s)))
    return lambda milliseconds: now_s.append(milliseconds / 1e3)


def test_stages_add_up_to_the_whole(pause: Callable[[float], None]) -> None:
    """Time in an inner stage is not the outer one's; one entered twice is summed, one that is not
    reached is 0.
    """
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        with stage("forward"):
            pause(5)
            with stage("cast"):
                pause(40)
            pause(5)
        for _ in calls[2:] * 2:  # twice, in the last call alone
            with stage("dkv"):
                pause(10)

    samples = time_stages(call, device="cpu", num_samples=2, warmup=1)
    assert {name: pytest.approx(values) for name, values in samples.items()} == {
        "forward": [10, 10], "cast": [40, 40], "dkv": [0, 20], TOTAL: [50, 70]
    }  # fmt: skip


def test_marks_on_another_thread_are_seen(pause: Callable[[float], None]) -> None:
    """Autograd runs a backward on a thread of its own."""

    def backward() -> None:
        with stage("dq"):
            pause(5)

    def call() -> None:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()

    assert time_stages(call, device="cpu", num_samples=2, warmup=0)["dq"] == pytest.approx([5, 5])


def test_one_measurement_at_a_time() -> None:
    with pytest.raises(
        RuntimeError, match="stages are being timed already: one measurement at a time"
    ):
        time_stages(lambda: time_stages(lambda: None, device="cpu"), device="cpu", warmup=0)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_slow_host_is_no_part_of_a_stage() -> None:
    """The host sleeps 5 ms in each stage, the GPU about 0.5 and 0.25: its clock is not known here,
    only their ratio.
    """

    def call() -> None:
        with stage("forward"):
            time.sleep(5e-3)
            torch.cuda._sleep(10**6)
        with stage("dq"):
            time.sleep(5e-3)
            torch.cuda._sleep(5 * 10**5)

    samples = time_stages(call, device="cuda", num_samples=5)
    assert median(samples["forward"]) < 2.5
    assert median(samples["forward"]) / median(samples["dq"]) == pytest.approx(2.0, rel=0.1)
    assert abs(unaccounted(samples)) < 0.1
