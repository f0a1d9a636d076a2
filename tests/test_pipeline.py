"""Pipeline schedules: the simulation against the closed forms, the dependencies against the lanes,
and orders and arguments that must be refused.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.analysis import pipeline as pipelines
from cs336_systems.analysis.pipeline import (
    SCHEDULES,
    Operation,
    Pipeline,
    PipelineRun,
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate_pipeline,
)

# (forward, backward) of a stage: the usual one, equal ones, and some far from both
TIMES = [(1.0, 2.0), (1.0, 1.0), (3.0, 1.0), (1.0, 7.5)]
GRID = [
    (schedule, stages, microbatches, chunks)
    for stages in (1, 2, 3, 4, 7)
    for schedule, chunk_counts in (
        ("GPipe", (1,)),
        ("1F1B", (1,)),
        ("interleaved 1F1B", (2, 3, 4)),
    )
    for chunks in chunk_counts
    for microbatches in (
        (1, 2, 3, 5, 8, 13) if chunks == 1 else (stages, 2 * stages, 3 * stages, 5 * stages)
    )
]
SMALL = Pipeline(num_stages=2, num_microbatches=2)


def simulated(schedule: str, pipeline: Pipeline) -> PipelineRun:
    return simulate_pipeline(pipeline, SCHEDULES[schedule](pipeline))


def pipeline_of(stages: int, microbatches: int, chunks: int, **times: float) -> Pipeline:
    return Pipeline(num_stages=stages, num_microbatches=microbatches, num_chunks=chunks, **times)


@st.composite
def cases(draw: Any) -> tuple[str, Pipeline]:
    """A schedule and a pipeline that it serves, with any times."""
    schedule = draw(st.sampled_from(list(SCHEDULES)))
    stages = draw(st.integers(1, 6))
    microbatches, chunks = draw(st.integers(1, 12)), 1
    if schedule == "interleaved 1F1B":
        microbatches, chunks = stages * draw(st.integers(1, 4)), draw(st.integers(2, 4))
    time = st.floats(0.1, 10.0)
    return schedule, pipeline_of(
        stages,
        microbatches,
        chunks,
        forward_time=draw(time),
        backward_time=draw(time),
        message_time=draw(st.sampled_from([0.0, 0.05, 1.0, 20.0])),
    )


# Simulation against closed forms


@pytest.mark.parametrize("forward, backward", TIMES)
@pytest.mark.parametrize("schedule, stages, microbatches, chunks", GRID)
def test_the_simulated_step_is_the_closed_forms(
    schedule: str, stages: int, microbatches: int, chunks: int, forward: float, backward: float
):
    """The papers' formulas, written out here a second time, and those of the module."""
    pipeline = pipeline_of(
        stages, microbatches, chunks, forward_time=forward, backward_time=backward
    )
    run = simulated(schedule, pipeline)
    whole = (forward + backward) * (microbatches + (stages - 1) / chunks)
    assert run.makespan == pytest.approx(whole)
    over_ideal = (stages - 1) / (chunks * microbatches)
    assert run.bubble_over_ideal == pytest.approx(over_ideal, abs=1e-12)
    assert pipelines.bubble_over_ideal(pipeline) == pytest.approx(over_ideal)
    assert run.bubble_fraction == pytest.approx(over_ideal / (1 + over_ideal), abs=1e-12)
    assert pipelines.bubble_fraction(pipeline) == pytest.approx(over_ideal / (1 + over_ideal))


@pytest.mark.parametrize("schedule, stages, microbatches, chunks", GRID)
def test_activations_and_messages_are_the_closed_forms(
    schedule: str, stages: int, microbatches: int, chunks: int
):
    pipeline = pipeline_of(stages, microbatches, chunks)
    run = simulated(schedule, pipeline)
    assert run.peak_activations == pipelines.peak_activations(schedule, pipeline)
    assert run.num_messages == pipelines.num_messages(pipeline)


def test_activations_of_four_stages_and_eight_micro_batches():
    """The numbers of figures 3 and 4 of arXiv:2104.04473, counted in the pictures."""
    eight = pipeline_of(4, 8, 1)
    assert simulated("GPipe", eight).peak_activations == [8, 8, 8, 8]
    assert simulated("1F1B", eight).peak_activations == [4, 3, 2, 1]
    two_chunks = simulated("interleaved 1F1B", pipeline_of(4, 8, 2)).peak_activations
    assert two_chunks == [5.5, 4.5, 3.5, 2.5], "11, 9, 7 and 5 chunks of half a stage"


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_interleaving_holds_the_factor_of_its_paper(stages: int, chunks: int):
    """1 + (p - 1)/(p·v) times 1F1B's p micro-batches, of arXiv:2205.05198."""
    run = simulated("interleaved 1F1B", pipeline_of(stages, 4 * stages, chunks))
    factor = 1 + (stages - 1) / (stages * chunks)
    assert run.peak_activations[0] == pytest.approx(stages * factor)


