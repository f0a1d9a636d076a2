"""`attention_shapes`: what it measures and how it is timed."""

from dataclasses import replace
from functools import partial

import pytest

from cs336_systems.attention import flash_attention
from cs336_systems.attention.contract import compute_oracle
from cs336_systems.config import RunConfig
from cs336_systems.experiments import attention
from cs336_systems.experiments.attention import KEPT_SAMPLES, measure_attention
from cs336_systems.experiments.implementations import Built
from cs336_systems.experiments.registry import PROBLEMS
from cs336_systems.inputs import attention_inputs

# Measuring


def test_a_fast_row_keeps_few_samples_unless_a_number_was_asked_for():
    run = RunConfig(scale="tiny", device="cpu")
    cell = next(cell for cell in PROBLEMS["leaderboard_2025"].cells(run) if cell.implementation == "sdpa_flash")
    kept = {len(measurement.samples) for measurement in measure_attention(cell, run)}
    assert max(kept) <= KEPT_SAMPLES
    asked = {len(measurement.samples) for measurement in measure_attention(cell, run, num_samples=KEPT_SAMPLES + 1)}
    assert asked == {KEPT_SAMPLES + 1}


@pytest.mark.parametrize(("device", "settled"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_what_settles_a_clock_is_the_pass_that_is_timed_next(device, settled, monkeypatch):
    """A CPU stands in for the GPU, with nothing but its name; a CPU itself settles nothing."""
    run = RunConfig(scale="tiny", device="cpu")
    cell = next(cell for cell in PROBLEMS["leaderboard_2025"].cells(run) if cell.implementation == "sdpa_flash")
    cell = replace(cell, rows=(attention.FORWARD, attention.BACKWARD, attention.BOTH))
    inputs = attention_inputs(cell.case, device="cpu")
    oracle = compute_oracle(*inputs, is_causal=cell.case.is_causal)
    ran: list[tuple[str, object]] = []
    monkeypatch.setattr(attention, "inputs_of", lambda *_: inputs)
    monkeypatch.setattr(attention, "oracle_of", lambda *_: oracle)
    monkeypatch.setattr(attention, "release", lambda device: None)
    monkeypatch.setattr(attention, "time_once", lambda call, device: (call(), 1.0)[1])
    monkeypatch.setattr(attention, "settle", lambda call: ran.append(("settle", call)))
    monkeypatch.setattr(attention, "time_calls", lambda call, **_: ran.append(("time", call)) or [1.0])
    built = Built(attend=partial(flash_attention, is_causal=cell.case.is_causal, enable_gqa=True, backend="reference"))
    assert len(list(measure_attention(cell, replace(run, device=device), settled=settled, built=built))) == 3
    settles = settled and device == "cuda"
    assert [kind for kind, _ in ran] == (["settle", "time"] * 3 if settles else ["time"] * 3)
    timed = [call for kind, call in ran if kind == "time"]
    assert [call for kind, call in ran if kind == "settle"] == (timed if settles else [])
