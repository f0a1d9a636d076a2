"""Run problems: list their cells, skip finished ones, measure the rest, append records at once.

An interrupted sweep loses only the cell that it was measuring; the same command continues there.
On several GPUs, start one process per GPU with `--shard 1/4` to `--shard 4/4` and the same folder:
each process measures its own part of the cells.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any, Literal, TextIO

from msgspec import structs

from cs336_systems import __version__
from cs336_systems.accounting import predicted_peak_bytes
from cs336_systems.bench.axes import CHOSEN, choose_cells
from cs336_systems.bench.placing import place_records, plan_of
from cs336_systems.bench.records import (
    LONGEST_REASON,
    Record,
    Run,
    append_records,
    case_to_dict,
    check_types,
    latest,
    read_records,
)
from cs336_systems.bench.sources import sources_hash
from cs336_systems.bench.spec import Cell, Sample, load
from cs336_systems.bench.worker import Outcome, Worker
from cs336_systems.config import RunConfig
from cs336_systems.device import DeviceInfo, get_device_info

# A CPU cell is skipped if it is predicted to need more than this fraction of the machine's memory.
USABLE_MEMORY = 0.8
Rerun = Literal["none", "failed", "all"]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The revision of the code that ran; given on the command line where git does not know it."""

    commit: str
    dirty: bool  # whether the checkout had uncommitted changes


def find_provenance(commit: str | None, dirty: bool | None) -> Provenance:
    """Return the given commit and dirty flag, completed from git.

    Outside of a checkout of this package, the commit is "unknown" with the package's version.
    Raises ValueError if `commit` is empty, or is given without `dirty`.
    """
    file = Path(__file__).resolve()
    folder = file.parent
    if commit is not None and not commit.strip():
        raise ValueError(f"--commit must not be empty, got {commit!r}")
    if commit is None:
        # An installed package may lie in the checkout of another project, which does not track it.
        tracked = _git(folder, ["ls-files", "--error-unmatch", file.name]) is not None
        commit = _git(folder, ["rev-parse", "--short=12", "HEAD"]) if tracked else None
        if commit is None:
            return Provenance(commit=f"unknown ({__version__})", dirty=bool(dirty))
        if dirty is None:
            dirty = bool(_git(folder, ["status", "--porcelain", "--untracked-files=no"]))
    if dirty is None:
        raise ValueError("--commit needs --dirty or --clean")
    return Provenance(commit=commit, dirty=dirty)


def _git(folder: Path, arguments: list[str]) -> str | None:
    """Return the output of a git command in `folder`; None if it fails, or takes over 30 s."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def results_folder(results: Path, device: DeviceInfo, run: RunConfig) -> Path:
    """Return the folder for the results of `run` on `device`.

    It is `results/<device>` at handout scale and `results/<device>-<scale>` at the others. A run
    with chosen sizes has its own folder, whose name ends in "-chosen".
    """
    name = device.slug if run.scale == "handout" else f"{device.slug}-{run.scale}"
    return results / (name + CHOSEN * run.axes.sizes)


def software_versions() -> dict[str, str]:
    """Return the versions of Python, PyTorch and Triton; "absent" for a package not installed."""
    versions = {"python": python_version()}
    for package in ("torch", "triton"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The `index`-th of `count` parts into which a run's cells are divided, group by group.

    Cells that need the machine to themselves (`Cell.alone`) all belong to the first part.
    """

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that "I/N" names, e.g. "2/4"; ValueError unless 1 <= I <= N."""
        first, slash, second = text.partition("/")
        if not (
            slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)
        ):
            raise ValueError(f"--shard must be I/N with 1 <= I <= N, got {text!r}")
        return cls(index=int(first), count=int(second))

    def of(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return this shard's part of `cells`, in their order.

        A group is never split, since tables compare its cells. Groups are dealt out in turn,
        those with the largest predicted memory first.
        """
        if self.count == 1:
            return list(cells)

        groups = dict.fromkeys(cell.group for cell in cells if not cell.alone)
        largest = {
            group: max(cell.predicted_bytes for cell in cells if cell.group == group)
            for group in groups
        }
        turn = {
            group: place % self.count + 1
            for place, group in enumerate(sorted(groups, key=lambda g: -largest[g]))
        }
        return [cell for cell in cells if (1 if cell.alone else turn[cell.group]) == self.index]


