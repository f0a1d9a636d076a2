"""Records: one JSON object a line, appended when measured, the only way a number reaches a table.

Strict on write (a record without a commit is refused); on read a bad line, such as a truncated last one, costs only
itself, and unknown keys and repeated keys are survivable. Usage:

    append_records(path, [record, ...])        # one atomic append of whole lines
    records = latest(read_records(path))       # the newest record of each key
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cs336_systems.config import DTYPES, MODES, SCALES, AttentionShape

SCHEMA_VERSION = 1
Status = Literal["ok", "oom", "failed", "skipped"]
STATUSES: tuple[str, ...] = get_args(Status)
TIME_UNITS = ("ms", "s")
UNITS = (*TIME_UNITS, "MiB", "GHz", "1", "bit", "nats", "calls")  # "1": a pure number
RECORD_MODES = (*MODES, "collective")  # the last: one collective alone, outside of a model's passes
PROBLEM = re.compile(r"[A-Za-z0-9_-]{1,100}")  # it becomes part of file names and of the names of blocks
INTERVALS = "_intervals"  # how quantities end whose samples are starts and ends by turns
CASE_SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "warmup")
DEEPEST_CASE = 4  # objects inside objects; a ModelCase has 2


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured quantity of one implementation on one case, or the reason why there is none."""

    problem: str  # the handout's problem name, e.g. "flash_benchmarking"
    scale: str  # tiny, smoke or handout
    case: dict[str, Any]  # the config object that ran, its class name under "type"
    implementation: str  # e.g. "triton", "sdpa_cudnn"
    mode: str  # forward, backward, forward_backward, train_step or collective
    quantity: str  # e.g. "time", "compile_time", "peak_memory"
    unit: str  # e.g. "ms", "s", "MiB"
    samples: list[float] = field(default_factory=list)  # raw, in measured order; empty unless status is ok
    rounds: list[int] = field(default_factory=list)  # samples of each round, where those of several are pooled
    status: str = "ok"
    message: str = ""  # why, when status is not ok
    kernel: str = ""  # what really ran or was found, where a name says it: a kernel, tiles, a dtype, a line of source
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
    _check_values(record, refuse)
    if record.status != "ok" and not record.message:
        refuse("message", f"must say why status is {record.status}")


def record_from_json(loaded: Any) -> Record:
    """The record that `loaded`, a parsed line, holds; ValueError with the reason if it is none.

    Unknown keys are dropped. Types are checked down to whatever a table, figure or file name is made of, so that no
    reader has to; what only a writer must say (commit, date, dirty) may be missing in records of others.
    """
    if not isinstance(loaded, dict):
        raise ValueError(f"must be a JSON object, got {type(loaded).__name__}")
    known = {f.name for f in fields(Record)}
    needed = [f.name for f in fields(Record) if f.default is MISSING and f.default_factory is MISSING]
    if lacking := [name for name in needed if name not in loaded]:
        raise ValueError(f"lacks {', '.join(lacking)}")
    record = Record(**{key: value for key, value in loaded.items() if key in known})

    def refuse(name: str, why: str) -> None:
        raise ValueError(f"record.{name} {why}")

    _check_types(record, refuse)
    _check_values(record, refuse)
    # Half a surrogate pair is valid JSON and cannot be written to a table, nor can what exceeds a float.
    json.dumps(asdict(record), ensure_ascii=False, allow_nan=False).encode()
    return record


Refuse = Callable[[str, str], None]  # raises ValueError from a field's name and what is wrong with it


