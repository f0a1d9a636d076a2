"""Comparison of two sets of records: what is a regression, what is noise, and what the exit code
says.
"""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cs336_systems.bench.records import Record, append_records, case_to_dict
from cs336_systems.book.comparison import (
    bootstrap_change,
    compare_records,
    exit_code,
    pool,
    read_all,
)
from cs336_systems.config import MODEL_SIZES, AttentionShape, ModelCase
from tests.command_line import assert_refused, invoke
from tests.test_records import RUN, broken
from tests.test_records import record as valid_record

GPU = {"name": "Test GPU", "kind": "cuda", "driver": "1.2"}
GPU_RUN = structs.replace(
    RUN, scale="handout", device=GPU, software={"torch": "2.11.0", "triton": "3.6.0"}
)


def shape(seqlen: int) -> AttentionShape:
    return AttentionShape(
        batch=1,
        heads=16,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=64,
        is_causal=True,
        dtype="bfloat16",
    )


def record(seqlen: int, samples: list[float], **changes: Any) -> Record:
    values = {
        "run": GPU_RUN,
        "case": case_to_dict(shape(seqlen)),
        "implementation": "triton",
        "samples": samples,
    }
    return valid_record(**values | changes)


def run_of(
    seed: int, *, slower: float = 1.0, noise: float = 0.005, rows: int = 20, count: int = 10
) -> list[Record]:
    """A run's records: lognormal samples around a time of each row, all of them `slower` times as
    long.
    """
    generator = random.Random(seed)
    return [
        record(
            128 * (row + 1),
            [(row + 1) * slower * math.exp(generator.gauss(0, noise)) for _ in range(count)],
        )
        for row in range(rows)
    ]


# Verdicts


@pytest.mark.parametrize(
    "slower, verdict, code", [(1.05, "regression", 1), (0.95, "improvement", 0)]
)
def test_a_planted_change_of_five_percent_is_found(slower: float, verdict: Any, code: int) -> None:
    comparison = compare_records(run_of(1), run_of(2, slower=slower))
    assert [row.verdict for row in comparison.rows] == [verdict] * 20
    assert (exit_code(comparison), exit_code(comparison, "any")) == (code, 1)
    change = 100 * (slower - 1)
    for row in comparison.rows:
        assert (
            row.low_percent < change < row.high_percent and row.low_percent * row.high_percent > 0
        )
        assert row.change_percent == pytest.approx(change, abs=1.5)


@pytest.mark.parametrize("noise, count", [(0.005, 10), (0.03, 5), (0.2, 5)])
def test_two_runs_of_the_same_code_report_no_regression(noise: float, count: int) -> None:
    """Over 150 rows of 5 samples, percentile intervals at 95 % called several of them regressions."""
    for seed in range(3):
        base, target = (
            run_of(seed * 2 + side, noise=noise, rows=150, count=count) for side in (0, 1)
        )
        comparison = compare_records(base, target)
        assert {row.verdict for row in comparison.rows} <= {"noise", "unchanged"} and exit_code(
            comparison, "any"
        ) == 0


def test_a_change_inside_the_noise_says_so() -> None:
    base, target = (
        [record(128, [1.0, 1.5, 0.7, 1.1, 0.9])],
        [record(128, [1.1, 1.6, 0.8, 1.2, 1.0])],
    )
    (row,) = compare_records(base, target).rows
    assert (
        row.verdict == "noise"
        and row.change_percent == pytest.approx(10)
        and row.low_percent < 0 < row.high_percent
    )


def test_a_slowdown_that_all_rows_share_is_seen_though_each_is_inside_the_noise() -> None:
    """Of 36 rows 5 % slower most were inside of intervals corrected for thousands of rows, and
    nothing spoke of all.
    """
    base, target = (
        run_of(seed, slower=slower, noise=0.05, rows=36) for seed, slower in ((1, 1.0), (2, 1.05))
    )
    comparison = compare_records(base, target)
    assert (
        len(comparison.with_verdict("regression")) < 4
        and len(comparison.with_verdict("noise")) > 18
    )
    (group,) = comparison.groups
    assert group.key == ("flash_benchmarking", "handout", "triton", "time")
    assert (group.num_rows, group.num_cases, group.verdict) == (36, 36, "regression")
    assert 1.5 < group.low_percent < 5 < group.high_percent < 9
    assert group.change_percent == pytest.approx(5, abs=1.5)
    alone = replace(comparison, rows=())
    assert exit_code(alone) == exit_code(alone, "any") == 1 and exit_code(alone, "none") == 0
    (group,) = compare_records(target, base).groups
    assert group.verdict == "improvement" and group.high_percent < -1.5
    alone = replace(compare_records(target, base), rows=())
    assert exit_code(alone) == 0 and exit_code(alone, "any") == 1


