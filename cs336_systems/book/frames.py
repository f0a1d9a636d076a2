"""Load records of one problem into a pandas frame, the source of its tables, figures and page.

    frame = read_frame(load("attention_shapes"), Path("results/nvidia-h200"))
    pick(frame, {"quantity": "time", "mode": "forward", "implementation": ("hopper", "triton")})

Columns of the frame:

- those of a record: implementation, mode, quantity, unit, status, message, kernel, error, run
- `samples` (raw), and their `count`, `median`, `low`, `high` (quartiles), `mean`, `std` in the
  row's unit
- every field of the case by its name (`seqlen_q`); of nested configs `model` (its name),
  `model.d_model`, `precision` ("bfloat16 autocast")
- `device`: the device's name
- `interpreted`: whether the row is a time of Triton's interpreter, whose samples are dropped here
- `by_turns`: whether each sample belongs to a round
- `place`: index of the implementation among the experiment's
- `promised`: whether the experiment promises the row
- `position`: index of the record among those given, the newest last
- those that the experiment's `columns` adds

Rows stand in the order in which the experiment lists its cells.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import asdict

from cs336_systems.bench.placing import place_records, plan_for, read_of_one_machine, warn_of
from cs336_systems.bench.records import Record, case_key, is_series
from cs336_systems.bench.spec import Calculation, Experiment, Where

UNITS = {
    ("MiB", "GiB"): 1 / 1024,
    ("s", "ms"): 1e3,
    ("ms", "s"): 1e-3,
    ("ms", "µs"): 1e3,
    ("s", "µs"): 1e6,
}
INTERPRETED = "interpreter"  # prefix of `kernel` in records of Triton's interpreter
STATISTICS = ("median", "low", "high", "mean", "std")


def read_frame(experiment: Experiment, folder: Path) -> pd.DataFrame:
    """Return the `load_frame` of the experiment's records in a results folder, of one machine."""
    return load_frame(experiment, read_of_one_machine(folder, experiment.name))


def load_frame(experiment: Experiment, records: Iterable[Record]) -> pd.DataFrame:
    """Return the newest record of each key as a frame; an empty frame if there is none.

    A record that the experiment cannot place or read is left out with a warning. Raises ValueError
    if records come from several devices or scales: numbers of two machines in one table invite a
    meaningless comparison.
    """
    given = list(records)
    for what, values in (
        ("devices", {str(record.run.device.get("name")) for record in given}),
        ("scales", {record.run.scale for record in given}),
    ):
        if len(values) > 1:
            raise ValueError(
                f"records of different {what} cannot share a table: {', '.join(sorted(values))}"
            )
    if not given:
        return pd.DataFrame()

    # Keep the newest row of each key, in the order in which the keys first appeared.
    plan = plan_for(experiment, given)
    newest: dict[tuple[str, ...], dict[str, Any]] = {}
    placed, left_out = place_records(experiment.name, given, plan)
    names = experiment.implementations
    for position, record in enumerate(placed):
        row = _row(record) | {"by_turns": experiment.by_turns, "position": position}
        row["place"] = (
            names.index(record.implementation) if record.implementation in names else len(names)
        )
        row["promised"] = (
            row["case"],
            record.implementation,
            record.mode,
            record.quantity,
        ) in plan.promised
        try:
            newest[record.key] = row | experiment.columns(row)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            why = f"{error} is unknown here" if isinstance(error, KeyError) else str(error)
            left_out.append(
                f"{record.problem}: {record.implementation} left out, "
                f"no columns for its {record.mode} {record.quantity}: {why}"
            )
    warn_of(left_out, stacklevel=2)
    if not newest:
        return pd.DataFrame()

    # Sort as the experiment lists its cells, and add the columns that compare rows.
    rows, last = list(newest.values()), len(plan.places)
    rows.sort(key=lambda row: (plan.places.get(row["case"], last), row["place"]))
    frame = pd.DataFrame(rows)
    for column, base in experiment.speeds.items():
        frame = with_speeds(frame, column, base)
    return experiment.compared(frame)


def calculated_frame(calculation: Calculation) -> pd.DataFrame:
    """Return the rows of a calculation as a frame that tables and figures can use.

    Columns that they expect of measured frames get constant values.
    """
    usual = {
        "implementation": "calculated",
        "mode": "",
        "quantity": "",
        "unit": "1",
        "status": "ok",
        "message": "",
        "kernel": "",
        "interpreted": False,
        "by_turns": False,
        "run": "",
        "place": 0,
        "promised": True,
        "position": 0,
    }
    rows = [usual | row for row in calculation.calculate()]
    frame = pd.DataFrame(rows)
    # Columns of integers become nullable: a row without a number would turn the column into floats.
    whole = [name for name in map(str, frame) if all(type(row.get(name, 0)) is int for row in rows)]
    return frame.astype(dict.fromkeys(whole, "Int64"))


def _row(record: Record) -> dict[str, Any]:
    """Return the columns of a frame that follow from `record` alone."""
    interpreted = record.kernel.startswith(INTERPRETED) and record.quantity.endswith("time")
    samples = () if interpreted else tuple(record.samples)
    row = asdict(record) | {
        "error": math.nan if record.error is None else record.error,
        "interpreted": interpreted,
        "run": record.run.id,
        "device": str(record.run.device.get("name")),
        "samples": samples,
        "count": len(samples),
        **dict.fromkeys(STATISTICS, math.nan),
    }
    if samples:
        row |= dict(
            zip(("low", "median", "high"), map(float, np.quantile(samples, (0.25, 0.5, 0.75))))
        )
        row["mean"] = statistics.fmean(samples)
        row["std"] = (
            0.0 if len(samples) < 2 or is_series(record.quantity) else statistics.stdev(samples)
        )
    return row | flat_case(record.case) | {"case": case_key(record.case)}


