"""Steps, bytes and times of two ring all-reduces that run step by step between simulated ranks."""

from typing import Any

from cs336_systems.analysis import HARDWARE, rings
from cs336_systems.experiments import Calculation, Listing, problem

BUFFER_BYTES = 10**9
RANKS = (2, 4, 8, 16, 64)
RINGS = {"ring": rings.ring_all_reduce, "alternate": rings.alternate_ring_all_reduce}


@problem()
class AlternateRingAllReduce(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return a row per number of ranks: steps, share sent and time of both rings."""
        rows = []
        for num_ranks in RANKS:
            row: dict[str, Any] = {"N": num_ranks}
            for name, collective in RINGS.items():
                # One element per chunk: the buffer S is then N elements.
                _, traffic = collective([[rank] * num_ranks for rank in range(num_ranks)])
                seconds = traffic.seconds(
                    HARDWARE["H200"].node_bytes_per_s, BUFFER_BYTES / num_ranks
                )
                row |= {
                    f"{name} steps": traffic.steps,
                    f"{name} sent / S": traffic.sent[0] / num_ranks,
                }
                row[f"{name} (ms)"] = 1e3 * seconds
            rows.append(row | {"alternate over ring": row["alternate (ms)"] / row["ring (ms)"]})
        return rows

    both = [
        f"{name} {what}" for what in ("steps", "sent / S", "(ms)") for name in ("ring", "alternate")
    ]
    tables = {
        "rings": Listing(
            title="All-reduce of 1 GB on H200 NVLink (450 GB/s), simulated step by step",
            columns=("N", *both, "alternate over ring"),
        )
    }
