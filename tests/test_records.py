"""Records: what may be written, what survives a killed run, which rows a later one replaces, and what was published."""

import json
import math
import os
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import msgspec
import pandas as pd
import pytest
from msgspec.structs import replace

from cs336_systems.config import AttentionShape
from cs336_systems.experiments.records import (
    Record,
    Run,
    append_records,
    case_key,
    case_to_dict,
    check,
    latest,
    read_records,
    read_runs,
    write_records,
)

ROOT = Path(__file__).resolve().parent.parent
SHAPE = AttentionShape(batch=1, heads=1, seqlen_q=8, seqlen_k=8, head_dim=16, is_causal=True, dtype="float32")
RUN = Run(
    id="20260102T030405-01234567", scale="tiny", device={"name": "a processor", "kind": "cpu"},
    software={"python": "3.11.7"}, commit="0123456789ab", dirty=False, date="2026-01-02T03:04:05Z",
)  # fmt: skip


def record(**changes) -> Record:
    """A record that may be written, with `changes`."""
    valid = Record(
        run=RUN,
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


def test_case_holds_its_class_name():
    assert case_to_dict(SHAPE) == {"type": "AttentionShape", **asdict(SHAPE)}
    with pytest.raises(TypeError, match="case must be a dataclass instance, got dict"):
        case_to_dict({"batch": 1})
    assert case_key({"a": 1, "b": 2}) == case_key({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": ""}, "implementation must not be empty"),
        ({"quantity": ""}, "quantity must not be empty"),
        ({"problem": "../x"}, "problem must be 1 to 100 letters"),
        ({"problem": "runs"}, "problem must be"),
        ({"case": {"batch": 1}}, "case must hold its class name"),
        ({"status": "oom"}, "samples must be there if status is ok and only then"),
        ({"samples": []}, "samples must be there if status is ok and only then, got 0"),
        ({"samples": [math.nan]}, "samples must be finite"),
        ({"samples": [1e308] * 3}, "samples must be finite and at most 1e"),
        ({"samples": [], "status": "failed"}, "message must say why status is failed"),
        ({"samples": [], "status": "broken", "message": "why"}, "Invalid enum value 'broken'"),
        ({"samples": ["fast"]}, "Expected `float`, got `str`"),
        ({"quantity": "compute_intervals", "samples": [0.0, 1.0, 2.0]}, "starts and ends by turns, got 3"),
        ({"rounds": [1, 2]}, r"rounds must add up to the 2 samples, got \[1, 2\]"),
        ({"rounds": [0, 2]}, "rounds must add up"),
        ({"run": replace(RUN, commit="")}, "run must have a commit"),
        ({"run": replace(RUN, scale="huge")}, "Invalid enum value 'huge'"),
    ],
)
def test_a_record_that_says_too_little_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        append_records(tmp_path / "x.jsonl", [record(), record(**changes)])
    assert not list(tmp_path.iterdir()), "nothing of the others either"


def test_records_come_back_as_written_and_pandas_reads_them_alone(tmp_path):
    path = tmp_path / "flash_benchmarking.jsonl"
    failed = record(implementation="flex", samples=[], status="oom", message="CUDA out of memory", kernel="k", seed=3)
    append_records(path, [record()])
    append_records(path, [failed])
    assert read_records(path) == [record(), failed]
    assert read_runs(tmp_path) == {RUN.id: RUN} and len((tmp_path / "runs.jsonl").read_text().splitlines()) == 1
    rows, runs = (pd.read_json(file, lines=True) for file in (path, tmp_path / "runs.jsonl"))
    frame = rows.merge(runs, left_on="run", right_on="id")
    assert list(frame["samples"].map(len, na_action="ignore").fillna(0)) == [2, 0]
    assert set(frame["commit"]) == {"0123456789ab"} and list(frame["status"]) == ["ok", "oom"]


def test_absent_files_have_no_records(tmp_path):
    assert read_records(tmp_path / "none.jsonl") == [] and read_runs(tmp_path) == {}
    append_records(tmp_path / "none.jsonl", [])
    assert not list(tmp_path.iterdir())


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
        damaged(unit=7), damaged(status="fine"), damaged(problem="a/b"), damaged(message=["x"]), damaged(seed="0"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_record_is_told_and_left_out(line, tmp_path):
    """Samples whose sum overflows once ended `report` for every problem."""
    path = tmp_path / "x.jsonl"
    append_records(path, [record()])
    with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{line}\n{line}\n{damaged(implementation='last', unknown_key=1)}\n")
    with pytest.warns(UserWarning, match=r"x.jsonl:2: not a record, left out .*, and 1 more lines of it") as told:
        assert [each.implementation for each in read_records(path)] == ["tiled", "last"]
    assert len(told) == 1


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
    assert latest([record(), record(implementation="triton"), again]) == [again, record(implementation="triton")]
    for change in ("problem", "implementation", "mode", "quantity"):
        assert len(latest([record(), record(**{change: "other"})])) == 2
    assert len(latest([record(), record(case={"type": "Other"})])) == 2
    assert len(latest([record(), record(run=replace(RUN, scale="smoke"))])) == 2


def test_written_records_replace_a_file(tmp_path):
    path = tmp_path / "x.jsonl"
    append_records(path, [record(), record(implementation="triton")])
    write_records(path, [record(samples=[2.0])])
    assert read_records(path) == [record(samples=[2.0])] and not list(tmp_path.glob("*.partial"))
    check(read_records(path)[0])


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
    processes = [subprocess.Popen([sys.executable, "-c", APPEND, str(ROOT), str(path), name]) for name in "ab"]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len({each.implementation for each in read_records(path)}) == 200


# (records, samples, their sum) of each published file, counted before the files took their present form. Measuring
# again replaces rows: whoever publishes new ones writes down here what there is now.
PUBLISHED = {
    "attention_shapes": (180, 2160, 19590.697083999996),
    "benchmarking_mixed_precision": (81, 615, 67788.92510724801),
    "benchmarking_script": (60, 560, 337921.80319999997),
    "block_sparse": (390, 2433, 44398.12650859999),
    "context_parallel": (84, 311, 184137.5753),
    "ddp_bucketed_benchmarking": (64, 7441, 1441329.2643491449),
    "ddp_overlap_individual_parameters_benchmarking": (152, 19146, 7186487.947522492),
    "dense_masks": (464, 10831, 72796.41679749999),
    "dilated_attention": (108, 741, 27469.4643266),
    "distributed_communication_single_node": (96, 3408, 77077.672506),
    "dynamic_mask": (50, 262, 18251.479604599997),
    "few_queries": (78, 780, 88.0019266),
    "flash_benchmarking": (3872, 39486, 1477388.143843833),
    "fsdp_accounting": (512, 41764, 11519400.821566565),
    "gradient_checkpointing": (68, 82, 2421806.7600000007),
    "hopper_ladder": (105, 1260, 21182.796960999996),
    "kernel_counters": (378, 378, 221.00029399999985),
    "leaderboard_2025": (68, 689, 59835.39614889999),
    "leaderboard_2026": (98, 5814, 16496022.424291072),
    "memory_profiling": (420, 19514, 154702926.38663206),
    "minimal_ddp_flat_benchmarking": (16, 1742, 383161.584687766),
    "mixed_precision_accumulation": (4, 4, 39.95742),
    "naive_ddp_benchmarking": (24, 3013, 600320.3490707492),
    "nsys_profile": (856, 2086, 369994.09775499965),
    "optimizer_state_sharding_accounting": (260, 22674, 8048066.280259982),
    "pytorch_attention": (140, 4142, 370247.76479000004),
    "short_calls": (168, 4200, 753.9306898),
    "tile_choice": (619, 7537, 12065.858731999997),
    "torch_compile": (208, 9276, 258749.62739449897),
    "training_run": (24, 1760, 13377.685599999995),
    "tune_flash": (127, 7700, 525.45088),
}


@pytest.mark.parametrize("problem", PUBLISHED)
def test_not_one_published_sample_is_lost(problem):
    folder = ROOT / "results" / "nvidia-h200" / "records"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = read_records(folder / f"{problem}.jsonl")
    count, total = sum(len(each.samples) for each in records), sum(sum(each.samples) for each in records)
    assert (len(records), count) == PUBLISHED[problem][:2] and total == pytest.approx(PUBLISHED[problem][2], rel=1e-12)


def test_every_published_file_is_counted():
    found = {path.stem for path in (ROOT / "results" / "nvidia-h200" / "records").glob("*.jsonl")}
    assert found == {*PUBLISHED, "runs"}