def flat_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a case as one flat dict, those of nested configs as `model.d_model`.

    `model` itself is the nested config's name, `precision` its description and `case_type` the name
    of the case's class.
    """
    flat: dict[str, Any] = {}
    for name, value in case.items():
        if name == "type":
            flat["case_type"] = value
        elif name == "precision" and isinstance(value, dict):
            flat[name] = (
                f"{value['autocast']} autocast"
                if value.get("autocast")
                else value.get("parameters", "")
            )
        elif isinstance(value, dict):
            flat[name] = value.get("name", "")
            flat |= {
                f"{name}.{key}": inner for key, inner in flat_case(value).items() if key != "name"
            }
        else:
            flat[name] = value
    return flat


def pick(frame: pd.DataFrame, where: Where) -> pd.DataFrame:
    """Return the rows of `frame` that fit all of `where`; KeyError names a missing column.

    `where` maps a column to the value, a collection of values, None for no value, or a predicate.
    """
    kept = pd.Series(True, index=frame.index)
    for column, wanted in where.items():
        if column not in frame:
            raise KeyError(f"no column {column!r}; there are {', '.join(map(str, frame.columns))}")
        if callable(wanted):
            kept &= frame[column].map(wanted).astype(bool)
        elif isinstance(wanted, tuple | list | set):
            kept &= frame[column].isin(list(wanted))
        elif wanted is None:
            kept &= frame[column].isna()
        else:
            kept &= frame[column] == wanted
    return frame[kept]


def dicts(frame: pd.DataFrame) -> list[Any]:
    """Return the rows of `frame` as dictionaries: row["model.d_model"], row["median"].

    DataFrame.to_dict takes five times as long.
    """
    names = list(frame.columns)
    return [dict(zip(names, row)) for row in frame.to_numpy(dtype=object)]


def in_unit(value: float, unit: str, wanted: str | None) -> float:
    """Return `value` converted from `unit` to `wanted`; ValueError if UNITS has no factor.

    None for `wanted` leaves the value as it is.
    """
    if wanted is None or wanted == unit:
        return value
    if (unit, wanted) not in UNITS:
        raise ValueError(f"no factor from {unit} to {wanted}")
    return value * UNITS[unit, wanted]


def with_unit(frame: pd.DataFrame, unit: str | None) -> pd.DataFrame:
    """Return `frame` with its statistics converted to `unit`; as it is if `unit` is None."""
    if unit is None or frame.empty or (frame["unit"] == unit).all():
        return frame
    factors = frame["unit"].map(lambda of: in_unit(1.0, of, unit))
    return frame.assign(unit=unit, **{name: frame[name] * factors for name in STATISTICS})


def speed(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> float:
    """Return how many times as fast `ours` is as `theirs`, two rows of times.

    It is NaN if a row is missing, failed or interpreted, or if they are of different runs. For rows
    measured by turns it is the median of the ratios within rounds, since a disturbance of a round
    affects both; otherwise it is the ratio of the medians.
    """
    if ours is None or theirs is None or ours["run"] != theirs["run"]:
        return math.nan
    if (
        ours["status"] != "ok"
        or theirs["status"] != "ok"
        or ours["interpreted"]
        or theirs["interpreted"]
    ):
        return math.nan
    if ours["by_turns"] and ours["count"] == theirs["count"]:
        return statistics.median(b / a for a, b in zip(ours["samples"], theirs["samples"]))
    return theirs["median"] / ours["median"] if ours["median"] > 0 else math.nan


def with_speeds(
    frame: pd.DataFrame, column: str, base: Where, by: Sequence[str] = ("case", "mode", "quantity")
) -> pd.DataFrame:
    """Return `frame` with a new `column`: each row's `speed` over its baseline row.

    `base` chooses the baseline rows. The baseline of a row has the same values of the columns `by`;
    without one the speed is NaN.
    """
    bases = {tuple(row[name] for name in by): row for row in dicts(pick(frame, base))}
    found = [speed(row, bases.get(tuple(row[name] for name in by))) for row in dicts(frame)]
    return frame.assign(**{column: found})


def span(numbers: pd.Series, significant: int = 3) -> str:
    """Return the range of `numbers` as text: "1.05 to 1.44", or one number if both ends agree."""
    low, high = (digits(float(end), significant) for end in (numbers.min(), numbers.max()))
    return low if low == high else f"{low} to {high}"


def digits(value: float, significant: int = 3) -> str:
    """Return `value` as text with `significant` digits; "–" for infinity and NaN.

    It has an exponent only if it is below 1e-4 or at least 1e9.

    >>> digits(0.0123456), digits(12.34), digits(123456.7)
    ('0.0123', '12.3', '123,457')
    """
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    # the exponent of the rounded value: 9.996 is 10.0
    exponent = math.floor(math.log10(abs(float(f"{value:.{significant - 1}e}"))))
    if exponent < -4 or exponent >= 9:
        return f"{value:.{significant - 1}e}"
    return f"{value:,.{max(0, significant - 1 - exponent)}f}"
