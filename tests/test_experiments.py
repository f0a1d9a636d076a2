"""Experiments: what each scale promises, and that a sweep survives what happens to a cell."""

import json
import math
import os
import re
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems import __version__
from cs336_systems.attention import attention_reference, contract
from cs336_systems.bench import harness as sweep_module
from cs336_systems.bench.harness import Provenance, Sweep, find_provenance, planned_cells
from cs336_systems.bench.records import append_records, read_records
from cs336_systems.bench.spec import (
    Cell,
    Disagreement,
    Row,
    Sample,
    Unsupported,
    load,
    measured_problems,
)
from cs336_systems.bench.worker import Worker
from cs336_systems.commands.sweeps import measuring
from cs336_systems.config import HANDOUT_SIZES, MODEL_SIZES, SIZES_2025, SIZES_OF_BOTH, RunConfig
from cs336_systems.measure.timeline import AllocationRecorder
from cs336_systems.subjects import attention_builders
from cs336_systems.subjects import attention_passes as attention
from cs336_systems.subjects.attention_builders import Built
from cs336_systems.subjects.implementations import IMPLEMENTATIONS

ROOT = Path(__file__).resolve().parents[1]
PROVENANCE = Provenance(commit="0123456789ab", dirty=False)
TINY = RunConfig(scale="tiny", device="cpu")
SMOKE = RunConfig(scale="smoke", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")


@pytest.fixture
def at_root(monkeypatch):
    """The measuring process finds a user's model in the folder where the command was typed."""
    monkeypatch.chdir(ROOT)


# What the scales promise


@pytest.mark.parametrize("run", [TINY, SMOKE, HANDOUT], ids=["tiny", "smoke", "handout"])
@pytest.mark.parametrize("problem", measured_problems())
def test_cells_are_distinct_and_belong_to_their_problem(problem, run):
    listed = planned_cells(problem, run)
    assert listed and all(cell.problem == problem for cell in listed)
    rows = Counter(
        (row.implementation or cell.implementation, row.case or cell.case, row.mode, row.quantity)
        for cell in listed
        for row in cell.rows
    )
    assert set(rows.values()) == {1}


def test_handout_grids_are_the_handouts():
    flash = planned_cells("flash_benchmarking", HANDOUT)
    assert {cell.implementation for cell in flash} == set(IMPLEMENTATIONS) - {"flex_flash", "fa4"}
    shapes = {cell.case for cell in flash}
    assert {2**power for power in range(7, 17)} <= {shape.seqlen_q for shape in shapes}
    assert {shape.head_dim for shape in shapes} == {16, 32, 64, 128}
    assert {shape.dtype for shape in shapes} == {"bfloat16", "float32"}
    assert all(shape.batch == 1 and shape.is_causal for shape in shapes)
    plain = {cell.case for cell in planned_cells("pytorch_attention", HANDOUT)}
    assert {(d, s) for d in (16, 32, 64, 128) for s in (256, 1024, 4096, 8192, 16384)} <= {
        (shape.head_dim, shape.seqlen_q) for shape in plain
    }
    assert all(shape.batch == 8 and not shape.is_causal for shape in plain)
    script = planned_cells("benchmarking_script", HANDOUT)
    assert (
        {cell.case.model.name for cell in script}
        == set(SIZES_OF_BOTH)
        == {*HANDOUT_SIZES, *SIZES_2025}
    )
    assert replace(MODEL_SIZES["2.7b-2025"], name="xl") == MODEL_SIZES["xl"], (
        "measured under one name"
    )
    assert all(
        {row.case.warmup for row in cell.rows} == {0, 1, 2, 5} and cell.fresh_process
        for cell in script
    )
    (leader,) = {cell.case for cell in planned_cells("leaderboard_2025", HANDOUT)}
    assert (leader.batch, leader.heads, leader.seqlen_q, leader.head_dim) == (1, 16, 16384, 64)
    assert leader.dtype == "bfloat16" and leader.is_causal


@pytest.mark.parametrize(
    "implementation, reason",
    [
        ("triton", "the interpreter is run up to 256 tokens"),
        ("flex", "it compiles anew for each length: up to 128"),
    ],
)
def test_what_takes_long_is_skipped_on_long_sequences_with_the_reason(implementation, reason):
    problem = load("flash_benchmarking")
    long = [
        cell
        for cell in problem.cells(SMOKE)
        if cell.implementation == implementation and cell.case.seqlen_q > 256
    ]
    assert {cell.case.seqlen_q for cell in long} == {512, 1024}
    for cell in long:
        with pytest.raises(Unsupported, match=f"^{reason}"):
            next(problem.measure(cell, SMOKE))


# The measuring process


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, status, message",
    [
        ("OutOfMemory", "oom", r"^CUDA out of memory\. Tried to allocate 64\.00 GiB\.$"),
        ("FullHost", "oom", r"DefaultCPUAllocator: (can't|not enough) .*memory"),
        ("NoMemory", "oom", r"^the host is out of memory$"),
        ("Raises", "failed", r"RuntimeError: CUDA error: an illegal memory access"),
        ("Dies", "failed", r"measuring process died \(signal SIGABRT\)"),
        ("Hangs", "failed", r"no result within 3 s"),
    ],
)
def test_a_broken_cell_costs_itself_only(model, status, message, tmp_path, at_root):
    run = RunConfig(
        scale="tiny", device="cpu", model=f"tests.broken_models:{model}", cell_timeout_s=3
    )
    sweep = Sweep(run, tmp_path, PROVENANCE)
    bad = planned_cells("benchmarking_script", run)[0]
    good = planned_cells("pytorch_attention", run)[0]  # no model in it
    with measuring(sweep):
        first, second = sweep.measure([bad, good])
    assert [record.status for record in first] == [status] * len(bad.rows)
    assert all(re.search(message, record.message) for record in first), first[0].message
    assert all(record.status == "ok" for record in second) and len(second) == len(good.rows)
    assert read_records(sweep.record_file("benchmarking_script")) == first
    assert sweep.worker.process is None, "no process may be left over"


