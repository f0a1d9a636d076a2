"""Synthetic records of sections 5 to 7: collectives, data-parallel steps, sharded optimizers and FSDP.

Every problem has cells that ran and one that did not, as a handout run on GPUs leaves them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cs336_systems.config import COLLECTIVES, MODEL_SIZES, CollectiveCase, DataParallelCase, RunConfig
from cs336_systems.experiments.registry import PROBLEMS
from cs336_systems.records import Record, case_to_dict
from cs336_systems.report.distributed import COMMUNICATION, DDP_PROBLEMS
from cs336_systems.report.sharding import FSDP_PROBLEM, OPTIMIZER_PROBLEM

GPU = {"name": "Test GPU", "kind": "cuda", "driver": "1.2"}
H200 = {"name": "NVIDIA H200", "kind": "cuda", "driver": "1.2"}  # whose link has a known peak


def parallel_case(ranks: int = 2, bucket: float | None = None, **options: Any) -> DataParallelCase:
    return DataParallelCase(
        model=MODEL_SIZES["xl"], batch=4, num_ranks=ranks, backend="nccl", attention="reference",
        bucket_size_mb=bucket, **options,
    )  # fmt: skip


def record(problem: str, case: Any, implementation: str, **changes: Any) -> Record:
    values: dict[str, Any] = {"mode": "train_step", "quantity": "time", "unit": "ms", "device": GPU}
    values |= {"commit": "c0ffee", "dirty": False, "date": "2026-01-02T03:04:05+00:00", "scale": "handout"}
    values |= {"problem": problem, "implementation": implementation, "software": {"torch": "2.11.0"}}
    return Record(case=case_to_dict(case), **values | changes)


STEP_MS = {"naive": 130.0, "flat": 120.0, "overlap": 104.0, "bucketed": 101.0, "torch_ddp_view": 100.0}


def step_records(problem: str) -> list[Record]:
    """Communication of 40 ms in each, hidden by three quarters where it overlaps; torch_ddp ran out of memory."""
    found = []
    for name, ms in STEP_MS.items():
        buckets: tuple[float | None, ...] = (None,)
        if problem == "ddp_bucketed_benchmarking":
            buckets = (1.0, 1000.0) if name == "bucketed" else ()
        elif name in ("bucketed", "torch_ddp_view"):
            buckets = (25.0,)
        for bucket in buckets:
            case = parallel_case(bucket=bucket)
            slower = 10.0 if bucket == 1.0 else 0.0
            hidden = 0.0 if name in ("naive", "flat") else 30.0
            found.append(record(problem, case, name, samples=[ms + slower - 1, ms + slower, ms + slower + 1]))
            for quantity, value in (
                ("traced_time", ms), ("communication_time", 40.0 + slower), ("compute_time", 90.0),
                ("overlap_time", hidden),
            ):  # fmt: skip
                found.append(record(problem, case, name, quantity=quantity, samples=[value]))
            found.append(record(problem, case, name, quantity="compute_intervals", samples=[0.0, 90.0]))
            ends = [90.0, 130.0] if not hidden else [50.0, 80.0, 90.0, 100.0]
            found.append(record(problem, case, name, quantity="communication_intervals", samples=ends))
            found.append(record(problem, case, name, quantity="peak_memory", unit="MiB", samples=[70000.0]))
    broken = parallel_case(bucket=25.0)
    found.append(record(problem, broken, "torch_ddp", status="oom", message="CUDA out of memory"))
    return found


def communication_records(device: dict[str, str] = H200) -> list[Record]:
    """Both backends at four ranks; gloo's broadcasts gave no result."""
    found = []
    for backend, ms in (("nccl", 5.0), ("gloo", 900.0)):
        for operation in COLLECTIVES:
            for size in (10**6, 10**9):
                case = CollectiveCase(operation=operation, num_bytes=size, num_ranks=4, backend=backend)
                values: dict[str, Any] = {"samples": [ms * size / 1e9]}
                if backend == "gloo" and operation == "broadcast":
                    values = {"status": "failed", "message": "no result within 600 s"}
                found.append(record(COMMUNICATION, case, backend, mode="collective", device=device, **values))
    return found


def sharding_records(problem: str) -> list[Record]:
    """Every cell of `problem` at handout scale, as a GPU would report it; one ran out of memory."""
    run = RunConfig(scale="handout", device="cuda")
    values = {"time": 100.0, "optimizer_state": 400.0, "communication_time": 40.0, "overlap_time": 30.0}
    records = []
    for cell in PROBLEMS[problem].cells(run):
        ours = cell.implementation in ("sharded", "zero1", "fsdp", "fsdp_layer")
        for row in cell.rows:
            broken = cell.implementation == "unsharded" and cell.case.precision.autocast is not None
            outcome: dict[str, Any] = {"samples": [values.get(row.quantity, 50.0) * (0.5 if ours else 1.0)]}
            if row.quantity.endswith("_intervals"):
                outcome = {"samples": [0.0, 2.0, 3.0, 4.5]}
            if broken:
                outcome = {"status": "oom", "message": "CUDA out of memory"}
            records.append(
                Record(
                    problem=problem, scale="handout", case=case_to_dict(cell.case), implementation=cell.implementation,
                    mode=row.mode, quantity=row.quantity, unit=row.unit, device=GPU, commit="c0ffee", dirty=False,
                    software={"torch": "2.11.0", "triton": "3.6.0"}, date="2026-01-02T03:04:05+00:00", **outcome,
                )
            )  # fmt: skip
    return records


DISTRIBUTED_MAKERS: dict[str, Callable[[], list[Record]]] = {
    COMMUNICATION: partial(communication_records, GPU),
    **{problem: partial(step_records, problem) for problem in DDP_PROBLEMS},
    **{problem: partial(sharding_records, problem) for problem in (OPTIMIZER_PROBLEM, FSDP_PROBLEM)},
}
