"""Two ring all-reduces, run step by step between simulated ranks: their steps, bytes and times."""

from typing import Any

from cs336_systems.analysis import HARDWARE, rings
from cs336_systems.experiments.spec import Calculation, problem
from cs336_systems.experiments.tables import Listing

BUFFER_BYTES = 10**9
RANKS = (2, 4, 8, 16, 64)
RINGS = {"ring": rings.ring_all_reduce, "alternate": rings.alternate_ring_all_reduce}


@problem()
class AlternateRingAllReduce(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        rows = []
        for num_ranks in RANKS:
            row: dict[str, Any] = {"ranks": num_ranks}
            for name, collective in RINGS.items():
                _, traffic = collective([[rank] * num_ranks for rank in range(num_ranks)])  # one element a chunk
                seconds = traffic.seconds(HARDWARE["H200"].node_bytes_per_s, BUFFER_BYTES / num_ranks)
                row |= {f"{name}_steps": traffic.steps, f"{name}_sent": traffic.sent[0] / num_ranks}
                row[f"{name}_ms"] = 1e3 * seconds
            rows.append(row | {"ratio": row["alternate_ms"] / row["ring_ms"]})
        return rows

    tables = {
        "rings": Listing(
            title="All-reduce of 1 GB on H200 NVLink (450 GB/s), simulated step by step",
            columns={
                "N": "ranks",
                "ring steps": "ring_steps",
                "alternate steps": "alternate_steps",
                "ring sent / S": "ring_sent",
                "alternate sent / S": "alternate_sent",
                "ring (ms)": "ring_ms",
                "alternate (ms)": "alternate_ms",
                "alternate over ring": "ratio",
            },
        )
    }
