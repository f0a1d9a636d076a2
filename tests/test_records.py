"""Records: what may be written, what survives a killed run, which rows a later one replaces, and
what was published.
"""

import json
import math
import os
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
from msgspec.structs import replace

from cs336_systems.bench.records import (
    Record,
    Run,
    append_records,
    case_key,
    case_to_dict,
    latest,
    read_records,
    read_runs,
)
from cs336_systems.config import AttentionShape

ROOT = Path(__file__).resolve().parent.parent
SHAPE = AttentionShape(
    batch=1, heads=1, seqlen_q=8, seqlen_k=8, head_dim=16, is_causal=True, dtype="float32"
)
RUN = Run(
    id="20260102T030405-01234567", scale="tiny", device={"name": "a processor", "kind": "cpu"},
    software={"python": "3.11.7"}, commit="0123456789ab", dirty=False, date="2026-01-02T03:04:05Z",
)  # fmt: skip


def record(**changes) -> Record:
    """A record that may be written, with `changes` of it or of its run."""
    of_run = {
        name: changes.pop(name)
        for name in ("commit", "dirty", "device", "software")
        if name in changes
    }
    valid = Record(
        run=replace(changes.pop("run", RUN), **of_run),
        problem="flash_benchmarking",
        case=case_to_dict(SHAPE),
        implementation="tiled",
        mode="forward",
        quantity="time",
        unit="ms",
        status="ok",
        samples=[1.5, 1.25],
    )
    return replace(valid, **changes)


GPU_RUN = replace(RUN, device={"name": "a GPU", "kind": "cuda"}, scale="handout")


def gpu_record(
    problem: str, case: Any, implementation: str, samples: list[float], **changes: Any
) -> Record:
    """A record of a handout run on a GPU; `case` is a dataclass, or what a record holds of one."""
    of_case = case if isinstance(case, dict) else case_to_dict(case)
    values = {"run": GPU_RUN, "problem": problem, "case": of_case, "implementation": implementation}
    return record(**values | {"samples": samples} | changes)


def broken(of: Record, status: str = "oom", message: str = "CUDA out of memory") -> Record:
    return replace(of, samples=[], status=status, message=message)


def test_case_holds_its_class_name():
    assert case_to_dict(SHAPE) == {"type": "AttentionShape", **asdict(SHAPE)}
    with pytest.raises(TypeError, match="case must be a dataclass instance, got dict"):
        case_to_dict({"batch": 1})
    assert case_key({"a": 1, "b": 2}) == case_key({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": ""}, r"`str` of length >= 1 - at `\$.implementation`"),
        ({"problem": "../x"}, r"`str` matching regex .* - at `\$.problem`"),
        ({"case": {"batch": 1}}, "case must hold its class name"),
        ({"status": "oom"}, "samples must be there if status is ok and only then"),
        ({"samples": []}, "samples must be there if status is ok and only then, got 0"),
        ({"samples": [math.nan]}, "samples must be finite"),
        ({"error": math.inf}, "error must be finite, got inf"),
        ({"case": {"type": "A", "size": 10**400}}, "case.size must be an integer of 64 bits"),
        (
            {"case": {"type": "A", "inner": {"rate": math.nan}}},
            "case.inner.rate must be finite, got nan",
        ),
        ({"samples": [1e308] * 3}, "samples must be finite and at most 1e"),
        ({"samples": [], "status": "failed"}, "message must say why status is failed"),
        ({"samples": [], "status": "broken", "message": "why"}, "Invalid enum value 'broken'"),
        (
            {"quantity": "compute_intervals", "samples": [0.0, 1.0, 2.0]},
            "starts and ends by turns, got 3",
        ),
        ({"run": replace(RUN, commit="")}, r"`str` of length >= 1 - at `\$.run.commit`"),
    ],
)
def test_a_record_that_says_too_little_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        append_records(tmp_path / "x.jsonl", [record(), record(**changes)])
    assert not list(tmp_path.iterdir()), "nothing of the others either"


def test_records_come_back_as_written_and_pandas_reads_them_alone(tmp_path):
    path = tmp_path / "flash_benchmarking.jsonl"
    failed = record(
        implementation="flex",
        samples=[],
        status="oom",
        message="CUDA out of memory",
        kernel="k",
        seed=3,
    )
    append_records(path, [record()])
    append_records(path, [failed])
    assert read_records(path) == [record(), failed]
    assert (
        read_runs(tmp_path) == {RUN.id: RUN}
        and len((tmp_path / "runs.jsonl").read_text().splitlines()) == 1
    )
    rows, runs = (pd.read_json(file, lines=True) for file in (path, tmp_path / "runs.jsonl"))
    frame = rows.merge(runs, left_on="run", right_on="id")
    assert list(frame["samples"].map(len, na_action="ignore").fillna(0)) == [2, 0]
    assert set(frame["commit"]) == {"0123456789ab"} and list(frame["status"]) == ["ok", "oom"]


