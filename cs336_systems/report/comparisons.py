"""Who is faster than whom, on the same case and on real kernels only; whose times are of one run.

Times of different runs do not divide: other machines, other code, other work beside. Bytes do.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from cs336_systems.report.frames import OUR_KERNELS, PEERS, tuples
from cs336_systems.report.markdown import ABSENT, factor, number

OTHER_RUN = "other run"  # in the place of a ratio
OTHER_RUN_REMARK = f"{OTHER_RUN}: than its peer's (another commit or day), and times of two runs are not divided"
RUN_REMARK = "commit: of the run that a row is of; several where its columns are of several, in their order"


def real(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a number that can be divided by, not of an interpreted kernel."""
    return rows[(rows["status"] == "ok") & (rows["median"] > 0) & ~rows["interpreted"].astype(bool)]


def compared(rows: pd.DataFrame, *, slow: str, fast: str) -> pd.DataFrame:
    """Rows of `fast` whose case `slow` ran too, with the other's median as median_slow and the quotient as ratio.

    Of times only those of one run.
    """
    usable = real(rows)
    keys = ["case", "mode"]
    other = usable[usable["implementation"] == slow][[*keys, "median", "date", "commit"]]
    pairs = usable[usable["implementation"] == fast].merge(other, on=keys, suffixes=("", "_slow"))
    one_run = (pairs["commit"] == pairs["commit_slow"]) & (pairs["date"].str[:10] == pairs["date_slow"].str[:10])
    pairs = pairs[one_run | (pairs["quantity"] != "time")]
    return pairs.assign(ratio=pairs["median_slow"] / pairs["median"])


def same_run(first: Any, second: Any) -> bool:
    """Whether two rows were measured at one commit on one day; a run across midnight (UTC) counts as two."""
    return run_key(first) == run_key(second)


def run_key(row: Any) -> tuple[str, str]:
    """Day and commit, which sort by age."""
    return str(row.date)[:10], str(row.commit)


def ratio_cell(ratio: float, first: Any, second: Any) -> str:
    """The cell of a ratio between the times of two rows, which says so where they are of two runs."""
    return OTHER_RUN if math.isfinite(ratio) and not same_run(first, second) else factor(ratio)


def runs(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """The runs that what was measured in `rows` is of, the newest first."""
    newest: dict[tuple[str, str], str] = {}
    for row in tuples(rows[rows["status"] == "ok"]):
        newest[run_key(row)] = max(newest.get(run_key(row), ""), str(row.date))
    return sorted(newest, key=lambda key: (newest[key], key), reverse=True)


def run_names(rows: pd.DataFrame) -> dict[tuple[str, str], str]:
    """How each of `runs` is called: by its commit, and by its day too where a commit has several."""
    found = runs(rows)
    commits = [commit for _, commit in found]
    return {(day, commit): commit[:10] + (f" of {day}" if commits.count(commit) > 1 else "") for day, commit in found}


def run_cell(rows: list[Any], names: dict[tuple[str, str], str]) -> str:
    """The cell that names the runs which `rows`, the numbers of a line, are of, in their order."""
    measured = [row for row in rows if row is not None and row.status == "ok"]
    return ", ".join(dict.fromkeys(f"`{names[run_key(row)]}`" for row in measured)) or ABSENT


def hatched(marks: pd.DataFrame, rows: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The marks of `rows` with the name of each one's run, and these names, newest first; no names if there is one."""
    names = run_names(rows)
    if len(names) < 2:
        return marks, ()
    return marks.assign(run=[names.get(run_key(row), "") for row in tuples(rows)]), tuple(names.values())


def best_peer(rows: pd.DataFrame, beside: Any) -> Any:
    """The fastest row of one case that is somebody else's implementation in the run of `beside`; None if none ran."""
    peers = real(rows)
    peers = peers[peers["implementation"].isin(PEERS)].sort_values("median", kind="stable")
    return next((row for row in tuples(peers) if same_run(row, beside)), None)


def against_best_peer(rows: pd.DataFrame) -> list[str]:
    """A sentence for each run that sets our times against its best peer's, in the rows of one case, if it has both."""
    said = []
    for ours in _by_run(real(rows[rows["implementation"].isin(OUR_KERNELS)])):
        peer = best_peer(rows, ours[0])
        if peer is not None:
            parts = [f"{row.implementation} has {factor(peer.median / row.median)} its speed" for row in ours]
            said.append(f"The fastest peer there is {peer.label} with {number(peer.median)} ms: {' and '.join(parts)}.")
    return said


def _by_run(rows: pd.DataFrame) -> list[list[Any]]:
    """Rows of each run."""
    found: dict[tuple[str, str], list[Any]] = {}
    for row in tuples(rows):
        found.setdefault(run_key(row), []).append(row)
    return list(found.values())