def test_groups_without_a_change_alarm_no_more_often_than_stated() -> None:
    """Every row of a run is off by 2 % of its own, which its samples do not show; the threshold of
    0 hides nothing.
    """
    alarms, runs, groups = 0, 40, 4
    for run in range(runs):
        sides = []
        for side in (0, 1):
            generator = random.Random(2 * run + side)
            rows = []
            for group in range(groups):
                for seqlen in range(1, 9):
                    center = math.exp(generator.gauss(0, 0.02))
                    samples = [center * math.exp(generator.gauss(0, 0.01)) for _ in range(6)]
                    rows.append(record(seqlen, samples, implementation=f"number {group}"))
            sides.append(rows)
        comparison = compare_records(*sides, threshold_percent=0)
        assert len(comparison.groups) == groups
        alarms += bool(
            comparison.groups_with("regression") or comparison.groups_with("improvement")
        )
    assert alarms <= 3, "1 is expected of 40 runs at 2.5 %; 4 or more would be one chance in 50"


def test_a_group_needs_five_cases_and_only_times_and_rates_count() -> None:
    five, four = ([record(seqlen, [1.0] * 5) for seqlen in range(1, count + 1)] for count in (5, 4))
    assert len(compare_records(five, five).groups) == 1 and compare_records(four, four).groups == ()
    modes = [
        record(seqlen, [1.0] * 5, mode=mode)
        for seqlen in range(1, 5)
        for mode in ("forward", "backward")
    ]
    assert compare_records(modes, modes).groups == (), "modes of one case were measured together"
    memory = [record(seqlen, [1.0], **MEMORY) for seqlen in range(1, 9)]
    assert compare_records(memory, memory).groups == ()
    rates = [[record(n, [rate] * 5, **RATE) for n in range(1, 9)] for rate in (100.0, 80.0)]
    (group,) = compare_records(*rates).groups
    assert group.verdict == "regression" and group.change_percent == pytest.approx(25)
    for row in compare_records(*rates).rows:
        assert 0 < row.low_percent <= row.change_percent == pytest.approx(20)


MEMORY, CALLS = (
    {"quantity": "peak_memory", "unit": "MiB"},
    {"quantity": "kernel_calls", "unit": "calls"},
)
RATE, RANK = (
    {"quantity": "bandwidth", "unit": "GB/s"},
    {"quantity": "kernel_1_time", "kernel": "nvjet_a"},
)
RAN = record(128, [1.0] * 5)
NOISY = [1, 1.001, 0.999, 1.002, 0.998]


@pytest.mark.parametrize(
    ("base", "target", "verdict", "reason"),
    [
        # less is better, but of rates more
        (record(128, NOISY), record(128, [0.8 * x for x in NOISY]), "improvement", ""),
        (record(128, NOISY, **RATE), record(128, [0.8 * x for x in NOISY], **RATE), "regression", ""),
        # memory has no noise
        (record(128, [100.0], **MEMORY), record(128, [110.0], **MEMORY), "regression", ""),
        (record(128, [100.0], **MEMORY), record(128, [100.0], **MEMORY), "unchanged", ""),
        (record(128, [0.0], **MEMORY), record(128, [1.0], **MEMORY), "not compared", "the base is 0"),
        # ranks of other kernels, and counts
        (record(128, [1.0] * 5, **RANK), record(128, [2.0] * 5, **RANK), "regression", ""),
        (record(128, [1.0] * 5, **RANK), record(128, [2.0] * 5, **RANK | {"kernel": "nvjet_b"}), "not compared",
         "another kernel: nvjet_b, was nvjet_a"),
        (record(128, [96.0], **CALLS), record(128, [98.0], **CALLS), "not compared", "neither a time nor memory"),
        (record(128, [96.0], **CALLS), record(128, [96.0], **CALLS), "unchanged", ""),
        # what breaks is a regression, and what is mended is none
        (RAN, broken(RAN), "regression", "ok, now oom: CUDA out of memory"),
        (broken(RAN), RAN, "improvement", ""),
        (broken(RAN), broken(RAN, "failed", "x"), "unchanged", ""),
    ],
)  # fmt: skip
def test_the_verdict_on_a_row(base: Record, target: Record, verdict: str, reason: str) -> None:
    (row,) = compare_records([base], [target]).rows
    assert row.verdict == verdict and (not reason or row.reason == reason)


