"""Records: one JSON object a line, appended when measured, the only way a number reaches a page.

    results/<device>/records/<problem>.jsonl    a row a quantity: problem, case, implementation, samples, status, ...
    results/<device>/records/runs.jsonl         what all rows of a run share: device, software, commit, date, ...

A row names its run by `run`. pandas reads both files without this module:

    pandas.read_json("records/attention_shapes.jsonl", lines=True)

Writing is strict. Reading is tolerant: a damaged line costs itself and a warning. placing.py then
finds the cell of the experiment that a record is of.
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
# it becomes part of file names
ProblemName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
RUNS = "runs"  # the file of runs, which no problem may be called
LARGEST_SAMPLE = 1e30  # sums and squares of samples stay finite
LARGEST_INTEGER = 2**63 - 1  # of a case: what tensors and data frames hold
LONGEST_REASON = 300  # characters of why a line is left out: it may quote the line
MOST_LEVELS = 16  # of configs within configs in a case
# no character: no UTF-8 says it, and no reader of JSON takes its escape
HALF_A_PAIR = re.compile(r"[\ud800-\udfff]")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What the records of one `cs336-systems run` share."""

    id: str  # date, time and commit
    scale: Scale
    device: dict[str, Any]  # DeviceInfo: name, kind, compute capability, driver, ...
    software: dict[str, str]  # versions of python, torch, triton; how attention is called
    commit: NonEmpty  # revision of the code that ran
    dirty: bool  # whether the checkout had uncommitted changes
    date: str  # when it began: ISO 8601, UTC, seconds


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured quantity of one implementation on one case, or the reason why there is none."""

    run: Run  # in the file its id
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
    # what really ran or was found, where a name says it: a kernel, tiles, a dtype, a line of source
    kernel: str = ""
    seed: int = 0
    sources: str = ""  # hash of the operations that were measured (sources.py)
    held_mib: float | None = None  # of the GPU's memory, by the measuring process as the cell began
    samples: list[float] = []  # raw, in measured order; empty unless status is ok

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the quantity; a later record with the same key replaces an earlier one."""
        return (
            self.problem,
            self.run.scale,
            self.implementation,
            case_key(self.case),
            self.mode,
            self.quantity,
        )


def case_to_dict(case: Any) -> dict[str, Any]:
    """The dataclass `case` as a JSON object with its class name under "type"."""
    if not is_dataclass(case) or isinstance(case, type):
        raise TypeError(f"case must be a dataclass instance, got {type(case).__name__}")
    return {"type": type(case).__name__, **asdict(case)}


def case_key(case: dict[str, Any]) -> str:
    return json.dumps(case, sort_keys=True)


