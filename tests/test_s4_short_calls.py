"""`short_calls`: who takes turns, what a turn tells apart, and what the report makes of the rounds."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from cs336_systems.config import RunConfig
from cs336_systems.experiments import s4_short_calls
from cs336_systems.experiments.harness import Provenance, Sweep
from cs336_systems.experiments.registry import PROBLEMS
from cs336_systems.experiments.s4_short_calls import (
    CALL_IMPLEMENTATIONS,
    CALLS,
    GRAPH_SAMPLES,
    ROUNDS,
    ROWS,
    graph_times,
    turns,
)
from cs336_systems.experiments.turns import Player, play
from cs336_systems.measure.samples import summarize
from cs336_systems.measure.timing import time_calls
from cs336_systems.report.answers import answer
from cs336_systems.report.figures import draw
from cs336_systems.report.frames import load_frame
from cs336_systems.report.plots import plots
from cs336_systems.report.tables import sections
from tests.shape_records import short_call_records

COVERS = (
    "cs336_systems/experiments/s4_short_calls.py",
    "cs336_systems/experiments/turns.py",
    "cs336_systems/measure/timing.py",
)
TINY = RunConfig(scale="tiny", device="cpu")
PROBLEM = PROBLEMS["short_calls"]


def tiny_cell():
    (cell,) = PROBLEM.cells(TINY)
    return cell


# Cells


def test_a_cell_has_the_rows_of_all_and_the_machine_for_itself():
    for cell in PROBLEM.cells(RunConfig(scale="handout", device="cuda")):
        assert cell.alone and cell.implementations == CALL_IMPLEMENTATIONS
        for name in CALL_IMPLEMENTATIONS:
            rows = {(row.mode, row.quantity) for row in cell.rows if row.implementation == name}
            assert rows == {
                (mode, quantity)
                for mode in ("forward", "forward_backward")
                for quantity in ("time", "host_time", "graph_time")
            }


def test_a_cpu_has_no_host_to_tell_apart():
    assert {row.quantity for row in tiny_cell().rows} == {"time"}


@pytest.mark.parametrize("wanted", ["sdpa_flash", "eager"])
def test_a_cell_is_measured_for_any_of_its_implementations(wanted, tmp_path):
    sweep = Sweep(TINY, tmp_path, Provenance(commit="c0ffee", dirty=False), implementations=[wanted])
    pending, _ = sweep.pending("short_calls")
    assert len(pending) == (wanted in CALL_IMPLEMENTATIONS)


# Measuring


def test_records_are_the_implementations_own(tmp_path):
    """Those that a machine lacks say why, and the cell is finished with them."""
    sweep = Sweep(TINY, tmp_path, Provenance(commit="c0ffee", dirty=False), interpret=True)
    pending, _ = sweep.pending("short_calls")
    (records,) = sweep.measure(pending)
    found = {(record.implementation, record.mode): record for record in records}
    assert len(found) == len(records) == len(CALL_IMPLEMENTATIONS) * len(ROWS["cpu"])
    for mode in ("forward", "forward_backward"):
        for name in ("triton", "sdpa_flash"):
            record = found[name, mode]
            assert record.status == "ok" and len(record.samples) == ROUNDS["cpu"] and record.error <= 1
        assert found["hopper", mode].status == found["sdpa_cudnn", mode].status == "skipped"
        assert "CUDA" in found["sdpa_cudnn", mode].message
    assert found["triton", "forward"].kernel.startswith("interpreter ") and not found["sdpa_flash", "forward"].kernel
    assert sweep.pending("short_calls") == ([], {"partly skipped": 1})


def test_the_host_is_free_before_the_device_is_done(monkeypatch):
    """Milliseconds a call, of which waiting for the device is no part of the host's; the first call is not timed."""
    monkeypatch.setitem(CALLS, "cpu", 4)
    monkeypatch.setattr(s4_short_calls, "synchronize", lambda device: time.sleep(0.02))
    called: list[str] = []

    def call(attend) -> None:
        called.append(attend)
        time.sleep(0.001)

    made = turns("attend", {"forward": call}, "cpu")
    samples = play([Player(name="a", kernel="", error=0.0, turns=made)], 2)
    assert called == ["attend"] * (2 + 1) * (1 + 4)
    for host, whole in zip(samples["a", "forward", "host_time"], samples["a", "forward", "time"], strict=True):
        assert 1 <= host < whole - 4.9