def test_interleaved_operations_are_megatrons():
    """The last stage of two, two chunks: its warm-up is one group of chunk 0."""
    order = interleaved(pipeline_of(2, 2, 2))[1]
    assert order == [
        Operation("forward", 0, 0),
        Operation("forward", 1, 0),
        Operation("forward", 0, 1),
        Operation("backward", 0, 1),
        Operation("forward", 1, 1),
        Operation("backward", 1, 1),
        Operation("backward", 0, 0),
        Operation("backward", 1, 0),
    ]


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_messages_delay_1f1b_with_every_round_trip_and_the_others_once(stages: int):
    """A message is short here; the pipelines are long enough to be in their steady state."""
    short = 0.05

    def later(schedule: str, chunks: int, groups: int) -> float:
        without = pipeline_of(stages, groups * stages, chunks)
        delayed = simulated(schedule, replace(without, message_time=short))
        return (delayed.makespan - simulated(schedule, without).makespan) / short

    for groups in (4, 8):
        assert later("GPipe", 1, groups) == pytest.approx(2 * (stages - 1))
        for chunks in (2, 4):
            once = 2 * (stages * chunks - 1)
            assert later("interleaved 1F1B", chunks, groups) == pytest.approx(once)
    more = later("1F1B", 1, 8) - later("1F1B", 1, 4)
    assert more == pytest.approx(4 * 2 * (stages - 1))


@pytest.mark.parametrize("below", [0.5, 0.1, 0.05])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 3, 8])
def test_fewer_micro_batches_than_the_fewest_leave_a_larger_bubble(
    stages: int, chunks: int, below: float
):
    fewest = pipelines.fewest_microbatches(stages, below=below, num_chunks=chunks)
    schedule = "1F1B" if chunks == 1 else "interleaved 1F1B"
    assert simulated(schedule, pipeline_of(stages, fewest, chunks)).bubble_fraction < below
    fewer = fewest - (1 if chunks == 1 else stages)
    if fewer:
        run = simulated(schedule, pipeline_of(stages, fewer, chunks))
        assert run.bubble_fraction >= below - 1e-12


def test_a_single_stage_needs_one_micro_batch():
    assert pipelines.fewest_microbatches(1, below=0.1) == 1


# The lanes of any pipeline


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_stage_runs_two_operations_at_once(case: tuple[str, Pipeline]):
    schedule, pipeline = case
    run = simulated(schedule, pipeline)
    for order, lane in zip(SCHEDULES[schedule](pipeline), run.lanes):
        assert [span.operation for span in lane] == order
        assert len(set(order)) == 2 * pipeline.num_microbatches * pipeline.num_chunks
        assert all(before.end <= after.start for before, after in zip(lane, lane[1:]))
        for span in lane:
            time = getattr(pipeline, f"{span.operation.mode}_time") / pipeline.num_chunks
            assert span.end - span.start == pytest.approx(time)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_dependency_holds_and_no_stage_waits_for_nothing(case: tuple[str, Pipeline]):
    """Told by the model's parts in their order, not by stages and chunks as the simulation is."""
    schedule, pipeline = case
    run = simulated(schedule, pipeline)
    parts = pipeline.num_stages * pipeline.num_chunks
    forward, backward = {}, {}  # (micro-batch, part) -> span
    for stage, lane in enumerate(run.lanes):
        for span in lane:
            mode, microbatch, chunk = span.operation
            spans = forward if mode == "forward" else backward
            spans[microbatch, chunk * pipeline.num_stages + stage] = span
    sent = pipeline.message_time if pipeline.num_stages > 1 else 0.0

    arrivals = {}  # span's operation with its part -> when its input is there
    for microbatch in range(pipeline.num_microbatches):
        for part in range(parts):
            arrivals["forward", microbatch, part] = (
                forward[microbatch, part - 1].end + sent if part else 0.0
            )
            arrivals["backward", microbatch, part] = (
                backward[microbatch, part + 1].end + sent
                if part + 1 < parts
                else forward[microbatch, part].end
            )

    for stage, lane in enumerate(run.lanes):
        free = 0.0
        for span in lane:
            mode, microbatch, chunk = span.operation
            arrival = arrivals[mode, microbatch, chunk * pipeline.num_stages + stage]
            assert span.start == max(free, arrival)
            free = span.end
    assert run.makespan == max(span.end for span in (*forward.values(), *backward.values()))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_memory_depends_on_the_order_alone(case: tuple[str, Pipeline]):
    """Counted at every start, by the spans' times: a forward that has started, no backward ended."""
    schedule, pipeline = case
    run = simulated(schedule, pipeline)
    for lane, peak in zip(run.lanes, run.peak_activations):
        ends = {span.operation: span.end for span in lane}
        held = [
            sum(
                one.operation.mode == "forward"
                and one.start <= at.start < ends[one.operation._replace(mode="backward")]
                for one in lane
            )
            for at in lane
        ]
        assert max(held) / pipeline.num_chunks == peak
    assert run.peak_activations == pipelines.peak_activations(schedule, pipeline)


