"""Pool the records of several rounds: the same cells, measured again and again, become one set of records.

    python -m cs336_systems run PROBLEM --device cuda --results round1         # and round2, round3, ...
    python tools/pool_rounds.py round1 round2 round3 --into results/nvidia-h200

A busy host slows a cell for seconds or minutes; with one cell after the other it slows one peer and not the next. In
rounds it strikes all of them. The times of a cell are those of all rounds, in their order. What is measured once a
round, such as a traced step with its intervals or a peak, is that of the round whose median time is the middle one. A
cell that failed in any round has failed. ROUND is a results folder or one that holds a single device's; rows of other
cells under `--into` are kept. Fill the documents again afterwards (`cs336-systems report`).
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from cs336_systems.compare import pool
from cs336_systems.records import Record, case_key, latest, read_records, write_compact

Pass = tuple[str, ...]  # of a cell: what has one row of times


def pool_rounds(rounds: Sequence[Sequence[Record]]) -> list[Record]:
    """One record a key from the records of each round, as the module says; ValueError if they are not repetitions.

    Repetitions have one commit, one kind of device, one set of versions, and the same keys.
    """
    newest = [latest(records) for records in rounds]
    _require_repetitions(newest)
    typical = _typical_rounds(newest)
    by_round = [{record.key: record for record in records} for records in newest]
    return [
        by_round[typical[_pass(record)]][record.key] if record.status == "ok" and record.quantity != "time" else record
        for record in pool(newest)
    ]


def _pass(record: Record) -> Pass:
    return (record.problem, record.scale, record.implementation, case_key(record.case), record.mode)


def _typical_rounds(rounds: Sequence[Sequence[Record]]) -> dict[Pass, int]:
    """Of each pass the round with the middle one of the median times (the lower of two); the first if it has none."""
    medians: dict[Pass, list[tuple[float, int]]] = defaultdict(list)
    passes = [_pass(record) for records in rounds for record in records]
    for number, records in enumerate(rounds):
        for record in records:
            if record.quantity == "time" and record.status == "ok":
                medians[_pass(record)].append((statistics.median(record.samples), number))
    return {name: sorted(found)[(len(found) - 1) // 2][1] if (found := medians[name]) else 0 for name in set(passes)}


def _require_repetitions(rounds: Sequence[Sequence[Record]]) -> None:
    first = rounds[0]
    for number, records in enumerate(rounds[1:], start=2):
        if {record.key for record in records} != {record.key for record in first}:
            raise ValueError(f"round {number} has not the same cells and quantities as round 1")
    for name, values in (
        ("commits", {record.commit for records in rounds for record in records}),
        ("devices", {str(record.device.get("name")) for records in rounds for record in records}),
        ("versions", {str(sorted(record.software.items())) for records in rounds for record in records}),
    ):
        if len(values) > 1:
            raise ValueError(f"rounds must be of one kind, these have several {name}: {', '.join(sorted(values))}")


def _record_files(folder: Path) -> dict[str, Path]:
    """The record files of a round by name; ValueError if there are none, or of several devices."""
    folders = [path for path in (folder / "records", *sorted(folder.glob("*/records"))) if path.is_dir()]
    if len(folders) != 1:
        raise ValueError(f"{folder} must hold the records of one device, got {len(folders)} folders called records")
    files = {path.name: path for path in sorted(folders[0].glob("*.jsonl"))}
    if not files:
        raise ValueError(f"{folders[0]} holds no records")
    return files


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Pool the records of several rounds of the same cells.")
    parser.add_argument("rounds", nargs="+", type=Path, metavar="ROUND")
    parser.add_argument("--into", required=True, type=Path, help="results folder of the device")
    options = parser.parse_args(arguments)
    if len(options.rounds) < 2:
        parser.error("there must be two rounds at least")
    results: dict[Path, list[Record]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            files = [_record_files(folder) for folder in options.rounds]
            names = sorted({name for found in files for name in found})
            for name in names:
                missing = [str(folder) for folder, found in zip(options.rounds, files) if name not in found]
                if missing:
                    raise ValueError(f"{name} is missing in {', '.join(missing)}")
                path = options.into / "records" / name
                new = pool_rounds([read_records(found[name]) for found in files])
                results[path] = latest([*read_records(path), *new])
        except (ValueError, UserWarning) as error:  # a line that cannot be read would be lost
            parser.error(f"nothing is written: {error}")
    for path, records in results.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_compact(path, records)
        print(f"{path}: {len(records)} records, those of {len(options.rounds)} rounds among them")


if __name__ == "__main__":
    main()
