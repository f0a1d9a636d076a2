"""Memory snapshots: read without being run, refused when they are not what they say, and within bounded memory."""

from __future__ import annotations

import itertools
import os
import re
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cs336_systems.cli import app
from cs336_systems.measure import plain_pickle, snapshot
from cs336_systems.measure.plain_pickle import PlainPickleError, read_plain_pickle
from cs336_systems.measure.snapshot import read_snapshot, snapshot_trace
from tests import snapshot_files
from tests.snapshot_files import Call, event, small_snapshot, write, write_large

COVERS = ("cs336_systems/measure",)
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
        (b"\x80\x04Nq\x00q\x00.", "value 0 is remembered twice"),
        (b"\x80\x04]\x94\x94.", "a container is remembered twice"),
        (b"\x80\x04]\x94h\x00a.", "items for a container that was used before"),
        (b"\x80\x04}\x94j\x00\x00\x00\x00(K\x01K\x02u.", "items for a container that was used before"),
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
        (b"N" + b"\x94" * 400_000, "more references than one for 16 bytes"),
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


def test_what_is_compacted_once_counts_once(tmp_path, monkeypatch):
    """A container that was filled again and again lowered the count each time, so that others had no limit."""
    monkeypatch.setattr(plain_pickle, "MAX_RETAINED", 1000)
    monkeypatch.setattr(plain_pickle, "WINDOW_BYTES", 2**17)
    path = tmp_path / "x.pickle"
    path.write_bytes(b"\x80\4](" + b"}\x94" + b"h\0" * 900 + b"(K\1K\2u0" * 900 + b"]\x94" * 200_000 + b"e.")
    with pytest.raises(PlainPickleError, match="items for a container that was used before"):
        read_plain_pickle(path, compact=lambda container: 7)
    path.write_bytes(b"\x80\4](" + b"}(K\1K\2u0" * 5000 + b"N" + b"e.")
    assert read_plain_pickle(path, compact=lambda container: 7 if isinstance(container, dict) else container) == [None]


# What is kept of a snapshot


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def around(program: bytes, traces: bytes = b"]") -> bytes:
    """An empty snapshot, after `program` has read something and left the stack as it was."""
    keys = b"".join(short(key) + b"\x940" for key in ("filename", "line", "name", "f"))  # memo 0 to 3
    return b"\x80\4" + keys + program + b"}(" + short("segments") + b"]" + short("device_traces") + traces + b"u."


def different_frames(count: int, after: bytes = b"0") -> bytes:
    return b"".join(b"}(h\0h\3h\1J" + struct.pack("<i", i) + b"h\2h\3u" + after for i in range(count))


def different_stacks(count: int) -> bytes:
    stacks = itertools.islice(itertools.product(range(4, 34), repeat=3), count)
    return different_frames(30, b"\x940") + b"".join(b"](h%ch%ch%ce0" % stack for stack in stacks)


EVENT = b"}(" + short("action") + short("alloc") + short("size") + b"K\1u"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (different_frames(2000), r"byte [\d,]+: different frames and stacks of more than [\d,]+ bytes in memory"),
        (different_stacks(2000), "different frames and stacks of more than"),
        ((EVENT + b"0") * 2000, "more than 1,2.. events"),
    ],
    ids=["frames", "stacks", "events"],
)
def test_what_is_kept_is_limited_by_the_file(program, message, tmp_path, monkeypatch):
    """27 MB of different frames took 431 MB, 34 MB of different stacks 658: what became rows was not counted."""
    monkeypatch.setattr(snapshot, "MAX_TABLE_BYTES", 2**18)
    monkeypatch.setattr(snapshot, "MAX_EVENTS", 1000)
    path = tmp_path / "x.pickle"
    path.write_bytes(around(program))
    with pytest.raises(PlainPickleError, match=rf"x\.pickle: .*{message}"):
        read_snapshot(path)


@pytest.mark.parametrize("rows", [different_frames, different_stacks])
def test_the_count_is_what_frames_and_stacks_take(rows, tmp_path, monkeypatch):
    """The limit is in bytes of memory; here the bytes counted are compared with those that Python allocates."""
    monkeypatch.setattr(snapshot, "TABLE_BYTES_PER_FILE_BYTE", 0.0)
    path = tmp_path / "x.pickle"
    path.write_bytes(around(rows(20_000)))
    limit = 20_000 * 300
    monkeypatch.setattr(snapshot, "MAX_TABLE_BYTES", limit)
    tracemalloc.start()
    try:
        result = read_snapshot(path)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(result.frames) + len(result.stack_table) > 20_000 and kept <= limit
    monkeypatch.setattr(snapshot, "MAX_TABLE_BYTES", kept)  # after reading, without what growing took: counted or more
    path.write_bytes(around(rows(26_000)))
    with pytest.raises(PlainPickleError, match="different frames and stacks"):
        read_snapshot(path)


def test_a_long_path_is_kept_once(tmp_path):
    """Each allocation had a text of its own, as long as the path of the file, which may have 65,536 characters."""
    written = small_snapshot()
    frame = {"filename": "/a/" + "b" * 60_000, "line": 1, "name": "c" * 60_000}
    written["device_traces"] = [[event("alloc", 512 * i, 512, [frame]) for i in range(1, 300)]]
    trace = snapshot_trace(read_snapshot(write(tmp_path / "x.pickle", written)))
    wheres = {id(one.where): one.where for one in trace.allocations if one.where != "before"}
    assert len(wheres) == 1 and len(*wheres.values()) < 600


def deep(count: int) -> bytes:
    return b")" + b"\x85" * count


