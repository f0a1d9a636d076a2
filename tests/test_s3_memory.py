"""Memory: recorded, simulated and predicted bytes against the allocator's; results and costs of
checkpointing.
"""

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.accounting import block_saved_bytes, model_peak_bytes
from cs336_systems.bench.records import read_records
from cs336_systems.bench.spec import Cell, Disagreement, Unsupported, load
from cs336_systems.book.frames import load_frame
from cs336_systems.config import MODEL_SIZES, ModelConfig, Precision, RunConfig, proxy_model
from cs336_systems.experiments import gradient_checkpointing
from cs336_systems.experiments.memory_profiling import made_in_backward
from cs336_systems.measure.allocations import MIB, release
from cs336_systems.measure.predict import CudaAutocastRules, fake_module
from cs336_systems.measure.saved import by_operation, compiled_saved_tensors, saved_tensors
from cs336_systems.measure.timeline import (
    CATEGORIES,
    Allocation,
    AllocationRecorder,
    MemoryTrace,
    Phase,
)
from cs336_systems.model import TransformerLM, build_model, cross_entropy
from cs336_systems.model.checkpointing import (
    apply_checkpointing,
    best_blocks_per_group,
    compile_blocks,
    grouped_bytes,
    recursive_bytes,
)
from cs336_systems.subjects.model_memory import (
    FORWARD,
    PHASES,
    SAVED,
    START,
    STEP,
    BlocksCase,
    MemoryCase,
    measured_phases,
    prepare,
    recorded_trace,
    simulated_trace,
)
from cs336_systems.subjects.model_steps import TrainingStep
from tests.command_line import invoke