def test_the_simulation_is_not_the_formula():
    """A schedule with a longer warm-up than it needs holds more, and one that waits takes longer."""
    pipeline = pipeline_of(3, 6, 1)
    usual = simulated("1F1B", pipeline)
    forwards = [Operation("forward", i, 0) for i in range(6)]
    backwards = [Operation("backward", i, 0) for i in range(6)]
    one_by_one = [one for pair in zip(forwards, backwards) for one in pair]
    slow = simulate_pipeline(pipeline, [one_by_one] * 3)
    assert slow.makespan == 6 * 3 * 3.0, "one micro-batch at a time passes through three stages"
    assert slow.peak_activations == [1, 1, 1] and usual.peak_activations == [3, 2, 1]


# What is refused


def test_an_order_that_deadlocks_is_refused():
    """Stage 0 wants the gradient of micro-batch 1 before it sends that of 0 a forward."""
    orders = gpipe(SMALL)
    orders[1] = [*reversed(orders[1][:2]), *orders[1][2:]]
    assert simulate_pipeline(SMALL, orders).makespan > simulated("GPipe", SMALL).makespan
    orders[0] = [orders[0][0], orders[0][2], orders[0][1], orders[0][3]]
    message = "orders deadlock: stage 0 at backward 0 of chunk 0, stage 1 at forward 1 of chunk 0"
    with pytest.raises(ValueError, match=re.escape(message)):
        simulate_pipeline(SMALL, orders)


def test_a_backward_before_its_forward_is_refused():
    alone = Pipeline(num_stages=1, num_microbatches=1)
    (order,) = one_forward_one_backward(alone)
    with pytest.raises(ValueError, match="deadlock: stage 0 at backward 0 of chunk 0"):
        simulate_pipeline(alone, [order[::-1]])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda orders: orders[:1], "orders must have num_stages=2 lists, got 1"),
        (lambda orders: [orders[0], orders[1][:-1]], "orders[1] must hold the forward"),
        (lambda orders: [orders[0] + orders[0][:1], orders[1]], "orders[0] must hold the forward"),
        (
            lambda orders: [orders[0], [*orders[1][:-1], Operation("backward", 1, 1)]],
            "orders[1] must hold the forward",
        ),
    ],
    ids=["a stage too few", "an operation too few", "one twice", "a chunk that is not there"],
)
def test_orders_that_are_not_the_pipelines_are_refused(change: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        simulate_pipeline(SMALL, change(gpipe(SMALL)))


@pytest.mark.parametrize(
    "field, value",
    [
        *((name, 0) for name in ("num_stages", "num_microbatches", "num_chunks")),
        *((name, 1.5) for name in ("num_stages", "num_microbatches", "num_chunks")),
        *((name, 0.0) for name in ("forward_time", "backward_time")),
        *(
            (name, bad)
            for name in ("forward_time", "backward_time", "message_time")
            for bad in (-1.0, float("nan"), float("inf"))
        ),
    ],
)
def test_bad_fields_are_refused_by_name(field: str, value: Any):
    with pytest.raises(ValueError, match=rf"Pipeline\.{field} must be .*got {value}"):
        replace(SMALL, **{field: value})


@pytest.mark.parametrize(
    "schedule, pipeline, message",
    [
        (gpipe, pipeline_of(2, 2, 2), "num_chunks must be 1 for GPipe, got 2"),
        (one_forward_one_backward, pipeline_of(2, 2, 2), "num_chunks must be 1 for 1F1B, got 2"),
        (interleaved, pipeline_of(2, 2, 1), "num_chunks must be at least 2"),
        (interleaved, pipeline_of(4, 6, 2), "num_microbatches must be a multiple of num_stages=4"),
    ],
)
def test_schedules_refuse_pipelines_by_the_fields_name(
    schedule: Any, pipeline: Pipeline, message: str
):
    with pytest.raises(ValueError, match=f"Pipeline.{message}"):
        schedule(pipeline)


@pytest.mark.parametrize("below", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_outside_its_range_is_refused(below: float):
    with pytest.raises(ValueError, match=r"below must be in \(0, 1\]"):
        pipelines.fewest_microbatches(4, below=below)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule must be one of GPipe, 1F1B, .*got 'gpipe'"):
        pipelines.peak_activations("gpipe", SMALL)
