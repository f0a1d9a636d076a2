"""Records: what may be written, what survives a killed run, and which rows a later attempt replaces."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cs336_systems.config import AttentionShape
from cs336_systems.records import Record, append_records, case_key, case_to_dict, latest, read_records, validate

ROOT = Path(__file__).resolve().parent.parent
SHAPE = AttentionShape(batch=1, heads=1, seqlen_q=8, seqlen_k=8, head_dim=16, is_causal=True, dtype="float32")


def record(**changes) -> Record:
    """A record that may be written, with `changes`."""
    valid = Record(
        problem="flash_benchmarking",
        scale="tiny",
        case=case_to_dict(SHAPE),
        implementation="tiled",
        mode="forward",
        quantity="time",
        unit="ms",
        samples=[1.5, 1.25],
        device={"name": "a processor", "kind": "cpu"},
        software={"python": "3.11.7"},
        commit="0123456789ab",
        dirty=False,
        date="2026-01-02T03:04:05Z",
    )
    return replace(valid, **changes)


def test_case_holds_its_class_name():
    assert case_to_dict(SHAPE) == {"type": "AttentionShape", **asdict(SHAPE)}


@pytest.mark.parametrize("case", [{"batch": 1}, AttentionShape], ids=["dict", "class"])
def test_case_must_be_a_dataclass_instance(case):
    with pytest.raises(TypeError, match="case must be a dataclass instance, got (dict|type)"):
        case_to_dict(case)


def test_case_key_does_not_depend_on_the_order_of_fields():
    case = case_to_dict(SHAPE)
    assert case_key(dict(reversed(case.items()))) == case_key(case)
    assert case_key({**case, "batch": 2}) != case_key(case)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[({name: ""}, rf"record\.{name} must not be empty") for name in (
            "problem", "implementation", "quantity", "unit", "commit", "date",
        )],
        ({"dirty": None}, r"record\.dirty must say whether the checkout had uncommitted changes"),
        ({"schema": 2}, r"record\.schema must be 1, got 2"),
        ({"status": "fine"}, r"record\.status must be one of ok, oom, failed, skipped, got 'fine'"),
        ({"mode": "both"}, r"record\.mode must be one of forward, backward, .*, got 'both'"),
        ({"scale": "huge"}, r"record\.scale must be one of tiny, smoke, handout, got 'huge'"),
        ({"case": {"batch": 1}}, r"record\.case must hold the class name under 'type'"),
        ({"device": {"kind": "cpu"}}, r"record\.device must have 'name'"),
        ({"device": {"name": "x", "kind": ""}}, r"record\.device must have 'kind'"),
        ({"samples": []}, r"record\.samples must not be empty when status is ok"),
        ({"samples": [1.0, float("nan")]}, r"record\.samples must be finite"),
        ({"samples": [float("inf")]}, r"record\.samples must be finite"),
        ({"status": "oom", "message": "no"}, r"record\.samples must be empty when status is oom"),
        ({"status": "skipped", "samples": []}, r"record\.message must say why status is skipped"),
    ],
)  # fmt: skip
def test_a_record_that_says_too_little_is_refused_by_field(changes, message, tmp_path):
    bad = record(**changes)
    with pytest.raises(ValueError, match=message):
        validate(bad)
    path = tmp_path / "records.jsonl"
    with pytest.raises(ValueError, match=message):
        append_records(path, [record(), bad])
    assert not path.exists()  # all of an append or nothing


def test_the_refusal_names_problem_and_implementation():
    with pytest.raises(ValueError, match=r"\(problem 'flash_benchmarking', implementation 'tiled'\)"):
        validate(record(commit=""))


@pytest.mark.parametrize("status", ["oom", "failed", "skipped"])
def test_what_could_not_be_measured_is_a_record_with_its_reason(status, tmp_path):
    path = tmp_path / "records.jsonl"
    append_records(path, [record(status=status, samples=[], message="why")])
    assert [(row.status, row.message) for row in read_records(path)] == [(status, "why")]


def test_records_come_back_as_written(tmp_path):
    path = tmp_path / "made" / "on demand" / "records.jsonl"
    written = [
        record(error=0.25, kernel="sm90_forward_128x64_w8_s3", seed=3),
        record(status="failed", samples=[], message="two\nlines, a \u2028 separator and é"),
    ]
    append_records(path, written[:1])
    append_records(path, written[1:])
    assert read_records(path) == written
    assert path.read_bytes().count(b"\n") == 2  # whatever a message holds, one record is one line


def test_nothing_to_append_writes_nothing(tmp_path):
    path = tmp_path / "records.jsonl"
    append_records(path, [record()])
    before = path.read_bytes()
    append_records(path, [])
    assert path.read_bytes() == before


def test_an_absent_file_has_no_records(tmp_path):
    assert read_records(tmp_path / "records.jsonl") == []


def test_a_truncated_last_line_spoils_only_itself(tmp_path):
    """A run killed inside a write left half a line, and the next run's first record was glued to it and lost."""
    path = tmp_path / "records.jsonl"
    append_records(path, [record(seed=1), record(seed=2)])
    path.write_bytes(path.read_bytes()[:-20])
    append_records(path, [record(seed=3)])
    with pytest.warns(UserWarning, match=r"records\.jsonl:2: not a record, skipped"):
        assert [row.seed for row in read_records(path)] == [1, 3]