class Sweep:
    """One run of some problems into one results folder.

    `rerun` says which finished cells are measured again. `implementations` limits the sweep to
    cells of these names; None means all. `interpret` runs Triton's kernels in its interpreter.
    """

    def __init__(
        self,
        run: RunConfig,
        folder: Path,
        provenance: Provenance,
        *,
        rerun: Rerun = "none",
        implementations: Iterable[str] | None = None,
        interpret: bool = False,
        shard: Shard = Shard(),  # noqa: B008 - frozen
    ) -> None:
        self.run, self.folder, self.rerun, self.shard = run, folder, rerun, shard
        self.implementations = None if implementations is None else set(implementations)
        self.device = get_device_info(run.device)
        self.interpret = interpret
        self.worker = Worker(run, folder / "logs" / f"worker{self._suffix}.log", interpret)
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.facts = Run(
            id=f"{date[:-1].replace('-', '').replace(':', '')}"
            f"-{provenance.commit[:8]}{self._suffix}",
            scale=run.scale,
            device=self.device.to_dict(),
            software=software_versions(),
            commit=provenance.commit,
            dirty=provenance.dirty,
            date=date,
        )
        self._lock_file: TextIO | None = None

    @property
    def _suffix(self) -> str:
        """Return "-<index>of<count>" for one of several shards, else ""."""
        return f"-{self.shard.index}of{self.shard.count}" if self.shard.count > 1 else ""

    def lock(self) -> None:
        """Lock the results folder against other runs until `unlock` or the end of this process.

        Raises ValueError if another run of the same shard has locked it. Two runs would measure
        every cell twice, and each other's load.
        """
        path = self.folder / "logs" / f"run{self._suffix}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_file = open(path, "w")  # noqa: SIM115 - open for as long as the folder is locked
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock_file.close()
            raise ValueError(f"another run is measuring into {self.folder}") from None
        self._lock_file = lock_file

    def unlock(self) -> None:
        """Release the lock of the results folder; no effect if it is not locked."""
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def pending(self, problem: str) -> tuple[list[Cell], Counter[str]]:
        """Return this shard's unmeasured cells of `problem`, and the finished ones' statuses."""
        return self.unfinished(
            problem, self.shard.of(planned_cells(problem, self.run, self.implementations or ()))
        )

    def unfinished(self, problem: str, cells: list[Cell]) -> tuple[list[Cell], Counter[str]]:
        """Return the unmeasured ones among `cells` of `problem`, and the finished ones' statuses.

        The second value counts finished cells by `cell_status`. A cell is finished if each of its
        rows has a record of this run's seed; with `rerun` "failed", of another status than failed.
        With `rerun` "all" no cell is finished. The seed is compared here, since it is not part of
        a record's key.
        """
        if self.implementations is not None:
            cells = [
                cell for cell in cells if self.implementations.intersection(cell.implementations)
            ]
        if self.rerun == "all":
            return cells, Counter()

        records, _ = place_records(problem, read_records(self.record_file(problem)), plan_of(cells))
        done = {
            record.key: record.status
            for record in latest(records)
            if record.seed == self.run.seed and (self.rerun == "none" or record.status != "failed")
        }

        pending: list[Cell] = []
        finished: Counter[str] = Counter()
        for cell in cells:
            known = [done[key] for key in cell.keys(self.run) if key in done]
            if len(known) < len(cell.rows):
                pending.append(cell)
            else:
                finished[cell_status(known)] += 1
        return pending, finished

    def record_file(self, problem: str) -> Path:
        """Return the path of the file that holds the records of `problem`."""
        return self.folder / "records" / f"{problem}.jsonl"

    def measure(
        self,
        cells: list[Cell],
        *,
        time_budget_s: float | None = None,
        started: Callable[[Cell], None] = lambda _: None,
    ) -> Iterator[list[Record]]:
        """Measure `cells` one by one, yielding each cell's records once they are on disk.

        No cell is started after `time_budget_s` seconds. `started` is called before each cell. The
        measuring process stays alive for further cells: the caller must end it with
        `self.worker.stop()` or `self.worker.kill()`.
        """
        deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
        for cell in cells:
            if deadline is not None and time.monotonic() > deadline:
                return
            started(cell)
            why = predicted_overflow(cell.predicted_bytes, self.device)
            outcome = Outcome(status="skipped", message=why) if why else self.worker.measure(cell)
            yield self.record(cell, outcome)

    def record(self, cell: Cell, outcome: Outcome) -> list[Record]:
        """Write the outcome of `cell` to disk as records, and return these."""
        records = self._records(cell, outcome)
        append_records(self.record_file(cell.problem), records)
        return records

    def _records(self, cell: Cell, outcome: Outcome) -> list[Record]:
        """Return a record for each row of `cell`.

        The record of a row without a measurement has the outcome's status and message instead.
        """
        measured = {sample.row: sample for sample in outcome.measurements}
        records = []
        for row in cell.rows:
            status, message = outcome.status, outcome.message
            if status == "ok":
                status, message = "failed", "the measurement ended without reporting this row"

            nothing = Record(
                run=self.facts,
                problem=cell.problem,
                case=case_to_dict(row.case or cell.case),
                implementation=cell.name_in_records(row, self.run),
                mode=row.mode,
                quantity=row.quantity,
                unit=row.unit,
                status=status,
                message=_without_paths(message),
                seed=self.run.seed,
                sources=sources_hash(cell.problem),
                held_mib=None
                if outcome.held_bytes is None
                else round(outcome.held_bytes / 2**20, 1),
            )
            records.append(_with_sample(nothing, measured[row]) if row in measured else nothing)
        return records


