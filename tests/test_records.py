"""Records: what may be written, what survives a killed run, and which rows a later attempt replaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cs336_systems.config import MODEL_SIZES, AttentionShape, ModelCase
from cs336_systems.records import (
    Record,
    append_records,
    case_key,
    case_to_dict,
    latest,
    read_records,
    record_from_json,
    validate,
    write_compact,
)
from tools.compact_records import main as compact_records
from tools.pool_rounds import main as pool_rounds

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
        ({"problem": "../../x"}, r"record\.problem must be 1 to 100 letters, digits, '_' and '-', got '../../x'"),
        ({"unit": "us"}, r"record\.unit must be one of ms, s, MiB, .*got 'us'"),
        ({"unit": "MiB"}, r"record\.unit of time must be one of ms, s, got 'MiB'"),
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


def test_many_lines_that_are_no_records_are_one_warning(tmp_path):
    path = tmp_path / "records.jsonl"
    append_records(path, [record(seed=1)])
    with open(path, "a") as file:
        file.write('{"broken\n' * 200)
    with pytest.warns(UserWarning) as warned:
        assert [row.seed for row in read_records(path)] == [1]
    (told,) = warned
    assert str(told.message).startswith("records.jsonl:2: not a record, skipped (")
    assert str(told.message).endswith(", and 199 more lines of it")


SHAPE_CASE = case_to_dict(SHAPE)
MODEL_CASE = case_to_dict(ModelCase(model=MODEL_SIZES["small"], batch=1, attention="sdpa"))
HUGE = 10**400
NOT_RECORDS = [
    *[({name: 17}, rf"record\.{name} must be a string, got int") for name in (
        "problem", "scale", "implementation", "mode", "quantity", "unit", "status", "message", "kernel", "commit",
        "date",
    )],
    *[({name: [1]}, rf"record\.{name} must be an object, got list") for name in ("case", "device", "software")],
    *[({"problem": name}, r"record\.problem must be 1 to 100 letters") for name in (
        "/tmp/x/PWN", "a/b", "../../x", "foo.bar", "", "a\n", "a" * 101,
    )],
    ({"samples": "12"}, r"record\.samples must be a list, got str"),
    ({"samples": [1.0, "2"]}, r"record\.samples must hold numbers"),
    ({"samples": [True]}, r"record\.samples must hold numbers"),
    ({"samples": [float("nan")]}, r"record\.samples must be finite"),
    ({"samples": [HUGE]}, "int too large to convert to float"),
    ({"samples": []}, r"record\.samples must not be empty when status is ok"),
    ({"status": "oom", "message": "no"}, r"record\.samples must be empty when status is oom"),
    ({"status": "fine"}, r"record\.status must be one of ok, oom"),
    ({"error": "small"}, r"record\.error must be a number or null, got str"),
    ({"dirty": "no"}, r"record\.dirty must be true, false or null, got str"),
    ({"seed": 1.5}, r"record\.seed must be an int, got float"),
    ({"schema": "1"}, r"record\.schema must be an int, got str"),
    ({"schema": True}, r"record\.schema must be an int, got bool"),
    ({"schema": 2}, r"record\.schema must be at most 1, got 2"),
    ({"device": {"name": ["x"], "kind": "cpu"}}, r"record\.device must have a string under 'name'"),
    ({"device": {"name": "x"}}, r"record\.device must have 'kind'"),
    ({"software": {"torch": 2}}, r"record\.software must hold strings"),
    ({"message": "\ud800"}, "surrogates not allowed"),
    ({"case": {"type": 3}}, r"record\.case must hold the class name under 'type'"),
    ({"case": {"type": "Other", "sizes": [1, 2]}}, r"record\.case must hold strings, .* got a list under 'sizes'"),
    ({"case": {"type": "Other", "a": {"b": {"c": {"d": {}}}}}}, r"record\.case must hold .* got a dict under 'd'"),
    ({"case": {"type": "Other", "note": float("inf")}}, "JSON compliant"),
    ({"case": {"type": "Other", "batch": "1"}}, r"record\.case must have a whole number under 'batch'"),
    ({"case": {"type": "Other", "batch": HUGE}}, r"record\.case must have a whole number under 'batch'"),
    ({"case": {"type": "Other", "dtype": "../x"}}, r"record\.case must have one of float64, .* under 'dtype'"),
    ({"case": {"type": "Other", "is_causal": 1}}, r"record\.case must have true or false under 'is_causal'"),
    ({"case": {**SHAPE_CASE, "is_causal": None}}, r"record\.case must have true or false under 'is_causal'"),
    ({"case": {**SHAPE_CASE, "seqlen_q": 0}}, r"is no AttentionShape: .*seqlen_q must be a positive int, got 0"),
    ({"case": {"type": "AttentionShape"}}, r"record\.case is no AttentionShape: .*missing"),
    ({"case": {**MODEL_CASE, "model": "small"}}, r"record\.case must have an object under 'model'"),
    ({"case": {**MODEL_CASE, "model": {}}}, r"record\.case of type ModelCase must have 'model' with a 'name'"),
    ({"case": {**MODEL_CASE, "model": {"name": 3}}}, r"record\.case must have a string under 'name'"),
    ({"case": {**MODEL_CASE, "precision": None}}, r"record\.case must have an object under 'precision'"),
    ({"case": {**MODEL_CASE, "warmup": None}}, r"record\.case of type ModelCase must have 'batch' and 'warmup'"),
    ({"mode": "train_step"}, r"record\.mode must not be train_step where the case is an AttentionShape"),
    ({"case": {**MODEL_CASE, "attention": 1}}, r"record\.case must have a string under 'attention'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), NOT_RECORDS)
def test_a_line_with_a_value_of_the_wrong_type_costs_only_itself(changes, message, tmp_path):
    """Only the names of the keys were checked, so that one such line ended the whole report, often in a traceback."""
    path = tmp_path / "records.jsonl"
    good, bad = asdict(record()), {**asdict(record()), **changes}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n{json.dumps(good)}\n")
    with pytest.warns(UserWarning, match=rf"records\.jsonl:2: not a record, skipped \(.*{message}"):
        assert read_records(path) == [record(), record()]


@pytest.mark.parametrize("loaded", [[1], 3, "x", None])
def test_only_an_object_can_be_a_record(loaded):
    with pytest.raises(ValueError, match="must be a JSON object, got (list|int|str|NoneType)"):
        record_from_json(loaded)


def test_an_object_with_too_few_keys_is_no_record():
    with pytest.raises(ValueError, match="^lacks scale, case, implementation, mode, quantity, unit$"):
        record_from_json({"problem": "flash_benchmarking"})


@pytest.mark.parametrize(
    "case", [SHAPE_CASE, MODEL_CASE, {"type": "Another", "size": 3}], ids=lambda case: case["type"]
)
def test_a_record_without_its_origin_can_be_read(case):
    """What only a writer must say is not asked of records of others."""
    written = record(case=case, commit="", date="", dirty=None)
    assert record_from_json(asdict(written)) == written


def test_a_line_nested_too_deeply_costs_only_itself(tmp_path):
    """The parser's RecursionError was not caught."""
    path = tmp_path / "records.jsonl"
    path.write_text("[" * 200_000 + "\n" + json.dumps(asdict(record())) + "\n")
    with pytest.warns(UserWarning, match=r"records\.jsonl:1: not a record, skipped"):
        assert read_records(path) == [record()]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line(separator, tmp_path):
    """A line separator that stood unescaped in a message split its record into two broken lines."""
    path = tmp_path / "records.jsonl"
    written = record(kernel=f"a{separator}b")
    path.write_text(json.dumps(asdict(written), ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_records(path) == [written]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_not_a_regular_file_is_skipped(make, tmp_path):
    """A named pipe among the records made the report wait for ever."""
    path = tmp_path / "records.jsonl"
    make(path)
    with pytest.warns(UserWarning, match=r"records\.jsonl: not a regular file, skipped"):
        assert read_records(path) == []


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


# Compact files


def some_records() -> list[Record]:
    failed = record(mode="backward", status="failed", samples=[], message="no memory", error=None)
    return [record(), record(mode="forward_backward", error=0.5, samples=[float(n) for n in range(100)]), failed]


def test_a_compact_file_holds_the_same_records(tmp_path):
    whole, compact = tmp_path / "whole.jsonl", tmp_path / "compact.jsonl"
    append_records(whole, some_records())
    write_compact(compact, some_records())
    assert read_records(compact) == read_records(whole) == some_records()
    first, *rest = compact.read_text().splitlines()
    assert set(json.loads(first)) == {"common"} and len(rest) == 3
    assert all("device" not in line and "software" not in line for line in rest)
    assert compact.stat().st_size < whole.stat().st_size


def test_records_are_appended_whole_to_a_compact_file(tmp_path):
    path = tmp_path / "records.jsonl"
    write_compact(path, some_records())
    later = record(seed=3, device={"name": "another", "kind": "cpu"}, kernel="fast")
    append_records(path, [later])
    assert read_records(path) == [*some_records(), later]


def test_a_damaged_common_line_is_named_and_leaves_whole_records_alone(tmp_path):
    path = tmp_path / "records.jsonl"
    append_records(path, [record()])
    path.write_text('{"common": 3}\n' + path.read_text())
    with pytest.warns(UserWarning, match=r"records\.jsonl:1: not a record, skipped"):
        assert read_records(path) == [record()]


def test_no_records_make_a_file_of_none(tmp_path):
    write_compact(tmp_path / "records.jsonl", [])
    assert read_records(tmp_path / "records.jsonl") == []


def test_the_tool_thins_samples_and_drops_what_was_replaced(tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    append_records(path, [replace(record(), samples=[9.0]), *some_records()])
    compact_records(["--samples", "25", str(path)])
    first, second, failed = read_records(path)
    assert first == record() and failed == some_records()[2]
    assert second.samples == [float(n) for n in range(0, 100, 4)]
    assert "4 records read" in capsys.readouterr().out


@pytest.mark.parametrize("line", ['{"test": "tests/test_it.py::test_it"}', '{"schema": 2}', '{"pro'])
def test_the_tool_leaves_a_file_alone_that_it_cannot_read_whole(line, tmp_path, capsys):
    """The rows of the GPU tests, records of a newer schema and truncated lines were dropped."""
    path = tmp_path / "records.jsonl"
    append_records(path, some_records())
    with path.open("a") as file:
        file.write(line)
    before = path.read_bytes()
    with pytest.raises(SystemExit):
        compact_records([str(path)])
    assert "is left as it is: records.jsonl:4: not a record" in capsys.readouterr().err
    assert path.read_bytes() == before
    path.write_text("")
    with pytest.raises(SystemExit):
        compact_records([str(path)])
    assert "records.jsonl holds no records" in capsys.readouterr().err and path.read_text() == ""


@pytest.mark.parametrize(
    ("quantity", "unit"), [("communication_intervals", "ms"), ("loss", "nats"), ("timeline.gradients", "MiB")]
)
def test_the_tool_leaves_a_series_whole(quantity, unit, tmp_path):
    """Of repetitions some say what all say; without a part of its pairs or steps a series says something else."""
    path = tmp_path / "records.jsonl"
    series = record(quantity=quantity, unit=unit, samples=[float(n) for n in range(100)])
    append_records(path, [series])
    compact_records(["--samples", "25", str(path)])
    assert read_records(path) == [series]


@pytest.mark.parametrize("samples", [[0.0, 1.0, 2.0], [0.0, 2.0, 3.0, 2.5]])
def test_intervals_are_starts_and_ends_by_turns(samples):
    with pytest.raises(ValueError, match="record.samples of compute_intervals must be starts and ends by turns, got"):
        validate(record(quantity="compute_intervals", samples=samples))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--samples", "0", "x"], "--samples must be positive, got 0"), (["missing.jsonl"], "missing.jsonl is no file")],
)
def test_the_tool_refuses_what_it_cannot_do(arguments, message, capsys):
    with pytest.raises(SystemExit):
        compact_records(arguments)
    assert message in capsys.readouterr().err


def write_rounds(folder: Path, *rounds: list[Record]) -> list[str]:
    """Results folders with one file of records each, dated by their number, and one to pool into: as arguments."""
    for number, records in enumerate(rounds):
        dated = [replace(each, date=f"2026-01-0{number + 2}T03:04:05Z") for each in records]
        append_records(folder / f"round{number}" / "a-device" / "records" / "flash_benchmarking.jsonl", dated)
    (folder / "results").mkdir()
    return [*(str(folder / f"round{number}") for number in range(len(rounds))), "--into", str(folder / "results")]


def pooled_records(folder: Path) -> list[Record]:
    return read_records(folder / "results" / "records" / "flash_benchmarking.jsonl")


def test_rounds_become_one_set_of_records(tmp_path, capsys):
    """Repetitions are those of all rounds, what is measured once is the round's in the middle; other rows stay."""
    once = [record(quantity="peak_memory", unit="MiB", samples=[peak]) for peak in (10.0, 20.0, 30.0)]
    gaps = [record(quantity="compute_intervals", samples=[0.0, end]) for end in (1.0, 2.0, 3.0)]
    hosts = [record(quantity="host_time", samples=[end, end]) for end in (1.0, 2.0, 3.0)]
    errors = (0.1, 0.9, 0.3)
    times = [record(samples=samples) for samples in ([9.0, 9.5], [1.0, 20.0], [5.0, 7.0])]  # medians 9.25, 10.5, 6
    times = [replace(time, error=error) for time, error in zip(times, errors)]
    other, replaced = record(implementation="triton"), record(samples=[0.5])
    arguments = write_rounds(tmp_path, *map(list, zip(times, once, gaps, hosts)))
    append_records(tmp_path / "results" / "records" / "flash_benchmarking.jsonl", [other, replaced])
    pool_rounds(arguments)
    last = "2026-01-04T03:04:05Z"
    assert pooled_records(tmp_path) == [
        other,
        record(samples=[9.0, 9.5, 1.0, 20.0, 5.0, 7.0], rounds=[2, 2, 2], error=0.9, date=last),
        replace(once[0], date=last),
        replace(gaps[0], date=last),
        record(quantity="host_time", samples=[1.0, 1.0, 2.0, 2.0, 3.0, 3.0], rounds=[2, 2, 2], date=last),
    ]
    assert "5 records, those of 3 rounds among them" in capsys.readouterr().out


def test_what_failed_in_every_round_has_failed(tmp_path):
    failed = record(samples=[], status="failed", message="a reason")
    pool_rounds(write_rounds(tmp_path, [failed], [failed]))
    assert [(each.status, each.message) for each in pooled_records(tmp_path)] == [("failed", "a reason")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commit": "fedcba987654"}, "these have several commits: 0123456789ab, fedcba987654"),
        ({"dirty": True}, "these have several commits: 0123456789ab, 0123456789ab with changes"),
        ({"device": {"name": "another", "kind": "cpu"}}, "these have several devices"),
        ({"software": {"python": "3.12.3"}}, "these have several versions"),
        ({"seed": 7}, "these have several seeds: 0, 7"),
        ({"implementation": "triton"}, "round 2 has not the same cells and quantities as round 1"),
        ({"unit": "s"}, "unit of time of tiled (flash_benchmarking) is 's' in round 2 and 'ms' in round 1"),
        ({"kernel": "other_tiles"}, "kernel of time of tiled (flash_benchmarking) is 'other_tiles' in round 2"),
        ({"samples": [], "status": "skipped", "message": "a budget"}, "status of time of tiled (flash_bench"),
    ],
)
def test_only_repetitions_are_pooled(changes, message, tmp_path, capsys):
    """Of two revisions, devices or kernels no sample stands for the other's; a lost cell must not cost the others."""
    arguments = write_rounds(tmp_path, [record()], [record(**changes)])
    with pytest.raises(SystemExit):
        pool_rounds(arguments)
    error = capsys.readouterr().err
    assert "nothing is written: " in error and message in error
    assert not (tmp_path / "results" / "records").exists()


def test_rounds_are_pooled_into_their_own_device_and_scale_only(tmp_path, capsys):
    """Tables of a file with two devices cannot be built any more."""
    arguments = write_rounds(tmp_path, [record()], [record(samples=[2.0])])
    elsewhere = record(device={"name": "a GPU", "kind": "cuda"})
    target = tmp_path / "results" / "records" / "flash_benchmarking.jsonl"
    append_records(target, [elsewhere])
    with pytest.raises(SystemExit):
        pool_rounds(arguments)
    assert "would hold several devices or scales: a GPU at tiny, a processor at tiny" in capsys.readouterr().err
    assert read_records(target) == [elsewhere]


def test_a_round_counts_once(tmp_path, capsys):
    first, second, into, results = write_rounds(tmp_path, [record()], [record(samples=[2.0])])
    (tmp_path / "copy").mkdir()
    shutil.copytree(first, tmp_path / "copy", dirs_exist_ok=True)
    for arguments, message in (
        ([first, first, into, results], "a round is named twice, or --into lies in one"),
        ([first, second, into, f"{first}/a-device"], "a round is named twice, or --into lies in one"),
        ([first, str(tmp_path / "copy"), into, results], "round 2 is round 1 once more"),
        ([second, first, str(tmp_path / "copy"), into, results], "round 3 is round 2 once more"),
        ([first, second, into, f"{results}/typo"], "typo is no folder"),
    ):
        with pytest.raises(SystemExit):
            pool_rounds(arguments)
        assert f"{message}" in capsys.readouterr().err, message
    assert not (tmp_path / "results" / "records").exists()


def test_rounds_that_cannot_be_read_whole_are_refused(tmp_path, capsys):
    first, second, *into = write_rounds(tmp_path, [record()], [record(samples=[2.0])])

    def refused(*rounds: str) -> str:
        with pytest.raises(SystemExit):
            pool_rounds([*rounds, *into])
        assert not (tmp_path / "results" / "records").exists()
        return capsys.readouterr().err

    assert "there must be two rounds at least" in refused(first)
    assert "must hold the records of one device, got 0 folders" in refused(first, second, str(tmp_path / "nothing"))
    file = next((tmp_path / "round1").glob("*/records/*.jsonl"))
    whole = file.read_text()
    file.write_text(whole + '{"pro')
    assert "nothing is written: flash_benchmarking.jsonl:2: not a record" in refused(first, second)
    file.write_text("")
    assert "round 2 has not the same cells" in refused(first, second) and "round 1 holds no" in refused(second, first)
    file.write_text(whole)
    file.rename(file.with_name("another.jsonl"))
    assert "another.jsonl is missing in" in refused(first, second)


@pytest.mark.parametrize(
    ("rounds", "message"),
    [([1, 2], r"must add up to the 2 samples, got \[1, 2\]"), ([0, 2], "positive ints"), ([True, 1], "positive ints"),
     ("2", "a list")],
)  # fmt: skip
def test_rounds_add_up_to_the_samples(rounds, message):
    with pytest.raises(ValueError, match=f"record.rounds must .*{message}|record.rounds {message}"):
        record_from_json({**asdict(record()), "rounds": rounds})
    assert record_from_json({**asdict(record()), "rounds": [1, 1]}).rounds == [1, 1]


def test_thinned_samples_are_of_no_round(tmp_path):
    path = tmp_path / "records.jsonl"
    append_records(path, [record(samples=[1.0, 2.0, 3.0, 4.0], rounds=[2, 2]), record(mode="backward", rounds=[1, 1])])
    compact_records(["--samples", "2", str(path)])
    assert [each.rounds for each in read_records(path)] == [[], [1, 1]]