def test_a_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "records.jsonl"
    append_records(path, [record(seed=1)])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    append_records(path, [record(seed=2)])
    assert [row.seed for row in read_records(path)] == [1, 2]


def test_unknown_keys_are_dropped_and_absent_ones_take_their_defaults(tmp_path):
    path = tmp_path / "records.jsonl"
    written = asdict(record())
    del written["kernel"]
    path.write_text(json.dumps({**written, "from_a_later_version": 1}) + "\n")
    assert read_records(path) == [record(kernel="")]


@pytest.mark.parametrize("line", ["not json", "[1, 2]", "17", '{"problem": "too few keys"}', "\x00\ufffd"])
def test_a_line_that_is_no_record_is_skipped_with_a_warning(line, tmp_path):
    path = tmp_path / "records.jsonl"
    append_records(path, [record(seed=1)])
    with open(path, "a") as file:
        file.write(line + "\n\n")
    append_records(path, [record(seed=2)])
    with pytest.warns(UserWarning, match=r"records\.jsonl:2: not a record, skipped \(.+\)"):
        assert [row.seed for row in read_records(path)] == [1, 2]


def test_of_the_same_key_the_latest_is_kept():
    rows = [record(samples=[1.0]), record(mode="backward"), record(samples=[2.0])]
    assert {(row.mode, *row.samples) for row in latest(rows)} == {("forward", 2.0), ("backward", 1.5, 1.25)}


@pytest.mark.parametrize(
    "change",
    [
        {"problem": "pytorch_attention"},
        {"scale": "handout"},
        {"case": case_to_dict(replace(SHAPE, seqlen_q=16))},
        {"implementation": "reference"},
        {"mode": "backward"},
        {"quantity": "peak_memory"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_records_that_measure_different_things_are_all_kept(change):
    assert len(latest([record(), record(**change)])) == 2


def test_a_quantity_measured_again_replaces_an_earlier_failure():
    """A cell writes all its rows at every attempt, so the newest row of each quantity is that of the newest attempt."""
    rows = [
        record(mode="backward", status="oom", samples=[], message="out of memory"),
        record(implementation="reference"),
        record(mode="backward", samples=[3.0]),
    ]
    assert [(row.implementation, row.status) for row in latest(rows)] == [("tiled", "ok"), ("reference", "ok")]


APPENDER = """
import json, sys
from pathlib import Path
from cs336_systems.records import Record, append_records

template = Record(**json.loads(sys.argv[2]))
for index in range(25):
    # About 40 kB a record: more than Python's write buffer and a disk page.
    samples = [float(index)] * 8000
    rows = [Record(**{**vars(template), "seed": index, "mode": mode, "samples": samples})
            for mode in ("forward", "backward")]
    append_records(Path(sys.argv[1]), rows)
"""


def test_two_processes_appending_at_once_keep_every_line_whole(tmp_path):
    path = tmp_path / "records.jsonl"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(path), json.dumps(asdict(record(implementation=name)))], cwd=ROOT
        )
        for name in ("tiled", "reference")
    ]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    rows = read_records(path)
    assert len(rows) == 2 * 25 * 2
    for name in ("tiled", "reference"):
        own = [(row.seed, row.mode) for row in rows if row.implementation == name]
        assert own == [(index, mode) for index in range(25) for mode in ("forward", "backward")]
    assert all(row.samples == [float(row.seed)] * 8000 for row in rows)
