"""Memory snapshots: read without being run, refused when they are not what they say, and within bounded memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cs336_systems.profiling import plain_pickle
from cs336_systems.profiling.plain_pickle import PlainPickleError, read_plain_pickle
from cs336_systems.profiling.snapshot import read_snapshot, snapshot_trace
from tests import snapshot_files
from tests.snapshot_files import Call, event, small_snapshot, write, write_large

COVERS = ("cs336_systems/profiling",)
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_comes_back_whatever_the_protocol(protocol, tmp_path):
    shared = ["once", -1, 2**40, -(2**70), 0.5, None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    value = {"a": shared, "b": [shared, {"ä": "\ud800"}], 3: {}, "long": "x" * 300, "many": list(range(2500))}
    assert read_plain_pickle(write(tmp_path / "x.pickle", value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_hostile_snapshot_is_refused_and_nothing_runs(protocol, tmp_path):
    """PyTorch's own viewers unpickle: opening a stranger's snapshot there runs whatever it asks for."""
    planted = tmp_path / "planted"
    hostile = small_snapshot() | {"zz": Call(os.system, f"touch {planted}")}
    path = write(tmp_path / "hostile.pickle", hostile, protocol)
    with pytest.raises(
        PlainPickleError, match=r"hostile\.pickle: byte [\d,]+: (STACK_)?GLOBAL \(import a name\) is not"
    ):
        read_snapshot(path)
    assert not planted.exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"cos\nsystem\n.", "does not begin as a pickle"),
        (b"\x80\x04cos\nsystem\n(S'ls'\ntR.", "GLOBAL"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "STACK_GLOBAL"),
        (b"\x80\x04(i__main__\nX\n.", "INST"),
        (b"\x80\x04)\x81.", "NEWOBJ"),
        (b"\x80\x04}b.", "BUILD"),
        (b"\x80\x04NQ.", "BINPERSID"),
        (b"\x80\x04\x82\x01.", "EXT1"),
        (b"\x80\x04I1\n.", "unknown instruction"),
        (b"\x80\x09N.", "protocol 9, not one of 2, 3, 4, 5"),
        (b"\x80\x04", "ends in the middle"),
        (b"\x80\x04\x8c\x09short", "ends in the middle"),
        (b"\x80\x04.", "stack is empty"),
        (b"\x80\x04N(0.", "stack is empty"),
        (b"\x80\x04Ne.", "items without a mark"),
        (b"\x80\x04(Na.", "items for a list that is not there"),
        (b"\x80\x04}(K\x01u.", "a dict's key without its value"),
        (b"\x80\x04}NNs.", "a dict's key is neither a string nor an int"),
        (b"\x80\x04\x94.", "nothing to remember"),
        (b"\x80\x04h\x05.", "value 5 is used before it is there"),
        (b"\x80\x04Nq\x05.", "value 5 is remembered before value 0"),
        (b"\x80\x04X\xff\xff\xff\x7f", "a string of 2,147,483,647 bytes, more than 65,536"),
        (b"\x80\x04X\x01\x00\x00\x00\xff.", "not UTF-8"),
        (b"\x80\x04" + b"(" * 100, "nested more than 64 deep"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_plain_pickle_is_refused(program, message, tmp_path):
    path = tmp_path / "x.pickle"
    path.write_bytes(program)
    with pytest.raises(PlainPickleError, match=rf"x\.pickle: byte [\d,]+: .*{message}"):
        read_plain_pickle(path)


def test_limits_of_size_are_kept(tmp_path, monkeypatch):
    path = write(tmp_path / "x.pickle", [[] for _ in range(3000)])
    with pytest.raises(PlainPickleError, match=r"more than the 100 that are read"):
        read_plain_pickle(path, max_bytes=100)
    monkeypatch.setattr(plain_pickle, "MAX_RETAINED", 1000)
    monkeypatch.setattr(plain_pickle, "WINDOW_BYTES", 2**17)
    path.write_bytes(path.read_bytes()[:-1] + b"]0" * 200_000 + b".")
    with pytest.raises(PlainPickleError, match="more than 1,000 values to keep"):
        read_plain_pickle(path)


def in_batches(item: bytes, count: int) -> bytes:
    """A list of `count` thousand times `item`, as a pickler writes a long list."""
    return b"]" + (b"(" + item * 1000 + b"e") * count


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"](" + b"N" * 400_000 + b"e", "more than 1,000 values to keep"),
        (in_batches(b"J\1\2\3\4", 100), "more than 1,000 values to keep"),
        (in_batches(b"G\1\2\3\4\5\6\7\10", 100), "more than 1,000 values to keep"),
        (b"]" + b"(" + (b"(" + b"J\1\2\3\4" * 900 + b"t") * 100 + b"e", "more than 1,000 values to keep"),
        (b"]" + b"\x94" * 400_000, "more references than one for 16 bytes"),
        (b"}\x940" + in_batches(b"h\0", 200), "more references than one for 16 bytes"),
        (in_batches(b"X\4\0\0\0\xf0\x9f\x98\x80", 100), "more references than one for 16 bytes"),
        (
            b"](" + b"".join(b"X\0\x60\0\0%05d" % i + b"a" * 24_567 + b"\xf0\x9f\x98\x80" for i in range(30)),
            "more than 65,536 bytes of different strings",
        ),
    ],
    ids=["stack", "ints", "floats", "tuples", "memo", "recalled", "repeated string", "wide strings"],
)
def test_a_file_that_is_larger_in_memory_is_refused(program, message, tmp_path, monkeypatch):
    """128 MiB of None filled 3 GiB: only containers and strings were counted."""
    monkeypatch.setattr(plain_pickle, "MAX_RETAINED", 1000)
    monkeypatch.setattr(plain_pickle, "WINDOW_BYTES", 2**17)
    monkeypatch.setattr(plain_pickle, "MAX_TEXT_BYTES", 2**16)
    path = tmp_path / "x.pickle"
    path.write_bytes(b"\x80\4" + program + b".")
    with pytest.raises(PlainPickleError, match=message):
        read_plain_pickle(path)


def test_a_long_integer_is_refused(tmp_path):
    path = tmp_path / "x.pickle"
    path.write_bytes(b"\x80\x04\x8b\xff\xff\xff\x7f")
    with pytest.raises(PlainPickleError, match="unknown instruction"):
        read_plain_pickle(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "no memory snapshot: it has no 'segments' and 'device_traces'"),
        ({"segments": []}, "no memory snapshot: it has no"),
        ({"segments": [{"blocks": [{"size": "big"}]}], "device_traces": []}, "a segment's blocks have no sizes"),
        ({"segments": [], "device_traces": [], "x": [event("alloc", 1, 1, [])]}, "events outside of 'device_traces'"),
        ({"segments": [], "device_traces": [[{"action": 1, "size": 1}]]}, "an event must have an action"),
        ({"segments": [], "device_traces": [[event("alloc", 1, -1, [])]]}, "an event must have an action"),
        ({"f": {"filename": 1, "line": 1, "name": ""}}, "a frame must have a file, a line and a name"),
    ],
)
def test_a_pickle_that_is_no_snapshot_is_refused(value, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_snapshot(write(tmp_path / "x.pickle", value))


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"device must be one of the 1 in x\.pickle, got 1"):
        read_snapshot(write(tmp_path / "x.pickle", small_snapshot()), device=1)


def test_events_become_allocations_with_their_lives_and_origins(tmp_path):
    trace = snapshot_trace(read_snapshot(write(tmp_path / "x.pickle", small_snapshot())))
    found = sorted((one.num_bytes, one.born, one.died, one.where) for one in trace.allocations)
    line = "project/model.py:42 forward"  # the innermost frame is PyTorch's
    expected = [
        (512, 3, None, ""), (1024, 1, 4, line), (2048, 0, 2, "before"), (3072, 0, None, "before"),
        (4096, 5, None, line),
    ]  # fmt: skip
    assert found == expected and trace.num_events == 6
    assert trace.active_bytes().tolist() == [5120, 6144, 4096, 4608, 3584, 7680]


def test_a_trace_without_its_beginning_still_adds_up(tmp_path):
    """Recording drops its oldest events when its buffer is full; blocks they made are known by their release only."""
    snapshot = small_snapshot()
    del snapshot["device_traces"][0][0]
    trace = snapshot_trace(read_snapshot(write(tmp_path / "x.pickle", snapshot)))
    assert trace.active_bytes().tolist()[0] == 2048 + 3072 + 1024
    assert trace.active_bytes().tolist()[-1] == 512 + 4096 + 3072


MEASURE = """
import resource, sys
from pathlib import Path
from cs336_systems.profiling.snapshot import read_snapshot, snapshot_trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
snapshot = read_snapshot(Path(sys.argv[1]))
print(len(snapshot.actions), len(snapshot.stack_table), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_reading_takes_less_than_twice_the_file(tmp_path):
    """The bound of a 1-GiB snapshot, on one small enough for every day: what is kept grows with the file."""
    path = write_large(tmp_path / "large.pickle", 90_000)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True, timeout=300,
        env=environment,
    ).stdout  # fmt: skip
    num_events, num_stacks, grown_kib = map(int, output.split())
    assert (num_events, num_stacks) == (90_000, 50 + 2), "no frames, and the file's list of all of them"
    assert path.stat().st_size > 16 * 2**20
    assert grown_kib * 1024 < path.stat().st_size, "the window and the columns, not the objects"


