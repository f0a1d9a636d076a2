"""Sweeps on several GPUs: what stays together, what runs alone, and that a lane's end costs its cell and no more.

Lanes differ only in the variables that their processes start with, so without GPUs two lanes share the CPU.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from cs336_systems.cli import app
from cs336_systems.config import RunConfig
from cs336_systems.experiments import lanes as lanes_module
from cs336_systems.experiments.cells import Cell
from cs336_systems.experiments.lanes import VISIBLE_DEVICES, Lanes, gpu_environments, in_groups
from cs336_systems.experiments.registry import PROBLEMS
from cs336_systems.experiments.sweep import Provenance, Sweep
from cs336_systems.experiments.worker import Outcome
from cs336_systems.records import read_records
from tests.processes import is_running

COVERS = (
    "cs336_systems/experiments/lanes.py",
    "cs336_systems/experiments/worker.py",
    "cs336_systems/experiments/sweep.py",
    "tests/broken_models.py",
)
ROOT = Path(__file__).resolve().parents[1]
COMMIT = ("--commit", "0123456789ab", "--clean")
PROVENANCE = Provenance(commit="0123456789ab", dirty=False)
TINY = RunConfig(scale="tiny", device="cpu")
SMOKE = RunConfig(scale="smoke", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")


# What stays together


@pytest.mark.parametrize("run", [TINY, SMOKE, HANDOUT], ids=["tiny", "smoke", "handout"])
def test_groups_keep_peers_together_and_in_order(run):
    cells = [cell for problem in PROBLEMS.values() for cell in problem.cells(run)]
    groups = in_groups(cells)
    assert sorted(map(id, cells)) == sorted(id(cell) for group in groups for cell in group), "each cell once"
    place = {id(cell): number for number, cell in enumerate(cells)}
    groups_of_case = defaultdict(set)
    for number, group in enumerate(groups):
        places = [place[id(cell)] for cell in group]
        assert places == sorted(places), "the order of a sweep without lanes"
        for cell in group:
            groups_of_case[cell.problem, cell.case].add(number)
    assert all(len(numbers) == 1 for numbers in groups_of_case.values()), "all implementations of a case on one GPU"
    problems = [group[0].problem for group in groups]
    assert list(dict.fromkeys(problems)) == list(PROBLEMS), "problem after problem, as without lanes"
    assert problems == sorted(problems, key=list(PROBLEMS).index)


def test_groups_of_the_long_problems():
    flash = in_groups(PROBLEMS["flash_benchmarking"].cells(HANDOUT))
    heads = [(group[0].case.dtype, group[0].case.head_dim) for group in flash]
    assert len(set(heads)) == len(heads) == 8 and heads[0] == ("float32", 128)
    assert all((cell.case.dtype, cell.case.head_dim) == head for head, group in zip(heads, flash) for cell in group)
    script = in_groups(PROBLEMS["benchmarking_script"].cells(HANDOUT))
    assert [{cell.case.model.name for cell in group} for group in script] == [
        {name} for name in ("10b", "xl", "large", "medium", "small")
    ]


def test_cells_that_need_the_machine_are_alone():
    """Ranks, whatever their number, since a curve over ranks compares them; and what times the host."""
    alone = {name: {cell.alone for cell in problem.cells(HANDOUT)} for name, problem in PROBLEMS.items()}
    assert {name for name, answers in alone.items() if answers == {True}} == {
        "distributed_communication_single_node",
        "naive_ddp_benchmarking",
        "minimal_ddp_flat_benchmarking",
        "ddp_overlap_individual_parameters_benchmarking",
        "ddp_bucketed_benchmarking",
        "optimizer_state_sharding_accounting",
        "fsdp_accounting",
        "leaderboard_2026",
        "training_run",
        "short_calls",
    }
    assert all(len(answers) == 1 for answers in alone.values())


# The schedule, with workers that only take notes


class FakeWorker:
    """Takes the place of `Worker`: each cell is skipped, but for those that `behave` says something else about."""

    notes: list[tuple[str, Cell]]  # (lane, cell) in the order in which they were begun
    behave: dict[str, object]  # lane -> called with the cell before it is done

    def __init__(self, run, log, interpret, environment=None):
        self.lane = (environment or {}).get("LANE", "alone")
        self.ended = False

    def measure(self, cell: Cell) -> Outcome:
        assert not self.ended
        self.notes.append((self.lane, cell))
        self.behave.get(self.lane, lambda cell: None)(cell)
        return Outcome(status="skipped", message=self.lane)

    def stop(self) -> None:
        self.ended = True

    def kill(self) -> None:
        self.ended = True

    def interrupt(self) -> None:
        pass


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    """(make, FakeWorker): `make(n)` is n lanes of fake workers over a sweep into `tmp_path`."""
    monkeypatch.setattr(FakeWorker, "notes", [], raising=False)
    monkeypatch.setattr(FakeWorker, "behave", {}, raising=False)
    monkeypatch.setattr(lanes_module, "Worker", FakeWorker)

    def make(count: int) -> Lanes:
        sweep = Sweep(SMOKE, tmp_path, PROVENANCE)
        sweep.device = replace(sweep.device, memory_bytes=2**60)  # nothing is skipped before it is measured
        sweep.worker = FakeWorker(SMOKE, tmp_path, False)
        return Lanes(sweep, [{"LANE": str(lane)} for lane in range(count)])

    return make, FakeWorker


def no_lane_is_left() -> bool:
    return not any(thread.name.startswith("lane") for thread in threading.enumerate())


def chosen_cells() -> list[Cell]:
    """Three groups and, first in the list, two cells that run alone."""
    ranks = PROBLEMS["naive_ddp_benchmarking"].cells(SMOKE) + PROBLEMS["minimal_ddp_flat_benchmarking"].cells(SMOKE)
    listed = ranks[:2] + PROBLEMS["pytorch_attention"].cells(SMOKE) + PROBLEMS["leaderboard_2025"].cells(SMOKE)
    assert len(in_groups([cell for cell in listed if not cell.alone])) == 3
    return listed


def test_each_group_runs_on_one_lane_and_what_is_alone_runs_last(fakes):
    make, fake = fakes
    both = threading.Barrier(2, timeout=60)

    def meet_once(lane):
        """Both lanes are in their first cells at the same time; a sweep of one lane after the other would time out."""
        fake.behave[lane] = lambda cell: None
        both.wait()

    fake.behave.update({lane: lambda cell, lane=lane: meet_once(lane) for lane in "01"})
    fake.behave["alone"] = lambda cell: wait_until(no_lane_is_left)
    listed, begun = chosen_cells(), []
    records = list(make(2).measure(listed, started=begun.append))
    assert sorted(map(id, begun)) == sorted(map(id, listed)) and len(records) == len(listed)
    lane_of = {id(cell): lane for lane, cell in fake.notes}
    for group in in_groups([cell for cell in listed if not cell.alone]):
        noted = [cell for lane, cell in fake.notes if lane == lane_of[id(group[0])] and cell.group == group[0].group]
        assert noted == group, "the whole group, in order, on the lane of its first cell"
    assert {lane for lane, cell in fake.notes if not cell.alone} == {"0", "1"}
    assert fake.notes[-2:] == [("alone", cell) for cell in listed[:2]]
    assert [lane for lane, _ in fake.notes].count("alone") == 2


def test_records_are_those_of_a_sweep_without_lanes(fakes, tmp_path):
    make, _ = fakes
    listed = chosen_cells()
    lanes = make(3)
    yielded = [record for records in lanes.measure(listed) for record in records]
    written = [record for path in (tmp_path / "records").iterdir() for record in read_records(path)]
    assert sorted(record.key for record in written) == sorted(record.key for record in yielded)
    assert len(written) == sum(len(cell.rows) for cell in listed)
    for name in {cell.problem for cell in listed}:  # a second sweep, with or without lanes, finds them
        pending, _ = lanes.sweep.unfinished(name, [cell for cell in listed if cell.problem == name])
        assert pending == []


def test_no_cell_is_begun_after_the_time_budget(fakes):
    make, fake = fakes
    assert list(make(2).measure(chosen_cells(), time_budget_s=-1)) == []
    assert fake.notes == []
    fake.behave.update(dict.fromkeys("01", lambda cell: time.sleep(0.3)))
    measured = list(make(2).measure(chosen_cells(), time_budget_s=0.1))
    assert len(measured) == len(fake.notes) == 2 and {lane for lane, _ in fake.notes} == {"0", "1"}


def test_nothing_to_do_starts_no_lane(fakes):
    make, fake = fakes
    assert list(make(2).measure([])) == [] and fake.notes == []


def test_a_lane_that_cannot_start_ends_the_run_and_keeps_what_is_done(fakes, tmp_path):
    make, fake = fakes
    done = threading.Event()

    def fail(cell):
        assert done.wait(60)
        raise OSError("the measuring process could not start")

    lanes, listed = make(2), PROBLEMS["pytorch_attention"].cells(SMOKE)
    fake.behave.update({"0": fail, "1": lambda cell: done.set() if cell is in_groups(listed)[1][-1] else None})
    with pytest.raises(OSError, match="could not start"):
        list(lanes.measure(listed))
    kept = {record.message for record in read_records(tmp_path / "records" / "pytorch_attention.jsonl")}
    assert kept == {"1"}
    assert all(worker.ended for worker in lanes.workers)
    wait_until(no_lane_is_left)


def test_what_was_done_but_not_yet_written_is_written_after_an_interrupt(fakes, tmp_path):
    make, fake = fakes
    listed = PROBLEMS["pytorch_attention"].cells(SMOKE)
    first = in_groups(listed)[0][0]
    second_began = threading.Event()
    fake.behave["0"] = lambda cell: second_began.set() if cell is not first else None

    def interrupt(cell):
        assert cell is first and second_began.wait(60) and not (tmp_path / "records").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(make(1).measure(listed, started=interrupt))
    written = read_records(tmp_path / "records" / "pytorch_attention.jsonl")
    assert first.case.seqlen_q in {record.case["seqlen_q"] for record in written}


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Real processes


def with_model_named(cell: Cell, name: str) -> Cell:
    """The same cell of a model with another name, which is a group of its own."""

    def renamed(case):
        return replace(case, model=replace(case.model, name=name))

    return replace(cell, case=renamed(cell.case), rows=tuple(replace(row, case=renamed(row.case)) for row in cell.rows))


def pids(lanes: Lanes) -> list[int]:
    return [worker.process.pid for worker in lanes.workers if worker.process is not None]


@pytest.mark.slow
def test_a_lane_survives_a_cell_that_dies_and_the_other_notices_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run = replace(TINY, model="tests.broken_models:Dies")
    lanes = Lanes(Sweep(run, tmp_path, PROVENANCE), [{}, {}])
    dies = PROBLEMS["benchmarking_script"].cells(run)[:1]
    good = PROBLEMS["pytorch_attention"].cells(run)
    # The dying cell and the last good one are a group: what comes after a death is measured, on the same lane.
    after = replace(good[-1], implementation="eager")
    monkeypatch.setattr(Cell, "group", property(lambda cell: cell in (*dies, after)))
    records = [record for cell in lanes.measure([*dies, *good]) for record in cell]
    by_problem = {name: {r.status for r in records if r.problem == name} for name in PROBLEMS}
    assert by_problem["benchmarking_script"] == {"failed"} and by_problem["pytorch_attention"] == {"ok"}
    assert all("signal SIGABRT" in record.message for record in records if record.status == "failed")
    assert pids(lanes) == []


@pytest.mark.slow
def test_an_interrupt_ends_all_lanes_and_leaves_no_row_of_what_it_cut(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run = replace(TINY, model="tests.broken_models:Hangs")
    lanes = Lanes(Sweep(run, tmp_path, PROVENANCE), [{}, {}])
    hanging = PROBLEMS["benchmarking_script"].cells(run)[:1]
    good = PROBLEMS["pytorch_attention"].cells(run)
    seen: list[int] = []

    def interrupt_when_both_hang(cell):
        if cell.case.model.name == "another":
            logs = [tmp_path / "logs" / f"worker-lane{lane}.log" for lane in range(2)]
            wait_until(lambda: all(log.exists() and "hanging in process" in log.read_text() for log in logs))
            seen.extend(pids(lanes))
            raise KeyboardInterrupt

    monkeypatch.setattr(Cell, "group", property(lambda cell: getattr(cell.case, "model", SimpleNamespace(name=0)).name))
    started = lambda cell: interrupt_when_both_hang(cell) if cell.problem == "benchmarking_script" else None  # noqa: E731
    other = with_model_named(hanging[0], "another")
    with pytest.raises(KeyboardInterrupt):
        list(lanes.measure([*good, replace(other), *hanging], started=started))
    assert len(seen) == 2 and not any(map(is_running, seen)) and pids(lanes) == []
    wait_until(no_lane_is_left)
    written = [record for path in (tmp_path / "records").iterdir() for record in read_records(path)]
    assert {(record.problem, record.status) for record in written} == {("pytorch_attention", "ok")}
    lanes.close()  # again does nothing


@pytest.mark.slow
def test_the_variables_are_the_childs_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    run = replace(TINY, model="tests.broken_models:SaysWhere")
    lanes = Lanes(Sweep(run, tmp_path, PROVENANCE), [{VISIBLE_DEVICES: "5"}, {VISIBLE_DEVICES: "GPU-a1"}])
    cells = PROBLEMS["benchmarking_script"].cells(run)[:1]
    list(lanes.measure([*cells, with_model_named(cells[0], "another")]))
    seen = {found for log in (tmp_path / "logs").iterdir() for found in re.findall("sees '(.+)' of", log.read_text())}
    assert seen == {"5", "GPU-a1"} and VISIBLE_DEVICES not in os.environ


# The command runs on two lanes of the CPU; everything else of it is as on two GPUs.
TWO_LANES = """
import sys
from cs336_systems.experiments import lanes
lanes.gpu_environments = lambda gpus, device: [{}] * gpus
from cs336_systems.cli import main
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def command(tmp_path):
    """Arguments that run both problems on two lanes into `tmp_path`/results."""
    script = tmp_path / "two_lanes.py"
    script.write_text(TWO_LANES)
    shared = ("--scale", "tiny", "--device", "cpu", "--results", str(tmp_path / "results"), "--gpus", "2", *COMMIT)
    return lambda *arguments: [sys.executable, str(script), "run", *arguments, *shared]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("name, code", [("SIGINT", 128 + signal.SIGINT), ("SIGKILL", -signal.SIGKILL)])
