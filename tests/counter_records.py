"""Synthetic records of `kernel_counters` for tests of the report."""

from __future__ import annotations

from cs336_systems.config import AttentionShape
from cs336_systems.experiments.s4_counters import ROWS
from cs336_systems.records import Record, case_to_dict

GPU = {"name": "Test GPU", "kind": "cuda", "driver": "1.2"}
TENSOR_PIPE = {"triton": 0.5, "hopper": 0.75, "sdpa_cudnn": 0.7}
VALUES = {"kernel_time": 1.25, "sm_clock": 1.7, "exponential_pipe": 0.4, "issue_slots": 0.3}
WAITS = {
    "stall_gmma": 2.5,
    "stall_long_scoreboard": 4.0,
    "stall_barrier": 0.25,
    "stall_wait": 1.0,
    "stall_selected": 9.0,
}


def counter_records() -> list[Record]:
    """Three kernels of each pass on one shape; one counter of cuDNN's is absent."""
    case = AttentionShape(
        batch=1, heads=16, seqlen_q=16384, seqlen_k=16384, head_dim=64, is_causal=True, dtype="bfloat16"
    )
    found = []
    for name, share in TENSOR_PIPE.items():
        values = VALUES | WAITS | {"tensor_pipe": share}
        for row in ROWS:
            absent = (name, row.quantity) == ("sdpa_cudnn", "exponential_pipe")
            found.append(
                Record(
                    problem="kernel_counters", scale="handout", case=case_to_dict(case), implementation=name,
                    mode=row.mode, quantity=row.quantity, unit=row.unit,
                    samples=[] if absent else [values.get(row.quantity, 0.0)],
                    status="skipped" if absent else "ok",
                    message="this GPU has no such counter" if absent else "", kernel=f"{name}_{row.mode}_kernel",
                    device=GPU, software={"torch": "2.11.0", "triton": "3.6.0"}, commit="c0ffee", dirty=False,
                    date="2026-01-02T03:04:05+00:00",
                )
            )  # fmt: skip
    return found