TIME, LOSS = Row("forward", "time", "ms"), Row("forward", "loss", "nats")
LANES = Row("forward", "compute_intervals", "ms")


@dataclass(frozen=True, kw_only=True)
class OddCase:
    size: int = 1


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"samples": [1.0, math.nan]}, "samples must be finite and at most 1e+30, got nan"),
        ({"samples": [math.inf]}, "samples must be finite and at most 1e+30, got inf"),
        ({"samples": [1e300]}, "samples must be finite and at most 1e+30, got 1e+300"),
        ({"samples": [1.0], "error": math.nan}, "error must be finite, got nan"),
        ({"samples": ["fast"]}, "Unknown format code 'g' for object of type 'str'"),
        ({"samples": None}, "'NoneType' object is not iterable"),
        ({"samples": [1.0], "kernel": None}, "Expected `str`, got `null` - at `$.kernel`"),
        (
            {"samples": [1.0, 2.0, 3.0], "row": LANES},
            "samples of compute_intervals must be starts and ends by turns",
        ),
        (
            {"status": "ok", "message": "why"},
            "samples must be there if status is ok and only then, got 0",
        ),
        ({"status": "broken", "message": "why"}, "Invalid enum value 'broken'"),
    ],
)
def test_a_sample_that_no_record_can_hold_is_a_failed_row(sample, message, tmp_path):
    """A NaN ended the sweep at the writing of its cell, and every later cell was lost."""
    sweep = Sweep(TINY, tmp_path, PROVENANCE)
    odd = Sample(**{"row": TIME, **sample})
    cell = Cell(case=OddCase(), implementation="eager", rows=(odd.row, LOSS), problem="odd")
    outcome = sweep_module.Outcome(measurements=[odd, Sample(row=LOSS, samples=[2.5])])
    bad, good = sweep.record(cell, outcome)
    assert (bad.status, good.status) == ("failed", "ok") and good.samples == [2.5]
    assert f"what was measured cannot be recorded: {message}" in bad.message
    assert read_records(sweep.record_file("odd")) == [bad, good]


