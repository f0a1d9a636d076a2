"""Memory snapshots: read without being run (S1), and refused when they are not what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cs336_systems.measure.snapshot import CudaHistory, read_snapshot
from tests.command_line import assert_refused, invoke
from tests.snapshot_files import Call, small_snapshot, write

COVERS = ("cs336_systems/measure",)
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", ["system", "a name alone"])
def test_s1_a_hostile_snapshot_is_refused_and_nothing_runs(name, protocol, tmp_path):
    """PyTorch's own viewers unpickle: opening a stranger's snapshot there runs whatever it asks
    for.
    """
    planted = tmp_path / "planted"
    asked = Call(os.system, f"touch {planted}") if name == "system" else os.system
    path = write(tmp_path / "x.pickle", small_snapshot() | {"zz": asked}, protocol)
    refused_on_the_command_line(
        path, r"it asks for posix\.system, and a snapshot is plain data: refused, nothing was"
    )
    assert not planted.exists()


def refused_on_the_command_line(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=rf"x\.pickle: .*{message}"):
        read_snapshot(path)
    assert_refused(invoke("memory", "--snapshot", path), "error: x.pickle: ")


def changed(*place: object, value: object) -> dict:
    """A small snapshot with something else at `place`."""
    written = small_snapshot()
    inner = written
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return written


FRAME = ("device_traces", 0, 0, "frames", 0)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"no pickle", b"cos\nsystem\n(S'ls'\ntR.", b"\x80\x04(i__main__\nX\n.", b"\x80\x04)\x81.", b"\x80\x04NQ.",
        b"\x80\x04\x82\x01.", b"\x80\x04\x8c\x09short", b"\x80\x04X\xff\xff\xff\x7f", b"\x80\x04]\x94h\x00a.",
        b"\x80\x04\x8e" + (2**60).to_bytes(8, "little"),
        [1], {"segments": []},
        changed("segments", 0, "blocks", 1, "address", value="zz"),
        *(changed("segments", 0, "blocks", value=value) for value in (3, [None], [{"size": 1}])),
        *(changed("device_traces", value=value) for value in ({"a": 1}, [[None]])),
        changed("device_traces", 0, 0, "size", value="big"),
        *(changed(*FRAME, value=value) for value in (None, {"filename": 1, "line": 1, "name": ""})),
        changed("device_traces", 0, 0, "frames", 1, "line", value="x"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_pickle_of_a_snapshot_is_refused(content, tmp_path):
    refused_on_the_command_line(write(tmp_path / "x.pickle", content), r"no memory snapshot: \S")


def test_a_pipe_is_refused(tmp_path):
    """It was waited for for ever."""
    os.mkfifo(tmp_path / "x.pickle")
    refused_on_the_command_line(tmp_path / "x.pickle", "not a regular file")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[2Ja\x1b]0;t\x07", r"\x1b[2Ja\x1b]0;t\x07"),
        ("\ud800", r"\ud800"),
        ("\u202e", r"\u202e"),
    ],
)
def test_names_in_a_snapshot_give_no_orders_to_a_terminal(name, shown, tmp_path):
    written = changed(
        "device_traces",
        0,
        -1,
        "frames",
        value=[{"filename": f"/p/{name}.py", "line": 1, "name": name}],
    )
    result = invoke("memory", "--snapshot", write(tmp_path / "x.pickle", written))
    assert result.exit_code == 0, result.output
    assert f"{shown}.py:1 {shown}" in result.output and name not in result.output


def test_events_become_allocations_with_their_lives_and_origins(tmp_path):
    trace = read_snapshot(write(tmp_path / "x.pickle", small_snapshot()))
    found = sorted((one.num_bytes, one.born, one.died, one.where) for one in trace.allocations)
    line = "project/model.py:42 forward"  # the innermost frame is PyTorch's
    expected = [
        (512, 3, None, ""), (1024, 1, 4, line), (2048, 0, 2, "before"), (3072, 0, None, "before"),
        (4096, 5, None, line),
    ]  # fmt: skip
    assert found == expected and trace.num_events == 6
    assert trace.active_bytes().tolist() == [5120, 6144, 4096, 4608, 3584, 7680]


def on_gpu(number: int) -> dict:
    """What the process of rank `number` writes: nothing on the GPUs before its own."""
    written = small_snapshot()
    written["device_traces"] = [[] for _ in range(number)] + written["device_traces"]
    written["segments"][0]["device"] = number
    return written


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_snapshot_of_any_rank_shows_its_memory(number, tmp_path):
    """Every rank but the first was 0.00 GiB: only GPU 0 was read."""
    expected = read_snapshot(write(tmp_path / "x.pickle", small_snapshot()))
    path = write(tmp_path / "y.pickle", on_gpu(number))
    trace = read_snapshot(path)
    assert (
        trace.active_bytes().tolist() == expected.active_bytes().tolist()
        and trace.peak_bytes() == 7680
    )
    shown = invoke("memory", "--snapshot", path)
    assert shown.exit_code == 0 and (f"recorded on GPU {number} of {number}" in shown.output) == (
        number > 0
    )


def test_of_several_gpus_the_fullest_is_shown_and_all_are_named(tmp_path):
    written = small_snapshot()
    more = on_gpu(1)
    more["segments"][0]["blocks"][3]["size"] = 2**30
    written["device_traces"] += more["device_traces"][1:]
    written["segments"] += more["segments"]
    trace = read_snapshot(write(tmp_path / "x.pickle", written))
    assert trace.peak_bytes() == 7680 - 3072 + 2**30
    assert [phase.name for phase in trace.phases] == ["recorded on GPU 1 of 0, 1"]
    written["segments"][1]["device"] = 2**40
    refused_on_the_command_line(
        write(tmp_path / "x.pickle", written), "GPUs must be numbered from 0 to 127, got 0 to"
    )


def test_a_trace_without_its_beginning_still_adds_up(tmp_path):
    """Recording drops its oldest events when its buffer is full; blocks they made are known by
    their release only.
    """
    snapshot = small_snapshot()
    del snapshot["device_traces"][0][0]
    trace = read_snapshot(write(tmp_path / "x.pickle", snapshot))
    assert trace.active_bytes().tolist()[0] == 2048 + 3072 + 1024
    assert trace.active_bytes().tolist()[-1] == 512 + 4096 + 3072


def check_a_real_snapshot(path: Path) -> None:
    before = torch.cuda.memory_allocated()
    kept = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    kept_bytes = torch.cuda.memory_allocated() - before
    assert 3 * 2**20 <= kept_bytes <= 4 * 2**20
    with CudaHistory() as history:
        history.phase("start")
        history.assign([kept], "parameters")
        history.phase("forward")
        before = torch.cuda.memory_allocated()
        result = torch.empty(8 * 2**20, dtype=torch.uint8, device="cuda")
        temporary = torch.empty(5 * 2**20, dtype=torch.uint8, device="cuda")
        del temporary
        history.phase("backward")
        gradient = torch.empty(2 * 2**20, dtype=torch.uint8, device="cuda")
        history.assign([gradient], "gradients")
        history.phase("optimizer step")
        del result
        history.end_phase()
        peak = max(history.peaks.values())
        trace = history.trace()
        torch.cuda.memory._dump_snapshot(str(path))
    assert trace.peak_bytes() == peak and trace.phase_peaks() == history.peaks
    assert history.peaks["forward"] == before + 13 * 2**20
    assert trace.breakdown(trace.num_events - 1)["gradients"] == 2 * 2**20
    assert trace.breakdown(0)["parameters"] == kept_bytes
    sizes = {one.num_bytes: one.category for one in trace.allocations}
    assert sizes[8 * 2**20] == "activations" and sizes[5 * 2**20] == "temporaries"
    assert any("test_snapshot.py" in one.where for one in trace.allocations)
    assert read_snapshot(path).peak_bytes() == peak, "of PyTorch's own file"


@pytest.mark.gpu
def test_a_real_snapshot_gives_the_allocators_own_peak(tmp_path):
    """In a process of its own: of a block that earlier tests have left, the allocator counts also
    what it cannot split off, and the history only what was asked for.
    """
    path = str(tmp_path / "x.pickle")
    code = f"from tests.test_snapshot import Path, check_a_real_snapshot; check_a_real_snapshot(Path({path!r}))"
    checked = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert checked.returncode == 0, checked.stderr