def test_a_truncated_last_line_spoils_only_itself(tmp_path):
    path = tmp_path / "x.jsonl"
    append_records(path, [record()])
    with path.open("a") as file:
        file.write('{"run": "2026')
    append_records(path, [record(implementation="triton")])
    with pytest.warns(UserWarning, match=r"x.jsonl:2: not a record, left out"):
        assert [each.implementation for each in read_records(path)] == ["tiled", "triton"]


def damaged(**changes) -> str:
    return json.dumps(msgspec.to_builtins(record()) | {"run": RUN.id} | changes)


@pytest.mark.parametrize(
    "line",
    [
        "not json", "[1, 2]", "17", "null", '{"problem": "too few keys"}', "\x00\ufffd", "[" * 5000,
        damaged(samples=[1e308] * 3), damaged().replace("1.5", "1e999"), damaged(samples=["1.5"]),
        damaged(samples=None),
        damaged(run="another"), damaged(run=None), damaged(run={"id": 1}), damaged(case=[]), damaged(case={"type": 1}),
        damaged(error="1"), damaged(case={"type": "A", "size": 10**400}), damaged(case={"type": "A", "size": 2**63}),
        damaged().replace('"batch": 1', '"batch": 1e999'), damaged(message="\ud800"), "[1" + "0" * 5000 + "]",
        damaged(case={"type": "A", "deep": json.loads('{"a":' * 40 + "1" + "}" * 40)}),
        damaged(unit=7), damaged(status="fine"), damaged(problem="a/b"), damaged(message=["x"]), damaged(seed="0"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_record_is_told_and_left_out(line, tmp_path):
    """Samples whose sum overflows once ended `report` for every problem."""
    path = tmp_path / "x.jsonl"
    append_records(path, [record()])
    with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{line}\n{line}\n{damaged(implementation='last', unknown_key=1)}\n")
    with pytest.warns(
        UserWarning, match=r"x.jsonl:2: not a record, left out .*, and 1 more lines of it"
    ) as told:
        assert [each.implementation for each in read_records(path)] == ["tiled", "last"]
    assert len(told) == 1


def test_an_editors_mark_at_the_beginning_costs_nothing(tmp_path):
    """The first run of a file with a byte-order mark was lost, and every row of that run with it."""
    path = tmp_path / "x.jsonl"
    append_records(path, [record()])
    for file in (path, tmp_path / "runs.jsonl"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_records(path) == [record()]


@pytest.mark.parametrize("runs", [None, b"", b"{}\n", b'{"id": 1}\n', b"\xff\xfe\n", b"null\n"])
def test_rows_without_their_run_are_told_and_left_out(runs, tmp_path):
    path, file = tmp_path / "x.jsonl", tmp_path / "runs.jsonl"
    append_records(path, [record()])
    file.unlink()
    if runs is not None:
        file.write_bytes(runs)
    with pytest.warns(
        UserWarning, match=f"x.jsonl:1: not a record, left out .*{RUN.id}' is not in runs.jsonl"
    ):
        assert read_records(path) == []


@pytest.mark.parametrize("device", [{}, {"name": ""}, {"name": ["a GPU"]}, {"name": None}])
def test_a_run_without_a_device_is_none(device, tmp_path):
    append_records(tmp_path / "x.jsonl", [record()])
    row = msgspec.to_builtins(RUN) | {"device": device}
    (tmp_path / "runs.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.warns(UserWarning, match="run must have a device with its name"):
        assert read_records(tmp_path / "x.jsonl") == []


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_only_a_newline_ends_a_line(separator, tmp_path):
    path = tmp_path / "x.jsonl"
    odd = record(samples=[], status="failed", message=f"a{separator}b")
    append_records(path, [odd])
    assert read_records(path) == [odd]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_not_a_regular_file_is_skipped(make, tmp_path):
    make(tmp_path / "x.jsonl")
    with pytest.warns(UserWarning, match="x.jsonl: not a regular file"):
        assert read_records(tmp_path / "x.jsonl") == []


def test_of_the_same_key_the_latest_is_kept():
    again = record(samples=[9.0])
    assert latest([record(), record(implementation="triton"), again]) == [
        again,
        record(implementation="triton"),
    ]
    for change in ("problem", "implementation", "mode", "quantity"):
        assert len(latest([record(), record(**{change: "other"})])) == 2
    assert len(latest([record(), record(case={"type": "Other"})])) == 2
    assert len(latest([record(), record(run=replace(RUN, scale="smoke"))])) == 2


APPEND = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.test_records import record, append_records
for number in range(100):
    append_records(Path(sys.argv[2]), [record(implementation=f"{sys.argv[3]}{number}")])
"""


def test_two_processes_appending_at_once_keep_every_line_whole(tmp_path):
    path = tmp_path / "x.jsonl"
    processes = [
        subprocess.Popen([sys.executable, "-c", APPEND, str(ROOT), str(path), name])
        for name in "ab"
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len({each.implementation for each in read_records(path)}) == 200


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("results/*/records/*.jsonl")), ids=lambda path: path.stem
)
def test_every_published_line_is_a_record(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = read_records(path)
    assert len(records) == (0 if path.stem == "runs" else len(path.read_text().splitlines()))