def _check_types(record: Record, refuse: Refuse) -> None:
    """The types that the class declares, which JSON does not promise."""
    for field_, types, words in (
        *((f.name, (str,), "a string") for f in fields(Record) if f.type == "str"),
        *((f.name, (dict,), "an object") for f in fields(Record) if str(f.type).startswith("dict")),
        ("samples", (list,), "a list"),
        ("rounds", (list,), "a list"),
        ("error", (int, float, type(None)), "a number or null"),
        ("dirty", (bool, type(None)), "true, false or null"),
        ("seed", (int,), "an int"),
        ("schema", (int,), "an int"),
    ):
        value = getattr(record, field_)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            refuse(field_, f"must be {words}, got {type(value).__name__}")
    if not 1 <= record.schema <= SCHEMA_VERSION:
        refuse("schema", f"must be at most {SCHEMA_VERSION}, got {record.schema}")
    for name in ("name", "kind"):
        if not isinstance(record.device.get(name, ""), str):
            refuse("device", f"must have a string under {name!r}")
    if not all(isinstance(version, str) for version in record.software.values()):
        refuse("software", "must hold strings")
    if not all(isinstance(sample, int | float) and not isinstance(sample, bool) for sample in record.samples):
        refuse("samples", "must hold numbers")
    if not all(type(count) is int and count > 0 for count in record.rounds):
        refuse("rounds", "must hold positive ints")


def _check_values(record: Record, refuse: Refuse) -> None:
    """What holds for every record, written or read; `record` has the declared types."""
    if not PROBLEM.fullmatch(record.problem):
        refuse("problem", f"must be 1 to 100 letters, digits, '_' and '-', got {record.problem[:100]!r}")
    for name, choices in (("status", STATUSES), ("mode", RECORD_MODES), ("scale", SCALES), ("unit", UNITS)):
        if getattr(record, name) not in choices:
            refuse(name, f"must be one of {', '.join(choices)}, got {getattr(record, name)[:100]!r}")
    if record.quantity in ("time", "compile_time") and record.unit not in TIME_UNITS:
        refuse("unit", f"of {record.quantity} must be one of {', '.join(TIME_UNITS)}, got {record.unit!r}")
    _check_case(record.case, refuse)
    if record.case["type"] == "AttentionShape" and record.mode == "train_step":
        refuse("mode", "must not be train_step where the case is an AttentionShape")
    for name in ("name", "kind"):
        if not record.device.get(name):
            refuse("device", f"must have {name!r}")
    if record.status == "ok":
        if not record.samples:
            refuse("samples", "must not be empty when status is ok")
        if record.quantity.endswith(INTERVALS) and not _are_intervals(record.samples):
            refuse("samples", f"of {record.quantity} must be starts and ends by turns, got {len(record.samples)}")
        if not all(math.isfinite(sample) for sample in record.samples):
            refuse("samples", "must be finite")
    elif record.samples:
        refuse("samples", f"must be empty when status is {record.status}")
    if record.rounds and sum(record.rounds) != len(record.samples):
        refuse("rounds", f"must add up to the {len(record.samples)} samples, got {record.rounds}")


def _are_intervals(samples: Sequence[float]) -> bool:
    return len(samples) % 2 == 0 and all(start <= end for start, end in zip(samples[::2], samples[1::2]))


def _check_case(case: dict[str, Any], refuse: Refuse) -> None:
    """The keys that cells of tables are named by have one type in all cases, the two known cases have all they need."""
    if not isinstance(case.get("type"), str):
        refuse("case", "must hold the class name under 'type' (see case_to_dict)")
    _check_leaves(case, DEEPEST_CASE, refuse)
    model, precision = (case.get(name, {}) for name in ("model", "precision"))
    for name, value in (("model", model), ("precision", precision)):
        if not isinstance(value, dict):
            refuse("case", f"must have an object under {name!r}")
    sizes = {name: case.get(name) for name in CASE_SIZES} | {"context_length": model.get("context_length")}
    for name, value in sizes.items():
        if value is not None and (type(value) is not int or not 0 <= value < 2**53):  # a column of floats is exact
            refuse("case", f"must have a whole number under {name!r}")
    texts = {"attention": case.get("attention"), "name": model.get("name")}
    for name, value in texts.items():
        if not isinstance(value, str | None):
            refuse("case", f"must have a string under {name!r}")
    dtypes = {name: precision.get(name) for name in ("parameters", "autocast")} | {"dtype": case.get("dtype")}
    for name, value in dtypes.items():
        if value not in (None, *DTYPES):
            refuse("case", f"must have one of {', '.join(DTYPES)} under {name!r}")
    if not isinstance(case.get("is_causal"), bool | None):
        refuse("case", "must have true or false under 'is_causal'")
    if case["type"] == "AttentionShape":
        shape = {f.name: case[f.name] for f in fields(AttentionShape) if f.name in case}
        try:
            AttentionShape(**shape)
        except (ValueError, TypeError) as error:
            refuse("case", f"is no AttentionShape: {error}")
        if case["is_causal"] is None:
            refuse("case", "must have true or false under 'is_causal'")
    if case["type"] == "ModelCase":
        if not (model.get("name") and precision):
            refuse("case", "of type ModelCase must have 'model' with a 'name', and 'precision'")
        if case.get("batch") is None or case.get("warmup") is None:
            refuse("case", "of type ModelCase must have 'batch' and 'warmup'")


