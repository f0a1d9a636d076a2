"""Compares two sets of records: what became slower, what is inside the noise, what is missing.

    comparison = compare_records(read_all(base), read_all(target), threshold_percent=1.5)
    comparison.with_verdict("regression"), comparison.missing, exit_code(comparison)

A row is one key of a record (problem, case, implementation, mode, quantity). Its change is that of
the medians. The interval is the change plus and minus t standard errors, which come from resampling
the raw samples of both sides
(a bootstrap over blocks of neighbouring samples, since samples taken one after the other drift
together; Künsch 1989). t is Student's at a confidence shared among all rows (Bonferroni): five
samples a side have a smallest p-value of 1/252, so that plain percentile intervals would find a
regression in every large comparison by chance.

A regression is a change for the worse that is over the threshold and whose whole interval is for
the worse; over the threshold alone it is noise. The draws are seeded by the row's key: the same
records always give the same answer.

Small changes that all rows of an implementation share drown in intervals so wide. So there is a
verdict on each group, a quantity of an implementation of a problem: on the geometric mean of the
ratios of its times or rates. Its interval comes from resampling the cases, each with all of its
rows, whose ratios scatter by what differs from run to run and by the noise of the samples (t with
one degree less than there are cases); it is never narrower than resampling the samples of every row
says. A group has regressed where the whole interval lies beyond the threshold. The confidence is
shared among the groups; rows and groups each take half of the errors that the family confidence
allows.
"""

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import numpy as np
from msgspec.structs import replace
from scipy.stats import t as student

from cs336_systems.bench.records import RUNS, Record, is_series, latest, read_records

Verdict = Literal["regression", "improvement", "noise", "unchanged", "not compared"]
FailOn = Literal["regression", "any", "none"]
FAIL_ON: tuple[str, ...] = get_args(FailOn)

DEFAULT_THRESHOLD_PERCENT = 1.5
FAMILY_CONFIDENCE = 0.95  # that no unchanged row or group of a whole comparison is called changed
NUM_RESAMPLES = 2000
NUM_GROUP_RESAMPLES = 500  # of all rows once more
MIN_NOISY_SAMPLES = 4  # fewer timed samples say nothing of their noise
MIN_GROUP_CASES = 5  # fewer cases say nothing of what they have in common
TIME_UNITS = ("ms", "s")
RATE_UNITS = ("GB/s", "TFLOP/s")  # where more is better; of times and memory less is
NO_COST = "neither a time nor memory"
JUDGED_UNITS = (*TIME_UNITS, *RATE_UNITS, "MiB")  # of everything else no change is a cost
# quantities of whichever kernel has this rank in a profile
RANKED = re.compile(r"(other_)?kernel_\d+_(time|calls)")
EXIT_REGRESSION, EXIT_INCOMPLETE = 1, 2


@dataclass(frozen=True)
class ComparedRow:
    """One quantity on both sides."""

    base: Record
    target: Record
    verdict: Verdict
    change_percent: float = math.nan  # of the median, positive where the target is worse
    low_percent: float = math.nan  # interval of the change
    high_percent: float = math.nan
    reason: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return self.base.key


@dataclass(frozen=True)
class ComparedGroup:
    """One quantity of an implementation over all cases and modes of a problem: the geometric mean
    of its changes.
    """

    key: tuple[str, ...]  # problem, scale, implementation, quantity
    num_rows: int
    num_cases: int
    verdict: Verdict
    change_percent: float  # positive where the target is worse
    low_percent: float  # interval of the change
    high_percent: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows of two sets of records, and the keys that only one side has or that one side has
    twice.
    """

    rows: tuple[ComparedRow, ...]
    groups: tuple[ComparedGroup, ...] = ()  # of at least MIN_GROUP_CASES cases
    missing: tuple[tuple[str, ...], ...] = ()  # in the base only
    extra: tuple[tuple[str, ...], ...] = ()  # in the target only
    duplicates: tuple[tuple[str, ...], ...] = ()  # more than once on a side
    notes: tuple[str, ...] = ()  # what differs between the sides besides the numbers
    threshold_percent: float = DEFAULT_THRESHOLD_PERCENT

    def with_verdict(self, verdict: Verdict) -> list[ComparedRow]:
        return [row for row in self.rows if row.verdict == verdict]

    def groups_with(self, verdict: Verdict) -> list[ComparedGroup]:
        return [group for group in self.groups if group.verdict == verdict]

    @property
    def complete(self) -> bool:
        return not (self.missing or self.extra or self.duplicates)


def record_files(path: Path, problem: str | None = None) -> list[Path]:
    """The record files that `path` means: itself, those of a results folder, or of its only
    subfolder with records.

    Raises ValueError where there is none, or where several results folders lie in `path`.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    own = [folder for folder in (path / "records", path) if any(folder.glob("*.jsonl"))]
    found = own[:1] or sorted(path.glob("*/records"))
    if not found:
        raise ValueError(f"{path}: no records")
    if len(found) > 1:
        names = ", ".join(folder.parent.name for folder in found)
        raise ValueError(f"{path}: several results folders, name one of {names}")
    files = [file for file in sorted(found[0].glob("*.jsonl")) if file.stem not in ("tests", RUNS)]
    return [file for file in files if problem in (None, file.stem)]


