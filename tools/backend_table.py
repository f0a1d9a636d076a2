"""Make `attention/hopper_table.py`, by which `auto` chooses, from the records of `backend_choice`.

python tools/backend_table.py                       # of the published records
python tools/backend_table.py --records results/<device>/records/backend_choice.jsonl

Of the sizes measured, a pair of thresholds is valid if hopper is never more than 2 % slower from them on. Of the valid
ones the table has the pair with which `auto` loses least to the faster kernel, over all cases; of pairs that part the
cases alike, the largest, as nothing was measured in between.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from cs336_systems.attention import hopper_table
from cs336_systems.experiments.backend_choice import HEAD_DIMS
from cs336_systems.experiments.frames import load_frame, tuples
from cs336_systems.experiments.records import Record, read_records
from cs336_systems.experiments.spec import load

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "cs336_systems/attention/hopper_table.py"
RECORDS = ROOT / "results/nvidia-h200/records/backend_choice.jsonl"
SLOWER = 1.02  # how many times triton's time hopper may take where it is chosen


def limits_of(cases: Sequence[Any]) -> tuple[int, int] | None:
    """(tokens, queries) from which on `auto` takes hopper; None where triton loses least everywhere.

    A case has `tokens`, `queries` and `over_triton`, how many times as fast hopper is.
    """

    def lost(limits: tuple[int, int]) -> float:
        """The sum of the logarithms of the chosen kernel's times over the faster one's; infinite if not valid."""
        total = 0.0
        for case in cases:
            over = case["over_triton"]
            if case["tokens"] < limits[0] or case["queries"] < limits[1]:
                total += max(0.0, math.log(over))
            else:
                total += max(0.0, -math.log(over)) if over * SLOWER >= 1 else math.inf
        return total

    largest_first = sorted(product({x["tokens"] for x in cases}, {x["queries"] for x in cases}), reverse=True)
    best = min(largest_first, key=lost)
    return best if lost(best) < sum(max(0.0, math.log(case["over_triton"])) for case in cases) else None


def table_text(records: Sequence[Record]) -> str:
    """The table's file with the rows that `records` make. Head dims that are probes count to the next larger one."""
    rows = tuples(load_frame(load("backend_choice"), records))
    rows = [row for row in rows if row["implementation"] == "hopper" and row["over_triton"] == row["over_triton"]]
    lines = []
    for layout, is_causal in hopper_table.HOPPER_FROM:
        cases = [row for row in rows if (row["layout"], row["is_causal"]) == (layout, is_causal)]
        lines.append(f'    ("{layout}", {is_causal}): (')
        for low, head_dim in zip((0, *HEAD_DIMS), HEAD_DIMS):
            served = [case for case in cases if low < case["head_dim"] <= head_dim]
            if served:
                lines.append(f"        ({head_dim}, {limits_of(served)}),")
        lines.append("    ),")
    head, _, _ = TABLE.read_text().partition(" = {\n")
    return "\n".join([f"{head} = {{", *lines, "}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the table by which `auto` chooses.")
    parser.add_argument("--records", type=Path, default=RECORDS, help="of backend_choice (default: the published)")
    records = read_records(parser.parse_args().records)
    if not records:
        parser.error("no records: run `cs336-systems run backend_choice` on a Hopper GPU first")
    TABLE.write_text(table_text(records))
    print(f"written: {TABLE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