def test_rows_of_one_side_and_doubled_rows_are_listed() -> None:
    base, target = run_of(1), run_of(2)
    comparison = compare_records(base, [*target[2:], record(99, [1.0] * 5), target[5]])
    assert [key[3] for key in comparison.missing] == [row.key[3] for row in base[:2]]
    assert len(comparison.extra) == 1 and "99" in comparison.extra[0][3]
    assert comparison.duplicates == (target[5].key,)
    assert (
        exit_code(comparison) == exit_code(comparison, "any") == 2
        and exit_code(comparison, "none") == 0
    )


def test_other_versions_are_noted() -> None:
    other = {
        "software": {"torch": "2.13.0", "triton": "3.7.1"},
        "device": GPU | {"driver": "9"},
        "seed": 3,
    }
    notes = compare_records([record(128, [1.0] * 5)], [record(128, [1.0] * 5, **other)]).notes
    assert notes == (
        "driver: 1.2 in the base, 9 in the target",
        "torch: 2.11.0 in the base, 2.13.0 in the target",
        "triton: 3.6.0 in the base, 3.7.1 in the target",
        "seed: 0 in the base, 3 in the target",
    )


def test_the_same_records_give_the_same_answer_in_any_order() -> None:
    base, target = run_of(1, noise=0.05), run_of(2, noise=0.05)
    one, other = compare_records(base, target), compare_records(base[::-1], target[::-1])
    assert {row.key: row for row in one.rows} == {row.key: row for row in other.rows}
    assert one.groups == other.groups != ()


# Statistics


def test_the_interval_covers_the_true_change_as_often_as_it_says() -> None:
    generator = random.Random(0)
    covered = 0
    for trial in range(200):
        base, target = (
            [center * math.exp(generator.gauss(0, 0.02)) for _ in range(20)]
            for center in (1.0, 1.03)
        )
        low, high = bootstrap_change(base, target, confidence=0.9, seed=trial)
        covered += low <= 0.03 <= high
    assert 0.82 <= covered / 200 <= 0.99


def test_samples_that_drift_together_widen_the_interval() -> None:
    generator = random.Random(0)
    independent = [1 + generator.gauss(0, 0.01) for _ in range(64)]
    drifting = sorted(independent)
    widths = []
    for samples in (independent, drifting):
        low, high = bootstrap_change([1.0] * 64, samples, confidence=0.95, seed=1)
        widths.append(high - low)
    assert widths[1] > 1.3 * widths[0]


# Files and the command


def write(folder: Path, records: list[Record]) -> Path:
    append_records(folder / "records" / "flash_benchmarking.jsonl", records)
    return folder


def compared(folder: Path, base: list[Record], target: list[Record], *options: str) -> Any:
    """What `compare` says of both, as records in folders."""
    return invoke(
        "compare", write(folder / "base", base), write(folder / "target", target), *options
    )


def test_files_and_folders_of_records(tmp_path: Path) -> None:
    folder = write(tmp_path / "results" / "test-gpu", run_of(1))
    for path in (
        folder,
        folder / "records",
        folder / "records" / "flash_benchmarking.jsonl",
        tmp_path / "results",
    ):
        assert read_all(path) == run_of(1)
    with pytest.raises(ValueError, match="nothing: no such file or folder"):
        read_all(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"empty: no records"):
        (tmp_path / "empty").mkdir()
        read_all(tmp_path / "empty")
    write(tmp_path / "results" / "other-gpu", run_of(2))
    with pytest.raises(
        ValueError, match="several results folders, name one of other-gpu, test-gpu"
    ):
        read_all(tmp_path / "results")
    (tmp_path / "bad.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl: no records"):
        read_all(tmp_path / "bad.jsonl")


def test_the_command_says_what_regressed(tmp_path: Path) -> None:
    result = compared(tmp_path, run_of(1), run_of(2, slower=1.05))
    assert result.exit_code == 1, result.output
    assert "flash_benchmarking triton bfloat16 1x16x128x64 causal forward time" in result.stdout
    assert "20 rows at a threshold of 1.5 %: 20 regressed" in result.stdout
    for option in (("--fail-on", "none"), ("--threshold", "30")):
        assert invoke("compare", tmp_path / "base", tmp_path / "target", *option).exit_code == 0