def read_all(path: Path, problem: str | None = None) -> list[Record]:
    """Every record that `path` means (of `problem`), in the order written; ValueError where there
    is none.
    """
    found = [record for file in record_files(path, problem) for record in read_records(file)]
    records = [record for record in found if problem in (None, record.problem)]
    if not records:
        raise ValueError(f"{path}: no records{f' of {problem}' if problem else ''}")
    return records


def pool(rounds: Sequence[Sequence[Record]]) -> list[Record]:
    """One set of records from several rounds of the same measurement: the samples of a key, in the
    order of rounds.

    A key that failed in any round is as it was there: its times are not those of something that
    works. A series (a loss curve, intervals) is that of the first round: two behind one another are
    no series. ValueError if units differ.
    """
    pooled: dict[tuple[str, ...], Record] = {}
    for record in (record for records in rounds for record in latest(records)):
        before = pooled.get(record.key)
        if before is None or (before.status == "ok" and record.status != "ok"):
            pooled[record.key] = record
        elif before.unit != record.unit:
            raise ValueError(
                f"{record.quantity} of {record.implementation} is in {before.unit} and in {record.unit}"
            )
        elif before.status == record.status == "ok" and not is_series(record.quantity):
            pooled[record.key] = replace(before, samples=[*before.samples, *record.samples])
    return list(pooled.values())


def compare_records(
    base: Sequence[Record],
    target: Sequence[Record],
    *,
    threshold_percent: float = DEFAULT_THRESHOLD_PERCENT,
) -> Comparison:
    """Compare `target` with `base`; of a key that one side has twice the newest counts, and it is
    listed.

    Raises ValueError on no records, and where they are of several devices, whose times say nothing
    of each other.
    """
    for name, records in (("base", base), ("target", target)):
        if not records:
            raise ValueError(f"{name} must hold records, got none")
    devices = sorted({str(record.run.device.get("name")) for record in (*base, *target)})
    if len(devices) > 1:
        raise ValueError(f"records of different devices cannot be compared: {', '.join(devices)}")
    before, after = (
        {record.key: record for record in latest(records)} for records in (base, target)
    )
    shared = [key for key in before if key in after]
    confidence = _shared_confidence(len(shared))
    rows = tuple(_compare(before[key], after[key], threshold_percent, confidence) for key in shared)
    return Comparison(
        rows=rows,
        groups=_compare_groups(rows, threshold_percent),
        missing=tuple(key for key in before if key not in after),
        extra=tuple(key for key in after if key not in before),
        duplicates=tuple(dict.fromkeys([*_repeated(base), *_repeated(target)])),
        notes=tuple(_differences(base, target)),
        threshold_percent=threshold_percent,
    )


def exit_code(comparison: Comparison, fail_on: FailOn = "regression") -> int:
    """0 if all is well; 2 if rows are missing, extra or doubled; 1 on a regression, or with `any`
    on any change.

    Rows and groups count alike. With `none` always 0. An incomplete comparison is 2 also where a
    row regressed: what is missing may hide more.
    """
    if fail_on == "none":
        return 0
    if not comparison.complete:
        return EXIT_INCOMPLETE
    verdicts: tuple[Verdict, ...] = (
        ("regression", "improvement") if fail_on == "any" else ("regression",)
    )
    changed = any(
        comparison.with_verdict(verdict) or comparison.groups_with(verdict) for verdict in verdicts
    )
    return EXIT_REGRESSION if changed else 0