@pytest.mark.slow
def test_ctrl_c_or_a_kill_leaves_no_process_and_loses_nothing_finished(name, code, command, tmp_path):
    arguments = command("pytorch_attention", "benchmarking_script", "--model", "tests.broken_models:Hangs")
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    results, children = tmp_path / "results", []

    def hangs_and_has_finished_cells():
        assert process.poll() is None
        logs = "".join(log.read_text() for log in results.rglob("worker-lane*.log"))
        children[:] = [int(pid) for pid in re.findall(r"hanging in process (\d+)\n", logs)]
        return children and list(results.rglob("pytorch_attention.jsonl"))

    wait_until(hangs_and_has_finished_cells, 120)
    if name == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all
    else:
        process.kill()  # the parent alone
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert ("the same command continues" in errors) == (name == "SIGINT")
    wait_until(lambda: not any(map(is_running, children)), 10)
    (kept,) = results.rglob("*.jsonl")  # of the hanging cell there is no row
    assert kept.stem == "pytorch_attention" and {record.status for record in read_records(kept)} == {"ok"}


@pytest.mark.slow
def test_the_command_sums_up_each_problem(command, tmp_path):
    finished = subprocess.run(
        command("pytorch_attention", "mixed_precision_accumulation"),
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[:2] == ["pytorch_attention: 2 ok", "mixed_precision_accumulation: 4 ok"]
    assert re.match(r"6 cells on 2 GPUs in \d+ s$", lines[2]) and lines[3].startswith("records: ")


# Which GPUs


def pretend(monkeypatch, *names: str, visible: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=names[index]))
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE_DEVICES, visible)


