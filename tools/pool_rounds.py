"""Pool the records of several rounds: the same cells, measured again and again, become one set of
records.

    python -m cs336_systems run PROBLEM --device cuda --results round1         # and round2, round3, ...
    python tools/pool_rounds.py round1 round2 round3 --into results/nvidia-h200

A busy host slows a cell for seconds or minutes; with one cell after the other it slows one peer and
not the next. In rounds it strikes all of them. What has several samples a round, times above all,
has those of all rounds, in their order. What is measured once a round, such as a traced step with
its intervals
or a peak, is that of the round whose median time is the middle one. Every round must have what the
others have, of the same code, and nothing may have failed in one and not in another: measure that
round again, or leave it out. ROUND is a results folder or one that holds a single device's; rows of
other cells under `--into`, a device's folder that is there, are kept. Fill the documents again
afterwards (`cs336-systems report`).
"""

import argparse
import statistics
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from cs336_systems.bench.records import (
    Record,
    append_records,
    case_key,
    is_series,
    latest,
    read_records,
)
from cs336_systems.book.comparison import pool, record_files

Pass = tuple[str, ...]  # of a cell: what has one row of times


def pool_rounds(rounds: Sequence[Sequence[Record]]) -> list[Record]:
    """One record a key from the records of each round, as the module says; ValueError if they are
    not repetitions.

    Repetitions have the same keys, and of each the same status, kernel and unit; one commit,
    device, seed and set of versions. The record's error is the largest and its run the last.
    """
    newest = [{record.key: record for record in latest(records)} for records in rounds]
    _require_repetitions(newest)
    typical = _typical_rounds(newest)
    pooled = []
    for record in pool([list(records.values()) for records in newest]):
        each = [records[record.key] for records in newest]
        if (
            record.status != "ok"
            or is_series(record.quantity)
            or all(len(one.samples) == 1 for one in each)
        ):
            record = each[typical[_pass(record)]]
        errors = [one.error for one in each if one.error is not None]
        pooled.append(replace(record, error=max(errors, default=None), run=each[-1].run))
    return pooled


def _pass(record: Record) -> Pass:
    return (
        record.problem,
        record.run.scale,
        record.implementation,
        case_key(record.case),
        record.mode,
    )


def _typical_rounds(rounds: Sequence[dict[tuple[str, ...], Record]]) -> dict[Pass, int]:
    """Of each pass the round with the middle one of the median times (the lower of two); the first
    if it has none.
    """
    medians: dict[Pass, list[tuple[float, int]]] = defaultdict(list)
    for number, records in enumerate(rounds):
        for record in records.values():
            if record.quantity == "time" and record.status == "ok":
                medians[_pass(record)].append((statistics.median(record.samples), number))
    passes = {_pass(record) for record in rounds[0].values()}
    return {
        name: sorted(found)[(len(found) - 1) // 2][1] if (found := medians[name]) else 0
        for name in passes
    }


def _require_repetitions(rounds: Sequence[dict[tuple[str, ...], Record]]) -> None:
    first = rounds[0]
    if not first:
        raise ValueError("round 1 holds no records")
    everything = [record for records in rounds for record in records.values()]
    for name, values in (
        (
            "commits",
            {
                f"{record.run.commit}{' with changes' if record.run.dirty else ''}"
                for record in everything
            },
        ),
        ("devices", {str(sorted(record.run.device.items())) for record in everything}),
        ("versions", {str(sorted(record.run.software.items())) for record in everything}),
        ("seeds", {str(record.seed) for record in everything}),
    ):
        if len(values) > 1:
            raise ValueError(
                f"rounds must be of one kind, these have several {name}: {', '.join(sorted(values))}"
            )
    for number, records in enumerate(rounds[1:], start=2):
        if records.keys() != first.keys():
            raise ValueError(f"round {number} has not the same cells and quantities as round 1")
        for key, record in records.items():
            for name in ("status", "unit", "kernel"):
                ours, theirs = getattr(record, name), getattr(first[key], name)
                if ours != theirs:
                    what = (
                        f"{name} of {record.quantity} of {record.implementation} ({record.problem})"
                    )
                    raise ValueError(
                        f"{what} is {ours!r} in round {number} and {theirs!r} in round 1"
                    )
            for before, earlier in enumerate(rounds[: number - 1], start=1):
                if record.samples and (record.run.id, record.samples) == (
                    earlier[key].run.id,
                    earlier[key].samples,
                ):
                    raise ValueError(f"round {number} is round {before} once more")


def _merge(rounds: Sequence[Path], into: Path) -> dict[Path, list[Record]]:
    """What each file under `into` is to hold; ValueError, and nothing is written, where that would
    lose or mix.
    """
    if not into.is_dir():
        raise ValueError(f"{into} is no folder")
    folders = [path.resolve() for path in rounds]
    if len(set(folders)) < len(folders) or any(
        into.resolve().is_relative_to(folder) for folder in folders
    ):
        raise ValueError("a round is named twice, or --into lies in one")
    files = [{file.name: file for file in record_files(folder)} for folder in rounds]
    merged: dict[Path, list[Record]] = {}
    for name in sorted({name for found in files for name in found}):
        missing = [str(folder) for folder, found in zip(rounds, files) if name not in found]
        if missing:
            raise ValueError(f"{name} is missing in {', '.join(missing)}")
        path = into / "records" / name
        new, old = pool_rounds([read_records(found[name]) for found in files]), read_records(path)
        kinds = {(str(record.run.device.get("name")), record.run.scale) for record in (*old, *new)}
        if len(kinds) > 1:
            found = ", ".join(f"{device} at {scale}" for device, scale in sorted(kinds))
            raise ValueError(f"{path} would hold several devices or scales: {found}")
        merged[path] = latest([*old, *new])
    return merged


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Pool the records of several rounds of the same cells."
    )
    parser.add_argument("rounds", nargs="+", type=Path, metavar="ROUND")
    parser.add_argument("--into", required=True, type=Path, help="results folder of the device")
    options = parser.parse_args(arguments)
    if len(options.rounds) < 2:
        parser.error("there must be two rounds at least")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            merged = _merge(options.rounds, options.into)
        except (
            ValueError,
            OSError,
            UserWarning,
        ) as error:  # a line that cannot be read would be lost
            parser.error(f"nothing is written: {error}")
    for path, records in merged.items():
        path.parent.mkdir(exist_ok=True)
        # a killed process leaves the old file or the new one
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        append_records(partial, records)
        partial.replace(path)
        print(f"{path}: {len(records)} records, those of {len(options.rounds)} rounds among them")


if __name__ == "__main__":
    main()