def frame_of(filename: bytes, line: bytes = b"K\1") -> bytes:
    return b"}(h\0" + filename + b"h\1" + line + b"h\2h\3u"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (frame_of(deep(20_000)) + b"0", r"a frame must have a file, a line and a name, got \{'filename': \(\(\("),
        (frame_of(b"]" * 20_000 + b"a" * 19_999) + b"0", "a frame must have a file, a line and a name, got"),
        (b"}(" + short("action") + deep(20_000) + short("size") + b"K\1u0", "an event must have an action"),
        (frame_of(b"h\3", b"\x8a\xff" + b"\x7f" * 255) + b"0", "a frame must have a file, a line and a name"),
    ],
    ids=["tuples", "lists", "event", "line"],
)
def test_a_snapshot_of_strange_values_is_refused_in_one_line(program, message, tmp_path):
    path = tmp_path / "x.pickle"
    path.write_bytes(around(program))
    refused_on_the_command_line(path, message)


@pytest.mark.parametrize("address", [[], "zz", None, -1, 2**64])
def test_a_block_at_no_address_is_refused(address, tmp_path):
    written = small_snapshot()
    written["segments"][0]["blocks"][1]["address"] = address
    refused_on_the_command_line(
        write(tmp_path / "x.pickle", written), f"a block's address is {re.escape(repr(address))}"
    )


@pytest.mark.parametrize("size", [2**64 - 1, 2**62])
def test_blocks_that_no_sum_can_hold_are_refused(size, tmp_path):
    written = small_snapshot()
    written["device_traces"][0].append(event("alloc", 2**30, size, []))
    refused_on_the_command_line(
        write(tmp_path / "x.pickle", written), "blocks of more than 4,611,686,018,427,387,904 bytes in all"
    )


def test_a_trace_of_other_things_than_events_is_refused(tmp_path):
    written = small_snapshot() | {"device_traces": [[None]]}
    refused_on_the_command_line(write(tmp_path / "x.pickle", written), "'device_traces' must be lists of events")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["device_traces"].append(s["device_traces"][0]),
            "'device_traces' must be lists of events, each once",
        ),
        (lambda s: s["segments"].append(s["segments"][0]), "segments share their blocks"),
        (lambda s: s["segments"].append({"blocks": s["segments"][0]["blocks"]}), "segments share their blocks"),
        (lambda s: s.update(x=[{"filename": "", "line": 1, "name": ""}, 1]), "list of frames must hold nothing else"),
    ],
    ids=["events", "segment", "blocks", "frames"],
)
def test_nothing_is_looked_at_again_and_again(change, message, tmp_path):
    """A hundred thousand bytes kept a processor busy for a minute, a million for hours."""
    written = small_snapshot()
    change(written)
    refused_on_the_command_line(write(tmp_path / "x.pickle", written), message)


def test_the_origin_of_a_long_stack_is_looked_for_once(tmp_path):
    written = small_snapshot()
    stack = [{"filename": "/torch/x.py", "line": line, "name": ""} for line in range(900)]
    written["device_traces"] = [[event("alloc", 512 * i, 512, stack) for i in range(1, 900)]]
    read = read_snapshot(write(tmp_path / "x.pickle", written))

    class Counted(list):
        num_items = 0

        def __getitem__(self, row):
            self.num_items += 1
            return super().__getitem__(row)

    read.stack_table, read.frames = Counted(read.stack_table), Counted(read.frames)
    trace = snapshot_trace(read)
    assert len(trace.allocations) > 890 and {one.where for one in trace.allocations} <= {"", "before"}
    assert read.stack_table.num_items <= 2 and read.frames.num_items == 900


def test_a_pipe_is_refused(tmp_path):
    """It was waited for for ever."""
    os.mkfifo(tmp_path / "x.pickle")
    refused_on_the_command_line(tmp_path / "x.pickle", "not a regular file")


def refused_on_the_command_line(path: Path, message: str) -> None:
    with pytest.raises(PlainPickleError, match=rf"x\.pickle: .*{message}"):
        read_snapshot(path)
    result = CliRunner().invoke(app, ["memory", "--snapshot", str(path)])
    lines = result.output.strip().splitlines()
    assert result.exit_code == 2 and len(lines) == 1 and lines[0].startswith("error: x.pickle: "), result.output


@pytest.mark.parametrize(
    ("name", "shown"), [("\x1b[2Ja\x1b]0;t\x07", r"\x1b[2Ja\x1b]0;t\x07"), ("\ud800", r"\ud800"), ("\u202e", r"\u202e")]
)
def test_names_in_a_snapshot_give_no_orders_to_a_terminal(name, shown, tmp_path):
    written = small_snapshot()
    written["device_traces"][0][-1]["frames"] = [{"filename": f"/p/{name}.py", "line": 1, "name": name}]
    result = CliRunner().invoke(app, ["memory", "--snapshot", str(write(tmp_path / "x.pickle", written))])
    assert result.exit_code == 0, result.output
    assert f"{shown}.py:1 {shown}" in result.output and name not in result.output


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
from cs336_systems.measure.snapshot import read_snapshot, snapshot_trace
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


def check_a_real_snapshot(path: Path) -> None:
    from cs336_systems.measure.snapshot import CudaHistory

    before = torch.cuda.memory_allocated()
    kept = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    kept_bytes = torch.cuda.memory_allocated() - before
    assert 3 * 2**20 <= kept_bytes <= 4 * 2**20
    with CudaHistory(path) as history:
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


@pytest.mark.gpu
def test_a_real_snapshot_gives_the_allocators_own_peak(tmp_path):
    """In a process of its own: of a block that earlier tests have left, the allocator counts also what it cannot split
    off, and the history only what was asked for."""
    path = str(tmp_path / "x.pickle")
    code = f"from tests.test_snapshot import Path, check_a_real_snapshot; check_a_real_snapshot(Path({path!r}))"
    checked = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stderr
