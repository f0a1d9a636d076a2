"""Attention calls that end before the host has launched the next one, by turns.

Such a call takes as long as the host needs. Host noise lasts for seconds, longer than a round, so a
ratio within a round is fair. A turn is CALLS calls in a row, of which three times are taken:

  host_time    until the last call has returned: the time that the calls occupy the host
  time         until the GPU is done as well: a call's time in a step with nothing but such calls
  graph_time   the same calls replayed from a CUDA graph: the time that is left without a host

Unlike elsewhere, the cache is not overwritten between calls: while the GPU does that, the host
launches what is timed.
"""

import time
from dataclasses import replace

import pandas as pd

from cs336_systems.bench.turns import MOST_CALLS, Turn, captured
from cs336_systems.book.frames import span
from cs336_systems.experiments import Bars, Pivot, problem
from cs336_systems.measure.timing import synchronize, time_calls
from cs336_systems.subjects.attention_by_turns import AttentionByTurns
from cs336_systems.subjects.attention_passes import BOTH, BY_SHAPE, FORWARD, SMALL, Call

# (batch, heads, length, head_dim, causal): one head, as in the handout's grid; some heads; and
# calls of up to 1 ms.
SHAPES = {
    **SMALL,
    "handout": (
        (1, 1, 1024, 64, True),
        (1, 1, 2048, 16, True),
        (1, 1, 2048, 64, True),
        (1, 1, 2048, 128, True),
        (1, 8, 1024, 64, True),
        (1, 16, 512, 64, True),
        (16, 12, 1000, 64, True),
        (8, 16, 2048, 128, True),
    ),
}
QUANTITIES = {
    "time": "calls in a row",
    "host_time": "what a call keeps the host from",
    "graph_time": "in a CUDA graph",
}
ROUNDS = {"cpu": 3, "cuda": 25}
CALLS = {"cpu": 1, "cuda": MOST_CALLS}  # in a row, per turn


def short_claim(rows: pd.DataFrame) -> str:
    """Return hopper's time over that of PyTorch's fastest kernel, if hopper always takes less."""
    times = rows.pivot(index="shape", columns="implementation", values="median")
    theirs = times[[name for name in times if str(name).startswith("sdpa")]].min(axis=1)
    if "hopper" not in times or not (shares := times["hopper"] / theirs).max() < 1:
        return ""
    return f"Short calls of hopper take {span(shares, 2)} of the libraries' time"


@problem(
    title="What short attention calls take: the host, both, and the GPU alone, by turns", order=3
)
class ShortCalls(AttentionByTurns):
    implementations = ("triton", "hopper", "sdpa_flash", "sdpa_cudnn")
    sizes = SHAPES
    rounds = ROUNDS
    rows = tuple(
        replace(row, quantity=name, gpu_only=name != "time")
        for name in QUANTITIES
        for row in (FORWARD, BOTH)
    )

    def turn_of(self, call: Call, device: str) -> Turn:
        """Return a turn of CALLS calls in a row after an untimed one, on a GPU also in a graph."""
        count = CALLS[device]
        graph = captured(call) if device == "cuda" else None

        def turn() -> dict[str, float]:
            call()
            synchronize(device)

            start = time.perf_counter()
            for _ in range(count):
                call()
            queued = time.perf_counter()
            synchronize(device)
            done = time.perf_counter()

            taken = {
                "host_time": (queued - start) * 1e3 / count,
                "time": (done - start) * 1e3 / count,
            }
            if graph is not None:
                (replayed,) = time_calls(graph.replay, device=device, warmup=1, num_samples=1)
                taken["graph_time"] = replayed / count
            return taken

        return turn

    tables = {
        quantity: Pivot(
            title=words,
            down={**BY_SHAPE, "pass": "pass"},
            unit="µs",
            where={"quantity": quantity},
            ratios=tuple(
                (a, b) for a in ("hopper", "triton") for b in ("sdpa_cudnn", "sdpa_flash")
            ),
        )
        for quantity, words in QUANTITIES.items()
    }
    figures = {
        quantity: Bars(
            claim=short_claim,
            title=f"Both passes of short calls, {words}",
            subtitle=f"forward + backward, {words}, batch × heads × tokens × head dim",
            x="shape",
            unit="µs",
            y_title="µs a call",
            where={"quantity": quantity, "mode": "forward_backward", "batch": 1},
        )
        for quantity, words in QUANTITIES.items()
    }
