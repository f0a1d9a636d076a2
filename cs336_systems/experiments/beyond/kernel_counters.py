"""What limits the attention kernels, by the GPU's own counters.

A kernel whose tensor cores are busy in all cycles can gain nothing but from the clock. Otherwise
the counters show what warps wait for: exponentials, barriers, products in flight, memory. The
longest kernel of each pass is counted, ours beside cuDNN's, on four of the shapes where the two are
compared.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from cs336_systems.book.frames import dicts, digits, pick, span
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments import Bars, Cell, Pick, Row, Sample, Unsupported, Wide, problem
from cs336_systems.measure.counters import COUNTERS, STALL, CountersUnavailableError, read_counters
from cs336_systems.subjects.attention_passes import BY_SHAPE, SMALL, AttentionExperiment
from cs336_systems.subjects.implementations import check_runs

MODES = ("forward", "backward")
# States that are no waits: the warp issued, or was ready while another one issued.
READY = (f"{STALL}selected", f"{STALL}not_selected")
NUM_WAITS = 3


def busy_claim(rows: pd.DataFrame) -> str:
    """Return that hopper leads, if it has the highest share in every shape and pass."""
    first = rows.sort_values("percent").groupby(["shape", "pass"]).tail(1)
    if not (first["implementation"] == "hopper").all():
        return ""
    return f"hopper keeps the tensor cores busiest: {span(first['percent'], 2)} % of the cycles"


@problem(title="What the GPU's counters say limits the attention kernels", order=6)
class KernelCounts(AttentionExperiment):
    sizes = {
        **SMALL,
        "handout": (
            (4, 32, 4096, 64, True),
            (1, 16, 16384, 64, True),
            (1, 16, 16384, 128, True),
            (1, 64, 8192, 128, False),
        ),
    }
    implementations = ("triton", "hopper", "sdpa_cudnn")
    rows = tuple(
        Row(mode, name, unit) for mode in MODES for name, (_, _, unit, _) in COUNTERS.items()
    )

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Yield the counters of each pass's longest kernel, one sample each.

        `Unsupported` if the counters cannot be read here.
        """
        shape, name = cell.case, cell.implementation
        if run.device != "cuda":
            raise Unsupported("a CPU has no counters that ncu reads")
        check_runs(name, shape, run.device)
        try:
            forward = read_counters(profile_arguments(name, shape, "forward"))
            both = read_counters(profile_arguments(name, shape, "forward_backward"))
        except CountersUnavailableError as error:
            raise Unsupported(str(error)) from error

        # The backward's kernels are those of both passes that the forward alone does not run.
        longest = {}
        for mode, kernels in zip(MODES, (forward, both[~both["name"].isin(forward["name"])])):
            kernels = kernels.dropna(subset="kernel_time")
            if kernels.empty:
                raise RuntimeError(f"ncu saw no kernel of the {mode} pass")
            longest[mode] = dicts(kernels.sort_values("kernel_time"))[-1]
        for row in self.rows:
            kernel = longest[row.mode]
            found = [] if pd.isna(kernel[row.quantity]) else [float(kernel[row.quantity])]
            why = "" if found else "this GPU has no such counter"
            yield Sample(row=row, kernel=kernel["name"], samples=found, message=why)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return super().columns(row) | {"percent": 100 * row["median"]}

    def compared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Add `waits`: a warp's longest waits, in cycles per instruction that it issues."""
        keys = ["case", "mode", "implementation"]
        stalls = pick(
            frame,
            {"quantity": lambda name: name.startswith(STALL) and name not in READY, "status": "ok"},
        )
        longest = {}
        for key, group in stalls.groupby(keys):
            waits = dicts(group.sort_values("median", ascending=False).head(NUM_WAITS))
            longest[key] = ", ".join(
                f"{row['quantity'].removeprefix(STALL)} {digits(row['median'])}" for row in waits
            )
        return frame.assign(
            waits=[longest.get(tuple(row[key] for key in keys), "") for row in dicts(frame)]
        )

    tables = {
        "counters": Wide(
            title="counters of each pass's longest kernel",
            down={**BY_SHAPE, "pass": "pass", "kernel of": "implementation"},
            columns={
                "alone (ms)": Pick({"quantity": "kernel_time"}),
                "clock (GHz)": Pick({"quantity": "sm_clock"}),
                "tensor cores (%)": Pick({"quantity": "tensor_pipe"}, value="percent"),
                "exponentials (%)": Pick({"quantity": "exponential_pipe"}, value="percent"),
                "issue slots (%)": Pick({"quantity": "issue_slots"}, value="percent"),
                "longest waits (cycles an instruction)": Pick(
                    {"quantity": "kernel_time"}, value="waits"
                ),
            },
        )
    }
    figures = {
        "tensor_cores": Bars(
            claim=busy_claim,
            subtitle="batch × heads × tokens × head dim",
            title="Cycles in which the tensor cores are busy",
            x="shape",
            y="percent",
            y_title="% of a multiprocessor's cycles",
            facet="pass",
            where={"quantity": "tensor_pipe"},
        )
    }


def profile_arguments(implementation: str, shape: AttentionShape, mode: str) -> list[str]:
    """Return the arguments with which `cs336-systems` profiles `mode` of one shape, once.

    The run lies between the profiler's start and stop.
    """
    sizes = "x".join(map(str, (shape.batch, shape.heads, shape.seqlen_q, shape.head_dim)))
    mask = "--causal" if shape.is_causal else "--full"
    options = [
        "--implementation",
        implementation,
        "--precision",
        shape.dtype,
        mask,
        "--device",
        "cuda",
        "--steps",
        "1",
    ]
    return ["profile", sizes, "--mode", mode, *options]
