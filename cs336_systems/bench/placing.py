"""Match records to the cells of an experiment, which decides what a report shows.

    records = read_of_one_machine(folder, experiment.name)  # a results folder
    placed, left_out = place_records(experiment.name, records, plan_for(experiment, records))

A record belongs to the experiment if its case can be built from the experiment's case classes.
Fields that an older release did not have take their defaults. A record is left out if its case has
a field that this release does not have or a value that the class refuses, or if its unit is not
that of its quantity in the experiment. A warning names what is left out. Of two records with the
same key the later in the file is kept.

Two records with different keys may still claim the same cell of a table, e.g. if the experiment no
longer has the batch size of one of them. `preferred_rows` then takes the record that the experiment
promises, or the newest.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cs336_systems.bench.records import Record, case_key, case_to_dict, read_records
from cs336_systems.bench.spec import Cell, Experiment
from cs336_systems.config import RunConfig
from cs336_systems.measure.text import in_one_line

T = TypeVar("T")

# What code that reads rows raises if a row holds an unexpected value.
UNREADABLE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError)
LONGEST_WARNING = 300  # characters: it may quote a record


class NotMade(UserWarning):  # noqa: N818
    """Warning that a table, a figure or a page is missing from a report and why."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases, rows and units that an experiment's cells promise to measure."""

    classes: Mapping[str, type]  # name of a case's class in records -> the class
    places: Mapping[str, int]  # case_key -> the place of the case among the cells
    promised: frozenset[tuple[str, ...]]  # (case_key, implementation, mode, quantity)
    units: Mapping[tuple[str, str], set[str]]  # (mode, quantity) -> units of such rows


def plan_of(cells: Sequence[Cell]) -> Plan:
    """Return the plan of `cells`: their cases, promised rows and units."""
    classes: dict[str, type] = {}
    places: dict[str, int] = {}
    promised: set[tuple[str, ...]] = set()
    units: dict[tuple[str, str], set[str]] = defaultdict(set)
    # Keys by a case's identity, not its value: cases with 1 and 1.0 are equal but have two keys.
    keys: dict[int, str] = {}
    for cell in cells:
        for case in (cell.case, *(row.case for row in cell.rows if row.case is not None)):
            if id(case) not in keys:
                keys[id(case)] = case_key(case_to_dict(case))
                classes[type(case).__name__] = type(case)
                places.setdefault(keys[id(case)], len(places))
        for row in cell.rows:
            key = keys[id(cell.case if row.case is None else row.case)]
            promised.add((key, row.implementation or cell.implementation, row.mode, row.quantity))
            units[row.mode, row.quantity].add(row.unit)
    return Plan(classes=classes, places=places, promised=frozenset(promised), units=units)


def plan_for(experiment: Experiment, records: Sequence[Record]) -> Plan:
    """Return the plan of `experiment` at the scale and for the device kind of `records[0]`."""
    run = records[0].run
    kind = "cuda" if run.device.get("kind") == "cuda" else "cpu"
    return plan_of(
        experiment.cells(RunConfig(scale=run.scale, device=kind))  # type: ignore[arg-type]
    )


def place_records(
    problem: str, records: Iterable[Record], plan: Plan
) -> tuple[list[Record], list[str]]:
    """Return the records that belong to `problem`, and a line on each of the others.

    The cases of the returned records have every field that their class has, with defaults for
    fields that an older release did not record. A line says why its record is left out.
    """
    # case_key -> the completed case, or why the case is none of the plan's classes
    cases: dict[str, dict[str, Any] | str] = {}
    placed: list[Record] = []
    left_out: list[str] = []
    for record in records:
        key = case_key(record.case)
        if key not in cases:
            cases[key] = _completed_case(record.case, plan.classes)
        case = cases[key]

        units = plan.units.get((record.mode, record.quantity), {record.unit})
        reason = ""
        if record.problem != problem:
            reason = f"its problem is {record.problem}"
        elif isinstance(case, str):
            reason = case
        elif record.unit not in units:
            reason = f"unit must be {' or '.join(sorted(units))}, got {record.unit}"
        elif case is not record.case:
            record = msgspec.structs.replace(record, case=case)

        if reason:
            left_out.append(f"{problem}: {record.implementation} left out, {reason}")
        else:
            placed.append(record)
    return placed, left_out


