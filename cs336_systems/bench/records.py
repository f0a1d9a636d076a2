"""Records: one JSON object a line, appended when measured, the only way a number reaches a page.

    results/<device>/records/<problem>.jsonl
        one row per quantity: problem, case, implementation, samples, status, ...
    results/<device>/records/runs.jsonl
        one row per run, with what its records share: device, software, commit, date, ...

The field `run` of a record holds its run's id. pandas reads both files without this module:

    pandas.read_json("records/attention_shapes.jsonl", lines=True)

Writing is strict. Reading is tolerant: a damaged line is left out with a warning. placing.py then
finds the cell of the experiment that a record belongs to.
"""

import codecs
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from cs336_systems.config import Scale
from cs336_systems.measure.text import in_one_line

T = TypeVar("T")
Status = Literal["ok", "oom", "failed", "skipped"]
# A problem's name becomes part of file names.
ProblemName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
RUNS = "runs"  # name of the file of runs, so no name for a problem
LARGEST_SAMPLE = 1e30  # sums and squares of samples stay finite
LARGEST_INTEGER = 2**63 - 1  # in a case: the largest that tensors and data frames hold
LONGEST_REASON = 300  # characters of the reason why a line is left out: it may quote the line
MOST_LEVELS = 16  # of nested configs in a case
# Lone surrogates: UTF-8 cannot encode them, and JSON readers refuse their escapes.
HALF_A_PAIR = re.compile(r"[\ud800-\udfff]")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What the records of one `cs336-systems run` share."""

    id: str  # date, time and commit
    scale: Scale
    device: dict[str, Any]  # DeviceInfo: name, kind, compute capability, driver, ...
    software: dict[str, str]  # versions of python, torch, triton; how attention is called
    commit: NonEmpty  # revision of the code that ran
    dirty: bool  # whether the checkout had uncommitted changes
    date: str  # start of the run: ISO 8601, UTC, to the second


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured quantity of one implementation on one case, or the reason why it is missing."""

    run: Run  # the file holds its id only
    problem: ProblemName  # the handout's problem name, e.g. "flash_benchmarking"
    case: dict[str, Any]  # the config object that ran, its class name under "type"
    implementation: NonEmpty  # e.g. "triton", "sdpa_cudnn"
    mode: str  # forward, backward, forward_backward, train_step or collective
    quantity: NonEmpty  # e.g. "time", "compile_time", "peak_memory"
    unit: NonEmpty  # e.g. "ms", "s", "MiB", "1"
    status: Status
    message: str = ""  # why, when status is not ok
    # largest ratio of |result - oracle| to its bound, over all checked outputs; <= 1
    error: float | None = None
    # name of what really ran or was found: a kernel, tiles, a dtype, a line of source
    kernel: str = ""
    seed: int = 0
    sources: str = ""  # hash of the operations that were measured (sources.py)
    # GPU memory that the measuring process held as the cell began; None if not counted
    held_mib: float | None = None
    samples: list[float] = []  # raw, in measured order; empty unless status is ok

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of the quantity: a later record with the same key replaces this one."""
        return (
            self.problem,
            self.run.scale,
            self.implementation,
            case_key(self.case),
            self.mode,
            self.quantity,
        )


def case_to_dict(case: Any) -> dict[str, Any]:
    """Return the dataclass instance `case` as a JSON object with its class name under "type"."""
    if not is_dataclass(case) or isinstance(case, type):
        raise TypeError(f"case must be a dataclass instance, got {type(case).__name__}")
    return {"type": type(case).__name__, **asdict(case)}


def case_key(case: dict[str, Any]) -> str:
    """Return a text that is the same for cases with the same fields and values."""
    return json.dumps(case, sort_keys=True)


def describe_case(case: dict[str, Any]) -> str:
    """Return a case in a few words.

    For example `bfloat16 1x1x4096x64 causal` (batch x heads x queries x head dim) or
    `xl batch=4 context=512 warmup=5`.
    """
    if isinstance(model := case.get("model"), dict):
        context = model.get("context_length")
        facts = {"batch": case.get("batch"), "context": context, "warmup": case.get("warmup")}
        return " ".join(
            [str(model.get("name")), *(f"{k}={v}" for k, v in facts.items() if v is not None)]
        )
    if case.get("type") == "AttentionShape":
        sizes = "x".join(str(case.get(name)) for name in ("batch", "heads", "seqlen_q", "head_dim"))
        return f"{case.get('dtype')} {sizes}{' causal' if case.get('is_causal') else ''}"
    return " ".join(f"{name}={value}" for name, value in case.items() if name != "type")


def check(record: Record) -> None:
    """Raise ValueError, naming the field, if `record` breaks a rule that its types do not express.

    `record` must have the types of its fields; `check_types` checks them, too.
    """
    if record.problem == RUNS:
        raise ValueError(f"problem must not be {RUNS!r}, the file of the runs")
    if not isinstance(record.case.get("type"), str):
        raise ValueError("case must hold its class name under 'type'")
    if bool(record.samples) != (record.status == "ok"):
        raise ValueError(
            f"samples must be there if status is ok and only then, got {len(record.samples)}"
        )
    for sample in record.samples:
        if not (math.isfinite(sample) and abs(sample) <= LARGEST_SAMPLE):
            raise ValueError(f"samples must be finite and at most {LARGEST_SAMPLE:g}, got {sample}")
    if record.error is not None and not math.isfinite(record.error):
        raise ValueError(f"error must be finite, got {record.error}")
    if record.status != "ok" and not record.message:
        raise ValueError(f"message must say why status is {record.status}")
    if record.quantity.endswith("_intervals") and len(record.samples) % 2:
        raise ValueError(
            f"samples of {record.quantity} must be starts and ends by turns, "
            f"got {len(record.samples)}"
        )
    _check_plain(record.case, "case")


def _check_plain(value: Any, name: str, level: int = 0) -> None:
    """Raise ValueError, naming the field, if a case's value does not fit a data frame or JSON."""
    if level > MOST_LEVELS:
        raise ValueError(f"case must have at most {MOST_LEVELS} levels")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_plain(inner, f"{name}.{key}", level + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_plain(inner, name, level + 1)
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{name} must be an integer of 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def check_types(record: Record) -> None:
    """Raise ValueError, naming the field, if `record` has a wrong type or breaks a rule."""
    check(msgspec.convert(msgspec.to_builtins(record), Record))


def check_run(run: Run) -> None:
    """Raise ValueError unless the device of `run` has a name."""
    name = run.device.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("run must have a device with its name")


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Append `records` to the file at `path`, and new runs to `runs.jsonl` beside it.

    Raises ValueError before anything is written if a record or its run fails its checks. The lines
    of a file are one write, flushed to disk. A lone surrogate, which an undecodable byte of a file
    name becomes, is written as the six characters of its escape, `\\udcff`.
    """
    for record in records:
        check_types(record)
        check_run(record.run)
    known = read_runs(path.parent)
    new = {record.run.id: record.run for record in records if record.run.id not in known}
    _append(path.with_name(f"{RUNS}.jsonl"), [msgspec.to_builtins(run) for run in new.values()])
    _append(path, [msgspec.to_builtins(record) | {"run": record.run.id} for record in records])


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append `rows` to the file at `path` as JSON, one a line, in one write flushed to disk."""
    if not rows:
        return
    text = "".join(
        json.dumps(_readable(row), allow_nan=False, separators=(",", ":")) + "\n" for row in rows
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            # A killed run may leave half a line: end it, so that only that line is damaged.
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _readable(value: Any) -> Any:
    """Return `value` with each lone surrogate in its texts replaced by the text of its escape."""
    if isinstance(value, str):
        return HALF_A_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", value)
    if isinstance(value, dict):
        return {_readable(name): _readable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(inner) for inner in value]
    return value


def read_runs(folder: Path) -> dict[str, Run]:
    """Return the runs in the file `runs.jsonl` of `folder` by their ids."""

    def run_of(row: Any) -> Run:
        """Return the run of a JSON object; ValueError if it is not one."""
        run = msgspec.convert(row, Run)
        check_run(run)
        return run

    return {run.id: run for run in _read(folder / f"{RUNS}.jsonl", run_of)}


def read_records(path: Path) -> list[Record]:
    """Return all readable records of the file at `path`, in the order written.

    An absent file has none. Unknown keys are dropped. Lines that are no records, or whose run is
    unknown, are left out with one warning, which names the first. A `path` that is not a regular
    file is skipped with a warning, since reading a pipe would wait for ever.
    """
    if path.name == f"{RUNS}.jsonl":
        return []
    runs = read_runs(path.parent)

    def record_of(row: Any) -> Record:
        """Return the record of a JSON object, with its run filled in; ValueError if it is none."""
        if not isinstance(row, dict):
            raise ValueError(f"must be a JSON object, got {type(row).__name__}")
        if not isinstance(name := row.get("run"), str) or name not in runs:
            raise ValueError(f"run {str(name)[:100]!r} is not in {RUNS}.jsonl")
        record = msgspec.convert(row | {"run": runs[name]}, Record)
        check(record)
        return record

    return _read(path, record_of)


def _read(path: Path, parse: Callable[[Any], T]) -> list[T]:
    """Return `parse` of each line's JSON, with one warning of the lines for which it raises."""
    if not path.exists():
        return []
    if not path.is_file():
        warnings.warn(f"{path.name}: not a regular file, skipped", stacklevel=3)
        return []
    parsed, damaged = [], []
    # some editors write a byte order mark
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed.append(parse(msgspec.json.decode(line)))
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            damaged.append(
                f"{path.name}:{number}: not a record, left out "
                f"({in_one_line(error)[:LONGEST_REASON]})"
            )
    if damaged:
        more = f", and {len(damaged) - 1} more lines of it" if len(damaged) > 1 else ""
        warnings.warn(damaged[0] + more, stacklevel=3)
    return parsed


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each key, in the order in which the keys first appeared."""
    return list({record.key: record for record in records}.values())


def failures(records: Iterable[Record]) -> list[str]:
    """Return a line for each problem, implementation and message of failure among `records`.

    A line names the first case that failed so, and the number of the others.
    """
    # (problem, implementation, message) -> the cases, in their order
    cases: dict[tuple[str, str, str], dict[str, None]] = {}
    for r in records:
        if r.status == "failed":
            cases.setdefault((r.problem, r.implementation, r.message), {})[
                describe_case(r.case)
            ] = None
    return [
        f"{problem}: {name} failed "
        f"({next(iter(of))}{f' and {len(of) - 1} more' * (len(of) > 1)}): {message}"
        for (problem, name, message), of in cases.items()
    ]


def skips(records: Iterable[Record]) -> list[str]:
    """Return a line for each reason why `records` were skipped, with its implementations."""
    names: dict[str, dict[str, None]] = {}  # message -> implementations, in their order
    for record in records:
        if record.status == "skipped":
            names.setdefault(record.message, {})[record.implementation] = None
    return [f"skipped {', '.join(of)}: {message}" for message, of in names.items()]


def is_series(quantity: str) -> bool:
    """Return whether the samples of `quantity` are a curve, intervals or a timeline.

    The samples of other quantities are repetitions, of which a part is as good as all. A part of a
    series is not.
    """
    return quantity == "loss" or quantity.endswith("_intervals") or quantity.startswith("timeline.")
