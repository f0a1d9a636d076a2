"""Wrappers by turns in one job: all are checked and timed, one at a time, and compared within
rounds; the ring.
"""

import gc
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cs336_systems.bench.records import Record
from cs336_systems.bench.spec import Disagreement, Unsupported, load
from cs336_systems.book.frames import dicts, load_frame
from cs336_systems.config import Precision, RunConfig
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.experiments.beyond import context_parallel, data_parallel_turns
from cs336_systems.experiments.beyond.data_parallel_turns import ParallelStep, take_turns
from cs336_systems.subjects.ranks import TIMES
from tests.one_job import OneJob
from tests.test_records import gpu_record

TINY = RunConfig(scale="tiny", device="cpu")
TURNS = load("data_parallel_turns")
CASE = TURNS.cases(TINY)[0]


def take_turns_one_at_a_time(rank: int, num_ranks: int) -> tuple[dict[str, Any], list[str]]:
    """All wrappers' turns, naive never averaging, flat short of memory; and in which order models
    were built.
    """
    gc.freeze()
    alive: list[tuple[str, Any]] = []
    order = []

    class Watched(ParallelStep):
        def __init__(self, name: str, case: Any, *arguments: Any) -> None:
            gc.collect()
            assert [other for other, model in alive if model() is not None] == []
            super().__init__(name, case, *arguments)
            alive.append((name, weakref.ref(self.parameters[0])))
            order.append(name)

        def train_step(self) -> None:
            if self.implementation == "flat":
                raise torch.OutOfMemoryError
            super().train_step()

    with (
        patch.object(data_parallel_turns, "ParallelStep", Watched),
        patch.object(NaiveDDP, "_synchronize", lambda self: None),
    ):
        return take_turns(rank, num_ranks, TURNS.implementations, CASE, TINY), order


JOB = OneJob(2, (take_turns_one_at_a_time,))


def test_every_wrapper_takes_its_turns_with_the_host_to_itself():
    for found, order in JOB.results(take_turns_one_at_a_time):
        assert list(found) == list(TURNS.implementations)
        fit = [name for name in found if name != "flat"]
        assert order[-len(found) - len(fit) :] == [*found, *reversed(fit)]  # after the checks
        assert all(len(found[name][2]) == 2 and min(found[name][2]) > 0 for name in fit)


def test_a_wrapper_that_is_wrong_or_does_not_fit_is_told_from_the_others():
    reports = [found for found, _ in JOB.results(take_turns_one_at_a_time)]
    for found in reports:
        right = {name: error for name, (error, wrong, _) in found.items() if not wrong}
        assert (
            set(right) == set(TURNS.implementations) - {"naive", "flat"}
            and max(right.values()) <= 1
        )
    (cell,) = TURNS.cells(TINY)
    with patch.object(data_parallel_turns.ranks, "run_cell", return_value=reports):
        measured = {sample.row.implementation: sample for sample in TURNS.measure(cell, TINY)}
    assert (
        "averaged gradients are off by" in measured["naive"].message
        and not measured["naive"].samples
    )
    assert (measured["flat"].status, measured["flat"].message) == ("oom", "out of memory")
    assert measured["zero1"].samples == [
        max(pair) for pair in zip(*(found["zero1"][2] for found in reports))
    ]


def test_a_users_own_model_is_refused():
    with pytest.raises(Unsupported, match="no known way to be built on the meta device"):
        next(TURNS.measure(TURNS.cells(TINY)[0], replace(TINY, model="a.b:C")))


# What the records are compared with


def record(name: str, samples: list[float], case: Any = CASE) -> Record:
    return gpu_record(TURNS.name, case, name, samples, mode="train_step")


def test_a_step_is_compared_with_the_faster_rival_round_by_round():
    other = replace(CASE, precision=Precision(autocast="bfloat16"))
    frame = load_frame(
        TURNS,
        [
            record("overlap", [10.0, 20.0, 90.0]), record("torch_ddp", [20.0, 20.0, 30.0]),
            record("torch_ddp_view", [11.0, 10.0, 100.0]), record("fsdp", [1.0, 1.0, 1.0]),
            record("overlap", [5.0], other), record("torch_ddp", [10.0], other),
        ],
    )  # fmt: skip
    found = {(row["implementation"], row["compute"]): row for row in dicts(frame)}
    assert found["overlap", "float32"]["rival"] == "torch_ddp_view"  # by medians: 11 and 20
    # of 10/11, 20/10 and 90/100
    assert found["overlap", "float32"]["of_rival"] == pytest.approx(10 / 11)
    assert found["overlap", "bfloat16"]["of_rival"] == 0.5
    assert found["fsdp", "float32"]["rival"] == "" and found["fsdp", "float32"]["of_rival"] != 1


# The ring


def test_a_ring_that_gives_nan_is_not_timed(alone_in_a_group, monkeypatch):
    """NaN once counted as no error at all."""
    monkeypatch.setattr(
        context_parallel, "ring_attention", lambda q, k, v, **_: (q + k + v) * float("nan")
    )
    case = replace(load("context_parallel").cells(TINY)[0].case, num_ranks=1)
    with pytest.raises(
        Disagreement, match="rows are off attention in float64 by nan times the bound"
    ):
        context_parallel._time_ring(0, 1, case, TINY)


def test_a_number_of_ranks_measures_all_lengths_in_one_job():
    ring = load("context_parallel")
    (cell,) = ring.cells(TINY)
    samples = {
        (sample.row.mode, sample.row.quantity): sample for sample in ring.measure(cell, TINY)
    }
    assert {sample.row for sample in samples.values()} == set(cell.rows)
    assert (
        samples["forward_backward", "time"].error <= 1
        and min(samples["forward", "time"].samples) > 0
    )
    traced = {name: samples["forward_backward", name].samples[0] for name in TIMES}
    assert 0 < traced["communication_time"] < traced["traced_time"]
    with patch.object(torch.cuda, "device_count", return_value=2):
        handout = ring.cells(RunConfig(scale="handout", device="cuda"))
    assert [(cell.case.kv_heads, cell.case.num_ranks) for cell in handout] == [
        (8, 1),
        (8, 2),
        (2, 1),
        (2, 2),
    ]
    assert {row.case.length for row in handout[0].rows} == {65536, 131072, 262144, 524288}
