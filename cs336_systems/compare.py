"""Compares two sets of records: what became slower, what is inside the noise, what is missing.

    comparison = compare_records(read_all(base), read_all(target), threshold_percent=1.5)
    comparison.regressions, comparison.missing, exit_code(comparison)

A row is one key of a record (problem, case, implementation, mode, quantity). Its change is that of the medians. The
interval is the change plus and minus t standard errors, which come from resampling the raw samples of both sides
(a bootstrap over blocks of neighbouring samples, since samples taken one after the other drift together; Künsch 1989).
t is Student's at a confidence shared among all rows (Bonferroni): five samples a side have a smallest p-value of 1/252,
so that plain percentile intervals would find a regression in every large comparison by chance.

A regression is a change for the worse that is over the threshold and whose whole interval is for the worse; over the
threshold alone it is noise. The draws are seeded by the row's key: the same records always give the same answer.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np

from cs336_systems.profiling.samples import summarize
from cs336_systems.records import Record, latest, read_records

Verdict = Literal["regression", "improvement", "noise", "unchanged", "not compared"]
FailOn = Literal["regression", "any", "none"]
FAIL_ON = ("regression", "any", "none")

DEFAULT_THRESHOLD_PERCENT = 1.5
FAMILY_CONFIDENCE = 0.95  # that no unchanged row of a whole comparison is called changed
NUM_RESAMPLES = 2000
MIN_NOISY_SAMPLES = 4  # fewer timed samples say nothing of their noise
TIME_UNITS = ("ms", "s")
RATE_UNITS = ("GB/s", "TFLOP/s")  # where more is better; of everything else less is
COUNT_UNIT = "calls"
RANKED = re.compile(r"(other_)?kernel_\d+_(time|calls)")  # quantities of whichever kernel has this rank in a profile
EXIT_REGRESSION, EXIT_INCOMPLETE = 1, 2


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows of two sets of records, and the keys that only one side has or that one side has twice."""

    rows: tuple[ComparedRow, ...]
    missing: tuple[tuple[str, ...], ...] = ()  # in the base only
    extra: tuple[tuple[str, ...], ...] = ()  # in the target only
    duplicates: tuple[tuple[str, ...], ...] = ()  # more than once on a side
    notes: tuple[str, ...] = field(default=())  # what differs between the sides besides the numbers
    threshold_percent: float = DEFAULT_THRESHOLD_PERCENT

    def with_verdict(self, verdict: Verdict) -> list[ComparedRow]:
        return [row for row in self.rows if row.verdict == verdict]

    @property
    def regressions(self) -> list[ComparedRow]:
        return self.with_verdict("regression")

    @property
    def improvements(self) -> list[ComparedRow]:
        return self.with_verdict("improvement")

    @property
    def complete(self) -> bool:
        return not (self.missing or self.extra or self.duplicates)


