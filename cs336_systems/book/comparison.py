"""Compare two sets of records: what became slower, what is within the noise, what is missing.

    comparison = compare_records(read_all(base), read_all(target), threshold_percent=1.5)
    comparison.with_verdict("regression"), comparison.missing, exit_code(comparison)

A row is one key of a record (problem, scale, implementation, case, mode, quantity). Its change is
that of the medians. Its interval is the change plus and minus t standard errors. These come from a
bootstrap of the raw samples of both sides, over blocks of neighbouring samples, since samples taken
one after the other drift together (Künsch 1989). t is Student's at a confidence shared among all
rows (Bonferroni): five samples a side have a smallest p-value of 1/252, so that plain percentile
intervals would find a regression in every large comparison by chance.

A row is a regression if its change is for the worse and over the threshold, and its whole interval
is for the worse. If only the change is over the threshold, it is noise. The draws are seeded by the
row's key: the same records always give the same answer.

Intervals of rows are too wide to show small changes that all rows of an implementation share. So
each group (one quantity of an implementation on a problem) has a verdict of its own, on the
geometric mean of the ratios of its times or rates. Its interval comes from resampling the cases,
each with all of its rows: their ratios scatter both from run to run and by the noise of the samples
(t with one degree of freedom less than there are cases). The interval is never narrower than the
one from resampling the samples of every row. A group has regressed if its whole interval lies
beyond the threshold. The confidence is shared among the groups; rows and groups each take half of
the errors that the family confidence allows.
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
NUM_GROUP_RESAMPLES = 500  # of all samples of a group, in addition
MIN_NOISY_SAMPLES = 4  # the noise of fewer timed samples cannot be estimated
MIN_GROUP_CASES = 5  # groups of fewer cases get no verdict
TIME_UNITS = ("ms", "s")
RATE_UNITS = ("GB/s", "TFLOP/s")  # more is better; for times and memory less is
NO_COST = "neither a time nor memory"
JUDGED_UNITS = (*TIME_UNITS, *RATE_UNITS, "MiB")  # changes in other units are no cost
# quantities of the kernel that has a certain rank in a profile, whichever it is
RANKED = re.compile(r"(other_)?kernel_\d+_(time|calls)")
EXIT_REGRESSION, EXIT_INCOMPLETE = 1, 2


@dataclass(frozen=True)
class ComparedRow:
    """One quantity that both sides have, with its change and the verdict on it."""

    base: Record
    target: Record
    verdict: Verdict
    change_percent: float = math.nan  # of the median, positive if the target is worse
    low_percent: float = math.nan  # interval of the change
    high_percent: float = math.nan
    reason: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """The key of both records, see `Record.key`."""
        return self.base.key


@dataclass(frozen=True)
class ComparedGroup:
    """One quantity of an implementation over all cases and modes of a problem, with its verdict."""

    key: tuple[str, ...]  # problem, scale, implementation, quantity
    num_rows: int
    num_cases: int
    verdict: Verdict
    change_percent: float  # geometric mean of the rows' ratios, positive if the target is worse
    low_percent: float  # interval of the change
    high_percent: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows that two sets of records share, and the keys that do not match one to one."""

    rows: tuple[ComparedRow, ...]
    groups: tuple[ComparedGroup, ...] = ()  # those with at least MIN_GROUP_CASES cases
    missing: tuple[tuple[str, ...], ...] = ()  # keys in the base only
    extra: tuple[tuple[str, ...], ...] = ()  # keys in the target only
    duplicates: tuple[tuple[str, ...], ...] = ()  # keys more than once on a side
    notes: tuple[str, ...] = ()  # differences of drivers, versions and seeds
    threshold_percent: float = DEFAULT_THRESHOLD_PERCENT

    def with_verdict(self, verdict: Verdict) -> list[ComparedRow]:
        """Return the rows that have this verdict."""
        return [row for row in self.rows if row.verdict == verdict]

    def groups_with(self, verdict: Verdict) -> list[ComparedGroup]:
        """Return the groups that have this verdict."""
        return [group for group in self.groups if group.verdict == verdict]

    @property
    def complete(self) -> bool:
        """Whether each side has every key of the other exactly once."""
        return not (self.missing or self.extra or self.duplicates)


def record_files(path: Path, problem: str | None = None) -> list[Path]:
    """Return the record files at `path`, or only that of `problem`.

    `path` is a record file, a results folder, its `records` folder, or a folder that holds a single
    results folder. Raises ValueError if it has no records or holds several results folders.
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
    """Return all records at `path`, or only those of `problem`, in the order written.

    `path` is as in `record_files`. Raises ValueError if there are no such records.
    """
    found = [record for file in record_files(path, problem) for record in read_records(file)]
    records = [record for record in found if problem in (None, record.problem)]
    if not records:
        raise ValueError(f"{path}: no records{f' of {problem}' if problem else ''}")
    return records


def pool(rounds: Sequence[Sequence[Record]]) -> list[Record]:
    """Return one record per key, with the samples of all `rounds` of a measurement in a row.

    If a key failed in any round, its record is the one of the first failure, since times of code
    that fails do not count. A series (a loss curve, intervals) is taken from the first round, since
    two series in a row are no series. Raises ValueError if units differ.
    """
    pooled: dict[tuple[str, ...], Record] = {}
    for record in (record for records in rounds for record in latest(records)):
        before = pooled.get(record.key)
        if before is None or (before.status == "ok" and record.status != "ok"):
            pooled[record.key] = record
        elif before.unit != record.unit:
            raise ValueError(
                f"{record.quantity} of {record.implementation} "
                f"is in {before.unit} and in {record.unit}"
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
    """Return the comparison of `target` with `base`.

    If a side has several records of a key, the newest counts and the key is in `duplicates`. Raises
    ValueError if a side has no records, or if the records come from different devices, whose times
    cannot be compared.
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
    """Return the command's exit code: 0 if all is well, 1 on a regression, 2 if incomplete.

    A comparison is incomplete if keys are missing, extra or doubled; it is 2 even if a row
    regressed, since missing rows may hide more. With `fail_on` "any" an improvement is 1, too; with
    "none" the code is always 0. Rows and groups count alike.
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
    """Return the ends of the interval of median(target) / median(base) - 1 at `confidence`.

    The median of `base` must not be 0. The standard error comes from `NUM_RESAMPLES` draws with
    replacement, in blocks of neighbouring samples whose length is the cube root of the number of
    samples.
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
    """Return the confidence of each of `number` intervals, which share half the family's errors."""
    return 1 - (1 - FAMILY_CONFIDENCE) / 2 / max(1, number)