@pytest.mark.parametrize(
    "visible, expected",
    [
        (None, ["0", "1"]),
        ("2,3,5", ["2", "3"]),
        (" 7 , 6 ,5", ["7", "6"]),
        ("GPU-8932f937,GPU-71c0a1e5,GPU-0a", ["GPU-8932f937", "GPU-71c0a1e5"]),
        ("4,1,0,-1,2", ["4", "1"]),
    ],
)
def test_gpus_are_the_first_that_this_process_sees(visible, expected, monkeypatch):
    pretend(monkeypatch, *["NVIDIA H200"] * 3, visible=visible)
    assert gpu_environments(2, "cuda") == [{VISIBLE_DEVICES: name} for name in expected]


def test_gpus_that_are_not_there_or_not_alike_are_refused(monkeypatch):
    pretend(monkeypatch, "NVIDIA H200", "NVIDIA H200", "NVIDIA L4")
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"^--gpus must be at least 1, got {count}$"):
            gpu_environments(count, "cuda")
    with pytest.raises(ValueError, match="^--gpus 2 needs a run on CUDA devices, and this one is on the CPU$"):
        gpu_environments(2, "cpu")
    with pytest.raises(ValueError, match="^--gpus must be at most 3, the CUDA devices visible here, got 4$"):
        gpu_environments(4, "cuda")
    with pytest.raises(ValueError, match="^--gpus 3: all must be of one model .+, got NVIDIA H200, NVIDIA L4$"):
        gpu_environments(3, "cuda")
    assert len(gpu_environments(2, "cuda")) == 2