def bootstrap_change(
    base: Sequence[float], target: Sequence[float], *, confidence: float, seed: int
) -> tuple[float, float]:
    """Interval of median(target) / median(base) - 1 at `confidence`; the median of `base` must not
    be 0.

    The standard error is that of `NUM_RESAMPLES` draws with replacement, blocks of neighbouring
    samples at a time, as many in a block as the cube root of their number.
    """
    generator = np.random.default_rng(seed)
    before, after = (
        _resampled_medians(samples, generator, NUM_RESAMPLES) for samples in (base, target)
    )
    usable = before != 0
    error = float(np.std(after[usable] / before[usable], ddof=1)) if usable.sum() > 1 else math.inf
    margin = student.ppf((1 + confidence) / 2, max(1, len(base) + len(target) - 2)) * error
    change = median(target) / median(base) - 1
    return change - margin, change + margin


def _shared_confidence(number: int) -> float:
    """Of each of `number` intervals, rows or groups, which share half of the family's errors."""
    return 1 - (1 - FAMILY_CONFIDENCE) / 2 / max(1, number)


def _resampled_medians(
    values: Sequence[float], generator: np.random.Generator, num_resamples: int
) -> np.ndarray:
    samples, count = np.asarray(values, dtype=float), len(values)
    block = max(1, round(count ** (1 / 3)))
    num_blocks = -(-count // block)
    starts = generator.integers(count, size=(num_resamples, num_blocks, 1))
    # circular
    indices = ((starts + np.arange(block)) % count).reshape(num_resamples, -1)[:, :count]
    return np.median(samples[indices], axis=1)


def _compare(
    base: Record, target: Record, threshold_percent: float, confidence: float
) -> ComparedRow:
    """The verdict on one row."""
    if base.status != "ok" or target.status != "ok":
        return _compare_statuses(base, target)
    if base.unit != target.unit:
        return ComparedRow(
            base, target, "not compared", reason=f"different units: {base.unit} and {target.unit}"
        )
    if "interpreter" in base.kernel or "interpreter" in target.kernel:
        return ComparedRow(
            base, target, "not compared", reason="interpreted kernels run at no meaningful speed"
        )
    if RANKED.fullmatch(base.quantity) and base.kernel != target.kernel:
        return ComparedRow(
            base,
            target,
            "not compared",
            reason=f"another kernel: {target.kernel}, was {base.kernel}",
        )
    if base.unit not in JUDGED_UNITS or is_series(base.quantity):
        same = base.samples == target.samples
        return ComparedRow(
            base, target, "unchanged" if same else "not compared", reason="" if same else NO_COST
        )
    sign = _sign_of_worse(base)
    before, after = median(base.samples), median(target.samples)
    if before == 0:
        verdict: Verdict = "unchanged" if after == 0 else "not compared"
        return ComparedRow(base, target, verdict, reason="" if after == 0 else "the base is 0")
    change = 100 * sign * (after / before - 1)
    noisy = base.unit in (*TIME_UNITS, *RATE_UNITS)
    if noisy and min(len(base.samples), len(target.samples)) < MIN_NOISY_SAMPLES:
        counts = f"too few samples: {len(base.samples)} and {len(target.samples)} samples say nothing of their noise"
        return ComparedRow(base, target, "not compared", change, reason=counts)
    ends = bootstrap_change(
        base.samples, target.samples, confidence=confidence, seed=_seed_of(base.key)
    )
    low, high = sorted(100 * sign * end for end in ends)
    return ComparedRow(
        base, target, _verdict(change, low, high, threshold_percent, beyond=0.0), change, low, high
    )


def _verdict(
    change: float, low: float, high: float, threshold_percent: float, *, beyond: float
) -> Verdict:
    """What a change over the threshold is, whose whole interval must lie `beyond` so many percent
    to be real.
    """
    if abs(change) <= threshold_percent:
        return "unchanged"
    if low > beyond:
        return "regression"
    return "improvement" if high < -beyond else "noise"


def _sign_of_worse(record: Record) -> int:
    """Which way a change is for the worse: up, but of rates down."""
    return -1 if record.unit in RATE_UNITS else 1


def _seed_of(key: Iterable[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(key).encode()).digest()[:8], "big")


def _compare_groups(
    rows: Iterable[ComparedRow], threshold_percent: float
) -> tuple[ComparedGroup, ...]:
    """The verdict on each group that has enough cases, in the order of their first rows."""
    by_group: dict[tuple[str, ...], dict[str, list[ComparedRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        if _has_ratio(row):
            problem, scale, implementation, case, _, quantity = row.key
            by_group[problem, scale, implementation, quantity][case].append(row)
    enough = {group: cases for group, cases in by_group.items() if len(cases) >= MIN_GROUP_CASES}
    confidence = _shared_confidence(len(enough))
    return tuple(
        _compare_group(group, cases, threshold_percent, confidence)
        for group, cases in enough.items()
    )


def _has_ratio(row: ComparedRow) -> bool:
    """Whether the row is a time or a rate with an interval, whose logarithm can be averaged."""
    timed = row.base.unit in (*TIME_UNITS, *RATE_UNITS) and not math.isnan(row.low_percent)
    return timed and min(*row.base.samples, *row.target.samples) > 0


def _compare_group(
    group: tuple[str, ...],
    cases: dict[str, list[ComparedRow]],
    threshold_percent: float,
    confidence: float,
) -> ComparedGroup:
    generator = np.random.default_rng(_seed_of(group))
    in_order = [sorted(cases[case], key=lambda row: row.key) for case in sorted(cases)]
    rows = [row for of_case in in_order for row in of_case]
    counts = np.array([len(of_case) for of_case in in_order])
    sums = np.array([sum(map(_log_ratio, of_case)) for of_case in in_order])
    mean = sums.sum() / len(rows)
    # cases
    picks = generator.integers(len(cases), size=(NUM_RESAMPLES, len(cases)))
    of_cases = float(np.std(sums[picks].sum(axis=1) / counts[picks].sum(axis=1), ddof=1))
    # n values resampled have (n - 1) / n of their variance
    of_cases *= math.sqrt(len(cases) / (len(cases) - 1))
    # samples
    drawn = np.zeros(NUM_GROUP_RESAMPLES)
    for row in rows:
        before, after = (
            _resampled_medians(record.samples, generator, NUM_GROUP_RESAMPLES)
            for record in (row.base, row.target)
        )
        drawn += _sign_of_worse(row.base) * np.log(after / before) / len(rows)
    of_samples = float(np.std(drawn, ddof=1))
    degrees_of_samples = sum(len(row.base.samples) + len(row.target.samples) - 2 for row in rows)
    errors = {len(cases) - 1: of_cases, degrees_of_samples: of_samples}
    margin = max(
        student.ppf((1 + confidence) / 2, degrees) * error for degrees, error in errors.items()
    )
    change, low, high = (
        100 * math.expm1(min(value, 700.0)) for value in (mean, mean - margin, mean + margin)
    )
    verdict = _verdict(change, low, high, threshold_percent, beyond=threshold_percent)
    return ComparedGroup(group, len(rows), len(cases), verdict, change, low, high)


def _log_ratio(row: ComparedRow) -> float:
    """Logarithm of how many times worse the target is."""
    return _sign_of_worse(row.base) * math.log(
        median(row.target.samples) / median(row.base.samples)
    )


def _compare_statuses(base: Record, target: Record) -> ComparedRow:
    """What could be measured before and cannot now is a regression; the other way round it is an
    improvement.
    """
    reason = f"{base.status}, now {target.status}"
    message = target.message or base.message
    if base.status == target.status:
        return ComparedRow(base, target, "unchanged", reason=base.status)
    if base.status == "ok":
        return ComparedRow(base, target, "regression", reason=f"{reason}: {message}")
    return ComparedRow(
        base, target, "improvement" if target.status == "ok" else "unchanged", reason=reason
    )


def _repeated(records: Iterable[Record]) -> list[tuple[str, ...]]:
    return [key for key, count in Counter(record.key for record in records).items() if count > 1]


def _differences(base: Sequence[Record], target: Sequence[Record]) -> list[str]:
    """Drivers, versions and seeds that the sides do not share: they may explain a change better
    than the code does.
    """
    notes = []
    described = {
        "driver": lambda record: str(record.run.device.get("driver")),
        "torch": lambda record: record.run.software.get("torch", "unknown"),
        "triton": lambda record: record.run.software.get("triton", "unknown"),
        "seed": lambda record: str(record.seed),
    }
    for name, of in described.items():
        sides = [sorted({of(record) for record in records}) for records in (base, target)]
        if sides[0] != sides[1]:
            notes.append(
                f"{name}: {', '.join(sides[0])} in the base, {', '.join(sides[1])} in the target"
            )
    return notes
