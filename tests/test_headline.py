"""The README's table of training steps on several GPUs: the same case, the faster of PyTorch's, failures as rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs336_systems.config import MODEL_SIZES, Precision
from cs336_systems.experiments.ddp_cells import DataParallelCase
from cs336_systems.experiments.sharding_cells import ShardingCase
from cs336_systems.records import Record, case_to_dict
from cs336_systems.report.frames import load_frame
from cs336_systems.report.headline import NO_STEPS, distributed_headline

OVERLAP = "ddp_overlap_individual_parameters_benchmarking"
ZERO, FSDP = "optimizer_state_sharding_accounting", "fsdp_accounting"
BFLOAT16 = Precision(autocast="bfloat16")


def ddp_case(**changes: Any) -> DataParallelCase:
    fields: dict[str, Any] = {"model": MODEL_SIZES["xl"], "batch": 4, "num_ranks": 2, "backend": "nccl"}
    return DataParallelCase(**fields | {"attention": "reference", "precision": BFLOAT16} | changes)


def sharding_case(**changes: Any) -> ShardingCase:
    fields: dict[str, Any] = {"model": MODEL_SIZES["xl"], "batch": 4, "num_ranks": 2, "backend": "nccl"}
    return ShardingCase(**fields | {"attention": "sdpa", "precision": BFLOAT16} | changes)


def record(problem: str, case: Any, implementation: str, quantity: str = "time", **fields: Any) -> Record:
    given: dict[str, Any] = {
        "problem": problem, "scale": "handout", "case": case_to_dict(case), "implementation": implementation,
        "mode": "train_step", "quantity": quantity, "unit": "ms" if quantity == "time" else "MiB",
        "device": {"name": "Test GPU", "kind": "cuda", "driver": "1.2"}, "commit": "c0ffee", "dirty": False,
        "software": {"torch": "2.11.0", "triton": "3.6.0"}, "date": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    return Record(**(given | fields))


def lines(*records: Record) -> list[list[str]]:
    """Cells of the table's rows."""
    problems = {one.problem for one in records}
    frames = {problem: load_frame([one for one in records if one.problem == problem]) for problem in problems}
    text = distributed_headline(frames)
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]


def test_the_faster_of_pytorchs_wrappers_counts_whatever_its_buckets():
    found = lines(
        record(OVERLAP, ddp_case(), "overlap", samples=[80.0]),
        record(OVERLAP, ddp_case(), "overlap", "peak_memory", samples=[1000.0]),
        record(OVERLAP, ddp_case(bucket_size_mb=25.0), "torch_ddp", samples=[120.0]),
        record(OVERLAP, ddp_case(bucket_size_mb=25.0), "torch_ddp_view", samples=[100.0]),
        record(OVERLAP, ddp_case(bucket_size_mb=25.0), "torch_ddp_view", "peak_memory", samples=[2000.0]),
        record(OVERLAP, ddp_case(), "naive", samples=[10.0]),
    )
    assert found == [
        ["overlapped DDP", "xl", "2", "bfloat16", "80.00", "1,000",
         "torch DDP, gradients as views", "100.0", "2,000", "1.25×"],
    ]  # fmt: skip