def test_half_a_surrogate_pair_in_a_message_is_written_as_its_escape(tmp_path):
    """As an undecodable byte of a file name becomes: no reader of JSON took the row, which was lost
    for good.
    """
    sweep = Sweep(TINY, tmp_path, PROVENANCE)
    cell = Cell(case=OddCase(), implementation="eager \udcff", rows=(TIME,), problem="odd")
    sweep.record(
        cell, sweep_module.Outcome(status="failed", message="no file x\ud800.pt, \U0001f600")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = read_records(sweep.record_file("odd"))
    assert (found.message, found.implementation) == (
        "no file x\\ud800.pt, \U0001f600",
        "eager \\udcff",
    )


def test_a_row_of_a_release_whose_case_had_fewer_fields_is_finished(tmp_path):
    """A field more in a case made every cell unfinished: a second run measured all of them again."""
    sweep = Sweep(TINY, tmp_path, PROVENANCE)
    cells, _ = sweep.pending("pytorch_attention")
    plant(sweep, cells[0], "skipped")
    path = sweep.record_file("pytorch_attention")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line["case"].pop("kv_heads") is None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sweep.pending("pytorch_attention") == (cells[1:], {"skipped": 1})


def test_a_process_that_cannot_start_says_where_to_look(tmp_path):
    log = tmp_path / "file" / "worker.log"
    log.parent.write_text("in the way of the log's folder")
    with pytest.raises(OSError, match="could not start"):
        Worker(TINY, log, interpret=False).measure(planned_cells("pytorch_attention", TINY)[0])


def test_a_wrong_result_is_not_timed(monkeypatch):
    """An implementation that leaves the mask out is fast and wrong; its row must say wrong."""
    cell = next(
        cell for cell in planned_cells("flash_benchmarking", TINY) if cell.implementation == "tiled"
    )
    monkeypatch.setattr(
        attention,
        "build_case",
        lambda *_: Built(attend=lambda q, k, v: attention_reference(q, k, v)),
    )
    with pytest.raises(
        Disagreement, match=r"^output is off by [\d.e+]+ times the numerical contract's bound"
    ):
        list(load(cell.problem).measure(cell, TINY))


def test_wrong_gradients_stop_after_the_forward(monkeypatch):
    cell = next(
        cell for cell in planned_cells("flash_benchmarking", TINY) if cell.implementation == "eager"
    )

    def detached_keys(q, k, v):
        return attention_reference(q, k.detach() + 0 * k, v, is_causal=True)

    monkeypatch.setattr(attention, "build_case", lambda *_: Built(attend=detached_keys))
    measured = []
    with pytest.raises(Disagreement, match="grad_k is off"):
        for measurement in load(cell.problem).measure(cell, TINY):
            measured.append(measurement.row.mode)
    assert measured == ["forward"]


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, "own_model:Own"], ids=["ours", "own"])
def test_files_beside_the_command_do_not_replace_packages(model, tmp_path, monkeypatch):
    """The current folder came first on the search path, so a user's `sympy.py` there broke every
    cell.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *(path for path in sys.path if path)])
    (tmp_path / "sympy.py").write_text("raise RuntimeError('not the package')\n")
    (tmp_path / "own_model.py").write_text("from tests.broken_models import Bigram as Own\n")
    run = replace(TINY, model=model)
    with measuring(sweep := Sweep(run, tmp_path, PROVENANCE)):
        (records,) = sweep.measure(planned_cells("benchmarking_script", run)[:1])
    assert [(record.status, record.message) for record in records] == [("ok", "")] * len(records)


# Resuming


def plant(sweep: Sweep, cell: Cell, status: str) -> None:
    records = sweep._records(cell, sweep_module.Outcome(status=status, message="planted"))
    append_records(sweep.record_file(cell.problem), records)


@pytest.mark.parametrize("model", [None, "own_model:Own"])
def test_a_cells_keys_are_those_of_its_records(model, tmp_path):
    """`pending` finds finished cells by these keys; the user's own model has its own."""
    run = replace(TINY, model=model)
    sweep = Sweep(run, tmp_path, PROVENANCE)
    outcome = sweep_module.Outcome(status="skipped", message="planted")
    for problem in measured_problems():
        for cell in planned_cells(problem, run):
            assert cell.keys(run) == [record.key for record in sweep._records(cell, outcome)]


@pytest.mark.parametrize(
    ("status", "again", "changes"),
    [
        pytest.param("skipped", {"rerun": "all"}, {}, id="all"),
        pytest.param("failed", {"rerun": "failed"}, {}, id="failed"),
        # which once called every cell finished
        pytest.param("skipped", {}, {"seed": 5}, id="another seed"),
    ],
)
def test_finished_cells_are_measured_again_only_when_asked(status, again, changes, tmp_path):
    sweep = Sweep(TINY, tmp_path, PROVENANCE)
    listed, finished = sweep.pending("pytorch_attention")
    assert len(listed) == 2 and not finished
    plant(sweep, listed[0], status)
    assert sweep.pending("pytorch_attention") == (listed[1:], {status: 1})
    assert (
        Sweep(replace(TINY, **changes), tmp_path, PROVENANCE, **again).pending("pytorch_attention")[
            0
        ]
        == listed
    )


def test_a_time_budget_leaves_the_rest_for_later(tmp_path):
    sweep = Sweep(TINY, tmp_path, PROVENANCE)
    assert list(sweep.measure(sweep.pending("pytorch_attention")[0], time_budget_s=-1)) == []