COVERS = ("cs336_systems/measure", "cs336_systems/model")
PROFILING, CHECKPOINTING = load("memory_profiling"), load("gradient_checkpointing")
TINY = RunConfig(scale="tiny", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")
XL = replace(MODEL_SIZES["xl"], context_length=2048)
SMALL = ModelConfig(
    name="t", d_model=32, d_ff=64, num_layers=8, num_heads=2, vocab_size=50, context_length=64
)
AUTOCAST = Precision(autocast="bfloat16")


# Traces


def test_a_trace_adds_up_and_samples_of_it_keep_the_peak():
    lives = [
        (100, 0, None, "parameters"),
        (30, 1, 4, "activations"),
        (50, 2, 3, "temporaries"),
        (20, 5, None, "gradients"),
    ]
    allocations = [
        Allocation(num_bytes=size, born=born, died=died, category=category, where=f"line {size}")
        for size, born, died, category in lives
    ]
    trace = MemoryTrace(
        allocations=allocations, phases=[Phase("first", 0), Phase("second", 4)], num_events=6
    )
    assert trace.active_bytes().tolist() == [100, 130, 180, 130, 100, 120]
    assert trace.peak_bytes() == 180 and trace.peak_event() == 2
    assert trace.phase_peaks() == {"first": 180, "second": 130}, "a phase begins with what is there"
    expected = {"parameters": 100, "activations": 30, "temporaries": 50}
    assert trace.breakdown(2) == dict.fromkeys(CATEGORIES, 0) | expected
    assert [one.num_bytes for one in trace.largest(2)] == [100, 50]
    assert [one.where for one in trace.largest(9, ["second"])] == ["line 20"]
    for points in (1, 2, 3, 5, 5000):
        events, lines = trace.sampled(points)
        assert len(events) == min(points, 6) and sum(lines.values()).max() == 180


# Recording


def test_the_recorder_sees_views_once_and_releases_in_order():
    with AllocationRecorder() as recorder:
        recorder.phase(FORWARD)
        first = torch.empty(1000)
        view = first[10:].t()
        del first
        second = torch.empty(500)
        del view
        third = second + 1
    trace = recorder.trace()
    lives = [(one.num_bytes, one.born, one.died) for one in trace.allocations]
    assert lives == [(4000, 0, 2), (2000, 1, None), (2000, 3, None)]
    assert third.shape == (500,)
    assert "test_s3_memory.py" in trace.allocations[2].where and trace.allocations[
        2
    ].where.startswith("add in ")


def test_cuda_counts_are_rounded_and_know_hidden_temporaries():
    scores = torch.randn(4, 100, requires_grad=True)
    with AllocationRecorder("cuda") as recorder:
        recorder.phase("backward")
        torch.softmax(scores, dim=-1).backward(torch.ones(4, 100))
    inside = [
        one
        for one in recorder.trace().allocations
        if one.where.startswith("inside _softmax_backward_data")
    ]
    assert [one.num_bytes for one in inside] == [2048], "1600 bytes, rounded up to blocks of 512"


@pytest.mark.parametrize("mode", PHASES)
@pytest.mark.parametrize(
    ("attention", "precision", "checkpointing"),
    [
        ("reference", Precision(), "none"),
        ("reference", AUTOCAST, "none"),
        ("tiled", AUTOCAST, "selective"),
    ],
)
def test_the_simulation_is_the_allocator(mode, attention, precision, checkpointing):
    """Peaks of every phase within 1 % of what PyTorch's allocator gave out, and the closed forms
    within 5 %.
    """
    model = replace(proxy_model("xl"), context_length=64)
    case = MemoryCase(
        model=model, batch=2, attention=attention, precision=precision, checkpointing=checkpointing
    )
    measured = measured_phases(case, mode, TINY)
    simulated = simulated_trace(case, mode, device="cpu").phase_peaks()
    assert list(simulated) == list(measured.peak_bytes) == list(PHASES[mode])
    for phase, num_bytes in measured.peak_bytes.items():
        assert simulated[phase] == pytest.approx(num_bytes, rel=0.01), phase
        assert measured.trace.phase_peaks()[phase] == pytest.approx(num_bytes, rel=0.01), phase
    if checkpointing == "none":
        assert model_peak_bytes(case, mode) == pytest.approx(
            max(measured.peak_bytes.values()), rel=0.05
        )


@pytest.mark.parametrize("precision", [Precision(), AUTOCAST], ids=["float32", "autocast"])
def test_closed_forms_of_the_handouts_cases(precision):
    """At the handout's sizes the closed form and the simulation, which know nothing of each other,
    agree to 5 %.
    """
    model = replace(XL, num_layers=6)
    case = MemoryCase(model=model, batch=4, attention="reference", precision=precision)
    for mode in PHASES:
        assert model_peak_bytes(case, mode) == pytest.approx(
            simulated_trace(case, mode).peak_bytes(), rel=0.05
        ), mode


def test_categories_of_a_training_step():
    case = MemoryCase(model=SMALL, batch=2, attention="reference")
    step = TrainingStep(case, TINY)
    prepare(step, case, "train_step")
    trace = recorded_trace(step, "train_step", "cpu")
    parameters = sum(parameter.nbytes for parameter in step.parameters)
    end = trace.breakdown(trace.num_events - 1)
    assert (end["parameters"], end["optimizer"], end["gradients"]) == (
        parameters,
        2 * parameters,
        parameters,
    )
    backward = next(phase.start for phase in trace.phases if phase.name == "backward")
    before, saved = (
        trace.breakdown(backward - 1),
        sum(block_saved_bytes(SMALL, 2, attention="reference").values()),
    )
    assert before["gradients"] == 0 and before["activations"] > 0.9 * SMALL.num_layers * saved
    with pytest.raises(ValueError, match="mode must be one of forward, train_step, got 'backward'"):
        simulated_trace(case, "backward")


# Fake modules and sizes


def test_a_fake_module_shares_what_the_real_one_shares():
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[1].weight = module[0].weight
        module.register_buffer("table", torch.zeros(3, dtype=torch.int32))
        return module

    with FakeTensorMode():
        module = fake_module(build, torch.bfloat16)
    assert module[0].weight is module[1].weight and len(list(module.parameters())) == 3
    assert module[0].weight.dtype == torch.bfloat16 and module.table.dtype == torch.int32


def test_autocast_by_cudas_rules_gives_softmax_float32():
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.softmax(x @ x, dim=-1).dtype == torch.bfloat16
        with CudaAutocastRules():
            assert torch.softmax(x @ x, dim=-1).dtype == torch.float32
    with CudaAutocastRules():
        assert torch.softmax(x.bfloat16(), dim=-1).dtype == torch.bfloat16, (
            "without autocast nothing changes"
        )


# What blocks save


def fake_xl_blocks(count: int) -> tuple[nn.Sequential, torch.Tensor]:
    model = fake_module(lambda: TransformerLM.from_config(replace(XL, num_layers=count)))
    return nn.Sequential(*model.layers), torch.empty(4, 2048, 2560, requires_grad=True)


def test_a_block_of_xl_saves_what_the_closed_form_says():
    with FakeTensorMode():
        block, x = fake_xl_blocks(1)
        saved = saved_tensors(lambda: block(x), parameters=[*block.parameters(), *block.buffers()])
    expected = sum(block_saved_bytes(XL, 4, attention="reference").values())
    assert sum(one.num_bytes for one in saved) == expected
    (largest, num_bytes), *_ = by_operation(saved)
    assert num_bytes == 2048 * MIB and largest.startswith("softmax in attention/reference.py:")


@pytest.mark.parametrize(("blocks", "others_mib"), [(1, 3651), (4, 14605)])
def test_compiled_blocks_save_what_others_measured(blocks, others_mib):
    """3651 and 14605 MiB on a GPU by others; the same graph cut by the same rule, within two causal
    masks a block.
    """
    with FakeTensorMode():
        module, x = fake_xl_blocks(blocks)
        saved = compiled_saved_tensors(module, x)
    found = sum(one.num_bytes for one in saved) / MIB
    mask_mib = 2048**2 / MIB
    assert others_mib <= found <= others_mib + blocks * mask_mib


def real_blocks(count: int, device: str = "cpu") -> tuple[nn.Sequential, torch.Tensor]:
    with torch.device(device):
        model = TransformerLM.from_config(replace(SMALL, num_layers=count))
        return nn.Sequential(*model.layers), torch.randn(2, 64, 32, requires_grad=True)


def saved_bytes(blocks: nn.Sequential, x: torch.Tensor, compiled: bool) -> int:
    parameters = [*blocks.parameters(), *blocks.buffers()]
    saved = saved_tensors(lambda: blocks(x), parameters=parameters, compiled=compiled)
    assert not compiled or all(re.fullmatch(r"\w+ \([\d, ]+\)", one.operation) for one in saved)
    return sum(one.num_bytes for one in saved)


def test_what_compiled_blocks_save_is_counted_while_they_are_compiled():
    """The mode that names eager operations turns torch.compile off: compiled blocks were counted as
    eager ones. And cutting the graph left a traced tensor in the place of the buffer that two
    blocks share.
    """
    blocks, x = real_blocks(2)
    output = blocks(x)
    eager = saved_bytes(blocks, x, compiled=False)
    expected = sum(one.num_bytes for one in compiled_saved_tensors(blocks, x))
    assert torch.equal(blocks(x), output)
    for block in blocks:  # the compiler's partition of the graph, with the operators of eager mode
        block.compile(dynamic=False, backend="aot_eager_decomp_partition")
    blocks(x)
    assert saved_bytes(blocks, x, compiled=True) == expected < eager


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("checkpointing", ["none", "1", "2"])
def test_compiled_cells_are_compiled_on_a_gpu(checkpointing):
    """What Inductor's code stores is what its partition of the graph says; under checkpoints, the
    groups' inputs.
    """
    model = replace(SMALL, num_layers=4)
    case = BlocksCase(
        model=model, batch=2, blocks=4, attention="reference", checkpointing=checkpointing
    )
    cell = Cell(
        problem="gradient_checkpointing", case=case, implementation="compiled", rows=(SAVED,)
    )
    (measurement,) = CHECKPOINTING.measure(cell, HANDOUT)
    blocks, x = real_blocks(4, "cuda")
    stored = 4 * x.nbytes // int(checkpointing) if checkpointing != "none" else 0
    expected = stored or sum(one.num_bytes for one in compiled_saved_tensors(blocks, x))
    assert measurement.samples == [expected / MIB]


# Checkpointing


def gradients(attention: str, checkpointing: str) -> tuple[dict, int]:
    """Gradients of a step by name, and how many block forwards backward added, whatever checkpoints
    were set before.
    """
    model = build_model(SMALL, attention=attention, device="cpu")
    apply_checkpointing(model, "2")
    apply_checkpointing(model, checkpointing)
    calls = []
    for block in model.layers:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = torch.randint(50, (2, 64), generator=torch.Generator().manual_seed(0))
    cross_entropy(model(tokens), tokens).backward()
    assert list(model.state_dict()) == list(build_model(SMALL, device="cpu").state_dict())
    return {name: parameter.grad for name, parameter in model.named_parameters()}, len(
        calls
    ) - SMALL.num_layers


@pytest.mark.parametrize("checkpointing", ["1", "3", "recursive", "selective"])
@pytest.mark.parametrize("attention", ["reference", "sdpa", "tiled"])
def test_checkpointed_gradients_are_bit_identical(attention, checkpointing):
    if checkpointing == "selective" and attention == "reference":
        pytest.skip("reference attention is not one operator")
    expected, none = gradients(attention, "none")
    actual, added = gradients(attention, checkpointing)
    assert all(torch.equal(grad, actual[name]) for name, grad in expected.items())
    blocks = SMALL.num_layers
    assert none == 0 and added == (
        blocks / 2 * math.log2(blocks) if checkpointing == "recursive" else blocks
    )


@cache
def stored_bytes(checkpointing: str, num_layers: int) -> int:
    """The most bytes of activations that there are at once in a step, without embedding, head and
    loss.
    """
    case = MemoryCase(
        model=replace(SMALL, num_layers=num_layers, context_length=256), batch=2, attention="reference",
        checkpointing=checkpointing,
    )  # fmt: skip
    trace = simulated_trace(case, "train_step", device="cpu")
    return int(trace.active_bytes("activations").max())


def test_stored_bytes_grow_as_the_closed_forms_say():
    """Linear without checkpointing and by groups of one (with the slope of one input), by the
    logarithm recursively.
    """
    model = replace(SMALL, context_length=256)
    block = sum(block_saved_bytes(model, 2, attention="reference").values())
    stream = 2 * 256 * 32 * 4
    for layers in (4, 8):
        growth = {
            how: stored_bytes(how, 2 * layers) - stored_bytes(how, layers)
            for how in ("none", "1", "recursive")
        }
        assert growth == {"none": layers * block, "1": layers * stream, "recursive": stream}
        assert (
            grouped_bytes(2 * layers, 1, stream, block) - grouped_bytes(layers, 1, stream, block)
            == growth["1"]
        )
        assert (
            recursive_bytes(2 * layers, stream, block) - recursive_bytes(layers, stream, block)
            == stream
        )


def test_asymptotics():
    for num_blocks in (4, 64, 1024):
        best = best_blocks_per_group(num_blocks, 1.0, 1.0)
        root = math.isqrt(num_blocks)
        assert grouped_bytes(num_blocks, root, 1.0, 1.0) == 2 * root
        assert 2 * root - 1 <= grouped_bytes(num_blocks, best, 1.0, 1.0) <= 2 * root, (
            "a shorter last group saves one"
        )
        assert recursive_bytes(num_blocks, 1.0, 1.0) == math.log2(num_blocks) + 1
    assert recursive_bytes(1, 1.0, 1.0) == 1 and recursive_bytes(5, 1.0, 1.0) == 4
    assert grouped_bytes(10, 4, 1.0, 100.0) == 402, (
        "the last group has two blocks, the one before four"
    )
    assert best_blocks_per_group(32, 80.0, 4132.0) == 1, "xl: a block saves fifty times its input"


def test_a_model_without_blocks_runs():
    """Recursion halved nothing for ever."""
    model = build_model(SMALL, device="cpu")
    model.layers = nn.ModuleList()
    apply_checkpointing(model, "recursive")
    assert model(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, SMALL.vocab_size)


def test_bad_checkpointing_is_refused():
    model = build_model(SMALL, device="cpu")
    with pytest.raises(TypeError, match="model must be a TransformerLM, .*, got Linear"):
        apply_checkpointing(nn.Linear(2, 2), "recursive")
    message = r"one operator \(tiled, triton, hopper, sdpa\) to keep its output, got reference"
    with pytest.raises(ValueError, match=message):
        apply_checkpointing(model, "selective")
    for name in ("0", "two", "-1", "", 5, None):
        with pytest.raises(
            ValueError, match="must be none, recursive, selective or blocks per group, got"
        ):
            apply_checkpointing(model, name)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("checkpointing", ["1", "2", "recursive"])
def test_compiled_blocks_under_checkpoints_on_a_gpu(checkpointing):
    """Compiled inside, checkpointed outside: the gradients of the eager model."""
    results = []
    for compiled in (False, True):
        model = build_model(SMALL, device="cuda")
        if compiled:
            apply_checkpointing(model, checkpointing)
            compile_blocks(model)
        tokens = torch.randint(50, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()
        cross_entropy(model(tokens), tokens).backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*results):
        assert float((one - other).abs().max()) <= 1e-3 * float(one.abs().max())


@pytest.mark.gpu
@pytest.mark.alone
def test_a_pass_that_runs_out_of_memory_leaves_its_trace_and_the_memory(monkeypatch):
    """B1: what died is recorded up to there, the next cell finds as much memory as the first, and
    measures the same.
    """
    run = RunConfig(scale="handout", device="cuda")
    good = MemoryCase(
        model=replace(proxy_model("xl"), context_length=128), batch=1, attention="reference"
    )
    huge = replace(good, model=replace(good.model, context_length=131_072))
    measured_phases(good, "train_step", run)  # cuBLAS has its workspace from here on, and keeps it
    first = measured_phases(good, "train_step", run)
    release("cuda")
    before = torch.cuda.memory_allocated()
    broken = measured_phases(huge, "train_step", run)
    assert "out of memory" in broken.out_of_memory and list(broken.peak_bytes) == [START]
    assert broken.trace.num_events > 0
    del broken
    release("cuda")
    assert torch.cuda.memory_allocated() == before
    # The allocator hands a block out whole that would leave less than 1 MiB, so counts depend on
    # what was freed before.
    again = measured_phases(good, "train_step", run).peak_bytes
    assert again == pytest.approx(first.peak_bytes, rel=0.01)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("precision", [Precision(), AUTOCAST], ids=["float32", "autocast"])
@pytest.mark.parametrize("mode", PHASES)
def test_predictions_hold_on_a_gpu(mode, precision):
    run = RunConfig(scale="handout", device="cuda")
    model = replace(MODEL_SIZES["medium"], context_length=1024, num_layers=8)
    case = MemoryCase(model=model, batch=4, attention="reference", precision=precision)
    measured = measured_phases(case, mode, run)
    peak = max(measured.peak_bytes.values())
    assert measured.trace.peak_bytes() == pytest.approx(peak, rel=0.02)
    release("cuda")
    # what stays is cuBLAS's workspace, which no prediction counts
    peak -= torch.cuda.memory_allocated()
    assert simulated_trace(case, mode).peak_bytes() == pytest.approx(peak, rel=0.05)
    assert model_peak_bytes(case, mode) == pytest.approx(peak, rel=0.05)
    step = [phase.name for phase in measured.trace.phases]
    assert step == list(PHASES[mode]) and (mode == "forward" or STEP in step)


# Cells


def test_handout_grids_are_the_handouts():
    cases = [
        (cell.case, cell.rows[0].mode)
        for cell in PROFILING.cells(HANDOUT)
        if isinstance(cell.case, MemoryCase)
    ]
    assert {(case.model.name, case.batch) for case, _ in cases} == {("xl", 4)}
    for context in (128, 256, 512, 2048):
        found = {
            (mode, case.precision.autocast)
            for case, mode in cases
            if case.model.context_length == context
        }
        assert found == {(mode, autocast) for mode in PHASES for autocast in (None, "bfloat16")}
    checkpointed = [
        cell for cell in CHECKPOINTING.cells(HANDOUT) if isinstance(cell.case, MemoryCase)
    ]
    groups = {(cell.case.checkpointing, cell.implementation) for cell in checkpointed}
    assert {(size, how) for size in ("1", "2", "4") for how in ("eager", "compiled")} <= groups
    assert {("recursive", "eager"), ("selective", "eager"), ("none", "eager")} <= groups


@pytest.mark.parametrize("context, implementation", [(128, "eager"), (2048, "simulated")])
def test_a_blocks_gradients_are_read_off_the_published_timeline(context, implementation):
    """Where they are four matrices of attention and three of the feed-forward network: 400 MiB."""
    records = (
        Path(__file__).resolve().parents[1]
        / "results"
        / "nvidia-h200"
        / "records"
        / "memory_profiling.jsonl"
    )
    frame = load_frame(load("memory_profiling"), read_records(records))
    assert made_in_backward(frame, context, implementation) == pytest.approx(400, rel=0.01)


@pytest.mark.slow
def test_a_memory_cell_gives_all_its_rows():
    for experiment in (PROFILING, CHECKPOINTING):
        kinds = {
            (type(cell.case), cell.implementation, cell.rows[0].mode): cell
            for cell in experiment.cells(TINY)
        }
        for cell in kinds.values():
            rows = [
                measurement.row
                for measurement in experiment.measure(cell, TINY)
                if measurement.samples
            ]
            assert set(rows) == set(cell.rows), cell


def test_wrong_gradients_are_never_timed(monkeypatch):
    # not even equal gradients pass
    monkeypatch.setattr(gradient_checkpointing, "GRADIENT_TOLERANCE", -1.0)
    cell = next(cell for cell in CHECKPOINTING.cells(TINY) if cell.implementation == "eager")
    with pytest.raises(
        Disagreement, match="gradients under checkpointing differ by 0, more than -"
    ):
        next(CHECKPOINTING.measure(cell, TINY))


def test_a_users_own_model_is_simulated_but_not_checkpointed():
    run = replace(TINY, model="tests.broken_models:Bigram")
    cells = PROFILING.cells(run)
    cell = next(
        cell
        for cell in cells
        if cell.implementation == "simulated" and isinstance(cell.case, MemoryCase)
    )
    assert all(measurement.samples for measurement in PROFILING.measure(cell, run))
    checkpointed = next(
        cell for cell in CHECKPOINTING.cells(run) if getattr(cell.case, "checkpointing", "") == "2"
    )
    with pytest.raises(Unsupported, match="model must be a TransformerLM"):
        list(CHECKPOINTING.measure(checkpointed, run))


# Command line


def test_a_laptop_answers_whether_a_model_fits():
    arguments = ("memory", "--model", "small", "--context", "512", "--batch", "2")
    fits = invoke(*arguments, "--fits", "80gb")
    assert (
        fits.exit_code == 0 and "fits in 80gb: peak " in fits.output and "backward" in fits.output
    )
    does_not = invoke(*arguments, "--fits", "1GiB", "--checkpoint", "1")
    assert does_not.exit_code == 1 and "does not fit in 1GiB: peak " in does_not.output