def test_each_of_ours_stands_beside_pytorchs_of_the_same_case():
    exact = sharding_case(reduce_dtype="float32")
    found = lines(
        record(ZERO, sharding_case(), "sharded", samples=[100.0]),
        record(ZERO, sharding_case(), "zero1", samples=[50.0]),
        record(ZERO, sharding_case(), "zero1", "memory_after_step", samples=[200.0]),
        record(ZERO, sharding_case(), "zero1", "peak_memory", samples=[300.0]),
        record(ZERO, sharding_case(), "torch_zero", samples=[75.0]),
        record(FSDP, sharding_case(), "fsdp", samples=[40.0]),
        record(FSDP, sharding_case(), "torch_fsdp", samples=[60.0]),
        record(FSDP, exact, "fsdp", samples=[50.0]),
        record(FSDP, exact, "torch_fsdp", samples=[25.0]),
    )
    assert [(line[0], line[3], line[4], line[6], line[9]) for line in found] == [
        ("ShardedOptimizer", "bfloat16", "100.0", "torch ZeroRedundancyOptimizer", "0.750×"),
        ("Zero1Optimizer", "bfloat16", "50.00", "torch ZeroRedundancyOptimizer", "1.50×"),
        ("FSDP", "bfloat16", "40.00", "torch fully_shard", "1.50×"),
        ("FSDP", "bfloat16, gradients averaged in float32", "50.00", "torch fully_shard", "0.500×"),
    ]
    assert found[1][5] == "300.0" and found[0][5] == "–"


def test_the_footer_names_the_commits_of_the_rows_that_are_shown():
    """It named those of every record of the problem, so that a reader looked for rows that are elsewhere."""
    shown = [record(FSDP, sharding_case(), name, samples=[40.0]) for name in ("fsdp", "torch_fsdp")]
    elsewhere = record(FSDP, sharding_case(num_ranks=4), "fsdp_layer", samples=[1.0], commit="bada55")
    text = distributed_headline({FSDP: load_frame([*shown, elsewhere])})
    assert "`c0ffee`" in text and "`bada55`" not in text


SAME = {"commit": "c0ffee", "date": "2026-01-02T23:04:05+00:00"}
EARLIER = {"commit": "bada55", "date": "2026-01-01T03:04:05+00:00"}


@pytest.mark.parametrize("other", [EARLIER, {"commit": "bada55"}, {"date": "2026-01-01T03:04:05+00:00"}])
def test_steps_of_two_runs_stand_side_by_side_but_are_not_divided(other):
    """FSDP of a loaded machine stood at 0.853× of fully_shard on an idle one, a day's difference and not the code's."""
    records = [
        record(FSDP, sharding_case(), "fsdp", samples=[40.0], **other),
        record(FSDP, sharding_case(), "torch_fsdp", samples=[20.0]),
        record(OVERLAP, ddp_case(), "overlap", samples=[80.0], **other),
        record(OVERLAP, ddp_case(bucket_size_mb=25.0), "torch_ddp", samples=[100.0]),
        record(OVERLAP, ddp_case(bucket_size_mb=25.0), "torch_ddp_view", samples=[120.0], **other),
    ]
    assert [(line[4], line[7], line[9]) for line in lines(*records)] == [
        ("80.00", "120.0", "1.50×"),  # beside the one of its run, though another was faster
        ("40.00", "20.00", "other run"),
    ]
    text = distributed_headline({FSDP: load_frame(records[:2])})
    assert "- other run: than its peer's (another commit or day), and times of two runs are not divided" in text
    assert "other run" not in distributed_headline({FSDP: load_frame(records[1:2] + [replace(records[0], **SAME)])})


def test_a_failure_is_a_row_and_a_case_with_one_side_is_none():
    float32 = sharding_case(precision=Precision())
    oom = {"status": "oom", "message": "CUDA out of memory"}
    found = lines(
        record(FSDP, sharding_case(), "fsdp", samples=[40.0]),
        record(FSDP, sharding_case(), "torch_fsdp", **oom),
        record(FSDP, float32, "fsdp", samples=[40.0]),
    )
    assert [(line[3], line[4], line[7], line[9]) for line in found] == [("bfloat16", "40.00", "OOM", "–")]


@pytest.mark.parametrize("case", [sharding_case(backend="gloo"), None])
def test_nothing_is_said_of_steps_on_a_cpu_or_of_none(case):
    frames = {}
    if case is not None:
        records = [record(FSDP, case, name, samples=[40.0]) for name in ("fsdp", "torch_fsdp")]
        frames = {FSDP: load_frame(records)}
    assert distributed_headline(frames) == NO_STEPS