def _check_leaves(case: dict[str, Any], levels: int, refuse: Refuse) -> None:
    for name, value in case.items():
        if isinstance(value, dict) and levels > 1:
            _check_leaves(value, levels - 1, refuse)
        elif not isinstance(value, str | int | float | None):
            refuse("case", f"must hold strings, numbers and shallow objects of these, got a {type(value).__name__} "
                   f"under {name[:100]!r}")  # fmt: skip


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


def write_compact(path: Path, records: Sequence[Record]) -> None:
    """Replace the file at `path` by `records`, a third as long: what most of them share stands once, in a first line.

    That line is `{"common": {...}}`; the lines behind it leave out what they have in common. Records appended later are
    whole. A killed run leaves the old file or the new one.
    """
    rows = [asdict(record) for record in records]
    spelt = {name: [json.dumps(row[name], sort_keys=True) for row in rows] for name in (rows[0] if rows else ())}
    common = {name: json.loads(Counter(values).most_common(1)[0][0]) for name, values in spelt.items()}
    lines = [{"common": common}, *({k: v for k, v in row.items() if v != common[k]} for row in rows)]
    text = "".join(json.dumps(line, sort_keys=True, allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def read_records(path: Path) -> list[Record]:
    """All readable records of the file at `path`, in the order written; an absent file has none.

    Records behind a line of `write_compact`'s have its values for the keys that they leave out.
    Unknown keys are dropped; lines that are no records (see `record_from_json`) are skipped with a warning that names
    the first, and so is a `path` that is not a regular file: reading a pipe would wait for ever.
    """
    if not path.exists() or path.name == "runs.jsonl":
        return []
    if not path.is_file():
        warnings.warn(f"{path.name}: not a regular file, skipped", stacklevel=2)
        return []
    records = []
    skipped: list[str] = []
    common: dict[str, Any] = {}
    runs = _runs(path.with_name("runs.jsonl"))
    # Not splitlines: a separator such as U+2028 may stand in a JSON string as it is.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            loaded = json.loads(line.decode(errors="replace"))
            if isinstance(loaded, dict) and loaded.keys() == {"common"}:
                common = dict(loaded["common"])
                continue
            if isinstance(loaded, dict) and loaded.get("run") in runs:  # as experiments/records.py writes
                loaded = {**runs[loaded["run"]], **loaded}
            records.append(record_from_json({**common, **loaded} if isinstance(loaded, dict) else loaded))
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            skipped.append(f"{path.name}:{number}: not a record, skipped ({error})")
    if skipped:
        more = f", and {len(skipped) - 1} more lines of it" if len(skipped) > 1 else ""
        warnings.warn(skipped[0] + more, stacklevel=2)
    return records


def _runs(path: Path) -> dict[str, dict[str, Any]]:
    """What the rows of each run share, of a folder in which every run stands once."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {row["id"]: row for row in rows}


def is_series(quantity: str) -> bool:
    """Whether the samples of `quantity` are a series and no repetitions: a curve, intervals, a timeline.

    Of repetitions some say what all say; a series lacks what is left out.
    """
    return quantity == "loss" or quantity.endswith(INTERVALS) or quantity.startswith("timeline.")


def latest(records: Iterable[Record]) -> list[Record]:
    """The newest record of each key, in the order in which the keys first appeared."""
    return list({record.key: record for record in records}.values())
