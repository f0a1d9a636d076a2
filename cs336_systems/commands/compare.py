"""`cs336-systems compare BASE TARGET`: compare two sets of records row by row.

The exit code tells a script whether something regressed or is missing.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cs336_systems.commands.shared import one_line_errors, unknown_problem
from cs336_systems.commands.terminal import show_table, show_text
from cs336_systems.measure.text import printable

if TYPE_CHECKING:
    from cs336_systems.book.comparison import ComparedGroup, ComparedRow, Comparison, Verdict

WORDS: dict[Verdict, str] = {
    "regression": "regressed",
    "improvement": "improved",
    "noise": "inside the noise",
    "unchanged": "unchanged",
    "not compared": "not compared",
}
ThresholdOption = Annotated[
    float, typer.Option(help="Percent of change below which a row is unchanged.")
]
FailOnOption = Annotated[
    str, typer.Option(help="What gives a failing exit code: regression, any (change) or none.")
]


def compare(
    base: Annotated[Path, typer.Argument(help="A record file or a results folder.")],
    target: Annotated[Path, typer.Argument(help="What is compared with it.")],
    *,
    threshold: ThresholdOption = 1.5,
    fail_on: FailOnOption = "regression",
    problem: Annotated[str | None, typer.Option(help="One problem's records alone.")] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show rows without a change, too.")
    ] = False,
) -> None:
    """Compare two sets of records: exit 1 on a regression, 2 on missing, extra or doubled rows.

    Times and memory are judged. A regression lies outside the noise. It is that of a row, or of a
    quantity of an implementation over all cases of a problem.
    """
    from cs336_systems.bench.spec import measured_problems
    from cs336_systems.book.comparison import compare_records, exit_code, read_all

    with one_line_errors():
        check_options(threshold, fail_on)
        if problem is not None and problem not in measured_problems():
            raise ValueError(unknown_problem(problem))
        sides = [read_all(path, problem) for path in (base, target)]
        comparison = compare_records(*sides, threshold_percent=threshold)
        code = exit_code(comparison, fail_on)  # type: ignore[arg-type]
    show_comparison(comparison, show_all=show_all)
    raise typer.Exit(code)


def check_options(threshold: float, fail_on: str) -> None:
    """Raise ValueError for a negative or infinite --threshold or an unknown --fail-on."""
    from cs336_systems.book.comparison import FAIL_ON

    if not (math.isfinite(threshold) and threshold >= 0):
        raise ValueError(f"--threshold must be a finite percentage, not negative, got {threshold}")
    if fail_on not in FAIL_ON:
        raise ValueError(f"--fail-on must be one of {', '.join(FAIL_ON)}, got {fail_on!r}")


def show_comparison(comparison: Comparison, *, show_all: bool = False) -> None:
    """Print the changed groups and rows, the unmatched and doubled keys, the notes and a summary.

    With `show_all` unchanged groups and rows are printed as well.
    """
    # Groups: a quantity of an implementation over all cases of a problem.
    groups = [group for group in comparison.groups if show_all or group.verdict != "unchanged"]
    if groups:
        table = Table(
            "all cases together", "rows", "cases", "change", "interval", "verdict", box=None
        )
        for group in groups:
            problem, _, implementation, quantity = group.key
            name = printable(f"{problem} {implementation} {quantity}")
            table.add_row(name, str(group.num_rows), str(group.num_cases), *_judged(group))
        show_table(table)

    # Rows: medians of both sides, or the status of a side without samples.
    rows = [row for row in comparison.rows if show_all or not _is_quiet(row)]
    if rows:
        table = Table("row", "base", "target", "change", "interval", "verdict", box=None)
        for row in rows:
            sides = [
                f"{median(record.samples):.5g} {record.unit}"
                if record.status == "ok"
                else record.status
                for record in (row.base, row.target)
            ]
            change, interval, verdict = _judged(row)
            why = f"{verdict} ({row.reason})" if row.reason else verdict
            table.add_row(*map(printable, (describe_key(row.key), *sides, change, interval, why)))
        show_table(table)

    # Keys that have no partner or several records, then the reasons for rows without a verdict.
    for title, keys in (
        ("missing in the target", comparison.missing),
        ("extra in the target", comparison.extra),
        ("measured more than once, the newest counts", comparison.duplicates),
    ):
        if keys:
            show_text(f"{title}: {len(keys)}")
        for text in _described(keys, comparison):
            show_text(f"  {printable(text)}")
    for note in comparison.notes:
        show_text(f"note: {printable(note)}")
    if reasons := Counter(
        row.reason.partition(":")[0] for row in comparison.with_verdict("not compared")
    ):
        counts = ", ".join(
            f"{printable(reason)} ({count})" for reason, count in reasons.most_common()
        )
        show_text(f"not compared: {counts}")
    show_text(_summary(comparison))


def _described(keys: Sequence[tuple[str, ...]], comparison: Comparison) -> list[str]:
    """Return one line per key, or one line per problem if none of its rows is on both sides."""
    shared = {row.key[0] for row in comparison.rows}
    counts = Counter(key[0] for key in keys)
    whole = [
        f"{problem}: all {count} rows"
        for problem, count in counts.items()
        if problem not in shared and count > 1
    ]
    return whole + [describe_key(key) for key in keys if key[0] in shared or counts[key[0]] == 1]


def _is_quiet(row: ComparedRow) -> bool:
    """Return whether a row needs no line: unchanged, or not compared while both sides agree."""
    same = row.base.status == row.target.status and row.base.samples == row.target.samples
    return row.verdict == "unchanged" or (row.verdict == "not compared" and same)


def _judged(one: ComparedRow | ComparedGroup) -> tuple[str, str, str]:
    """Return the change and its interval as text, empty where they are NaN, and the verdict."""
    change = "" if math.isnan(one.change_percent) else f"{one.change_percent:+.2f} %"
    interval = (
        ""
        if math.isnan(one.low_percent)
        else f"{one.low_percent:+.2f} to {one.high_percent:+.2f} %"
    )
    return change, interval, "inside the noise" if one.verdict == "noise" else one.verdict


def describe_key(key: tuple[str, ...]) -> str:
    """Return a record's key as one line, without the part between problem and implementation.

    An example is `flash_benchmarking triton bfloat16 1x1x4096x64 causal forward time`.
    """
    from cs336_systems.bench.records import describe_case

    problem, _, implementation, case, mode, quantity = key
    return f"{problem} {implementation} {describe_case(json.loads(case))} {mode} {quantity}"


def _summary(comparison: Comparison) -> str:
    """Return the closing line: how many rows, and groups, have each verdict, at which threshold."""
    verdicts = [row.verdict for row in comparison.rows]
    counts = {words: verdicts.count(verdict) for verdict, words in WORDS.items()}
    parts = (
        ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none in common"
    )
    head = f"{len(verdicts)} rows at a threshold of {comparison.threshold_percent:g} %: {parts}"
    groups = {
        WORDS[verdict]: len(comparison.groups_with(verdict))
        for verdict in ("regression", "improvement")
    }
    if whole := ", ".join(f"{count} {name}" for name, count in groups.items() if count):
        head += f"; of {len(comparison.groups)} groups of all cases together: {whole}"
    return (
        head
        if not verdicts or counts["regressed"] or groups["regressed"]
        else f"{head}; no regression"
    )