def warn_of(lines: Sequence[str], stacklevel: int) -> None:
    """Warn with the first of `lines` and the number of the others; do nothing without lines."""
    if lines:
        more = f", and {len(lines) - 1} more records" if len(lines) > 1 else ""
        warnings.warn(in_one_line(lines[0])[:LONGEST_WARNING] + more, stacklevel=stacklevel + 1)


def attempt(what: str, make: Callable[[], T]) -> T | None:
    """Return `make()`; if it raises one of UNREADABLE, warn and return None.

    The warning is a `NotMade` that names `what`, the table or figure, and the reason.
    """
    try:
        return make()
    except UNREADABLE as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        warnings.warn(
            in_one_line(f"{what} cannot be made: {reason}")[:LONGEST_WARNING], NotMade, stacklevel=2
        )
        return None


def _completed_case(given: dict[str, Any], classes: Mapping[str, type]) -> dict[str, Any] | str:
    """Return a record's case with every field of its class, or the reason why it has no class.

    The reason is a str: its class is none of `classes`, refuses a value, or lacks a field.
    """
    name = given["type"]
    if name not in classes:
        return f"case is of the class {name}, must be of {' or '.join(classes)}"
    try:
        built: Any = msgspec.convert(
            {key: value for key, value in given.items() if key != "type"}, classes[name]
        )
    # __post_init__ may raise ValueError or TypeError
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        return f"case is no {name}: {error}"
    whole = case_to_dict(built)
    if unknown := _unknown_fields(given, whole):
        return f"case has fields that {name} does not have here: {', '.join(unknown)}"
    return _filled(given, whole)


def _unknown_fields(given: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    """Return the names of fields in `given` that `whole` lacks; nested ones as "outer.inner"."""
    unknown = []
    for name, value in given.items():
        if name not in whole:
            unknown.append(name)
        elif isinstance(value, dict) and isinstance(whole[name], dict):
            unknown += [f"{name}.{inner}" for inner in _unknown_fields(value, whole[name])]
    return unknown


def _filled(given: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with the fields that only `whole` has; `given` itself if it lacks none.

    Values of `given` are kept as they are: 1 stays 1 where `whole` has 1.0.
    """
    filled = {}
    for name, value in whole.items():
        own = given.get(name, value)
        filled[name] = (
            _filled(own, value) if isinstance(own, dict) and isinstance(value, dict) else own
        )
    return given if filled == given else filled


def read_of_one_machine(folder: Path, problem: str) -> list[Record]:
    """Return the records of `problem` in a results folder, of one pair of device and scale.

    It is the most frequent pair; a warning names what was measured elsewhere.
    """
    records = read_records(folder / "records" / f"{problem}.jsonl")

    def machine(record: Record) -> tuple[str, str]:
        """Return the (device name, scale) that the record was measured with."""
        return str(record.run.device.get("name")), record.run.scale

    counts = Counter(map(machine, records))
    if len(counts) < 2:
        return records
    most = max(counts, key=lambda one: counts[one])
    others = [record for record in records if machine(record) != most]
    warn_of(
        [
            f"{record.problem}: {record.implementation} left out, "
            f"it was measured on {name} at scale {scale}, "
            f"most were on {most[0]} at scale {most[1]}"
            for record in others
            for name, scale in [machine(record)]
        ],
        stacklevel=2,
    )
    return [record for record in records if machine(record) == most]


def preferred_rows(rows: Sequence[Mapping[str, Any]], cell: str) -> list[Any]:
    """Return the promised ones among the `rows` that claim one table cell, else only the newest.

    `rows` are of a frame; a warning names those not returned, and `cell` in it names the table's
    cell. Several promised rows are all returned: the declared table fails to tell them apart, and
    the caller must raise that error.
    """
    if len(rows) < 2:
        return list(rows)
    promised = [row for row in rows if row["promised"]]
    kept = promised or [max(rows, key=lambda row: row["position"])]
    others = [row for row in rows if not any(row is one for one in kept)]
    warn_of(
        [
            f"{cell}: {row['implementation']} left out, a second record of {row['case']}"
            for row in others
        ],
        2,
    )
    return kept