def _resampled_medians(
    values: Sequence[float], generator: np.random.Generator, num_resamples: int
) -> np.ndarray:
    """Return the medians, (num_resamples,), of block bootstrap draws of `values`."""
    samples, count = np.asarray(values, dtype=float), len(values)
    block = max(1, round(count ** (1 / 3)))
    num_blocks = -(-count // block)
    starts = generator.integers(count, size=(num_resamples, num_blocks, 1))
    # A block that reaches the end goes on at the beginning.
    indices = ((starts + np.arange(block)) % count).reshape(num_resamples, -1)[:, :count]
    return np.median(samples[indices], axis=1)


def _compare(
    base: Record, target: Record, threshold_percent: float, confidence: float
) -> ComparedRow:
    """Return the compared row of two records with the same key."""
    # Rows that cannot be compared, or whose change is no cost.
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

    # Memory is exact; times and rates need samples enough for an interval.
    noisy = base.unit in (*TIME_UNITS, *RATE_UNITS)
    if noisy and min(len(base.samples), len(target.samples)) < MIN_NOISY_SAMPLES:
        counts = (
            f"too few samples: {len(base.samples)} and {len(target.samples)} samples "
            "say nothing of their noise"
        )
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
    """Return the verdict on a change in percent whose interval is from `low` to `high`.

    A change over the threshold is real if its whole interval lies more than `beyond` percent from
    0 on one side; otherwise it is noise.
    """
    if abs(change) <= threshold_percent:
        return "unchanged"
    if low > beyond:
        return "regression"
    return "improvement" if high < -beyond else "noise"


def _sign_of_worse(record: Record) -> int:
    """Return 1 if a larger value of the record is worse, -1 if a smaller one is (rates)."""
    return -1 if record.unit in RATE_UNITS else 1


def _seed_of(key: Iterable[str]) -> int:
    """Return a seed of 64 bits that depends on `key` only."""
    return int.from_bytes(hashlib.sha256("\n".join(key).encode()).digest()[:8], "big")


def _compare_groups(
    rows: Iterable[ComparedRow], threshold_percent: float
) -> tuple[ComparedGroup, ...]:
    """Return the groups of `rows` with at least MIN_GROUP_CASES cases, ordered by first rows."""
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
    """Return whether the row is a time or rate with an interval and only positive samples."""
    timed = row.base.unit in (*TIME_UNITS, *RATE_UNITS) and not math.isnan(row.low_percent)
    return timed and min(*row.base.samples, *row.target.samples) > 0


def _compare_group(
    group: tuple[str, ...],
    cases: dict[str, list[ComparedRow]],
    threshold_percent: float,
    confidence: float,
) -> ComparedGroup:
    """Return the group whose rows are given by case, with its verdict."""
    generator = np.random.default_rng(_seed_of(group))
    in_order = [sorted(cases[case], key=lambda row: row.key) for case in sorted(cases)]
    rows = [row for of_case in in_order for row in of_case]
    counts = np.array([len(of_case) for of_case in in_order])
    sums = np.array([sum(map(_log_ratio, of_case)) for of_case in in_order])
    mean = sums.sum() / len(rows)

    # Standard error from resampling the cases. Resampling n values underestimates their variance by
    # the factor (n - 1) / n.
    picks = generator.integers(len(cases), size=(NUM_RESAMPLES, len(cases)))
    of_cases = float(np.std(sums[picks].sum(axis=1) / counts[picks].sum(axis=1), ddof=1))
    of_cases *= math.sqrt(len(cases) / (len(cases) - 1))

    # Standard error from resampling the samples of every row.
    drawn = np.zeros(NUM_GROUP_RESAMPLES)
    for row in rows:
        before, after = (
            _resampled_medians(record.samples, generator, NUM_GROUP_RESAMPLES)
            for record in (row.base, row.target)
        )
        drawn += _sign_of_worse(row.base) * np.log(after / before) / len(rows)
    of_samples = float(np.std(drawn, ddof=1))
    degrees_of_samples = sum(len(row.base.samples) + len(row.target.samples) - 2 for row in rows)

    # The wider interval counts; percent are clipped where exp would overflow.
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
    """Return the logarithm of how many times worse the target's median is than the base's."""
    return _sign_of_worse(row.base) * math.log(
        median(row.target.samples) / median(row.base.samples)
    )


def _compare_statuses(base: Record, target: Record) -> ComparedRow:
    """Return the compared row of two records of which at least one was not measured.

    It is a regression if only the base was measured, and an improvement if only the target was.
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
    """Return the keys that several of `records` have."""
    return [key for key, count in Counter(record.key for record in records).items() if count > 1]


def _differences(base: Sequence[Record], target: Sequence[Record]) -> list[str]:
    """Return a line for each of driver, PyTorch, Triton and seed in which the sides differ.

    Such a difference may explain a change better than the code does.
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