def record_files(path: Path) -> list[Path]:
    """The record files that `path` means: itself, those of a results folder, or of its only subfolder with records.

    Raises ValueError where there is none, or where several results folders lie in `path`.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    for folder in (path / "records", path):
        if files := sorted(folder.glob("*.jsonl")):
            return [file for file in files if file.name != "tests.jsonl"]
    inside = sorted(child for child in path.iterdir() if (child / "records").is_dir())
    if len(inside) > 1:
        raise ValueError(f"{path}: several results folders, name one of {', '.join(child.name for child in inside)}")
    if not inside:
        raise ValueError(f"{path}: no records")
    return record_files(inside[0])


def read_all(path: Path) -> list[Record]:
    """Every record that `path` means, in the order written; ValueError where there is none."""
    records = [record for file in record_files(path) for record in read_records(file)]
    if not records:
        raise ValueError(f"{path}: no records")
    return records


def pool(rounds: Sequence[Sequence[Record]]) -> list[Record]:
    """One set of records from several rounds of the same measurement: the samples of a key, in the order of rounds.

    A key that failed in any round is as it was there: its times are not those of something that works.
    """
    pooled: dict[tuple[str, ...], Record] = {}
    for record in (record for records in rounds for record in latest(records)):
        before = pooled.get(record.key)
        if before is None or (before.status == "ok" and record.status != "ok"):
            pooled[record.key] = record
        elif before.status == record.status == "ok":
            pooled[record.key] = replace(before, samples=[*before.samples, *record.samples])
    return list(pooled.values())


def compare_records(
    base: Sequence[Record], target: Sequence[Record], *, threshold_percent: float = DEFAULT_THRESHOLD_PERCENT
) -> Comparison:
    """Compare `target` with `base`; of a key that one side has twice the newest counts, and it is listed.

    Raises ValueError on a negative threshold, on no records, and where the records are of several devices, whose times
    say nothing of each other.
    """
    if not (math.isfinite(threshold_percent) and threshold_percent >= 0):
        raise ValueError(f"threshold_percent must be finite and not negative, got {threshold_percent}")
    for name, records in (("base", base), ("target", target)):
        if not records:
            raise ValueError(f"{name} must hold records, got none")
    devices = sorted({str(record.device.get("name")) for record in (*base, *target)})
    if len(devices) > 1:
        raise ValueError(f"records of different devices cannot be compared: {', '.join(devices)}")
    before, after = ({record.key: record for record in latest(records)} for records in (base, target))
    shared = [key for key in before if key in after]
    confidence = 1 - (1 - FAMILY_CONFIDENCE) / max(1, len(shared))
    return Comparison(
        rows=tuple(_compare(before[key], after[key], threshold_percent, confidence) for key in shared),
        missing=tuple(key for key in before if key not in after),
        extra=tuple(key for key in after if key not in before),
        duplicates=tuple(dict.fromkeys([*_repeated(base), *_repeated(target)])),
        notes=tuple(_differences(base, target)),
        threshold_percent=threshold_percent,
    )


def exit_code(comparison: Comparison, fail_on: FailOn = "regression") -> int:
    """0 if all is well; 2 if rows are missing, extra or doubled; 1 on a regression, or with `any` on any change.

    With `none` always 0. An incomplete comparison is 2 also where a row regressed: what is missing may hide more.
    """
    if fail_on not in FAIL_ON:
        raise ValueError(f"fail_on must be one of {', '.join(FAIL_ON)}, got {fail_on!r}")
    if fail_on == "none":
        return 0
    if not comparison.complete:
        return EXIT_INCOMPLETE
    changed = [*comparison.regressions, *(comparison.improvements if fail_on == "any" else ())]
    return EXIT_REGRESSION if changed else 0


def bootstrap_change(
    base: Sequence[float], target: Sequence[float], *, confidence: float, seed: int
) -> tuple[float, float]:
    """Interval of median(target) / median(base) - 1 at `confidence`; the median of `base` must not be 0.

    The standard error is that of `NUM_RESAMPLES` draws with replacement, blocks of neighbouring samples at a time, as
    many in a block as the cube root of their number.
    """
    generator = np.random.default_rng(seed)
    before, after = (_resampled_medians(np.asarray(samples, dtype=float), generator) for samples in (base, target))
    usable = before != 0
    error = float(np.std(after[usable] / before[usable], ddof=1)) if usable.sum() > 1 else math.inf
    margin = student_quantile((1 + confidence) / 2, max(1, len(base) + len(target) - 2)) * error
    change = summarize(target).median / summarize(base).median - 1
    return change - margin, change + margin


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t: the normal one corrected for the degrees of freedom (Abramowitz and Stegun 26.7.5).

    Within 1 % from 8 degrees on, down to tails of 1e-3; below that it is too small.
    """
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def _resampled_medians(samples: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    count = len(samples)
    block = max(1, round(count ** (1 / 3)))
    num_blocks = -(-count // block)
    starts = generator.integers(count, size=(NUM_RESAMPLES, num_blocks, 1))
    indices = ((starts + np.arange(block)) % count).reshape(NUM_RESAMPLES, -1)[:, :count]  # circular
    return np.median(samples[indices], axis=1)


def _compare(base: Record, target: Record, threshold_percent: float, confidence: float) -> ComparedRow:
    """The verdict on one row."""
    if base.status != "ok" or target.status != "ok":
        return _compare_statuses(base, target)
    if base.unit != target.unit:
        return _row(base, target, "not compared", reason=f"{base.unit} and {target.unit}")
    if "interpreter" in base.kernel or "interpreter" in target.kernel:
        return _row(base, target, "not compared", reason="interpreted kernels run at no meaningful speed")
    if RANKED.fullmatch(base.quantity) and base.kernel != target.kernel:
        return _row(base, target, "not compared", reason=f"another kernel: {target.kernel}, was {base.kernel}")
    if base.unit == COUNT_UNIT and base.samples[0] != target.samples[0]:
        return _row(base, target, "not compared", reason="a count is no cost")
    sign = -1 if base.unit in RATE_UNITS else 1
    before, after = summarize(base.samples).median, summarize(target.samples).median
    if before == 0:
        verdict: Verdict = "unchanged" if after == 0 else "not compared"
        return _row(base, target, verdict, reason="" if after == 0 else "the base is 0")
    change = 100 * sign * (after / before - 1)
    noisy = base.unit in (*TIME_UNITS, *RATE_UNITS)
    if noisy and min(len(base.samples), len(target.samples)) < MIN_NOISY_SAMPLES:
        counts = f"{len(base.samples)} and {len(target.samples)} samples say nothing of their noise"
        return _row(base, target, "not compared", change, reason=counts)
    seed = int.from_bytes(hashlib.sha256("\n".join(base.key).encode()).digest()[:8], "big")
    ends = bootstrap_change(base.samples, target.samples, confidence=confidence, seed=seed)
    low, high = sorted(100 * sign * end for end in ends)
    if abs(change) <= threshold_percent:
        return _row(base, target, "unchanged", change, low, high)
    if low > 0 or high < 0:
        return _row(base, target, "regression" if change > 0 else "improvement", change, low, high)
    return _row(base, target, "noise", change, low, high)


def _compare_statuses(base: Record, target: Record) -> ComparedRow:
    """What could be measured before and cannot now is a regression; the other way round it is an improvement."""
    reason = f"{base.status}, now {target.status}"
    message = target.message or base.message
    if base.status == target.status:
        return _row(base, target, "unchanged", reason=base.status)
    if base.status == "ok":
        return _row(base, target, "regression", reason=f"{reason}: {message}")
    return _row(base, target, "improvement" if target.status == "ok" else "unchanged", reason=reason)


def _row(
    base: Record,
    target: Record,
    verdict: Verdict,
    change: float = math.nan,
    low: float = math.nan,
    high: float = math.nan,
    *,
    reason: str = "",
) -> ComparedRow:
    return ComparedRow(
        base=base, target=target, verdict=verdict, change_percent=change, low_percent=low, high_percent=high,
        reason=reason,
    )  # fmt: skip


def _repeated(records: Iterable[Record]) -> list[tuple[str, ...]]:
    return [key for key, count in Counter(record.key for record in records).items() if count > 1]


def _differences(base: Sequence[Record], target: Sequence[Record]) -> list[str]:
    """Drivers, versions and seeds that the sides do not share: they may explain a change better than the code does."""
    notes = []
    described = {
        "driver": lambda record: str(record.device.get("driver")),
        "torch": lambda record: record.software.get("torch", "unknown"),
        "triton": lambda record: record.software.get("triton", "unknown"),
        "seed": lambda record: str(record.seed),
    }
    for name, of in described.items():
        sides = [sorted({of(record) for record in records}) for records in (base, target)]
        if sides[0] != sides[1]:
            notes.append(f"{name}: {', '.join(sides[0])} in the base, {', '.join(sides[1])} in the target")
    return notes