@pytest.mark.parametrize("count, message", [("0", "at least 1, got 0"), ("-2", "at least 1, got -2"), ("2", "the CPU")])
def test_the_command_refuses_them_in_one_line(count, message, tmp_path):
    arguments = ("run", "pytorch_attention", "--device", "cpu", "--gpus", count, "--results", str(tmp_path), *COMMIT)
    result = CliRunner().invoke(app, arguments)
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == 2 and len(lines) == 1 and lines[0].startswith("error: --gpus ") and message in lines[0]
    assert not any(tmp_path.rglob("*.jsonl"))


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_measure_side_by_side(tmp_path, monkeypatch):
    """Each lane sees one GPU, another than its neighbour's, and its records are those of the GPU's model."""
    monkeypatch.chdir(ROOT)
    run = RunConfig(scale="tiny", device="cuda", model="tests.broken_models:SaysWhere")
    lanes = Lanes(Sweep(run, tmp_path, PROVENANCE), gpu_environments(2, "cuda"))
    cells = PROBLEMS["benchmarking_script"].cells(run)
    named = [with_model_named(cell, name) for name in ("one", "another") for cell in cells]
    records = [record for measured in lanes.measure(named) for record in measured]
    assert {record.status for record in records} == {"ok"} and len(records) == sum(len(cell.rows) for cell in named)
    gpus = []
    for lane in range(2):
        said = set(re.findall("sees '.+' of (.+)\n", (tmp_path / "logs" / f"worker-lane{lane}.log").read_text()))
        assert len(said) == 1, "a lane stays on its GPU, also in new processes"
        gpus += said
    assert gpus == [f"1: {torch.cuda.get_device_properties(lane).uuid}" for lane in range(2)]