def test_the_command_on_two_runs_of_the_same_code_and_of_other_problems(tmp_path: Path) -> None:
    result = compared(tmp_path, run_of(1), run_of(2))
    assert (
        result.exit_code == 0
        and "no regression" in result.stdout
        and "20 unchanged" in result.stdout
    )
    everything = invoke("compare", tmp_path / "base", tmp_path / "target", "--all").stdout
    assert everything.count("unchanged") == 22  # rows, their group, the summary
    others = [structs.replace(row, problem="torch_compile") for row in run_of(2)]
    result = compared(tmp_path / "of others", run_of(1), others)
    assert "none in common" in result.stdout and "no regression" not in result.stdout


def test_single_samples_are_shown_where_they_differ(tmp_path: Path) -> None:
    once = {"quantity": "compile_time", "unit": "s"}
    base, target = (
        [record(128, [10.0], **once), record(256, [seconds], **once)] for seconds in (10.0, 15.0)
    )
    shown = compared(tmp_path, base, target).stdout
    assert "1x16x256x64" in shown and "1x16x128x64" not in shown and "2 not compared" in shown
    assert (
        "1x16x128x64" in invoke("compare", tmp_path / "base", tmp_path / "target", "--all").stdout
    )


def test_the_command_lists_what_is_not_on_both_sides(tmp_path: Path) -> None:
    result = compared(tmp_path, run_of(1), [*run_of(2)[1:], run_of(2)[3]])
    assert result.exit_code == 2
    assert (
        "missing in the target: 1\n  flash_benchmarking triton bfloat16 1x16x128x64 causal"
        in result.stdout
    )
    assert "measured more than once, the newest counts: 1" in result.stdout


def test_models_and_other_cases_are_described(tmp_path: Path) -> None:
    model = case_to_dict(ModelCase(model=MODEL_SIZES["xl"], batch=4, attention="reference"))
    rows = [
        record(128, [1.0] * 5, case=case) for case in (model, {"type": "Bucket", "bucket_mb": 10})
    ]
    result = compared(tmp_path, rows, rows, "--all")
    assert "triton xl batch=4 context=512 warmup=5 forward time" in result.stdout
    assert "triton bucket_mb=10 forward time" in result.stdout


def test_names_in_records_give_no_orders_to_a_terminal(tmp_path: Path) -> None:
    """Taken for markup, a path in brackets ended the command with a traceback, and a word in
    brackets vanished.
    """
    name, other = "a\x1b[2Jb", "c\x1b]0;t\x07"
    base = [
        record(128, [1.0] * 5, implementation=name),
        record(256, [1.0] * 5, implementation=other),
    ]
    target = [broken(base[0], message="no\x1b[31m [/tag] in [bold]")]
    result = compared(tmp_path, base, target, "--all")
    assert "\x1b" not in result.output and "\x07" not in result.output
    for shown in (r"a\x1b[2Jb", r"no\x1b[31m [/tag] in [bold]", r"c\x1b]0;t\x07"):
        assert shown in result.stdout


def test_lines_that_are_no_records_are_counted_in_one_line(tmp_path: Path) -> None:
    """Every such line was a warning of its own, with the path of the module that read it."""
    base = write(tmp_path / "base", run_of(1))
    damaged = base / "records" / "flash_benchmarking.jsonl"
    with open(damaged, "a") as file:
        file.write("not a record\n" * 100)
    with pytest.warns(UserWarning, match=f"^{damaged.name}:.*, and 99 more lines of it$") as told:
        assert invoke("compare", base, base).exit_code == 0
    assert len(told) == 2, "one a side"


def test_records_of_two_devices_are_refused(tmp_path: Path) -> None:
    other = [record(128, [1.0], device={"name": "Other GPU", "kind": "cuda"})]
    assert_refused(
        compared(tmp_path, run_of(1), other), "records of different devices cannot be compared"
    )


def test_pooled_series_stay_one_and_units_are_not_mixed() -> None:
    """Two curves behind one another are no curve, and 2 s are not 2 ms."""
    curve = structs.replace(record(128, [3.0, 2.0]), quantity="loss", unit="nats")
    assert pool([[curve], [structs.replace(curve, samples=[4.0, 1.0])]]) == [curve]
    times = record(128, [1.0, 2.0])
    (pooled,) = pool([[times], [structs.replace(times, samples=[3.0])]])
    assert pooled.samples == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="time of .* is in ms and in s"):
        pool([[times], [structs.replace(times, unit="s")]])
