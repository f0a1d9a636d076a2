"""Make `attention/hopper_table.py`, by which `auto` chooses, from the records of `backend_choice`.

python tools/backend_table.py                       # of the published records
python tools/backend_table.py --records results/<device>/records/backend_choice.jsonl

Rows of `attention_shapes` and `short_calls` count too. A pair of thresholds is valid if hopper was
never more than 2 % slower from them on. Of the valid ones the table has the pair with which `auto`
loses least to the faster kernel, over all cases; of pairs that part the cases alike, the one with
the shortest length, which lies in the middle between two measured ones, and with the most queries.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from cs336_systems.attention import hopper_table
from cs336_systems.bench.records import Record, case_key, latest, read_records
from cs336_systems.experiments.beyond.backend_choice import HEAD_DIMS

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "cs336_systems/attention/hopper_table.py"
CHOICE = ROOT / "results/nvidia-h100/records/backend_choice.jsonl"
OTHERS = [
    ROOT / "results/nvidia-h200/records/attention_shapes.jsonl",
    ROOT / "results/nvidia-h100/records/short_calls.jsonl",
]
SLOWER = 1.02  # how many times triton's time hopper may take where it is chosen


def measured(*paths: Path) -> list[dict[str, Any]]:
    """The cases of records in which triton and hopper took turns over both passes, of calls or of
    replayed graphs.

    Each with `tokens` and `queries`, by which `auto` chooses, and `over_triton`, how many times as
    fast hopper was.
    """
    return [case for path in paths for case in cases_of(latest(read_records(path)))]


def cases_of(records: Iterable[Record]) -> Iterable[dict[str, Any]]:
    pairs: dict[str, dict[str, Record]] = {}
    for one in records:
        if one.status == "ok" and one.mode == "forward_backward" and one.quantity != "host_time":
            # a graph's time comes last
            pairs.setdefault(case_key(one.case), {})[one.implementation] = one
    for pair in pairs.values():
        if {"triton", "hopper"} <= {*pair}:
            case = {"layout": "dense", "documents": 0} | pair["hopper"].case
            rounds = zip(pair["triton"].samples, pair["hopper"].samples)
            yield case | {
                "tokens": case["documents"]
                if case["layout"] == "packed"
                else min(case["seqlen_q"], case["seqlen_k"]),
                "queries": case["batch"] * case["heads"] * case["seqlen_q"],
                "over_triton": median(slow / fast for slow, fast in rounds),
            }


def limits_of(cases: Sequence[Any]) -> tuple[int, int] | None:
    """(tokens, queries) from which on `auto` takes hopper; None where triton loses least
    everywhere.

    A case has `tokens`, `queries` and `over_triton`, how many times as fast hopper is.
    """

    def lost(limits: tuple[int, int]) -> float:
        """The sum of the logarithms of the chosen kernel's times over the faster one's; infinite if
        not valid.
        """
        total = 0.0
        for case in cases:
            over = case["over_triton"]
            if case["tokens"] < limits[0] or case["queries"] < limits[1]:
                total += max(0.0, math.log(over))
            else:
                total += max(0.0, -math.log(over)) if over * SLOWER >= 1 else math.inf
        return total

    lengths = sorted({case["tokens"] for case in cases})
    tokens = [
        round(math.sqrt(shorter * longer))
        for shorter, longer in zip([lengths[0], *lengths], lengths)
    ]
    best = min(product(tokens, sorted({case["queries"] for case in cases}, reverse=True)), key=lost)
    return (
        best
        if lost(best) < sum(max(0.0, math.log(case["over_triton"])) for case in cases)
        else None
    )


def table_text(cases: Sequence[dict[str, Any]]) -> str:
    """The table's file with the rows that `cases` make. Head dims that are probes count to the next
    larger one.
    """
    lines = []
    for layout, is_causal in hopper_table.HOPPER_FROM:
        alike = [
            case for case in cases if (case["layout"], case["is_causal"]) == (layout, is_causal)
        ]
        lines.append(f'    ("{layout}", {is_causal}): (')
        for low, head_dim in zip((0, *HEAD_DIMS), HEAD_DIMS):
            served = [case for case in alike if low < case["head_dim"] <= head_dim]
            if served:
                lines.append(f"        ({head_dim}, {limits_of(served)}),")
        lines.append("    ),")
    head, _, _ = TABLE.read_text().partition(" = {\n")
    return "\n".join([f"{head} = {{", *lines, "}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the table by which `auto` chooses.")
    parser.add_argument(
        "--records", type=Path, default=CHOICE, help="of backend_choice (default: the published)"
    )
    cases = measured(parser.parse_args().records, *OTHERS)
    TABLE.write_text(table_text(cases))
    print(f"written: {TABLE.relative_to(ROOT)}, from {len(cases)} cases")


if __name__ == "__main__":
    main()
