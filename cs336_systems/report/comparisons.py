"""Who is faster than whom, on the same case and on real kernels only."""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems.report.frames import OUR_KERNELS, PEERS, tuples
from cs336_systems.report.markdown import factor, number


def real(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a number that can be divided by, not of an interpreted kernel."""
    return rows[(rows["status"] == "ok") & (rows["median"] > 0) & ~rows["interpreted"].astype(bool)]


def compared(rows: pd.DataFrame, *, slow: str, fast: str) -> pd.DataFrame:
    """Rows of `fast` whose case `slow` ran too, with the other's median as median_slow and the quotient as ratio."""
    usable = real(rows)
    keys = ["case", "mode"]
    other = usable[usable["implementation"] == slow][[*keys, "median"]]
    pairs = usable[usable["implementation"] == fast].merge(other, on=keys, suffixes=("", "_slow"))
    return pairs.assign(ratio=pairs["median_slow"] / pairs["median"])


def best_peer(rows: pd.DataFrame) -> Any:
    """The fastest row of one case that is somebody else's implementation; None if none ran."""
    peers = real(rows)
    peers = peers[peers["implementation"].isin(PEERS)].sort_values("median", kind="stable")
    return tuples(peers)[0] if len(peers) else None


def against_best_peer(rows: pd.DataFrame) -> list[str]:
    """One sentence that sets our times against the best peer's in the rows of one case; none if either is missing."""
    peer = best_peer(rows)
    ours = tuples(real(rows[rows["implementation"].isin(OUR_KERNELS)]))
    if peer is None or not ours:
        return []
    parts = [f"{row.implementation} has {factor(peer.median / row.median)} its speed" for row in ours]
    return [f"The fastest peer there is {peer.label} with {number(peer.median)} ms: {' and '.join(parts)}."]
