"""`doctor`: facts alone unless asked to measure; every back end has a row; `auto` is near the
fastest.
"""

import json
import math
from typing import Any

import pytest
import torch

from cs336_systems.attention import attention_reference
from cs336_systems.attention.choose import BACKENDS
from cs336_systems.config import AttentionShape
from cs336_systems.device import get_device_info
from cs336_systems.measure.reach import copy_rate, matmul_rate
from cs336_systems.subjects import backend_times as backends
from cs336_systems.subjects.backend_times import BackendTiming, auto_ratio, benchmark_backends
from tests.command_line import invoke

COVERS = ("cs336_systems/measure", "cs336_systems/subjects/backend_times.py")


def shape(seqlen: int, head_dim: int, dtype: Any = "float32", heads: int = 2) -> AttentionShape:
    return AttentionShape(
        batch=1,
        heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        is_causal=True,
        dtype=dtype,
    )


def doctor(*arguments: str) -> Any:
    return invoke("doctor", "--device", "cpu", *arguments)


# Rates


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cs336_systems.measure.reach.time_calls", lambda call, device: [2.0, 4.0, 8.0]
    )
    monkeypatch.setattr("cs336_systems.measure.reach.COPY_BYTES", {"cpu": 10**8})
    monkeypatch.setattr("cs336_systems.measure.reach.MATMUL_SIZE", {"cpu": 100})
    rate = copy_rate("cpu")
    assert (rate["median"], rate["unit"]) == (50.0, "GB/s"), (
        "0.1 GB read and as much written in 4 ms"
    )
    assert rate["quartile_low"] < rate["median"] < rate["quartile_high"]
    rate = matmul_rate("cpu")
    assert rate["median"] == pytest.approx(2e6 / 4e-3 / 1e12) and rate["unit"] == "TFLOP/s"


# Back ends


def test_every_back_end_has_a_finite_row_or_a_reason() -> None:
    rows = benchmark_backends(shape(64, 16), device="cpu", num_samples=3)
    assert [row.backend for row in rows] == [*BACKENDS, "auto"]
    for row in rows:
        if row.status == "ok":
            times = (row.forward_ms, row.forward_backward_ms)
            assert all(ms is not None and math.isfinite(ms) and ms > 0 for ms in times)
        else:
            assert row.reason and row.forward_ms is None
    by_name = {row.backend: row for row in rows}
    assert by_name["reference"].status == by_name["tiled"].status == by_name["auto"].status == "ok"
    assert by_name["auto"].chosen == "reference" and "cheap to store" in by_name["auto"].reason
    assert (
        by_name["triton"].interpreted
        or torch.cuda.is_available()
        or by_name["triton"].status == "skipped"
    )


def test_an_out_of_memory_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(q: Any, k: Any, v: Any, *, backend: str, **_: Any) -> Any:
        if backend == "reference":
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")
        return attention_reference(q, k, v, is_causal=True)

    monkeypatch.setattr(backends, "flash_attention", fails)
    rows = {
        row.backend: row for row in benchmark_backends(shape(64, 16), device="cpu", num_samples=1)
    }
    assert (rows["reference"].status, rows["reference"].reason) == ("oom", "CUDA out of memory.")
    assert rows["tiled"].status == "ok"


def test_auto_is_compared_with_the_fastest_real_back_end() -> None:
    def row(backend: str, ms: float | None, **more: Any) -> BackendTiming:
        return BackendTiming(backend=backend, forward_backward_ms=ms, **more)

    rows = [
        row("reference", 2.0),
        row("tiled", 4.0),
        row("triton", 0.1, interpreted=True),
        row("auto", 2.2),
    ]
    assert auto_ratio(rows) == pytest.approx(1.1)
    assert (
        auto_ratio(rows[:3]) is None and auto_ratio([row("auto", 1.0), row("tiled", None)]) is None
    )


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("seqlen, head_dim", [(4096, 64), (8192, 64), (4096, 128), (16384, 64)])
def test_auto_is_within_ten_percent_of_the_fastest(seqlen: int, head_dim: int) -> None:
    case = shape(seqlen, head_dim, "bfloat16", heads=16)
    rows = benchmark_backends(case, device="cuda")
    ratio = auto_ratio(rows)
    assert ratio is not None and ratio <= 1.1, rows


# doctor


def test_doctor_as_json_says_facts_and_nothing_measured() -> None:
    result = doctor("--json")
    assert result.exit_code == 0, result.output
    described = json.loads(result.stdout)
    assert described["device"] == get_device_info("cpu").to_dict()
    assert set(described["backends"]) == set(BACKENDS) and described["peak"] is None
    assert torch.__version__.startswith(described["software"]["torch"].split("+")[0])
    assert "measured" not in described


@pytest.mark.slow
def test_doctor_measures_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    # One test above compiles; its seconds would say nothing new here.
    monkeypatch.setattr(
        backends, "BACKENDS", tuple(name for name in BACKENDS if name != "compiled")
    )
    monkeypatch.setattr("cs336_systems.measure.reach.COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("cs336_systems.measure.reach.MATMUL_SIZE", {"cpu": 64})
    small = {
        "batch": 1,
        "heads": 1,
        "seqlen_q": 32,
        "seqlen_k": 32,
        "head_dim": 16,
        "dtype": "float32",
    }
    monkeypatch.setattr("cs336_systems.commands.machine_facts.SHAPES", {"cpu": small})
    result = doctor("--measure", "--json")
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)["measured"]
    assert measured["copy"]["unit"] == "GB/s" and measured["copy"]["median"] > 0
    assert (
        measured["bfloat16_matmul"]["unit"] == "TFLOP/s"
        and measured["bfloat16_matmul"]["median"] > 0
    )
    assert [row["backend"] for row in measured["backends"]] == [
        "reference", "tiled", "triton_first", "triton", "hopper", "auto"
    ]  # fmt: skip
    assert measured["auto_over_fastest"] > 0
    shown = doctor("--measure").stdout
    assert "measured copy" in shown and "our back ends, causal, float32, 1 x 1 x 32 x 16" in shown
    assert "the time of the fastest" in shown


@pytest.mark.gpu
@pytest.mark.alone
def test_measured_rates_are_below_and_near_the_peak() -> None:
    from cs336_systems.device import device_peak

    peak = device_peak(get_device_info("cuda"))
    copied, multiplied = copy_rate("cuda")["median"], matmul_rate("cuda")["median"]
    assert copied > 0 and multiplied > 0
    if peak is not None:
        assert 0.5 * peak.memory_gb_per_s < copied < peak.memory_gb_per_s
        assert 0.4 * peak.bf16_tflops < multiplied < peak.bf16_tflops
