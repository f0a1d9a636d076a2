"""A cell begins with an empty device: what the cells before it made is gone, and what is not is
seen.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cs336_systems.attention import attention_reference
from cs336_systems.bench import worker
from cs336_systems.bench.harness import planned_cells
from cs336_systems.bench.spec import Cell, Sample, Unsupported, load, measured_problems
from cs336_systems.bench.worker import USED_UP, Outcome, Worker
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.measure.allocations import (
    forget_case,
    held_bytes,
    one_out_of_memory_error,
    release,
    saved_for_backward,
)
from cs336_systems.subjects import attention_passes as attention

COVERS = (
    "cs336_systems/measure",
    "cs336_systems/subjects/attention_passes.py",
    "cs336_systems/bench/worker.py",
)
TINY = RunConfig(scale="tiny", device="cpu")
# Of a CPU's memory, what a cell may leave: Python's own tensors of a few elements, such as a
# generator's state.
MOST_LEFT_BYTES = 64 * 1024


def bytes_left_by(call) -> int:
    """Bytes that `call` allocates for tensors and does not give back, C++'s own tensors included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        call()
        forget_case()
        release("cpu")
    events = profiler.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def kinds() -> Iterator[Cell]:
    """The first cell of every kind of case of every problem that measures in its own process."""
    for name in measured_problems():
        seen = set()
        for cell in planned_cells(name, TINY):
            if not cell.alone and type(cell.case) not in seen:
                seen.add(type(cell.case))
                yield cell


def measure_like_the_worker(cell: Cell) -> None:
    """Measure `cell` to its end, or to what the measuring process catches."""
    try:
        with one_out_of_memory_error():
            for _ in load(cell.problem).measure(cell, TINY):
                pass
    except (Unsupported, torch.OutOfMemoryError):
        pass


@pytest.mark.parametrize(
    "cell", list(kinds()), ids=lambda cell: f"{cell.problem}-{type(cell.case).__name__}"
)
def test_a_cell_leaves_no_memory(cell):
    """Plain attention on 32,768 tokens did not fit an H200, of which earlier cells still held 11 to
    53 GiB.
    """
    measure_like_the_worker(cell)  # what is loaded and compiled at first use stays
    assert bytes_left_by(lambda: measure_like_the_worker(cell)) <= MOST_LEFT_BYTES


@pytest.mark.parametrize("call", ["forward", "output", "both", "backward"])
def test_a_cell_that_runs_out_of_memory_leaves_none(call, monkeypatch):
    """Whichever pass does not fit: its error holds the frames, and they the tensors, until the
    error is handled.
    """
    cell = replace(
        planned_cells("pytorch_attention", TINY)[0], rows=load("pytorch_attention").rows[:4]
    )
    cell = replace(cell, rows=tuple(row for row in cell.rows if not row.gpu_only))

    def full(*_):
        kept = torch.ones(2**20)
        raise torch.OutOfMemoryError(f"CUDA out of memory, with {kept.nbytes} bytes")

    monkeypatch.setattr(attention.Passes, call, full)
    assert bytes_left_by(lambda: measure_like_the_worker(cell)) <= MOST_LEFT_BYTES


def test_what_is_counted_as_saved_is_not_kept():
    """The hook gave autograd a softmax's output itself, whose graph then kept it, and nothing could
    collect the two.
    """
    q, k, v = (torch.randn(2, 256, 16, requires_grad=True) for _ in range(3))
    left = bytes_left_by(lambda: saved_for_backward(lambda: attention_reference(q, k, v)))
    assert left < 2 * 256 * 256 * 4


def test_tensors_of_a_case_are_forgotten_with_it():
    shape = AttentionShape(
        batch=1, heads=1, seqlen_q=64, seqlen_k=64, head_dim=16, is_causal=True, dtype="float32"
    )  # fmt: skip
    inputs = attention.inputs_of(shape, TINY)
    assert attention.inputs_of(shape, TINY) is inputs, "its implementations share them"
    forget_case()
    assert attention.inputs_of(shape, TINY) is not inputs


class UsedUp(Worker):
    """Its first process refuses a cell; those after it measure."""

    def __init__(self) -> None:
        self.run, self.process, self.started, self.sent = TINY, None, 0, []

    def _start(self) -> None:
        self.started += 1
        answers = [USED_UP] if self.started == 1 else ["sample", Outcome(held_bytes=0)]
        owner = self

        class Pipe:
            def send(self, cell):
                owner.sent.append(cell)

            def poll(self, timeout):
                return bool(answers)

            def recv(self):
                answer = answers.pop(0)
                return (
                    Sample(row=owner.sent[-1].rows[0], samples=[1.0])
                    if answer == "sample"
                    else answer
                )

            def close(self):
                pass

        class Process:
            def is_alive(self):
                return True

            def join(self, timeout=None):
                pass

            def kill(self):
                pass

        self.pipe, self.process = Pipe(), Process()


def test_a_process_whose_memory_is_not_empty_is_replaced_before_the_next_case():
    cell = planned_cells("pytorch_attention", TINY)[0]
    used_up = UsedUp()
    outcome = used_up.measure(cell)
    assert used_up.started == 2 and used_up.sent == [cell, None, cell]
    assert outcome.status == "ok" and outcome.held_bytes == 0
    assert [sample.samples for sample in outcome.measurements] == [[1.0]]


@pytest.mark.gpu
@pytest.mark.alone
def test_every_cell_of_attention_begins_with_an_empty_gpu(tmp_path):
    """Each head dim used to leave a matrix of scores, 2 GiB here, to those after it."""
    run = RunConfig(scale="handout", device="cuda")
    cells = [cell for cell in planned_cells("pytorch_attention", run) if cell.case.seqlen_q == 8192]
    measuring = Worker(run, tmp_path / "worker.log", interpret=False)
    try:
        outcomes = [measuring.measure(cell) for cell in cells]
    finally:
        measuring.kill()
    assert all(outcome.status == "ok" for outcome in outcomes), outcomes
    assert all(outcome.held_bytes <= worker.MOST_HELD_BYTES for outcome in outcomes)


@pytest.mark.gpu
def test_a_pass_that_runs_out_of_a_gpus_memory_leaves_none():
    release("cuda")
    before = held_bytes("cuda")
    x = torch.ones(2**20, device="cuda", requires_grad=True)

    def too_large():
        y = x.exp()
        (y[:, None] * y).sum().backward()  # 4 TiB

    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            too_large()
    del x
    gc.collect()
    assert held_bytes("cuda") - before <= 1024
