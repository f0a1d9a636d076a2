"""Which GPU tests have passed on a GPU, and whether the sources they cover have changed since.

Most machines, CI's among them, have no GPU, so a run on one leaves a file of JSON lines (one a
test) that is committed beside the measurements. A row holds the test's outcome and a hash of what
it covers: the paths of its module's constant `COVERS`, the module itself, and the PTX of the
kernels that it runs (`ptx:triton`, see ptx.py) in the place of their sources. An ordinary run
compares the hashes and says which tests have to run again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cs336_systems.bench.sources import code_of
from tests import ptx

PUBLISHED_RECORDS = "results/nvidia-*/tests.jsonl"  # one a GPU, relative to the repository's root
CHANGED = "sources changed since"


@dataclass(frozen=True, kw_only=True)
class GpuTest:
    """A GPU test of this checkout."""

    test: str  # pytest's node id, relative to the repository's root
    # the source files and folders whose change makes an earlier pass worthless
    covers: tuple[str, ...]
    source_hash: str


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """How a GPU test ended, where, and on which sources."""

    test: str
    outcome: str  # passed, failed or skipped
    message: str  # why, when it did not pass; else empty
    covers: list[str]
    source_hash: str
    device: str  # e.g. "NVIDIA H200"
    torch: str
    triton: str
    date: str  # ISO 8601, UTC, seconds
    commit: str
    dirty: bool  # whether the checkout had uncommitted changes


def source_hash(root: Path, test_file: str, covers: Sequence[str]) -> str:
    """sha256 over the names and the code of `test_file` and of the files in `covers`, all relative
    to `root`.

    A folder stands for all Python and C++ files below it, `ptx:FAMILY` for what its kernels compile
    to: `UNKNOWN` is returned where the sources of the kernels have changed since they were
    compiled. ValueError when `covers` is not a sequence of existing paths.
    """
    if isinstance(covers, str) or not covers or not all(isinstance(path, str) for path in covers):
        raise ValueError(
            f"COVERS of {test_file} must be a non-empty tuple of paths, got {covers!r}"
        )
    files = {root / test_file}
    families = [path.removeprefix(ptx.PREFIX) for path in covers if path.startswith(ptx.PREFIX)]
    kernels = {ptx.PREFIX + family: ptx.digest_of(root, family) for family in families}
    if ptx.UNKNOWN in kernels.values():
        return ptx.UNKNOWN
    for path in covers:
        if path in kernels:
            continue
        covered = root / path
        found = (
            {covered} if covered.is_file() else {*covered.rglob("*.py"), *covered.rglob("*.cpp")}
        )
        if not found:
            raise ValueError(
                f"COVERS of {test_file} names {path!r}, which is neither a file nor a folder of sources"
            )
        files |= found
    digest = hashlib.sha256()
    for name, file in sorted((file.relative_to(root).as_posix(), file) for file in files):
        content = code_of(file.read_text(encoding="utf-8"), file.suffix).encode()
        # the length keeps content from passing as a name
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    for path, compiled in sorted(kernels.items()):
        digest.update(f"{path}\0{compiled}\0".encode())
    return digest.hexdigest()


def read_rows(path: Path) -> dict[str, GpuRow]:
    """The rows of the file at `path` by test; an absent file has none. ValueError names a line that
    is not a row.
    """
    if not path.exists():
        return {}
    known = {field.name for field in fields(GpuRow)}
    rows = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            loaded: dict[str, Any] = json.loads(line)
            row = GpuRow(**{key: value for key, value in loaded.items() if key in known})
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a row of a GPU test ({error})") from error
        rows[row.test] = row
    return rows


def published_rows(root: Path) -> dict[str, GpuRow]:
    """The rows of all published records by test; of a test that ran on several GPUs the newest."""
    rows: dict[str, GpuRow] = {}
    for path in sorted(root.glob(PUBLISHED_RECORDS)):
        for test, row in read_rows(path).items():
            rows[test] = max(row, rows.get(test, row), key=lambda one: one.date)
    return rows


def write_rows(path: Path, rows: Mapping[str, GpuRow]) -> None:
    """Replace the file at `path` by `rows`, sorted by test; a killed run leaves the old file or the
    new one whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(asdict(rows[test]), sort_keys=True) + "\n" for test in sorted(rows))
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


@contextmanager
def changing(path: Path) -> Iterator[dict[str, GpuRow]]:
    """The rows of the file at `path`, to be changed in place and written back; other processes wait
    meanwhile.

    So several runs of pytest, each over its own files, may share a record.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = read_rows(path)
        yield rows
        write_rows(path, rows)


def drop_removed(
    rows: Mapping[str, GpuRow], collected: Mapping[str, GpuTest], files: Container[str], root: Path
) -> dict[str, GpuRow]:
    """`rows` without those of tests that no longer exist.

    `files` are the test files that were collected, with and without GPU tests, and `collected`
    every GPU test in them: rows of other files are kept as long as the file exists.
    """
    return {
        test: row
        for test, row in rows.items()
        if test in collected or (_file(test) not in files and (root / _file(test)).exists())
    }


def stale_reason(test: GpuTest, row: GpuRow | None) -> str | None:
    """Why `test` has to run again on a GPU; None when its row holds."""
    if row is None:
        return "never run"
    if row.outcome != "passed":
        return f"{row.outcome} on {row.device}" + (f": {row.message}" if row.message else "")
    # two unknowns need not be the same
    if row.source_hash != test.source_hash or test.source_hash == ptx.UNKNOWN:
        return f"{CHANGED} {row.date}"
    return None


def summary_lines(
    tests: Sequence[GpuTest], rows: Mapping[str, GpuRow], record: Path | str
) -> tuple[list[str], bool]:
    """What the terminal says about the GPU tests, and whether all of them are up to date.

    Parametrised cases with the same reason share a line, and so do all tests of a file whose
    sources have changed.
    """
    reasons: Counter[tuple[str, str]] = Counter()
    changed: dict[str, list[str]] = {}  # when each test of a file passed
    for test in tests:
        reason = stale_reason(test, rows.get(test.test))
        if reason is not None and reason.startswith(CHANGED):
            changed.setdefault(_file(test.test), []).append(rows[test.test].date)
        elif reason is not None:
            reasons[test.test.split("[")[0], reason] += 1
    if not reasons and not changed:
        devices = ", ".join(sorted({rows[test.test].device for test in tests}))
        return [f"all {len(tests)} GPU tests are up to date ({devices})"], True
    stale = reasons.total() + sum(map(len, changed.values()))
    lines = [f"{stale} of {len(tests)} GPU tests are STALE in {record}:"]
    for (name, reason), count in reasons.items():
        lines.append(f"  {name}: {reason}" + (f" ({count} cases)" if count > 1 else ""))
    for file, dates in changed.items():
        count = f"{len(dates)} test{'s' if len(dates) > 1 else ''}"
        lines.append(f"  {file}: {CHANGED} {max(dates)[:10]}, when they passed ({count})")
    if any(test.source_hash == ptx.UNKNOWN for test in tests):
        lines.append(
            "whether the PTX of the kernels has changed is not known: `make ptx` compiles them; commit it"
        )
    lines.append("`make test-gpu` on a machine with a GPU runs them again; commit the record")
    return lines, False


def _file(test: str) -> str:
    return test.split("::")[0]