def test_the_hand_written_snapshot_is_what_the_standard_pickler_writes(tmp_path):
    """The large file is written by hand; here a small one is compared with what it should hold."""
    loaded = read_plain_pickle(write_large(tmp_path / "x.pickle", 1002, frames_an_event=2))
    (trace,) = loaded["device_traces"]
    assert len(trace) == 1002 and trace[1001]["action"] == "free_requested"
    assert trace[3] == {**trace[2], "action": "free_requested", "time_us": trace[2]["time_us"] + 1}
    assert set(trace[0]["frames"][0]) == {"filename", "line", "name"}
    again = read_plain_pickle(write(tmp_path / "y.pickle", loaded))
    assert again == loaded and tuple(trace[0]) == snapshot_files.KEYS


@pytest.mark.parametrize("how", ["pickle", "checkpoint"])
def test_a_hostile_checkpoint_is_refused(how, tmp_path):
    """torch.load with weights_only, the only way that the layout test allows, runs nothing."""
    planted = tmp_path / "planted"
    hostile = {"weight": Call(os.system, f"touch {planted}")}
    path = tmp_path / "hostile.pt"
    if how == "pickle":
        write(path, hostile, protocol=2)
    else:
        torch.save(hostile, path)
    with pytest.raises(Exception, match="(?i)weights.only"):
        torch.load(path, weights_only=True)
    assert not planted.exists()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_real_snapshot_gives_the_allocators_own_peak(tmp_path):
    from cs336_systems.profiling.snapshot import CudaHistory

    gc.collect()
    torch.cuda.empty_cache()  # a block that an earlier test has left may be too small to split, and so too large
    before = torch.cuda.memory_allocated()
    kept = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    kept_bytes = torch.cuda.memory_allocated() - before
    assert 3 * 2**20 <= kept_bytes <= 4 * 2**20
    with CudaHistory(tmp_path / "x.pickle") as history:
        history.phase("start")
        history.assign([kept], "parameters")
        history.phase("forward")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = torch.empty(8 * 2**20, dtype=torch.uint8, device="cuda")
        temporary = torch.empty(5 * 2**20, dtype=torch.uint8, device="cuda")
        del temporary
        history.phase("backward")
        gradient = torch.empty(2 * 2**20, dtype=torch.uint8, device="cuda")
        history.assign([gradient], "gradients")
        history.phase("optimizer step")
        del result
        peak = torch.cuda.max_memory_allocated()
        history.dump()
        trace = history.trace(read_snapshot(history.path))
    assert trace.peak_bytes() == peak and trace.phase_peaks()["forward"] == before + 13 * 2**20
    assert trace.breakdown(trace.num_events - 1)["gradients"] == 2 * 2**20
    assert trace.breakdown(0)["parameters"] == kept_bytes
    sizes = {one.num_bytes: one.category for one in trace.allocations}
    assert sizes[8 * 2**20] == "activations" and sizes[5 * 2**20] == "temporaries"
    assert any("test_snapshot.py" in one.where for one in trace.allocations)