def test_a_predicted_overflow_on_cpu_is_skipped_with_its_bytes(tmp_path):
    sweep = Sweep(TINY, tmp_path, PROVENANCE)
    sweep.device = replace(sweep.device, memory_bytes=1000)
    cell = sweep.pending("pytorch_attention")[0][0]
    (records,) = sweep.measure([cell])
    assert [record.status for record in records] == ["skipped"] * len(cell.rows)
    assert f"{cell.predicted_bytes:,} bytes" in records[0].message and "800" in records[0].message
    assert sweep.worker.process is None, "nothing may be started for it"


def test_a_users_model_has_records_of_its_own(tmp_path, at_root):
    """Of its warm-up, too, whose rows are windows of one cold series."""
    run = replace(TINY, model="tests.broken_models:Bigram")
    sweep = Sweep(run, tmp_path, PROVENANCE)
    with measuring(sweep):
        (records,) = sweep.measure(sweep.pending("benchmarking_script")[0][:1])
    assert {record.implementation for record in records} == {"eager tests.broken_models:Bigram"}
    assert all(record.status == "ok" and len(record.samples) == 5 for record in records)
    assert len(Sweep(TINY, tmp_path, PROVENANCE).pending("benchmarking_script")[0]) == 3, (
        "ours are not done"
    )
    by_warmup = {record.case["warmup"]: record.samples for record in records}
    assert sorted(by_warmup) == [0, 1, 2, 5]
    assert by_warmup[0][1:] == by_warmup[1][:-1] and by_warmup[1][1:] == by_warmup[2][:-1]


# Provenance


def test_provenance_comes_from_git_or_the_command_line(monkeypatch):
    assert find_provenance("abc", True) == Provenance(commit="abc", dirty=True)
    monkeypatch.setattr(sweep_module, "_git", lambda *_: None)
    assert find_provenance(None, None) == Provenance(commit=f"unknown ({__version__})", dirty=False)
    with pytest.raises(ValueError, match="--commit needs --dirty or --clean"):
        find_provenance("abc", None)
    with pytest.raises(ValueError, match="--commit must not be empty, got ' '"):
        find_provenance(" ", False)


def test_records_hold_no_paths_of_the_machine():
    text = sweep_module._without_paths(
        f"failed in {ROOT}/cs336_systems/x.py and {os.path.expanduser('~')}/.cache"
    )
    assert text == "failed in ./cs336_systems/x.py and ~/.cache"


def test_a_cell_that_broke_midway_does_not_count_as_ok():
    """A forward that fits and a backward that does not were summed up as ok."""
    assert sweep_module.cell_status(["ok", "ok"]) == "ok"
    assert sweep_module.cell_status(["ok", "oom", "oom"]) == "partly oom"
    assert sweep_module.cell_status(["failed", "failed"]) == "failed"
    # of several by turns
    assert sweep_module.cell_status(["skipped", "ok", "failed"]) == "partly failed"


@pytest.mark.parametrize("masking", ["full", "causal", "token mask"])
def test_yardstick_fits_its_share_of_memory(masking: str) -> None:
    """Blocks take an eighth of free memory, so plain attention on one may hold fewer than six of
    them at once.
    """
    heads, seqlen = 8, 1024
    scores_bytes = heads * seqlen * seqlen * torch.bfloat16.itemsize
    with FakeTensorMode():
        q, k, v, grad_output = (
            torch.empty(1, heads, seqlen, 16, dtype=torch.bfloat16) for _ in range(4)
        )
        mask = (
            torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool) if masking == "token mask" else None
        )
        with AllocationRecorder("cuda") as recorder:
            recorder.phase("forward")
            contract._blockwise(
                q, k, v, grad_output, torch.bfloat16, masking == "causal", mask, None
            )
    assert 3 * scores_bytes < recorder.trace().peak_bytes() < 6 * scores_bytes


def test_sdpa_is_told_its_kernel_once_where_calls_are_timed(monkeypatch):
    """The context manager that names it takes longer than a short call's launches."""
    entered = []

    @contextmanager
    def naming(backend):
        entered.append(backend)
        yield

    monkeypatch.setattr(attention_builders, "sdpa_kernel", naming)
    cell = next(
        cell
        for cell in planned_cells("leaderboard_2025", TINY)
        if cell.implementation == "sdpa_flash"
    )
    measured = list(load(cell.problem).measure(cell, TINY))
    assert sum(len(one.samples) for one in measured) > len(entered) == 1
    (cell,) = planned_cells("short_calls", TINY)
    assert all(
        one.samples
        for one in load("short_calls").measure(cell, TINY)
        if "flash" in one.row.implementation
    )
    turns = (load("short_calls").rounds["cpu"] + 1) * len({row.mode for row in cell.rows})
    assert len(entered) == 1 + 1 + turns, "for the check and in each turn"
