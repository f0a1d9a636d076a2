"""Records: one JSON object a line, appended when measured, the only way a number reaches a table.

Strict on write (a record without a commit is refused), tolerant on read (a truncated last line, unknown keys and
repeated keys are survivable). Usage:

    append_records(path, [record, ...])        # one atomic append of whole lines
    records = latest(read_records(path))       # the newest record of each key
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cs336_systems.config import MODES, SCALES

SCHEMA_VERSION = 1
Status = Literal["ok", "oom", "failed", "skipped"]
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured quantity of one implementation on one case, or the reason why there is none."""

    problem: str  # the handout's problem name, e.g. "flash_benchmarking"
    scale: str  # tiny, smoke or handout
    case: dict[str, Any]  # the config object that ran, its class name under "type"
    implementation: str  # e.g. "triton", "sdpa_cudnn"
    mode: str  # forward, backward, forward_backward or train_step
    quantity: str  # e.g. "time", "compile_time", "peak_memory"
    unit: str  # e.g. "ms", "s", "MiB"
    samples: list[float] = field(default_factory=list)  # raw, in measured order; empty unless status is ok
    status: str = "ok"
    message: str = ""  # why, when status is not ok
    kernel: str = ""  # the kernel or configuration that really ran, where the implementation chooses one
    error: float | None = None  # largest ratio of |result - oracle| to its bound, over all checked outputs; <= 1
    device: dict[str, Any] = field(default_factory=dict)  # DeviceInfo: name, kind, compute capability, driver, ...
    software: dict[str, str] = field(default_factory=dict)  # versions of python, torch, triton
    commit: str = ""  # revision of the code that ran
    dirty: bool | None = None  # whether the checkout had uncommitted changes
    date: str = ""  # ISO 8601, UTC, seconds
    seed: int = 0
    schema: int = SCHEMA_VERSION

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the quantity; a later record with the same key replaces an earlier one."""
        return (self.problem, self.scale, self.implementation, case_key(self.case), self.mode, self.quantity)


def case_to_dict(case: Any) -> dict[str, Any]:
    """The dataclass `case` as a JSON object with its class name under "type"."""
    if not is_dataclass(case) or isinstance(case, type):
        raise TypeError(f"case must be a dataclass instance, got {type(case).__name__}")
    return {"type": type(case).__name__, **asdict(case)}


def case_key(case: dict[str, Any]) -> str:
    return json.dumps(case, sort_keys=True)


def validate(record: Record) -> None:
    """Raise ValueError naming the field if `record` may not be written."""

    def refuse(name: str, why: str) -> None:
        raise ValueError(f"record.{name} {why} (problem {record.problem!r}, implementation {record.implementation!r})")

    for name in ("problem", "implementation", "quantity", "unit", "commit", "date"):
        if not getattr(record, name):
            refuse(name, "must not be empty")
    if record.dirty is None:
        refuse("dirty", "must say whether the checkout had uncommitted changes")
    if record.schema != SCHEMA_VERSION:
        refuse("schema", f"must be {SCHEMA_VERSION}, got {record.schema}")
    for name, choices in (("status", STATUSES), ("mode", MODES), ("scale", SCALES)):
        if getattr(record, name) not in choices:
            refuse(name, f"must be one of {', '.join(choices)}, got {getattr(record, name)!r}")
    if "type" not in record.case:
        refuse("case", "must hold the class name under 'type' (see case_to_dict)")
    for name in ("name", "kind"):
        if not record.device.get(name):
            refuse("device", f"must have {name!r}")
    if record.status == "ok":
        if not record.samples:
            refuse("samples", "must not be empty when status is ok")
        if not all(math.isfinite(sample) for sample in record.samples):
            refuse("samples", "must be finite")
    else:
        if record.samples:
            refuse("samples", f"must be empty when status is {record.status}")
        if not record.message:
            refuse("message", f"must say why status is {record.status}")


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Append `records` to the file at `path` in one write and flush them to disk.

    A truncated last line, left by a killed run, is closed first, so that it spoils nothing but itself.
    """
    for record in records:
        validate(record)
    text = "".join(json.dumps(asdict(record), sort_keys=True, allow_nan=False) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> list[Record]:
    """All readable records of the file at `path`, in the order written; an absent file has none.

    Unknown keys are dropped; a line that is not a record is skipped with a warning that names it.
    """
    if not path.exists():
        return []
    known = {f.name for f in fields(Record)}
    records = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            loaded = json.loads(line)
            records.append(Record(**{key: value for key, value in loaded.items() if key in known}))
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            warnings.warn(f"{path.name}:{number}: not a record, skipped ({error})", stacklevel=2)
    return records


def latest(records: Iterable[Record]) -> list[Record]:
    """The newest record of each key, in the order in which the keys first appeared."""
    return list({record.key: record for record in records}.values())
