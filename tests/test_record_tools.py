"""The developers' tool that pools the rounds of repeated runs."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cs336_systems.bench.records import Record, append_records, read_records
from tests.test_records import RUN, record
from tools.pool_rounds import main as pool_rounds


def write_rounds(folder: Path, *rounds: list[Record]) -> list[str]:
    """Results folders with one file of records each, dated by their number, and one to pool into:
    as arguments.
    """
    for number, records in enumerate(rounds):
        dated = [replace(each, run=replace(each.run, id=f"run-{number}")) for each in records]
        append_records(
            folder / f"round{number}" / "a-device" / "records" / "flash_benchmarking.jsonl", dated
        )
    (folder / "results").mkdir()
    return [
        *(str(folder / f"round{number}") for number in range(len(rounds))),
        "--into",
        str(folder / "results"),
    ]


def pooled_records(folder: Path) -> list[Record]:
    return read_records(folder / "results" / "records" / "flash_benchmarking.jsonl")


def test_rounds_become_one_set_of_records(tmp_path, capsys):
    """Repetitions are those of all rounds, what is measured once is the round's in the middle;
    other rows stay.
    """
    once = [
        record(quantity="peak_memory", unit="MiB", samples=[peak]) for peak in (10.0, 20.0, 30.0)
    ]
    gaps = [record(quantity="compute_intervals", samples=[0.0, end]) for end in (1.0, 2.0, 3.0)]
    hosts = [record(quantity="host_time", samples=[end, end]) for end in (1.0, 2.0, 3.0)]
    errors = (0.1, 0.9, 0.3)
    # medians 9.25, 10.5, 6
    times = [record(samples=samples) for samples in ([9.0, 9.5], [1.0, 20.0], [5.0, 7.0])]
    times = [replace(time, error=error) for time, error in zip(times, errors)]
    other, replaced = record(implementation="triton"), record(samples=[0.5])
    arguments = write_rounds(tmp_path, *map(list, zip(times, once, gaps, hosts)))
    append_records(tmp_path / "results" / "records" / "flash_benchmarking.jsonl", [other, replaced])
    pool_rounds(arguments)
    last = replace(RUN, id="run-2")
    assert pooled_records(tmp_path) == [
        other,
        record(samples=[9.0, 9.5, 1.0, 20.0, 5.0, 7.0], error=0.9, run=last),
        replace(once[0], run=last),
        replace(gaps[0], run=last),
        record(quantity="host_time", samples=[1.0, 1.0, 2.0, 2.0, 3.0, 3.0], run=last),
    ]
    assert "5 records, those of 3 rounds among them" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.partial"))


def test_what_failed_in_every_round_has_failed(tmp_path):
    failed = record(samples=[], status="failed", message="a reason")
    pool_rounds(write_rounds(tmp_path, [failed], [failed]))
    assert [(each.status, each.message) for each in pooled_records(tmp_path)] == [
        ("failed", "a reason")
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commit": "fedcba987654"}, "these have several commits: 0123456789ab, fedcba987654"),
        ({"dirty": True}, "these have several commits: 0123456789ab, 0123456789ab with changes"),
        ({"device": {"name": "another", "kind": "cpu"}}, "these have several devices"),
        ({"software": {"python": "3.12.3"}}, "these have several versions"),
        ({"seed": 7}, "these have several seeds: 0, 7"),
        ({"implementation": "triton"}, "round 2 has not the same cells and quantities as round 1"),
        (
            {"unit": "s"},
            "unit of time of tiled (flash_benchmarking) is 's' in round 2 and 'ms' in round 1",
        ),
        (
            {"kernel": "other_tiles"},
            "kernel of time of tiled (flash_benchmarking) is 'other_tiles' in round 2",
        ),
        (
            {"samples": [], "status": "skipped", "message": "a budget"},
            "status of time of tiled (flash_bench",
        ),
    ],
)
def test_only_repetitions_are_pooled(changes, message, tmp_path, capsys):
    """Of two revisions, devices or kernels no sample stands for the other's; a lost cell must not
    cost the others.
    """
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
    elsewhere = replace(elsewhere, run=replace(elsewhere.run, id="elsewhere"))
    target = tmp_path / "results" / "records" / "flash_benchmarking.jsonl"
    append_records(target, [elsewhere])
    with pytest.raises(SystemExit):
        pool_rounds(arguments)
    assert (
        "would hold several devices or scales: a GPU at tiny, a processor at tiny"
        in capsys.readouterr().err
    )
    assert read_records(target) == [elsewhere]
