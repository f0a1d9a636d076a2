"""Intervals made by hand, and traces made by hand: what counts as compute, as communication, as
both at once.
"""

import pytest
import torch

from cs336_systems.measure.intervals import length, simplify, union
from cs336_systems.measure.overlap import Lanes, read_lanes, trace_lanes


def test_a_union_is_sorted_and_disjoint():
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert union([(0, 10), (2, 3), (4, 5)]) == [(0, 10)], "nested"
    assert union([(0, 1), (1, 2)]) == [(0, 2)], "touching"
    assert union([(3, 3)]) == union([]) == [], "empty"


def test_simplifying_closes_the_narrowest_gaps():
    intervals = [(0, 1), (1.1, 2), (5, 6), (6.2, 7), (20, 21)]
    assert simplify(intervals, 5) == intervals
    assert simplify(intervals, 3) == [(0, 2), (5, 7), (20, 21)]
    assert simplify(intervals, 1) == [(0, 21)]
    assert simplify([], 1) == []


def test_lanes_of_a_schedule():
    """Compute 0 to 10, communication 4 to 12 of which 6 beside compute, then compute alone."""
    lanes = Lanes(compute=[(0, 10), (13, 14)], communication=[(4, 12)])
    assert (lanes.compute_ms, lanes.communication_ms, lanes.overlap_ms, lanes.span_ms) == (
        11,
        8,
        6,
        14,
    )
    assert Lanes(compute=[], communication=[]).span_ms == 0
    assert length([(0, 1), (4, 6)]) == 3


def event(
    name: str, category: str, start_us: float, microseconds: float, phase: str = "X"
) -> dict[str, object]:
    return {"name": name, "cat": category, "ts": start_us, "dur": microseconds, "ph": phase}


def test_a_gpus_trace_is_read_by_its_kernels():
    events = [
        event("sm90_gemm", "kernel", 1000, 2000),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 2000, 3000),
        event("Memcpy DtoD", "gpu_memcpy", 6000, 500),
        event("nccl:all_reduce", "gpu_user_annotation", 0, 9000),  # a span around kernels, not work
        event("aten::mm", "cpu_op", 0, 9000),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 0, 9000, phase="i"),
    ]
    lanes = read_lanes(events, "cuda")
    assert lanes.compute == [(0.0, 2.0), (5.0, 5.5)] and lanes.communication == [(1.0, 4.0)]
    assert lanes.overlap_ms == 1.0


def test_a_cpus_trace_is_read_by_aten_and_gloo():
    events = [
        event("gloo:barrier", "user_annotation", 0, 500),
        event("aten::mm", "cpu_op", 1000, 1000),
        event("aten::linear", "cpu_op", 900, 1200),
        event("c10d::allreduce_", "cpu_op", 0, 9000),
        event("gloo:all_reduce", "user_annotation", 2000, 2000),
    ]
    lanes = read_lanes(events, "cpu")
    assert lanes.compute_ms == pytest.approx(1.2) and lanes.communication_ms == pytest.approx(2.0)
    assert lanes.overlap_ms == pytest.approx(0.1) and lanes.span_ms == pytest.approx(3.1)


def test_a_call_is_traced_after_a_rehearsal():
    calls = []
    lanes = trace_lanes(lambda: calls.append(torch.ones(64, 64) @ torch.ones(64, 64)), "cpu")
    assert len(calls) == 2 and lanes.compute_ms > 0 and lanes.communication == []