def _with_sample(nothing: Record, sample: Sample) -> Record:
    """Return the empty record `nothing` with the samples of `sample`, or the reason for their lack.

    Values that no record may hold (NaN, infinity, other types than numbers) give a record with
    status "failed". Samples are rounded to six digits, the error to four.
    """
    try:
        record = structs.replace(
            nothing,
            error=None if sample.error is None else float(f"{sample.error:.4g}"),
            kernel=sample.kernel,
            samples=[float(f"{value:.6g}") for value in sample.samples],
        )
        if record.samples:
            record = structs.replace(record, status="ok", message="")
        elif sample.message:
            record = structs.replace(
                record, status=sample.status, message=_without_paths(sample.message)
            )
        check_types(record)
    # what NaN, infinity and values other than numbers raise
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        message = f"what was measured cannot be recorded: {error}"
        return structs.replace(nothing, status="failed", message=message[:LONGEST_REASON])
    return record


def planned_cells(problem: str, run: RunConfig, implementations: Iterable[str] = ()) -> list[Cell]:
    """Return all cells of `problem`, and those of the user's own `implementations`.

    Names of the form `package.module:Name` among `implementations` are the user's own; the others
    are ignored. Where an experiment measures by turns, the user's own join each cell and promise
    the rows of its first implementation. Otherwise each of them gets a cell on each case.
    """
    found = load(problem)
    cells = choose_cells(problem, found.cells(run), run.axes)

    # Add the user's own implementations.
    own = [name for name in implementations if ":" in name]
    if found.by_turns:
        for place, cell in enumerate(cells):
            of_first = [row for row in cell.rows if row.implementation == cell.implementations[0]]
            more = (replace(row, implementation=name) for name in own for row in of_first)
            cells[place] = replace(cell, rows=(*cell.rows, *more))
    else:
        first: dict[Any, Cell] = {}  # case -> its first cell, whose rows are promised
        for cell in cells:
            first.setdefault(cell.case, cell)
        cells += [replace(cell, implementation=name) for name in own for cell in first.values()]

    # Fill in what an experiment leaves open: the problem's name and the predicted peak memory.
    for place, cell in enumerate(cells):
        modes = [row.mode for row in cell.rows]
        predicted = cell.predicted_bytes or predicted_peak_bytes(
            cell.case, cell.implementation, modes
        )
        cells[place] = replace(cell, problem=problem, predicted_bytes=predicted)
    return cells


def predicted_overflow(num_bytes: int, device: DeviceInfo) -> str:
    """Return why a cell that needs `num_bytes` must be skipped on `device`; "" if it need not.

    On a GPU it is always "": a GPU raises an out-of-memory error, but on a CPU the machine swaps
    or the process is killed.
    """
    limit = int(USABLE_MEMORY * device.memory_bytes)
    if device.kind != "cpu" or num_bytes <= limit:
        return ""
    return f"predicted to need {num_bytes:,} bytes, more than the {limit:,} usable here"


def cell_status(statuses: Iterable[str]) -> str:
    """Return the status of a cell from the `statuses` of its rows.

    It is "ok" if all rows are, else the first other status, with "partly " before it if some rows
    are ok. "failed" takes precedence over the others, e.g. over a kernel that this machine lacks.
    """
    statuses = list(statuses)
    others = [status for status in statuses if status != "ok"]
    if not others:
        return "ok"
    worst = "failed" if "failed" in others else others[0]
    return worst if len(others) == len(statuses) else f"partly {worst}"


def _without_paths(message: str) -> str:
    """Return `message` with the checkout's path as "." and the home folder's path as "~"."""
    for path, short in (
        (str(Path(__file__).resolve().parents[2]), "."),
        (os.path.expanduser("~"), "~"),
    ):
        message = message.replace(path, short)
    return message