@pytest.mark.gpu
@pytest.mark.alone
def test_a_replayed_call_takes_its_kernels_time_and_no_launch():
    cycles_per_ms = 2 * 10**8 / max(time_calls(lambda: torch.cuda._sleep(2 * 10**8), device="cuda", num_samples=3))
    samples = graph_times(lambda: torch.cuda._sleep(int(0.1 * cycles_per_ms)))
    assert len(samples) == GRAPH_SAMPLES
    assert summarize(samples).median == pytest.approx(0.1, rel=0.1)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_turn_on_a_gpu_tells_host_whole_and_graph_apart():
    """A kernel of a millisecond keeps the host for a few microseconds; a host that sleeps is no part of the graph."""
    run = RunConfig(scale="tiny", device="cuda")
    cell = replace(PROBLEM.cells(run)[0], case=replace(tiny_cell().case, dtype="bfloat16"))
    found = {
        (measurement.row.implementation, measurement.row.mode, measurement.row.quantity): measurement
        for measurement in PROBLEM.measure(cell, run)
    }
    for name in ("triton", "sdpa_flash"):
        for mode in ("forward", "forward_backward"):
            taken = {
                quantity: found[name, mode, quantity].samples for quantity in ("host_time", "time", "graph_time")
            }
            assert {len(samples) for samples in taken.values()} == {ROUNDS["cuda"]}
            assert all(host <= whole for host, whole in zip(taken["host_time"], taken["time"]))
            assert summarize(taken["graph_time"]).median < summarize(taken["time"]).median


# Report


def lines_of(name: str, records) -> dict[tuple[str, str], list[str]]:
    body = next(section.body for section in sections("short_calls", load_frame(records)) if section.name == name)
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in body.splitlines() if "|" in line]
    return {(line[0], line[1]): line[2:] for line in lines}


SHAPE = "1 × 16 × 512 × 64 causal"


def test_a_ratio_is_of_the_middle_round_and_not_of_medians():
    """In two of three rounds ours takes twice as long; its median is that of cuDNN all the same."""
    records = short_call_records()
    lines = lines_of("time", records)
    header = lines["batch × heads × S × d", "mode"]
    assert header[:3] == ["triton", "sdpa_flash", "sdpa_cudnn"]
    line = dict(zip(header, lines[SHAPE, "forward"]))
    assert line["triton"] == line["sdpa_cudnn"] == "40.00"
    assert line["triton over sdpa_cudnn"] == "2.00× (1.25–2.00)"


def test_every_quantity_has_a_table_a_figure_and_a_sentence():
    frame = load_frame(short_call_records())
    assert [section.name for section in sections("short_calls", frame)] == ["time", "host_time", "graph_time"]
    assert [plot.name for plot in plots("short_calls", frame)] == ["time", "host_time", "graph_time"]
    said = answer("short_calls", frame)
    assert f"triton, forward, called in a row, takes 2.00× ({SHAPE}) as long as sdpa_cudnn's and 1.00×" in said
    assert "forward + backward, keeps the host for " in said and "replayed CUDA graph" in said


def test_a_figure_shows_ratios_to_cudnn_and_not_cudnn():
    plot = plots("short_calls", load_frame(short_call_records()))[0]
    assert set(plot.data["series"]) == {"triton", "sdpa_flash"} and plot.line_at == 1
    row = plot.data[(plot.data["series"] == "triton") & (plot.data["panel"] == "forward")].iloc[0]
    assert (row["y"], row["low"], row["high"]) == (2.0, 1.25, 2.0) and row["drawn"]


def test_without_cudnn_there_is_no_figure():
    """All its bars are ratios to cuDNN's time: where that was skipped an empty figure was drawn."""
    why = "sdpa_cudnn needs CUDA"
    records = [
        replace(record, samples=[], status="skipped", message=why) if record.implementation == "sdpa_cudnn" else record
        for record in short_call_records()
    ]
    assert plots("short_calls", load_frame(records)) == []


def test_turns_of_two_runs_are_not_divided():
    records = [
        replace(record, date="2026-01-03T03:04:05+00:00") if record.implementation == "triton" else record
        for record in short_call_records()
    ]
    lines = lines_of("time", records)
    line = dict(zip(lines["batch × heads × S × d", "mode"], lines[SHAPE, "forward"]))
    assert line["triton"] == "40.00" and line["triton over sdpa_cudnn"] == "–"
    assert "triton" not in answer("short_calls", load_frame(records))


def test_interpreted_turns_are_not_divided():
    records = [
        replace(record, kernel="interpreter tiles") if record.implementation == "triton" else record
        for record in short_call_records()
    ]
    assert answer("short_calls", load_frame(records)) == ""
    assert not any(" over " in column for column in lines_of("time", records)["batch × heads × S × d", "mode"])


def test_what_did_not_run_says_so():
    records = [
        replace(record, samples=[], status="failed", message="no") if record.implementation == "triton" else record
        for record in short_call_records()
    ]
    line = lines_of("time", records)[SHAPE, "forward"]
    assert line[0] == "failed [1]" and line[-1] == "–"
    assert answer("short_calls", load_frame(records)) == ""


def test_upright_numbers_stand_clear_of_their_whiskers():
    """They began at the cap of the whisker, on which the first digit stood."""
    records = short_call_records()
    records = [replace(record, case={**record.case, "heads": heads}) for record in records for heads in range(1, 13)]
    figure = draw(plots("short_calls", load_frame(records))[0])
    figure.canvas.draw()
    for axes in figure.axes:
        tops = [bars.lines[1][1].get_window_extent().y1 for bars in axes.containers if hasattr(bars, "has_yerr")]
        numbers = [text for text in axes.texts if text.get_rotation() == 90]
        assert len(numbers) == len(tops) == 12 * 2
        assert all(number.get_window_extent().y0 > top for number, top in zip(numbers, tops))