def describe_case(case: dict[str, Any]) -> str:
    """A case in a few words: `bfloat16 1x1x4096x64 causal`, `xl batch=4 context=512 warmup=5`."""
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
    """Raise ValueError naming the field if `record` says what its types allow and no record may
    say.
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
            f"samples of {record.quantity} must be starts and ends by turns, got {len(record.samples)}"
        )
    _check_plain(record.case, "case")


def _check_plain(value: Any, name: str, level: int = 0) -> None:
    """Raise ValueError naming the field if a case holds what a data frame or JSON cannot."""
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
    """Raise ValueError naming the field if `record` does not have the types that it says, or breaks
    a rule.
    """
    check(msgspec.convert(msgspec.to_builtins(record), Record))


def check_run(run: Run) -> None:
    """Raise ValueError if `run` does not say which device it was on."""
    name = run.device.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("run must have a device with its name")


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Append `records` to the file at `path`, and their runs to `runs.jsonl` beside it where it
    lacks them.

    Raises ValueError before anything is written if a record says too little. The lines are one
    write, flushed to disk. Half of a surrogate pair, as an undecodable byte of a file name becomes,
    is written as the six characters `\\udcff`.
    """
    for record in records:
        check_types(record)
        check_run(record.run)
    known = read_runs(path.parent)
    new = {record.run.id: record.run for record in records if record.run.id not in known}
    _append(path.with_name(f"{RUNS}.jsonl"), [msgspec.to_builtins(run) for run in new.values()])
    _append(path, [msgspec.to_builtins(record) | {"run": record.run.id} for record in records])


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    text = "".join(
        json.dumps(_readable(row), allow_nan=False, separators=(",", ":")) + "\n" for row in rows
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            # a killed run's last line: closed, so that it spoils nothing but itself
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _readable(value: Any) -> Any:
    """`value` with each half of a surrogate pair in its texts as the characters of its escape."""
    if isinstance(value, str):
        return HALF_A_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", value)
    if isinstance(value, dict):
        return {_readable(name): _readable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(inner) for inner in value]
    return value


def read_runs(folder: Path) -> dict[str, Run]:
    """The runs of `folder`/runs.jsonl by their ids."""

    def run_of(row: Any) -> Run:
        run = msgspec.convert(row, Run)
        check_run(run)
        return run

    return {run.id: run for run in _read(folder / f"{RUNS}.jsonl", run_of)}


def read_records(path: Path) -> list[Record]:
    """All readable records of the file at `path`, in the order written; an absent file has none.

    Unknown keys are dropped. Lines that are no records, or whose run is unknown, are left out with
    one warning, which names the first; so is a `path` that is not a regular file, since reading a
    pipe would wait for ever.
    """
    if path.name == f"{RUNS}.jsonl":
        return []
    runs = read_runs(path.parent)

    def record_of(row: Any) -> Record:
        if not isinstance(row, dict):
            raise ValueError(f"must be a JSON object, got {type(row).__name__}")
        if not isinstance(name := row.get("run"), str) or name not in runs:
            raise ValueError(f"run {str(name)[:100]!r} is not in {RUNS}.jsonl")
        record = msgspec.convert(row | {"run": runs[name]}, Record)
        check(record)
        return record

    return _read(path, record_of)


def _read(path: Path, parse: Callable[[Any], T]) -> list[T]:
    """What `parse` makes of each line's JSON, and a warning of the lines that it refuses."""
    if not path.exists():
        return []
    if not path.is_file():
        warnings.warn(f"{path.name}: not a regular file, skipped", stacklevel=3)
        return []
    parsed, damaged = [], []
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")  # the mark is an editor's
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed.append(parse(msgspec.json.decode(line)))
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            damaged.append(
                f"{path.name}:{number}: not a record, left out ({in_one_line(error)[:LONGEST_REASON]})"
            )
    if damaged:
        more = f", and {len(damaged) - 1} more lines of it" if len(damaged) > 1 else ""
        warnings.warn(damaged[0] + more, stacklevel=3)
    return parsed


def latest(records: Iterable[Record]) -> list[Record]:
    """The newest record of each key, in the order in which the keys first appeared."""
    return list({record.key: record for record in records}.values())


def failures(records: Iterable[Record]) -> list[str]:
    """What failed among `records`, a line for each implementation and message, with the first of
    its cases.
    """
    cases: dict[tuple[str, str, str], dict[str, None]] = {}  # in their order
    for r in records:
        if r.status == "failed":
            cases.setdefault((r.problem, r.implementation, r.message), {})[
                describe_case(r.case)
            ] = None
    return [
        f"{problem}: {name} failed ({next(iter(of))}{f' and {len(of) - 1} more' * (len(of) > 1)}): {message}"
        for (problem, name, message), of in cases.items()
    ]


def skips(records: Iterable[Record]) -> list[str]:
    """Why some of `records` were skipped, a line for each message, with the implementations that it
    is of.
    """
    names: dict[str, dict[str, None]] = {}  # in their order
    for record in records:
        if record.status == "skipped":
            names.setdefault(record.message, {})[record.implementation] = None
    return [f"skipped {', '.join(of)}: {message}" for message, of in names.items()]


def is_series(quantity: str) -> bool:
    """Whether the samples of `quantity` are a series and no repetitions: a curve, intervals, a
    timeline.

    Of repetitions some say what all say; a series lacks what is left out.
    """
    return quantity == "loss" or quantity.endswith("_intervals") or quantity.startswith("timeline.")
