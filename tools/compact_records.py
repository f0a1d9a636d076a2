"""Make files of records smaller without losing a cell: superseded records dropped, samples thinned.

    python tools/compact_records.py [--samples 25] results/nvidia-h200/records/flash_benchmarking.jsonl ...

Of a record with more samples than `--samples` evenly spaced ones are kept, in their order, so that a table's medians
are of measured values still; a series (a loss curve, intervals, a timeline) is kept whole, since its samples are no
repetitions. The newest record of each cell is kept. Fill the documents again afterwards
(`cs336-systems report`). A file that is as small already is left as it is.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from cs336_systems.experiments.attention import KEPT_SAMPLES, evenly_spaced
from cs336_systems.experiments.records import Record, is_series, latest, read_records, write_records


def compacted(records: Sequence[Record], most_samples: int) -> list[Record]:
    """The newest record of each key, with at most `most_samples` of its samples unless they are a series."""
    return [
        record
        if is_series(record.quantity) or len(record.samples) <= most_samples
        else replace(record, samples=evenly_spaced(record.samples, most_samples), rounds=[])
        for record in latest(records)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make files of records smaller without losing a cell.")
    parser.add_argument("--samples", type=int, default=KEPT_SAMPLES, help="kept of a record (%(default)s)")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    if options.samples < 1:
        parser.error(f"--samples must be positive, got {options.samples}")
    for path in options.files:
        if not path.is_file():
            parser.error(f"{path} is no file")
        before = path.stat().st_size
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                records = read_records(path)
            except UserWarning as warning:  # what cannot be read would be lost, such as rows of a newer schema
                parser.error(f"{path} is left as it is: {warning}")
        if not records:
            parser.error(f"{path} holds no records")
        write_records(path, compacted(records, options.samples))
        print(f"{path}: {before / 2**20:.2f} MiB to {path.stat().st_size / 2**20:.2f} MiB, {len(records)} records read")


if __name__ == "__main__":
    main()
